"""Rates of Robertson's reactions, a stiff system, fitted to noisy concentrations with `gradsolve_backend.Rodas5P`.

The data are simulated at the published rates with errors of 2 %. Stock Diffrax fits with its own stiff solver,
Kvaerno5, at the same tolerances; the PI controller saves it many rejected steps. All starts are fitted at once.

Published: rates, Robertson 1966; concentrations at time 40, the manual of CVODE (SUNDIALS).
"""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from common import BLUE, GREEN, GREY, RED, Options, compare, numbers, options, panels, plain_ticks, save

from gradsolve_backend import GradSolveAdjoint, Rodas5P
from gradsolve_backend.fits import best, uniform_starts, with_jacobian

RATES = np.array([0.04, 3e7, 1e4])
CVODE = np.array([7.158016e-01, 9.185045e-06, 2.841893e-01])
TIMES = np.geomspace(1e-5, 1e5, 40)
ERROR = 0.02


def reactions(t, y, k):
    """A -> B at rate k1; 2 B -> B + C at rate k2; B + C -> A + C at rate k3."""
    slow, square, cross = k[0] * y[0], k[1] * y[1] ** 2, k[2] * y[1] * y[2]
    return jnp.stack([cross - slow, slow - square - cross, square])


def solve(
    theta: jax.Array, times: np.ndarray, solver: diffrax.AbstractSolver, adjoint: diffrax.AbstractAdjoint
) -> jax.Array:
    """Concentrations at `times`, shape (times, 3); `theta` are the logarithms of the rates."""
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(reactions),
        solver,
        0.0,
        times[-1],
        1e-6,
        jnp.array([1.0, 0.0, 0.0]),
        jnp.exp(theta),
        saveat=diffrax.SaveAt(ts=jnp.asarray(times)),
        stepsize_controller=diffrax.PIDController(rtol=1e-6, atol=1e-10, pcoeff=0.3, icoeff=0.4),
        adjoint=adjoint,
        max_steps=1024,
        throw=False,
    )
    return solution.ys


def fit(
    start: jax.Array, data: np.ndarray, solver: diffrax.AbstractSolver, adjoint: diffrax.AbstractAdjoint
) -> tuple[jax.Array, jax.Array]:
    """Fitted logarithms of the rates, and the sum of squares there."""

    def residual(theta, _=None):
        ys = solve(theta, TIMES, solver, adjoint)
        ratio = jnp.where(jnp.isfinite(ys), ys, 1e10) / data
        return jnp.log(jnp.maximum(ratio, 1e-10)) / ERROR

    method = optx.LevenbergMarquardt(rtol=1e-4, atol=1e-4)
    theta = optx.least_squares(with_jacobian(residual), method, start, max_steps=64, throw=False).value
    return theta, jnp.sum(residual(theta) ** 2)


def draw(data: np.ndarray, starts: np.ndarray, thetas: np.ndarray, theta: jax.Array, chosen: Options) -> None:
    """Data and best curves; and the path of every start in the plane of two rates."""
    figure, (curves, paths) = panels(2, f"Robertson's reactions: rates fitted with Rodas5P from {len(starts)} starts")
    times = np.geomspace(TIMES[0], TIMES[-1], 400)
    ys = np.asarray(solve(theta, times, Rodas5P(), GradSolveAdjoint()))
    species = zip((1.0, 1e4, 1.0), ("A", "10⁴ × B", "C"), (BLUE, RED, GREEN), strict=True)
    for i, (scale, name, colour) in enumerate(species):
        curves.semilogx(times, scale * ys[:, i], color=colour, label=f"{name}, fit")
        curves.semilogx(TIMES, scale * data[:, i], "o", color=colour, markersize=4)
    curves.set(xlabel="time", ylabel="concentration", title="dots: data with errors of 2 %")
    curves.legend(frameon=False)
    ratio = np.exp(np.stack([starts, thetas])) / RATES
    paths.loglog(ratio[..., 0], ratio[..., 2], color=GREY, linewidth=0.8)
    paths.loglog(ratio[0, :, 0], ratio[0, :, 2], "o", color=GREY, markersize=4, label="starts")
    paths.loglog(ratio[1, :, 0], ratio[1, :, 2], "*", color="black", markersize=12, label="fits")
    paths.set(xlabel="k₁ / published", ylabel="k₃ / published", title="rates")
    plain_ticks(paths.xaxis, [0.3, 0.5, 1, 2, 3])
    plain_ticks(paths.yaxis, [0.3, 0.5, 1, 2, 3])
    paths.legend(frameon=False)
    save(figure, chosen.out)


def main() -> None:
    """Simulate, fit with both, print, draw."""
    chosen, random = options(__doc__), np.random.default_rng(0)
    truth = jnp.log(RATES)
    exact = solve(truth, TIMES, Rodas5P(), GradSolveAdjoint())
    data = np.asarray(exact) * np.exp(ERROR * random.standard_normal(exact.shape))
    starts = uniform_starts(2 if chosen.short else 8, truth - np.log(3.0), truth + np.log(3.0), seed=0)
    (thetas, squares), _ = compare(
        f"fits from {len(starts)} starts",
        jax.vmap(lambda start: fit(start, data, Rodas5P(), GradSolveAdjoint())),
        jax.vmap(lambda start: fit(start, data, diffrax.Kvaerno5(), diffrax.ForwardMode())),
        [starts],
        rounds=1 if chosen.short else 3,
    )
    theta = best(thetas, squares)
    numbers("published", zip(("k1", "k2", "k3"), np.exp(theta), RATES, strict=True))
    at_40 = solve(truth, np.array([40.0]), Rodas5P(), GradSolveAdjoint())[0]
    numbers("published", zip(("A at time 40", "B at time 40", "C at time 40"), at_40, CVODE, strict=True))
    draw(data, starts, np.asarray(thetas), theta, chosen)


if __name__ == "__main__":
    main()
