"""What `pallas` solves, in interpret mode: against stock Diffrax, closed forms, and the other backends."""

import functools
from collections.abc import Callable
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ensembles import CLOSE, STOCK, ensemble, expected, pulled, run, weights
from helpers import assert_close
from jaxtyping import Array

from gradsolve_backend import GradSolveAdjoint, explain

PALLAS = GradSolveAdjoint(backend="pallas")


def both(adjoint: Any, inputs: tuple[Array, ...], axes: tuple[int | None, ...], cts: Array) -> Any:
    """End states, counts, cotangents and tangents of all inputs."""
    batch = jax.vmap(functools.partial(run, adjoint), in_axes=axes)
    end, pull, counts = jax.vjp(batch, *inputs, has_aux=True)
    push = jax.jvp(lambda *x: batch(*x)[0], inputs, jax.tree.map(jnp.ones_like, inputs))[1]
    return end, counts, pull(cts), push


@pytest.mark.parametrize(("lanes", "shared"), [(1, True), (3, False), (35, True)])
def test_ensembles(lanes, shared):
    """Blocks that are not full, operands of each lane and of all: stock's values, counts and derivatives."""
    y0s, rates = ensemble(lanes, 3)
    drifts, cts = jnp.linspace(-0.5, 0.5, lanes), weights(lanes, 2)
    drift = jnp.array(0.3) if shared else drifts
    axes = (0, 0, None if shared else 0)
    end, counts, cotangents, push = jax.jit(lambda *x: both(PALLAS, x, axes, cts))(y0s, rates, drift)
    few = slice(0, min(lanes, 5))
    jacobians, (ends, steps) = expected(y0s[few], rates[few], jnp.broadcast_to(drift, lanes)[few])
    np.testing.assert_array_equal(counts[few], steps)
    assert_close(end[few], ends, **CLOSE)
    by_y0, by_rate, by_drift = pulled(cts[few], jacobians)
    assert_close((cotangents[0][few], cotangents[1][few]), (by_y0, by_rate), **CLOSE)
    if not shared or lanes == len(by_drift):
        assert_close(cotangents[2], np.sum(by_drift) if shared else by_drift, **CLOSE)
    assert_close(push[few], np.sum(jacobians[0], axis=2) + jacobians[1] + jacobians[2], **CLOSE)


@pytest.mark.parametrize("name", ["llvm", "xla"])
def test_agrees_with_other_backends(name):
    """In all results, to round-off; the cotangent of a shared operand is a sum over blocks."""
    y0s, rates = ensemble(40, 5)
    found, wanted = (
        jax.jit(lambda *x, a=adjoint: both(a, x, (0, 0, None), weights(40, 2)))(y0s, rates, jnp.array(0.3))
        for adjoint in (PALLAS, GradSolveAdjoint(backend=name))
    )
    assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_columns_and_levels():
    """Jacobians under nested `jax.vmap`, with an operand that has one of the levels."""
    y0s, rates = ensemble(6, 9)
    y0s, rates, drifts = y0s.reshape((2, 3, 2)), rates[:3], jnp.array([-0.2, 0.4])
    nested = lambda f: jax.vmap(jax.vmap(f, in_axes=(0, 0, None)), in_axes=(0, None, 0))
    of = lambda derive, adjoint: jax.jit(nested(derive(lambda *x: run(adjoint, *x)[0], argnums=(0, 1, 2))))
    wanted = of(jax.jacrev, STOCK)(y0s, rates, drifts)
    for derive in (jax.jacfwd, jax.jacrev):
        assert_close(of(derive, PALLAS)(y0s, rates, drifts), wanted, **CLOSE)


def test_second_derivative():
    y0s, rates = ensemble(1, 2)
    end = lambda adjoint: lambda rate: jnp.sum(run(adjoint, y0s[0], rate, jnp.array(0.3))[0])
    found = jax.jit(jax.jacfwd(jax.grad(end(PALLAS))))(rates[0])
    assert_close(found, jax.jit(jax.jacfwd(jax.grad(end(diffrax.DirectAdjoint()))))(rates[0]), rtol=1e-8)


# ---- long solves: Euler's method on y' = rate * y ends at y0 * (1 + rate / n)**n --------------------------


def growth(adjoint: Any, y0: Array, rate: Array, dt: Array, max_steps: int = 1000) -> tuple[Array, Array]:
    sol = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, rate: rate * y), diffrax.Euler(), 0.0, 1.0, dt, y0, rate,
        adjoint=adjoint, max_steps=max_steps, throw=False,
    )  # fmt: skip
    assert sol.ys is not None
    return sol.ys[0], sol.stats["num_steps"]


