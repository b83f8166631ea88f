"""Diffrax's implicit solvers on `llvm`: Newton iterations and linear systems in the loop, for each lane by itself.

Stock solves the lanes one after the other: under `jax.vmap` its iterations go on until all lanes have converged.
"""

from collections.abc import Callable
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optimistix as optx
import pytest
from ensembles import LLVM, STOCK, ensemble, weights
from helpers import assert_close
from jaxtyping import Array

from gradsolve_backend import explain

CLOSE = {"rtol": 1e-8, "atol": 1e-10}
TOLERANCES = {"rtol": 1e-4, "atol": 1e-4}


def slow(t: Any, y: Array, rate: Array) -> Array:
    return jnp.stack([y[1], jnp.sin(t)])


def fast(t: Any, y: Array, rate: Array) -> Array:
    """Far from linear: where Newton's method is done at once, its measure of convergence is made of rounding."""
    return jnp.stack([-0.3 * y[0] ** 3 - y[0] * y[1], 10 * rate * (jnp.cos(y[0]) - y[1] - y[1] ** 3)])


def terms(solver: Any) -> Any:
    if isinstance(solver, diffrax.KenCarp3):
        return diffrax.MultiTerm(diffrax.ODETerm(slow), diffrax.ODETerm(fast))
    return diffrax.ODETerm(lambda *x: slow(*x) + fast(*x))


def run(solver: Any, adjoint: Any, y0: Array, rate: Array, **how: Any) -> tuple[Array, Array]:
    """States on the way and at the end, and result and counts of steps."""
    sol = diffrax.diffeqsolve(
        terms(solver), solver, 0.0, 1.5, 0.05, y0, rate, adjoint=adjoint, throw=False,
        saveat=diffrax.SaveAt(ts=jnp.array([0.4, 1.1]), t1=True, fn=lambda t, y, _: y**2),
        stepsize_controller=diffrax.PIDController(**TOLERANCES), **how,
    )  # fmt: skip
    assert sol.ys is not None
    counts = [sol.result._value, *(sol.stats[f"num_{kind}steps"] for kind in ("", "accepted_", "rejected_"))]
    return sol.ys, jnp.stack([x.astype(jnp.int32) for x in counts])


SOLVERS = {
    "kvaerno3": diffrax.Kvaerno3(),
    "kencarp3": diffrax.KenCarp3(),
    "newton": diffrax.ImplicitEuler(root_finder=optx.Newton(**TOLERANCES)),
}


@pytest.mark.parametrize("name", SOLVERS)
def test_ensembles_equal_stock(name):
    """Values, counts, both modes; lanes take different numbers of steps and of iterations."""
    # Of more lanes, one is at an edge: stock takes 35 or 42 steps, as rounding has it.
    solver, (y0s, rates), cts = SOLVERS[name], jax.tree.map(lambda x: x[:3], ensemble(5, 1)), weights(3, 3, 2)

    def values(adjoint: Any, over: Any, *lanes: Any) -> Any:
        return over(lambda x: run(solver, adjoint, *x))(lanes)

    def both(adjoint: Any, over: Any) -> Any:
        found, pull, counts = jax.vjp(lambda *x: values(adjoint, over, *x), y0s, rates, has_aux=True)
        return found, counts, pull(cts)

    assert {route.backend for route in explain(lambda: both(LLVM, jax.vmap))} == {"llvm"}
    stock = jax.jit(lambda: both(STOCK, one_by_one))()
    assert_close(jax.jit(lambda: both(LLVM, jax.vmap))(), stock, **CLOSE)
    ones = (jnp.ones_like(y0s), jnp.ones_like(rates))
    pushed = jax.jit(lambda: jax.jvp(lambda *x: values(LLVM, jax.vmap, *x)[0], (y0s, rates), ones)[1])()
    assert_close(jnp.vdot(cts, pushed), sum(jnp.sum(x) for x in stock[2]), **CLOSE)


def one_by_one(function: Callable) -> Callable:
    """A function of lanes, one after the other."""
    return lambda lanes: jax.lax.map(function, lanes)


def test_lanes_that_fail_leave_others_alone():
    """The field of one lane is not finite."""
    y0s, rates = ensemble(6, 2)
    rates = (0.1 * rates).at[2].set(jnp.inf)
    solve = lambda adjoint, over: jax.jit(over(lambda x: run(SOLVERS["kvaerno3"], adjoint, *x, max_steps=100)))
    ours, counts = solve(LLVM, jax.vmap)((y0s, rates))
    stock, wanted = solve(STOCK, one_by_one)((y0s, rates))
    assert len(set(np.asarray(wanted)[:, 0].tolist())) > 1
    np.testing.assert_array_equal(counts, wanted)
    assert_close(ours, stock, **CLOSE)


def test_other_linear_solvers_go_elsewhere():
    """A solver that is not by elimination has no scalar form; what runs it gives the same."""
    finder = diffrax.VeryChord(**TOLERANCES, linear_solver=lx.QR())
    solver, (y0s, rates) = diffrax.Kvaerno3(root_finder=finder), ensemble(1, 1)
    (route,) = explain(lambda y0, rate: run(solver, LLVM, y0, rate)[0], y0s[0], rates[0])
    assert route.backend == "xla" and "no scalar form" in dict(route.others)["llvm"]
    found = [jax.jit(lambda *x, a=a: run(solver, a, *x))(y0s[0], rates[0]) for a in (LLVM, STOCK)]
    assert_close(*found, **CLOSE)
