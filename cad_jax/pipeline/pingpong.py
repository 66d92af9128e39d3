"""Ping-pong: two nano-batches alternate, so that one's rows travel while the other's are computed.

    forward, layer i                              backward, layer i
    dispatch pong   | attend ping                                | block i-1 ping, forward again
    combine ping    | attend pong                 dispatch ping  | block i-1 pong, forward again
    combine pong    | block i, ping               dispatch pong  | attend ping, backward
    dispatch ping   | block i, pong               combine ping   | attend pong, backward
                                                  combine pong   | block i-1 ping, backward
                                                                 | block i-1 pong, backward

Block i is what lies between two attentions: the second half of layer i and the first half of layer
i+1. Every exchange is tied to the compute beside it by `lax.optimization_barrier` after both: XLA
then starts it before that compute and waits for it afterwards; left alone it makes half of them
synchronous. An exchange of several hops meets as many parts of the compute (heads of an attention,
rows of a block), a part a hop. The backward is written by hand, because the transpose of a tie does
not land where it hides anything. A layer's weights are gathered as one buffer beside an attention.

Kept for the backward, unless `pipeline.remat` says otherwise: each layer's input, out and lse; q, k
and v come from the block that the backward runs again anyway. Servers keep nothing.

Letters: N nano-batch rows of a rank, L layers of the stage, E embedding, H query heads, K key/value
heads, D head dim.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cad_jax.attention.differentiable import Settings
from cad_jax.layer import (
    POST_NAMES,
    PRE_NAMES,
    PostWeights,
    PreWeights,
    post_attention,
    post_shards,
    pre_attention,
    pre_shards,
)
from cad_jax.model_config import LlamaConfig
from cad_jax.parameters import Gather, Parallelism
from cad_jax.pipeline.exchanges import Exchanges
from cad_jax.pipeline.half_layers import (
    Layers,
    block_vjp,
    half_layers,
    layer_at,
    matrices_through,
    pull_parts,
    total,
)
from cad_jax.pipeline.parts import Part, beside, join_rows, row_parts
from cad_jax.pipeline.remat import Kept, Remat, Saved, keep, with_first
from cad_jax.sharding.tables import Tables

type Pair[X] = tuple[X, ...]  # of ping and of pong


@dataclass(frozen=True)
class PingPong:
    """The layers of one stage over two nano-batches, inside shard_map, manual over every axis."""

    config: LlamaConfig
    parallelism: Parallelism
    settings: Settings
    remat: Remat = "save_attention"

    @property
    def exchanges(self) -> Exchanges:
        config = self.config
        return Exchanges(self.settings, config.num_q_heads, config.num_kv_heads)

    @property
    def gather(self) -> Gather:
        return Gather.of(self.config, self.parallelism)

    def forward(
        self, layers: Layers, xs: Pair, positions: Pair, tables: Pair[Tables]
    ) -> tuple[Pair, Pair[Kept]]:
        """xs [N, E], positions int32 [N] and tables of ping and pong -> the stage's outputs, and
        what their backward needs."""
        xs, inputs, saved = self._forward(layers, xs, positions, tables)
        kept = zip(inputs, saved, strict=True)
        return xs, tuple(keep(self.remat, *nano) for nano in kept)

    def backward(
        self,
        layers: Layers,
        xs: Pair,
        kept: Pair[Kept],
        d_xs_out: Pair,
        positions: Pair,
        tables: Pair[Tables],
    ) -> tuple[Pair, Any]:
        """Cotangents of the stage's outputs -> those of its inputs `xs`, and float32 gradients like
        `layers`."""
        if self.remat == "full":
            _, inputs, saved = self._forward(layers, xs, positions, tables)
        else:
            saved = tuple(nano.attention for nano in kept)
            later = tuple(nano.inputs for nano in kept)
            again = self.remat == "save_stage"
            inputs = self._inputs(layers, xs, saved) if again else tuple(map(with_first, xs, later))
        return self._backward(layers, inputs, saved, d_xs_out, positions, tables)

    def _inputs(self, layers: Layers, xs: Pair, saved: Pair[Saved]) -> Pair:
        """Every layer's inputs [L, N, E] again, from the stage's and the saved attention outputs."""

        def layer(xs: Pair, at: tuple[Layers, Pair]) -> tuple[Pair, Pair]:
            (post,), outs = self._whole(self._post_shards(at[0])), at[1]
            following = tuple(self._post(post, x, out) for x, out in zip(xs, outs, strict=True))
            return following, following

        # The last layer's output is of no use here.
        before = jax.tree.map(
            lambda a: a[:-1],
            ({name: layers[name] for name in POST_NAMES}, tuple(s.out for s in saved)),
        )
        return tuple(map(with_first, xs, lax.scan(layer, xs, before)[1]))

    def apply(self, layers: Layers, xs: Pair, positions: Pair, tables: Pair[Tables]) -> Pair:
        """`forward`'s outputs as a differentiable function that keeps every layer's input."""
        return _apply(self, layers, xs, positions, tables)

    # The pieces of a layer.

    def _pre(self, weights: PreWeights, x, positions):
        return pre_attention(self.config, self.parallelism, weights, x, positions)

    def _post(self, weights: PostWeights, x, out):
        return post_attention(self.config, self.parallelism, weights, x, out)

    def _enter(self, weights: tuple[PreWeights], x, positions):
        """The first half of the stage's first layer, as a block: x, q, k, v."""
        return x, *self._pre(weights[0], x, positions)

    def _block(self, weights: tuple[PostWeights, PreWeights], x, out, positions):
        """What lies between two attentions: the next layer's x, q, k, v."""
        x = self._post(weights[0], x, out)
        return x, *self._pre(weights[1], x, positions)

    def _pre_shards(self, layer: Layers) -> tuple[PreWeights]:
        return (pre_shards(self.config, self.parallelism, layer),)

    def _post_shards(self, layer: Layers) -> tuple[PostWeights]:
        return (post_shards(layer),)

    def _block_shards(self, layer: Layers, following: Layers) -> tuple[PostWeights, PreWeights]:
        return *self._post_shards(layer), *self._pre_shards(following)

    def _whole(self, halves: Any) -> Any:
        """Halves of layers as shards -> with whole weights in the compute dtype, one collective."""
        return matrices_through(self.gather.whole, halves)

    def _scattered(self, gradients: Any) -> Any:
        """Float32 gradients of whole weights -> of this device's shards, one collective."""
        return matrices_through(self.gather.scatter, gradients)

    # The loops.

    def _forward(self, layers: Layers, xs: Pair, positions: Pair, tables: Pair[Tables]):
        """Outputs of the stage, inputs of every layer [L, N, E], Saved; each a pair."""
        out_shares, home_shares = (
            self.exchanges.shares(tables[0], outward) for outward in (True, False)
        )
        first = self._whole(self._pre_shards(layer_at(layers, 0)))
        _, *ping = self._enter(first, xs[0], positions[0])
        buffers, parts, _ = beside(
            self.exchanges.dispatch(ping, tables[0]),
            row_parts(self._enter, first, (xs[1], positions[1]), out_shares),
        )
        _, *pong = join_rows(parts)

        def attention(buffers, pong, shards):
            """A layer's attentions: ping's out and lse, pong's on their way home, whole weights."""
            pong_buffers, parts, _ = beside(
                self.exchanges.dispatch(pong, tables[1]),
                self.exchanges.attend(buffers, tables[0], outward=True),
            )
            home, pong_parts, weights = beside(
                self.exchanges.combine(
                    self.exchanges.joined(parts, buffers, out_shares), tables[0]
                ),
                self.exchanges.attend(pong_buffers, tables[1], outward=False),
                also=Part(self._whole, (shards,)),
            )
            partials = self.exchanges.joined(pong_parts, pong_buffers, home_shares)
            return home, self.exchanges.combine(partials, tables[1]), weights

        def layer(carry, at):
            xs, buffers, pong = carry
            (out, lse), returning, weights = attention(buffers, pong, self._block_shards(*at))
            (pong_out, pong_lse), parts, _ = beside(
                returning, row_parts(self._block, weights, (xs[0], out, positions[0]), home_shares)
            )
            ping_x, *ping = join_rows(parts)
            buffers, parts, _ = beside(
                self.exchanges.dispatch(tuple(ping), tables[0]),
                row_parts(self._block, weights, (xs[1], pong_out, positions[1]), out_shares),
            )
            pong_x, *pong = join_rows(parts)
            kept = xs, (Saved(out, lse), Saved(pong_out, pong_lse))
            return ((ping_x, pong_x), buffers, tuple(pong)), kept

        blocks = half_layers(layers, slice(0, -1), slice(1, None))
        (xs, buffers, pong), (inputs, saved) = lax.scan(layer, (xs, buffers, tuple(pong)), blocks)
        (out, lse), returning, (weights,) = attention(
            buffers, pong, self._post_shards(layer_at(layers, -1))
        )
        (pong_out, pong_lse), parts, _ = beside(
            returning, row_parts(self._post, weights, (xs[0], out), home_shares)
        )
        after = join_rows(parts), self._post(weights, xs[1], pong_out)
        kept = xs, (Saved(out, lse), Saved(pong_out, pong_lse))
        inputs, saved = jax.tree.map(
            lambda before, last: jnp.concatenate((before, last[None])), (inputs, saved), kept
        )
        return after, inputs, saved

    def _backward(
        self,
        layers: Layers,
        inputs: Pair,
        saved: Pair[Saved],
        d_xs: Pair,
        positions: Pair,
        tables: Pair[Tables],
    ) -> tuple[Pair, Any]:
        """As `backward`, with every layer's input [L, N, E]."""

        number = inputs[0].shape[0]
        last = self._whole(self._post_shards(layer_at(layers, -1, POST_NAMES)))
        ends = [
            block_vjp(lambda w, x, out: self._post(w[0], x, out), last, x[-1], s.out[-1])[1](d_x)
            for x, s, d_x in zip(inputs, saved, d_xs, strict=True)
        ]
        d_last = total(d_weights for d_weights, *_ in ends)
        d_xs, d_outs = zip(*(end[1:] for end in ends), strict=True)

        # A block's weights arrive beside the attention before, its gradients leave beside the one
        # after: the last half layer counts as a block without a first half.
        blocks = half_layers(layers, slice(0, -1), slice(1, None))
        d_weights = (
            d_last[0],
            jax.tree.map(
                lambda shape: jnp.zeros(shape.shape, jnp.float32),
                jax.eval_shape(
                    lambda: self._whole(self._pre_shards(layer_at(layers, 0, PRE_NAMES)))[0]
                ),
            ),
        )

        def layer(carry, at):
            d_xs, d_outs, weights, d_following = carry
            before, xs, outs, kept = at
            d_weights, (ping, pong), arrived = self._layer_backward(
                self._block,
                weights,
                tuple(zip(xs, outs, positions, strict=True)),
                kept,
                (d_xs, d_outs),
                tables,
                before=Part(self._whole, (self._block_shards(*before),)),
                following=Part(self._scattered, (d_following,)),
            )
            d_xs, d_outs = zip(ping, pong, strict=True)
            return (d_xs, d_outs, arrived[0], d_weights), arrived[1]

        before, after = (
            jax.tree.map(lambda a, part=part: a[part], (inputs, saved))
            for part in (slice(0, -1), slice(1, None))
        )
        outs = tuple(kept.out for kept in before[1])
        # Of one layer there is no block: the loop does not run, whatever it starts from.
        post, pre = max(number - 2, 0), number - 1
        weights = self._whole(
            self._block_shards(layer_at(layers, post, POST_NAMES), layer_at(layers, pre, PRE_NAMES))
        )
        previous = jax.tree.map(lambda a: jnp.concatenate((a[:1], a[:-1])), blocks)
        (d_xs, d_outs, _, d_weights), d_blocks = lax.scan(
            layer,
            (d_xs, d_outs, weights, d_weights),
            (previous, before[0], outs, after[1]),
            reverse=True,
        )

        d_first, ((ping_x,), (pong_x,)), (_, d_block) = self._layer_backward(
            self._enter,
            self._whole(self._pre_shards(layer_at(layers, 0, PRE_NAMES))),
            tuple((x[0], p) for x, p in zip(inputs, positions, strict=True)),
            jax.tree.map(lambda a: a[0], saved),
            (d_xs, d_outs),
            tables,
            following=Part(self._scattered, (d_weights,)),
        )
        (d_enter,) = self._scattered(d_first)
        d_post, d_pre = (
            jax.tree.map(lambda one, more: jnp.concatenate((one[None], more)), *halves)
            for halves in zip(d_block, d_blocks, strict=True)
        )
        d_pre = jax.tree.map(
            lambda one, more: jnp.concatenate((one[None], more[:-1])), d_enter, d_pre
        )
        return (ping_x, pong_x), self._unsharded(layers, d_post, d_pre)

    def _unsharded(self, layers: Layers, d_post: PostWeights, d_pre: PreWeights) -> dict[str, Any]:
        """Gradients of the layers' halves as shards, stacked -> of the parameters, by name."""

        def of_layer(layer: Layers, d_post: PostWeights, d_pre: PreWeights):
            post, pre = ({n: layer[n] for n in names} for names in (POST_NAMES, PRE_NAMES))
            _, pull = jax.vjp(self._block_shards, post, pre)
            gradients = pull((d_post, d_pre))
            return gradients[0] | gradients[1]

        return jax.vmap(of_layer)(layers, d_post, d_pre)

    def _layer_backward(
        self, block, weights, operands, saved, cotangents, tables, before=None, following=None
    ):
        """One attention and the block before it, backward.

        block(weights, *operands) -> x, q, k, v of the layer, its positions the last operand; saved
        and cotangents (of x and of attention's out) are the layer's own. before, following: other
        collectives, each beside an attention. Returns float32 gradients of the whole
        weights, those of ping's and of pong's operands, and what (before, following) brought.
        """
        d_xs, d_outs = cotangents
        out_shares, home_shares = (
            self.exchanges.shares(tables[0], outward) for outward in (True, False)
        )
        again = partial(block_vjp, block)
        ping_parts = [part() for part in row_parts(again, weights, operands[0], home_shares)]
        _, *ping = join_rows([primal for primal, _ in ping_parts])
        buffers, pong_parts, _ = beside(
            self.exchanges.dispatch_bwd(tuple(ping), saved[0], d_outs[0], tables[0]),
            row_parts(again, weights, operands[1], out_shares),
        )
        _, *pong = join_rows([primal for primal, _ in pong_parts])
        pong_buffers, parts, arrived = beside(
            self.exchanges.dispatch_bwd(tuple(pong), saved[1], d_outs[1], tables[1]),
            self.exchanges.attend_bwd(buffers, tables[0], outward=True),
            also=before,
        )
        home, pong_gradients, left = beside(
            self.exchanges.combine_bwd(
                self.exchanges.joined_bwd(parts, buffers, out_shares), tables[0]
            ),
            self.exchanges.attend_bwd(pong_buffers, tables[1], outward=False),
            also=following,
        )
        returning = self.exchanges.combine_bwd(
            self.exchanges.joined_bwd(pong_gradients, pong_buffers, home_shares), tables[1]
        )
        pong_home, ping_pulled, _ = beside(
            returning, pull_parts(ping_parts, (d_xs[0], *home), home_shares)
        )
        pong_pulled = [part() for part in pull_parts(pong_parts, (d_xs[1], *pong_home), out_shares)]
        d_weights = total(d_w for d_w, *_ in (*ping_pulled, *pong_pulled))
        ping, pong = (
            join_rows([tuple(d_rows) for _, *d_rows in pulled])
            for pulled in (ping_pulled, pong_pulled)
        )
        return d_weights, (ping, pong), (arrived, left)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(stage: PingPong, layers, xs, positions, tables):
    return stage._forward(layers, xs, positions, tables)[0]


def _apply_fwd(stage: PingPong, layers, xs, positions, tables):
    xs, inputs, saved = stage._forward(layers, xs, positions, tables)
    return xs, (layers, inputs, saved, positions, tables)


def _apply_bwd(stage: PingPong, residuals, d_xs):
    layers, inputs, saved, positions, tables = residuals
    d_xs, d_layers = stage._backward(layers, inputs, saved, d_xs, positions, tables)
    return d_layers, d_xs, None, None


_apply.defvjp(_apply_fwd, _apply_bwd)
