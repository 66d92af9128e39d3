"""Exchanges of one nano-batch, and the attention beside the other's, in as many parts as they have hops.

Where tokens are split over tp (`Settings.head_axis`), turning tokens into heads is one more hop: the
first on the way out, the last on the way home.

Letters: N nano-batch rows of a rank, L layers of the stage, H query heads, K key/value heads, D head
dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax

from cad_jax.attention import cad
from cad_jax.attention.differentiable import Settings, output_delta
from cad_jax.attention.head_slices import heads_to_tokens, tokens_to_heads
from cad_jax.attention.merge import merge_partials
from cad_jax.pipeline.parts import HeadGroups, Part, padded
from cad_jax.pipeline.remat import Saved
from cad_jax.sharding import exchange
from cad_jax.sharding.exchange import Hops
from cad_jax.sharding.tables import Tables

# The hop between tokens and heads stays within a node: it needs little to hide behind.
HEAD_HOP_SHARE = 0.25


@dataclass(frozen=True)
class Exchanges:
    """Phases of one nano-batch inside shard_map; heads are the model's, of all tp devices."""

    settings: Settings
    num_q_heads: int
    num_kv_heads: int

    def dispatch(self, qkv: Sequence[jax.Array], tables: Tables) -> Hops:
        if self._splits_heads:
            qkv = yield from tokens_to_heads(qkv, self.settings.head_axis, "dispatch_fwd")
        q, k, v = qkv
        return (yield from exchange.dispatch_fwd(q, k, v, tables, self.settings.axis_names))

    def combine(self, partials: Sequence[jax.Array], tables: Tables) -> Hops:
        """Returns out [N, H, D] and lse of this device's heads."""
        out, lse = partials
        home = yield from exchange.combine_fwd(out, lse, tables, self.settings.axis_names)
        out, lse = merge_partials(*home)
        if self._splits_heads:
            heads = (self.num_q_heads,)
            (out,) = yield from heads_to_tokens(
                (out,), heads, self.settings.head_axis, "combine_fwd"
            )
        return out, lse

    def dispatch_bwd(self, qkv: Sequence[jax.Array], saved: Saved, d_out, tables: Tables) -> Hops:
        rows = *qkv, d_out, output_delta(saved.out, d_out)
        if self._splits_heads:
            rows = yield from tokens_to_heads(rows, self.settings.head_axis, "dispatch_bwd")
        q, k, v, d_out, delta = rows
        return (
            yield from exchange.dispatch_bwd(
                q, k, v, saved.lse, d_out, delta, tables, self.settings.axis_names
            )
        )

    def combine_bwd(self, gradients: Sequence[jax.Array], tables: Tables) -> Hops:
        dq, dk, dv = gradients
        rows = yield from exchange.combine_bwd(dq, dk, dv, tables, self.settings.axis_names)
        if self._splits_heads:
            heads = (self.num_q_heads, *(self.num_kv_heads,) * 2)
            rows = yield from heads_to_tokens(rows, heads, self.settings.head_axis, "combine_bwd")
        return tuple(rows)

    @property
    def _splits_heads(self) -> bool:
        return self.settings.head_axis is not None

    def shares(self, tables: Tables, outward: bool) -> tuple[float, ...]:
        """How much of the compute beside an exchange each of its hops gets."""
        hops = (1.0,) * len(tables.dispatch)
        if not self._splits_heads:
            return hops
        return (HEAD_HOP_SHARE, *hops) if outward else (*hops, HEAD_HOP_SHARE)

    def attend(self, buffers: Sequence[jax.Array], tables: Tables, outward: bool) -> list[Part]:
        """The kernel over a server's buffers, a group of heads a part, beside an exchange that goes
        out to servers or comes home."""
        shares = self.shares(tables, outward)
        groups = self._groups(buffers, shares)
        q, k, v = buffers
        operands = zip(groups.split(q), groups.split_keys(k), groups.split_keys(v), strict=True)
        run = partial(_attend_group, self.settings, tables)
        return padded([Part(run, group) for group in operands], len(shares))

    def attend_bwd(self, buffers: Sequence[jax.Array], tables: Tables, outward: bool) -> list[Part]:
        shares = self.shares(tables, outward)
        groups = self._groups(buffers, shares)
        q, k, v, *others = buffers
        keys, rest = map(groups.split_keys, (k, v)), map(groups.split, others)
        operands = zip(groups.split(q), *keys, *rest, strict=True)
        run = partial(_attend_bwd_group, self.settings, tables)
        return padded([Part(run, group) for group in operands], len(shares))

    def _groups(self, buffers: Sequence[jax.Array], shares: Sequence[float]) -> HeadGroups:
        q, k = buffers[:2]
        return HeadGroups.of(q.shape[1], k.shape[1], shares)

    def joined(self, parts: list, buffers: Sequence[jax.Array], shares) -> tuple:
        """Values of `attend`'s parts: a server's out and lse."""
        join = self._groups(buffers, shares).join
        return tuple(join(x) for x in zip(*filter(None, parts), strict=True))

    def joined_bwd(self, parts: list, buffers: Sequence[jax.Array], shares) -> tuple:
        """Values of `attend_bwd`'s parts: a server's dq, dk, dv."""
        groups = self._groups(buffers, shares)
        dq, dk, dv = zip(*filter(None, parts), strict=True)
        return groups.join(dq), groups.join_key_gradients(dk), groups.join_key_gradients(dv)


def _attend_group(settings: Settings, tables: Tables, q, k, v):
    return cad.attend(settings, q, k, v, tables)


def _attend_bwd_group(settings: Settings, tables: Tables, *operands: jax.Array):
    return cad.attend_bwd(settings, operands, tables)
