"""Lotka-Volterra and the hare and lynx data: model, residual and fit.

Time is in years, populations are in thousands of pelts. A parameter vector `theta`, of shape (6,), holds the logarithms
of the parameters in `NAMES`: four rates and the two populations in the first year. Every function that solves takes the
adjoint as an argument: it is the only thing that differs between stock Diffrax and GradSolve.
"""

import csv
from importlib import resources
from typing import Any, NamedTuple

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jax import Array

from gradsolve_backend.fits import normal_starts, with_jacobian

NAMES = ("hare growth", "predation", "lynx death", "lynx growth", "hare at start", "lynx at start")
UNITS = ("1/year", "1/year/thousand", "1/year", "1/year/thousand", "thousand", "thousand")
# Random starts: the median of each parameter, and the standard deviation of every logarithm.
MEDIANS = (1.0, 0.05, 1.0, 0.05, 30.0, 5.0)
SPREAD = 0.5
TOLERANCE = 1e-6
# The best fit takes about 100 steps; the reserve is for wild starts.
MAX_SOLVER_STEPS = 1024
MAX_FIT_STEPS = 200
# Residual of a population that a failed solve did not reach: a factor e**10, so never mistaken for a fit.
UNREACHED = 10.0


class Census(NamedTuple):
    """Observed populations: `years` of shape (times,), `pelts` of shape (times, 2), hare and lynx in thousands."""

    years: np.ndarray
    pelts: np.ndarray


class Fits(NamedTuple):
    """Where the fits ended: `theta` (starts, 6), sum of squared residuals `loss` (starts,), `converged` (starts,)."""

    theta: Array
    loss: Array
    converged: Array


def load_census() -> Census:
    """The hare and lynx data that come with the package; the file names its source."""
    text = resources.files("gradsolve_backend").joinpath("data/hare_lynx.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    table = np.array([[float(row[key]) for key in ("year", "hare", "lynx")] for row in rows])
    return Census(table[:, 0], table[:, 1:])


def random_starts(count: int, seed: int) -> np.ndarray:
    """Log-normal parameter vectors around `MEDIANS`, shape (count, 6)."""
    return normal_starts(count, np.log(MEDIANS), SPREAD, seed)


def log_rates(t: Any, log_population: Array, rates: Array) -> Array:
    """Lotka-Volterra for the logarithms of the populations, which so stay positive in every trial step."""
    hare, lynx = jnp.exp(log_population)
    growth, predation, death, conversion = rates
    return jnp.stack([growth - predation * lynx, conversion * hare - death])


def log_populations(
    theta: Array, years: np.ndarray, adjoint: diffrax.AbstractAdjoint, tolerance: float = TOLERANCE
) -> Array:
    """Logarithms of both populations in `years`, shape (times, 2); inf where a failed solve did not get to."""
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(log_rates),
        diffrax.Tsit5(),
        t0=years[0],
        t1=years[-1],
        dt0=0.1,
        y0=theta[4:],
        args=jnp.exp(theta[:4]),
        saveat=diffrax.SaveAt(ts=jnp.asarray(years)),
        stepsize_controller=diffrax.PIDController(rtol=tolerance, atol=tolerance),
        adjoint=adjoint,
        max_steps=MAX_SOLVER_STEPS,
        throw=False,
    )
    assert isinstance(solution.ys, Array)
    return solution.ys


def residual(theta: Array, census: Census, adjoint: diffrax.AbstractAdjoint, tolerance: float = TOLERANCE) -> Array:
    """Logarithm of fitted over observed population, shape (times, 2)."""
    difference = log_populations(theta, census.years, adjoint, tolerance) - np.log(census.pelts)
    return jnp.where(jnp.isfinite(difference), difference, UNREACHED)


def half_squares(theta: Array, census: Census, adjoint: diffrax.AbstractAdjoint, tolerance: float = TOLERANCE) -> Array:
    """Half the sum of squared residuals: what Levenberg-Marquardt minimises."""
    return 0.5 * jnp.sum(residual(theta, census, adjoint, tolerance) ** 2)


def fit(
    starts: Array, census: Census, adjoint: diffrax.AbstractAdjoint, tolerance: float = TOLERANCE, jac: str = "once"
) -> Fits:
    """Levenberg-Marquardt from every start, shape (starts, 6), at once.

    `jac` says how Jacobians are made: `once` at each iterate, as `with_jacobian` does, or as Optimistix does if its
    option is `fwd` or `bwd`. `adjoint` has to have that mode; `once` is forward mode.
    """
    function = lambda theta, _: residual(theta, census, adjoint, tolerance)  # noqa: E731

    def fit_one(start: Array) -> Fits:
        solution = optx.least_squares(
            with_jacobian(function) if jac == "once" else function,
            optx.LevenbergMarquardt(rtol=1e-8, atol=1e-8),
            start,
            options={} if jac == "once" else {"jac": jac},
            max_steps=MAX_FIT_STEPS,
            throw=False,
        )
        loss = 2.0 * half_squares(solution.value, census, adjoint, tolerance)
        return Fits(solution.value, loss, solution.result == optx.RESULTS.successful)

    return jax.vmap(fit_one)(starts)


def gradients(thetas: Array, census: Census, adjoint: diffrax.AbstractAdjoint) -> Array:
    """Reverse-mode gradients of `half_squares` at all `thetas`, shape (starts, 6)."""
    return jax.vmap(jax.grad(lambda theta: half_squares(theta, census, adjoint)))(thetas)


def largest_difference(ours: np.ndarray, stock: np.ndarray) -> float:
    """Largest difference of two batches of gradients, each member relative to its largest entry; NaN if any is."""
    scale = np.max(np.abs(stock), axis=-1, keepdims=True)
    return float(np.max(np.abs(ours - stock) / scale))
