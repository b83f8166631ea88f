"""The picture of the main job: data, fitted curves, residuals, and where the starts ended."""

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from gradsolve_backend import demo_model
from gradsolve_backend.fits import best, same_optimum

SPECIES = ("hare", "lynx")
COLOURS = ("#c8553d", "#2b5d8a")
OTHER = "#9aa0a6"
GOOD = "#3a8f5c"


class Curves(NamedTuple):
    """What is drawn of the fits.

    years: shape (points,). log_populations: of every start, shape (starts, points, 2). For the best fit: `band`, half
    the width of the 95 % band of the curve, in logarithms, shape (points, 2); `residuals`, shape (times, 2);
    `covariance` of the log-parameters, shape (6, 6).
    """

    years: np.ndarray
    log_populations: np.ndarray
    band: np.ndarray
    residuals: np.ndarray
    covariance: np.ndarray


def draw(census: demo_model.Census, starts: np.ndarray, fits: demo_model.Fits, curves: Curves, path: str) -> None:
    """Write the picture to `path`, in the format that its ending names."""
    figure = Figure(figsize=(13.0, 8.0), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(6, 3)
    hare = figure.add_subplot(grid[0:2, 0:2])
    lynx = figure.add_subplot(grid[2:4, 0:2], sharex=hare)
    below = figure.add_subplot(grid[4:6, 0:2], sharex=hare)
    for species, axes in enumerate((hare, lynx)):
        _population(axes, species, census, fits, curves)
        axes.tick_params(labelbottom=False)
    _residuals(below, census, curves)
    _losses(figure.add_subplot(grid[0:3, 2]), fits)
    _paths(figure.add_subplot(grid[3:6, 2]), starts, fits)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    found = int(np.sum(same_optimum(fits.loss)))
    figure.suptitle(
        f"Lotka-Volterra fitted to hare and lynx pelts from {len(starts)} random starts: {found} reached the best fit",
        fontsize=14,
    )
    figure.savefig(path, dpi=150)


def _population(axes: Axes, species: int, census: demo_model.Census, fits: demo_model.Fits, curves: Curves) -> None:
    """Data, best curve with its band, and the curves of all converged starts."""
    first = int(np.argmin(np.asarray(fits.loss)))
    shown = np.asarray(fits.converged)
    logs, half = curves.log_populations[..., species], curves.band[:, species]
    axes.plot(curves.years, np.exp(logs[shown]).T, color=OTHER, linewidth=0.7, alpha=0.5)
    axes.plot([], [], color=OTHER, linewidth=0.7, label=f"all {np.sum(shown)} fits that converged")
    low, high = np.exp(logs[first] - half), np.exp(logs[first] + half)
    axes.fill_between(curves.years, low, high, color=COLOURS[species], alpha=0.18, linewidth=0, label="95 % band")
    axes.plot(curves.years, np.exp(logs[first]), color=COLOURS[species], linewidth=2.2, label="best fit")
    axes.plot(census.years, census.pelts[:, species], "o", color="black", markersize=4.5, label="data")
    axes.set_ylim(0.0, 1.25 * max(np.max(census.pelts[:, species]), np.max(high)))
    axes.set_ylabel("thousand pelts")
    axes.set_title(SPECIES[species], loc="left", color=COLOURS[species], fontweight="bold")
    axes.legend(loc="upper right", ncols=4, frameon=False, fontsize=9)


def _residuals(axes: Axes, census: demo_model.Census, curves: Curves) -> None:
    """Residuals of the best fit, one bar a year and species."""
    axes.axhline(0.0, color="black", linewidth=0.8)
    for species, name in enumerate(SPECIES):
        offset = 0.18 * (2 * species - 1)
        axes.bar(census.years + offset, curves.residuals[:, species], 0.32, color=COLOURS[species], label=name)
    axes.set_xticks(census.years[::2], [f"{year:.0f}" for year in census.years[::2]])
    axes.set_xlim(census.years[0] - 0.6, census.years[-1] + 0.6)
    axes.set_xlabel("year")
    axes.set_ylabel("log(fit / data)")
    axes.set_title("residuals of the best fit", loc="left")
    axes.legend(loc="lower right", ncols=2, frameon=False, fontsize=9)


def _losses(axes: Axes, fits: demo_model.Fits) -> None:
    """Sums of squares in ascending order: each step is one optimum."""
    loss, good = np.asarray(fits.loss), same_optimum(fits.loss)
    order = np.argsort(loss)
    colours = np.where(good, GOOD, OTHER)[order]
    axes.scatter(np.arange(1, len(loss) + 1), loss[order], c=list(colours), s=22)
    axes.set(yscale="log", xlabel="start, best first", ylabel="sum of squares")
    _plain_ticks(axes.yaxis)
    axes.set_title("where the starts ended", loc="left")


def _plain_ticks(axis: Axis) -> None:
    """Ticks at 1, 2 and 5 times powers of ten, as plain numbers."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_locator(NullLocator())


def _paths(axes: Axes, starts: np.ndarray, fits: demo_model.Fits) -> None:
    """From start to end of each fit, in the plane of two parameters."""
    growth, death = demo_model.NAMES.index("hare growth"), demo_model.NAMES.index("lynx death")
    ends, good = np.exp(np.asarray(fits.theta)), same_optimum(fits.loss)
    begins = np.exp(starts)
    for group, colour, label in ((~good, OTHER, "ended elsewhere"), (good, GOOD, "reached the best fit")):
        pairs = np.stack([begins[group], ends[group]])
        axes.plot(pairs[:, :, growth], pairs[:, :, death], color=colour, linewidth=0.7, alpha=0.5)
        axes.plot(begins[group, growth], begins[group, death], "o", color=colour, markersize=4, label=label)
    end = best(ends, fits.loss)
    axes.plot(end[growth], end[death], "*", color="black", markersize=13, label="best fit")
    axes.set(xscale="log", yscale="log", xlabel="hare growth, 1/year", ylabel="lynx death, 1/year")
    # A fit that runs off towards zero rates would squeeze all others into a corner.
    axes.set_xlim(demo_model.MEDIANS[growth] / 6.0, demo_model.MEDIANS[growth] * 6.0)
    axes.set_ylim(demo_model.MEDIANS[death] / 6.0, demo_model.MEDIANS[death] * 9.0)
    for axis in (axes.xaxis, axes.yaxis):
        _plain_ticks(axis)
    axes.set_title("starts (dots) and their ends", loc="left")
    axes.legend(loc="upper right", frameon=False, fontsize=9)
