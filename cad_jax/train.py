"""The training loop: one step is dispatched while a thread prepares the next and its plans.

    prefetch thread   documents of step n+1 -> plans -> device arrays
    main thread       agree on step n | dispatch step n | read the metrics of step n-1 | save

On CPU the loop waits for every step: the backend deadlocks with more than 32 programs in its queue,
and a plan that differed between processes would make one of them skip a collective.
"""

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from cad_jax.checkpoint import Checkpointer
from cad_jax.config import RunConfig
from cad_jax.feed import StepWork
from cad_jax.metrics import MetricsLog, Reporter
from cad_jax.prefetch import Prefetcher
from cad_jax.processes import Agreement
from cad_jax.sharding.cost import find_device
from cad_jax.train_step import TrainState, TrainStep


class NonFiniteLossError(RuntimeError):
    """The loss or its gradient is NaN or infinite: training cannot go on from here."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: after which step, why (one line), and the state."""

    step: int
    reason: str
    state: TrainState


@dataclass
class _Flight:
    """A step that was dispatched and whose metrics were not read yet."""

    step: int
    work: StepWork
    metrics: dict[str, jax.Array]
    wait_s: float
    checkpoint_s: float
    outcome: Callable[[], bool]


class StopRequest:
    """Set by SIGTERM or a first Ctrl-C: stop after the step in flight, with a checkpoint."""

    def __init__(self) -> None:
        self.signal_name = ""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While open, the two signals set the request; a second Ctrl-C interrupts at once."""
        previous = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}

        def request(number: int, frame: Any) -> None:
            self.signal_name = signal.Signals(number).name
            signal.signal(signal.SIGINT, signal.default_int_handler)

        for number in previous:
            signal.signal(number, request)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def model_flops(config: RunConfig, tokens: int, pairs: int) -> float:
    """FLOPs of one step's forward and backward, causal, nothing counted twice.

    Six per weight of a matrix product and token; 12 H D per layer and (query, key) pair.
    """
    model = config.model
    qkvo = 2 * (model.num_q_heads + model.num_kv_heads) * model.head_dim
    layer = model.embedding_dim * (qkvo + 3 * model.ffn_dim)
    weights = model.num_layers * layer + model.vocab_size * model.embedding_dim
    attention = 12 * model.num_q_heads * model.head_dim * model.num_layers
    return 6.0 * weights * tokens + float(attention) * pairs


@dataclass
class Loop:
    """One process's part of a run, from `step` finished steps to the end.

    metrics is None on processes that write no files.
    """

    config: RunConfig
    mesh: Mesh
    train_step: TrainStep
    state: TrainState
    step: int
    data_state: dict[str, Any]
    prefetcher: Prefetcher[StepWork]
    checkpointer: Checkpointer
    metrics: MetricsLog | None
    reporter: Reporter
    last_work: StepWork | None = None
    _saved_step: int = 0
    _stop: bool = False
    _late: bool = False
    _waiting: list[_Flight] = field(default_factory=list)
    _finished_s: float = 0.0

    def run(self, request: StopRequest) -> Outcome:
        """Train until the last step, a stop or an error; what is worth keeping is saved.

        Raises:
            NonFiniteLossError: checkpoints are those of steps before.
            PlanDisagreementError: on every process.
        """
        training = self.config.training
        block = self.mesh.devices.flat[0].platform == "cpu"
        agreement = Agreement(self.mesh)
        started = self._finished_s = time.perf_counter()
        limit_s = math.inf if training.max_minutes is None else 60 * training.max_minutes
        checkpoint_s = 0.0
        self._saved_step = self.step
        while self.step < training.steps and not self._stop:
            self._late = time.perf_counter() - started > limit_s
            work, wait_s = self._take(agreement)
            stop = bool(request.signal_name) or self._late
            outcome = agreement.start(self.step + 1, work.digests, stop)
            if block and outcome():
                break
            self.state, metrics = self.train_step.step(self.state, work.batch, work.arrays)
            self.step += 1
            self.last_work = work._replace(batch=None, arrays=None)
            self.data_state = work.data_state
            self._waiting.append(
                _Flight(self.step, self.last_work, metrics, wait_s, checkpoint_s, outcome)
            )
            checkpoint_s = 0.0
            save = self.step % self.config.checkpoint.every_steps == 0
            self._finish(leave=0 if block or save else 1)
            if save:
                checkpoint_s = self._save()
        self._finish(leave=0)
        if self._saved_step != self.step:
            self._save()
        self.checkpointer.wait()
        return Outcome(self.step, self._reason(request, training.steps), self.state)

    def _reason(self, request: StopRequest, steps: int) -> str:
        if self.step > steps:  # so it began: a resumed run, asked for fewer steps than it has done
            return (
                f"the run is at step {self.step} already, training.steps (={steps}) asks for fewer: "
                f"nothing was trained; add --steps with more than {self.step} to go on"
            )
        if self.step == steps:
            return f"all {steps} steps are done"
        resume = "add --resume to go on"
        if request.signal_name:
            return f"stopped by {request.signal_name} after step {self.step}; {resume}"
        if self._late:
            minutes = self.config.training.max_minutes
            return f"training.max_minutes (={minutes:g}) reached after step {self.step}; {resume}"
        return f"stopped by another process after step {self.step}; {resume}"

    def _take(self, agreement: Agreement) -> tuple[StepWork, float]:
        """The next step's work. Where it cannot be made, the other processes learn of it and what is
        done is saved."""
        try:
            return self.prefetcher.take()
        except Exception:
            agreement.start(self.step + 1, None, stop=True)
            self._finish(leave=0)
            if self._saved_step != self.step and jax.process_count() == 1:
                self._save()
            raise

    def _save(self) -> float:
        """Start saving the state; seconds it held up the loop. The steps' metrics must be in."""
        self._saved_step = self.step
        try:
            return self.checkpointer.save(
                self.step, self.state, self.data_state, self.config.to_dict()
            )
        except FloatingPointError as error:
            raise NonFiniteLossError(f"{error}: {self._what_is_kept()}") from error

    def _finish(self, leave: int) -> None:
        """Wait for the metrics of all dispatched steps but the last `leave`, and report them."""
        while len(self._waiting) > leave:
            flight = self._waiting.pop(0)
            self._stop |= flight.outcome()
            values = {name: float(np.asarray(value)) for name, value in flight.metrics.items()}
            now = time.perf_counter()
            step_s, self._finished_s = now - self._finished_s, now
            if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
                raise NonFiniteLossError(
                    f"loss {values['loss']} and gradient norm {values['grad_norm']} at step "
                    f"{flight.step}: {self._what_is_kept()}"
                )
            record = self._record(flight, values, step_s)
            if self.metrics is not None:
                self.metrics.write(record)
            self.reporter.step(record)

    def _what_is_kept(self) -> str:
        self.checkpointer.wait()
        steps = self.checkpointer.steps()
        kept = (
            f"the checkpoint of step {steps[-1]} is kept" if steps else "there is no checkpoint yet"
        )
        return (
            f"training stops and nothing of this step is saved; {kept}. Lower "
            "optimizer.learning_rate, or look at the documents of this step, and start again from "
            "a good state"
        )

    def _record(self, flight: _Flight, values: dict[str, float], step_s: float) -> dict[str, Any]:
        figures = flight.work.figures
        plan_wait_s = min(flight.wait_s, flight.work.plan_s)
        device = find_device(self.mesh.devices.flat[0].device_kind)
        mfu = None
        if device is not None and device.peak_flops is not None:
            flops = model_flops(self.config, figures["tokens"], flight.work.pairs)
            mfu = flops / (step_s * device.peak_flops * self.mesh.size)
        return {
            "step": flight.step,
            "loss": values["loss"],
            "grad_norm": values["grad_norm"],
            "learning_rate": values["learning_rate"],
            "tokens": figures["tokens"],
            "target_tokens": figures["target_tokens"],
            "padding_tokens": figures["padding_tokens"],
            "documents": figures["documents"],
            "nano_batches": figures["nano_batches"],
            "step_s": step_s,
            "plan_s": flight.work.plan_s,
            "plan_wait_s": plan_wait_s,
            "data_wait_s": flight.wait_s - plan_wait_s,
            "checkpoint_s": flight.checkpoint_s,
            "tokens_per_s": figures["tokens"] / step_s,
            "mfu": mfu,
            "attn_max_over_mean_home": figures["attn_max_over_mean_home"],
            "attn_max_over_mean": figures["attn_max_over_mean"],
            "exchange_bytes_mean": figures["exchange_bytes_mean"],
            "exchange_bytes_max": figures["exchange_bytes_max"],
            "wire_bytes": figures["wire_bytes"],
            "capacity_used": figures["capacity_used"],
            "fallback_tasks": figures["fallback_tasks"],
            "compiles": self.train_step.step._cache_size(),  # pyright: ignore
        }
