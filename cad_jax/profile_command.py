"""`cad-jax profile`: what this machine's device takes for its work, into a CSV for the cost model."""

import os
from dataclasses import dataclass
from pathlib import Path

import jax
import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cad_jax.attention.varlen import KERNEL_NAMES
from cad_jax.command_line import check_number, check_outputs, run_command, writing
from cad_jax.profiler import SIZES, Dtype, collect, default_model, measurements
from cad_jax.sharding.cost import model_shape
from cad_jax.sharding.profile_table import AttentionRow, LinearRow, Profile, TransferRow
from cad_jax.timing import measure, pin_to_one_core

MAX_CPU_DEVICES = 256


@dataclass(frozen=True)
class ProfileArgs:
    """What to measure on the device this runs on, and where the figures go."""

    out: Path = Path("profile.csv")
    """Write the profile here."""
    quick: bool = False
    """A coarse grid, few rounds: a minute or two."""
    model: str | None = None
    """Heads and linear layers of this model, by name; llama3-8b on a GPU, a small one on CPU."""
    dtype: Dtype | None = None
    """bfloat16 or float32; bfloat16 on a GPU, float32 on CPU."""
    kernel: str = "auto"
    """Attention kernel, as in training."""
    cpu_devices: int = 2
    """On CPU: virtual devices, for the transports."""


def run(args: ProfileArgs, console: Console) -> Profile:
    """Measure, write, report.

    Raises:
        ValueError: arguments that fit nothing, a kernel that refuses, or a file that cannot be written; the
            message names the cure.
    """
    if args.kernel not in KERNEL_NAMES:
        raise ValueError(f"--kernel must be one of {', '.join(KERNEL_NAMES)}, got {args.kernel!r}")
    check_number(
        "--cpu-devices", args.cpu_devices, 1, MAX_CPU_DEVICES, "2 measures transports as well"
    )
    given = model_shape(args.model) if args.model else None
    check_outputs({"--out": args.out})
    jax.config.update("jax_num_cpu_devices", args.cpu_devices)
    pin_to_one_core()
    model, dtype = default_model()
    model, dtype = given or model, args.dtype or dtype
    sizes = SIZES["cpu" if jax.default_backend() == "cpu" else "gpu", args.quick]
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores at the start"
    note = f"medians of {sizes.rounds} interleaved rounds; {load}; linear layers of {model.name}"
    timed = measurements(model, dtype, args.kernel, sizes)
    works = [work for m in timed for work in m.works]
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("measuring", total=len(works) * (sizes.rounds + 1))
        measure(works, sizes.rounds, lambda: bar.advance(task))
    result = collect(timed, model, dtype, args.kernel, (note,))
    with writing(args.out) as path:
        result.save(path)
    console.print(table(result))
    console.print(f"wrote {args.out}")
    return result


def table(result: Profile) -> Table:
    """The best rates of each part, for people."""
    header = result.header
    shown = Table(title=f"{header.hardware}, {header.dtype}, kernel {header.kernel}")
    for name in ("part", "best", "least", "points"):
        shown.add_column(name, justify="left" if name == "part" else "right")

    def add(part: str, unit: str, rates: list[float]) -> None:
        if rates:
            shown.add_row(
                part, f"{max(rates):.3g} {unit}", f"{min(rates):.3g} {unit}", f"{len(rates)}"
            )

    tasks, linear = result.of(AttentionRow), result.of(LinearRow)
    for direction, flops_of in (("forward", 1.0), ("backward", 2.5)):
        add(
            f"attention {direction}",
            "GFLOP/s",
            [
                flops_of * 4e-9 * t.q_heads * t.head_dim * t.query_rows
                * (t.key_rows - (t.query_rows - 1) / 2) / getattr(t, f"{direction}_s")
                for t in tasks
            ],
        )  # fmt: skip
    for direction, flops_of in (("forward", 2e-9), ("backward", 4e-9)):
        add(
            f"linear {direction}",
            "GFLOP/s",
            [flops_of * r.weights * r.tokens / getattr(r, f"{direction}_s") for r in linear],
        )
    transfers = result.of(TransferRow)
    for transport in dict.fromkeys(t.transport for t in transfers):
        rates = [1e-9 * t.wire_bytes / t.transfer_s for t in transfers if t.transport == transport]
        add(f"transport {transport}", "GB/s", rates)
    shown.caption = "causal FLOPs of the pairs that count; measured"
    return shown


def main(arguments: list[str]) -> int:
    """Run `cad-jax profile`; returns the exit code."""
    args = tyro.cli(
        ProfileArgs,
        prog="cad-jax profile",
        description="Measure attention over query and key rows, linear layers over tokens and exchanges over "
        "bytes on the device this runs on, and write them as CSV for plans and simulations.",
        args=arguments,
    )
    return run_command("profile", lambda: run(args, Console()))
