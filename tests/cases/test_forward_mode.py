"""Forward mode of everything that reverse mode takes, and what it says about integers and unbounded solves."""

from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import STOCK, assert_close, decay, final, solve
from jaxtyping import Array

forward = pytest.mark.stock_fails(raises=TypeError)
TS = jnp.linspace(0.0, 3.0, 7)
Params = tuple[Array, Array, Array]


def lotka_volterra(params: Params, adjoint: diffrax.AbstractAdjoint) -> Array:
    """Seven saved states; growth rates come through `args`, all else is closed over."""
    rates, y0, coupling = params

    def field(t: Any, y: Array, args: Array) -> Array:
        return jnp.stack([args[0] * y[0] - coupling[0] * y[0] * y[1], coupling[1] * y[0] * y[1] - args[1] * y[1]])

    how = {"t1": 3.0, "max_steps": 256, "saveat": diffrax.SaveAt(ts=TS), "adjoint": adjoint}
    sol = solve(field, y0, rates, **how)
    assert sol.ys is not None
    return sol.ys


PARAMS = (jnp.array([1.1, 0.4]), jnp.array([1.0, 0.5]), jnp.array([0.4, 0.1]))


@pytest.fixture(scope="module")
def stock_jacobian() -> Params:
    return jax.jit(jax.jacrev(lambda p: lotka_volterra(p, STOCK)))(PARAMS)


@forward
def test_forward_jacobian(adjoint, stock_jacobian):
    """`jacfwd` over args, over the state and over captured parameters (diffrax#336, #314)."""
    jacobian = jax.jit(jax.jacfwd(lambda p: lotka_volterra(p, adjoint)))(PARAMS)
    assert_close(jacobian, stock_jacobian, rtol=1e-7, atol=1e-9)


def test_reverse_jacobian_of_the_same_object(adjoint, stock_jacobian):
    jacobian = jax.jit(jax.jacrev(lambda p: lotka_volterra(p, adjoint)))(PARAMS)
    assert_close(jacobian, stock_jacobian, rtol=1e-7, atol=1e-9)


@forward
def test_linearize(adjoint, stock_jacobian):
    """The linear function of `linearize` is the Jacobian, applied twice without solving anew."""
    _, linear = jax.linearize(lambda p: lotka_volterra(p, adjoint), PARAMS)
    for seed in (0, 1):
        tangent = jax.tree.map(lambda x, seed=seed: jnp.cos(jnp.arange(x.size) + seed), PARAMS)
        wanted = sum(jnp.tensordot(j, x, 1) for j, x in zip(stock_jacobian, tangent, strict=True))
        assert_close(linear(tangent), wanted, rtol=1e-7, atol=1e-9)


@forward
def test_forward_jacobian_in_a_batch(adjoint, stock_jacobian):
    """`vmap` of `jacfwd`, the first member being the single solve (diffrax#612)."""
    batch = jax.tree.map(lambda x: jnp.stack([x, 1.3 * x]), PARAMS)
    jacobian = jax.jit(jax.vmap(jax.jacfwd(lambda p: lotka_volterra(p, adjoint))))(batch)
    assert_close(jax.tree.map(lambda x: x[0], jacobian), stock_jacobian, rtol=1e-7, atol=1e-9)
    assert all(np.abs(leaf[1] - leaf[0]).max() > 1e-3 for leaf in jax.tree.leaves(jacobian))


@forward
def test_integer_parts_of_a_solution(adjoint):
    """Counts, result and event mask have float0 tangents and their plain values (diffrax#508)."""

    def parts(k: Array) -> tuple[Any, ...]:
        event = diffrax.Event(lambda t, y, args, **kwargs: y < 0.1)
        sol = solve(decay, jnp.array(1.0), k, event=event, adjoint=adjoint, max_steps=64)
        counts = {name: count for name, count in sol.stats.items() if name != "max_steps"}
        return sol.ts, sol.ys, counts, sol.result, sol.event_mask

    k = jnp.array(0.5)
    primal, tangent = jax.jvp(parts, (k,), (jnp.array(1.0),))
    assert jax.tree.all(jax.tree.map(lambda x, y: bool(np.all(x == y)), primal, parts(k)))
    assert all(leaf.dtype == jax.dtypes.float0 for leaf in jax.tree.leaves(tangent[2:]))
    assert_close(tangent[:2], (np.zeros(1), np.array([-np.exp(-0.5)])), rtol=1e-7)


def unbounded(k: Array, adjoint: diffrax.AbstractAdjoint) -> Array:
    return final(decay, jnp.array(1.0), k, adjoint=adjoint, max_steps=None)


def test_value_without_bound_on_steps(adjoint):
    assert_close(jax.jit(lambda k: unbounded(k, adjoint))(jnp.array(1.5)), np.exp(-1.5), rtol=1e-8)


@forward
def test_forward_mode_without_bound_on_steps(adjoint):
    """Forward mode needs no record, hence no bound (diffrax#606)."""
    slope = jax.jit(jax.jacfwd(lambda k: unbounded(k, adjoint)))(jnp.array(1.5))
    assert_close(slope, -np.exp(-1.5), rtol=1e-7)


def test_reverse_mode_without_bound_on_steps(adjoint):
    """Either the right slope, or a message that says what to pass (diffrax#338)."""
    try:
        slope = jax.jit(jax.grad(lambda k: unbounded(k, adjoint)))(jnp.array(1.5))
    except (ValueError, RuntimeError) as error:
        assert "max_steps" in str(error)
    else:
        assert_close(slope, -np.exp(-1.5), rtol=1e-7)
