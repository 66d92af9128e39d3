"""Checkpoints: whole or not at all, checked against damage, the same on another mesh."""

import gc
import json
import re
import resource
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cad_jax.checkpoint import (
    CheckpointConfig,
    Checkpointer,
    CheckpointMismatchError,
    array_names,
)

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

DATA = {"epoch": 0, "position": 17}
CONFIG = {"seed": 3}


def make_mesh(dp, tp):
    return Mesh(np.array(jax.devices()[: dp * tp]).reshape(dp, tp), ("dp", "tp"))


def make_state(mesh, seed=0):
    rng = np.random.default_rng(seed)
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
    return {
        "params": {
            "w": put(rng.normal(size=(8, 16)).astype(np.float32), "dp", "tp"),
            "scale": put(rng.normal(size=(16,)).astype(jnp.bfloat16), "tp"),
        },
        "count": put(np.int32(5)),
    }


def abstract_of(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def numpy_of(state):
    return jax.tree.map(np.asarray, state)


def assert_equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, numpy_of(got), numpy_of(want))


@pytest.fixture(autouse=True)
def collect_what_orbax_leaves():
    """Reads and writes that fail leave closed event loops behind; collect them with their test."""
    yield
    gc.collect()


@pytest.fixture
def saved(tmp_path):
    """A folder with checkpoints of steps 10 and 20, and what was saved."""
    mesh = make_mesh(4, 2)
    states = {10: make_state(mesh, 10), 20: make_state(mesh, 20)}
    checkpointer = Checkpointer(tmp_path / "checkpoints", CheckpointConfig(), print)
    for step, state in states.items():
        checkpointer.save(step, state, DATA | {"position": step}, CONFIG)
    checkpointer.close()
    return tmp_path / "checkpoints", states


def reopened(folder, lines=None):
    return Checkpointer(folder, CheckpointConfig(), [].append if lines is None else lines.append)


def test_newest_comes_back_on_another_mesh(saved):
    folder, states = saved
    other = abstract_of(make_state(make_mesh(2, 1)))
    restored = reopened(folder).restore(other)
    assert restored is not None
    assert restored.step == 20
    assert restored.data == DATA | {"position": 20}
    assert restored.config == CONFIG
    assert_equal(restored.state, states[20])
    assert restored.state["params"]["w"].sharding == other["params"]["w"].sharding
    assert restored.state["params"]["scale"].dtype == jnp.bfloat16


def test_values_survive_donation_right_after_save(tmp_path):
    state = make_state(make_mesh(4, 2))
    want = numpy_of(state)
    want = jax.tree.map(np.copy, want)
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(), print)
    advance = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    checkpointer.save(1, state, DATA, CONFIG)
    for _ in range(3):
        state = jax.block_until_ready(advance(state))
    checkpointer.close()
    restored = reopened(tmp_path).restore(abstract_of(state))
    assert restored is not None
    assert_equal(restored.state, want)


def test_nothing_to_restore(tmp_path):
    assert reopened(tmp_path).restore(abstract_of(make_state(make_mesh(2, 1)))) is None


def test_half_written_step_is_never_the_latest(saved):
    folder, states = saved
    (folder / "30").mkdir()
    shutil.copytree(folder / "20" / "run", folder / "30" / "run")
    shutil.copytree(folder / "20", folder / "40.orbax-checkpoint-tmp-1")
    lines = []
    checkpointer = reopened(folder, lines)
    assert checkpointer.steps() == [10, 20]
    assert not list(folder.glob("*tmp*"))  # a killed save does not fill the disk for good
    restored = checkpointer.restore(abstract_of(states[20]))
    assert restored is not None and restored.step == 20
    assert any("30" in line and "incomplete" in line for line in lines)
    checkpointer.save(30, states[10], DATA, CONFIG)  # the step can be saved again
    checkpointer.close()
    assert reopened(folder).steps() == [10, 20, 30]


