"""What goes with a fit: starts, the Jacobian that is computed once, the best fit and its errors."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
from helpers import assert_close
from scipy.special import ndtr

from gradsolve_backend import GradSolveAdjoint
from gradsolve_backend.fits import best, covariance, normal_starts, same_optimum, uniform_starts, with_jacobian

# NIST StRD, nonlinear regression, Misra1a: y = b1 (1 - exp(-b2 x)), https://www.itl.nist.gov/div898/strd
VOLUME = np.array([10.07, 14.73, 17.94, 23.93, 29.61, 35.18, 40.02, 44.82, 50.76, 55.05, 61.01, 66.40, 75.47, 81.78])
PRESSURE = np.array([77.6, 114.9, 141.1, 190.8, 239.9, 289.0, 332.8, 378.4, 434.8, 477.3, 536.8, 593.1, 689.1, 760.0])
CERTIFIED = np.array([2.3894212918e2, 5.5015643181e-4])
CERTIFIED_ERRORS = np.array([2.7070075241e0, 7.2668688436e-6])
CERTIFIED_SQUARES = 1.2455138894e-1
SCALES = jnp.array([100.0, 1e-4])


def misra(b, adjoint):
    """The model as the solution of y' = b2 (b1 - y), y(0) = 0; parameters in units of `SCALES`."""
    term = diffrax.ODETerm(lambda x, y, b: b[1] * (b[0] - y))
    how = {"saveat": diffrax.SaveAt(ts=PRESSURE), "stepsize_controller": diffrax.PIDController(rtol=1e-11, atol=1e-11)}
    end, zero = PRESSURE[-1], jnp.zeros(())
    ys = diffrax.diffeqsolve(term, diffrax.Tsit5(), 0.0, end, None, zero, b * SCALES, adjoint=adjoint, **how).ys
    return ys


def residual(b, data, adjoint=None):
    return misra(b, adjoint or GradSolveAdjoint()) - data


def fitted(start, data, function=residual, adjoint=None):
    """Parameters and sum of squares."""
    solver = optx.LevenbergMarquardt(rtol=1e-9, atol=1e-9)
    how = {} if adjoint is None else {"adjoint": adjoint}
    found = optx.least_squares(function, solver, start, args=data, max_steps=64, throw=False, **how).value
    return found, jnp.sum(jnp.square(residual(found, data)))


def test_certified_values_and_standard_errors():
    """The best of fits from several starts, one of them without a loss."""
    starts = jnp.asarray(uniform_starts(3, [1.5, 2.0], [4.0, 8.0], seed=0))
    found, squares = jax.jit(jax.vmap(lambda s: fitted(s, VOLUME, with_jacobian(residual))))(starts)
    assert np.all(same_optimum(squares))
    b, loss = best((found, squares), squares.at[0].set(jnp.nan))
    np.testing.assert_allclose(b * SCALES, CERTIFIED, rtol=1e-7)
    np.testing.assert_allclose(loss, CERTIFIED_SQUARES, rtol=1e-8)
    jacobian = jax.jit(jax.jacfwd(lambda b: residual(b, VOLUME)))(b)
    spread = covariance(jacobian, residual(b, VOLUME))
    np.testing.assert_allclose(np.sqrt(np.diag(spread)) * SCALES, CERTIFIED_ERRORS, rtol=1e-6)


# ---- residuals that hold their Jacobian


POINT = jnp.array([2.4, 5.5])


@pytest.mark.parametrize("mode", [jax.jacfwd, jax.jacrev, jax.hessian], ids=["forward", "reverse", "second"])
def test_derivatives_are_those_of_the_residual(mode):
    function = lambda f: jax.jit(mode(lambda b: f(b, VOLUME)))(POINT)
    assert_close(function(with_jacobian(residual)), function(residual), rtol=1e-8, atol=1e-9)


def test_derivatives_in_a_batch_by_arguments_and_by_what_is_closed_over():
    def loss(wrap, b, scale, data):
        return jnp.sum(jnp.square(wrap(lambda b, data: scale * residual(b, data))(b, data)))

    points, scale, data = jnp.outer(jnp.array([1.0, 1.1]), POINT), jnp.array(3.0), jnp.asarray(VOLUME)
    gradient = lambda wrap: jax.jit(
        jax.vmap(jax.grad(lambda *x: loss(wrap, *x), argnums=(0, 1, 2)), in_axes=(0, None, None))
    )
    assert_close(gradient(with_jacobian)(points, scale, data), gradient(lambda f: f)(points, scale, data), rtol=1e-9)


