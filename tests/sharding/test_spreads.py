"""Closed forms of how groups of units are spread over relays, against lists of units."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cad_jax.sharding.spreads import Spread


@settings(derandomize=True, max_examples=200, deadline=None)
@given(units=st.lists(st.integers(1, 40), min_size=1, max_size=8), relays=st.integers(1, 9))
def test_units_go_to_relays_one_after_another(units, relays):
    spread = Spread.even(np.array(units, np.int64), relays)
    turn, owner = 0, np.arange(len(units)) % relays
    by_relay = np.zeros((relays, relays), np.int64)
    odd = np.zeros((relays, relays), np.int64)
    for group, count in enumerate(units):
        sizes = [count // relays] * relays
        for _ in range(count % relays):  # one unit more to the next relays in turn
            sizes[turn % relays] += 1
            odd[owner[group], turn % relays] += group + 1
            turn += 1
        by_relay[owner[group]] += sizes
        relay_of = [relay for relay, size in enumerate(sizes) for _ in range(size)]
        one = spread.of(group)
        assert one.sizes(np.arange(relays)).tolist() == sizes
        assert one.before(np.arange(relays)).tolist() == [sum(sizes[:r]) for r in range(relays)]
        assert one.relay_of(np.arange(count)).tolist() == relay_of
    assert spread.by_relay(owner).tolist() == by_relay.tolist()
    weights = np.arange(len(units)) + 1
    assert spread.odd_blocks(owner, weights, relays).tolist() == odd.tolist()
