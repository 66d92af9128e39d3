"""Varlen attention: one call computes all tasks of a server, with the kernel of the caller's choice.

Shape letters: CQ query-buffer rows, CK key-buffer rows, H query heads, K key/value heads, D head dim.

| kernel | where | |
|---|---|---|
| reference | anywhere | dense float32, the meaning of the op; CQ x CK memory |
| xla | anywhere | blockwise, linear memory; the fast one on CPU |
| triton | GPUs from Ampere on | Pallas through Triton; interpreted, slowly, on CPU |
| tokamax | Hopper GPUs | optional extra; 16-bit inputs |

`auto` looks at the process's default device: xla on CPU; on Hopper tokamax forward where it is installed
and triton backward (tokamax's backward visits tile pairs that no range holds), on other GPUs triton; xla
where those refuse. Name the kernel when compiling for a device that the process does not have.
"""

import importlib
from collections.abc import Iterator
from typing import Any

import jax

from cad_jax.attention.base import Kernel, KeyRanges

KERNEL_NAMES = ("auto", "reference", "xla", "triton", "tokamax")


def load_kernel(name: str) -> Kernel:
    """The implementation called `name`; its module, and what that depends on, is imported here first.

    Raises ValueError for a name that is not in the table, ImportError where an optional package is missing.
    """
    if name not in KERNEL_NAMES[1:]:
        raise ValueError(f"kernel must be one of {', '.join(KERNEL_NAMES)}; got {name!r}")
    try:
        module = importlib.import_module(f"cad_jax.attention.kernels.{name}")
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f"kernel {name!r} needs a package that does not import here ({error}); "
            f"install it with pip install 'cad-jax[{name}]', or choose kernel='auto'"
        ) from error
    return Kernel(module.forward, module.backward)


def _candidates(direction: str) -> tuple[str, ...]:
    device = jax.devices()[0]
    if device.platform != "gpu":
        return ("xla",)
    hopper = str(getattr(device, "compute_capability", "")).startswith("9.")
    return ("tokamax", "triton", "xla") if hopper and direction == "forward" else ("triton", "xla")


def _attempts(kernel: str, direction: str) -> Iterator[tuple[str, Kernel]]:
    if kernel != "auto":
        yield kernel, load_kernel(kernel)
        return
    for name in _candidates(direction):
        try:
            implementation = load_kernel(name)
        except ImportError:
            continue
        yield name, implementation


def _check_operands(q, k, v, ranges: KeyRanges) -> None:
    same = k.shape == v.shape and q.dtype == k.dtype == v.dtype and q.shape[2:] == k.shape[2:]
    if q.ndim != 3 or k.ndim != 3 or not same or q.shape[1] % k.shape[1]:
        raise ValueError(
            "q must be [CQ, H, D], k and v [CK, K, D] of one dtype with K dividing H; got "
            + ", ".join(f"{x.dtype}{list(x.shape)}" for x in (q, k, v))
        )
    if any(x.shape != q.shape[:1] for x in ranges):
        raise ValueError(
            f"ranges must hold one k_lo and one k_hi per query row, {q.shape[0]}; "
            f"got {[x.shape for x in ranges]}"
        )


def _run(kernel: str, direction: str, *operands):
    return _named(kernel, direction, *operands)[1]


def _named(kernel: str, direction: str, *operands) -> tuple[str, Any]:
    """The kernel that takes the operands, and what it returns."""
    refusals = []
    for name, implementation in _attempts(kernel, direction):
        try:
            with jax.named_scope(f"attention/{direction}"):
                return name, getattr(implementation, direction)(*operands)
        except NotImplementedError as refusal:
            refusals.append(f"{name}: {refusal}")
    raise ValueError(
        f"no kernel takes this attention {direction}; {'; '.join(refusals)}. "
        "kernel='xla' takes any device, dtype and head dim"
    )


def chosen_kernel(kernel: str, direction: str, *operands) -> str:
    """The kernel that computes a direction ("forward" | "backward"): what `auto` takes for these operands.

    operands: of `varlen_attention` or `varlen_attention_bwd`, or their `jax.ShapeDtypeStruct`s; nothing is
    computed. Raises as they do.
    """
    taken: list[str] = []

    def run(*operands):
        name, result = _named(kernel, direction, *operands, 1.0)
        taken.append(name)
        return result

    jax.eval_shape(run, *operands)
    return taken[0]


def varlen_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ranges: KeyRanges,
    *,
    kernel: str,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """softmax(scale q k^T) v over each query row's own key range.

    q [CQ, H, D]; k, v [CK, K, D] with K dividing H; `ranges` int32 [CQ] bounds into the key rows. Products
    take the input dtype, softmax and accumulation float32. `scale` defaults to D ** -0.5.
    Returns (out [CQ, H, D] in q's dtype, lse [CQ, H] float32, the log of the sum of exponentials); rows that
    attend nothing have out 0 and lse -inf. Rows that no range touches may hold anything.
    Not differentiable by JAX: a custom_vjp calls `varlen_attention_bwd`.

    Raises ValueError for operands that do not fit together, for an unknown kernel, and where the kernel (with
    `auto`: each candidate) refuses, with its reasons; ImportError where its package is missing.
    """
    _check_operands(q, k, v, ranges)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _run(kernel, "forward", q, k, v, ranges, scale)


def varlen_attention_bwd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    d_out: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    ranges: KeyRanges,
    *,
    kernel: str,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of `varlen_attention`: (dq, dk, dv) in the input dtypes, accumulated in float32.

    d_out [CQ, H, D] in q's dtype; lse [CQ, H] float32 of the whole softmax of a row (of all partial outputs, where
    its keys are split); delta [CQ, H] float32 = rowsum(d_out * out). Rows that attend nothing, and keys that
    nothing attends, get exact zeros. Raises as `varlen_attention` does.
    """
    _check_operands(q, k, v, ranges)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _run(kernel, "backward", q, k, v, d_out, lse, delta, ranges, scale)
