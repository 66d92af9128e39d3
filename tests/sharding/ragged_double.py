"""A stand-in for lax.ragged_all_to_all where the backend has none (CPU), by its documented meaning:

slice i of a caller's `operand` (from input_offsets[i], send_sizes[i] rows) goes to rank i //
slices_per_rank, which writes it into its own `output` from output_offsets[i] of the SENDER; rows that
nobody writes keep what `output` held. Everything is gathered to every rank: for tests only.

A call that breaks a rule of the real one (sizes both sides must agree on, slices within their arrays,
no two on the same rows) gives back POISON all over.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

POISON = 0x5A


def ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *,
    axis_name, axis_index_groups=None,
):  # fmt: skip
    """As lax.ragged_all_to_all, over whole axes."""
    assert axis_index_groups is None and operand.dtype == output.dtype
    assert operand.shape[1:] == output.shape[1:]
    vectors = (input_offsets, send_sizes, output_offsets, recv_sizes)
    assert len({(x.shape, x.dtype) for x in vectors}) == 1 and send_sizes.ndim == 1
    ranks, me = lax.axis_size(axis_name), lax.axis_index(axis_name)
    slices, rest = divmod(send_sizes.shape[0], ranks)
    assert slices and not rest

    def for_me(vector):
        """What every rank says of its slices to me, [ranks * slices] by rank."""
        gathered = lax.all_gather(vector, axis_name).reshape(ranks, ranks, slices)
        return gathered[:, me].reshape(-1)

    first, sizes, lands_at = map(for_me, (input_offsets, send_sizes, output_offsets))
    rows = jnp.arange(output.shape[0])
    past = rows[:, None] - lands_at[None]  # [output rows, slices]
    taken = (past >= 0) & (past < sizes[None])
    which = jnp.argmax(taken, axis=1)
    source = which // slices * operand.shape[0] + first[which] + rows - lands_at[which]
    everything = lax.all_gather(operand, axis_name, tiled=True)
    written = taken.any(axis=1).reshape(-1, *(1,) * (operand.ndim - 1))
    result = jnp.where(written, jnp.take(everything, source, axis=0, mode="clip"), output)
    wrong = (sizes < 0) | (first < 0) | (first + sizes > operand.shape[0]) | (sizes != recv_sizes)
    wrong |= (lands_at < 0) | (lands_at + sizes > output.shape[0])
    broken = wrong.any() | (taken.sum(axis=1) > 1).any()
    broken = lax.pmax(broken.astype(jnp.int32), axis_name) > 0
    return jnp.where(broken, jnp.full_like(result, POISON), result)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives jax.lax the stand-in for the time of a test; programs traced then do not outlive it."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
