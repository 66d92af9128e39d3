"""The laid out arrays, obeyed by a simulation in numpy, must fill every buffer as brute force over
tokens says; and nothing else about them may matter."""

import dataclasses

import numpy as np
import pytest

from cad_jax.sharding.layout import RaggedHop, lay_out
from cad_jax.sharding.routing import TRANSPORTS
from cad_jax.sharding.tasks import HeadShape
from tests.sharding.plan_cases import expected_buffers, plan_of, random_plan

HEADS = [HeadShape(h, k, 4) for h, k in ((8, 2), (4, 4), (8, 1), (6, 3), (5, 1))]
Q, KV = 0, 1


def label(family, token, unit, server=0):
    """One positive number for each unit there is; 0 is an empty slot."""
    token, unit = np.broadcast_arrays(token, unit)
    return ((server * 2 + family) * 10**6 + token) * 64 + unit + 1


def expand(runs, length):
    index = np.full(length, -1)
    for target, source, units in runs.tolist():
        for i in range(units):
            assert target + i < length and index[target + i] == -1
            index[target + i] = source + i
    return index


def gather(values, index):
    return np.append(values, 0)[index]  # -1 picks the 0


def across(hop, send):
    """What every rank receives of the ranks' send buffers."""
    if isinstance(hop, RaggedHop):
        blocks = hop.blocks
        slots = hop.receive_extent.shape[1]
        return push(send, slots, blocks.send_first, blocks.send_sizes, blocks.lands_at)
    peers, capacity = hop.extent.shape[1:3]
    return send.reshape(peers, peers, capacity).swapaxes(0, 1).reshape(peers, -1)


def back_across(hop, received):
    """What every rank's send buffer gets back, in the slots it sent from."""
    if isinstance(hop, RaggedHop):
        blocks = hop.blocks
        slots = hop.send_extent.shape[1]
        return push(received, slots, blocks.receive_first, blocks.receive_sizes, blocks.came_from)
    return across(hop, received)


def push(buffers, slots, first, sizes, lands_at):
    """Rank by rank and peer by peer: a slice of the rank's buffer into the peer's, never over
    another."""
    result = np.zeros((len(buffers), slots), np.int64)
    taken = np.zeros(result.shape, bool)
    for rank in range(len(buffers)):
        for peer in range(len(buffers)):
            size, start, target = (int(x[rank, peer]) for x in (sizes, first, lands_at))
            assert start >= 0 and start + size <= buffers.shape[1]
            assert target >= 0 and target + size <= slots
            assert not taken[peer, target : target + size].any()
            taken[peer, target : target + size] = True
            result[peer, target : target + size] = buffers[rank, start : start + size]
    return result


def exchange(hops, at_hand):
    """Obeys the hops: what every rank has received after the last one, and the send index of each."""
    sends = []
    for hop in hops:
        index = [expand(runs, hop.send_slots) for runs in hop.runs]
        send = np.stack([gather(a, i) for a, i in zip(at_hand, index, strict=True)])
        at_hand = across(hop, send)
        sends.append(index)
    return at_hand, sends


def give_back(hops, sends, grads):
    """Runs the hops backward for labels that travelled once: what every rank's first hop gets."""
    for number in reversed(range(len(hops))):
        index = sends[number]
        grads = back_across(hops[number], np.stack(grads))
        if number:
            before = hops[0].extent.shape[1] * hops[0].extent.shape[2]
            back = np.zeros((len(grads), before), np.int64)
            for rank in range(len(grads)):
                held = index[rank] >= 0
                back[rank, index[rank][held]] = grads[rank][held]
            grads = back
    return grads


