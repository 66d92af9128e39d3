"""What `cad-jax plan` is asked for: documents, a pool, ways of planning, files. Works without jax."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from cad_jax.command_line import check_number, check_outputs
from cad_jax.pool_limits import MAX_MICROBATCHES, MAX_POOL_TOKENS, MAX_TOLERANCE
from cad_jax.sharding.cost import DEVICES, model_shape
from cad_jax.sharding.placement import Placement, check_placement
from cad_jax.simulation.named_costs import profile_file

MAX_REPEATS = 100_000
# Of one microbatch's plan; of a pipelined step.
ONE_PLAN = (
    "transport",
    "planner",
    "placement",
    "key_ranges",
    "node",
    "speeds",
    "profile",
    "device",
    "repeat",
)
STEP = ("microbatches", "virtual_stages", "tp", "pingpong")


@dataclass(frozen=True)
class PlanArgs:
    """Plans the documents of a list of lengths over a pool of servers, and reports the plan."""

    lengths: Path
    """File with one document length in tokens a line; blank lines are skipped."""
    servers: int
    """Ranks of the pool, all pipeline stages together: each owns tokens (is their home), each computes core
    attention (is a server)."""
    tokens_per_server: int
    """Tokens of a rank in what is planned at once: a nano-batch, or with --pp a microbatch. The first servers x
    tokens-per-server tokens of the file are planned."""
    model: str = "llama3-8b"
    """Whose attention heads travel: llama3-8b, llama3-70b, llama-34b and others."""
    tolerance: float = 0.05
    """How far over the mean (over its share, with --speeds) the most loaded server may be."""
    key_ranges: int = 1
    """Servers among which the keys of one query may be divided; their partial outputs merge at home.
    At 1 every task has its whole causal prefix; 8 lowers traffic of long documents the most."""
    transport: Literal["auto", "direct", "relay", "ragged"] = "auto"
    """How rows travel: capacities are for it, and keys are divided where it then sends less."""
    node: int = 1
    """Servers of a node, within which bytes are cheap."""
    speeds: Path | None = None
    """File with the relative speed of each server, one a line, as `cad-jax speeds` writes it: a slow one gets
    less."""
    profile: str | None = None
    """Compare plans by seconds instead of bytes: kernel times from a CSV of `cad-jax profile`, the name of
    one that ships (h200_fa2, h200_fa3, cpu), or "analytic". The report then has the seconds."""
    device: str = "h200"
    """Of --profile: h200, h100, a100, b200, cpu."""
    planner: str | None = None
    """module:function in the place of this project's planner, `cad_jax.plan_documents`: takes its
    arguments, returns a plan. The plan is checked."""
    placement: Placement = "sequential"
    """Which rank gets which documents, by their order: sequential as listed, aligned to ranks, or
    searched for the fewest bytes on the wire of the transport, forward and backward."""
    repeat: int = 1
    """Plan so many times; the median and the 99th percentile of the seconds go into the JSON."""
    json: Path | None = None
    """Write the plan and its figures here, as `cad_jax.Plan.load` reads them: a plan to run."""
    plot: Path | None = None
    """Draw work per server before and after planning, who serves whom, and where the longest document's
    pieces went (PNG)."""
    pp: int = 1
    """Pipeline stages among which the servers are divided; above 1 a whole step is planned tick by
    tick, and its seconds are predicted. The plan that is shown, drawn and written is that of the tick with most work."""
    microbatches: int = 8
    """Microbatches of that step."""
    virtual_stages: int = 1
    """Parts of the model per stage; above 1 the schedule is interleaved."""
    tp: int = 1
    """Devices that share a server's tokens, for that prediction."""
    pingpong: bool = False
    """Divide that step's microbatches into two nano-batches."""

    def check(self) -> None:
        """Raises ValueError for arguments that are wrong by themselves, or files that cannot be written."""
        check_placement(self.placement)
        for name in ("servers", "tokens_per_server"):
            option = f"--{name.replace('_', '-')}"
            check_number(
                option, getattr(self, name), 1, MAX_POOL_TOKENS, "plan fewer, but one at least"
            )
        pool_tokens = self.servers * self.tokens_per_server
        if pool_tokens > MAX_POOL_TOKENS:
            raise ValueError(
                f"--servers x --tokens-per-server must be at most {MAX_POOL_TOKENS} tokens, got "
                f"{self.servers} x {self.tokens_per_server} = {pool_tokens}: plan fewer of either"
            )
        model_shape(self.model)  # names those that are known
        check_number("--tolerance", self.tolerance, 0, MAX_TOLERANCE, "0.05 is usual")
        check_number(
            "--key-ranges", self.key_ranges, 1, MAX_POOL_TOKENS, "use 1 for whole prefixes"
        )
        check_number("--node", self.node, 1, self.servers, "use 1 where nodes play no part")
        if self.servers % self.node:
            raise ValueError(
                f"--node (={self.node}) must divide --servers (={self.servers}), since nodes are alike: "
                "use 1 where nodes play no part"
            )
        check_number("--repeat", self.repeat, 1, MAX_REPEATS, "use 1")
        check_number("--pp", self.pp, 1, self.servers, "use 1 for no pipeline")
        check_number("--microbatches", self.microbatches, 1, MAX_MICROBATCHES, "8 is usual")
        if self.device not in DEVICES:
            raise ValueError(f"--device must be one of {', '.join(DEVICES)}, got {self.device}")
        if self.device != "h200" and self.profile is None:
            raise ValueError(
                f"--device (={self.device}) is of --profile: give --profile as well, or leave it out"
            )
        if self.pp > 1 and (given := self._given(ONE_PLAN)):
            raise ValueError(
                f"{given}: of one microbatch's plan alone, and --pp predicts a step planned tick by tick: "
                "leave one or the other out"
            )
        if self.pp == 1 and (given := self._given(STEP)):
            raise ValueError(
                f"{given}: of a pipelined step alone: give --pp above 1 as well, or leave that out"
            )
        read = [self.lengths, self.speeds, profile_file(self.profile)]
        check_outputs({"--json": self.json, "--plot": self.plot}, read)

    def _given(self, names: tuple[str, ...]) -> str:
        """Of these options those that are not as by default, with commas between."""
        defaults = {field.name: field.default for field in fields(self)}
        given = [n for n in names if getattr(self, n) != defaults[n]]
        return ", ".join(f"--{n.replace('_', '-')}" for n in given)
