"""Draws what `measure` found."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gradsolve_backend.table import Measurements, Row, Spread

FORWARD, GRADIENT, OTHER = "#9aa0a6", "#2b5d8a", "#c8553d"
HEIGHT = 0.38  # of a bar; two belong to a backend


def draw(found: Measurements, title: str, path: str) -> None:
    """Write a picture of times, seconds to the first gradient and bytes to `path`, in the format of its ending."""
    figure = Figure(figsize=(12.0, 1.8 + 0.8 * len(found.rows)), layout="constrained")
    FigureCanvasAgg(figure)
    times, first, memory = figure.subplots(1, 3, sharey=True, width_ratios=(2.2, 1, 1))
    rows = found.rows
    _spreads(times, rows)
    _bars(first, [(0.0, 2 * HEIGHT, OTHER, [row.first for row in rows], "{:.2g}")], "seconds to the first gradient")
    pairs = [
        (-HEIGHT / 2, HEIGHT, FORWARD, [(row.bytes_forward or 0) / 1e6 for row in rows], "{:.3g}"),
        (HEIGHT / 2, HEIGHT, GRADIENT, [(row.bytes_gradient or 0) / 1e6 for row in rows], "{:.3g}"),
    ]
    _bars(memory, pairs, "megabytes held")
    times.set_yticks(range(len(rows)), [row.backend for row in rows])
    times.invert_yaxis()
    figure.suptitle(title)
    figure.text(0.01, -0.01, found.advice, va="top", fontsize=9)
    figure.savefig(path, dpi=150, bbox_inches="tight", pad_inches=0.15)


def _spreads(axes: Axes, rows: Sequence[Row]) -> None:
    """Medians of calls with their quartiles; under a gradient what it costs in forward solves."""
    for offset, colour, label, spreads in (
        (-HEIGHT / 2, FORWARD, "forward solve", [row.forward for row in rows]),
        (HEIGHT / 2, GRADIENT, "value and gradient", [row.gradient for row in rows]),
    ):
        places = [i + offset for i in range(len(rows))]
        values = [1e3 * s.median for s in spreads]
        errors = list(zip(*(_error(s) for s in spreads), strict=True))
        axes.barh(places, values, HEIGHT, color=colour, label=label, xerr=errors, error_kw={"elinewidth": 1})
    for i, row in enumerate(rows):
        _text(axes, 1e3 * row.forward.high, i - HEIGHT / 2, f"{1e3 * row.forward.median:.3g}")
        text = f"{1e3 * row.gradient.median:.3g}, {row.ratio:.1f} x forward"
        _text(axes, 1e3 * row.gradient.high, i + HEIGHT / 2, text)
    axes.set_xlabel("milliseconds a call: median and quartiles")
    axes.legend(loc="lower right", frameon=False)
    _plain(axes, 1.35)


def _error(spread: Spread) -> tuple[float, float]:
    return 1e3 * (spread.median - spread.low), 1e3 * (spread.high - spread.median)


def _bars(axes: Axes, series: Sequence[tuple[float, float, str, Sequence[float], str]], label: str) -> None:
    for offset, height, colour, values, form in series:
        axes.barh([i + offset for i in range(len(values))], values, height, color=colour)
        for i, value in enumerate(values):
            _text(axes, value, i + offset, form.format(value))
    axes.set_xlabel(label)
    _plain(axes, 1.25)


def _text(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(text, (x, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)


def _plain(axes: Axes, room: float) -> None:
    """No frame, and room for the numbers beside the bars."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(0, room * axes.get_xlim()[1])
