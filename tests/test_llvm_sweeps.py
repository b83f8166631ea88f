"""The lanes of `llvm`: any number of them, records taken apart, any levels of `jax.vmap`."""

import functools
from collections.abc import Callable
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ensembles import CLOSE, LLVM, STOCK, ensemble, expected, oscillator, pulled, run, weights
from helpers import assert_close
from jaxtyping import Array

from gradsolve_backend.adapters import once
from gradsolve_backend.kernels import scalar

LANES = 9  # two blocks and a part of one where a vector has four elements


@pytest.mark.smoke
@pytest.mark.parametrize("lanes", [1, 2, 3, 5, 7, 8, 9, 64, 65])
def test_numbers_of_lanes(lanes):
    """Full blocks and a part of one; what all lanes share has the sum of their cotangents."""
    y0s, rates = ensemble(lanes)
    drift, cts = jnp.array(0.3), weights(lanes, 2)

    @jax.jit
    def found(y0s: Array, rates: Array, drift: Array, cts: Array) -> Any:
        batch = jax.vmap(functools.partial(run, LLVM), in_axes=(0, 0, None))
        end, pull, counts = jax.vjp(batch, y0s, rates, drift, has_aux=True)
        return end, counts, pull(cts)

    jacobians, (end, counts) = expected(y0s, rates, [drift] * lanes)
    own, rate, shared = pulled(cts, jacobians)
    got = found(y0s, rates, drift, cts)
    np.testing.assert_array_equal(got[1], counts)
    assert_close(got[0], end, **CLOSE)
    assert_close(got[2], (own, rate, np.sum(shared)), **CLOSE)


def test_no_lanes():
    """Nor any column, where an ensemble of no lanes is differentiated forward."""
    y0s, rates = ensemble(0)
    batch = lambda *x: jax.vmap(functools.partial(run, LLVM), in_axes=(0, 0, None))(*x)[0]
    slopes = jax.jit(jax.grad(lambda *x: jnp.sum(batch(*x)), argnums=(0, 1, 2)))(y0s, rates, jnp.array(0.3))
    assert_close(slopes, (np.zeros((0, 2)), np.zeros(0), np.zeros(())), rtol=0)
    columns = jax.jit(jax.jacfwd(batch))(y0s, rates, jnp.array(0.3))
    assert_close(columns, np.zeros((0, 2, 0, 2)), rtol=0)


# ---- records taken apart -----------------------------------------------------------------------------


def lanewise(mask: list[bool]) -> Callable[[Array, Array], Array]:
    """Lanes of one of two trees where the mask holds, else of the other."""
    return lambda a, b: jnp.where(jnp.array(mask).reshape(-1, *[1] * (a.ndim - 1)), a, b)


# What becomes of the residuals of two ensembles.
APART: dict[str, Callable[[Array, Array], Array]] = {
    "whole": lambda a, b: a,
    "a block": lambda a, b: a[4:8],
    "across blocks": lambda a, b: a[2:7],
    "every second": lambda a, b: b[::2],
    "reversed": lambda a, b: a[::-1],
    "permuted": lambda a, b: a[jnp.array([4, 2, 8, 0, 1, 7, 6, 5, 3])],
    "repeated": lambda a, b: a[jnp.array([0, 0, 0, 8, 8, 0])],
    "two joined": lambda a, b: jnp.concatenate([a[:3], b[3:]]),
    "one after the other": lambda a, b: jnp.concatenate([a, b]),
    "mixed": lanewise([True, False, False, True, True, False, True, False, True]),
    "blocks mixed": lanewise([True] * 4 + [False] * 4 + [True]),
}


@functools.cache
def apart(mode: str) -> tuple[Any, Any, Any]:
    """The linear maps of two ensembles, lane by lane, and their Jacobians, one after the other."""
    derive = {"reverse": jax.vjp, "forward": jax.linearize}[mode]
    one = lambda y0, rate: derive(lambda *x: run(LLVM, *x, jnp.array(0.3))[0], y0, rate)[1]
    make = jax.jit(jax.vmap(one))
    inputs = ensemble(LANES, 2), ensemble(LANES, 3)
    jacobians, _ = expected(*(jnp.concatenate(x) for x in zip(*inputs, strict=True)), [jnp.array(0.3)] * 2 * LANES)
    return make(*inputs[0]), make(*inputs[1]), jacobians


