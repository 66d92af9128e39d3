"""Units spread evenly over relays in contiguous blocks: every size and bound in closed form, so that no
table of units' groups by relays is made.

Shape letters: S relays, G groups of units.
"""

from typing import NamedTuple

import numpy as np


class Spread(NamedTuple):
    """Of each group: `base` units to every relay, in ascending order, and one unit more to `odd` relays
    that follow one another from relay `turn` on, after the last one relay 0. int64 [G] each.
    """

    base: np.ndarray
    odd: np.ndarray
    turn: np.ndarray
    relays: int  # S

    @classmethod
    def even(cls, units: np.ndarray, relays: int) -> "Spread":
        """Of groups of so many units, the odd ones of consecutive groups to consecutive relays."""
        base, odd = np.divmod(units, relays)
        return cls(base, odd, (np.cumsum(odd) - odd) % relays, relays)

    def of(self, groups) -> "Spread":
        """Of some groups; any index of arrays [G]."""
        return Spread(self.base[groups], self.odd[groups], self.turn[groups], self.relays)

    @property
    def _wrapped(self) -> np.ndarray:
        """Relays from 0 on that have an odd unit."""
        return np.maximum(self.turn + self.odd - self.relays, 0)

    def sizes(self, relay: np.ndarray) -> np.ndarray:
        """Units of a group's block at a relay."""
        return self.base + ((relay - self.turn) % self.relays < self.odd)

    def before(self, relay: np.ndarray) -> np.ndarray:
        """Units of a group's blocks at earlier relays."""
        late = np.minimum(np.maximum(relay - self.turn, 0), self.odd)
        return relay * self.base + late + np.minimum(relay, self._wrapped)

    def relay_of(self, unit: np.ndarray) -> np.ndarray:
        """The relay that has a unit of a group."""
        wrapped, base = self._wrapped, np.maximum(self.base, 1)
        first = wrapped * (self.base + 1)  # unit after the odd ones from relay 0 on
        second = self.before(self.turn)  # the first of the odd ones from relay `turn` on
        end = np.minimum(self.turn + self.odd, self.relays)
        third = second + (end - self.turn) * (self.base + 1)
        late = np.where(
            unit < third,
            self.turn + (unit - second) // (self.base + 1),
            end + (unit - third) // base,
        )
        early = np.where(unit < first, unit // (self.base + 1), wrapped + (unit - first) // base)
        return np.where(unit < second, early, late)

    def odd_blocks(self, owner, weight, owners: int) -> np.ndarray:
        """The weights of the groups of each owner that have an odd unit at a relay, [owners, S]."""
        change = np.zeros((owners, self.relays + 1), np.int64)
        wrapped = self._wrapped
        owner = owner + np.zeros_like(wrapped)
        np.add.at(change, (owner, self.turn), weight)
        np.add.at(change, (owner, self.turn + self.odd - wrapped), -weight)
        np.add.at(change, (owner, np.zeros_like(owner)), np.where(wrapped > 0, weight, 0))
        np.add.at(change, (owner, wrapped), np.where(wrapped > 0, -weight, 0))
        return np.cumsum(change[:, :-1], axis=1)

    def by_relay(self, owner: np.ndarray) -> np.ndarray:
        """Units of each owner's groups at each relay, [S, S]: owners are as many as relays."""
        base = np.zeros(self.relays, np.int64)
        np.add.at(base, owner, self.base)
        return base[:, None] + self.odd_blocks(owner, 1, self.relays)
