"""Bytes on the wire of one layer against per-document all-gather context parallelism, 32 and 64 servers.

    python -m experiments.figures.wire_bytes [--batches 6] [--out FOLDER]

From exact plans of four lists of lengths (../shared/data; 64 Ki tokens a server, Llama 3 8B, all heads, bf16, tolerance 0.05):
bytes of each rank on its busier side, in or out, exchange by exchange, mean and worst over ranks. Ragged exchanges move the rows that a
plan needs, relays the blocks that hold them (padding and both hops counted, as all ranks send them). The backward of ours sends
q, d_out, k and v again and brings dq, dk and dv home; that of all-gather context parallelism gathers keys again and scatters their
gradients (bf16), or keeps them (in memory: all keys of all servers, in every layer). Derived, nothing was run.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from cad_jax.sharding.cost import DEVICES
from cad_jax.sharding.cost_model import analytic
from cad_jax.sharding.plan import Plan
from cad_jax.sharding.planner import plan_documents
from cad_jax.sharding.required import required_capacities
from cad_jax.sharding.routing import wire_bytes
from cad_jax.sharding.tasks import HeadShape
from cad_jax.simulation.work import Wire, exact_exchanges, moved_rows
from experiments.figures.common import Arguments, arguments, markdown, paired, write
from tests.generators import REAL_LENGTH_LISTS, real_batches

BATCHES = 6
TOKENS, TOLERANCE = 65_536, 0.05
HEADS = HeadShape(32, 8, 128)
SERVERS = (32, 64)
WAYS = {  # transport, servers among which keys of a query may be divided
    "ragged, whole prefixes": ("ragged", 1),
    "ragged, key sub-ranges": ("ragged", 8),
    "relay, whole prefixes": ("relay", 1),
}
MIB = 2**20


class Sent(NamedTuple):
    """Bytes of each rank, float64 [S]."""

    forward: np.ndarray
    backward: np.ndarray


def sent(plan: Plan, transport: str) -> Sent:
    if transport == "ragged":
        wire = Wire(analytic(DEVICES["h200"]), plan.servers, 1)
        exchanges = exact_exchanges(
            moved_rows(plan), HEADS, wire, backward_q_rows=2, backward_scalars=2, announced=False
        )
        out, home, out_back, home_back = (e.bytes for e in exchanges)
        return Sent(out + home, out_back + home_back)
    wire = wire_bytes(required_capacities(plan, transport), plan.servers, HEADS)
    # A rank's block for itself never leaves it.
    remote = (plan.servers - 1) / plan.servers
    forward = remote * wire.forward
    backward = remote * (wire.dispatch_backward + wire.combine_backward)
    return Sent(*(np.full(plan.servers, b) for b in (forward, backward)))


def gathered(servers: int, again: bool) -> Sent:
    """Every rank gets the keys of all others, and sends them their gradients."""
    others = float((servers - 1) * TOKENS * HEADS.kv_row_bytes())
    return Sent(np.full(servers, others), np.full(servers, (1 + again) * others))


def planned(name: str, servers: int, number: int) -> Iterator[tuple[int, str, Sent]]:
    longest = 131_072 if name.endswith("128k") else 524_288
    for batch, lengths in enumerate(real_batches(name, servers * TOKENS, number)):
        for way, (transport, key_ranges) in WAYS.items():
            plan = plan_documents(
                lengths, servers=servers, tokens_per_server=TOKENS, tolerance=TOLERANCE,
                max_document_tokens=longest, num_q_heads=HEADS.num_q_heads,
                num_kv_heads=HEADS.num_kv_heads, head_dim=HEADS.head_dim, transport=transport,
                key_ranges=key_ranges,
            )  # fmt: skip
            yield batch, way, sent(plan, transport)


def main(args: Arguments) -> None:
    records: list[dict[str, Any]] = []
    lines = []
    for name in REAL_LENGTH_LISTS:
        for servers in SERVERS:
            again, kept = gathered(servers, True), gathered(servers, False)
            ours: dict[str, list[Sent]] = {way: [] for way in WAYS}
            for batch, way, found in planned(name, servers, args.batches):
                ours[way].append(found)
                records.append(
                    {"figure": "wire bytes", "lengths": name, "servers": servers, "batch": batch, "way": way,
                     **{f"{d}_mib_{n}": f"{f(getattr(found, d)) / MIB:.1f}"
                        for d in Sent._fields for n, f in (("mean", np.mean), ("worst", np.max))},
                     "all_gather_forward_mib": f"{again.forward[0] / MIB:.0f}",
                     "all_gather_backward_mib": f"{again.backward[0] / MIB:.0f}",
                     "all_gather_kept_backward_mib": f"{kept.backward[0] / MIB:.0f}", "label": "derived"}
                )  # fmt: skip
            for way, found in ours.items():
                lines.append(
                    (name, servers, way,
                     " / ".join(f"{np.mean([f(s.forward) for s in found]) / MIB:.0f}" for f in (np.mean, np.max)),
                     " / ".join(f"{np.mean([f(s.backward) for s in found]) / MIB:.0f}" for f in (np.mean, np.max)),
                     f"{again.forward[0] / MIB:.0f}, {again.backward[0] / MIB:.0f} ({kept.backward[0] / MIB:.0f})",
                     *(f"{_ratio(found, at, np.mean):.2f} / {_ratio(found, at, np.max):.2f}" for at in (again, kept)))
                )  # fmt: skip
    write(args.out / "wire_bytes.csv", records)
    print(
        markdown(
            ("lengths", "servers", "ours", "MiB forward, mean / worst rank", "backward", "all-gather CP: forward, backward (keys kept)",
             "all-gather CP over ours, mean / worst rank", "the same where its keys are kept"),
            lines,
        )
    )  # fmt: skip


def _ratio(ours: list[Sent], theirs: Sent, of) -> float:
    """Bytes of both passes, theirs over ours; `of` ranks."""
    total = float(theirs.forward[0] + theirs.backward[0])
    return paired([total] * len(ours), [float(of(s.forward + s.backward)) for s in ours])[0]


if __name__ == "__main__":
    main(arguments(__doc__, batches=BATCHES))
