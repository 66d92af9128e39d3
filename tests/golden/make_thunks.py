"""Writes tests/golden/thunks: what XLA dumps of a small program compiled for H200, without what no reader needs.

    python -m tests.golden.make_thunks        (in an environment with the extra aot, from the repository's root)

Made with jax 0.12.0.1. A newer XLA may schedule it otherwise: then recount the facts in test_thunks.py.
"""

import re
import tempfile
from pathlib import Path

import jax

from cad_jax.sharding.clusters import parse_topology
from cad_jax.topologies import compile_only_mesh
from cad_jax.xla_options import GPU_OPTIONS, WITHOUT_GPU
from tests.compile_cases import mixed

FOLDER = Path(__file__).parent / "thunks"


def trimmed_hlo(text: str) -> str:
    """Without backend settings but for the dims of products and trip counts, and without folders of sources."""
    lines = []
    for line in text.splitlines():
        head, config, rest = line.partition(", backend_config=")
        kept = re.findall(
            r'"known_trip_count":\{"n":"\d+"\}|"lhs_contracting_dimensions":\[[^\]]*\]', rest
        )
        head = re.sub(r", (operand_layout_constraints=\{.*?\}|api_version=\w+)(?=,|$)", "", head)
        head = re.sub(r'(metadata=\{[^}]*?) ?scheduling_name="[^"]*"', r"\1", head)
        if not re.search(r" (all-|collective-|custom-call|fusion|while|conditional)", head):
            head = re.sub(r", metadata=\{[^}]*\}", "", head)
        head = re.sub(r'^(\d+ ")/.*/', r"\1", head)
        lines.append(head + (f", backend_config={{{','.join(kept)}}}" if config and kept else ""))
    return "\n".join(lines) + "\n"


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    lowered = mixed(compile_only_mesh(parse_topology("h200:2x8"), 2, 4, 2))
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as dump:
        options = {**GPU_OPTIONS, **WITHOUT_GPU, "xla_dump_to": dump}
        compiled = lowered.compile(compiler_options=options)
        for name in ("thunk_sequence", "thunk_metadata"):
            (found,) = Path(dump).glob(f"*.{name}.txt")
            (FOLDER / f"{name}.txt").write_text(found.read_text())
    (FOLDER / "scheduled_hlo.txt").write_text(trimmed_hlo(compiled.as_text()))


if __name__ == "__main__":
    main()
