"""The picture of a step: what is drawn, in which unit, under which name."""

import numpy as np
import pytest
from matplotlib.colors import to_rgba

from cad_jax.simulation import trace
from cad_jax.simulation.timeline import Event, Stream
from cad_jax.simulation.trace import COLORS, duration, plot_timeline

NETWORK = to_rgba(COLORS["exchange"])


def events(layers: int, second: float) -> list[Event]:
    """Of two ranks: a layer is 2 s linear, 2 s attention and an exchange of 1 ms in its middle; forward, then backward."""
    made = []
    kinds: tuple[tuple[Stream, str, float, float], ...] = (
        ("compute", "linear", 0, 2), ("compute", "attention", 2, 4), ("network", "exchange", 2, 2.001),
    )  # fmt: skip
    for layer in range(2 * layers):
        back = " back" if layer >= layers else ""
        for stream, kind, start, stop in kinds:
            at = [np.full(2, second * (4 * layer + t)) for t in (start, stop)]
            made.append(Event(stream, kind, f"{kind} {layer}{back}", 0, *at))
    return made


def drawn(monkeypatch, tmp_path, shown: list[Event]):
    """The figure of these events, laid out."""
    figures = []
    monkeypatch.setattr(trace.Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    plot_timeline(shown, 2, "cad, ragged, step 1 of 4", tmp_path / "p.png")
    figures[0].draw_without_rendering()
    return figures[0]


def network_bars(axes) -> list[tuple[float, float]]:
    """Where network bars begin and end, in seconds of `events` at second=1."""
    paths = [
        path.vertices[:, 0]
        for bars in axes.collections
        if len(bars.get_facecolor()) and tuple(bars.get_facecolor()[0]) == NETWORK
        for path in bars.get_paths()
    ]
    return [(float(x.min()), float(x.max())) for x in paths]


def test_every_exchange_of_a_panel_is_drawn_or_none(monkeypatch, tmp_path) -> None:
    figure = drawn(monkeypatch, tmp_path, events(layers=20, second=1.0))
    step, *panels = figure.axes
    assert not network_bars(step), "too many to be told apart"
    for axes in panels:
        low, high = axes.get_xlim()
        inside = [t for t in range(2, 160, 4) if low < t + 0.001 and t < high]
        assert sorted(network_bars(axes)) == [
            pytest.approx((t, t + 0.001)) for t in inside for _ in range(2)
        ]
        bars = [
            b
            for b in axes.collections
            if len(b.get_facecolor()) and tuple(b.get_facecolor()[0]) == NETWORK
        ]
        assert all(b.get_linewidth()[0] > 0 for b in bars), (
            "or a short one falls between two pixels"
        )
        assert "network" in axes.get_title()


def test_the_legend_has_what_there_is_in_words(monkeypatch, tmp_path) -> None:
    plain = events(layers=2, second=1.0)
    (legend,) = drawn(monkeypatch, tmp_path, plain).legends
    assert [t.get_text() for t in legend.get_texts()] == [
        "linear layers", "attention", "exchange (network)",
    ]  # fmt: skip
    idle = Event("compute", "masked", "block 0", 0, np.array([16.0]), np.array([17.0]))
    head = Event("compute", "head", "head", 0, np.array([17.0]), np.array([18.0]))
    (legend,) = drawn(monkeypatch, tmp_path, [*plain, idle, head]).legends
    names = [t.get_text() for t in legend.get_texts()]
    assert "output head + loss" in names and "a stage without a microbatch" in names


@pytest.mark.parametrize(
    ("second", "unit", "length"),
    [(1e-3, "ms", "160 ms"), (0.1, "s", "16 s"), (100.0, "min", "267 min")],
)
def test_axes_and_title_are_in_a_unit_that_reads_well(
    monkeypatch, tmp_path, second, unit, length
) -> None:
    figure = drawn(monkeypatch, tmp_path, events(layers=20, second=second))
    assert f"cad, ragged, step 1 of 4, {length}" in figure.get_suptitle()
    for axes in figure.axes:
        assert axes.get_xlabel().split()[0] in (
            unit,
            "s",
        )  # of its own span: earlier panels may be shorter
        assert axes.xaxis.get_offset_text().get_text() == ""
        assert max(axes.get_xlim()) < 1000
    assert figure.axes[0].get_xlabel().split()[0] == unit


def test_durations() -> None:
    assert [duration(s) for s in (0.0123, 0.9994, 2.901, 299.0, 11_600.0, 90_000.0)] == [
        "12.3 ms", "999 ms", "2.9 s", "299 s", "193 min", "1,500 min",
    ]  # fmt: skip
