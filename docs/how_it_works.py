"""Draws how_it_works.svg, the picture of the README: python docs/how_it_works.py [FILE]."""

import sys
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

RECORD, ROWS, FORWARD, REVERSE, GREY = "#2b5d8a", "#6b7280", "#3a8f5c", "#c8553d", "#9aa0a6"
TIMES = np.array([0.4, 1.3, 2.6, 4.3, 5.2, 6.0, 6.9, 8.4, 10.0])
REJECTED = (4.3, 6.4)  # a trial step from, to


def curve(t: np.ndarray) -> np.ndarray:
    """A solution with a bend, where steps are short."""
    return 8.05 + 0.75 * np.tanh(2.2 * (t - 5.3)) + 0.06 * t


def height(t: float) -> float:
    """The solution at one time."""
    return float(curve(np.array(t)))


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str, bend: float = 0.0) -> None:
    style = f"arc3,rad={bend}"
    axes.add_patch(
        FancyArrowPatch(start, end, connectionstyle=style, arrowstyle="-|>", mutation_scale=13, color=colour, lw=1.6)
    )


def heading(axes: Axes, y: float, title: str, text: str, colour: str) -> None:
    axes.text(-4.7, y + 0.22, title, color=colour, fontsize=13, fontweight="bold", va="center")
    axes.text(-4.7, y - 0.1, text, fontsize=9.5, va="top", linespacing=1.35)


def record(axes: Axes) -> None:
    """The adaptive loop: accepted steps on the solution, and one that is rejected."""
    fine = np.linspace(TIMES[0], TIMES[-1], 300)
    axes.plot(fine, curve(fine), color=RECORD, lw=1.4, alpha=0.45)
    axes.plot(TIMES, curve(TIMES), "o", color=RECORD, ms=8)
    for i, t in enumerate(TIMES):
        axes.text(t, height(t) + 0.28, f"$y_{i}$", ha="center", color=RECORD, fontsize=10)
    start, end = REJECTED
    arrow(axes, (start, height(start)), (end, 7.45), GREY, bend=0.25)
    axes.plot(end, 7.45, "x", color=REVERSE, ms=9, mew=2.2)
    axes.text(end + 0.25, 7.45, "rejected", color=REVERSE, fontsize=9.5, va="center", backgroundcolor="white")
    heading(axes, 8.4, "record", "Diffrax's adaptive loop runs once,\nwith its own error control.", RECORD)


def rows(axes: Axes) -> None:
    """One row for each accepted step; checkpoints every few steps."""
    for i, t in enumerate(TIMES[:-1]):
        box = FancyBboxPatch((t - 0.27, 4.95), 0.54, 0.95, boxstyle="round,pad=0.04", fc="#eef2f6", ec=ROWS, lw=1.1)
        axes.add_patch(box)
        axes.text(t, 5.43, f"$t_{i}$\n$h_{i}$\n$y_{i}$", ha="center", va="center", fontsize=8.5, linespacing=1.15)
        axes.plot([t, t], [5.95, height(t) - 0.14], color=ROWS, lw=0.8, ls=":")
        if i % 4 == 0:
            axes.plot(t, 4.68, "^", color=ROWS, ms=7)
    axes.text(TIMES[0] + 0.25, 4.66, "checkpoint", fontsize=9, color=ROWS, va="center")
    axes.text(TIMES[4] + 0.25, 4.66, "checkpoint", fontsize=9, color=ROWS, va="center")
    heading(
        axes,
        5.6,
        "rows",
        "A row is what the replay of a step needs.\nRows between checkpoints are made again\nwhen they are read.",
        ROWS,
    )


def replay(axes: Axes, y: float, forward: bool) -> None:
    """One derivative of each accepted step, in either order."""
    colour = FORWARD if forward else REVERSE
    symbol = r"\dot y" if forward else r"\bar y"
    for left, right in zip(TIMES[:-1] + 0.08, TIMES[1:] - 0.08, strict=True):
        start, end = (left, right) if forward else (right, left)
        arrow(axes, (start, y), (end, y), colour, bend=-0.28 if forward else 0.28)
    axes.plot(TIMES, np.full_like(TIMES, y), "o", color=colour, ms=5)
    axes.text(TIMES[0] - 0.2, y, f"${symbol}_0$", ha="right", va="center", fontsize=12, color=colour)
    axes.text(TIMES[-1] + 0.2, y, f"${symbol}_8$", ha="left", va="center", fontsize=12, color=colour)


def main(path: Path) -> None:
    """Write the picture in the format that the ending of `path` names."""
    figure = Figure(figsize=(11.4, 6.4))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(-4.9, 11.0), ylim=(0.9, 10.0))
    axes.axis("off")
    record(axes)
    rows(axes)
    replay(axes, 3.35, forward=True)
    heading(axes, 3.35, "tangent replay", "jvp of each accepted step, first to last:\njvp, jacfwd, linearize.", FORWARD)
    replay(axes, 1.65, forward=False)
    heading(axes, 1.65, "cotangent replay", "vjp of each accepted step, last to first:\ngrad, vjp, jacrev.", REVERSE)
    figure.savefig(path, dpi=110, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