@pytest.mark.parametrize("memory", [None, "least"])
def test_long_solves(memory):
    """Within the rows of a record, beyond them and beyond several checkpoints, in one block; both modes."""
    if memory == "least":
        with pytest.raises(ValueError, match="at least [0-9]+") as told:
            jax.grad(lambda y0: growth(GradSolveAdjoint("pallas", 64), y0, jnp.ones(()), jnp.array(0.5))[0])(1.0)
        memory = int(str(told.value).partition("at least ")[2].partition(",")[0])
    adjoint = GradSolveAdjoint(backend="pallas", memory=memory)
    counts = np.array([1, 7, 128, 129, 192, 193, 700])
    y0s, rates, dts = np.linspace(1.0, 2.0, 7), np.linspace(-0.5, 1.5, 7), 1 / counts

    def slopes(y0: Array, rate: Array, dt: Array) -> Any:
        end, pull, steps = jax.vjp(lambda *x: growth(adjoint, *x, dt), y0, rate, has_aux=True)
        ones = (jnp.ones(()), jnp.ones(()))
        return steps, end, pull(jnp.ones(())), jax.jvp(lambda *x: growth(adjoint, *x, dt)[0], (y0, rate), ones)[1]

    steps, end, (by_y0, by_rate), push = jax.jit(jax.vmap(slopes))(y0s, rates, dts)
    np.testing.assert_array_equal(steps, counts)
    growths = (1 + rates / counts) ** counts
    wanted = (growths * y0s, growths, y0s * (1 + rates / counts) ** (counts - 1))
    assert_close((end, by_y0, by_rate), wanted, rtol=1e-11)
    assert_close(push, wanted[1] + wanted[2], rtol=1e-11)
    [route] = explain(jax.vmap(slopes), y0s, rates, dts)[:1]
    assert memory is None or 0 < route.record_bytes <= memory


def test_no_bound_on_steps():
    """Forward mode has no need of one, reverse mode says so."""
    slope = lambda derive: derive(lambda y0: growth(PALLAS, y0, jnp.ones(()), jnp.array(0.25), None)[0])  # type: ignore[arg-type]
    assert_close(jax.jit(slope(jax.jacfwd))(jnp.ones(())), jnp.array(1.25**4), rtol=1e-12)
    with pytest.raises(ValueError, match="max_steps"):
        slope(jax.grad)(jnp.ones(()))


def test_residuals_in_another_order():
    """Whoever calls `jax.vjp` may reorder the lanes of what it keeps, over blocks of unlike lengths."""
    counts = 5.0 * np.arange(1, 41)
    y0s, rates, dts = jnp.linspace(1.0, 2.0, 40), jnp.linspace(-0.5, 1.5, 40), jnp.asarray(1 / counts)
    order = np.random.default_rng(4).permutation(40)

    @jax.jit
    def slopes(y0s: Array, rates: Array, dts: Array) -> Any:
        _, pull = jax.vmap(lambda y0, rate, dt: jax.vjp(lambda *x: growth(PALLAS, *x, dt)[0], y0, rate))(
            y0s, rates, dts
        )
        return jax.vmap(lambda p: p(jnp.ones(())))(jax.tree.map(lambda x: x[order], pull))

    wanted = ((1 + rates / counts) ** counts, y0s * (1 + rates / counts) ** (counts - 1))
    assert_close(slopes(y0s, rates, dts), tuple(x[order] for x in wanted), rtol=1e-11)


# ---- lanes that fail, look-ups, dtypes, what is saved -----------------------------------------------------


def test_failing_lanes_do_not_disturb_others():
    """One has a field that is NaN, one needs more steps than `max_steps`: bit for bit as without them."""
    y0s, rates = ensemble(7, 9)
    failing, drifts = np.array([1, 5]), jnp.linspace(-0.5, 0.5, 7)
    bad, cts = rates.at[failing].set(jnp.array([jnp.nan, 1e7])), weights(7, 2)
    found = jax.jit(lambda rates: both(PALLAS, (y0s, rates, drifts), (0, 0, 0), cts))
    with_them, without, others = found(bad), found(rates), np.delete(np.arange(7), failing)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[others], y[others]), with_them, without)
    jacobians, (_, counts) = expected(y0s, bad, drifts)
    np.testing.assert_array_equal(with_them[1], counts)
    assert np.all(counts[failing, 0] != 0) and np.all(counts[others, 0] == 0)
    assert_close(with_them[2][0][others], pulled(cts, jacobians)[0][others], **CLOSE)


