"""The routes of the transports: which units every rank sends to whom, and where they lie in its buffers.

direct: one hop, every atom from its home to each of its servers, blocks padded to the largest.
ragged: the same blocks end to end, each at its own size. relay: hop 1 cuts each GROUP (equal home
and destination set) into S contiguous blocks whose sizes differ by at most one unit, block r going
to relay r; hop 2 takes the block from relay r to every server of the group. The odd units of
consecutive groups go to consecutive relays, so a home's hop 1 pairs differ by at most one unit and
hop 2 pairs stay level as well.

Shape letters: S servers, G groups.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from cad_jax.sharding.spreads import Spread
from cad_jax.sharding.traffic import Traffic, spread, sum_before, sum_by


class Sends(NamedTuple):
    """One hop's moves: on `rank`, `units` units from unit `source` to slot `slot` of the block for
    `peer`. Where the hop reads what an earlier hop received, `source` is a slot of the block from
    `source_peer`; else source_peer is None. `atom` (first hop): what the units are part of.
    """

    rank: np.ndarray
    peer: np.ndarray
    slot: np.ndarray
    source_peer: np.ndarray | None
    source: np.ndarray
    units: np.ndarray
    atom: np.ndarray | None


class Arrivals(NamedTuple):
    """What a server receives: `units` units in slot `slot` of the block from `peer`, units [offset,
    offset + units) of `atom`.
    """

    server: np.ndarray
    peer: np.ndarray
    slot: np.ndarray
    atom: np.ndarray
    offset: np.ndarray
    units: np.ndarray


class Slots(NamedTuple):
    """Where the blocks of a hop lie in the buffers of every rank, by (rank, peer), int64 [S, S]: the
    first slot of the block the rank sends the peer, and of the one it receives from the peer; and
    the slots of a whole buffer.
    """

    sent: np.ndarray
    received: np.ndarray
    send_slots: int
    receive_slots: int


def _padded_slots(units: tuple[int, ...], servers: int) -> tuple[Slots, ...]:
    """Blocks of one size, `units` by hop."""
    rank = np.arange(servers)
    first = [np.broadcast_to(rank * capacity, (servers, servers)) for capacity in units]
    return tuple(Slots(x, x, servers * c, servers * c) for x, c in zip(first, units, strict=True))


class DirectRoute:
    """One hop: every atom from its home straight to each of its servers."""

    def __init__(self, traffic: Traffic):
        self.traffic = traffic
        group, server = traffic.member_group, traffic.member_server
        self._pair = traffic.group_home[group] * traffic.servers + server
        self._atoms = np.diff(traffic.group_atoms)

    @cached_property
    def pair_units(self) -> tuple[np.ndarray, ...]:
        """Units each rank sends each peer, [S, S] per hop."""
        units = self.traffic.group_units[self.traffic.member_group]
        return (_table(self._pair, units, self.traffic.servers),)

    @property
    def required_units(self) -> tuple[int, ...]:
        """The least capacity of units."""
        return tuple(int(units.max()) for units in self.pair_units)

    def slots(self, units: tuple[int, ...]) -> tuple[Slots, ...]:
        """Where blocks lie under the capacity `units`, by hop."""
        return _padded_slots(units, self.traffic.servers)

    @cached_property
    def send_runs(self) -> tuple[np.ndarray, ...]:
        """Runs of each rank's send table, [S] per hop."""
        runs = self._atoms[self.traffic.member_group]
        return (_table(self._pair, runs, self.traffic.servers).sum(1),)

    @cached_property
    def arrival_runs(self) -> np.ndarray:
        """Runs each server receives, [S]."""
        runs = self._atoms[self.traffic.member_group]
        return _table(self._pair, runs, self.traffic.servers).sum(0)

    @cached_property
    def atom_runs(self) -> np.ndarray:
        """Runs each atom takes on its first hop to one peer, [A]."""
        return np.ones(len(self.traffic.units), np.int64)

    def sends(self, hop: int, ranks: np.ndarray) -> Sends:
        """The moves of `ranks`; hop is 0."""
        assert hop == 0
        moves, peers = self._moves(ranks, self.traffic.group_home[self.traffic.member_group])
        source = self.traffic.source[moves.atom]
        home = self.traffic.home[moves.atom]
        return Sends(home, peers, moves.slot, None, source, moves.units, moves.atom)

    def arrivals(self, ranks: np.ndarray) -> Arrivals:
        """What reaches `ranks`."""
        return self._moves(ranks, self.traffic.member_server)[0]

    def _moves(self, ranks, member_rank) -> tuple[Arrivals, np.ndarray]:
        traffic = self.traffic
        order = np.argsort(self._pair, kind="stable")
        group = traffic.member_group[order]
        slot = sum_before(traffic.group_units[group], self._pair[order])
        keep = np.isin(member_rank[order], ranks)
        group, slot, server = group[keep], slot[keep], traffic.member_server[order][keep]
        member, nth = spread(self._atoms[group])
        atom = traffic.group_atoms[group][member] + nth
        first = traffic.atom_first
        slot = slot[member] + first[atom] - first[traffic.group_atoms[group]][member]
        server = server[member]
        zero = np.zeros(len(atom), np.int64)
        return Arrivals(server, traffic.home[atom], slot, atom, zero, traffic.units[atom]), server


