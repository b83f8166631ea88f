"""Lotka-Volterra fitted to 21 years of hare and lynx pelts, from many random starts at once.

Model, data and fit are those of `gradsolve_backend.demo_model`: Levenberg-Marquardt of Optimistix under `jax.vmap`,
with forward-mode Jacobians. Published numbers: posterior means and standard deviations of B. Carpenter, "Predator-Prey
Population Dynamics: the Lotka-Volterra model in Stan" (2018), whose priors move them a little.
"""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from common import BLUE, GREEN, GREY, RED, Options, compare, numbers, options, panels, plain_ticks, save

from gradsolve_backend import GradSolveAdjoint
from gradsolve_backend.demo_model import (
    NAMES,
    UNITS,
    Census,
    Fits,
    fit,
    load_census,
    log_populations,
    random_starts,
    residual,
)
from gradsolve_backend.fits import best, covariance, same_optimum

PUBLISHED = ("0.545 ± 0.064", "0.028 ± 0.004", "0.803 ± 0.092", "0.024 ± 0.004", "34.0 ± 2.9", "5.93 ± 0.54")
PER_YEAR = 16


def curve_and_slopes(theta: jax.Array, years: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log-populations, shape (years, 2), and their Jacobian by `theta`, shape (years, 2, 6)."""

    def curve(theta):
        return log_populations(theta, years, GradSolveAdjoint())

    return np.asarray(curve(theta)), np.asarray(jax.jacfwd(curve)(theta))


def draw(census: Census, fits: Fits, years: np.ndarray, logs: np.ndarray, half: np.ndarray, chosen: Options) -> None:
    """Data, best curve and its 95 % band; then where the starts ended."""
    good = same_optimum(fits.loss)
    figure, (hares, lynxes, ends) = panels(3, f"Hare and lynx: {sum(good)} of {len(good)} starts reached the best fit")
    for i, (panel, name, colour) in enumerate(((hares, "hare", RED), (lynxes, "lynx", BLUE))):
        low, high = np.exp(logs[:, i] - half[:, i]), np.exp(logs[:, i] + half[:, i])
        panel.fill_between(years, low, high, color=colour, alpha=0.2, linewidth=0, label="95 % band of the curve")
        panel.plot(years, np.exp(logs[:, i]), color=colour, linewidth=2, label="best fit")
        panel.plot(census.years, census.pelts[:, i], "ko", markersize=4.5, label="data")
        panel.set(xlabel="year", ylabel="thousand pelts", title=name, ylim=(0, 1.35 * high.max()))
        panel.set_xticks(census.years[::5], [f"{year:.0f}" for year in census.years[::5]])
        panel.legend(frameon=False, loc="upper right")
    order = np.argsort(np.asarray(fits.loss))
    colours = list(np.where(good, GREEN, GREY)[order])
    ends.scatter(np.arange(1, len(order) + 1), np.asarray(fits.loss)[order], c=colours, s=22)
    ends.set(yscale="log", xlabel="start, best first", ylabel="sum of squares of log(fit / data)")
    plain_ticks(ends.yaxis, [2, 5, 10, 20])
    ends.set_title("where the starts ended (green: best fit)")
    save(figure, chosen.out)


def main() -> None:
    """Fit with both, print, draw."""
    chosen = options(__doc__)
    census = load_census()
    starts = jnp.asarray(random_starts(8 if chosen.short else 64, seed=0))
    fits, stock = compare(
        f"Levenberg-Marquardt from {len(starts)} starts",
        lambda starts: fit(starts, census, GradSolveAdjoint()),
        lambda starts: fit(starts, census, diffrax.ForwardMode()),
        [starts],
        rounds=2 if chosen.short else 5,
    )
    theta = best(fits, fits.loss).theta
    years = np.linspace(census.years[0], census.years[-1], (len(census.years) - 1) * PER_YEAR + 1)
    logs, slopes = curve_and_slopes(theta, years)
    spread = covariance(slopes[::PER_YEAR], residual(theta, census, GradSolveAdjoint()))
    half = 1.96 * np.sqrt(np.einsum("tpi,ij,tpj->tp", slopes, spread, slopes))
    values, errors = np.exp(theta), np.exp(theta) * np.sqrt(np.diag(spread))
    found = [f"{value:.3g} ± {error:.2g}" for value, error in zip(values, errors, strict=True)]
    names = [f"{name}, {unit}" for name, unit in zip(NAMES, UNITS, strict=True)]
    numbers("published", zip(names, found, PUBLISHED, strict=True))
    numbers("stock", [("smallest sum of squares", fits.loss.min(), stock.loss.min())])
    draw(census, fits, years, logs, half, chosen)


if __name__ == "__main__":
    main()
