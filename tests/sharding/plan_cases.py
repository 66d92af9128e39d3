"""Random valid plans, and by brute force over tokens what every server's buffers must hold of them.

Nothing here knows of intervals, units, routes or slots: tokens and sets only. Plans are random
rather than planned, so that servers are far from home, pieces are short, keys are split between
servers and anything a planner would never do still has to arrive.
"""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from cad_jax.sharding.plan import Plan
from cad_jax.sharding.required import required_capacities
from cad_jax.sharding.tasks import Capacities, HeadShape


def random_lengths(rng: np.random.Generator, pool_tokens: int) -> np.ndarray:
    """Documents of very different length, some empty, that leave some padding (or none)."""
    room = pool_tokens - int(rng.integers(0, pool_tokens // 3 + 1)) * int(rng.integers(0, 2))
    lengths = []
    while room > 0:
        longest = int(rng.choice([1, 5, 40, room]))
        lengths.append(min(int(rng.integers(0, longest + 1)), room))
        room -= max(lengths[-1], 1)
    return np.array(lengths, np.int64)


def random_starts(rng: np.random.Generator, lengths: np.ndarray, pool_tokens: int) -> np.ndarray:
    """First tokens, int64 [N], that spread the pool's padding at random before, between and after
    the documents."""
    padding = pool_tokens - int(lengths.sum())
    return np.cumsum(lengths) - lengths + np.sort(rng.integers(0, padding + 1, len(lengths)))


def random_tasks(
    rng: np.random.Generator, lengths: np.ndarray, servers: int, tokens: int,
    *, pieces: int, key_splits: bool, stay: float = 0.3, starts: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """int64 [n, 7]: every document cut at homes and at random tokens, every piece on a random
    server (its home with probability `stay`); with `key_splits` some pieces have their keys cut in
    two to four parts on different servers."""
    tasks = []
    starts = np.cumsum(lengths) - lengths if starts is None else starts
    for document, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if not length:
            continue
        ranks = np.arange(start // tokens + 1, (start + length - 1) // tokens + 1) * tokens - start
        cuts = rng.integers(1, length, rng.integers(0, pieces + 1)) if length > 1 else []
        bounds = np.unique(np.concatenate([[0, length], ranks, cuts]).astype(np.int64))
        for low, high in zip(bounds[:-1], bounds[1:], strict=True):
            home = (start + low) // tokens
            parts = min(int(rng.integers(2, 5)), servers, high) if key_splits else 1
            if parts > 1 and rng.random() < 0.5:
                inner = np.sort(rng.choice(np.arange(1, high), parts - 1, replace=False))
                key_bounds = [0, *inner, high]
                places = rng.permutation(servers)[:parts]
            else:
                key_bounds = [0, high]
                places = [home if rng.random() < stay else rng.integers(servers)]
            for k_low, k_high, place in zip(key_bounds[:-1], key_bounds[1:], places, strict=True):
                tasks.append([document, low, high, k_low, k_high, home, place])
    return np.array(tasks, np.int64).reshape(-1, 7)


def random_plan(
    seed: int, servers: int, tokens: int, heads: HeadShape, transport: str,
    *, pieces: int = 3, key_splits: bool = False, stay: float = 0.3,
    lengths: np.ndarray | None = None, roomy: bool = False, gaps: bool = False,
) -> Plan:  # fmt: skip
    """A checked plan with exactly the capacities it needs, or `roomy` ones; with `gaps` padding may
    lie anywhere."""
    rng = np.random.default_rng(seed)
    if lengths is None:
        lengths = random_lengths(rng, servers * tokens)
    starts = random_starts(rng, lengths, servers * tokens) if gaps else None
    tasks = random_tasks(
        rng, lengths, servers, tokens, pieces=pieces, key_splits=key_splits, stay=stay,
        starts=starts,
    )  # fmt: skip
    return plan_of(lengths, tasks, servers, tokens, heads, transport, roomy=roomy, starts=starts)


def plan_of(lengths, tasks, servers, tokens, heads, transport, *, roomy=False, starts=None) -> Plan:
    """A checked plan of these tasks, with the capacities it needs."""
    unlimited = no_capacities(transport)
    starts = np.cumsum(lengths) - lengths if starts is None else starts
    plan = Plan(servers, tokens, lengths, tasks, 0.05, heads, unlimited, starts=starts)
    needed = required_capacities(plan, transport)
    if roomy:
        needed = Capacities(
            transport,
            **{
                name: tuple(x + 3 for x in value) if isinstance(value, tuple) else value + 2
                for name, value in needed.items()
            },
        )
    plan = dataclasses.replace(plan, capacities=needed)
    plan.check()
    return plan


def most_pairs(lengths, servers: int, tolerance: float) -> float:
    """Pairs that no server of a plan exceeds: (1 + tolerance) times the mean, or that much more than
    the mean as list scheduling ends within: the share of S - 1 in S of the costliest 128 rows."""
    mean = sum(n * (n + 1) // 2 for n in map(int, lengths)) / servers
    longest = max(map(int, lengths), default=0)
    costliest = sum(range(max(longest - 128, 0) + 1, longest + 1))
    return max((1 + tolerance) * mean, math.ceil(mean + (1 - 1 / servers) * costliest))


def no_capacities(transport: str) -> Capacities:
    """That hold nothing."""
    hops = {"direct": 1, "relay": 2, "ragged": 1}[transport]
    units = (0, 0) if transport == "ragged" else (0,) * hops
    return Capacities(transport, 0, 0, units, units, (0,) * hops, (0,) * hops, 0, 0, 0)


@dataclass
class Buffers:
    """What a server must hold: global token of each query and key buffer row, and per query row the
    global tokens it attends there."""

    query: list[int]
    key: list[int]
    attends: list[set[int]]


def expected_buffers(plan: Plan) -> list[Buffers]:
    """By brute force, per server."""
    starts = plan.starts
    servers = [Buffers([], [], []) for _ in range(plan.servers)]
    for buffers, server in zip(servers, range(plan.servers), strict=True):
        mine = plan.tasks[plan.tasks[:, 6] == server].tolist()
        rows, keys = {}, set()
        for document, q_start, q_stop, k_start, k_stop, _, _ in mine:
            start = int(starts[document])
            keys |= set(range(start + k_start, start + k_stop))
            for q in range(q_start, q_stop):
                seen = range(start + k_start, start + min(k_stop, q + 1))
                rows[start + q] = set(seen)
        buffers.query, buffers.key = sorted(rows), sorted(keys)
        buffers.attends = [rows[token] for token in buffers.query]
    return servers
