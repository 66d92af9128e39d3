"""Loss and gradients of the training step as a run makes it, measured against a float64 model.

A case is one point of the product of meshes, schedules, ways to overlap and to distribute attention, and
dtypes. Strategies, plans and batches come from the product's own launch and feed; only the documents
are made here.
"""

import functools
import itertools
from collections.abc import Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from cad_jax.config import AttentionConfig, MeshConfig, RunConfig, TrainingConfig
from cad_jax.feed import StepFeed
from cad_jax.launch import make_run_strategies
from cad_jax.model import Llama
from cad_jax.packed_batch import PackedBatch
from cad_jax.parameters import Parallelism, describe
from cad_jax.sharding.mesh import make_mesh
from cad_jax.train_step import Batch, TrainStep
from tests import llama_oracle
from tests.llama_cases import jit, make_batch, one_device_attend, random_params, tiny_config

LAYERS = 8  # every stage and every virtual stage holds as many
# Tokens of a nano-batch by dp: enough for tasks to be cut and moved.
NANO_TOKENS = {1: 256, 2: 256, 4: 384, 8: 640}
# Documents of ping and of pong in each microbatch, in thousandths of a nano-batch, rounded up: 1 is a
# single token. What they leave is padding.
DOCUMENTS = (
    ((30, 800, 10), (600, 0, 1, 300)),
    ((1000,), (250, 1, 230, 240, 260)),
    ((1, 1, 1), (740, 195)),  # no targets in ping
    ((996,), (125,) * 8),
    ((506, 490), (5, 700)),
    ((175, 130, 350, 35, 270), (940, 10)),
    ((20, 960), (66, 0, 527, 390)),
)
KERNELS = {"single_stream": "xla", "pingpong": "reference"}  # what compiles and runs faster
FLOAT32_ALLOWED = 2e-5
LOSS = "loss"


class Case(NamedTuple):
    """`way` is a strategy, with its transport where it has one."""

    mesh: tuple[int, int, int]  # pp, dp, tp
    microbatches: int
    virtual_stages: int
    tp_splits: str
    overlap: str
    way: str
    dtype: str

    def __str__(self) -> str:
        mesh = "x".join(map(str, self.mesh))
        return (
            f"{mesh}-M{self.microbatches}-V{self.virtual_stages}-{self.tp_splits}-{self.overlap}-"
            f"{self.way}-{self.dtype}"
        )


FACTORS = {
    "mesh": ((1, 8, 1), (2, 4, 1), (4, 2, 1), (8, 1, 1), (2, 2, 2), (4, 1, 2)),
    "microbatches": (1, 2, 4, 7),
    "virtual_stages": (1, 2),
    "tp_splits": ("weights", "tokens"),
    "overlap": ("single_stream", "pingpong"),
    "way": ("cad/direct", "cad/relay", "all_gather", "ring"),
    "dtype": ("float32", "bfloat16"),
}


def exists(case: Case) -> bool:
    """Whether a run can be configured so, and is no other case under another name."""
    pp, _, tp = case.mesh
    interleaves = pp > 1 and case.microbatches % pp == 0
    return (
        (case.virtual_stages == 1 or interleaves)
        and (case.tp_splits == "weights" or tp > 1)
        and (case.overlap == "single_stream" or case.way.startswith("cad/"))
    )


def product() -> list[Case]:
    """Every case there is."""
    return [
        case
        for case in itertools.starmap(Case, itertools.product(*FACTORS.values()))
        if exists(case)
    ]


