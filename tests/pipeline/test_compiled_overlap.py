"""Ping-pong's exchanges hide in the program that XLA makes for GPUs, and an exchange that is not tied does not.

The real step of a small model, compiled as `cad-jax compile` does, on three meshes. What lies beside each
exchange comes from the thunks, the order in which the run time launches; what should lie there from the
table in docs/overlap.md. Needs jax's CUDA 12 plugin (extra aot; `make test-aot`).
"""

import importlib.util
import re
from collections import Counter
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest

from cad_jax.compiled_step import compile_step, sample_documents
from cad_jax.config import AttentionConfig, MeshConfig, RunConfig, TrainingConfig
from cad_jax.model_config import LlamaConfig
from cad_jax.overlap import Collective
from cad_jax.pipeline import parts, pingpong
from cad_jax.sharding.clusters import parse_topology
from cad_jax.topologies import PLUGINS
from cad_jax.xla_options import WITHOUT_GPU, gpu_options

pytestmark = [
    pytest.mark.skipif(
        not any(importlib.util.find_spec(p) for p in PLUGINS), reason="no CUDA plugin"
    ),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]
TOPOLOGY = parse_topology("h200:2x8")
LAYERS = 3  # of a stage: between them two blocks, so that the loop over layers stays a loop
NANO_TOKENS = 4096  # of a rank
DISPATCHES = {"forward": "dispatch_fwd", "backward": "dispatch_bwd"}
COMBINES = {"forward": "combine_fwd", "backward": "combine_bwd"}
WEIGHTS = {"forward": ("gather",), "backward": ("gather", "scatter")}


def make_config(
    mesh: MeshConfig, transport: Literal["direct", "relay", "ragged"], microbatches: int = 1
) -> RunConfig:
    """As many heads as Llama 3 8B, so that every device of tp 8 has one key head; all else is small."""
    model = LlamaConfig(
        vocab_size=1024,
        embedding_dim=1024,
        num_layers=LAYERS * mesh.pp,
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=64,
        ffn_dim=2048,
    )
    config = RunConfig(
        name="overlap",
        folder="unused",
        model=model,
        mesh=mesh,
        attention=AttentionConfig(capacity_plans=3, kernel="triton", transport=transport),
        training=TrainingConfig(
            tokens_per_microbatch=mesh.dp * 2 * NANO_TOKENS,
            microbatches=microbatches,
            overlap="pingpong",
        ),
    )
    config.check()
    return config


RELAY = make_config(MeshConfig(dp=16), "relay")
RELAY_HOPS = ("hop1", "hop2")


@pytest.fixture(scope="module")
def lengths(tmp_path_factory):
    path = tmp_path_factory.mktemp("documents") / "lengths.txt"
    drawn = np.random.default_rng(0).lognormal(7, 1.2, 3000).astype(int).clip(1, 2 * NANO_TOKENS)
    path.write_text("\n".join(map(str, drawn)))
    return path


def compiled_collectives(config: RunConfig, lengths) -> list[Collective]:
    documents = sample_documents(config, lengths)
    options = {**gpu_options({config.attention.transport}), **WITHOUT_GPU}
    return compile_step(config, TOPOLOGY, documents, options).prediction.collectives


def partners(collective: Collective) -> set[str]:
    """What computes from its start to its done: "matmul", "attention"."""
    roles = {entry.partition(":")[0] for entry in collective.between}
    return roles & {"matmul", "attention"}


def scope(collective: Collective) -> str:
    """Which exchange and hop it is, or which way weights go: "combine_fwd/hop1", "weights/gather"."""
    found = re.search(r"\bexchange/(\w+/\w+)|\b(weights/(?:gather|scatter))\b", collective.where)
    return (found[1] or found[2]) if found else ""


def layer_loops(collectives: list[Collective]) -> dict[str, list[Collective]]:
    """The loops over layers, by name: no other that holds exchanges runs as often."""
    exchanges = [c for c in collectives if c.is_exchange and c.in_loop]
    often = max((c.executions for c in exchanges), default=0)
    names = {c.loop for c in exchanges if c.executions == often}
    return {name: [c for c in collectives if c.loop == name] for name in sorted(names)}


