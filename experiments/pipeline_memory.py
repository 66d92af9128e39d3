"""Memory per device of the compiled `llama3_8b_h200` step by stages, microbatches, virtual stages and
remat policy, on 8 x 8 H200 that are not there.

    .venv-aot/bin/python experiments/pipeline_memory.py --lengths FILE

FILE has one document length a line, none above 128 Ki tokens. Ping-pong, tp 8 over tokens, 64 Ki
tokens a rank and nano-batch, dp = 8 / P; capacities at the 99.9th percentile of 200 plans. A line a
case goes to results/pipeline_memory.csv; an interrupted run goes on where it stopped. Nothing runs.
"""

import argparse
import dataclasses
import itertools
import sys
from functools import partial
from pathlib import Path

import jax
from case_table import Texts, fill

from cad_jax.compiled_step import compile_step, sample_documents
from cad_jax.recipes import llama3_8b_h200
from cad_jax.sharding.clusters import parse_topology
from cad_jax.xla_options import GPU_OPTIONS, WITHOUT_GPU

TOPOLOGY = parse_topology("h200:8x8")
NANO_TOKENS = 65_536  # of a rank
CASES = (
    (1, 4, 1, "save_attention"),
    *((2, 8, 1, remat) for remat in ("save_attention", "save_stage", "full")),
    *((4, 8, 1, remat) for remat in ("save_attention", "save_stage", "full")),
    (4, 2, 1, "save_attention"),
    (4, 16, 1, "save_attention"),
    (4, 8, 2, "save_attention"),
)
COLUMNS = (
    "stages",
    "microbatches",
    "virtual_stages",
    "remat",
    "stash_slots",
    "argument_gib",
    "temporary_gib",
    "peak_gib",
    "peak_of_device",
)


def measure(lengths: Path, case: tuple[int, int, int, str]) -> Texts:
    stages, microbatches, virtual_stages, remat = case
    recipe = llama3_8b_h200()
    dp = TOPOLOGY.nodes // stages
    config = dataclasses.replace(
        recipe,
        mesh=dataclasses.replace(recipe.mesh, pp=stages, dp=dp, virtual_stages=virtual_stages),
        training=dataclasses.replace(
            recipe.training,
            tokens_per_microbatch=dp * 2 * NANO_TOKENS,
            microbatches=microbatches,
            remat=remat,  # pyright: ignore[reportArgumentType]
        ),
    )
    config.check()
    documents = sample_documents(config, lengths)
    report = compile_step(config, TOPOLOGY, documents, {**GPU_OPTIONS, **WITHOUT_GPU})
    jax.clear_caches()
    schedule = config.schedule()
    sizes = report.argument_bytes, report.temp_bytes, report.peak_bytes
    return (
        str(schedule.slots if schedule else 0),
        *(f"{size / 2**30:.2f}" for size in sizes),
        f"{report.peak_bytes / report.device_bytes:.3f}",
    )


def start_worker() -> None:
    jax.config.update("jax_platforms", "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    results = Path(__file__).parent / "results/pipeline_memory.csv"
    parser.add_argument("--lengths", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=results)
    arguments = parser.parse_args()
    cases = {tuple(map(str, case)): case for case in CASES}
    lines = fill(
        arguments.out, COLUMNS, cases, partial(measure, arguments.lengths), start_worker, 1, 1
    )
    table = [COLUMNS, ("---",) * len(COLUMNS), *lines]
    sys.stdout.writelines(f"| {' | '.join(line)} |\n" for line in itertools.chain(table))


if __name__ == "__main__":
    main()
