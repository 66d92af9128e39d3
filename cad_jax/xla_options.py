"""Options of XLA's GPU compiler that a run depends on, and the check that the installed version knows them."""

from collections.abc import Iterable, Mapping
from importlib.metadata import version

import jax

Value = bool | int | str
# Two collectives may be in flight at once: an exchange beside the all-reduce of tensor parallelism, a
# weight gather, or the send to the next pipeline stage.
GPU_OPTIONS: Mapping[str, Value] = {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}
# Besides, for the ragged exchange. A program with such a collective loses XLA's latency-hiding scheduler unless
# it is asked for, and with it every overlap. Across nodes XLA would make two or three dependent collectives of
# one, between nodes of whole buffers: all gathered, or padded to equal blocks. Left whole it sends exact sizes,
# by NCCL where no kernel within a node can. jaxlib 0.11 and 0.12 take all three.
RAGGED_OPTIONS: Mapping[str, Value] = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_unsupported_enable_ragged_all_to_all_multi_host_decomposer": False,
    "xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback": True,
}
# Without a GPU no tile sizes can be tried: products go to the vendor's library, as they mostly do with one.
WITHOUT_GPU: Mapping[str, Value] = {"xla_gpu_enable_triton_gemm": False}


def gpu_options(transports: Iterable[str | None]) -> dict[str, Value]:
    """Options of a step whose strategies exchange by these transports (None: by no plan)."""
    return {**GPU_OPTIONS, **(RAGGED_OPTIONS if "ragged" in transports else {})}


def parse_option(text: str) -> tuple[str, Value]:
    """ "name=value" -> name and value: true and false, whole numbers, or text.

    Raises:
        ValueError: there is no "=".
    """
    name, equals, value = text.removeprefix("--").partition("=")
    if not equals or not name:
        raise ValueError(
            f"an XLA option is NAME=VALUE, such as xla_gpu_enable_latency_hiding_scheduler=true, got "
            f"{text!r}: write it like that"
        )
    if value.lower() in ("true", "false"):
        return name, value.lower() == "true"
    return name, int(value) if value.lstrip("-").isdigit() else value


def check_options(options: Mapping[str, Value]) -> None:
    """Refuse options that the installed XLA does not take, by a compilation of nothing.

    Raises:
        ValueError: an option is unknown, or its value of the wrong kind.
    """
    nothing = jax.jit(lambda: 0).lower()
    for name, value in options.items():
        try:
            nothing.compile(compiler_options={name: value})
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).partition(": ")[2] or str(error)
            raise ValueError(
                f"XLA of jaxlib {version('jaxlib')} does not take the option {name}={value!r} ({reason}): "
                "correct it or leave it out"
            ) from error
