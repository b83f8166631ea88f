"""Repeated oral doses of theophylline in many subjects: a one-compartment model, fitted to each subject at once.

A tablet of 4 mg/kg every 12 hours releases its drug at a constant rate for half an hour, so that the vector field jumps
when a release begins and ends. `ClipStepSizeController(jump_ts=...)` puts a step end on each jump. The data are
simulated from the closed form, not by a solver, for subjects whose parameters have exactly the published mean and
spread. Both are found again from the single fits and their standard errors (the two-stage method).

Published parameters: Pinheiro and Bates 2000, doi:10.1007/b98882, for the theophylline data: mean of log absorption
rate 0.45 with standard deviation 0.64, log elimination rate -2.43, log clearance -3.21 with standard deviation 0.17;
error of a concentration 0.68 mg/L.
"""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from common import BLUE, GREY, RED, Options, compare, difference, numbers, options, panels, plain_ticks, save

from gradsolve_backend import GradSolveAdjoint
from gradsolve_backend.fits import covariance, with_jacobian

NAMES = ("log absorption rate, 1/h", "log elimination rate, 1/h", "log clearance, L/h/kg")
MEAN, SPREAD, ERROR = np.array([0.45, -2.43, -3.21]), np.array([0.64, 0.0, 0.17]), 0.68
DOSE, RELEASE, BEGINS = 4.0, 0.5, np.array([0.0, 12.0, 24.0, 36.0])  # mg/kg, hours
JUMPS = np.sort(np.concatenate([BEGINS[1:], BEGINS + RELEASE]))
TIMES = np.array([0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 24.5, 36.5, 37.0, 37.5, 38.0, 40.0, 44.0, 48.0, 54.0, 60.0])


def body(t, y, rates):
    """Amount in the gut, mg/kg, and concentration, mg/L."""
    absorption, elimination, clearance = rates
    releasing = jnp.any((t >= BEGINS) & (t < BEGINS + RELEASE))
    absorbed = absorption * y[0]
    per_litre = elimination / clearance  # 1 / volume of distribution
    return jnp.stack([jnp.where(releasing, DOSE / RELEASE, 0.0) - absorbed, absorbed * per_litre - elimination * y[1]])


def concentrations(theta: jax.Array, times: np.ndarray, adjoint: diffrax.AbstractAdjoint) -> jax.Array:
    """Concentrations at `times`, mg/L; `theta` are the logarithms in `NAMES`, shape (3,)."""
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(body),
        diffrax.Tsit5(),
        0.0,
        60.0,
        None,
        jnp.zeros(2),
        jnp.exp(theta),
        saveat=diffrax.SaveAt(ts=jnp.asarray(times)),
        stepsize_controller=diffrax.ClipStepSizeController(
            diffrax.PIDController(rtol=1e-7, atol=1e-7), jump_ts=jnp.asarray(JUMPS)
        ),
        adjoint=adjoint,
        max_steps=1024,
        throw=False,
    )
    return solution.ys[:, 1]


def closed_form(theta: np.ndarray, times: np.ndarray) -> np.ndarray:
    """The same from the sum of the responses to each release that begins, less those to each that ends."""
    absorption, elimination, clearance = np.exp(theta)

    def response(since: np.ndarray) -> np.ndarray:
        since = np.maximum(since, 0.0)
        slow, fast = (-np.expm1(-rate * since) / rate for rate in (elimination, absorption))
        return absorption * elimination / clearance / (absorption - elimination) * (slow - fast)

    after = times[:, None] - BEGINS
    return DOSE / RELEASE * np.sum(response(after) - response(after - RELEASE), axis=1)


def fit(data: jax.Array, adjoint: diffrax.AbstractAdjoint) -> tuple[jax.Array, jax.Array]:
    """Parameters of one subject, and their covariance, for concentrations of shape (18,)."""

    def residual(theta, _=None):
        return (concentrations(theta, TIMES, adjoint) - data) / ERROR

    solver = optx.LevenbergMarquardt(rtol=1e-4, atol=1e-4)
    theta = optx.least_squares(with_jacobian(residual), solver, jnp.asarray(MEAN), max_steps=64, throw=False).value
    return theta, covariance(jax.jacfwd(residual)(theta))