@pytest.mark.parametrize("mode", ["reverse", "forward"])
@pytest.mark.parametrize("name", APART)
def test_residuals_taken_apart(mode, name):
    """A record is used for the lanes that it is of, and for no others."""
    first, second, jacobians = apart(mode)
    maps = jax.tree.map(APART[name], first, second)
    lanes = np.asarray(APART[name](jnp.arange(LANES), LANES + jnp.arange(LANES)))
    by_state, by_rate, _ = (j[lanes] for j in jacobians)
    given: tuple[Array, ...] = (weights(len(lanes), 2),)
    wanted: Any = tuple(pulled(given[0], (by_state, by_rate)))
    if mode == "forward":
        given = (*given, weights(len(lanes)))
        wanted = np.einsum("lij,lj->li", by_state, given[0]) + by_rate * np.asarray(given[1])[:, None]
    assert_close(jax.jit(jax.vmap(lambda f, *x: f(*x)))(maps, *given), wanted, **CLOSE)


def test_residuals_under_other_levels():
    """One ensemble as rows of columns, and several cotangents for one of its lanes alone."""
    maps, _, (by_state, by_rate, _) = apart("reverse")
    square = jax.tree.map(lambda x: x.reshape(3, 3, *x.shape[1:]), maps)
    cts = weights(3, 3, 2)
    nested = jax.vmap(jax.vmap(lambda f, ct: f(ct)), in_axes=(1, 0))
    lanes = np.arange(LANES).reshape(3, 3).T.reshape(-1)
    wanted = pulled(cts.reshape(-1, 2), (by_state[lanes], by_rate[lanes]))
    assert_close(jax.jit(nested)(square, cts), (wanted[0].reshape(3, 3, 2), wanted[1].reshape(3, 3)), **CLOSE)
    alone = jax.tree.map(lambda x: x[5], maps)
    assert_close(jax.jit(jax.vmap(alone))(jnp.eye(2)), (by_state[5], by_rate[5]), **CLOSE)


def test_residuals_of_equal_ends():
    """Solves that end in equal states on unlike ways, and a lane of either in one block."""

    def area(y0: Array, height: Array) -> Array:
        """The second component stays zero; its slope is the integral of the first, which goes up and comes back."""
        field = lambda t, y, height: jnp.stack([height * (0.875 - 2 * t), y[0] * y[2], jnp.zeros_like(t)])
        sol = diffrax.diffeqsolve(
            diffrax.ODETerm(field), diffrax.Euler(), 0.0, 1.0, 0.125, y0, height, adjoint=LLVM, max_steps=16
        )
        assert sol.ys is not None
        return sol.ys[0, 1]

    y0s = jnp.zeros((4, 3))
    make = jax.jit(jax.vmap(lambda y0, height: jax.vjp(lambda y: area(y, height), y0)[1]))
    maps = jax.tree.map(lanewise([True, False, True, False]), make(y0s, jnp.full(4, 8.0)), make(y0s, jnp.full(4, 16.0)))
    [slopes] = jax.jit(jax.vmap(lambda f: f(jnp.array(1.0))))(maps)
    ways = np.cumsum([0, *(0.875 - 2 * np.arange(7) / 8)]) / 8
    np.testing.assert_allclose(slopes[:, 2], np.mean(ways) * np.array([8.0, 16.0, 8.0, 16.0]), rtol=1e-12)


@pytest.mark.parametrize("max_steps", [256, None])
def test_branches_of_which_lanes_take_either(max_steps):
    """Under `jax.vmap` both branches run; residuals of the one that a lane does not take are made up by JAX."""
    y0s, rates = ensemble(LANES, 4)
    taken = jnp.arange(LANES) % 2 == 0

    def one(y0: Array, rate: Array, taken: Array) -> Array:
        branch = lambda drift: lambda y0, rate: run(LLVM, y0, rate, jnp.array(drift), max_steps=max_steps)[0]
        return jnp.sum(jax.lax.cond(taken, branch(0.3), branch(-0.2), y0, rate))

    found = jax.jit(jax.vmap(jax.grad(one, argnums=(0, 1))))(y0s, rates, taken)
    jacobians, _ = expected(y0s, rates, jnp.where(taken, 0.3, -0.2))
    assert_close(found, tuple(pulled(np.ones((LANES, 2)), jacobians[:2])), **CLOSE)


