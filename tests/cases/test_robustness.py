"""Members that fail, right-hand sides that are not finite somewhere, tolerances out of reach."""

from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import STOCK, assert_close, final, frozen_oracle, solve, with_mesh
from jaxtyping import Array

RESULTS = diffrax.RESULTS
MEDIUM = diffrax.PIDController(rtol=1e-6, atol=1e-6)


def test_field_that_is_infinite_at_time_zero(adjoint):
    """y' = -y/t from t = 1: nothing may be evaluated at t = 0, not even for padding (diffrax#143)."""
    end = lambda y0, stop: final(lambda t, y, args: -y / t, y0, t0=1.0, t1=stop, max_steps=256, adjoint=adjoint)
    stops = jnp.array([1.0001, 1.5, 3.0, 40.0])
    slopes = jax.vmap(jax.value_and_grad(end, argnums=(0, 1)), in_axes=(None, 0))
    value, (by_y0, by_stop) = jax.jit(slopes)(jnp.array(2.0), stops)
    exact = np.asarray(stops)
    assert_close((value, by_y0, by_stop), (2 / exact, 1 / exact, -2 / exact**2), rtol=1e-6)


@pytest.mark.stock_fails(raises=AssertionError)
def test_rejected_trial_that_is_nan(adjoint):
    """y' = -sqrt(y) with a first trial far too long: its NaN must not reach the gradient (diffrax#143, #368)."""
    end = lambda y0: final(lambda t, y, args: -jnp.sqrt(y), y0, t1=1.5, dt0=1.5, max_steps=256, adjoint=adjoint)
    value, slope = jax.jit(jax.value_and_grad(end))(jnp.array(1.0))
    assert_close(value, np.float64(0.0625), rtol=1e-6)
    assert_close(slope, np.float64(0.25), rtol=1e-5)


def growth(t: Any, y: Array, mu: Array) -> Array:
    return mu * y**2


def test_failing_member_leaves_the_others_unharmed(adjoint):
    """The last member blows up before the end; the others have their slopes and counts (diffrax#500, #692)."""

    def member(mu: Array) -> tuple[Array, tuple[Any, ...]]:
        sol = solve(growth, jnp.array(1.0), mu, max_steps=120, throw=False, adjoint=adjoint)
        assert sol.ys is not None
        passed, out_of_steps = sol.result == RESULTS.successful, sol.result == RESULTS.max_steps_reached
        counts = sol.stats["num_steps"], sol.stats["num_accepted_steps"]
        return jnp.where(passed, sol.ys[-1], 0.0), (passed, out_of_steps, *counts)

    mus = jnp.array([0.01, 0.5, 0.9, 2.0])
    total = lambda mus: (lambda ends, aux: (jnp.sum(ends), aux))(*jax.vmap(member)(mus))
    slope, (passed, out_of_steps, *counts) = jax.jit(jax.grad(total, has_aux=True))(mus)
    assert_close(slope, np.append(1 / (1 - np.asarray(mus[:3])) ** 2, 0.0), rtol=1e-6)
    assert passed.tolist() == [True, True, True, False] and out_of_steps.tolist() == [False, False, False, True]
    single = jax.jit(lambda mu: member(mu)[1][2:])
    assert_close(tuple(counts), tuple(np.stack(x) for x in zip(*map(single, mus), strict=True)))


@pytest.mark.parametrize("derive", [False, True], ids=["value", "gradient"])
def test_failing_member_throws(adjoint, derive):
    """With throw=True the error speaks of the maximum number of steps, under `grad` as well (diffrax#85)."""
    end = lambda mu: final(growth, jnp.array(1.0), mu, max_steps=120, adjoint=adjoint)
    total = lambda mus: jnp.sum(jax.vmap(end)(mus))
    # Compiled alone, a gradient drops the value and the check with it, as stock's does.
    function = jax.grad(total) if derive else jax.jit(total)
    with pytest.raises(Exception, match="maximum number of (solver )?steps"):
        jax.block_until_ready(function(jnp.array([0.5, 2.0])))


