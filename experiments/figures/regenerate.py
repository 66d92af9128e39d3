"""Regenerates simulated figures into experiments/results/simulated: a CSV each, and README.md with a Markdown
table of published against ours.

    python -m experiments.figures.regenerate [FIGURE ..] [--batches N] [--out FOLDER]

Without names: all, the cheap ones first; README.md is written after each, so that what was done stays when
the rest is stopped. Sections of figures that are not named are kept. Host only. The last three run on all cores. On two
cores, and with their own numbers of batches, the first ones take about 6 minutes together, sensitivity 2, without_pipeline
and with_pipeline 15 to 30 each; what each took is in README.md.
"""

import argparse
import contextlib
import io
import os
import time
from importlib import import_module
from pathlib import Path

from experiments.figures.common import Arguments

RESULTS = Path(__file__).resolve().parents[1] / "results" / "simulated"
SCRIPTS = (
    "shards",
    "memory_and_gathers",
    "kernel_shards",
    "packing_memory",
    "wire_bytes",
    "window",
    "packing_limits",
    "distributed_attention",
    "tolerances",
    "sensitivity",
    "without_pipeline",
    "with_pipeline",
)
HEAD = """\
# Simulated figures, published against ours

Simulated on the host, nothing ran on a GPU; intervals are 95%, paired bootstrap over batches, but
of one_long in figures 9 and 10 the least and most batch, of prolong both halves. By
`python -m experiments.figures.regenerate`, or one by one with the commands below.
"""


def main() -> None:
    args = _arguments()
    readme = args.out / "README.md"
    sections = _sections(readme.read_text()) if readme.exists() else {}
    for name in args.figures or SCRIPTS:
        print(name, flush=True)
        module = import_module(f"experiments.figures.{name}")
        batches = min(args.batches or module.BATCHES, module.BATCHES or 0)
        text, began = io.StringIO(), time.perf_counter()
        with contextlib.redirect_stdout(text):
            module.main(Arguments(batches, args.out))
        seconds = time.perf_counter() - began
        command = f"python -m experiments.figures.{name}"
        if batches:
            command += f" --batches {batches}"
        about = (module.__doc__ or name).partition("\n\n")[0].replace("\n", " ")
        sections[name] = "\n".join(
            [f"## {about}", "", f"`{command}`, {seconds:.0f} s of wall time, {os.cpu_count()} cores", "",
             *_tables(text.getvalue().splitlines()), ""]
        )  # fmt: skip
        ordered = [sections[script] for script in SCRIPTS if script in sections]
        readme.write_text("\n".join([HEAD, *ordered]))
        print(f"wrote {readme} in {seconds:.0f} s", flush=True)


def _arguments() -> argparse.Namespace:
    about = " ".join((__doc__ or "").partition("\n\n")[0].split())
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument(
        "figures", nargs="*", metavar="FIGURE", help=f"of {', '.join(SCRIPTS)}; default: all"
    )
    parser.add_argument(
        "--batches", type=int, help="at most so many a row; default: each figure's own number"
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help=f"folder of all files; default: {RESULTS}"
    )
    args = parser.parse_args()
    unknown = [name for name in args.figures if name not in SCRIPTS]
    if unknown:
        parser.error(f"a figure must be one of {', '.join(SCRIPTS)}, got {unknown[0]}: name those")
    if args.batches is not None and args.batches < 1:
        parser.error(f"--batches must be at least 1, got {args.batches}: 1 shows no interval")
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def _sections(text: str) -> dict[str, str]:
    """The sections of a README written here, by the figure in their command."""
    parts = [f"## {part}" for part in f"\n{text}".split("\n## ")[1:]]
    return {
        name: part
        for part in parts
        for name in SCRIPTS
        if f"`python -m experiments.figures.{name}" in part
    }


def _tables(lines: list[str]) -> list[str]:
    """Whole tables only: a script may print rows as it goes, before the table they end up in."""
    kept: list[str] = []
    for number, line in enumerate(lines):
        if line.startswith("|---"):
            if kept:
                kept.append("")
            kept.append(lines[number - 1])
            kept.append(line)
            for row, below in zip(lines[number + 1 :], [*lines[number + 2 :], ""], strict=True):
                if not row.startswith("|") or below.startswith("|---"):  # another table's header
                    break
                kept.append(row)
    return kept


if __name__ == "__main__":
    main()
