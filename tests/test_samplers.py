"""A solve inside what samples and what optimises: NumPyro, BlackJAX and Optax, the same as with stock Diffrax.

They come with the extra `test`; without one its tests are skipped.
"""

import contextlib

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import STOCK, assert_close

from gradsolve_backend import GradSolveAdjoint

TS = jnp.linspace(0.25, 2.0, 8)
TRUTH = jnp.array([0.7, 2.0])  # rate and initial value
DATA = TRUTH[1] * jnp.exp(-TRUTH[0] * TS) * jnp.exp(0.05 * jnp.sin(9.0 * TS))
ERROR = 0.05
OURS = GradSolveAdjoint()
CHAINS, DRAWS = 2, 16


@contextlib.contextmanager
def mixed():
    """These packages mix dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def decay(p, adjoint):
    """y' = -p[0] y, y(0) = p[1], at `TS`."""
    how = {"saveat": diffrax.SaveAt(ts=TS), "stepsize_controller": diffrax.PIDController(rtol=1e-8, atol=1e-8)}
    term = diffrax.ODETerm(lambda t, y, k: -k * y)
    return diffrax.diffeqsolve(
        term, diffrax.Tsit5(), 0.0, 2.0, None, p[1], p[0], adjoint=adjoint, max_steps=128, **how
    ).ys


def log_density(log_p, adjoint):
    """Normal priors of both logarithms, and normal errors of the logarithms of the data."""
    misfit = (jnp.log(decay(jnp.exp(log_p), adjoint)) - jnp.log(DATA)) / ERROR
    return -0.5 * (jnp.sum(jnp.square(log_p)) + jnp.sum(jnp.square(misfit)))


def check(draws, values, gradients):
    """The density and its gradient at all draws, of shape (chains, draws, 2), are stock's; the chains moved."""
    stock = jax.jit(jax.vmap(jax.vmap(jax.value_and_grad(lambda x: log_density(x, STOCK)))))
    assert_close((values, gradients), stock(draws), rtol=1e-9, atol=1e-9)
    assert draws.shape == (CHAINS, DRAWS, 2) and np.min(np.std(draws, axis=1)) > 1e-2


def test_nuts_of_blackjax():
    blackjax = pytest.importorskip("blackjax", reason="needs BlackJAX: pip install 'gradsolve_backend[test]'")
    nuts = blackjax.nuts(lambda x: log_density(x, OURS), 1.0, jnp.full(2, 1e-3), max_num_doublings=3)

    def chain(key):
        def move(state, key):
            state, _ = nuts.step(key, state)
            return state, state

        return jax.lax.scan(move, nuts.init(jnp.log(TRUTH)), jax.random.split(key, DRAWS))[1]

    with mixed():
        states = jax.jit(jax.vmap(chain))(jax.random.split(jax.random.key(0), CHAINS))
    check(states.position, states.logdensity, states.logdensity_grad)


def test_nuts_of_numpyro():
    numpyro = pytest.importorskip("numpyro", reason="needs NumPyro: pip install 'gradsolve_backend[test]'")
    from numpyro.infer import MCMC, NUTS, init_to_value

    def model():
        log_p = numpyro.sample("log_p", numpyro.distributions.Normal(jnp.zeros(2), 1.0).to_event(1))
        middle = jnp.log(decay(jnp.exp(log_p), OURS))
        numpyro.sample("data", numpyro.distributions.Normal(middle, ERROR).to_event(1), obs=jnp.log(DATA))

    start = init_to_value(values={"log_p": jnp.log(TRUTH)})
    kernel = NUTS(model, init_strategy=start, step_size=0.03, max_tree_depth=3, adapt_step_size=False)
    how = {"num_chains": CHAINS, "chain_method": "vectorized", "progress_bar": False}
    with mixed():
        mcmc = MCMC(kernel, num_warmup=0, num_samples=DRAWS, **how)
        mcmc.run(jax.random.key(0), extra_fields=("potential_energy", "z_grad"))
    draws, found = mcmc.get_samples(True)["log_p"], mcmc.get_extra_fields(True)
    constants = (2 + TS.size) * 0.5 * np.log(2.0 * np.pi) + TS.size * np.log(ERROR)
    check(draws, constants - found["potential_energy"], -found["z_grad"]["log_p"])


def optimised(optax, optimiser, start, adjoint, steps):
    """Where the optimiser is after some steps."""
    loss = lambda x: -log_density(x, adjoint)

    def move(carry, _):
        x, state = carry
        value, gradient = jax.value_and_grad(loss)(x)
        updates, state = optimiser.update(gradient, state, x, value=value, grad=gradient, value_fn=loss)
        return (optax.apply_updates(x, updates), state), None

    optimiser = optax.with_extra_args_support(optimiser)
    return jax.lax.scan(move, (start, optimiser.init(start)), length=steps)[0][0]


STARTS = jnp.log(jnp.outer(jnp.array([0.8, 1.2]), TRUTH))


def test_adam_of_optax_steps_as_with_stock():
    optax = pytest.importorskip("optax", reason="needs Optax: pip install 'gradsolve_backend[test]'")
    with mixed():
        run = lambda adjoint: jax.jit(jax.vmap(lambda x: optimised(optax, optax.adam(0.1), x, adjoint, 8)))(STARTS)
        assert_close(run(OURS), run(STOCK), rtol=1e-9)


def test_lbfgs_of_optax_ends_where_the_gradient_of_stock_is_zero():
    optax = pytest.importorskip("optax", reason="needs Optax: pip install 'gradsolve_backend[test]'")
    with mixed():
        found = jax.jit(jax.vmap(lambda x: optimised(optax, optax.lbfgs(), x, OURS, 16)))(STARTS)
    slopes = jax.jit(jax.vmap(jax.grad(lambda x: log_density(x, STOCK))))
    assert np.max(np.abs(slopes(found))) < 1e-6 * np.min(np.abs(slopes(STARTS)))
