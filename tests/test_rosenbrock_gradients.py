"""Derivatives of solves by Rosenbrock methods: against stock's of the same steps, and finite differences of them."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import MODES, STOCK, assert_close, finite_difference, frozen_oracle, value_and_gradient, with_mesh
from stiff_problems import HIRES, ROBERTSON, hires, robertson

from gradsolve_backend import GradSolveAdjoint, Rodas4, Rodas5P, Rosenbrock23

BACKENDS = ["llvm", "xla"]
SOLVERS = {"Rosenbrock23": (Rosenbrock23(), 1e-4), "Rodas4": (Rodas4(), 1e-6), "Rodas5P": (Rodas5P(), 1e-7)}


def driven(t, y, p):
    """Robertson's reactions, the slowest driven by a wave: stiff, nonlinear and time-dependent."""
    return robertson(t, y, (p[0] * (1 + 0.3 * jnp.sin(t)), p[1], p[2]))


SCALE = jnp.array([1.0, 1e4, 1.0])
START = (jnp.asarray(ROBERTSON.y0), jnp.log(jnp.asarray(ROBERTSON.args)))


def loss(params, solver, tolerance, saved, **how):
    """A number made of scaled states, and the times of the steps."""
    y0, logs = params
    controller = diffrax.PIDController(rtol=tolerance, atol=1e-3 * tolerance)
    how = {"stepsize_controller": controller, "dt0": 1e-4, "max_steps": 1024} | how
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(driven), solver, 0.0, 30.0, y0=y0, args=jnp.exp(logs), saveat=with_mesh(saved), **how
    )
    weights = jnp.arange(1.0, 1 + len(solution.ys["asked"]))
    return weights @ (solution.ys["asked"] @ SCALE), solution.ts["mesh"]


END = diffrax.SubSaveAt(t1=True)
TIMES = diffrax.SubSaveAt(ts=jnp.array([0.1, 3.0, 17.0]), t1=True)


@pytest.mark.parametrize(
    "backend, saved", [("llvm", END), ("llvm", TIMES), ("xla", TIMES)], ids=["llvm-end", "llvm-times", "xla-times"]
)
@pytest.mark.parametrize("name", SOLVERS)
def test_gradient_is_that_of_stock(name, backend, saved):
    solver, tolerance = SOLVERS[name]
    function = lambda params, **how: loss(params, solver, tolerance, saved, **how)
    value, mesh, gradient = value_and_gradient(function, START, adjoint=GradSolveAdjoint(backend=backend))
    wanted_value, wanted = frozen_oracle(function, START, mesh)
    assert len(mesh) > 20
    assert_close(value, wanted_value, rtol=1e-12)
    assert_close(gradient, wanted, rtol=1e-9)


@pytest.mark.parametrize("name", SOLVERS)
def test_gradient_is_that_of_finite_differences(name):
    """Of the same steps, at other parameters."""
    solver, tolerance = SOLVERS[name]
    function = lambda params, **how: loss(params, solver, tolerance, TIMES, **how)
    _, mesh, gradient = value_and_gradient(function, START, adjoint=GradSolveAdjoint())
    frozen = {"stepsize_controller": diffrax.StepTo(jnp.asarray(mesh)), "dt0": None, "adjoint": GradSolveAdjoint()}
    moved = jax.jit(lambda logs: function((START[0], logs), **frozen)[0])
    for k in range(3):
        along = finite_difference(lambda s, k=k: moved(START[1].at[k].add(s)), 0.0, 1e-3)
        np.testing.assert_allclose(gradient[1][k], along, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_jacobians_of_an_ensemble(mode, backend):
    """HIRES for three rates, in both modes, against stock lane by lane."""

    def end(rate, adjoint):
        controller = diffrax.PIDController(rtol=1e-4, atol=1e-7)
        how = {"stepsize_controller": controller, "adjoint": adjoint, "max_steps": 256}
        y0 = jnp.asarray(HIRES.y0)
        return diffrax.diffeqsolve(diffrax.ODETerm(hires), Rodas4(), 0.0, 20.0, 1e-3, y0, (rate, 7e-4), **how).ys[-1]

    rates = jnp.array([200.0, 280.0, 300.0])
    adjoint = GradSolveAdjoint(backend=backend)
    found = jax.jit(jax.vmap(mode(lambda r: end(r, adjoint))))(rates)
    stock = jax.jit(jax.jacrev(lambda r: end(r, STOCK)))
    assert_close(found, jnp.stack([stock(r) for r in rates]), rtol=1e-8, atol=1e-18)


@pytest.mark.parametrize("backend", BACKENDS)
def test_derivatives_by_times(backend):
    """Over both ends, the first step and saved times; the steps that follow move with them, as with stock."""

    def total(times, adjoint):
        t0, t1, dt0, ts = times
        controller = diffrax.PIDController(rtol=1e-3, atol=1e-5)
        how = {"stepsize_controller": controller, "adjoint": adjoint, "saveat": diffrax.SaveAt(ts=ts), "max_steps": 64}
        field = lambda t, y, args: jnp.stack([-100 * (y[0] - jnp.sin(t)), y[0] * y[1]])
        return jnp.sum(diffrax.diffeqsolve(diffrax.ODETerm(field), Rodas4(), t0, t1, dt0, jnp.ones(2), **how).ys[:, 1])

    times = (jnp.asarray(0.1), jnp.asarray(1.5), jnp.asarray(0.01), jnp.array([0.2, 0.7, 1.5]))
    found, wanted = (
        jax.jit(jax.grad(lambda x, a=a: total(x, a)))(times) for a in (GradSolveAdjoint(backend=backend), STOCK)
    )
    assert_close(found, wanted, rtol=1e-7, atol=1e-12)


def pair(k, adjoint):
    """A state after three steps that is nonlinear in `k`."""
    field = lambda t, y, k: jnp.stack([-k * y[0] ** 2 + jnp.sin(t) * y[1], 50 * (y[0] - y[1])])
    return diffrax.diffeqsolve(
        diffrax.ODETerm(field), Rosenbrock23(), 0.0, 1.0, 0.4, jnp.ones(2), k, adjoint=adjoint, max_steps=4
    ).ys[-1, 0]


@pytest.mark.parametrize("outer, inner", [(jax.jacfwd, jax.grad), (jax.grad, jax.grad), (jax.jacfwd, jax.jacfwd)])
def test_second_derivatives(outer, inner):
    """Of stock's steps, by its adjoint that has all orders."""
    found = jax.jit(outer(inner(lambda k: pair(k, GradSolveAdjoint()))))(1.3)
    wanted = jax.jit(jax.jacfwd(jax.jacfwd(lambda k: pair(k, diffrax.DirectAdjoint()))))(1.3)
    np.testing.assert_allclose(found, wanted, rtol=1e-9)


def test_forward_mode_of_stock():
    """The solvers need nothing of this package's adjoint."""
    _, pushed = jax.jvp(lambda k: pair(k, diffrax.ForwardMode()), (1.3,), (1.0,))
    np.testing.assert_allclose(pushed, jax.grad(lambda k: pair(k, STOCK))(1.3), rtol=1e-9)
