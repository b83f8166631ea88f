"""Orders of the Rosenbrock methods and of Vern7, measured and by their order conditions."""

import dataclasses
import math

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import STOCK

from gradsolve_backend import GradSolveAdjoint, Rodas4, Rodas5P, Rosenbrock23, Vern7
from gradsolve_backend.adapters import rosenbrock_methods
from gradsolve_backend.adapters.order_conditions import residual, trees

ROSENBROCK = [Rosenbrock23, Rodas4, Rodas5P]


def field(t, y, args):
    """Non-autonomous, nonlinear and coupled: u = a b and v = a / b of a = exp(sin t) and b = 1 / (2 + t - cos t)."""
    u, v = y
    growth, decay = jnp.cos(t), (1 + jnp.sin(t)) * jnp.sqrt(u / v)
    return jnp.stack([u * (growth - decay), v * (growth + decay)])


def exact(t):
    a, b = np.exp(np.sin(t)), 1 / (2 + np.asarray(t) - np.cos(t))
    return np.stack([a * b, a / b], axis=-1)


def order(errors):
    return math.log2(errors[0] / errors[1])


def solved(solver, steps, times, t1, function=field, y0=None, adjoint=STOCK):
    """States at some times, by steps of one length."""
    y0 = jnp.asarray(exact(0.0) if y0 is None else y0)

    @jax.jit
    def run(dt0, times):
        saveat = diffrax.SaveAt(ts=times)
        return diffrax.diffeqsolve(
            diffrax.ODETerm(function), solver, 0.0, t1, dt0, y0, saveat=saveat, adjoint=adjoint, max_steps=1024
        ).ys

    return [np.asarray(run(t1 / n, jnp.asarray(times))) for n in steps]


@pytest.mark.parametrize(
    "solver, steps, expected",
    [(Rosenbrock23, (400, 800), 2), (Rodas4, (100, 200), 4), (Rodas5P, (100, 200), 5)],
)
def test_order(solver, steps, expected):
    errors = [np.abs(y[-1] - exact(2.0)).max() for y in solved(solver(), steps, [2.0], 2.0, adjoint=GradSolveAdjoint())]
    assert order(errors) == pytest.approx(expected, abs=0.1)


def test_order_of_vern7():
    """On a problem with growth, where the error is well above rounding once steps are short enough."""
    growing = lambda t, y, args: (1 - 0.5 * jnp.cos(t)) * y
    end = math.exp(3 - 0.5 * math.sin(3))
    errors = [abs(y[-1, 0] / end - 1) for y in solved(Vern7(), (18, 36), [3.0], 3.0, growing, [1.0])]
    assert order(errors) == pytest.approx(7, abs=0.1)


@pytest.mark.parametrize(
    "solver, length, low, high",
    [(Rosenbrock23, 0.005, 2, 2), (Rodas4, 0.02, 3, 3), (Rodas5P, 0.04, 4, 4), (Vern7, 0.16, 6, 7)],
)
def test_order_of_dense_output(solver, length, low, high):
    """One step from an exact state: its error has one order more.

    What Vern7 misses in order 7 is so little (2e-7) that the error of the step itself is seen until rounding is.
    """
    shares = np.array([0.2, 0.35, 0.7, 0.85])

    @jax.jit
    def run(h):
        saveat = diffrax.SaveAt(ts=shares * h)
        how = {"stepsize_controller": diffrax.StepTo(jnp.stack([0 * h, h])), "saveat": saveat}
        y0 = jnp.asarray(exact(0.0))
        return diffrax.diffeqsolve(diffrax.ODETerm(field), solver(), 0.0, h, None, y0, adjoint=STOCK, **how).ys

    errors = [np.abs(np.asarray(run(h)) - exact(shares * h)).max() for h in (length, length / 2)]
    assert low + 0.9 < order(errors) < high + 1.1


def prothero_robinson(stiffness, steps):
    """Error at time 2 of `y' = stiffness (sin t - y) + cos t`, whose solution is `sin t`."""
    wave = lambda t, y, args: stiffness * (jnp.sin(t) - y) + jnp.cos(t)
    (y,) = solved(Rodas5P(), (steps,), [2.0], 2.0, wave, [0.0])
    return abs(y[-1, 0] - np.sin(2.0))


def test_order_on_a_problem_of_prothero_and_robinson():
    """Order 4 at steps that stay as stiff: the error is at most C h^4, here C h^4 / (h stiffness)."""
    errors = [prothero_robinson(1e6, 20), prothero_robinson(2e6, 40)]
    assert errors[0] < 1e-11
    assert order(errors) == pytest.approx(4, abs=0.1)


def test_numbers_of_trees():
    assert [len(trees(n)) for n in range(1, 9)] == [1, 1, 2, 4, 9, 20, 48, 115]


def test_order_conditions_of_a_method_by_hand():
    """The explicit midpoint rule is of order 2; the third order is missed by 1/3 - 1/4 and 1/6 - 0."""
    a, b = np.array([[0, 0], [0.5, 0]]), np.array([0.0, 1.0])
    assert residual(a, b, 2) == pytest.approx(0, abs=1e-15)
    assert residual(a, b, 3) == pytest.approx(1 / 6)


@pytest.mark.parametrize("name", ["ROSENBROCK23", "RODAS4", "RODAS5P"])
@pytest.mark.parametrize("part", ["solution", "error", "times", "rates", "dense", "order"])
def test_a_wrong_coefficient_is_refused(name, part):
    tableau = getattr(rosenbrock_methods, name)
    if part == "order":
        wrong = tableau.order + 1
    elif part == "dense":
        wrong = ((tableau.dense[0][0] + 1e-9, *tableau.dense[0][1:]), *tableau.dense[1:])
    else:
        first, *rest = getattr(tableau, part)
        wrong = (first + 1e-9, *rest)
    with pytest.raises(ValueError, match=f"{tableau.name} miss their conditions"):
        dataclasses.replace(tableau, **{part: wrong})


@pytest.mark.parametrize("solver", ROSENBROCK)
def test_stiff_components_vanish(solver):
    """L-stability: one step takes the solution of y' = -1e12 y to zero."""
    (y,) = solved(solver(), (1,), [1.0], 1.0, lambda t, y, args: -1e12 * y, [1.0])
    assert abs(y[-1, 0]) < 1e-10
