"""Needs counted in one pass against those of whole routes, which are tested token by token."""

import numpy as np
import pytest

from cad_jax.sharding.required import required_capacities
from cad_jax.sharding.routing import route
from cad_jax.sharding.tasks import TRANSPORT_HOPS, HeadShape
from tests.sharding.plan_cases import random_plan

HEADS = [HeadShape(h, k, 4) for h, k in ((8, 2), (4, 4), (8, 1), (6, 3), (5, 1))]


@pytest.mark.parametrize("transport", TRANSPORT_HOPS)
def test_needs_are_those_of_the_routes(transport):
    for seed in range(60):
        rng = np.random.default_rng([11, seed])
        servers = int(rng.choice([1, 2, 3, 4, 8, 70, 140] if seed % 10 == 5 else [1, 2, 3, 5, 8]))
        plan = random_plan(
            seed, servers=servers, tokens=int(rng.integers(1, 60)), heads=HEADS[seed % len(HEADS)],
            transport=transport, key_splits=bool(seed % 2), gaps=seed % 4 < 2,
        )  # fmt: skip
        assert required_capacities(plan, transport) == route(plan, transport).required(transport)