def flip_array_byte(step: Path):
    """One bit of the largest data file of the state."""
    victim = max((step / "state").rglob("d/*"), key=lambda p: p.stat().st_size)
    raw = bytearray(victim.read_bytes())
    raw[len(raw) // 2] ^= 4
    victim.write_bytes(raw)


def lose_array_file(step: Path):
    for path in (step / "state").rglob("d/*"):
        path.unlink()


def truncate_record(step: Path):
    path = step / "run" / "metadata"
    path.write_bytes(path.read_bytes()[:-40])


def change_position(step: Path):
    path = step / "run" / "metadata"
    path.write_text(path.read_text().replace('"position": 20', '"position": 21'))


def exchange_arrays(step: Path):
    """A state that Orbax reads without complaint, but not the one the record speaks of."""
    shutil.rmtree(step / "state")
    shutil.copytree(step.parent / "10" / "state", step / "state")


def lose_record(step: Path):
    shutil.rmtree(step / "run")


def lose_manifest(step: Path):
    for path in (step / "state").rglob("manifest*"):
        path.unlink()


MESSAGES = {
    "flip_array_byte": r"its file state/d/\w+ cannot be read \(data loss\)|checksum",
    "lose_array_file": r"its file state/d/\w+ cannot be read \(not found\)",
    "lose_manifest": r"its folder state cannot be read \(not found\)",
    "lose_record": r"its folder run cannot be read \(missing or changed\)",
    "truncate_record": r"its folder run cannot be read \(missing or changed\)",
    "change_position": "its record does not match its own digest",
    "exchange_arrays": r"params/\w+ does not match the checksum saved with it",
}


@pytest.mark.parametrize(
    "damage",
    [
        flip_array_byte, lose_array_file, lose_manifest, lose_record, truncate_record,
        change_position, exchange_arrays,
    ],
)  # fmt: skip
def test_damaged_falls_back_and_says_so(saved, damage):
    folder, states = saved
    before = {p: p.read_bytes() for p in (folder / "20").rglob("*") if p.is_file()}
    damage(folder / "20")
    after = {p: p.read_bytes() for p in (folder / "20").rglob("*") if p.is_file()}
    assert before != after, "the damage did nothing"
    lines = []
    checkpointer = reopened(folder, lines)
    restored = checkpointer.restore(abstract_of(states[10]))
    assert restored is not None and restored.step == 10
    assert_equal(restored.state, states[10])
    assert any("step 20" in line and "falling back" in line for line in lines)
    assert any(re.search(MESSAGES[damage.__name__], line) for line in lines), lines
    for line in lines:  # no object of a library, and no text about one
        assert not re.search(r"[{}\[\]\\]|driver|char |Item|Error", line), line
    assert (folder / "damaged_20").is_dir()
    checkpointer.save(20, states[20], DATA, CONFIG)
    checkpointer.close()
    assert reopened(folder).steps() == [10, 20]


def test_all_damaged_is_an_error_not_a_fresh_start(saved):
    folder, states = saved
    for step in (10, 20):
        truncate_record(folder / str(step))
    with pytest.raises(
        ValueError, match="no checkpoint .* can be read back whole.*step 20.*step 10"
    ):
        reopened(folder).restore(abstract_of(states[10]))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: s["params"].update(w=s["params"]["w"][:4]), r"params/w of shape \(8, 16\)"),
        (
            lambda s: s["params"].update(scale=s["params"]["scale"].astype(jnp.float32)),
            "params/scale in bfloat16, this run's is in float32",
        ),
        (lambda s: s["params"].update(b=s["params"]["w"]), "has no array params/b"),
        (lambda s: s.pop("count"), "holds count, which this run's state does not have"),
    ],
)
def test_another_architecture_is_refused_by_name(saved, change, message):
    folder, _ = saved
    state = make_state(make_mesh(4, 2))
    change(state)
    with pytest.raises(CheckpointMismatchError, match=message):
        reopened(folder).restore(abstract_of(state))
    assert reopened(folder).steps() == [10, 20], "a mismatch is not damage"


def test_non_finite_state_is_not_saved(tmp_path):
    state = make_state(make_mesh(2, 1))
    state["params"]["w"] = state["params"]["w"].at[3, 3].set(jnp.nan)
    checkpointer = reopened(tmp_path)
    with pytest.raises(FloatingPointError, match="params/w holds NaN or infinity after step 1"):
        checkpointer.save(1, state, DATA, CONFIG)
    checkpointer.close()
    assert reopened(tmp_path).steps() == []


def test_errors_of_the_background_save_surface(tmp_path):
    checkpointer = reopened(tmp_path)
    checkpointer.save(1, make_state(make_mesh(2, 1)), DATA, CONFIG)
    checkpointer.wait()
    noise = np.random.default_rng(0).normal(size=(256, 1024)).astype(np.float32)
    big = {"w": jax.device_put(noise, NamedSharding(make_mesh(2, 1), PartitionSpec("dp")))}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))  # as if the disk were full
    try:
        with pytest.raises(Exception, match="(?i)too large|EFBIG"):
            checkpointer.save(2, big, DATA, CONFIG)
            checkpointer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert reopened(tmp_path).steps() == [1]


def test_old_checkpoints_go_new_stay(tmp_path):
    state = make_state(make_mesh(2, 1))
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(keep=2), print)
    for step in range(1, 5):
        checkpointer.save(step, state, DATA, CONFIG)
    checkpointer.close()
    assert reopened(tmp_path).steps() == [3, 4]


def test_config_refusals():
    with pytest.raises(ValueError, match=r"checkpoint.keep \(=1\) must be at least 2"):
        CheckpointConfig(keep=1)
    with pytest.raises(ValueError, match=r"checkpoint.every_steps \(=0\) must be at least 1"):
        CheckpointConfig(every_steps=0)


def test_record_is_plain_json(saved):
    folder, states = saved
    record = json.loads((folder / "20" / "run" / "metadata").read_text())
    assert record["body"]["step"] == 20
    assert list(record["body"]["arrays"]) == sorted(array_names(states[20]))
