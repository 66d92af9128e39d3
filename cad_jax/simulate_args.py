"""What `cad-jax simulate` is asked for: documents, a cluster, strategies, files. Works without jax."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cad_jax.command_line import check_number, check_outputs
from cad_jax.pool_limits import MAX_MICROBATCHES, MAX_POOL_TOKENS, MAX_TOLERANCE, check_memory
from cad_jax.sharding.cost import DEVICES
from cad_jax.simulation.candidates import MAX_STEPS, enough_steps
from cad_jax.simulation.causes import Name as Cause
from cad_jax.simulation.named_costs import profile_file
from cad_jax.simulation.step import Overlap
from cad_jax.simulation.workloads import WORKLOADS

Strategy = Literal["cad", "planner", "published", "home", "all_gather", "ring", "wlb"]
PIPELINE_MICROBATCHES = 8  # where stages are asked for and microbatches are not
MAX_HEADROOM = 1000
MAX_SEED = 2**31
BANDWIDTHS_GB_S = (1e-3, 1e6)


@dataclass(frozen=True)
class SimulateArgs:
    """Simulates training steps, event by event, under each strategy. Everything printed is simulated."""

    ranks: int
    """Ranks of the pool, all pipeline stages together; each is tp devices, and each a server (`plan` says
    --servers)."""
    tokens_per_rank: int
    """Tokens of a rank in a nano-batch (`plan` says --tokens-per-server); a microbatch has twice as many."""
    lengths: Path | None = None
    """File with one document length in tokens a line, from which steps are drawn and packed as in training; or give
    --workload."""
    workload: str | None = None
    """Instead of --lengths: pretrain, prolong (as published), shuffled, mixed or one_long."""
    longest_tokens: int = 131_072
    """Longest document of --workload."""
    steps: int | None = None
    """Steps that are drawn and simulated; the table has their means. By default four microbatches' worth, two from
    32 ranks on."""
    seed: int = 0
    """Of the order in which documents are drawn."""
    strategies: tuple[Strategy, ...] = ("cad", "published", "home", "all_gather", "ring", "wlb")
    """Which to simulate; the trace and the plot show the first, and ratios are to it. cad: this
    project's plans. planner: the plans of --planner, last unless named. published: the planner of the published system. home: nothing is planned.
    all_gather, ring: every document over all ranks of a stage, keys gathered or passed around. wlb:
    variable-length packing (WLB-LLM), the published baseline."""
    model: str = "llama3-8b"
    """Whose layers: llama3-8b, llama3-70b, llama-34b and others."""
    device: str = "h200"
    """Of the cluster: h200, h100, a100, b200, cpu."""
    profile: str | None = None
    """Kernel times: a CSV of `cad-jax profile`, the name of one that ships (h200_fa2, h200_fa3, cpu), or
    "analytic" for a fixed fraction of the device's peak. By default h200_fa3 on h100 and h200, cpu on
    cpu, else analytic."""
    tp: int = 8
    """Devices that share a rank's tokens."""
    tp_splits: Literal["weights", "tokens"] = "tokens"
    """What tp splits outside attention, for the memory."""
    pp: int = 1
    """Pipeline stages."""
    microbatches: int | None = None
    """Of a step; by default 8 with stages, 1 without."""
    tolerance: float | None = None
    """Of all planners: how far over the mean the most loaded server may be. By default, as in training, the one of
    fewest simulated seconds, of each planner its own."""
    transport: Literal["auto", "direct", "relay", "ragged"] = "auto"
    """Of all plans but the published planner's; auto takes the one of fewest simulated seconds, as in training; ragged
    moves only the rows needed, without padding (not on cpu)."""
    key_ranges: int = 1
    """Servers among which cad and planner may divide the keys of one query, as in training."""
    node: int = 1
    """Servers of a node as cad and planner know them, within which bytes are cheap to them; as in training, 1 unless told."""
    planner: str | None = None
    """module:function, a planner of one's own, as in training: simulated beside the others as `planner`. Its plans
    are checked."""
    speeds: Path | None = None
    """File with the relative speed of each rank, one a line, as `cad-jax speeds` writes it: everything a slow one
    computes takes longer, and cad and planner give it less attention."""
    overlap: Overlap = "pingpong"
    """How exchanges of planners lie beside compute; home takes this or a single stream, whatever is faster."""
    between_nodes_gb_s: float | None = None
    """Network of a GPU per direction, 1e9 bytes/s; by default the device's."""
    recompute: float = 1.0
    """Share of the linear layers that a backward runs again; this trainer runs all of them."""
    all_remote: bool = False
    """Count every exchange between ranks at the speed of the network between nodes, also where ranks
    share a node."""
    causes: tuple[Cause, ...] = ()
    """Costs that measurements of the published system show and its description leaves out: copies, slow_gathers,
    slow_kernels (fitted; sources in cad_jax/simulation/causes.py)."""
    headroom: float | None = None
    """Of wlb, at least 1: a microbatch may hold so many times the mean tokens, and needs memory for
    them; the published baseline ran with 1, no room at all. By default the faster of 1 and 2."""
    json: Path | None = None
    """Write the figures here."""
    trace: Path | None = None
    """Write the first strategy's events of one step here, for ui.perfetto.dev: of the step nearest to the mean."""
    plot: Path | None = None
    """Draw the same step's timeline here (PNG)."""

    @property
    def step_microbatches(self) -> int:
        """M, given or by default."""
        return self.microbatches or (PIPELINE_MICROBATCHES if self.pp > 1 else 1)

    @property
    def step_count(self) -> int:
        """Steps, given or by default."""
        return self.steps or enough_steps(self.ranks, self.step_microbatches)

    @property
    def all_strategies(self) -> tuple[Strategy, ...]:
        """Those named, and `planner` last where --planner alone asks for it."""
        unnamed = self.planner is not None and "planner" not in self.strategies
        return (*self.strategies, "planner") if unnamed else self.strategies

    def check(self) -> None:
        """Raises ValueError for arguments that are wrong by themselves."""
        if (self.lengths is None) == (self.workload is None):
            raise ValueError("give documents once: either --lengths FILE or --workload NAME")
        if self.workload is not None and self.workload not in WORKLOADS:
            raise ValueError(
                f"--workload must be one of {', '.join(WORKLOADS)}, got {self.workload}"
            )
        if self.device not in DEVICES:
            raise ValueError(f"--device must be one of {', '.join(DEVICES)}, got {self.device}")
        if self.device == "cpu" and self.transport == "ragged":
            raise ValueError(
                "--transport ragged needs GPUs, got --device cpu: use direct, relay or auto"
            )
        if not self.strategies:
            raise ValueError("--strategies must name at least one: cad, for instance")
        if len(set(self.strategies)) < len(self.strategies):
            raise ValueError(
                f"--strategies must name each once, got {' '.join(self.strategies)}: leave out the second"
            )
        if "planner" in self.strategies and self.planner is None:
            raise ValueError(
                "--strategies has planner, which is of --planner: give --planner module:function as well, or leave "
                "it out"
            )
        for name in ("ranks", "tokens_per_rank", "tp", "pp"):
            flag = f"--{name.replace('_', '-')}"
            check_number(flag, getattr(self, name), 1, MAX_POOL_TOKENS, "use 1 or more")
        check_number("--microbatches", self.microbatches, 1, MAX_MICROBATCHES, "8 is usual")
        check_number("--steps", self.steps, 1, MAX_STEPS, "4 give a fair mean")
        check_number("--seed", self.seed, 0, MAX_SEED, "0 is usual")
        check_number("--tolerance", self.tolerance, 0, MAX_TOLERANCE, "0.05 is usual")
        cure = "use 1 for whole prefixes"
        check_number("--key-ranges", self.key_ranges, 1, MAX_POOL_TOKENS, cure)
        check_number("--node", self.node, 1, self.ranks, "use 1 where nodes play no part")
        if self.ranks % self.node:
            raise ValueError(
                f"--node must divide --ranks (= {self.ranks}), got {self.node}: use a divisor of it"
            )
        check_number("--headroom", self.headroom, 1, MAX_HEADROOM, "1 is none at all")
        check_number("--recompute", self.recompute, 0, 1, "1 is all of it")
        check_number(
            "--between-nodes-gb-s", self.between_nodes_gb_s, *BANDWIDTHS_GB_S, "50 is 400 Gb/s"
        )
        pool_tokens = 2 * self.tokens_per_rank * self.ranks
        if pool_tokens > MAX_POOL_TOKENS:
            raise ValueError(
                f"2 x --tokens-per-rank x --ranks must be at most {MAX_POOL_TOKENS} tokens, got 2 x "
                f"{self.tokens_per_rank} x {self.ranks} = {pool_tokens}: use fewer of either"
            )
        check_memory(self.ranks, documents=1)
        outputs = {"--json": self.json, "--trace": self.trace, "--plot": self.plot}
        check_outputs(outputs, [self.lengths, self.speeds, profile_file(self.profile)])