def violations(collectives: list[Collective], hops: tuple[str, ...]) -> list[str]:
    """Where a compiled step is not what ping-pong's table says, each beginning with a `scope`.

    Every exchange, in a loop or not, is asynchronous and has a product or an attention kernel
    between start and done. A loop over layers has every hop (names `hops`) of every exchange twice,
    once beside an attention and once beside a block, and its weights' collectives beside attentions.
    """
    found = []
    for c in collectives:
        if c.is_exchange and not (c.asynchronous and partners(c)):
            how = "beside no compute" if c.asynchronous else "synchronous"
            found.append(f"{scope(c)} is {how}, in {c.loop or 'no loop'}: {c.between}")
    for loop, body in layer_loops(collectives).items():
        phase = next(c.phase for c in body if c.is_exchange)
        names = {f"{n[phase]}/{hop}" for n in (DISPATCHES, COMBINES) for hop in hops}
        for name in sorted(names | {scope(c) for c in body if c.is_exchange}):
            beside = [partners(c) for c in body if scope(c) == name]
            alike = len(beside) == 2 and {"matmul", "attention"} <= set().union(*beside)
            if name not in names or not alike:
                found.append(f"{name} is beside {beside}, in {loop}")
        expected = Counter(f"weights/{way}" for way in WEIGHTS[phase])
        weights = [c for c in body if scope(c).startswith("weights/")]
        for name in expected - Counter(map(scope, weights)):
            found.append(f"{name} is missing, in {loop}")
        for c in weights:
            if not c.asynchronous or "attention" not in partners(c):
                found.append(f"{scope(c)} is beside {sorted(partners(c))}, in {loop}")
    return found


@pytest.mark.parametrize(
    "config, hops, loops",
    [
        pytest.param(
            make_config(MeshConfig(dp=2, tp=8, tp_splits="tokens"), "direct"),
            ("heads", "hop1"),
            ["backward", "forward"],
            id="tokens-over-tp",
        ),
        pytest.param(RELAY, RELAY_HOPS, ["backward", "forward"], id="relay"),
        pytest.param(  # three microbatches: warm-up, steady state and drain of two ticks each
            make_config(MeshConfig(pp=2, dp=4, tp=2), "direct", microbatches=3),
            ("hop1",),
            ["backward", "backward", "forward", "forward"],
            id="pipeline",
        ),
    ],
)
def test_every_exchange_runs_beside_compute(config, hops, loops, lengths) -> None:
    collectives = compiled_collectives(config, lengths)
    bodies = layer_loops(collectives).values()
    assert sorted(next(c.phase for c in body if c.is_exchange) for body in bodies) == loops
    assert violations(collectives, hops) == []


def test_every_ragged_exchange_runs_beside_compute(lengths) -> None:
    """One collective an exchange, whole across both nodes, in the order of pingpong's table. XLA drops the scopes
    of ragged collectives: those of a loop are told apart by their order."""
    collectives = compiled_collectives(make_config(MeshConfig(dp=16), "ragged"), lengths)
    exchanges = [c for c in collectives if c.is_exchange]
    assert {c.kind for c in exchanges} == {"ragged-all-to-all"}
    assert not any(c.is_metadata for c in collectives)
    assert all(scope(c).startswith("weights/") for c in collectives if c.kind == "all-gather")
    assert [c for c in exchanges if not (c.asynchronous and partners(c))] == []
    beside = {
        "forward": ["attention", "attention", "matmul", "matmul"],
        "backward": ["matmul", "attention", "attention", "matmul"],
    }
    bodies = layer_loops(collectives).values()
    for body in bodies:
        carried = [c for c in body if c.is_exchange]
        assert [sorted(partners(c)) for c in carried] == [[p] for p in beside[body[0].phase]]
        weights = [c for c in body if scope(c).startswith("weights/")]
        assert all(c.asynchronous and "attention" in partners(c) for c in weights)
    assert sorted(body[0].phase for body in bodies) == ["backward", "forward"]
    # Outside the loops: the first dispatch and the last layer's three exchanges, forward and backward.
    assert len(exchanges) == 4 * 4 and sum(not c.in_loop for c in exchanges) == 2 * 4


def test_an_untied_phase_is_caught(lengths, monkeypatch) -> None:
    """Without barriers around the forward's way home, and only there, XLA hides none of it."""
    tied = pingpong.beside

    def partly_tied(hops, compute, also=None):
        with pytest.MonkeyPatch.context() as patch:
            if hops.__name__ == "combine":
                no_barriers = SimpleNamespace(optimization_barrier=lambda operands: operands)
                patch.setattr(parts, "lax", no_barriers)
            return tied(hops, compute, also)

    monkeypatch.setattr(pingpong, "beside", partly_tied)
    found = violations(compiled_collectives(RELAY, lengths), RELAY_HOPS)
    untied = {f"combine_fwd/{hop}" for hop in RELAY_HOPS}
    # The gather of weights is tied together with the way home that it lies beside.
    assert untied <= {line.split()[0] for line in found} <= untied | {"weights/gather"}