class Documents:
    """Packed microbatches as `data.DocumentBatches` gives them."""

    store = SimpleNamespace(digest="")

    def __init__(self, nano_tokens: int, nano_batches: int) -> None:
        self.max_document_tokens = nano_tokens
        self.tokens_per_microbatch = 2 * nano_tokens
        self.nano_batches = nano_batches
        self._coming = map(self._packed, range(len(DOCUMENTS)))

    def __next__(self) -> PackedBatch:
        return next(self._coming)

    def state(self) -> dict:
        return {}

    def sample_nano_lengths(self, batches: int) -> list[tuple[np.ndarray, ...]]:
        return [self._packed(number).nano_lengths for number in range(batches)]

    def _packed(self, number: int) -> PackedBatch:
        nano_lengths = lengths_of(self.max_document_tokens, number)
        lengths = np.concatenate(nano_lengths)
        batch, _ = nano_batches(self.max_document_tokens, number)
        ids, positions, targets, weights = (field.reshape(-1) for field in batch)
        packed = PackedBatch(
            lengths=lengths,
            document_ids=np.arange(len(lengths)),
            document_starts=np.zeros(len(lengths), np.int64),
            ids=ids,
            positions=positions,
            targets=targets,
            weights=weights,
            padding_tokens=int(self.tokens_per_microbatch - lengths.sum()),
            target_tokens=int(weights.sum()),
            context_lost_tokens=0,
            nano_lengths=nano_lengths,
        )
        return packed if self.nano_batches == 2 else packed.undivided()


