"""What bandwidth, kernel speed and unevenness of lengths do to the gain.

    python -m experiments.figures.sensitivity [--batches 30] [--out FOLDER]

Llama 3 8B, 32 nodes, documents of at most 512K tokens ("mixed": 59% of the tokens in those), 64 Ki tokens a rank and
nano-batch, linear layers at half the peak. By network (12.5 to 400 GB/s a GPU) and kernel (FA2, FA3 class);
by unevenness, on 16 nodes: log-normal lengths of mean 8 Ki tokens whose logarithm has standard deviation
sigma (0: equal), cut at 128K. All against the packing baseline (headroom 1.5), and per-document context
parallelism over all ranks, whose gathers are exposed.
"""

import numpy as np

from cad_jax.simulation.setting import Setting
from cad_jax.simulation.step import stage_step, stage_works
from cad_jax.simulation.workloads import cut_into_chunks
from experiments.figures.common import (
    BATCHES,
    KIB,
    SAMPLE,
    Arguments,
    Plans,
    Row,
    arguments,
    cad_step,
    choose,
    interval,
    markdown,
    on_all_cores,
    paired,
    record,
    wlb,
    write,
)

GB_S = (12.5, 25, 50, 100, 200, 400)
KERNELS = ("h200_fa2", "h200_fa3")
SIGMAS = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5)
MEAN_TOKENS = 8 * KIB


def log_normal(row: Row, sigma: float, number: int) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(int(10 * sigma))
    need = 2 * number * row.tokens * row.nodes
    lengths = MEAN_TOKENS * np.exp(
        sigma * rng.standard_normal(8 * need // MEAN_TOKENS) - sigma**2 / 2
    )
    lengths = np.clip(np.rint(lengths), 1, row.longest_tokens).astype(np.int64)
    nanos = cut_into_chunks(lengths, row.tokens * row.nodes)
    return [[next(nanos), next(nanos)] for _ in range(number)]


def compared(setting: Setting, row: Row, every, kernel: str, what: str):
    """Records, and how ours runs, chosen on the first SAMPLE batches, with intervals over it on the others: (baseline,
    all-gather, home)."""
    plans: Plans = {}
    chosen = choose(setting, every[:SAMPLE], row, plans)
    records, steps = [], {}
    every = every[SAMPLE:]
    for number, nanos in enumerate(every):
        results = {
            "cad": cad_step(setting, nanos, row, **chosen._asdict(), plans=plans),
            "wlb": wlb(setting, nanos, 1.5),
        }
        for name in ("all_gather", "home"):
            works = stage_works(setting, [nanos], strategy=name, tokens=row.tokens)
            results[name] = stage_step(
                setting, [nanos], works, tokens=row.tokens, name=name, published=True
            )
        for name, result in results.items():
            records.append(record("sensitivity", row, what, number, kernel, result))
            steps.setdefault(name, []).append(result.step_s)
    ratios = [interval(paired(steps[n], steps["cad"])) for n in ("wlb", "all_gather", "home")]
    return records, [chosen, *ratios]


def by_network(kernel: str, gb_s: float, number: int) -> tuple[list, tuple]:
    row = Row("llama3-8b", 512 * KIB, 32, 8)
    setting = row.fair_setting(kernel, 1e9 * gb_s)
    every = row.batches("mixed", SAMPLE + number)
    records, ratios = compared(setting, row, every, kernel, f"mixed, {gb_s:g} GB/s")
    return records, (f"{gb_s:g} GB/s", kernel[5:], *ratios)


def by_variance(kernel: str, sigma: float, number: int) -> tuple[list, tuple]:
    row = Row("llama3-8b", 128 * KIB, 16, 16)
    every = log_normal(row, sigma, SAMPLE + number)
    what = f"log-normal, sigma {sigma:g}"
    records, ratios = compared(row.fair_setting(kernel), row, every, kernel, what)
    return records, (f"sigma {sigma:g}", kernel[5:], *ratios)


def main(args: Arguments) -> None:
    records, lines = [], []
    networks = [(kernel, gb_s, args.batches) for kernel in KERNELS for gb_s in GB_S]
    variances = [("h200_fa3", sigma, args.batches) for sigma in SIGMAS]
    for point, every in ((by_network, networks), (by_variance, variances)):
        for more, line in on_all_cores(point, every):
            records += more
            lines.append(line)
    write(args.out / "sensitivity.csv", records)
    print(
        markdown(
            ("", "kernel", "ours: transport, tolerance", "baseline over ours", "all-gather CP over ours",
             "home over ours"),
            lines,
        )
    )  # fmt: skip


if __name__ == "__main__":
    main(arguments(__doc__, batches=BATCHES))
