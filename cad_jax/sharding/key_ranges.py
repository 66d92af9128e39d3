"""Balance by key sub-ranges: the search of `blocks`, on task arrays.

Shape letters: S servers, n tasks.
"""

import math

import numpy as np

from cad_jax.sharding.blocks import Limits
from cad_jax.sharding.compiled import best_parts, cut_tiles
from cad_jax.sharding.prefixes import PoolDocuments, join_tasks, load_bounds
from cad_jax.sharding.tasks import TILE_ROWS, sort_tasks
from cad_jax.sharding.tiles import Rates, part_tasks

ROUNDS = 8
TILES_PER_SERVER = 160  # square tiles of so many have the pairs of a server, at a tolerance of 0.05


def key_range_tasks(
    documents: PoolDocuments,
    tolerance: float,
    *,
    query_rows: np.ndarray,
    key_rows: int,
    partials: int,
) -> np.ndarray | None:
    """Tasks with key sub-ranges, int64 [n, 7], sorted; None where tiles cannot keep the bounds.

    query_rows: int64 [S], most query rows of each server; key_rows: most key rows of any. partials:
    servers that the keys of one query row may be divided among.
    """
    heads = documents.heads
    tile_pairs = documents.pairs // (documents.servers * TILES_PER_SERVER)
    tile_rows = max(math.isqrt(tile_pairs) // TILE_ROWS, 1) * TILE_ROWS
    tiles = cut_tiles(
        documents.lengths, documents.starts, documents.servers, documents.tokens_per_server,
        tile_rows,
    )  # fmt: skip
    bound = load_bounds(documents.pairs, documents.speeds, tolerance)
    rates = Rates(heads.q_units, heads.kv_units, documents.node)
    limits = Limits(bound, query_rows, key_rows)
    done, parts = best_parts(tiles, rates, limits, partials, ROUNDS)
    return join_tasks(sort_tasks(part_tasks(tiles, parts, documents.lengths))) if done else None
