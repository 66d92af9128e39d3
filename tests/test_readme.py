"""README's example runs as printed and computes attention."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()

CHECK = """
import sys
sys.path.insert(0, {tests!r})
import oracles
queries, keys, values = (np.asarray(x, np.float64) for x in (q, k, v))
want = oracles.causal_documents(queries, keys, values, [64] * 60).out
got = np.asarray(jax.jit(lambda *a: cad_jax.core_attention(*a, mesh=mesh))(q, k, v, plan.arrays()))
assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)
"""


def test_example_runs_as_printed() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(example.splitlines()) <= 30
    script = example + CHECK.format(tests=str(ROOT / "tests"))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    before, after = re.findall(r"\d+\.\d+", lines[0])[:2]
    assert float(before) > 1.5 > 1.2 > float(after)
    assert lines[-1] == "programs compiled: 1"


def test_tree_names_every_module() -> None:
    modules = {path.name for path in (ROOT / "cad_jax").rglob("*.py")} - {"__init__.py"}
    missing = sorted(name for name in modules if name not in README)
    assert not missing


def test_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"^make ([a-z-]+)", README, re.M))
    assert named and named <= targets
