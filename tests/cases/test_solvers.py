"""Solvers: stiff kinetics, ones the package has never seen, stochastic equations, complex states."""

from collections.abc import Callable
from typing import Any, ClassVar

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import MODES, STOCK, assert_close, decay, final
from jaxtyping import Array

RESULTS = diffrax.RESULTS
CONSTANT = diffrax.ConstantStepSize()


def robertson(t: Any, y: Array, log_rates: Array) -> Array:
    k1, k2, k3 = jnp.exp(log_rates)
    slow, fast, back = k1 * y[0], k2 * y[1] ** 2, k3 * y[1] * y[2]
    return jnp.stack([back - slow, slow - fast - back, fast])


@pytest.mark.parametrize("mode", MODES)
def test_stiff_kinetics(adjoint, mode):
    """State and Jacobian over logarithms of rates that span nine decades (diffrax#64, #700)."""
    controller = diffrax.PIDController(rtol=1e-8, atol=1e-8)
    how = {"t1": 100.0, "dt0": 2e-4, "solver": diffrax.Kvaerno5(), "stepsize_controller": controller}
    end = lambda p: final(robertson, jnp.array([1.0, 0.0, 0.0]), p, adjoint=adjoint, **how)
    value, jacobian = jax.jit(lambda p: (end(p), mode(end)(p)))(jnp.log(jnp.array([0.04, 3e7, 1e4])))
    assert_close(value, np.array([6.172349e-1, 6.153591e-6, 3.827590e-1]), rtol=1e-5)
    assert_close(jacobian[0], np.array([-0.204658, -0.091057, 0.182118]), rtol=1e-4)


class DampedEuler(diffrax.Euler):
    """Takes half of each Euler step: a kernel of its parent would be twice as fast."""

    def step(self, terms, t0, t1, y0, args, solver_state, made_jump):
        y1, error, info, state, result = super().step(terms, t0, t1, y0, args, solver_state, made_jump)
        y1 = 0.5 * (y0 + y1)
        return y1, error, info | {"y1": y1}, state, result


class DampedHeun(diffrax.Heun):
    """The same for a method that has a tableau."""

    def step(self, terms, t0, t1, y0, args, solver_state, made_jump):
        y1, error, info, state, result = super().step(terms, t0, t1, y0, args, solver_state, made_jump)
        return 0.5 * (y0 + y1), error, info, state, result


class AdamsBashforth(diffrax.AbstractSolver):
    """Two-step method whose state is the previous slope, zero before the first step."""

    term_structure: ClassVar = diffrax.AbstractTerm
    interpolation_cls: ClassVar[Callable[..., Any]] = diffrax.LocalLinearInterpolation

    def order(self, terms):
        return 2

    def init(self, terms, t0, t1, y0, args):
        return jnp.zeros_like(y0)

    def step(self, terms, t0, t1, y0, args, solver_state, made_jump):
        slope = terms.vf(t0, y0, args)
        y1 = y0 + (t1 - t0) * (1.5 * slope - 0.5 * solver_state)
        return y1, None, {"y0": y0, "y1": y1}, slope, RESULTS.successful

    def func(self, terms, t0, y0, args):
        return terms.vf(t0, y0, args)


def adams_bashforth(k: Array) -> Array:
    y, before = jnp.array(1.0), jnp.array(0.0)
    for _ in range(8):
        y, before = y + 0.125 * (1.5 * -k * y - 0.5 * before), -k * y
    return y


