"""The main job: fit Lotka-Volterra to the hare and lynx data from many starts, with stock Diffrax and with GradSolve.

Both run the same code of `demo_model`; only the adjoint differs. Stock Diffrax needs two: `ForwardMode` for the
Jacobians of the fit (its faster way here) and `RecursiveCheckpointAdjoint` for gradients.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from gradsolve_backend import GradSolveAdjoint, demo_model, demo_plot, explain
from gradsolve_backend.fits import best, covariance, same_optimum
from gradsolve_backend.timing import alternate, compiled

# Stock and GradSolve differentiate the same steps, so that their gradients agree to round-off.
LARGEST_ALLOWED = 1e-9
CURVE_POINTS_PER_YEAR = 16
REMEDY = "leave GRADSOLVE_BACKEND unset, or name another backend."


class Options(NamedTuple):
    """What to run: number and seed of the starts, file of the picture, how often fit and gradient are timed."""

    starts: int = 64
    seed: int = 0
    output: str = "demo.png"
    fit_rounds: int = 3
    gradient_rounds: int = 25


class Method(NamedTuple):
    """A column of the table: the adjoints that differentiate the fit and one gradient."""

    title: str
    fit: diffrax.AbstractAdjoint
    gradient: diffrax.AbstractAdjoint


class Measured(NamedTuple):
    """What one method gave: seconds for each phase, the fits, and the gradients at the starts."""

    compile_fit: float
    run_fit: float
    compile_gradient: float
    run_gradient: float
    fits: demo_model.Fits
    gradients: np.ndarray


def methods() -> tuple[Method, Method]:
    """GradSolve first: the first to compile also pays for what the process sets up once."""
    ours = GradSolveAdjoint()
    return (
        Method("GradSolve", ours, ours),
        Method("stock", diffrax.ForwardMode(), diffrax.RecursiveCheckpointAdjoint()),
    )


@contextmanager
def stage(console: Console, text: str) -> Iterator[None]:
    """Say what runs: a spinner with the elapsed time on a terminal, else a line before; in both cases a line after."""
    begin = time.perf_counter()
    if not console.is_terminal:
        console.print(f"     ... {text}")
    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(text, total=None)
        yield
    console.print(f"{time.perf_counter() - begin:6.1f} s {text}", highlight=False)


def measure(census: demo_model.Census, starts: Array, options: Options, console: Console) -> tuple[Measured, Measured]:
    """Compile, fit and differentiate with both of `methods()`, in their order."""
    fits, gradients = [], []
    for method in methods():
        with stage(console, f"compile the fit ({method.title})"):
            fits.append(compiled(partial(demo_model.fit, census=census, adjoint=method.fit), starts))
        with stage(console, f"compile the gradient ({method.title})"):
            gradients.append(compiled(partial(demo_model.gradients, census=census, adjoint=method.gradient), starts))
    with stage(console, f"fit from {len(starts)} starts, {options.fit_rounds + 1} times with each"):
        fitted = [jax.block_until_ready(run(starts)) for run, _ in fits]
        fit_seconds = alternate([run for run, _ in fits], [starts], options.fit_rounds)
    with stage(console, f"gradient at {len(starts)} starts, {options.gradient_rounds + 1} times with each"):
        slopes = [np.asarray(run(starts)) for run, _ in gradients]
        gradient_seconds = alternate([run for run, _ in gradients], [starts], options.gradient_rounds)
    ours, stock = (
        Measured(fits[i][1], fit_seconds[i], gradients[i][1], gradient_seconds[i], fitted[i], slopes[i])
        for i in range(len(fits))
    )
    return ours, stock


def curves(census: demo_model.Census, fits: demo_model.Fits) -> demo_plot.Curves:
    """Fitted curves of all starts; for the best one also residuals, covariance and the 95 % band of the curve."""
    adjoint = GradSolveAdjoint()
    spans = round(census.years[-1] - census.years[0]) * CURVE_POINTS_PER_YEAR
    years = np.linspace(census.years[0], census.years[-1], spans + 1)
    theta = best(fits, fits.loss).theta
    every = jax.jit(jax.vmap(lambda theta: demo_model.log_populations(theta, years, adjoint)))(fits.theta)
    slopes = np.asarray(jax.jit(jax.jacfwd(lambda theta: demo_model.log_populations(theta, years, adjoint)))(theta))
    residuals = np.asarray(demo_model.residual(theta, census, adjoint))
    # The data are yearly, so that every so many points of the curve is one of them.
    spread = np.asarray(covariance(slopes[::CURVE_POINTS_PER_YEAR], residuals))
    band = 1.96 * np.sqrt(np.einsum("tpi,ij,tpj->tp", slopes, spread, slopes))
    return demo_plot.Curves(years, np.asarray(every), band, residuals, spread)


def reached(fits: demo_model.Fits) -> int:
    """How many starts ended in the best optimum."""
    return int(np.sum(same_optimum(fits.loss)))


def backends(census: demo_model.Census, starts: Array) -> str:
    """Names of the backends that GradSolve takes for the gradients, as `explain` finds them."""
    routes = explain(partial(demo_model.gradients, census=census, adjoint=GradSolveAdjoint()), starts)
    return ", ".join(sorted({route.backend for route in routes}))


def parameter_table(fits: demo_model.Fits, spread: np.ndarray) -> Table:
    """Best parameters with standard errors, brought from the logarithms to the parameters by the delta method."""
    values = np.exp(np.asarray(best(fits, fits.loss).theta))
    errors = values * np.sqrt(np.diag(spread))
    table = Table("parameter", "unit", title="Best fit")
    table.add_column("value", justify="right")
    table.add_column("standard error", justify="right")
    for name, unit, value, error in zip(demo_model.NAMES, demo_model.UNITS, values, errors, strict=True):
        table.add_row(name, unit, f"{value:.4g}", f"{error:.2g}")
    return table


def comparison_table(ours: Measured, stock: Measured, difference: float) -> Table:
    """Side by side: seconds, milliseconds, how many times faster GradSolve is, and whether the answers are the same."""
    table = Table("", title="Stock Diffrax against GradSolve")
    for column in ("stock", "GradSolve", "stock / GradSolve"):
        table.add_column(column, justify="right")
    phases = (
        ("compile the fit, s", 1.0, "compile_fit"),
        (f"fit {len(ours.fits.loss)} starts, s", 1.0, "run_fit"),
        ("compile the gradient, s", 1.0, "compile_gradient"),
        (f"one gradient, {len(ours.fits.loss)} starts, ms", 1e3, "run_gradient"),
    )
    for name, unit, field in phases:
        theirs, mine = getattr(stock, field), getattr(ours, field)
        table.add_row(name, f"{unit * theirs:.3g}", f"{unit * mine:.3g}", f"{theirs / mine:.1f}")
    table.add_row("smallest sum of squares", *(f"{float(jnp.min(m.fits.loss)):.8f}" for m in (stock, ours)), "")
    table.add_row("starts that reached it", *(str(reached(m.fits)) for m in (stock, ours)), "")
    table.add_row("largest relative difference", "", "", f"{difference:.1e}")
    return table


def report(console: Console, tried: tuple[Measured, Measured], drawn: demo_plot.Curves, backend: str) -> float:
    """Print both tables and their notes; returns the largest relative difference of the gradients."""
    ours, stock = tried
    difference = demo_model.largest_difference(ours.gradients, stock.gradients)
    say = partial(console.print, highlight=False, soft_wrap=True)
    say()
    say(parameter_table(ours.fits, drawn.covariance))
    say(
        "Standard errors: s^2 (J^T J)^-1 of the log-parameters, then the delta method.\n"
        f"Residual: {float(jnp.min(ours.fits.loss)):.5f}, the sum of {drawn.residuals.size} squared log(fit / data).\n"
        f"Starts that reached it: {reached(ours.fits)} of {len(ours.fits.loss)}.\n"
    )
    say(comparison_table(ours, stock, difference))
    say(
        "Stock: ForwardMode in the fit, RecursiveCheckpointAdjoint for the gradient.\n"
        f"GradSolve: GradSolveAdjoint() for both, backend {backend}. Fit and gradient: medians, taken in turn.\n"
        f"Difference: of the gradients at the {len(ours.fits.loss)} starts, relative to each start's largest entry.\n"
    )
    return difference


def run(options: Options, console: Console) -> int:
    """Fit, compare, draw and report; the exit code is 1 if the gradients differ by more than round-off.

    Runs in 64 bits whatever the caller's setting, and leaves that setting as it was.
    """
    say = partial(console.print, highlight=False, soft_wrap=True)
    with jax.enable_x64(True):
        census = demo_model.load_census()
        starts = jnp.asarray(demo_model.random_starts(options.starts, options.seed))
        with stage(console, "ask which backend runs the solves"):
            backend = backends(census, starts)
        if "stock" in backend:
            say(f"GradSolve runs these solves on {backend}, which has no forward mode, and the fit needs one: {REMEDY}")
            return 1
        tried = measure(census, starts, options, console)
        with stage(console, "curves, standard errors and picture"):
            fits = tried[0].fits
            drawn = curves(census, fits)
            demo_plot.draw(census, np.asarray(starts), fits, drawn, options.output)
        difference = report(console, tried, drawn, backend)
    say(f"Picture: {options.output}")
    # Written so that a NaN fails too.
    if difference < LARGEST_ALLOWED:
        return 0
    say(f"FAILED: the gradients differ from stock's by {difference:.1e}; round-off stays below {LARGEST_ALLOWED:.0e}.")
    return 1