def draw(truth: np.ndarray, data: np.ndarray, thetas: np.ndarray, chosen: Options) -> None:
    """Slow, middle and fast absorption; all fitted against true absorption rates, and the same for clearance."""
    figure, (curves, rate, clearance) = panels(3, f"Theophylline, 4 mg/kg every 12 h, {len(data)} simulated subjects")
    times = np.linspace(0.0, 60.0, 601)
    slow_first = np.argsort(truth[:, 0])
    for place, name, colour in ((0.05, "slow", BLUE), (0.5, "middle", GREY), (0.95, "fast", RED)):
        i = slow_first[int(place * len(truth))]
        curves.plot(times, concentrations(thetas[i], times, GradSolveAdjoint()), color=colour, label=name)
        curves.plot(TIMES, data[i], "o", color=colour, markersize=4)
    curves.set(
        xlabel="time, h",
        ylabel="concentration, mg/L",
        title="fits of subjects with slow, middle and fast absorption",
        xticks=range(0, 61, 12),
    )
    curves.set_ylim(0, 1.15 * curves.get_ylim()[1])
    curves.legend(frameon=False, ncols=3, loc="upper center")
    rates, clearances = (0.2, 0.5, 1, 2, 5, 10), (0.03, 0.04, 0.05, 0.06)
    for panel, i, name, ticks in (
        (rate, 0, "absorption rate, 1/h", rates),
        (clearance, 2, "clearance, L/h/kg", clearances),
    ):
        panel.loglog(*np.exp([truth[:, i], thetas[:, i]]), ".", color=BLUE, markersize=4, label="subjects")
        ends = np.exp([truth[:, i].min(), truth[:, i].max()])
        panel.plot(ends, ends, color="black", linewidth=1, label="fitted = true")
        panel.set(xlabel=f"true {name}", ylabel=f"fitted {name}", title=name.split(",")[0])
        panel.legend(frameon=False)
        plain_ticks(panel.xaxis, ticks)
        plain_ticks(panel.yaxis, ticks)
    save(figure, chosen.out)


def main() -> None:
    """Simulate, fit with both adjoints, print, draw."""
    chosen, random = options(__doc__), np.random.default_rng(1)
    normal = random.standard_normal((16 if chosen.short else 128, 3))
    truth = MEAN + SPREAD * (normal - normal.mean(axis=0)) / normal.std(axis=0)
    exact = np.stack([closed_form(theta, TIMES) for theta in truth])
    data = exact + ERROR * random.standard_normal(exact.shape)
    (thetas, covariances), _ = compare(
        f"fits of {len(data)} subjects",
        jax.vmap(lambda data: fit(data, GradSolveAdjoint())),
        jax.vmap(lambda data: fit(data, diffrax.ForwardMode())),
        [jnp.asarray(data)],
        rounds=1 if chosen.short else 3,
    )
    thetas, errors = np.asarray(thetas), np.sqrt(np.diagonal(covariances, axis1=1, axis2=2))
    weights = 1.0 / (errors**2 + SPREAD**2)
    means = np.sum(weights * thetas, axis=0) / np.sum(weights, axis=0)
    within = np.sum(weights * ((thetas - means) ** 2 - errors**2), axis=0) / np.sum(weights, axis=0)
    spreads = np.sqrt(np.maximum(within, 0.0))
    numbers("published", zip([f"mean of {name}" for name in NAMES], means, MEAN, strict=True))
    numbers("published", zip([f"standard deviation of {name}" for name in NAMES], spreads, SPREAD, strict=True))
    solved = jax.vmap(lambda theta: concentrations(theta, TIMES, GradSolveAdjoint()))(jnp.asarray(truth))
    numbers("allowed", [("error of the solver against the closed form", difference(solved, exact), 1e-5)])
    draw(truth, data, thetas, chosen)


if __name__ == "__main__":
    main()
