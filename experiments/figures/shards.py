"""Appendix A of the paper, corrected: into how many shards a document may be cut before its traffic no
longer hides behind linear layers.

    python -m experiments.figures.shards [--out FOLDER]

Derived. A token's linear layers take t = FLOPs / (half the peak); its shards' traffic is its query and its
output (2 h_q) and, averaged over s equal shards, (s + 1) / 2 keys and values of its size: t B >= 2 h_q +
(s + 1) / 2 h_kv. The paper's text leaves out the output, counts one of the two key and value projections, and
prints a last line that its own numbers do not give.
"""

from cad_jax.sharding.cost import DEVICES, model_shape
from cad_jax.sharding.cost_model import layer_weights
from experiments.figures.common import Arguments, arguments, markdown, write

BATCHES = 0  # derived: none are drawn
BYTES_S = 50e9
PAPER = {"llama-34b": "31", "codellama-34b": "", "llama3-8b": ""}
KNOWN = {"llama-34b": 25, "codellama-34b": 51, "llama3-8b": 12}


def shards(name: str) -> float:
    model, peak_flops = model_shape(name), DEVICES["h200"].peak_flops
    assert peak_flops is not None
    seconds = 2 * layer_weights(model) / (0.5 * peak_flops)
    q_bytes = 2 * model.num_q_heads * model.head_dim
    kv_bytes = 2 * 2 * model.num_kv_heads * model.head_dim
    return 2 * (seconds * BYTES_S - 2 * q_bytes) / kv_bytes - 1


def main(args: Arguments) -> None:
    rows = [(name, said, f"{shards(name):.2f}") for name, said in PAPER.items()]
    for name, known in KNOWN.items():
        assert int(shards(name)) == known, (name, shards(name))
    fields = ("model", "paper_shards", "derived_shards")
    write(
        args.out / "appendix_a.csv",
        [dict(zip(fields, row, strict=True)) | {"label": "derived"} for row in rows],
    )
    print(markdown(("model, tp divides both sides", "paper", "corrected"), rows))


if __name__ == "__main__":
    main(arguments(__doc__, batches=BATCHES))