def check_by_simulation(plan, arrays):
    size, tokens, heads, limits = plan.servers, plan.tokens_per_server, plan.heads, plan.capacities
    uq, ukv = heads.q_units, heads.kv_units
    row = np.arange(tokens)[:, None]
    own_q = [label(Q, rank * tokens + row, np.arange(uq)).ravel() for rank in range(size)]
    own_kv = [label(KV, rank * tokens + row, np.arange(ukv)).ravel() for rank in range(size)]
    own = [np.concatenate(pair) for pair in zip(own_q, own_kv, strict=True)]
    received, _ = exchange(arrays.dispatch, own)
    received_out, sends_out = exchange(arrays.output, own_q)

    expected, computes, outputs = expected_buffers(plan), {}, []
    for server, buffers in enumerate(expected):
        query, key = np.array(buffers.query, int)[:, None], np.array(buffers.key, int)[:, None]
        want_q = np.zeros(limits.query_rows * uq, np.int64)
        want_q[: query.size * uq] = label(Q, query, np.arange(uq)).ravel()
        want_kv = np.zeros(limits.key_rows * ukv, np.int64)
        want_kv[: key.size * ukv] = label(KV, key, np.arange(ukv)).ravel()
        index = expand(arrays.assemble[server], len(want_q) + len(want_kv))
        got = gather(np.concatenate([own[server], received[server]]), index)
        np.testing.assert_array_equal(got, np.concatenate([want_q, want_kv]))
        index = expand(arrays.assemble_output[server], len(want_q))
        got = gather(np.concatenate([own_q[server], received_out[server]]), index)
        np.testing.assert_array_equal(got, want_q)

        k_lo, k_hi = arrays.k_lo[server], arrays.k_hi[server]
        for i, seen in enumerate(buffers.attends):
            assert set(buffers.key[k_lo[i] : k_hi[i]]) == seen
            computes.setdefault(buffers.query[i], []).append(server)
        assert np.all(k_lo[k_lo == k_hi] == 0)
        assert not k_hi[len(buffers.attends) :].any()

        # Outputs: every unit of the query buffer, marked with its server.
        out = np.where(want_q > 0, want_q + server * 2 * 10**6 * 64, 0)
        back = np.zeros(len(own_q[server]) + len(received_out[server]), np.int64)
        held = index >= 0
        back[index[held]] = out[held]
        outputs.append((out, back[len(own_q[server]) :]))

    returned = give_back(arrays.output, sends_out, [back for _, back in outputs])
    for home in range(size):
        sources = np.concatenate([outputs[home][0], returned[home]])
        for level in range(limits.partials):
            want = np.zeros((tokens, uq), np.int64)
            for token in range(home * tokens, (home + 1) * tokens):
                servers = computes.get(token, [])
                if level < len(servers):
                    want[token - home * tokens] = label(Q, token, np.arange(uq), servers[level])
            index = expand(arrays.merge[home, level], tokens * uq)
            np.testing.assert_array_equal(gather(sources, index), want.ravel())


