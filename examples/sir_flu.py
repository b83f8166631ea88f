"""The SIR model fitted to influenza in a boarding school, with confidence bands from the Jacobian.

Data: boys in bed on each day from 22 January to 4 February 1978, of 763 boys; British Medical Journal 1978;1:587. As in
the published fit, one boy is ill on the day before the first count, and counts of mean m have the negative binomial
variance m + m^2 / DISPERSION. Least squares are taken of `steady(count)`, whose variance is then about one whatever m.
The standard errors of the Jacobian are set beside a parametric bootstrap: many simulated epidemics, all fitted at once
under `jax.vmap`.

Published: Grinsztajn, Semenova, Margossian and Riou 2021, doi:10.1002/sim.9164, posterior mean and standard deviation.
"""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from common import BLUE, RED, Options, compare, numbers, options, panels, save

from gradsolve_backend import GradSolveAdjoint
from gradsolve_backend.fits import covariance, with_jacobian

IN_BED = np.array([3, 8, 26, 76, 225, 298, 258, 233, 189, 128, 68, 29, 14, 4], float)
DAYS = np.arange(1.0, 15.0)
BOYS = 763.0
DISPERSION = 8.0  # With about this value the residuals of the fit do have variance one.


def epidemic(t, y, rates):
    """Susceptible and infected boys; `rates` are transmission and recovery, 1/day."""
    infections, recoveries = rates[0] * y[0] * y[1] / BOYS, rates[1] * y[1]
    return jnp.stack([-infections, infections - recoveries])


def steady(count: jax.Array | np.ndarray) -> jax.Array:
    """Makes negative binomial variances equal; after Anscombe 1948, doi:10.1093/biomet/35.3-4.246."""
    return 2.0 * DISPERSION**0.5 * jnp.arcsinh(jnp.sqrt(count / DISPERSION))


def count_of(steadied: np.ndarray) -> np.ndarray:
    """The inverse of `steady`."""
    return DISPERSION * np.sinh(np.maximum(steadied, 0.0) / (2.0 * DISPERSION**0.5)) ** 2


def in_bed(theta: jax.Array, days: np.ndarray, adjoint: diffrax.AbstractAdjoint) -> jax.Array:
    """`steady` of the infected boys on `days`; `theta` holds the logarithms of the rates, shape (2,)."""
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(epidemic),
        diffrax.Tsit5(),
        0.0,
        DAYS[-1],
        None,
        jnp.array([BOYS - 1.0, 1.0]),
        jnp.exp(theta),
        saveat=diffrax.SaveAt(ts=jnp.asarray(days)),
        stepsize_controller=diffrax.PIDController(rtol=1e-8, atol=1e-8),
        adjoint=adjoint,
        throw=False,
    )
    return steady(jnp.maximum(solution.ys[:, 1], 1e-12))


def fit(counts: jax.Array, adjoint: diffrax.AbstractAdjoint) -> jax.Array:
    """Fitted `theta` for counts that went through `steady`, shape (14,)."""
    return optx.least_squares(
        with_jacobian(lambda theta, _: in_bed(theta, DAYS, adjoint) - counts),
        # A thousand times the tolerance of the solve: closer to the optimum the loss changes with the steps taken.
        optx.LevenbergMarquardt(rtol=1e-5, atol=1e-5),
        jnp.log(jnp.array([1.5, 0.5])),
        max_steps=64,
        throw=False,
    ).value


def draw(theta: jax.Array, spread: np.ndarray, noise: float, draws: np.ndarray, chosen: Options) -> None:
    """The curve with both bands, and the bootstrap beside the ellipse of the Jacobian."""
    figure, (curve, cloud) = panels(2, "SIR model of influenza in a boarding school, 1978")
    days = np.linspace(0.0, DAYS[-1], 281)
    middle = np.asarray(in_bed(theta, days, GradSolveAdjoint()))
    slopes = np.asarray(jax.jacfwd(lambda theta: in_bed(theta, days, GradSolveAdjoint()))(theta))
    variance = np.einsum("ti,ij,tj->t", slopes, spread, slopes)
    for extra, alpha, label in ((noise**2, 0.15, "95 % band of counts"), (0.0, 0.4, "95 % band of the curve")):
        half = 1.96 * np.sqrt(variance + extra)
        curve.fill_between(
            days, count_of(middle - half), count_of(middle + half), color=BLUE, alpha=alpha, linewidth=0, label=label
        )
    curve.plot(days, count_of(middle), color=BLUE, linewidth=2, label="fit")
    curve.plot(DAYS, IN_BED, "ko", markersize=4.5, label="data")
    curve.set(xlabel="day (1 = 22 January)", ylabel="boys in bed", xlim=(0, DAYS[-1] + 0.3), ylim=(0, None))
    curve.legend(frameon=False)
    cloud.plot(*np.exp(draws).T, ".", color=RED, markersize=4, alpha=0.5, label=f"{len(draws)} bootstrap fits")
    angle = np.linspace(0.0, 2.0 * np.pi, 200)
    circle = np.sqrt(5.991) * np.stack([np.cos(angle), np.sin(angle)])  # 95 % quantile of chi-squared, 2 degrees
    cloud.plot(*np.exp(theta[:, None] + np.linalg.cholesky(spread) @ circle), "k", label="95 % region, Jacobian")
    cloud.set(xlabel="transmission rate β, 1/day", ylabel="recovery rate γ, 1/day")
    cloud.legend(frameon=False)
    save(figure, chosen.out)


def main() -> None:
    """Fit the data, then simulated epidemics with both adjoints; print and draw."""
    chosen = options(__doc__)
    ours = GradSolveAdjoint()
    theta = jax.jit(lambda counts: fit(counts, ours))(steady(IN_BED))
    rest = np.asarray(in_bed(theta, DAYS, ours)) - steady(IN_BED)
    slopes = np.asarray(jax.jacfwd(lambda theta: in_bed(theta, DAYS, ours))(theta))
    spread, noise = covariance(slopes, rest), float(np.sqrt(np.sum(rest**2) / (len(rest) - 2)))
    normal = np.random.default_rng(0).standard_normal((32 if chosen.short else 512, len(DAYS)))
    epidemics = jnp.maximum(in_bed(theta, DAYS, ours) + noise * normal, 0.0)
    draws, _ = compare(
        f"fits of {len(epidemics)} simulated epidemics",
        jax.vmap(lambda counts: fit(counts, ours)),
        jax.vmap(lambda counts: fit(counts, diffrax.ForwardMode())),
        [epidemics],
        rounds=2 if chosen.short else 5,
    )
    rates, ratio = np.exp(theta), np.array([1.0, -1.0])
    found = [*rates, rates[0] / rates[1]]
    errors = np.sqrt([*np.diag(spread), ratio @ spread @ ratio]) * found
    boot = np.std(np.concatenate([draws, draws @ ratio[:, None]], axis=1), axis=0) * found
    names = ("transmission rate, 1/day", "recovery rate, 1/day", "basic reproduction number")
    cells = [f"{value:.3g} ± {error:.2g}" for value, error in zip(found, errors, strict=True)]
    numbers("published", zip(names, cells, ("1.73 ± 0.05", "0.54 ± 0.05", "3.22 ± 0.28"), strict=True))
    numbers("bootstrap", zip([f"standard error of {name}" for name in names], errors, boot, strict=True))
    draw(theta, spread, noise, np.asarray(draws), chosen)


if __name__ == "__main__":
    main()
