"""Optimistix around a solve: every kind of solver, alone and in a batch, and derivatives of what was fitted."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest

from gradsolve_backend import GradSolveAdjoint

TS = jnp.linspace(0.25, 2.0, 8)
TRUTH = jnp.array([0.7, 2.0])  # rate and initial value
STARTS = jnp.array([[0.5, 1.5], [1.0, 2.5], [0.6, 1.0]])
NORM = optx.max_norm
TOL = {"rtol": 1e-9, "atol": 1e-9}


def decay(p):
    """y' = -p[0] y, y(0) = p[1], at `TS`."""
    how = {"saveat": diffrax.SaveAt(ts=TS), "stepsize_controller": diffrax.PIDController(rtol=1e-10, atol=1e-10)}
    term = diffrax.ODETerm(lambda t, y, k: -k * y)
    ys = diffrax.diffeqsolve(
        term, diffrax.Tsit5(), 0.0, 2.0, None, p[1], p[0], adjoint=GradSolveAdjoint(), max_steps=128, **how
    ).ys
    assert isinstance(ys, jax.Array)
    return ys


def data_of(p):
    return p[1] * jnp.exp(-p[0] * TS)


def residual(p, data):
    return decay(p) - data


def squares(p, data):
    return jnp.sum(residual(p, data) ** 2)


def fitted(solver, start, data, **options):
    return optx.least_squares(residual, solver, start, args=data, options=options, max_steps=256, throw=False).value


def minimised(solver, start, data):
    return optx.minimise(squares, solver, start, args=data, max_steps=4096, throw=False).value


LEAST_SQUARES = {
    "GaussNewton": optx.GaussNewton(**TOL),
    "LevenbergMarquardt": optx.LevenbergMarquardt(**TOL),
    "IndirectLevenbergMarquardt": optx.IndirectLevenbergMarquardt(**TOL),
    "Dogleg": optx.Dogleg(**TOL),
    "BestSoFar": optx.BestSoFarLeastSquares(optx.LevenbergMarquardt(**TOL)),
}
MINIMISERS = {
    "BFGS": optx.BFGS(**TOL),
    "LBFGS": optx.LBFGS(**TOL),
    "NonlinearCG": optx.NonlinearCG(**TOL),
    "NelderMead": optx.NelderMead(**TOL),
    "BestSoFar": optx.BestSoFarMinimiser(optx.BFGS(**TOL)),
}


@pytest.mark.parametrize("jac", ["fwd", "bwd"])
@pytest.mark.parametrize("solver", LEAST_SQUARES.values(), ids=LEAST_SQUARES)
def test_least_squares_from_many_starts(solver, jac):
    found = jax.jit(jax.vmap(lambda start: fitted(solver, start, data_of(TRUTH), jac=jac)))(STARTS)
    np.testing.assert_allclose(found, np.tile(TRUTH, (3, 1)), rtol=1e-6)


@pytest.mark.parametrize("solver", MINIMISERS.values(), ids=MINIMISERS)
def test_minimisers_of_many_data_sets(solver):
    truths = jnp.outer(jnp.array([1.0, 1.2]), TRUTH)
    found = jax.jit(jax.vmap(lambda start, data: minimised(solver, start, data)))(STARTS[:2], jax.vmap(data_of)(truths))
    np.testing.assert_allclose(found, truths, rtol=1e-4)


@pytest.mark.parametrize(
    "adjoint", [optx.ImplicitAdjoint(), optx.RecursiveCheckpointAdjoint()], ids=["implicit", "unrolled"]
)
def test_how_the_fit_moves_with_the_data(adjoint):
    """Data of the truth are fitted by it, so the derivative of the fit by the truth is the identity."""

    def fit(truth):
        how = {"args": data_of(truth), "max_steps": 16, "throw": False, "adjoint": adjoint}
        return optx.least_squares(residual, optx.GaussNewton(**TOL), STARTS[0], **how).value

    derive = jax.jacrev if isinstance(adjoint, optx.RecursiveCheckpointAdjoint) else jax.jacfwd
    np.testing.assert_allclose(jax.jit(derive(fit))(TRUTH), np.eye(2), atol=1e-5)


def test_root_and_fixed_point_through_a_solve():
    """The rate at which half is left at the end, 2 k = log 2."""
    ends = lambda k: decay(jnp.stack([k, jnp.ones(())]))[-1]
    root = optx.root_find(lambda k, _: ends(k) - 0.5, optx.Newton(**TOL), jnp.array(0.5)).value
    np.testing.assert_allclose(root, np.log(2) / 2, rtol=1e-7)
    step = lambda k, _: k + ends(k) - 0.5
    fixed = optx.fixed_point(step, optx.FixedPointIteration(**TOL), jnp.array(0.5)).value
    np.testing.assert_allclose(fixed, np.log(2) / 2, rtol=1e-7)
