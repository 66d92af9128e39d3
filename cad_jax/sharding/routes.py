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

from cad_jax.sharding.traffic import Traffic, begins, spread, sum_before, sum_by


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
    the group.
    """

    def __init__(self, traffic: Traffic):
        self.traffic = traffic
        servers = traffic.servers
        base, odd = np.divmod(traffic.group_units, servers)
        turn = (np.cumsum(odd) - odd) % servers
        late = (np.arange(servers) - turn[:, None]) % servers
        self._sizes = base[:, None] + (late < odd[:, None])  # [G, S] units of each block
        self._members = np.diff(np.searchsorted(traffic.member_group, np.arange(len(base) + 1)))

    @cached_property
    def pair_units(self) -> tuple[np.ndarray, ...]:
        traffic, servers = self.traffic, self.traffic.servers
        spread_out = np.zeros((servers, servers), np.int64)
        homes, first = np.unique(traffic.group_home, return_index=True)
        if len(homes):
            spread_out[homes] = np.add.reduceat(self._sizes, first)
        needs = np.zeros((len(traffic.group_home), servers))  # float64: exact, and a BLAS product
        needs[traffic.member_group, traffic.member_server] = 1.0
        return spread_out, np.rint(self._sizes.T.astype(np.float64) @ needs).astype(np.int64)

    @property
    def required_units(self) -> tuple[int, ...]:
        return tuple(int(units.max()) for units in self.pair_units)

    def slots(self, units: tuple[int, ...]) -> tuple[Slots, ...]:
        return _padded_slots(units, self.traffic.servers)

    @cached_property
    def send_runs(self) -> tuple[np.ndarray, ...]:
        first = np.zeros(self.traffic.servers, np.int64)
        np.add.at(first, self.traffic.group_home, self._group_runs)
        return first, (self._sizes > 0).T.astype(np.int64) @ self._members

    @cached_property
    def arrival_runs(self) -> np.ndarray:
        runs = self._group_runs[self.traffic.member_group]
        arrive = np.zeros(self.traffic.servers, np.int64)
        np.add.at(arrive, self.traffic.member_server, runs)
        return arrive

    @cached_property
    def atom_runs(self) -> np.ndarray:
        first = self.traffic.atom_first
        bounds = self._bounds[self._sizes.ravel() > 0]
        inside = np.searchsorted(bounds, first + self.traffic.units) - np.searchsorted(
            bounds, first, side="right"
        )
        return inside + 1

    @cached_property
    def _group_runs(self) -> np.ndarray:
        """Pieces of each group: its atoms cut at block bounds, [G]."""
        return sum_by(self.atom_runs, self.traffic.group_atoms[:-1])

    @cached_property
    def _bounds(self) -> np.ndarray:
        """First unit of every block when all groups are laid end to end, [G * S]."""
        sizes = self._sizes.ravel()
        return np.cumsum(sizes) - sizes

    @cached_property
    def _spread_slot(self) -> np.ndarray:
        """Hop 1 slot of every block within its (home, relay) pair, [G, S]."""
        return sum_before(self._sizes, self.traffic.group_home)

    @cached_property
    def _pieces(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Atoms cut at block bounds, in the order of the atoms: (atom, offset in it, block, units)."""
        first = self.traffic.atom_first
        starts = np.concatenate([first, self._bounds[self._sizes.ravel() > 0]])
        starts = np.sort(starts, kind="stable")  # two sorted runs: a merge
        starts = starts[begins(starts)]
        units = np.diff(np.append(starts, self.traffic.units.sum()))
        atom = np.searchsorted(first, starts, side="right") - 1
        block = np.searchsorted(self._bounds, starts, side="right") - 1
        return atom, starts - first[atom], block, units

    def sends(self, hop: int, ranks: np.ndarray) -> Sends:
        """The moves of `ranks`: hop 0 home to relay, hop 1 relay to server."""
        traffic, servers = self.traffic, self.traffic.servers
        if hop == 0:
            keep = np.isin(traffic.home[self._pieces[0]], ranks)
            atom, offset, block, units = (x[keep] for x in self._pieces)
            slot = self._piece_slot(atom, offset, block)
            source = traffic.source[atom] + offset
            return Sends(traffic.home[atom], block % servers, slot, None, source, units, atom)
        order = np.argsort(traffic.member_server, kind="stable")
        group, server = traffic.member_group[order], traffic.member_server[order]
        sizes = self._sizes[:, ranks][group]  # [P, ranks]
        slot = sum_before(sizes, server)
        member, column = np.nonzero(sizes)
        at = member, column
        group, relay = group[member], ranks[column]
        return Sends(
            relay, server[member], slot[at], traffic.group_home[group],
            self._spread_slot[group, relay], sizes[at], None,
        )  # fmt: skip

    def arrivals(self, ranks: np.ndarray) -> Arrivals:
        """What reaches `ranks` from the relays."""
        traffic = self.traffic
        order = np.argsort(traffic.member_server, kind="stable")
        order = order[np.isin(traffic.member_server[order], ranks)]
        group, server = traffic.member_group[order], traffic.member_server[order]
        slots = sum_before(self._sizes[group], server)  # [P, S]
        atom, offset, block, units = self._pieces
        member, nth = spread(self._group_runs[group])
        piece = (np.cumsum(self._group_runs) - self._group_runs)[group][member] + nth
        relay = block[piece] % traffic.servers
        start = traffic.atom_first[atom[piece]] + offset[piece] - self._bounds[block[piece]]
        slot = slots[member, relay] + start
        return Arrivals(server[member], relay, slot, atom[piece], offset[piece], units[piece])

    def _piece_slot(self, atom, offset, block):
        start = self.traffic.atom_first[atom] + offset - self._bounds[block]
        return self._spread_slot.ravel()[block] + start


def _table(pair: np.ndarray, values: np.ndarray, servers: int) -> np.ndarray:
    table = np.zeros(servers * servers, np.int64)
    np.add.at(table, pair, values)
    return table.reshape(servers, servers)


type Route = DirectRoute | RelayRoute  # RaggedRoute is a DirectRoute
TRANSPORTS = {"direct": DirectRoute, "relay": RelayRoute, "ragged": RaggedRoute}
