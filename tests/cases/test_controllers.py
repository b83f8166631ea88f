"""Controllers: loose tolerances, clipping around implicit solvers, tolerances as arrays."""

from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
from helpers import STOCK, assert_close, decay, final, frozen_oracle, solve, value_and_gradient, van_der_pol, with_mesh
from jaxtyping import Array

PID = diffrax.PIDController


def linear_pair(t: Any, y: Array, k: Array) -> Array:
    return jnp.stack([-k * y[0] + y[1], -5.0 * y[1] * k])


# Stock refuses implicit solvers on a fixed mesh unless their tolerances are given.
NEWTON = optx.Newton(rtol=1e-10, atol=1e-10, norm=optx.rms_norm)
FULL = PID(rtol=1e-3, atol=1e-3, pcoeff=0.2, icoeff=0.5, dcoeff=0.05, dtmax=0.6)
LOOSE = {
    "Heun": (linear_pair, diffrax.Heun(), PID(rtol=0.1, atol=0.1), 1.0),
    "Bosh3": (van_der_pol, diffrax.Bosh3(), PID(rtol=1e-2, atol=1e-2), None),
    "Dopri5": (van_der_pol, diffrax.Dopri5(), FULL, 0.5),
    "Kvaerno3": (van_der_pol, diffrax.Kvaerno3(root_finder=NEWTON), PID(rtol=1e-3, atol=1e-3), 2.0),
}


@pytest.mark.parametrize("name", LOOSE)
def test_gradient_at_loose_tolerance(adjoint, name):
    """The gradient is that of the steps taken, not of how their lengths were chosen (diffrax#499)."""
    field, solver, controller, dt0 = LOOSE[name]
    rejected = []

    def loss(params: tuple[Array, Array], **how: Any) -> tuple[Array, Array]:
        k, y0 = params
        how = {"stepsize_controller": controller, "dt0": dt0, "solver": solver, "t1": 4.0, "max_steps": 128} | how
        sol = solve(field, y0, k, saveat=with_mesh(diffrax.SubSaveAt(t1=True)), **how)
        assert isinstance(sol.ys, dict) and isinstance(sol.ts, dict)
        jax.debug.callback(rejected.append, sol.stats["num_rejected_steps"])
        return jnp.sum(sol.ys["asked"] ** 2), sol.ts["mesh"]

    params = (jnp.array(2.0), jnp.array([1.0, 0.5]))
    value, mesh, gradient = value_and_gradient(loss, params, adjoint=adjoint)
    assert_close((value, gradient), frozen_oracle(loss, params, mesh), rtol=1e-8, atol=1e-11)
    stock_value, _, stock_gradient = value_and_gradient(loss, params, adjoint=STOCK)
    assert_close((value, gradient), (stock_value, stock_gradient), rtol=1e-6, atol=1e-9)
    jax.effects_barrier()
    assert rejected[0] > 0


def kicked(t: Any, y: Array, k: Array) -> Array:
    return jnp.where(t < 0.4, -k * y, k - y)


IMPLICIT = {
    "clipped": diffrax.ClipStepSizeController(PID(rtol=1e-6, atol=1e-6), jump_ts=[0.4]),
    "plain": PID(rtol=1e-6, atol=1e-6),
}


@pytest.mark.parametrize("name", IMPLICIT)
def test_implicit_solver_takes_tolerances_from_its_controller(adjoint, name):
    """Root-finder tolerances are found behind a clipping controller too (diffrax#607, #723)."""
    how = {"solver": diffrax.Kvaerno5(), "stepsize_controller": IMPLICIT[name], "max_steps": 256, "adjoint": adjoint}
    end = lambda k: final(kicked, jnp.array(1.0), k, **how)
    value, slope = jax.jit(jax.value_and_grad(end))(jnp.array(1.5))
    late = np.exp(-0.6)
    assert_close(value, 1.5 + (np.exp(-0.6) - 1.5) * late, rtol=1e-4)
    assert_close(slope, 1 - late - 0.4 * np.exp(-0.6) * late, rtol=1e-3)


def test_implicit_solver_with_constant_steps_needs_tolerances(adjoint):
    """Stock's own message comes through."""
    how = {"solver": diffrax.Kvaerno5(), "stepsize_controller": diffrax.ConstantStepSize(), "dt0": 0.1}
    with pytest.raises(ValueError, match="tolerances for the implicit solver have not been\\s+specified"):
        final(decay, jnp.array(1.0), jnp.array(1.5), adjoint=adjoint, **how)


def test_batch_over_relative_tolerance(adjoint):
    """Each member takes the steps of its own tolerance (diffrax#466)."""

    def steps(rtol: Array) -> Array:
        controller = PID(rtol=rtol, atol=1e-9)
        sol = solve(decay, jnp.array(1.0), 1.5, stepsize_controller=controller, max_steps=64, adjoint=adjoint)
        return sol.stats["num_steps"]

    assert jax.jit(jax.vmap(steps))(jnp.array([1e-2, 1e-5, 1e-9])).tolist() == [3, 6, 19]


def test_absolute_tolerance_per_component(adjoint):
    """Counts, values and gradients with an array of absolute tolerances are stock's (diffrax#371)."""

    def run(k: Array, which: diffrax.AbstractAdjoint) -> tuple[Array, Array]:
        controller = PID(rtol=1e-6, atol=jnp.array([1e-9, 1e-3]))
        sol = solve(linear_pair, jnp.array([1.0, 0.3]), k, stepsize_controller=controller, max_steps=64, adjoint=which)
        assert sol.ys is not None
        return jnp.sum(sol.ys), sol.stats["num_steps"]

    both = lambda which: jax.jit(jax.value_and_grad(lambda k: run(k, which), has_aux=True))(jnp.array(0.9))
    assert_close(both(adjoint), both(STOCK), rtol=1e-10)


def test_slopes_over_tolerances_are_zero(adjoint):
    """`eqx.filter_grad` over a whole controller gives zeros, not an error."""

    def end(controller: PID) -> Array:
        return final(decay, jnp.array(1.0), 1.5, stepsize_controller=controller, max_steps=64, adjoint=adjoint)

    controller = PID(rtol=jnp.array(1e-5), atol=jnp.array([1e-7]), dtmax=jnp.array(0.4))
    slopes = eqx.filter_jit(eqx.filter_grad(end))(eqx.tree_at(lambda c: c.atol, controller, jnp.array(1e-7)))
    assert slopes.rtol == 0 and slopes.atol == 0
