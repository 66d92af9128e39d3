"""What every way to distribute core attention knows of its surroundings.

Letters: T tokens per server, S servers.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cad_jax.attention.differentiable import Settings, Way
from cad_jax.attention.head_slices import over_heads
from cad_jax.sharding.cost import Device
from cad_jax.sharding.tasks import HeadShape


@dataclass(frozen=True)
class Pool:
    """What every strategy knows of its surroundings; heads are those of one device.

    servers: the ranks of axis_names, which share documents and work. stages: pipeline stages that
    run at once, within the pool (cad, home) or each with a pool of its own. head_axis: see
    `differentiable.Settings`.
    """

    servers: int
    tokens_per_server: int
    heads: HeadShape
    axis_names: tuple[str, ...]
    kernel: str
    element_bytes: int
    device: Device
    tp: int
    stages: int = 1
    head_axis: str | None = None

    @property
    def tokens(self) -> int:
        return self.servers * self.tokens_per_server

    @property
    def stage_tokens(self) -> int:
        """Tokens of one stage's microbatch where all stages share the pool."""
        return self.tokens // self.stages

    @property
    def settings(self) -> Settings:
        return Settings(self.axis_names, self.kernel, self.head_axis)

    def way(self, way: Way) -> Way:
        """`way` for rows as this pool's model holds them."""
        return way if self.head_axis is None else over_heads(way)

    def check_stages(self, ticks: Sequence[Sequence[int]]) -> None:
        """Raises ValueError unless every tick says what each of the stages runs."""
        for number, tick in enumerate(ticks):
            if len(tick) != self.stages:
                raise ValueError(
                    f"a tick must name one microbatch for each of the strategy's {self.stages} "
                    f"stages, got {len(tick)} in tick {number}: make the strategy and the schedule "
                    "for the same number of stages"
                )

    def digest(self, name: str, lengths: np.ndarray) -> str:
        """Of what the strategies without a plan derive everything from."""
        header = f"{name} {self.servers} {self.tokens_per_server} {self.heads}".encode()
        return hashlib.sha256(header + np.asarray(lengths, "<i8").tobytes()).hexdigest()

    def describe_gather(self) -> str:
        return f"every key to every rank: {self.gather_bytes() / 2**20:,.1f} MiB per rank and layer"

    def head_hop_bytes(self) -> int:
        """Bytes a device hands, in one layer's forward, to the collectives that turn tokens into heads and
        back: its share of a rank's tokens with all heads, q, k, v and out. 0 where heads are split everywhere.
        """
        if self.head_axis is None:
            return 0
        row = 2 * self.heads.q_row_bytes(self.element_bytes)
        return self.tokens_per_server * (row + self.heads.kv_row_bytes(self.element_bytes))

    def gather_bytes(self) -> int:
        """Bytes of the others' keys and values that reach every rank."""
        return (
            (self.servers - 1)
            * self.tokens_per_server
            * self.heads.kv_row_bytes(self.element_bytes)
        )
