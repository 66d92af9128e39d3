"""The demo's own batches: their planned attention work is as even as the planner promises."""

from dataclasses import replace

import numpy as np

from cad_jax.data import DocumentBatches
from cad_jax.launch import make_run_strategies
from cad_jax.recipes import stdlib_demo
from cad_jax.sharding.tasks import TILE_ROWS


def test_every_step_of_the_demo_is_balanced(tmp_path) -> None:
    """max/mean is at most 1.05, or what list scheduling with 128-row cuts ends within."""
    config = stdlib_demo()
    servers, tolerance = config.mesh.servers, config.attention.tolerance
    data = DocumentBatches(
        replace(config.data, cache_dir=str(tmp_path)), config.training.tokens_per_microbatch
    )
    strategy = make_run_strategies(config, data)[0]
    steps = data.sample_lengths(config.training.steps * config.training.microbatches)
    home, planned = [], []
    for lengths in steps:
        figures = strategy.prepare(lengths).figures
        mean_pairs = float(lengths @ (lengths + 1)) / 2 / servers
        longest = int(lengths.max())
        piece_pairs = sum(range(max(longest - TILE_ROWS, 0) + 1, longest + 1))
        bound = max(1 + tolerance, 1 + (1 - 1 / servers) * piece_pairs / mean_pairs)
        assert figures.fallback_tasks == 0
        assert figures.max_over_mean <= min(bound, figures.max_over_mean_home) + 1e-9
        home.append(figures.max_over_mean_home)
        planned.append(figures.max_over_mean)
    assert np.median(planned) < 1.1 < 1.3 < np.median(home)
