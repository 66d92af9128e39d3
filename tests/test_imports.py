"""Imports run one way, host planning never reaches jax, and nothing hides inside functions."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import cad_jax

PACKAGE_DIR = Path(__file__).resolve().parents[1] / "cad_jax"
SOURCES = {
    ".".join(path.relative_to(PACKAGE_DIR.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    ): path
    for path in sorted(PACKAGE_DIR.rglob("*.py"))
}
HOST_PACKAGES = ("cad_jax.sharding.", "cad_jax.simulation.")
DEVICE_PARTS = {
    f"cad_jax.sharding.{name}" for name in ("collectives", "exchange", "mesh", "tables")
}
HOST_MODULES = {
    name for name in SOURCES if name.startswith(HOST_PACKAGES) and name not in DEVICE_PARTS
} | {
    "cad_jax.command_line",
    "cad_jax.pool_limits",
    "cad_jax.plan_args",
    "cad_jax.plan_plot",
    "cad_jax.plan_report",
    "cad_jax.schedule_report",
    "cad_jax.simulate_args",
    "cad_jax.simulate_report",
    "cad_jax.simulate_steps",
    "cad_jax.lengths_report",
    "cad_jax.advise_report",
    "cad_jax.attention.prepared",
    "cad_jax.pipeline.schedule",
    "cad_jax.pipeline.ticks",
    "cad_jax.pipeline.prediction",
    "cad_jax.pipeline.memory",
}
# From the bottom up; a module imports from its own layer or from below. The longest prefix counts.
LAYERS = (
    ("cad_jax.sharding",),
    (
        "cad_jax.attention.prepared",
        "cad_jax.pipeline.schedule",
        "cad_jax.pipeline.ticks",
        "cad_jax.pipeline.prediction",
        "cad_jax.pipeline.memory",
    ),
    ("cad_jax.simulation",),
    (
        "cad_jax.sharding.collectives",
        "cad_jax.sharding.exchange",
        "cad_jax.sharding.mesh",
        "cad_jax.sharding.tables",
    ),
    ("cad_jax.attention.base", "cad_jax.attention.varlen", "cad_jax.attention.kernels"),
    ("cad_jax.attention",),
    (
        "cad_jax.model_config",
        "cad_jax.attention_config",
        "cad_jax.parameters",
        "cad_jax.layer",
        "cad_jax.model",
        "cad_jax.hf",
        "cad_jax.pipeline.remat",
    ),
    ("cad_jax.pipeline",),
    ("cad_jax.xla_options",),
    (
        "cad_jax.tokenizer",
        "cad_jax.sources",
        "cad_jax.token_store",
        "cad_jax.packed_batch",
        "cad_jax.data",
    ),
    ("cad_jax.command_line", "cad_jax.pool_limits"),
    (
        "cad_jax.optimizer",
        "cad_jax.checkpoint",
        "cad_jax.metrics",
        "cad_jax.plan_args",
        "cad_jax.plan_plot",
        "cad_jax.plan_report",
        "cad_jax.schedule_report",
        "cad_jax.lengths_report",
    ),
    ("cad_jax.simulate_args", "cad_jax.simulate_steps", "cad_jax.simulate_report"),
    ("cad_jax.advise_report",),
    ("cad_jax.prefetch", "cad_jax.processes", "cad_jax.ragged_check"),
    (
        "cad_jax.topologies",
        "cad_jax.scheduled_hlo",
        "cad_jax.thunks",
        "cad_jax.overlap",
    ),
    ("cad_jax.train_step", "cad_jax.feed"),
    ("cad_jax.timing", "cad_jax.profiler"),
    ("cad_jax.config", "cad_jax.recipes", "cad_jax.resume", "cad_jax.run_folder"),
    ("cad_jax.train", "cad_jax.run_report"),
    ("cad_jax.tolerance", "cad_jax.settled", "cad_jax.server_speeds"),
    ("cad_jax.launch",),
    ("cad_jax.compiled_step", "cad_jax.compile_report"),
    ("cad_jax.recipe_arguments",),
    (
        "cad_jax.train_command",
        "cad_jax.plan_command",
        "cad_jax.simulate_command",
        "cad_jax.lengths_command",
        "cad_jax.advise_command",
        "cad_jax.compile_command",
        "cad_jax.profile_command",
        "cad_jax.speeds_command",
    ),
    ("cad_jax.__main__",),
)
HEIGHT_OF_PREFIX = {prefix: rank for rank, layer in enumerate(LAYERS) for prefix in layer}


def imported_modules(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


TREES = {name: ast.parse(path.read_text()) for name, path in SOURCES.items()}
# The package's own table of contents loads lazily and for the type checker only.
GRAPH = {
    name: {n for n in imported_modules(tree) if n in SOURCES} - {"cad_jax"}
    for name, tree in TREES.items()
    if name != "cad_jax"
}


def height(module: str) -> int:
    prefix = module
    while prefix and prefix not in HEIGHT_OF_PREFIX:
        prefix = prefix.rpartition(".")[0]
    assert prefix, f"{module} has no place in LAYERS: give it one"
    return HEIGHT_OF_PREFIX[prefix]


def test_no_cycles() -> None:
    try:
        list(TopologicalSorter(GRAPH).static_order())
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def test_imports_run_downwards() -> None:
    wrong = [
        f"{module} imports {other}"
        for module, others in GRAPH.items()
        for other in others
        if height(other) > height(module)
    ]
    assert not wrong


def test_no_imports_inside_functions() -> None:
    wrong = [
        f"{module}:{node.lineno}"
        for module, tree in TREES.items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert not wrong


def test_nothing_iterates_over_a_set() -> None:
    """The order of a set of strings differs from process to process, and all must trace one
    program: two hosts whose collectives stand in another order wait for each other for ever."""

    def is_set(node: ast.expr) -> bool:
        if isinstance(node, ast.BinOp):
            return is_set(node.left) or is_set(node.right)
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        return isinstance(node, ast.Set | ast.SetComp) or (
            called and node.func.id in ("set", "frozenset")
        )

    wrong = [
        f"{module}:{node.iter.lineno}"
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.For | ast.comprehension) and is_set(node.iter)
    ]
    assert not wrong


def test_host_modules_never_reach_jax() -> None:
    assert "cad_jax.sharding.planner" in HOST_MODULES and set(SOURCES) >= HOST_MODULES
    reached, todo = set(), list(HOST_MODULES)
    while todo:
        module = todo.pop()
        reached.add(module)
        todo += [other for other in GRAPH[module] if other not in reached]
    for module in sorted(reached):
        roots = {name.split(".")[0] for name in imported_modules(TREES[module])}
        assert not roots & {"jax", "jaxlib", "flax", "optax", "orbax", "chex"}, module


def test_package_inits_are_empty() -> None:
    full = [m for m, p in SOURCES.items() if p.name == "__init__.py" and p.read_text().strip()]
    assert full == ["cad_jax"]


def test_planning_works_without_jax() -> None:
    script = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"jax", "jaxlib"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import cad_jax
plan = cad_jax.plan_documents([700, 0, 40, 1300], servers=4, tokens_per_server=512,
    num_q_heads=8, num_kv_heads=2, head_dim=64)
plan.check()
arrays = plan.arrays()
assert arrays.k_lo.shape[0] == 4
assert not {"jax", "jaxlib"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_importing_starts_no_backend() -> None:
    script = """
import sys, cad_jax
assert "jax" not in sys.modules
from cad_jax import core_attention, make_mesh
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_public_names_all_load() -> None:
    assert set(cad_jax.__all__) == set(cad_jax._MODULE_OF_NAME)
    assert all(getattr(cad_jax, name) is not None for name in cad_jax.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = cad_jax.nothing
