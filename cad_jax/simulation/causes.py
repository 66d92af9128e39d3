"""Costs that published measurements show and this project's model leaves out, each to be switched on by name. Host only."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Literal, NamedTuple

from cad_jax.simulation.setting import Setting

Name = Literal["copies", "slow_gathers", "slow_kernels"]

# Bytes of q, k and v of one window of the published measurements (Llama 3 8B, tp 8, a device): two
# nano-batches of 64 Ki tokens.
WINDOW_BYTES = 2 * 65_536 * (4 + 2) * 128 * 2
COPIES_S = 5e-3, 6e-3  # of a window, forward and backward
GATHER_SHARE = 0.55
SLOWDOWN = 1.31, 1.42


class Cause(NamedTuple):
    """switch_on: the setting with it. source: where its figures come from, or what they were fitted to."""

    switch_on: Callable[[Setting], Setting]
    source: str


def _copies(setting: Setting) -> Setting:
    forward, backward = COPIES_S
    return replace(setting, published_copy_byte_s=(forward / WINDOW_BYTES, backward / WINDOW_BYTES))


def _slow_gathers(setting: Setting) -> Setting:
    return replace(setting, gather_share=GATHER_SHARE)


def _slow_kernels(setting: Setting) -> Setting:
    forward, backward = SLOWDOWN
    grids = tuple(
        replace(g, forward_s=forward * g.forward_s, backward_s=backward * g.backward_s)
        for g in setting.costs.grids
    )
    return replace(setting, costs=replace(setting.costs, grids=grids))


CAUSES: Mapping[Name, Cause] = {
    "copies": Cause(
        _copies,
        "the published system copies rows into and out of its exchange buffers on the compute stream: 5 ms forward "
        "and 6 ms backward a window, measured in its repository; in proportion to bytes of q, k and v",
    ),
    "slow_gathers": Cause(
        _slow_gathers,
        "the baseline's all-gathers at 0.55 of 40 GB/s: fitted to 20 to 26 ms forward and 20 ms backward a window, "
        "measured in the same repository; its figure 3a asks for 0.85",
    ),
    "slow_kernels": Cause(
        _slow_kernels,
        "attention slower than the kernel's own benchmark, 1.31 times forward and 1.42 backward: fitted to 35 and "
        "104 ms a window; the system's other measurements contradict it",
    ),
}


def with_causes(setting: Setting, names: Iterable[Name]) -> Setting:
    """The setting with these of CAUSES switched on, every strategy alike where it is concerned.

    ValueError for an unknown one, and for one named twice.
    """
    names = tuple(names)
    if len(set(names)) < len(names):
        raise ValueError(
            f"causes must be named once each, got {' '.join(names)}: leave out the second"
        )
    for name in names:
        if name not in CAUSES:
            raise ValueError(
                f"a cause must be one of {', '.join(CAUSES)}, got {name!r}: name those"
            )
        setting = CAUSES[name].switch_on(setting)
    return setting
