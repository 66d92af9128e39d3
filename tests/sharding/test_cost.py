import numpy as np
import pytest

from cad_jax.sharding.capacities import default_capacities
from cad_jax.sharding.cost import (
    DEVICES,
    MODELS,
    attention_flops,
    choose_transport,
    exchange_s,
    find_device,
    link_bytes_s,
    max_over_mean,
    model_shape,
)
from cad_jax.sharding.tasks import DENSE_TRANSPORTS, TRANSPORT_HOPS, Capacities, HeadShape


def test_attention_flops_are_two_matmuls():
    heads = HeadShape(4, 2, 8)
    queries, keys = 3, 5
    matmul = 2 * queries * keys * 8 * 4  # a multiply and an add, each head
    assert attention_flops(heads, queries * keys) == 2 * matmul


@pytest.mark.parametrize(
    ("name", "billions"), [("llama2-7b", 6.738), ("llama3-8b", 8.030), ("llama3-70b", 70.554)]
)
def test_model_shapes_add_up_to_the_published_parameters(name, billions):
    model = MODELS[name]
    projections = 2 * (model.num_q_heads + model.num_kv_heads) * model.head_dim
    layer = model.embedding_dim * (projections + 3 * model.ffn_dim + 2)
    layers = model.num_layers * layer
    embeddings = 2 * model.vocab_size * model.embedding_dim + model.embedding_dim
    assert (layers + embeddings) / 1e9 == pytest.approx(billions, abs=5e-4)


def test_unknown_models_are_refused():
    assert model_shape("llama3-8b") is MODELS["llama3-8b"]
    with pytest.raises(ValueError, match="model must be one of .*llama3-8b.*, got 'llama9'"):
        model_shape("llama9")


def test_devices_are_found_by_their_kind():
    for kind, name in (("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("cpu", "cpu")):
        assert find_device(kind) is DEVICES[name]
    assert find_device("NVIDIA A100-SXM4-80GB") is DEVICES["a100"]
    assert find_device("TPU v5") is None
    assert find_device("NVIDIA H20") is None


def test_an_exchange_takes_its_wire_bytes_over_the_link_and_latency_a_hop():
    heads, h200 = HeadShape(8, 1, 16), DEVICES["h200"]  # units of 2 heads: 64 bytes
    capacities = Capacities("relay", 8, 8, (3, 4), (5, 6), (1, 1), (1, 1), 1, 1, 1)
    wire = 4 * (7 * 64 + 11 * (64 + 8))  # lse travels with the output, four bytes a head
    seconds = wire / h200.within_node_bytes_s + 4 * h200.hop_latency_s
    assert exchange_s(capacities, heads, 4, h200) == pytest.approx(seconds)
    ragged = Capacities("ragged", 8, 8, (3, 4), (6, 5), (1,), (1,), 1, 1, 1)
    wire = 4 * 64 + 6 * (64 + 8)
    seconds = wire / h200.between_nodes_bytes_s + 4 * h200.hop_latency_s  # offsets travel first
    assert exchange_s(ragged, heads, 4, h200, tp=4) == pytest.approx(seconds)
    assert link_bytes_s(h200, 8) == h200.within_node_bytes_s
    assert link_bytes_s(h200, 4, tp=4) == h200.between_nodes_bytes_s


def test_small_pools_exchange_directly_and_large_ones_by_relay():
    heads = HeadShape(32, 8, 128)

    def chosen(servers):
        candidates = {
            t: default_capacities(servers, 65536, heads, 131072, t) for t in DENSE_TRANSPORTS
        }
        return choose_transport(candidates, heads, servers)

    assert [chosen(s) for s in (1, 2, 8, 32, 64)] == ["direct"] * 2 + ["relay"] * 3


def test_ragged_is_chosen_where_it_is_a_candidate_and_sends_least():
    heads, h200 = HeadShape(8, 2, 64), DEVICES["h200"]
    units = {"direct": (10**6,), "relay": (4 * 10**5, 3 * 10**5), "ragged": (10**6, 5 * 10**6)}

    def chosen(servers, *transports):
        candidates = {
            t: Capacities(t, 8, 8, units[t], units[t], *[(1,) * TRANSPORT_HOPS[t]] * 2, 1, 1, 1)
            for t in transports
        }
        return choose_transport(candidates, heads, servers, h200)

    assert chosen(8, *TRANSPORT_HOPS) == "ragged"  # 5e6 units against 8 x 7e5
    assert chosen(8, *DENSE_TRANSPORTS) == "relay"
    assert chosen(4, *TRANSPORT_HOPS) == "relay"


def test_max_over_mean_without_work_is_one():
    assert max_over_mean(np.array([3, 1])) == 1.5
    assert max_over_mean(np.array([0, 0])) == 1.0
    assert max_over_mean(np.array([0, 0]), [1, 2]) == 1.0


def test_max_over_mean_by_speed():
    """Seconds of the last server, 3 / 1, over those in which both would end, (3 + 1) / (1 + 3)."""
    assert max_over_mean(np.array([3, 1]), [1, 3]) == 3.0
    assert max_over_mean(np.array([3, 1]), [6, 2]) == 1.0
    assert max_over_mean(np.array([3, 1]), [2, 2]) == max_over_mean(np.array([3, 1]))
