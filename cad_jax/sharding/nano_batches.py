"""Documents into steps of two nano-batches of equal tokens, on the host, in numpy alone.

`pack_halves` fills a step as two halves, ping and pong: every piece whole in one of them, padding
at the end of each. Besides fill it evens out what their attention costs, the sum of n (n + 1) / 2
(query, key) pairs over their pieces, by the choice of pieces from the window and of the half each
goes to. In this order:

- the oldest piece in the window begins ping, so that, as in `pack_step`, no piece waits for more
  than `window` steps; a step whose oldest piece is longer than half of it is not divided but packed
  by `pack_step`, and only there do pieces longer than half have a place;
- the longest few of the window are placed all at once, by the best of all ways to do it: what they
  leave uneven must be in reach of the shorter pieces that fill the rest;
- the others follow in the order of their arrival, each to the half that has less; one that would
  leave more uneven than the rest can make up for waits for another that makes up for it;
- exchanges of single pieces, between the halves and with the window, mend what is left, each the
  best there is, as long as one helps. A row of padding counts as much there as a row's mean work;
- where more than 1/64 of the step is still padding, whatever fits is placed after all.

Every decision is in integers, so that every host packs the same. The state is that of packing: the
list of pieces seen and not yet placed, at most `window`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from cad_jax.sharding.packing import PackedStep, check_packing, pack_step

NANO_BATCHES = (1, 2)  # of one microbatch

_PING, _PONG, _WINDOW = 0, 1, 2
_SIDES = 3
_SIGN = (1, -1)  # of ping's and pong's work in how far ping leads
_LONG_PIECES = 6  # placed at once: 3^6 ways
# Rows of `_WAYS` are ways to place the long pieces: +1 to ping, -1 to pong, 0 waits.
_WAYS = np.asarray(list(product((1, -1, 0), repeat=_LONG_PIECES)), np.int64)
_MAX_EXCHANGES = 64
_EXCHANGE_CANDIDATES = 128  # of each side, evenly over their lengths
_PADDING_SHARE = 64  # of a step, above which balance gives way to fill
_INFEASIBLE = np.iinfo(np.int64).max


def check_nano_batches(nano_batches: int, tokens_per_step: int) -> None:
    """Raises ValueError unless a step can be packed as so many nano-batches of equal tokens."""
    if nano_batches not in NANO_BATCHES:
        raise ValueError(
            f"nano_batches must be 1 (undivided) or 2 (ping and pong), got {nano_batches}: "
            "choose one of the two"
        )
    if tokens_per_step % nano_batches:
        raise ValueError(
            f"tokens_per_step must be even to be packed as two nano-batches, got "
            f"{tokens_per_step}: use an even number, or nano_batches=1"
        )


def pack_halves(
    pending: Sequence[tuple[int, int]],
    arrivals: Iterator[tuple[int, int]],
    tokens_per_step: int,
    window: int,
) -> tuple[PackedStep, list[tuple[int, int]]]:
    """Fills one step in two halves; returns it and the pieces that stay in the window.

    Arguments and guarantees are those of `pack_step`, to which a step falls whose oldest piece is
    longer than half of it. Raises ValueError for an odd `tokens_per_step`, and for a piece longer
    than a step once it is the oldest.
    """
    check_packing(tokens_per_step, window)
    check_nano_batches(2, tokens_per_step)
    pending = pending or [piece for piece in [next(arrivals, None)] if piece is not None]
    if not pending or pending[0][1] > tokens_per_step // 2:
        return pack_step(pending, arrivals, tokens_per_step, window)
    halves = _Halves(pending, arrivals, tokens_per_step // 2, window)
    halves.move(0, _PING)
    _place_long(halves)
    _fill(halves)
    _exchange(halves)
    while sum(halves.room) > tokens_per_step // _PADDING_SHARE and _force(halves):
        _fill(halves)
        _exchange(halves)
    ping, pong = halves.on_side(_PING), halves.on_side(_PONG)
    placed = [halves.pool[index] for index in ping + pong]
    step = PackedStep(
        keys=[key for key, _ in placed],
        lengths=[tokens for _, tokens in placed],
        padding_tokens=sum(halves.room),
        nano_pieces=(len(ping), len(pong)),
    )
    return step, [halves.pool[index] for index in halves.on_side(_WINDOW)]


class _Halves:
    """A step while it is packed: all pieces seen, in order of arrival, and where each one is."""

    def __init__(
        self,
        pending: Sequence[tuple[int, int]],
        arrivals: Iterator[tuple[int, int]],
        half_tokens: int,
        window: int,
    ) -> None:
        self.pool = list(pending)
        self.side = [_WINDOW] * len(self.pool)
        self.half_tokens = half_tokens
        self.room = [half_tokens, half_tokens]
        self.work = [0, 0]  # pairs
        self._arrivals = arrivals
        self._window = window
        self._held = len(self.pool)
        self.fill_window()
        # Pairs a row: of what may go into a half, and of what will fill the room that long pieces
        # leave, which is most like the window without its longest quarter.
        lengths = sorted(tokens for _, tokens in self.pool if tokens <= half_tokens)
        short = lengths[: max(1, len(lengths) * 3 // 4)]
        self.short_tokens = short[-1]
        self.short_density = _density(short)
        self.density = _density(lengths)

    def fill_window(self) -> None:
        while self._held < self._window:
            piece = next(self._arrivals, None)
            if piece is None:
                break
            self.pool.append(piece)
            self.side.append(_WINDOW)
            self._held += 1

    def move(self, index: int, to: int) -> None:
        tokens = self.pool[index][1]
        for side, sign in ((self.side[index], -1), (to, 1)):
            if side == _WINDOW:
                self._held += sign
            else:
                self.room[side] -= sign * tokens
                self.work[side] += sign * _pairs(tokens)
        self.side[index] = to

    def on_side(self, side: int) -> list[int]:
        return [index for index, on in enumerate(self.side) if on == side]

    def candidates(self) -> list[int]:
        """What waits and may go into a half, in order of arrival."""
        return [i for i in self.on_side(_WINDOW) if self.pool[i][1] <= self.half_tokens]

    def lead(self) -> int:
        """Pairs by which ping will exceed pong if both are filled up with short pieces."""
        ping, pong = self.room
        return self.work[_PING] - self.work[_PONG] + self.short_density * (ping - pong)

    def lead_of(self, index: int) -> int:
        """What placing this piece in ping adds to `lead()`; in pong, it takes that away."""
        tokens = self.pool[index][1]
        return _pairs(tokens) - self.short_density * tokens

    def in_reach(self, room_tokens):
        """The lead that filling so much room with short pieces can make up for; int or array."""
        return self.short_density * room_tokens // 2


def _pairs(tokens):
    """(query, key) pairs of causal attention in a document; int or int64 array."""
    return tokens * (tokens + 1) // 2


def _density(lengths: Sequence[int]) -> int:
    """Pairs of a row, on average."""
    return sum(map(_pairs, lengths)) // max(1, sum(lengths))


def _place_long(halves: _Halves) -> None:
    """Places the longest pieces of the window, or leaves them there.

    Of all ways that fit, those with the least lead beyond reach; of these, the ones that take
    older pieces; of these, the least lead.
    """
    long = [i for i in halves.candidates() if halves.pool[i][1] > halves.short_tokens]
    long = sorted(sorted(long, key=lambda i: (-halves.pool[i][1], i))[:_LONG_PIECES])
    ways = _WAYS[:: 3 ** (_LONG_PIECES - len(long)), : len(long)]
    tokens = np.asarray([halves.pool[i][1] for i in long], np.int64)
    leads = np.asarray([halves.lead_of(i) for i in long], np.int64)
    room = [halves.room[_PING] - (ways == 1) @ tokens, halves.room[_PONG] - (ways == -1) @ tokens]
    lead = np.abs(halves.lead() + ways @ leads)
    beyond = np.maximum(0, lead - halves.in_reach(room[0] + room[1]))
    beyond[(room[0] < 0) | (room[1] < 0)] = _INFEASIBLE
    seniority = (ways != 0) @ (1 << np.arange(len(long), dtype=np.int64)[::-1])
    best = ways[np.lexsort((lead, -seniority, beyond))[0]]
    for index, way in zip(long, best.tolist(), strict=True):
        if way:
            halves.move(index, _PING if way == 1 else _PONG)
    halves.fill_window()


def _fill(halves: _Halves) -> None:
    """Offers every piece that waits a place, in order of arrival, and those that come meanwhile."""
    held_back: list[int] = []
    index = 0
    while index < len(halves.pool) and any(halves.room):
        tokens = halves.pool[index][1]
        fits = [side for side in (_PING, _PONG) if tokens <= halves.room[side]]
        if fits and halves.side[index] == _WINDOW:
            places = _places(halves, index, fits, held_back)
            for placed, side in places:
                halves.move(placed, side)
            if not places:
                held_back.append(index)
            elif len(places) == 2:
                held_back.remove(places[1][0])
            halves.fill_window()
        index += 1


def _places(
    halves: _Halves, index: int, fits: list[int], held_back: list[int]
) -> list[tuple[int, int]]:
    """(piece, side) of this piece, of it and one held back before, or nothing: it is held back."""
    lead, own = halves.lead(), halves.lead_of(index)
    tokens, room = halves.pool[index][1], sum(halves.room)
    after, side = min((abs(lead + _SIGN[side] * own), side) for side in fits)
    if after <= max(abs(lead), halves.in_reach(room - tokens)):
        return [(index, side)]
    pairs = [
        (abs(lead + _SIGN[side] * (own - halves.lead_of(partner))), partner, side)
        for partner in held_back
        for side in fits
        if halves.pool[partner][1] <= halves.room[_PONG - side]
    ]
    if pairs:
        after, partner, side = min(pairs)
        left = room - tokens - halves.pool[partner][1]
        if after <= max(abs(lead), halves.in_reach(left)):
            return [(index, side), (partner, _PONG - side)]
    return []


def _exchange(halves: _Halves) -> None:
    """Exchanges pieces, one for one or one for none, as long as that lowers the cost: the pairs by
    which the halves differ plus the padding in rows times what a row costs. The oldest stays. The
    limit on their number bounds the time; few steps come near it."""
    for _ in range(_MAX_EXCHANGES):
        difference = halves.work[_PING] - halves.work[_PONG]
        padding = sum(halves.room)
        least = abs(difference) + halves.density * padding
        best: tuple[int, int, int, int] | None = None
        sides = [_evenly(halves, side) for side in range(_SIDES)]
        for here, there in ((_PING, _PONG), (_PING, _WINDOW), (_PONG, _WINDOW)):
            give, take = [-1, *sides[here]], sides[there]
            if there != _WINDOW:
                take = [-1, *take]  # a half may give a piece for none, to the other half alone
            if not take:
                continue
            given, taken = _tokens(halves, give), _tokens(halves, take)
            gain = taken[None, :] - given[:, None]
            gain_pairs = _pairs(taken)[None, :] - _pairs(given)[:, None]
            feasible = gain <= halves.room[here]
            if there == _WINDOW:
                after = difference + _SIGN[here] * gain_pairs
                cost = np.abs(after) + halves.density * (padding - gain)
            else:
                feasible &= -gain <= halves.room[there]
                cost = np.abs(difference + 2 * gain_pairs) + halves.density * padding
            cost[~feasible] = _INFEASIBLE
            row, column = divmod(int(cost.argmin()), len(take))
            if cost[row, column] < least:
                least = int(cost[row, column])
                best = (give[row], there, take[column], here)
        if best is None:
            return
        for index, to in (best[:2], best[2:]):
            if index >= 0:
                halves.move(index, to)
        halves.fill_window()


def _force(halves: _Halves) -> bool:
    """Places a piece that fits, however uneven it leaves the halves; False if none fits."""
    places = [
        (abs(halves.lead() + _SIGN[side] * halves.lead_of(index)), index, side)
        for index in halves.candidates()
        for side in (_PING, _PONG)
        if halves.pool[index][1] <= halves.room[side]
    ]
    if not places:
        return False
    _, index, side = min(places)
    halves.move(index, side)
    halves.fill_window()
    return True


def _evenly(halves: _Halves, side: int) -> list[int]:
    """Pieces of a side by length, the oldest excepted; of very many, some all over the lengths."""
    pieces = halves.candidates() if side == _WINDOW else halves.on_side(side)
    pieces = sorted((i for i in pieces if i > 0), key=lambda i: halves.pool[i][1])
    if len(pieces) <= _EXCHANGE_CANDIDATES:
        return pieces
    return [pieces[k * len(pieces) // _EXCHANGE_CANDIDATES] for k in range(_EXCHANGE_CANDIDATES)]


def _tokens(halves: _Halves, pieces: list[int]) -> np.ndarray:
    return np.asarray([halves.pool[i][1] if i >= 0 else 0 for i in pieces], np.int64)
