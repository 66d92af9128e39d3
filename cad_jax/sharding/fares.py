"""What travel costs planning: units times a price that knows nodes, weighted by who is crowded.

All arithmetic is int64, so that every host decides alike. Shape letter: S servers.
"""

import numpy as np
from numba import njit

FAR, NEAR = 8, 1  # a unit between nodes, and within one, where links are that much faster
WEIGHT = 64  # of a unit by itself; as much again, on average, for the servers that take it in


@njit(error_model="numpy")
def price(node, source, server):
    """What a unit from one rank to another costs, with `node` servers in a node."""
    if source == server:
        return 0
    return NEAR if source // node == server // node else FAR


@njit(error_model="numpy")
def equal_weights(servers):
    """Weights of the first round, int64 [S]."""
    return np.full(servers, 2 * WEIGHT, np.int64)


@njit(error_model="numpy")
def next_weights(weights, fare):
    """Weights of the next round from the fare that each server took in, int64 [S].

    The worst server's fare is as dear as the mean's: its dual multipliers, which add up to S, move
    by multiplicative updates to where the most came in.
    """
    servers, mean = fare.size, max(fare.sum() // fare.size, 1)
    dear = (weights - WEIGHT) * np.maximum(64 * fare // mean, 1) // 64
    dear = np.maximum(dear, 1)
    return WEIGHT + np.maximum(dear * servers * WEIGHT // dear.sum(), 1)


@njit(error_model="numpy")
def judged(fare):
    """What a round is judged by: the mean server's fare and the worst one's, times S."""
    return fare.sum() + fare.size * fare.max()
