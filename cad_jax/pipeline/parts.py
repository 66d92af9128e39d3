"""Compute in parts, and exchanges tied to them: a hop of an exchange hides behind one part.

A kernel call is cut into groups of heads (whole key heads with their queries; where there are too
few of those, query heads that share them), a block of a layer into ranges of rows. `shares` say how
much of the compute each hop gets.

Letters: R rows, H query heads, K key/value heads, D head dim.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cad_jax.sharding.exchange import Hops


class Part(NamedTuple):
    """A part of some compute: `run(*inputs)`."""

    run: Callable[..., Any]
    inputs: tuple[Any, ...]

    def __call__(self) -> Any:
        return self.run(*self.inputs)


def beside[R](
    hops: Hops[R], parts: Sequence[Part], also: Part | None = None
) -> tuple[R, list[Any], Any]:
    """An exchange with each of its hops tied to its own part of the compute.

    A part begins when its hop can be sent, and the next one when both are done: barriers before and
    after the two. `also`: another collective (a gather of weights) beside the last part. Returns
    the exchange's result, the parts' values and that of `also`.

    Raises:
        ValueError: there are not as many parts as hops.
    """
    tie = lax.optimization_barrier
    values, brought = [], None
    try:
        send = next(hops)
        for number, part in enumerate(parts):
            beside_it = also if number + 1 == len(parts) else None
            other = () if beside_it is None else beside_it.inputs
            send, inputs, other = tie((send, part.inputs, other))
            received = hops.send(send)
            if beside_it is not None:
                brought = beside_it.run(*other)
            received, value, brought = tie((received, part.run(*inputs), brought))
            values.append(value)
            send = hops.send(received)
    except StopIteration as end:
        if len(values) == len(parts):
            return end.value, values, brought
    raise ValueError(f"an exchange must have as many hops as there are parts (= {len(parts)})")


def row_parts(
    run: Callable[..., Any], weights: Any, rows: Sequence[Any], shares: Sequence[float]
) -> list[Part]:
    """`run(weights, *rows)` in ranges of the rows (arrays [R, ...])."""
    return [Part(run, (weights, *part)) for part in split_rows(rows, shares)]


def split_rows(rows: Sequence[Any], shares: Sequence[float]) -> list[tuple[Any, ...]]:
    """Arrays [R, ...] cut alike into ranges of rows, in proportion to `shares`."""
    total, bounds = rows[0].shape[0], [0]
    for stop in itertools.accumulate(shares):
        bounds.append(round(total * stop / sum(shares)))
    return [tuple(x[low:high] for x in rows) for low, high in itertools.pairwise(bounds)]


def join_rows(parts: Sequence[Any]) -> Any:
    """The inverse of `split_rows`, for equal pytrees of arrays."""
    return jax.tree.map(lambda *rows: jnp.concatenate(rows), *parts)


class HeadGroups(NamedTuple):
    """How heads are cut into groups: key heads with their queries or, where there are too few, the
    query heads of every key head; `sizes` of each group, in those."""

    sizes: tuple[int, ...]
    num_kv_heads: int
    by_key_head: bool

    @classmethod
    def of(cls, num_q_heads: int, num_kv_heads: int, shares: Sequence[float]) -> "HeadGroups":
        """Groups in proportion to `shares`; one group of all where the heads do not suffice."""
        group = num_q_heads // num_kv_heads
        by_key_head = num_kv_heads >= len(shares)
        heads = num_kv_heads if by_key_head else group
        if heads < len(shares):
            return cls((num_kv_heads,), num_kv_heads, True)
        sizes = [1] * len(shares)
        for _ in range(heads - len(shares)):
            most_missing = min(range(len(shares)), key=lambda i: sizes[i] / shares[i])
            sizes[most_missing] += 1
        return cls(tuple(sizes), num_kv_heads, by_key_head)

    def split(self, x: jax.Array) -> list[jax.Array]:
        """[R, H, ...] per query head -> a group's heads each."""
        grouped = self._grouped(x)
        parts = self._cut(grouped, 1 if self.by_key_head else 2)
        return [part.reshape(x.shape[0], -1, *x.shape[2:]) for part in parts]

    def join(self, parts: Sequence[jax.Array]) -> jax.Array:
        """The inverse of `split`."""
        if self.by_key_head:
            return jnp.concatenate(parts, axis=1)
        whole = jnp.concatenate([self._grouped(part) for part in parts], axis=2)
        return whole.reshape(whole.shape[0], -1, *whole.shape[3:])

    def split_keys(self, x: jax.Array) -> list[jax.Array]:
        """[R, K, D] of keys or values -> what each group attends."""
        return self._cut(x, 1) if self.by_key_head else [x] * len(self.sizes)

    def join_key_gradients(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Gradients of what `split_keys` gave: shared heads are summed in float32."""
        if self.by_key_head:
            return jnp.concatenate(parts, axis=1)
        return sum(x.astype(jnp.float32) for x in parts).astype(parts[0].dtype)  # pyright: ignore

    def _grouped(self, x: jax.Array) -> jax.Array:
        """[R, H', ...] -> [R, K, H' / K, ...]."""
        return x.reshape(x.shape[0], self.num_kv_heads, -1, *x.shape[2:])

    def _cut(self, x: jax.Array, axis: int) -> list[jax.Array]:
        bounds = list(itertools.accumulate(self.sizes))[:-1]
        return jnp.split(x, bounds, axis=axis) if bounds else [x]


def padded(parts: list[Part], number: int) -> list[Part]:
    """`parts`, preceded by empty ones where there are fewer than `number`."""
    return [Part(tuple, ())] * (number - len(parts)) + parts