implicit = pytest.param(diffrax.Kvaerno3(), id="Kvaerno3", marks=pytest.mark.stock_fails(raises=Exception))


@pytest.mark.parametrize("solver", [implicit, pytest.param(diffrax.Tsit5(), id="Tsit5")])
def test_one_bad_member_of_an_ensemble(adjoint, solver):
    """A member whose field is NaN spoils neither the others nor the whole batch (diffrax#368, lineax#82)."""

    def member(s: Array) -> Array:
        field = lambda t, y, s: -jnp.sqrt(s) * y
        how = {"solver": solver, "max_steps": 200, "throw": False, "stepsize_controller": MEDIUM, "adjoint": adjoint}
        sol = solve(field, jnp.array(3.0), s, **how)
        assert sol.ys is not None
        return jnp.where(sol.result == RESULTS.successful, sol.ys[-1], 0.0)

    slope = jax.jit(jax.grad(lambda ss: jnp.sum(jax.vmap(member)(ss))))(jnp.array([1.0, 4.0, -1.0]))
    root = np.sqrt(np.array([1.0, 4.0]))
    assert_close(slope[:2], -1.5 * np.exp(-root) / root, rtol=1e-3)
    assert np.isnan(slope[2]) or slope[2] == 0


def test_steps_that_stability_sets(adjoint):
    """Rounding may change such steps; on the steps a member took, value and gradient are stock's (diffrax#692)."""

    def loss(b: Array, **how: Any) -> tuple[Array, Array]:
        table = jnp.array([0.0, 1.0, 0.2, 0.7, 0.5])

        def field(t: Any, y: Array, b: Array) -> Array:
            goal = jnp.interp(t, jnp.linspace(0.0, 5.0, 5), table)
            return jnp.stack([-1.3 * y[0] + b * y[1], -39.0 * (y[1] - goal)])

        how = {"stepsize_controller": MEDIUM, "max_steps": 256} | how
        sol = solve(field, jnp.array([1.0, 0.0]), b, t1=5.0, saveat=with_mesh(diffrax.SubSaveAt(t1=True)), **how)
        assert isinstance(sol.ys, dict) and isinstance(sol.ts, dict)
        return jnp.sum(sol.ys["asked"]), sol.ts["mesh"]

    bs = jnp.array([0.2, 0.9, 3.0])
    batched = jax.vmap(jax.value_and_grad(lambda b: loss(b, adjoint=adjoint), has_aux=True))
    (values, meshes), slopes = jax.jit(batched)(bs)
    for b, value, mesh, slope in zip(bs, values, np.asarray(meshes), slopes, strict=True):
        assert_close((value, slope), frozen_oracle(loss, b, mesh[np.isfinite(mesh)]), rtol=1e-9)


@pytest.mark.parametrize("dtmin", [None, 1e-3])
def test_tolerance_out_of_reach_in_single_precision(adjoint, dtmin):
    """Far from zero, float32 steps cannot meet 1e-9: the solve creeps through or stops at dtmin (diffrax#85)."""
    controller = diffrax.PIDController(rtol=1e-9, atol=1e-9, dtmin=dtmin, force_dtmin=False)
    start = jnp.array(1e3, jnp.float32)

    def run(which: diffrax.AbstractAdjoint) -> tuple[Any, ...]:
        how = {"t0": start, "t1": start + 1, "stepsize_controller": controller, "throw": False, "max_steps": 4096}
        field = lambda t, y, args: -y + jnp.sin(t)
        sol = jax.jit(lambda y0: solve(field, y0, adjoint=which, **how))(jnp.array(1.0, jnp.float32))
        return sol.ys, sol.result, sol.stats["num_steps"]

    value, result, steps = run(adjoint)
    assert value.dtype == jnp.float32
    if dtmin is None:
        assert result == RESULTS.successful and 1000 < steps < 2500
        assert_close(value, np.array([0.97519], np.float32), rtol=2e-5)
    else:
        stock_value, stock_result, stock_steps = run(STOCK)
        assert result == stock_result and result == RESULTS.dt_min_reached
        assert steps == stock_steps and steps < 10
        assert_close(value, stock_value, rtol=1e-6)