def test_parameters_and_arguments_of_any_structure():
    def curve(p, args):
        name, t = args
        return {name: p["rate"][0] * t + p["shift"] ** 2, "other": p["rate"][1]}

    p, args = {"rate": jnp.array([2.0, 3.0]), "shift": jnp.array(5.0)}, ("some", jnp.arange(3))
    by = lambda f: jax.jacrev(lambda shift: f({**p, "shift": shift}, args))(jnp.array(5.0))
    with jax.numpy_dtype_promotion("standard"):
        assert_close(jax.jacfwd(lambda p: with_jacobian(curve)(p, args))(p), jax.jacfwd(lambda p: curve(p, args))(p))
        assert_close(by(with_jacobian(curve)), by(curve))


def test_the_linearisation_holds_the_jacobian_and_no_record():
    push = jax.linearize(lambda b: with_jacobian(residual)(b, VOLUME), POINT)[1]
    assert sum(x.size for x in jax.tree.leaves(push)) <= 2 * VOLUME.size * POINT.size
    loop = lambda wrap: str(jax.make_jaxpr(lambda s: fitted(s, VOLUME, wrap(residual)))(POINT))
    # Once at each iterate, and not again for the linear system and for the predicted gain of the step.
    assert loop(lambda f: f).count("gradsolve_tangent") > 1
    assert loop(with_jacobian).count("gradsolve_tangent") == 1


def test_how_the_fit_moves_with_the_data():
    """Data of the truth are fitted by it, so the derivative of the fit by the truth is the identity."""
    model = lambda truth: residual(truth, jnp.zeros(()))
    fit = lambda truth: fitted(POINT, model(truth), with_jacobian(residual), optx.ImplicitAdjoint())[0]
    np.testing.assert_allclose(jax.jit(jax.jacfwd(fit))(jnp.array([2.3, 5.7])), np.eye(2), atol=1e-6)


# ---- starts


def slices(x: np.ndarray) -> np.ndarray:
    """For each column the slices of equal width of [0, 1] that its entries lie in, sorted."""
    return np.sort(np.floor(x * len(x)), axis=0)


def test_each_slice_of_each_range_has_one_start():
    low, high = np.array([-1.0, 10.0, 0.0]), np.array([1.0, 30.0, 1e-3])
    starts = uniform_starts(8, low, high, seed=3)
    np.testing.assert_array_equal(slices((starts - low) / (high - low)), np.arange(8.0)[:, None] * np.ones(3))
    normal = normal_starts(8, low, 2.0, seed=3)
    np.testing.assert_array_equal(slices(ndtr((normal - low) / 2.0)), np.arange(8.0)[:, None] * np.ones(3))


@pytest.mark.parametrize("draw", [uniform_starts, normal_starts])
def test_starts_depend_on_the_seed_alone(draw):
    first = draw(8, [0.0, 1.0], [1.0, 2.0], seed=3)
    assert first.shape == (8, 2)
    np.testing.assert_array_equal(first, draw(8, [0.0, 1.0], [1.0, 2.0], seed=3))
    assert not np.any(first == draw(8, [0.0, 1.0], [1.0, 2.0], seed=4))


# ---- results


def test_covariance_of_a_straight_line():
    """Textbook: slope and offset by least squares at x = 0, 1, 2, 3 with residuals 1, -1, -1, 1."""
    x = np.arange(4.0)
    jacobian, residuals = np.stack([np.ones(4), x], axis=1), np.array([1.0, -1.0, -1.0, 1.0])
    unit = np.array([[0.7, -0.3], [-0.3, 0.2]])
    np.testing.assert_allclose(covariance(jacobian.reshape(2, 2, 2), residuals.reshape(2, 2)), 2.0 * unit, rtol=1e-12)
    np.testing.assert_allclose(jax.vmap(covariance)(jnp.stack([jacobian, 2.0 * jacobian]))[1], unit / 4.0, rtol=1e-12)


def test_covariance_of_too_few_residuals_is_refused():
    assert covariance(np.eye(2)).shape == (2, 2)
    with pytest.raises(ValueError, match="covariance of 2 parameters was asked for, from 2 residuals"):
        covariance(np.eye(2), np.ones(2))
    with pytest.raises(ValueError, match="at least as many residuals as parameters"):
        covariance(np.ones((1, 2)))


def test_best_and_its_equals():
    fits, losses = {"x": jnp.arange(8.0).reshape(4, 2)}, jnp.array([3.0, jnp.nan, 2.0, 2.0 * (1.0 + 1e-6)])
    np.testing.assert_array_equal(jax.jit(best)(fits, losses)["x"], [4.0, 5.0])
    np.testing.assert_array_equal(same_optimum(losses), [False, False, True, True])
    np.testing.assert_array_equal(same_optimum(losses, rtol=1e-9), [False, False, True, False])


def test_the_same_optimum_of_losses_below_zero():
    np.testing.assert_array_equal(same_optimum([-10.0, -9.0, -10.0 + 1e-6, np.nan]), [True, False, True, False])