UNKNOWN: dict[str, tuple[diffrax.AbstractSolver, Callable[[Array], Array]]] = {
    "damped Euler": (DampedEuler(), lambda k: (1 - k / 16) ** 8),
    "damped Heun": (DampedHeun(), lambda k: (1 - k / 16 + (k / 8) ** 2 / 4) ** 8),
    "Adams-Bashforth": (AdamsBashforth(), adams_bashforth),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", UNKNOWN)
def test_solvers_of_the_user(adjoint, name, mode):
    """What the user's class computes, never what its parent would (diffrax#743, #595, #277)."""
    solver, exact = UNKNOWN[name]
    how = {"solver": solver, "stepsize_controller": CONSTANT, "dt0": 0.125, "max_steps": 16, "adjoint": adjoint}
    end = lambda k: final(decay, jnp.array(1.0), k, **how)
    value, slope = jax.jit(lambda k: (end(k), mode(end)(k)))(jnp.array(1.5))
    k = jnp.array(1.5)
    assert_close((value, slope), (exact(k), jax.grad(exact)(k)), rtol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_half_steps_of_a_wrapped_solver(adjoint, mode):
    """`HalfSolver` estimates errors for a method that has none."""
    controller = diffrax.PIDController(rtol=1e-2, atol=1e-2)
    how = {"solver": diffrax.HalfSolver(diffrax.Euler()), "stepsize_controller": controller, "max_steps": 64}
    end = lambda k, which: final(decay, jnp.array(1.0), k, adjoint=which, **how)
    slope = jax.jit(lambda k: (end(k, adjoint), mode(end)(k, adjoint)))(jnp.array(1.5))
    assert_close(slope, jax.jit(jax.value_and_grad(lambda k: end(k, STOCK)))(jnp.array(1.5)), rtol=1e-10)


def stochastic(k: Array, path: diffrax.AbstractBrownianPath, adjoint: diffrax.AbstractAdjoint) -> Array:
    noise = diffrax.ControlTerm(lambda t, y, args: jnp.full_like(y, 0.1), path)
    terms = diffrax.MultiTerm(diffrax.ODETerm(decay), noise)
    how = {"solver": diffrax.Heun(), "dt0": 0.05, "stepsize_controller": CONSTANT, "max_steps": 32}
    return final(terms, jnp.array(1.0), k, adjoint=adjoint, **how)


def test_gradient_of_a_stochastic_solve(adjoint):
    """Stock's gradient for the same path, in a batch of keys (diffrax#229, #558)."""

    def slope(key: Array, which: diffrax.AbstractAdjoint) -> tuple[Array, Array]:
        path = diffrax.VirtualBrownianTree(0.0, 1.0, tol=1e-3, shape=(), key=key)
        return jax.value_and_grad(lambda k: stochastic(k, path, which))(jnp.array(0.9))

    keys = jax.random.split(jax.random.key(0), 2)
    run = lambda which: jax.jit(jax.vmap(lambda key: slope(key, which)))(keys)
    ours = run(adjoint)
    assert abs(ours[0][0] - ours[0][1]) > 1e-3
    assert_close(ours, run(STOCK), rtol=1e-10)


def test_path_that_cannot_be_replayed_is_refused(adjoint):
    """`UnsafeBrownianPath` draws anew at each look; the refusal names it."""
    path = diffrax.UnsafeBrownianPath(shape=(), key=jax.random.key(0))
    with pytest.raises(ValueError, match="UnsafeBrownianPath"):
        jax.grad(lambda k: stochastic(k, path, adjoint))(jnp.array(0.9))


def rotating(w: Array, solver: diffrax.AbstractSolver, adjoint: diffrax.AbstractAdjoint) -> Array:
    """Sum of real and imaginary parts of two components of y' = (-0.1 - i w) y at time 1."""
    field = lambda t, y, w: (-0.1 - 1j * w) * y
    controller = diffrax.PIDController(rtol=1e-7, atol=1e-7)
    how = {"solver": solver, "stepsize_controller": controller, "max_steps": 256, "adjoint": adjoint}
    y = final(field, jnp.array([1.0 + 0j, 0.5j]), w.astype(jnp.complex128), **how)
    return jnp.sum(y.real) + jnp.sum(y.imag)


def rotated_exactly(w: Array) -> Array:
    return jnp.exp(-0.1) * (jnp.cos(w) - jnp.sin(w) + 0.5 * (jnp.sin(w) + jnp.cos(w)))


def test_complex_state(adjoint):
    """Real loss of complex components, with stock's warning (diffrax#96, #197)."""
    with pytest.warns(UserWarning, match="Complex dtype"):
        result = jax.jit(jax.value_and_grad(lambda w: rotating(w, diffrax.Tsit5(), adjoint)))(jnp.array(0.7))
    assert_close(result, jax.value_and_grad(rotated_exactly)(jnp.array(0.7)), rtol=1e-5)


@pytest.mark.filterwarnings("ignore:Complex dtype")
def test_complex_state_with_implicit_solver(adjoint):
    """Right, or refused: never a dropped imaginary part (diffrax#388, #477)."""
    try:
        result = jax.jit(jax.value_and_grad(lambda w: rotating(w, diffrax.Kvaerno3(), adjoint)))(jnp.array(0.7))
    except (TypeError, ValueError, NotImplementedError):
        return
    assert_close(result, jax.value_and_grad(rotated_exactly)(jnp.array(0.7)), rtol=1e-4)
