"""What a solve saves: dense output, steps with their padding, states handed on to the next solve."""

from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import MODES, STOCK, TIGHT, assert_close, decay, solve, van_der_pol
from jaxtyping import Array

MEDIUM = diffrax.PIDController(rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("solver", [diffrax.Tsit5(), diffrax.Kvaerno3()], ids=["Tsit5", "Kvaerno3"])
def test_gradient_through_dense_output(adjoint, solver):
    """Values and slopes of the interpolant, over parameters, state and query times (diffrax#250, #301)."""

    def loss(params: tuple[Array, Array, Array], which: diffrax.AbstractAdjoint) -> Array:
        mu, y0, tq = params
        saveat = diffrax.SaveAt(dense=True, t1=True)
        how = {"solver": solver, "stepsize_controller": MEDIUM, "max_steps": 256, "t1": 2.0}
        sol = solve(van_der_pol, y0, mu, saveat=saveat, adjoint=which, **how)
        assert sol.ys is not None
        return jnp.sum(jax.vmap(sol.evaluate)(tq) ** 2) + jnp.sum(sol.derivative(tq[0])) + jnp.sum(sol.ys)

    times = jnp.array([[0.1, 0.77, 2.0], [1.3, 1.9, 0.4]])
    params = (jnp.array([0.5, 1.5]), jnp.array([[2.0, 0.0], [0.5, 1.0]]), times)
    run = lambda which: jax.jit(jax.vmap(jax.value_and_grad(lambda p: loss(p, which))))(params)
    assert_close(run(adjoint), run(STOCK), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("every", [1, 3])
def test_gradient_through_saved_steps_and_their_padding(adjoint, every):
    """Unused rows are inf; a masked loss in a batch has finite and right gradients (diffrax#701, #488, #737)."""

    def loss(k: Array, which: diffrax.AbstractAdjoint) -> tuple[Array, tuple[Array, Array]]:
        field = lambda t, y, k: -k * y + jnp.sin(3 * t)
        saveat = diffrax.SaveAt(t0=True, steps=every)
        sol = solve(field, jnp.array(1.0), k, saveat=saveat, stepsize_controller=MEDIUM, max_steps=64, adjoint=which)
        assert sol.ts is not None and sol.ys is not None
        used = jnp.isfinite(sol.ts)
        mean = jnp.sum(jnp.where(used, sol.ys, 0.0) ** 2) / jnp.sum(used.astype(k.dtype))
        return mean, (sol.ts, sol.ys)

    ks = jnp.array([0.1, 2.0, 6.0])
    run = lambda which: jax.jit(jax.vmap(jax.value_and_grad(lambda k: loss(k, which), has_aux=True)))(ks)
    (value, rows), slope = run(adjoint)
    (stock_value, stock_rows), stock_slope = run(STOCK)
    assert np.isinf(rows[0]).any() and np.isfinite(slope).all()
    # The error estimate of a very short first step is mostly rounding, which the next step lengths inherit.
    assert_close(rows, stock_rows, rtol=1e-7)
    assert_close((value, slope), (stock_value, stock_slope), rtol=1e-7)


def in_two_parts(k: Array, adjoint: diffrax.AbstractAdjoint) -> Array:
    """exp(-k), the second half of the solve being given all states of the first."""
    first = diffrax.SaveAt(t1=True, solver_state=True, controller_state=True, made_jump=True)
    sol = solve(decay, jnp.array(1.0), k, t1=0.5, saveat=first, stepsize_controller=TIGHT, adjoint=adjoint)
    assert sol.ys is not None
    states = {"solver_state": sol.solver_state, "controller_state": sol.controller_state, "made_jump": sol.made_jump}
    sol = solve(decay, sol.ys[-1], k, t0=0.5, dt0=0.01, stepsize_controller=TIGHT, adjoint=adjoint, **states)
    assert sol.ys is not None
    return sol.ys[-1]


@pytest.mark.parametrize("mode", MODES)
def test_continuing_from_saved_states(adjoint, mode):
    """Solver state, controller state and jump flag are differentiable outputs and inputs (diffrax#492, #737)."""
    slope = jax.jit(mode(lambda k: in_two_parts(k, adjoint)))(jnp.array(1.5))
    assert_close(slope, np.float64(-0.223130160), rtol=1e-7)


@pytest.mark.parametrize("mode", MODES)
def test_passed_solver_state_is_an_input(adjoint, mode):
    """One Heun-like step from a given first stage: its slope enters with the weight of that stage."""

    def end(first_stage: Array) -> Array:
        how: dict[str, Any] = {"stepsize_controller": diffrax.ConstantStepSize(), "dt0": 1.0, "adjoint": adjoint}
        state = (jnp.array(False), first_stage)
        how |= {"solver": diffrax.Bosh3(), "solver_state": state}
        sol = solve(lambda t, y, args: jnp.ones_like(y), jnp.array(0.0), **how)
        assert sol.ys is not None
        return sol.ys[-1]

    # Weights of the Bogacki-Shampine method: 2/9, 1/3, 4/9; all later stages are 1 whatever the first one is.
    value, slope = jax.jit(lambda x: (end(x), mode(end)(x)))(jnp.array(4.0))
    assert_close((value, slope), (np.float64(4 * 2 / 9 + 7 / 9), np.float64(2 / 9)), rtol=1e-12)