class RaggedRoute(DirectRoute):
    """The direct route with every block at its own size: they lie end to end, by peer."""

    @property
    def required_units(self) -> tuple[int, ...]:
        """What the busiest sender sends and the busiest receiver receives."""
        (pairs,) = self.pair_units
        return int(pairs.sum(1).max()), int(pairs.sum(0).max())

    def slots(self, units: tuple[int, ...]) -> tuple[Slots, ...]:
        (pairs,) = self.pair_units
        sent, received = np.cumsum(pairs, axis=1) - pairs, np.cumsum(pairs, axis=0) - pairs
        return (Slots(sent, received.T, *units),)


class RelayRoute:
    """Two hops: each group spread evenly over all ranks, then from these relays to every server of
    the group. Block sizes follow from a group's units alone, so that no table of groups by relays is
    made.
    """

    def __init__(self, traffic: Traffic):
        self.traffic = traffic
        self._spread = Spread.even(traffic.group_units, traffic.servers)
        groups = len(traffic.group_units)
        self._members = np.bincount(traffic.member_group, minlength=groups)

    @cached_property
    def pair_units(self) -> tuple[np.ndarray, ...]:
        traffic = self.traffic
        spread_out = self._spread.by_relay(traffic.group_home)
        brought = self._spread.of(traffic.member_group).by_relay(traffic.member_server)
        return spread_out, brought.T

    @property
    def required_units(self) -> tuple[int, ...]:
        return tuple(int(units.max()) for units in self.pair_units)

    def slots(self, units: tuple[int, ...]) -> tuple[Slots, ...]:
        return _padded_slots(units, self.traffic.servers)

    @cached_property
    def send_runs(self) -> tuple[np.ndarray, ...]:
        traffic, blocks = self.traffic, self._spread
        first = np.zeros(traffic.servers, np.int64)
        np.add.at(first, traffic.group_home, self._group_runs)
        full = blocks.base > 0  # every relay has a block of it
        thin = blocks.of(~full).odd_blocks(0, self._members[~full], 1)[0]
        return first, thin + self._members[full].sum()

    @cached_property
    def arrival_runs(self) -> np.ndarray:
        runs = self._group_runs[self.traffic.member_group]
        arrive = np.zeros(self.traffic.servers, np.int64)
        np.add.at(arrive, self.traffic.member_server, runs)
        return arrive

    @cached_property
    def atom_runs(self) -> np.ndarray:
        blocks, first = self._atom_spread, self._first_in_group
        units = self.traffic.units
        touched = blocks.relay_of(first + units - 1) - blocks.relay_of(first) + 1
        return np.where(blocks.base > 0, touched, units)  # without a base, blocks are units

    @cached_property
    def _atom_spread(self) -> Spread:
        """The spread of each atom's group, [A]."""
        atoms = np.diff(self.traffic.group_atoms)
        return self._spread.of(np.repeat(np.arange(len(atoms)), atoms))

    @cached_property
    def _first_in_group(self) -> np.ndarray:
        """Units of the group before each atom, [A]."""
        first = self.traffic.atom_first
        atoms = self.traffic.group_atoms
        return first - np.repeat(first[atoms[:-1]], np.diff(atoms))

    @cached_property
    def _group_runs(self) -> np.ndarray:
        """Pieces of each group: its atoms cut at block bounds, [G]."""
        return sum_by(self.atom_runs, self.traffic.group_atoms[:-1])

    def _pieces(self, atoms: np.ndarray) -> tuple[np.ndarray, ...]:
        """Atoms cut at block bounds, in order: (atom, offset in it, relay, slot in the block, units)."""
        owner, nth = spread(self.atom_runs[atoms])
        atom = atoms[owner]
        blocks, first = self._atom_spread.of(atom), self._first_in_group[atom]
        relay = np.where(
            blocks.base > 0, blocks.relay_of(first) + nth, blocks.relay_of(first + nth)
        )
        begin = blocks.before(relay)
        start = np.maximum(first, begin)
        stop = np.minimum(first + self.traffic.units[atom], begin + blocks.sizes(relay))
        return atom, start - first, relay, start - begin, stop - start

    def sends(self, hop: int, ranks: np.ndarray) -> Sends:
        """The moves of `ranks`: hop 0 home to relay, hop 1 relay to server."""
        traffic = self.traffic
        if hop == 0:
            atom, offset, relay, slot, units = self._pieces(
                np.flatnonzero(np.isin(traffic.home, ranks))
            )
            groups = np.flatnonzero(np.isin(traffic.group_home, ranks))
            sizes = self._spread.of((groups, None)).sizes(np.arange(traffic.servers))
            earlier = sum_before(sizes, traffic.group_home[groups])
            group = np.searchsorted(traffic.group_atoms, atom, side="right") - 1
            slot = earlier[np.searchsorted(groups, group), relay] + slot
            source = traffic.source[atom] + offset
            return Sends(traffic.home[atom], relay, slot, None, source, units, atom)
        sizes = self._spread.of(np.s_[:, None]).sizes(ranks)  # [G, ranks]
        came = sum_before(sizes, traffic.group_home)
        order = np.argsort(traffic.member_server, kind="stable")
        group, server = traffic.member_group[order], traffic.member_server[order]
        slot = sum_before(sizes[group], server)  # [P, ranks]
        member, column = np.nonzero(sizes[group])
        at = member, column
        group = group[member]
        return Sends(
            ranks[column], server[member], slot[at], traffic.group_home[group],
            came[group, column], sizes[group, column], None,
        )  # fmt: skip

    def arrivals(self, ranks: np.ndarray) -> Arrivals:
        """What reaches `ranks` from the relays."""
        traffic = self.traffic
        order = np.argsort(traffic.member_server, kind="stable")
        order = order[np.isin(traffic.member_server[order], ranks)]
        group, server = traffic.member_group[order], traffic.member_server[order]
        sizes = self._spread.of((group, None)).sizes(np.arange(traffic.servers))  # [P, S]
        slots = sum_before(sizes, server)
        atoms = np.diff(traffic.group_atoms)[group]
        owner, nth = spread(atoms)
        pieces, offset, relay, slot, units = self._pieces(traffic.group_atoms[group][owner] + nth)
        member = np.repeat(np.arange(len(group)), self._group_runs[group])
        slot = slots[member, relay] + slot
        return Arrivals(server[member], relay, slot, pieces, offset, units)


def _table(pair: np.ndarray, values: np.ndarray, servers: int) -> np.ndarray:
    table = np.zeros(servers * servers, np.int64)
    np.add.at(table, pair, values)
    return table.reshape(servers, servers)


type Route = DirectRoute | RelayRoute  # RaggedRoute is a DirectRoute
TRANSPORTS = {"direct": DirectRoute, "relay": RelayRoute, "ragged": RaggedRoute}
