"""How a stage runs its layers over nano-batches: ping-pong, or one thing after another. Host only.

Ping-pong, the order of `pipeline.pingpong` (and of the published system):

    forward, layer i                              backward, layer i
    dispatch pong   | attend ping                                | block i-1 ping, forward again
    combine ping    | attend pong                 dispatch ping  | block i-1 pong, forward again
    combine pong    | block i, ping               dispatch pong  | attend ping, backward
    dispatch ping   | block i, pong               combine ping   | attend pong, backward
                                                  combine pong   | block i-1 ping, backward
                                                                 | block i-1 pong, backward

Where nothing is run again in the backward, ping's dispatch lies beside pong's block of the layer above,
the mirror image of the forward. An exchange and the compute beside it start together, and what
follows waits for both; an exchange of several hops meets as many parts of the compute, a part a hop.

Letters: S ranks, r ranks of the stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cad_jax.simulation.timeline import Timeline
from cad_jax.simulation.work import AttentionWork, Exchange, LinearWork

Mode = Literal["pingpong", "single_stream"]
PING, PONG = 0, 1


@dataclass
class Stage:
    """Ranks [first_rank, first_rank + r) of a timeline, which run the same program.

    ready: float64 [r], when each can go on.
    """

    timeline: Timeline
    first_rank: int
    ready: np.ndarray
    masked: np.ndarray | None = None  # bool [r]: ranks whose linear layers are on nothing

    # Pieces.

    def compute(self, kind: str, label: str, seconds: np.ndarray, after: np.ndarray) -> np.ndarray:
        if kind == "linear" and self.masked is not None and self.masked.any():
            return self._masked(label, seconds, after, self.masked)
        return self.timeline.compute(kind, label, seconds, after, self.first_rank)

    def _masked(self, label, seconds, after, masked: np.ndarray) -> np.ndarray:
        """Ranges of ranks that are masked or not, each an event of its own."""
        stop = np.empty(len(after))
        edges = np.flatnonzero(np.diff(masked)) + 1
        for part in np.split(np.arange(len(after)), edges):
            kind = "masked" if masked[part[0]] else "linear"
            stop[part] = self.timeline.compute(
                kind, label, seconds[part], after[part], self.first_rank + int(part[0])
            )
        return stop

    def exchange(self, label: str, hop: np.ndarray, group_ranks: int, after) -> np.ndarray:
        return self.timeline.collective(
            label, hop, after, group_ranks=group_ranks, first_rank=self.first_rank
        )

    def run(self, kind: str, label: str, seconds: np.ndarray) -> None:
        self.ready = self.compute(kind, label, seconds, self.ready)

    def exposed(self, label: str, exchange: Exchange, group_ranks: int) -> None:
        for hop in exchange.hops:
            self.ready = self.exchange(label, hop, group_ranks, self.ready)

    def beside(
        self,
        label: str,
        exchange: Exchange,
        group_ranks: int,
        kind: str,
        what: str,
        seconds: np.ndarray | Sequence[np.ndarray],
    ) -> None:
        """Each hop with its part of the compute, equal ones of `seconds` [r]; or parts of given
        seconds, as many as hops or more."""
        if isinstance(seconds, np.ndarray):
            parts = max(len(exchange.hops), 1)
            seconds = [seconds / parts] * parts
        for part, part_s in enumerate(seconds):
            after = self.ready
            done = self.compute(kind, what, part_s, after)
            if part < len(exchange.hops):
                came = self.exchange(label, exchange.hops[part], group_ranks, after)
                done = np.maximum(done, came)
            self.ready = done

    # Passes over the layers.

    def forward(
        self, nanos: Sequence[AttentionWork], linear: Sequence[LinearWork], layers: int, mode: Mode
    ) -> None:
        if mode == "pingpong" and len(nanos) == 2:
            self._pingpong_forward(nanos, linear, layers)
            return
        for layer in range(layers):
            for at, (work, lin) in enumerate(zip(nanos, linear, strict=True)):
                name = f"{layer}.{at}"
                self.run("linear", f"before {name}", lin.before_s)
                self._attend(
                    work, work.forward_steps or work.forward_s, work.dispatch, work.combine, name
                )
                self.run("linear", f"after {name}", lin.after_s)

    def backward(
        self, nanos: Sequence[AttentionWork], linear: Sequence[LinearWork], layers: int, mode: Mode
    ) -> None:
        if mode == "pingpong" and len(nanos) == 2:
            self._pingpong_backward(nanos, linear, layers)
            return
        for layer in reversed(range(layers)):
            for at, (work, lin) in enumerate(zip(nanos, linear, strict=True)):
                name = f"{layer}.{at} back"
                self.run("linear", f"after {name}", lin.after_s * (lin.backward + lin.again))
                again = lin.before_s * lin.again
                self.run("linear", f"before again {name}", again)
                steps = work.backward_steps or work.backward_s
                self._attend(work, steps, work.dispatch_backward, work.combine_backward, name)
                self.run("linear", f"before {name}", lin.before_s * lin.backward)

    def _attend(
        self,
        work: AttentionWork,
        seconds: np.ndarray | Sequence[np.ndarray],
        dispatch: Exchange,
        combine: Exchange,
        name: str,
    ) -> None:
        group, what = work.group_ranks, f"attend {name}"
        if isinstance(seconds, np.ndarray):
            self.exposed(f"dispatch {name}", dispatch, group)
            self.run("attention", what, seconds)
        else:
            self.beside(f"pass on {name}", dispatch, group, "attention", what, seconds)
        self.exposed(f"combine {name}", combine, group)

    def _pingpong_forward(self, nanos, linear, layers: int) -> None:
        ping, pong = nanos
        group = ping.group_ranks
        self.run("linear", "before 0.0", linear[PING].before_s)
        self.beside(
            "dispatch 0.0", ping.dispatch, group, "linear", "before 0.1", linear[PONG].before_s
        )
        for layer in range(layers):
            last = layer == layers - 1
            self.beside(
                f"dispatch {layer}.1", pong.dispatch, group,
                "attention", f"attend {layer}.0", ping.forward_s,
            )  # fmt: skip
            self.beside(
                f"combine {layer}.0", ping.combine, group,
                "attention", f"attend {layer}.1", pong.forward_s,
            )  # fmt: skip
            blocks = [lin.after_s if last else lin.block_s for lin in linear]
            self.beside(
                f"combine {layer}.1", pong.combine, group,
                "linear", f"block {layer}.0", blocks[PING],
            )  # fmt: skip
            if last:
                self.run("linear", f"block {layer}.1", blocks[PONG])
            else:
                self.beside(
                    f"dispatch {layer + 1}.0", ping.dispatch, group,
                    "linear", f"block {layer}.1", blocks[PONG],
                )  # fmt: skip

    def _pingpong_backward(self, nanos, linear, layers: int) -> None:
        ping, pong = nanos
        group = ping.group_ranks
        recomputes = any(lin.again for lin in linear)

        def dispatch_ping(layer: int, what: str, seconds: np.ndarray) -> None:
            self.beside(
                f"dispatch {layer}.0 back", ping.dispatch_backward, group, "linear", what, seconds
            )

        after = [lin.after_s * (lin.backward + lin.again) for lin in linear]
        self.run("linear", f"after {layers - 1}.0 back", after[PING])
        if recomputes:
            self.run("linear", f"after {layers - 1}.1 back", after[PONG])
        else:
            dispatch_ping(layers - 1, f"after {layers - 1}.1 back", after[PONG])
        for layer in reversed(range(layers)):
            # Below the first layer's attention lie its input projections alone.
            blocks = [lin.block_s if layer else lin.before_s for lin in linear]
            back = [block * lin.backward for block, lin in zip(blocks, linear, strict=True)]
            if recomputes:
                again = [block * lin.again for block, lin in zip(blocks, linear, strict=True)]
                self.run("linear", f"block {layer - 1}.0 again", again[PING])
                dispatch_ping(layer, f"block {layer - 1}.1 again", again[PONG])
            self.beside(
                f"dispatch {layer}.1 back", pong.dispatch_backward, group,
                "attention", f"attend {layer}.0 back", ping.backward_s,
            )  # fmt: skip
            self.beside(
                f"combine {layer}.0 back", ping.combine_backward, group,
                "attention", f"attend {layer}.1 back", pong.backward_s,
            )  # fmt: skip
            self.beside(
                f"combine {layer}.1 back", pong.combine_backward, group,
                "linear", f"block {layer - 1}.0 back", back[PING],
            )  # fmt: skip
            if recomputes or layer == 0:
                self.run("linear", f"block {layer - 1}.1 back", back[PONG])
            else:
                dispatch_ping(layer - 1, f"block {layer - 1}.1 back", back[PONG])
