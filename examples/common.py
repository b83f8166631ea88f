"""What the examples share: their options, the table of times, the table of numbers, and how a figure looks."""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from gradsolve_backend.timing import alternate, compiled

RED, BLUE, GREEN, GREY = "#c8553d", "#2b5d8a", "#3a8f5c", "#9aa0a6"


class Options(NamedTuple):
    """`short`: a small version of the example, seconds long. `out`: file of the figure."""

    short: bool
    out: Path


def options(description: str | None) -> Options:
    """Read the command line, and switch JAX to 64 bits, as all examples want."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a small version, for tests")
    default = Path(sys.argv[0]).stem + ".png"
    parser.add_argument("--out", type=Path, default=Path(default), help="file of the figure (default: %(default)s)")
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    return Options(given.short, given.out)


def compare(
    what: str, ours: Callable[..., Any], stock: Callable[..., Any], arguments: Sequence[Any], rounds: int = 5
) -> tuple[Any, Any]:
    """Compile and call two functions, print a table of their times, and return what they gave.

    `ours` and `stock` are to do the same with `GradSolveAdjoint` and with an adjoint of Diffrax. After one call of each
    they are called in turn, and medians are printed.
    """
    pairs = [compiled(function, *arguments) for function in (ours, stock)]
    runs, first = zip(*pairs, strict=True)
    results = [jax.block_until_ready(run(*arguments)) for run in runs]
    seconds = alternate(runs, arguments, rounds)
    print(f"\n{what:44}{'stock':>12}{'GradSolve':>12}{'ratio':>8}")
    times("to trace and compile, s", first[1], first[0])
    times("to run, ms", 1e3 * seconds[1], 1e3 * seconds[0])
    return results[0], results[1]


def times(what: str, stock: float, ours: float) -> None:
    """One line of the table of times."""
    print(f"{what:44}{stock:>12.3g}{ours:>12.3g}{stock / ours:>8.1f}", flush=True)


def numbers(known: str, rows: Iterable[tuple[str, Any, Any]]) -> None:
    """Print what was found beside what is `known`; a row is a name and two numbers or texts."""
    print(f"\n{'':44}{'found':>18}{known:>18}")
    for name, *cells in rows:
        print(f"{name:44}" + "".join(f"{c if isinstance(c, str) else format(c, '.5g'):>18}" for c in cells), flush=True)


def difference(ours: Any, stock: Any) -> float:
    """Largest difference of two arrays, relative to the largest entry of the second."""
    return float(np.max(np.abs(np.asarray(ours) - stock)) / np.max(np.abs(stock)))


def panels(columns: int, title: str) -> tuple[Figure, list[Axes]]:
    """A figure of panels side by side."""
    figure = Figure(figsize=(5.6 * columns, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, columns, i + 1) for i in range(columns)]
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=13)
    return figure, axes


def plain_ticks(axis: Axis, places: Sequence[float]) -> None:
    """Ticks of a logarithmic axis at these places, as plain numbers."""
    axis.set_minor_locator(NullLocator())
    axis.set_ticks(places, [f"{place:g}" for place in places])


def save(figure: Figure, path: Path) -> None:
    """Write the figure and say where."""
    figure.savefig(path, dpi=130)
    print(f"\nFigure: {path}")