@pytest.mark.parametrize("key_splits", [False, True], ids=["whole_keys", "split_keys"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_row_lands_where_it_must(transport, key_splits):
    for seed in range(24):
        rng = np.random.default_rng([3, seed])
        plan = random_plan(
            seed,
            servers=int(rng.choice([1, 2, 3, 4, 8])),
            tokens=int(rng.integers(1, 48)),
            heads=HEADS[seed % len(HEADS)],
            transport=transport,
            key_splits=key_splits,
            roomy=bool(seed % 2),
        )
        check_by_simulation(plan, lay_out(plan))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_padding_may_lie_anywhere(transport):
    """Documents with gaps before, between and after them, within ranks and over whole ones."""
    gapped = 0
    for seed in range(16):
        rng = np.random.default_rng([5, seed])
        plan = random_plan(
            seed,
            servers=int(rng.choice([2, 3, 4, 8])),
            tokens=int(rng.integers(4, 40)),
            heads=HEADS[seed % len(HEADS)],
            transport=transport,
            key_splits=bool(seed % 2),
            gaps=True,
        )
        ends = np.append(0, plan.starts + plan.lengths)
        gapped += bool(np.any(plan.starts > ends[:-1]))
        check_by_simulation(plan, lay_out(plan))
    assert gapped >= 6


def test_more_servers_than_bits():
    """Destination sets that differ only beyond the 64th server are different sets."""
    plan = random_plan(2, 70, 6, HEADS[3], "relay", pieces=2, stay=0.0)
    assert np.any(plan.tasks[:, 6] >= 64)
    check_by_simulation(plan, lay_out(plan))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    "lengths",
    [[], [0, 0], [1], [32], [0, 9, 0, 0, 3], [7, 0, 1, 24], [8, 8, 8, 8], [9, 8, 7]],
    ids=str,
)
def test_edges(lengths, transport):
    """Nothing, empty documents, one token, one document, ranks that hold padding only."""
    lengths = np.array(lengths, np.int64)
    for stay in (0.0, 1.0):
        plan = random_plan(1, 4, 8, HEADS[0], transport, lengths=lengths, stay=stay)
        arrays = lay_out(plan)
        check_by_simulation(plan, arrays)
        moves = bool(np.any(plan.tasks[:, 5] != plan.tasks[:, 6]))
        crosses = any(
            k // 8 != b_server
            for b_server, b in enumerate(expected_buffers(plan))
            for k in b.key
        )  # fmt: skip
        assert arrays.travels.tolist() == [int(moves or crosses)] * 4


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_host_builds_its_own_part(transport):
    plan = random_plan(11, 8, 29, HEADS[3], transport, key_splits=True)
    whole = lay_out(plan)
    for ranks in ([0, 1, 2, 3], [4, 5, 6, 7], [5], [6, 2]):
        part = lay_out(plan, ranks)
        for want, got in zip(leaves(whole), leaves(part), strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want[ranks])


def leaves(arrays) -> list[np.ndarray]:
    if not isinstance(arrays, tuple):
        return [arrays]
    return [leaf for part in arrays for leaf in leaves(part)]


@pytest.mark.parametrize("transport", ["relay", "ragged"])
def test_shapes_depend_on_capacities_alone(transport):
    """Documents of other lengths and number give arrays of the same shapes: nothing recompiles."""
    plans = [random_plan(seed, 4, 31, HEADS[0], transport) for seed in range(6)]
    most = {}
    for name, _ in plans[0].capacities.items():
        values = np.array([getattr(p.capacities, name) for p in plans]).max(0)
        most[name] = tuple(values.tolist()) if values.ndim else int(values)
    roomy = dataclasses.replace(plans[0].capacities, **most)
    shapes = set()
    for plan in plans:
        arrays = lay_out(dataclasses.replace(plan, capacities=roomy))
        shapes.add(tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves(arrays)))
    assert len(shapes) == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_short_is_refused(transport):
    plan = random_plan(3, 4, 40, HEADS[0], transport, key_splits=True)
    needs = plan.capacities
    for name, value in needs.items():
        for hop in range(len(value)) if isinstance(value, tuple) else (None,):
            if hop is None:
                short, flat, limit = value - 1, name, value - 1
            else:
                short = tuple(x - (i == hop) for i, x in enumerate(value))
                parts = ("sent", "received") if transport == "ragged" else ("hop1", "hop2")
                part = parts[hop] if name.endswith("_units") else f"hop{hop + 1}"
                flat, limit = f"{name}_{part}", value[hop] - 1
            tight = dataclasses.replace(
                plan, capacities=dataclasses.replace(needs, **{name: short})
            )
            with pytest.raises(ValueError) as error:
                lay_out(tight)
            message = str(error.value)
            assert f"{flat} {limit + 1}" in message and f"capacity is {limit}" in message
            assert f"raise {flat} to at least {limit + 1}" in message


@pytest.mark.parametrize("ranks", [[0, 0], [4], [-1]], ids=str)
def test_ranks_must_be_ranks(ranks):
    plan = random_plan(3, 4, 8, HEADS[0], "direct")
    with pytest.raises(ValueError, match=r"distinct and in \[0, 4\)"):
        lay_out(plan, ranks)


def test_touching_tasks_of_two_documents():
    """A piece of one document and one of the next on one server: rows follow on, keys do not mix."""
    tasks = np.array([[0, 0, 5, 0, 5, 0, 1], [1, 0, 3, 0, 3, 0, 1], [1, 3, 8, 0, 8, 1, 1]])
    plan = plan_of(np.array([5, 8]), tasks, 2, 8, HEADS[0], "direct")
    arrays = lay_out(plan)
    check_by_simulation(plan, arrays)
    assert arrays.k_lo[1].tolist() == [0] * 5 + [5] * 8
    assert arrays.k_hi[1].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert plan.capacities.dispatch_runs == (2,)  # all queries one run, all keys another
