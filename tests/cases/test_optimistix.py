"""Optimistix least squares around a solve, with its default Jacobian."""

from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
from helpers import assert_close, solve
from jaxtyping import Array

TS = jnp.linspace(0.25, 3.0, 12)


def points(k: Array, y0: Array) -> Array:
    """Exact solution of y' = -k y + 0.2 sin t at twelve times."""
    forced = lambda t: 0.2 * (k * jnp.sin(t) - jnp.cos(t)) / (1 + k**2)
    return forced(TS) + (y0 - forced(0.0)) * jnp.exp(-k * TS)


def fit(data: Array, adjoint: diffrax.AbstractAdjoint, **options: Any) -> Array:
    """Fitted (log k, y0)."""

    def residuals(p: Array, data: Array) -> Array:
        field = lambda t, y, k: -k * y + 0.2 * jnp.sin(t)
        saveat = diffrax.SaveAt(ts=TS)
        sol = solve(field, p[1], jnp.exp(p[0]), t1=3.0, saveat=saveat, max_steps=128, adjoint=adjoint)
        assert sol.ys is not None
        return sol.ys - data

    solver = optx.LevenbergMarquardt(rtol=1e-10, atol=1e-10)
    start = jnp.array([0.0, 1.0])
    return optx.least_squares(residuals, solver, start, args=data, options=options, max_steps=64).value


TRUTH = (jnp.array([0.7, 0.4, 1.2]), jnp.array([2.0, 1.5, 3.0]))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="default", marks=pytest.mark.stock_fails(raises=TypeError)),
        pytest.param({"jac": "bwd"}, id="backward"),
    ],
)
def test_fits_in_a_batch(adjoint, options):
    """Levenberg-Marquardt takes forward mode unless told otherwise; both find the truth (optimistix#50, #112)."""
    data = jax.vmap(points)(*TRUTH)
    fitted = jax.jit(jax.vmap(lambda data: fit(data, adjoint, **options)))(data)
    assert_close(fitted, jnp.stack([jnp.log(TRUTH[0]), TRUTH[1]], axis=1), rtol=1e-6, atol=1e-6)


@pytest.mark.stock_fails(raises=TypeError)
def test_gradient_of_a_fitted_value(adjoint):
    """The fitted log k moves with the k that made the data, by 1/k (optimistix#51)."""
    fitted = lambda k: fit(points(k, jnp.array(2.0)), adjoint)[0]
    value, slope = jax.jit(jax.value_and_grad(fitted))(jnp.array(0.7))
    assert_close((value, slope), (np.log(0.7), np.float64(1 / 0.7)), rtol=1e-5)
