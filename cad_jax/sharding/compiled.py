"""The compiled functions that planning calls, cached on disk under a key of all their sources.

Numba's cache knows a function's own file alone, and would go on running what other files held when it
was compiled: after an upgrade hosts might plan differently. So only these entries are cached, and a
hash of every compiled module is part of their key, as a variable that they close over.
"""

import hashlib
from pathlib import Path

from numba import njit

from cad_jax.sharding import balance as prefix_search
from cad_jax.sharding import blocks as block_search
from cad_jax.sharding import cuts, fares, mending, needs, pieces, tasks, tiles

_MODULES = (prefix_search, block_search, cuts, fares, mending, needs, pieces, tasks, tiles)


def _sources() -> int:
    """A hash of the modules whose functions and constants are compiled."""
    digest = hashlib.sha256()
    for module in _MODULES:
        digest.update(Path(str(module.__file__)).read_bytes())
    return int.from_bytes(digest.digest()[:7], "little")


def _entries(sources: int):
    @njit(cache=True, error_model="numpy")
    def balance(pool, home_pieces, room, fill, weights, max_moves, sweeps):
        """See `balance.balance_once`."""
        _ = sources
        return prefix_search.balance_once(pool, home_pieces, room, fill, weights, max_moves, sweeps)

    @njit(cache=True, error_model="numpy")
    def best_balance(pool, home_pieces, room, fills, promised, sweeps, tries):
        """See `balance.best_balance` and `mending.mend`."""
        _ = sources
        pieces, state = prefix_search.best_balance(pool, home_pieces, room, fills, promised, sweeps)
        if pieces.shape[0] == 0:
            return pieces
        return mending.mend(pool, state, pieces, fills, promised, tries, sweeps)

    @njit(cache=True, error_model="numpy")
    def best_parts(tiles, rates, limits, parts_limit, rounds):
        """See `blocks.best_parts`."""
        _ = sources
        return block_search.best_parts(tiles, rates, limits, parts_limit, rounds)

    @njit(cache=True, error_model="numpy")
    def cut_tiles(lengths, starts, servers, tokens, tile_rows):
        """See `tiles.cut_tiles`."""
        _ = sources
        return tiles.cut_tiles(lengths, starts, servers, tokens, tile_rows)

    @njit(cache=True, error_model="numpy")
    def count_needs(tasks, starts, servers, tokens, q_units, kv_units, kind):
        """See `needs.count`."""
        _ = sources
        return needs.count(tasks, starts, servers, tokens, q_units, kv_units, kind)

    return balance, best_balance, best_parts, cut_tiles, count_needs


balance, best_balance, best_parts, cut_tiles, count_needs = _entries(_sources())
