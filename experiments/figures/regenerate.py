"""Regenerates every simulated figure: one CSV each, and a Markdown table of published against ours.

    python -m experiments.figures.regenerate [--batches 30] [--out experiments/results/simulated]

Writes OUT/*.csv and OUT/README.md. Host only; about half an hour on one core with 30 batches.
"""

import contextlib
import io
from importlib import import_module

from experiments.figures.common import arguments

SCRIPTS = (
    "window",
    "memory_and_gathers",
    "packing_limits",
    "tolerances",
    "shards",
    "distributed_attention",
    "sensitivity",
    "without_pipeline",
    "with_pipeline",
)


def main() -> None:
    args = arguments(__doc__)
    parts = []
    for name in SCRIPTS:
        print(name, flush=True)
        module = import_module(f"experiments.figures.{name}")
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            module.main()
        lines = [x for x in text.getvalue().splitlines() if not x.startswith("wrote ")]
        command = f"python -m experiments.figures.{name} --batches {args.batches}"
        parts += [
            f"## {(module.__doc__ or name).splitlines()[0]}",
            f"`{command}`",
            "",
            *_tables(lines),
            "",
        ]
    head = [
        "# Simulated figures, published against ours",
        "",
        f"Simulated, {args.batches} batches a row; intervals are 95%, paired bootstrap over batches.",
        "",
    ]
    (args.out / "README.md").write_text("\n".join(head + parts))
    print(f"wrote {args.out / 'README.md'}")


def _tables(lines: list[str]) -> list[str]:
    """Whole tables only: a script may print rows as it goes, before the table they end up in."""
    kept: list[str] = []
    for number, line in enumerate(lines):
        if line.startswith("|---"):
            if kept:
                kept.append("")
            kept.append(lines[number - 1])
            kept.append(line)
            for row in lines[number + 1 :]:
                if not row.startswith("|"):
                    break
                kept.append(row)
    return kept


if __name__ == "__main__":
    main()
