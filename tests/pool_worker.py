"""One of several processes: a forward pass, a short run, two that are refused, for test_multiprocess.py.

    python -m tests.pool_worker FOLDER CORPUS PROCESSES COORDINATOR PROCESS_ID

`forward_rows` is what the test computes with one process as well.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from cad_jax.attention.strategies import make_strategy
from cad_jax.config import RunConfig
from cad_jax.feed import local_ranks, place_ranks, place_whole
from cad_jax.launch import launch
from cad_jax.model import Llama
from cad_jax.parameters import Parallelism, describe, init, shardings
from cad_jax.processes import PlanDisagreementError, ProcessConfig, gathered, start_devices
from cad_jax.settled import with_first_speeds
from cad_jax.sharding.mesh import POOL_AXES, make_mesh
from cad_jax.train_step import SERVERS
from tests.tiny_runs import tiny_config, with_changes

TOKENS_PER_SERVER = 512
LENGTHS = np.array([0, 1300, 1, 400, 210, 100])  # one over three ranks, padding at the end


def forward_rows(config) -> dict[int, np.ndarray]:
    """Hidden states [T, E] after the last layer, of each pool rank that has a device here."""
    mesh = make_mesh(dp=config.mesh.dp, tp=config.mesh.tp)
    tokens = config.mesh.servers * TOKENS_PER_SERVER
    strategy = make_strategy(
        "cad",
        servers=config.mesh.servers,
        tokens_per_server=TOKENS_PER_SERVER,
        heads=config.model.head_shape(config.mesh.tp),
        kernel="xla",
    )
    prepared = strategy.prepare(LENGTHS, ranks=local_ranks(mesh))
    assert prepared.figures.max_over_mean < prepared.figures.max_over_mean_home
    parallelism = Parallelism.of(mesh)
    description = describe(config.model, parallelism)
    definition = nnx.split(nnx.eval_shape(lambda: Llama(config.model, parallelism)))[0]
    specs = jax.tree.map(lambda p: p.spec, description)
    by_rank = jax.sharding.NamedSharding(mesh, P(None, POOL_AXES))
    of_servers = jax.sharding.NamedSharding(mesh, SERVERS)

    def rank(params, ids, positions, arrays):
        tables = strategy.expand(jax.tree.map(lambda a: a[0, 0, 0], arrays))
        model = nnx.merge(definition, params)
        attend = lambda q, k, v: strategy.attend(q, k, v, tables)  # noqa: E731
        return model.hidden(ids[0], positions[0], attend)

    step = jax.jit(
        jax.shard_map(
            rank,
            mesh=mesh,
            in_specs=(specs, P(None, POOL_AXES), P(None, POOL_AXES), SERVERS),
            out_specs=P(POOL_AXES),
            check_vma=False,
        )
    )
    params = jax.jit(lambda: init(description, 0), out_shardings=shardings(description, mesh))()
    ids = np.random.default_rng(1).integers(0, 256, (1, tokens)).astype(np.int32)
    positions = np.zeros((1, tokens), np.int32)
    positions[0, : LENGTHS.sum()] = np.concatenate([np.arange(n) for n in LENGTHS])
    arrays = jax.tree.map(
        lambda rows: place_ranks(rows[None, None], of_servers, local_ranks(mesh)), prepared.arrays
    )
    out = step(params, place_whole(ids, by_rank), place_whole(positions, by_rank), arrays)
    return {
        s.index[0].start // TOKENS_PER_SERVER: np.asarray(s.data) for s in out.addressable_shards
    }


def pipeline_config(folder: Path, corpus: str) -> RunConfig:
    """Two stages of two ranks: of two processes each holds a stage."""
    config = tiny_config(folder, corpus, steps=2, overlap="pingpong")
    return with_changes(config, mesh={"pp": 2, "dp": 2, "tp": 2})


def refusal(config) -> str:
    """What `launch` raises; every process gets one."""
    try:
        launch(config)
    except (ValueError, PlanDisagreementError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main(folder: str, corpus: str, processes: str, coordinator: str, process_id: str) -> None:
    process = ProcessConfig(int(processes), coordinator, int(process_id))
    config = tiny_config(Path(folder), corpus, steps=3)
    start_devices(process, config.mesh.devices, "cpu")
    rows = forward_rows(config)
    np.savez(Path(folder) / f"rows_{process_id}.npz", **{str(r): v for r, v in rows.items()})
    launch(config)
    own = 0.01 * process.process_id
    other = replace(config, folder=f"{folder}/other")
    refusals = {
        "plans": refusal(with_changes(other, attention={"tolerance": 0.05 + own})),
        "data": refusal(
            other if own else with_changes(other, data={"paths": (f"{folder}/none/*.txt",)})
        ),
    }
    (Path(folder) / f"refusals_{process_id}.json").write_text(json.dumps(refusals))
    speeds = with_changes(config, attention={"speeds": f"{folder}/speeds_{process_id}.txt"})
    agreed = {
        "speeds": with_first_speeds(speeds).attention.server_speeds,
        "gathered": gathered([process.process_id, "x" * (3 + process.process_id), 0.1]),
    }
    (Path(folder) / f"agreed_{process_id}.json").write_text(json.dumps(agreed))
    launch(pipeline_config(Path(folder) / "pipeline", corpus))


if __name__ == "__main__":
    main(*sys.argv[1:])