def lengths_of(nano_tokens: int, number: int) -> tuple[np.ndarray, ...]:
    """Document lengths of ping and of pong in a microbatch."""
    return tuple(-(-np.asarray(shares) * nano_tokens // 1000) for shares in DOCUMENTS[number])


def nano_batches(nano_tokens: int, number: int) -> tuple[Batch, np.ndarray]:
    """Ping and pong of a microbatch: fields and documents of their tokens, [2, nano_tokens] each."""
    lengths = lengths_of(nano_tokens, number)
    return make_batch(lengths, nano_tokens, tiny_config().vocab_size, seed=number)


def params():
    """Global, the same for every case."""
    values = random_params(describe(tiny_config(num_layers=LAYERS), Parallelism()))
    # Weights that keep a row's size about as it is: larger ones would amplify rounding by layers.
    layers = jax.tree.map(lambda p: 0.6 * p if p.ndim == 3 else p, values["layers"])
    return {**values, "layers": layers}


def run_config(case: Case) -> RunConfig:
    pp, dp, tp = case.mesh
    name, _, transport = case.way.partition("/")
    return RunConfig(
        name="exactness",
        folder="",
        model=tiny_config(num_layers=LAYERS, dtype=case.dtype),
        mesh=MeshConfig(pp, dp, tp, case.tp_splits, case.virtual_stages),  # pyright: ignore
        attention=AttentionConfig(
            strategy=name,  # pyright: ignore
            kernel=KERNELS[case.overlap],
            tolerance=0.0,
            transport=transport or "auto",  # pyright: ignore
            capacity_plans=case.microbatches,
        ),
        training=TrainingConfig(
            tokens_per_microbatch=2 * NANO_TOKENS[dp],
            microbatches=case.microbatches,
            overlap=case.overlap,  # pyright: ignore
        ),
    )


def run(case: Case):
    """Loss and gradients of the case's step, on virtual devices."""
    config = run_config(case)
    config.check()
    mesh = make_mesh(*case.mesh)
    data = Documents(NANO_TOKENS[config.mesh.dp], config.nano_batches)
    strategy, nano_strategy = make_run_strategies(config, data)  # pyright: ignore
    step = TrainStep(
        config.model,
        mesh,
        strategy,
        config.optimizer,
        nano_strategy=nano_strategy,
        schedule=config.schedule(),
        tokens_over_tp=case.tp_splits == "tokens",
    )
    feed = StepFeed(
        data,  # pyright: ignore
        strategy,
        step,
        mesh,
        case.microbatches,
        nano_strategy,
        config.schedule(),
    )
    work = feed.make()
    assert work.batch.ids.shape[:2] == (case.microbatches, config.nano_batches)
    if case.way.startswith("cad/"):  # else its exchanges would go untested
        assert work.figures["attn_max_over_mean"] < work.figures["attn_max_over_mean_home"]
    placed = jax.device_put(params(), step.state_shardings.params)
    return jax.block_until_ready(jit(step.loss_and_gradients)(placed, work.batch, work.arrays))


class Values(NamedTuple):
    """Summed nats of some tokens, how many have a target, and the gradients of the sum, float64."""

    nats: float
    targets: float
    gradients: dict


@cache
def exact(nano_tokens: int, number: int) -> Values:
    """Of a microbatch, in float64."""
    batch, documents = nano_batches(nano_tokens, number)
    config = tiny_config(num_layers=LAYERS)
    loss, gradients = llama_oracle.loss_and_gradients(params(), config, batch, documents)
    targets = float(batch.weights.sum())
    return Values(loss * targets, targets, jax.tree.map(lambda g: g * targets, gradients))


@cache
def plain(nano_tokens: int, number: int, dtype: str) -> Values:
    """Of a microbatch, by the model on one device with dense attention."""
    batch, documents = nano_batches(nano_tokens, number)
    total = [_plain(params(), dtype, *nano) for nano in zip(*batch, documents, strict=True)]
    nats, gradients = jax.tree.map(lambda *x: np.sum(np.asarray(x, np.float64), axis=0), *total)
    return Values(float(nats), float(batch.weights.sum()), gradients)


@partial(jit, static_argnums=1)
def _plain(params, dtype, ids, positions, targets, weights, documents):
    config = tiny_config(num_layers=LAYERS, dtype=dtype)
    definition, _ = nnx.split(nnx.eval_shape(lambda: Llama(config)))

    def nats(params):
        model = nnx.merge(definition, params)
        x = model.hidden(ids, positions, one_device_attend(documents))
        return model.loss(x, targets, weights)

    return jax.value_and_grad(nats)(params)


def step_of(values: Sequence[Values]) -> tuple[float, dict]:
    """Loss and gradients of a step of these microbatches: means over all their targets."""
    total = functools.reduce(partial(jax.tree.map, np.add), values)
    return total.nats / total.targets, jax.tree.map(lambda g: g / total.targets, total.gradients)


def errors_of(result, want) -> dict[str, float]:
    """Relative errors of (loss, gradients): of the loss, and in Frobenius norm of every parameter's
    gradient, layer by layer."""
    (loss, gradients), (want_loss, want_gradients) = result, want
    errors = llama_oracle.relative_errors(_by_layer(gradients), _by_layer(want_gradients))
    return {LOSS: abs(float(loss) - want_loss) / want_loss, **errors}


def _by_layer(gradients: dict) -> dict:
    layers = {name: list(np.asarray(value)) for name, value in gradients["layers"].items()}
    return {**gradients, "layers": layers}


@cache
def plain_errors(nano_tokens: int, microbatches: int, dtype: str) -> dict[str, float]:
    """`errors_of` the step on one device. The error of one loss is a single number and may be small
    by luck: for it stands the largest of the single microbatches."""
    own = [plain(nano_tokens, m, dtype) for m in range(len(DOCUMENTS))]
    want = [exact(nano_tokens, m) for m in range(len(DOCUMENTS))]
    losses = [step_of([x])[0] / step_of([y])[0] - 1 for x, y in zip(own, want, strict=True)]
    errors = errors_of(step_of(own[:microbatches]), step_of(want[:microbatches]))
    return {**errors, LOSS: float(np.max(np.abs(losses)))}


class Measured(NamedTuple):
    """A case's largest errors, and the largest as a fraction of what is allowed."""

    loss_error: float
    gradient_error: float
    least_exact: str  # the gradient with that error
    fraction_of_allowed: float


def measure(case: Case) -> Measured:
    """Runs a case. Allowed are 2e-5 in float32, in bfloat16 twice the errors on one device."""
    nano_tokens = NANO_TOKENS[case.mesh[1]]
    want = step_of([exact(nano_tokens, m) for m in range(case.microbatches)])
    errors = errors_of(run(case), want)
    if case.dtype == "float32":
        allowed = dict.fromkeys(errors, FLOAT32_ALLOWED)
    else:
        own = plain_errors(nano_tokens, case.microbatches, case.dtype)
        allowed = {name: 2 * error for name, error in own.items()}
    loss_error = errors.pop(LOSS)
    fractions = [loss_error / allowed[LOSS], *(errors[name] / allowed[name] for name in errors)]
    worst = list(errors)[np.argmax(list(errors.values()))]  # a NaN counts as the largest
    return Measured(loss_error, errors[worst], worst, float(np.max(fractions)))
