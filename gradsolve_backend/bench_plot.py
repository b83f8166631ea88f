"""Draws what `python -m gradsolve_backend bench` found."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gradsolve_backend.table import Measurements, Row

COLOURS = ("#9aa0a6", "#2b5d8a", "#c8553d", "#3a8f5c", "#8a6fb0")


def draw(found: Sequence[tuple[str, Measurements]], path: str) -> None:
    """Write a picture of gradients and forward solves to `path`, in the format of its ending."""
    names = list(dict.fromkeys(row.backend for _, each in found for row in each.rows))
    figure = Figure(figsize=(12.0, 1.6 + 0.28 * len(found) * (len(names) + 1)), layout="constrained")
    FigureCanvasAgg(figure)
    gradient, forward = figure.subplots(1, 2, sharey=True)
    for axes, what, label in ((gradient, "gradient", "value and gradient"), (forward, "forward", "forward solve")):
        for number, name in enumerate(names):
            rows = [(i, row) for i, (_, each) in enumerate(found) for row in each.rows if row.backend == name]
            _bars(axes, rows, what, (number, len(names)), name)
        axes.set_xscale("log")
        axes.set_xlim(0.3 * axes.get_xlim()[0], 6 * axes.get_xlim()[1])
        axes.set_xlabel(f"{label}, milliseconds a call: median")
        axes.spines[["top", "right"]].set_visible(False)
    gradient.set_yticks(range(len(found)), [name for name, _ in found])
    gradient.invert_yaxis()
    gradient.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=150)


def _bars(axes: Axes, rows: Sequence[tuple[int, Row]], what: str, place: tuple[int, int], label: str) -> None:
    """The bars of one backend; beside each its number."""
    number, count = place
    height = 0.8 / count
    values = [1e3 * getattr(row, what).median for _, row in rows]
    places = [i - 0.4 + (number + 0.5) * height for i, _ in rows]
    axes.barh(places, values, height, color=COLOURS[number % len(COLOURS)], label=label)
    for value, y in zip(values, places, strict=True):
        axes.annotate(f"{value:.3g}", (value, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