def fixed(field: Callable, adjoint: Any, y0: Array, args: Any, saveat: diffrax.SaveAt | None = None) -> Any:
    """32 steps of Heun's method from 0 to 2, times being of the dtype of the state."""
    t0, t1, dt0 = (jnp.asarray(x, y0.dtype) for x in (0.0, 2.0, 1 / 16))
    saveat = diffrax.SaveAt(t1=True) if saveat is None else saveat
    return diffrax.diffeqsolve(
        diffrax.ODETerm(field), diffrax.Heun(), t0, t1, dt0, y0, args, adjoint=adjoint, max_steps=64, saveat=saveat
    ).ys


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
def test_tables(shared):
    """Tabulated input that all lanes read, or each its own, and the slopes of its entries."""
    grid = jnp.linspace(0.0, 3.0, 16)
    field = lambda t, y, data: jnp.stack([y[1] + jnp.interp(t + 0.1 * y[0], grid, data), -y[0] * jnp.cos(y[1])])
    y0s, cts = ensemble(6, 11)[0] / 2, weights(6, 1, 2)
    data = jnp.sin(3 * grid) if shared else jnp.outer(jnp.arange(6.0), jnp.sin(3 * grid))

    def found(adjoint: Any) -> Any:
        batch = lambda *x: jax.vmap(functools.partial(fixed, field, adjoint), in_axes=(0, None if shared else 0))(*x)
        value, pull = jax.vjp(batch, y0s, data)
        push = () if adjoint is STOCK else jax.jvp(batch, (y0s, data), (y0s, jnp.cos(data)))[1]
        return value, pull(cts), push

    (value, pull, push), wanted = jax.jit(found, static_argnums=0)(PALLAS), jax.jit(found, static_argnums=0)(STOCK)
    assert_close((value, pull), wanted[:2], **CLOSE)
    dot = jnp.sum(wanted[1][0] * y0s) + jnp.sum(wanted[1][1] * jnp.cos(data))
    assert_close(jnp.sum(push * cts), dot, rtol=1e-9)


def test_single_precision():
    y0s, rates = (x.astype(jnp.float32) for x in ensemble(5, 10))
    field = lambda t, y, rate: jnp.stack([y[1], rate * y[1] * (1 - y[0] ** 2) - jnp.tanh(y[0])])
    slopes = lambda adjoint, y0, rate: jax.vjp(lambda *x: fixed(field, adjoint, *x)[0], y0, rate)
    pull = lambda adjoint: lambda *x: (lambda out: (out[0], out[1](jnp.ones_like(out[0]))))(slopes(adjoint, *x))
    found = jax.jit(jax.vmap(pull(PALLAS)))(y0s, rates)
    wanted = jax.jit(jax.vmap(pull(STOCK)))(y0s.astype(jnp.float64), rates.astype(jnp.float64))
    assert {x.dtype for x in jax.tree.leaves(found)} == {np.dtype("float32")}
    assert_close(jax.tree.map(lambda x: x.astype(jnp.float64), found), wanted, rtol=1e-4, atol=1e-5)


SAVED = {
    "times": diffrax.SubSaveAt(t0=True, ts=jnp.array([0.21, 0.22, 0.9]), fn=lambda t, y, rate: rate * jnp.sin(y[0])),
    "steps": diffrax.SubSaveAt(steps=3, t1=True),
}


def test_all_that_is_saved():
    """Requested times, every third step, a function of the state; both modes."""
    y0s, rates = ensemble(3, 12)
    field = lambda t, y, rate: jnp.stack([y[1], rate * (1 - y[0] ** 2) * y[1] - y[0]])

    def values(adjoint: Any, y0: Array, rate: Array) -> Array:
        ys = fixed(field, adjoint, y0, rate, diffrax.SaveAt(subs=SAVED))
        kept = [jnp.where(jnp.isfinite(x), x, 0.0).reshape(-1) for x in jax.tree.leaves(ys)]
        return jnp.concatenate(kept)

    wanted = jax.jit(jax.vmap(jax.jacrev(functools.partial(values, STOCK), argnums=(0, 1))))(y0s, rates)
    for derive in (jax.jacrev, jax.jacfwd):
        assert_close(
            jax.jit(jax.vmap(derive(functools.partial(values, PALLAS), argnums=(0, 1))))(y0s, rates), wanted, **CLOSE
        )
    assert_close(*(jax.jit(jax.vmap(functools.partial(values, a)))(y0s, rates) for a in (PALLAS, STOCK)), **CLOSE)


def test_times_that_are_given():
    """`StepTo` ends by a number of steps that is a loop variable: it must not be taken for one that only counts."""
    y0s, rates = ensemble(3, 14)
    field = lambda t, y, rate: jnp.stack([y[1], -rate * y[0]])

    def values(adjoint: Any, y0: Array, rate: Array) -> Array:
        sol = diffrax.diffeqsolve(
            diffrax.ODETerm(field), diffrax.Heun(), 0.0, 1.0, None, y0, rate, saveat=diffrax.SaveAt(steps=2),
            stepsize_controller=diffrax.StepTo(jnp.linspace(0.0, 1.0, 8) ** 2), adjoint=adjoint, max_steps=16,
        )  # fmt: skip
        return sol.ys  # type: ignore[return-value]

    found, wanted = (jax.jit(jax.vmap(functools.partial(values, a)))(y0s, rates) for a in (PALLAS, STOCK))
    assert_close(found, wanted, **CLOSE)