# ---- levels ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [1, 3, 7])
@pytest.mark.parametrize("derive", [jax.jacrev, jax.jacfwd])
def test_columns(derive, lanes):
    """The Jacobian of an ensemble: a column for each output or input of each lane, zero beside the diagonal.

    Those of one trajectory run as lanes; those of seven are more than a sweep takes together.
    """
    y0s, rates = ensemble(lanes, 5)
    drift = jnp.array(0.3)
    batch = lambda *x: jax.vmap(functools.partial(run, LLVM), in_axes=(0, 0, None))(*x)[0]
    by_state, by_rate, by_drift = jax.jit(derive(batch, argnums=(0, 1, 2)))(y0s, rates, drift)
    wanted, _ = expected(y0s, rates, [drift] * lanes)
    eye = np.eye(lanes)
    assert_close(by_state, np.einsum("lij,lm->limj", wanted[0], eye), **CLOSE)
    assert_close(by_rate, np.einsum("li,lm->lim", wanted[1], eye), **CLOSE)
    assert_close(by_drift, wanted[2], **CLOSE)


@pytest.mark.parametrize("orders", ["summed", "apart", "pushed"])
def test_every_input_batched_at_another_level(orders):
    """Three nested levels. Each input has the axis of one, which is not the outermost for all of them."""
    y0s, rates = ensemble(3, 6)
    rates, drifts = rates[:2], jnp.linspace(-0.3, 0.4, 5)
    solve = lambda *x: run(LLVM, *x)[0]
    nest = lambda f: jax.vmap(jax.vmap(jax.vmap(f, (None, 0, None)), (0, None, None)), (None, None, 0))
    grid = np.meshgrid(np.arange(5), np.arange(3), np.arange(2), indexing="ij")
    d, s, r = (x.reshape(-1) for x in grid)
    jacobians, _ = expected(y0s[s], rates[r], drifts[d])
    cts = weights(5, 3, 2, 2)
    own, rate, drift = pulled(cts.reshape(-1, 2), jacobians)
    own, rate, drift = own.reshape(5, 3, 2, 2), rate.reshape(5, 3, 2), drift.reshape(5, 3, 2)
    if orders == "summed":
        found = jax.jit(lambda cts, *x: jax.vjp(nest(solve), *x)[1](cts))(cts, y0s, rates, drifts)
        assert_close(found, (own.sum((0, 2)), rate.sum((0, 1)), drift.sum((1, 2))), **CLOSE)
    elif orders == "apart":
        pull = lambda y0, rate, drift: jax.vjp(solve, y0, rate, drift)[1](jnp.ones(2))
        ones = [x.reshape(5, 3, 2, *x.shape[1:]) for x in pulled(np.ones((30, 2)), jacobians)]
        assert_close(jax.jit(nest(pull))(y0s, rates, drifts), tuple(ones), **CLOSE)
    else:
        tangents = weights(3, 2), weights(2), weights(5)
        push = jax.jit(lambda x, dx: jax.jvp(nest(solve), x, dx)[1])((y0s, rates, drifts), tangents)
        dy, dr, dd = (np.asarray(x)[i] for x, i in zip(tangents, (s, r, d), strict=True))
        wanted = np.einsum("lij,lj->li", jacobians[0], dy) + jacobians[1] * dr[:, None] + jacobians[2] * dd[:, None]
        assert_close(push, wanted.reshape(5, 3, 2, 2), **CLOSE)


# ---- vector fields that are called -------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [1, 9])
@pytest.mark.parametrize("backward", [jax.jacrev, jax.jacfwd])
def test_saved_functions_where_the_field_is_a_function_of_its_own(lanes, backward, monkeypatch):
    """As that of a long field is: what a value between steps is squared from must be that step's."""
    for module in (once, scalar):
        monkeypatch.setattr(module, "SHARED_EQUATIONS", 4)
    saveat = diffrax.SaveAt(ts=jnp.array([0.3, 1.1, 1.6]), fn=lambda t, y, args: (y**2) * jnp.cos(t))

    def values(adjoint: Any, y0: Array, rate: Array) -> Any:
        return diffrax.diffeqsolve(
            diffrax.ODETerm(lambda *x: oscillator(*x)), diffrax.Tsit5(), 0.0, 2.0, None, y0, (rate, 0.3 * rate),
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-3), saveat=saveat, adjoint=adjoint,
        ).ys  # fmt: skip

    both = [jax.jit(jax.vmap(backward(functools.partial(values, LLVM), argnums=(0, 1))))]
    both.append(jax.jit(jax.vmap(jax.jacrev(functools.partial(values, STOCK), argnums=(0, 1)))))
    assert_close(*(run(*ensemble(lanes, 6)) for run in both), **CLOSE)
