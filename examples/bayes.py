"""The posterior of the Lotka-Volterra model for hare and lynx, sampled by NUTS of NumPyro.

Needs NumPyro: pip install 'gradsolve_backend[examples]'. Each leapfrog step of NUTS is one gradient of the solve. All
chains run at once, vectorised, so that every solve is a batch.

Model, priors and published posterior: B. Carpenter, "Predator-Prey Population Dynamics: the Lotka-Volterra model in
Stan" (2018), mean and standard deviation.
"""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from common import BLUE, RED, Options, compare, difference, numbers, options, panels, save

from gradsolve_backend import GradSolveAdjoint
from gradsolve_backend.demo_model import Census, load_census, log_populations

try:
    import numpyro
    import numpyro.distributions as dist
    from numpyro.diagnostics import gelman_rubin
    from numpyro.infer import MCMC, NUTS, init_to_value
    from numpyro.infer.util import initialize_model
except ModuleNotFoundError as error:
    raise SystemExit(f"bayes.py needs {error.name}: pip install 'gradsolve_backend[examples]'") from error

CHAINS = 4
# Hare growth, predation, lynx death, lynx growth, then hare and lynx in 1900, in thousands.
START = np.array([0.6, 0.03, 0.8, 0.03, 30.0, 5.0])
PUBLISHED = {
    "hare growth, 1/year": "0.545 ± 0.064",
    "predation, 1/year/thousand": "0.028 ± 0.004",
    "lynx death, 1/year": "0.803 ± 0.092",
    "lynx growth, 1/year/thousand": "0.024 ± 0.004",
    "hare at start, thousand": "34.0 ± 2.9",
    "lynx at start, thousand": "5.93 ± 0.54",
    "error of hare pelts (sd of log)": "0.250 ± 0.045",
    "error of lynx pelts (sd of log)": "0.252 ± 0.044",
}


def model(census: Census, adjoint: diffrax.AbstractAdjoint) -> None:
    """Priors and likelihood; pelts are lognormal around the populations."""
    mean, spread = jnp.array([1.0, 0.05, 1.0, 0.05]), jnp.array([0.5, 0.05, 0.5, 0.05])
    rates = numpyro.sample("rates", dist.TruncatedNormal(mean, spread, low=0.0).to_event(1))
    first = numpyro.sample("first", dist.LogNormal(jnp.log(10.0) * jnp.ones(2), 1.0).to_event(1))
    error = numpyro.sample("error", dist.LogNormal(-jnp.ones(2), 1.0).to_event(1))
    theta = jnp.log(jnp.concatenate([rates, first]))
    middle = log_populations(theta, census.years, adjoint)
    # A solve that failed far from the data ends in inf; any large value has the sampler turn back.
    middle = jnp.where(jnp.isfinite(middle), middle, 100.0)
    numpyro.sample("pelts", dist.LogNormal(middle, error).to_event(2), obs=jnp.asarray(census.pelts))


def sample(census: Census, adjoint: diffrax.AbstractAdjoint, steps: int) -> tuple[dict[str, np.ndarray], float]:
    """Draws of all chains after as many steps of warm-up, and the largest R-hat of all parameters."""
    start = init_to_value(values={"rates": START[:4], "first": START[4:], "error": jnp.array([0.3, 0.3])})
    kernel = NUTS(model, init_strategy=start)
    chains = {"num_chains": CHAINS, "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=steps, num_samples=steps, **chains)
    mcmc.run(jax.random.key(0), census, adjoint)
    grouped = mcmc.get_samples(group_by_chain=True)
    worst = max(np.max(gelman_rubin(np.asarray(grouped[name]))) for name in ("rates", "first", "error"))
    return {name: np.asarray(value) for name, value in mcmc.get_samples().items()}, float(worst)


def compare_gradients(census: Census, rounds: int) -> float:
    """Time the gradient of the potential energy for all chains, with both adjoints; largest relative difference."""

    def slopes(adjoint):
        info = initialize_model(jax.random.key(0), model, model_args=(census, adjoint))
        return jax.vmap(jax.grad(info.potential_fn)), info.param_info.z

    (ours, z), (stock, _) = slopes(GradSolveAdjoint()), slopes(diffrax.RecursiveCheckpointAdjoint())
    points = {k: v + 0.05 * jax.random.normal(jax.random.key(1), (CHAINS, *v.shape)) for k, v in z.items()}
    found = compare(f"gradient of the potential, {CHAINS} chains", ours, stock, [points], rounds)
    return max(difference(found[0][name], found[1][name]) for name in points)


def draw(census: Census, draws: dict[str, np.ndarray], chosen: Options) -> None:
    """Posterior of the populations, and of two rates."""
    figure, axes = panels(3, "Hare and lynx: posterior of a Lotka-Volterra model")
    years = np.linspace(census.years[0], census.years[-1], 241)
    thetas = np.log(np.concatenate([draws["rates"], draws["first"]], axis=1))[:: max(1, len(draws["rates"]) // 400)]
    logs = jax.vmap(lambda theta: log_populations(theta, years, GradSolveAdjoint()))(thetas)
    for i, (panel, name, colour) in enumerate(zip(axes[:2], ("hare", "lynx"), (RED, BLUE), strict=True)):
        low, middle, high = np.exp(np.quantile(logs[:, :, i], [0.025, 0.5, 0.975], axis=0))
        panel.fill_between(years, low, high, color=colour, alpha=0.25, linewidth=0, label="95 % of the curves")
        panel.plot(years, middle, color=colour, linewidth=2, label="median")
        panel.plot(census.years, census.pelts[:, i], "ko", markersize=4.5, label="data")
        panel.set(xlabel="year", ylabel="thousand pelts", title=name, ylim=(0, 1.35 * census.pelts[:, i].max()))
        panel.set_xticks(census.years[::5], [f"{year:.0f}" for year in census.years[::5]])
        panel.legend(frameon=False, loc="upper right")
    axes[2].plot(draws["rates"][:, 0], draws["rates"][:, 2], ".", color=BLUE, markersize=3, alpha=0.4, label="draws")
    axes[2].errorbar(0.545, 0.803, xerr=0.064, yerr=0.092, color="black", capsize=4, label="published, mean ± sd")
    axes[2].set(xlabel="hare growth, 1/year", ylabel="lynx death, 1/year", title="two of eight parameters")
    axes[2].legend(frameon=False)
    save(figure, chosen.out)


def main() -> None:
    """Time a gradient, sample, print, draw."""
    chosen, census = options(__doc__), load_census()
    apart = compare_gradients(census, 5 if chosen.short else 25)
    draws, worst = sample(census, GradSolveAdjoint(), 100 if chosen.short else 400)
    columns = np.concatenate([draws["rates"], draws["first"], draws["error"]], axis=1)
    found = [f"{mean:.3g} ± {sd:.2g}" for mean, sd in zip(columns.mean(axis=0), columns.std(axis=0), strict=True)]
    numbers("published", [(name, cell, PUBLISHED[name]) for name, cell in zip(PUBLISHED, found, strict=True)])
    numbers("allowed", [("largest R-hat", worst, 1.05), ("difference of the gradients from stock's", apart, 1e-8)])
    draw(census, draws, chosen)


if __name__ == "__main__":
    main()
