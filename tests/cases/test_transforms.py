"""Second derivatives, closures, control flow around the solve, nested and partial batches."""

from collections.abc import Callable
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
from helpers import (
    STOCK,
    Loss,
    assert_close,
    decay,
    final,
    frozen_oracle,
    logistic,
    solve,
    value_and_gradient,
    with_mesh,
)
from jaxtyping import Array

TIGHTER = diffrax.PIDController(rtol=1e-10, atol=1e-10)
CONSTANT = diffrax.ConstantStepSize()
CHORD = diffrax.VeryChord(rtol=1e-10, atol=1e-10, norm=optx.rms_norm)
second = pytest.mark.stock_fails(raises=(TypeError, ValueError))


def grown(params: Array, adjoint: diffrax.AbstractAdjoint) -> Array:
    how = {"max_steps": 128, "stepsize_controller": TIGHTER, "adjoint": adjoint}
    return final(logistic, params[1], params[0], **how)


def grown_exactly(params: Array) -> Array:
    r, y0 = params
    return y0 * jnp.exp(r) / (1 - y0 + y0 * jnp.exp(r))


@pytest.mark.parametrize("outer", [jax.jacfwd, jax.jacrev])
@pytest.mark.parametrize("inner", [jax.jacrev, jax.jacfwd])
@second
def test_second_derivatives(adjoint, outer, inner):
    """Each nesting of two derivatives gives the Hessian of the closed form (diffrax#332, #114)."""
    params = jnp.array([1.2, 0.2])
    hessian = jax.jit(outer(inner(lambda p: grown(p, adjoint))))(params)
    assert_close(hessian, jax.hessian(grown_exactly)(params), rtol=1e-6)


@second
def test_second_derivatives_in_a_batch(adjoint):
    """Gradient over r of the summed slopes over y0, members taking unlike numbers of steps."""
    y0s = jnp.array([1e-4, 0.2, 0.9])

    def slopes(function: Callable[[Array], Array], r: Array) -> Array:
        return jnp.sum(jax.vmap(jax.jacrev(lambda y0: function(jnp.stack([r, y0]))))(y0s))

    mixed = jax.jit(jax.grad(lambda r: slopes(lambda p: grown(p, adjoint), r)))(jnp.array(1.2))
    assert_close(mixed, jax.grad(lambda r: slopes(grown_exactly, r))(jnp.array(1.2)), rtol=1e-6)


@pytest.mark.parametrize("solver", [diffrax.Tsit5(), diffrax.Kvaerno5(root_finder=CHORD)], ids=["Tsit5", "Kvaerno5"])
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "no jit"])
def test_everything_closed_over(adjoint, solver, jit):
    """Gradients reach captured values, batched or not, and a captured table (jax#8783, diffrax#135)."""

    def loss(params: tuple[Array, Array, Array], which: diffrax.AbstractAdjoint) -> Array:
        a, bs, table = params

        def member(b: Array) -> Array:
            def field(t: Any, y: Array, args: None) -> Array:
                force = jnp.interp(t, jnp.linspace(0.0, 1.0, 5), table)
                return jnp.stack([-a * y[0] + b * y[1], force - y[1]])

            # Constant steps: at the kinks of a table an adaptive solve rejects steps, and rounding decides how many.
            how = {"solver": solver, "max_steps": 16, "stepsize_controller": CONSTANT, "dt0": 0.125, "adjoint": which}
            return jnp.sum(final(field, jnp.array([1.0, 0.5]), **how))

        return jnp.sum(jax.vmap(member)(bs))

    params = (jnp.array(1.3), jnp.array([0.2, 0.9, 3.0]), jnp.array([0.0, 1.0, 0.3, -0.5, 0.2]))
    compiled = jax.jit if jit else lambda function: function
    gradient = compiled(jax.grad(lambda p: loss(p, adjoint)))(params)
    assert_close(gradient, jax.jit(jax.grad(lambda p: loss(p, STOCK)))(params), rtol=1e-9)
    assert all(np.all(np.asarray(leaf) != 0) for leaf in gradient)


def decayed(k: Array, adjoint: diffrax.AbstractAdjoint, **how: Any) -> Array:
    return final(decay, jnp.array(1.0), k, **({"adjoint": adjoint, "max_steps": 64} | how))


def descend(k: Array, adjoint: diffrax.AbstractAdjoint) -> Array:
    return k - 0.1 * jax.grad(decayed)(k, adjoint)


def by_scan(k: Array, adjoint: diffrax.AbstractAdjoint) -> Array:
    return jax.lax.scan(lambda k, _: (descend(k, adjoint), None), k, length=3)[0]


def by_while_loop(k: Array, adjoint: diffrax.AbstractAdjoint) -> Array:
    step = lambda carry: (descend(carry[0], adjoint), carry[1] + 1)
    return jax.lax.while_loop(lambda carry: carry[1] < 3, step, (k, 0))[0]


@pytest.mark.parametrize("loop", [by_scan, by_while_loop])
def test_gradient_descent_inside_a_loop(adjoint, loop):
    """Three steps of rate 0.1 from k = 1 on exp(-k) (diffrax#218, #307)."""
    assert_close(jax.jit(lambda k: loop(k, adjoint))(jnp.array(1.0)), np.float64(1.106471), rtol=1e-6)


@pytest.mark.long
@pytest.mark.stock_fails(raises=Exception)
def test_no_tracer_leaks_from_a_loop(adjoint):
    """JAX's leak checker is silent about a gradient inside a scan (jax#650)."""
    how = {"solver": diffrax.Heun(), "stepsize_controller": CONSTANT, "dt0": 0.5}
    step = lambda k, _: (k - 0.1 * jax.grad(lambda k: decayed(k, adjoint, **how))(k), None)
    with jax.checking_leaks():
        k = jax.jit(lambda k: jax.lax.scan(step, k, length=1)[0])(jnp.array(1.0))
    # Two Heun steps of 1/2 multiply by (1 - k/2 + k^2/8)^2.
    assert_close(k, np.float64(1 - 0.1 * 2 * 0.625 * (-0.5 + 0.25)), rtol=1e-12)


def test_map_cond_and_checkpoint_around_a_solve(adjoint):
    def loss(ks: Array) -> Array:
        mapped = jax.lax.map(lambda k: decayed(k, adjoint), ks)
        chosen = jax.lax.cond(ks[0] > 0, lambda: decayed(2 * ks[0], adjoint), lambda: ks[0])
        again = jax.checkpoint(lambda k: decayed(k, adjoint))(ks[1])
        return jnp.sum(mapped) + chosen + again

    slope = jax.jit(jax.grad(loss))(jnp.array([0.5, 1.5]))
    exact = np.array([-np.exp(-0.5) - 2 * np.exp(-1.0), -2 * np.exp(-1.5)])
    assert_close(slope, exact, rtol=1e-7)


def test_nested_loops_over_chains(adjoint):
    """As a No-U-Turn sampler does: an inner loop of unlike length in each chain, all of them batched (jax#650)."""

    def chains(slope: Callable[[Array], Array]) -> Array:
        def leap(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            return carry[0] - 0.1 * slope(carry[0]), carry[1] + 1

        def draw(k: Array, length: Array) -> Array:
            grow = lambda carry: (jax.lax.while_loop(lambda c: c[1] < length, leap, (carry[0], 0))[0], carry[1] + 1)
            return jax.lax.while_loop(lambda carry: carry[1] < 2, grow, (k, 0))[0]

        return jax.vmap(draw)(jnp.array([0.5, 1.0, 2.0]), jnp.array([1, 3, 2]))

    exact = jax.jit(lambda: chains(lambda k: -jnp.exp(-k)))()
    assert_close(jax.jit(lambda: chains(jax.grad(lambda k: decayed(k, adjoint))))(), exact, rtol=1e-8)


def test_crossing_batch_axes(adjoint):
    """Nested batches whose axes cross, over the parameter and over the state (jax#9073)."""
    slope = jax.grad(lambda k, y0: final(decay, y0, k, adjoint=adjoint, max_steps=64))
    ks, y0s = jnp.array([0.2, 1.0, 1.5]), jnp.array([1.0, 3.0])
    crossed = jax.vmap(jax.vmap(slope, in_axes=(0, None)), in_axes=(None, 0), out_axes=1)
    assert_close(jax.jit(crossed)(ks, y0s), -np.exp(-ks)[:, None] * np.asarray(y0s)[None], rtol=1e-7)


def test_batch_along_the_second_axis(adjoint):
    """in_axes=1 and out_axes=1, a compiled batch inside a batch."""
    value = lambda y0, k: final(decay, y0, k, adjoint=adjoint, max_steps=64)
    batch = jax.jit(jax.vmap(value, in_axes=(1, None), out_axes=1))
    y0s, ks = jnp.arange(6.0).reshape(2, 3), jnp.array([0.5, 2.0])
    wanted = np.asarray(y0s)[None] * np.exp(-np.asarray(ks))[:, None, None]
    assert_close(jax.vmap(batch, in_axes=(None, 0))(y0s, ks), wanted, rtol=1e-7)


@pytest.mark.parametrize("which", ["y0", "t1", "closure", "rtol"])
def test_batch_over_one_input_only(adjoint, which):
    """A batch over a single input, all else being shared, has the value and slope of single solves (diffrax#467)."""

    def member(x: Array, k: Array) -> Array:
        given = {"y0": jnp.array(1.0), "t1": jnp.array(1.0), "closure": jnp.array(1.0), "rtol": jnp.array(1e-9)}
        given[which] = x
        field = lambda t, y, k: -k * given["closure"] * y
        controller = diffrax.PIDController(rtol=given["rtol"], atol=1e-9)
        how = {"t1": given["t1"], "stepsize_controller": controller, "adjoint": adjoint, "max_steps": 64}
        return final(field, given["y0"], k, **how)

    xs = jnp.array([1e-9, 1e-8]) if which == "rtol" else jnp.array([0.5, 2.0])
    value, slope = jax.jit(jax.vmap(jax.value_and_grad(member, argnums=1), in_axes=(0, None)))(xs, jnp.array(0.8))
    x = np.asarray(xs)
    scale, span = (x, 1.0) if which == "y0" else (1.0, x if which in ("t1", "closure") else np.ones(2))
    exact = scale * np.exp(-0.8 * span)
    assert_close((value, slope), (exact, -span * exact), rtol=1e-6)


def long_decay() -> Loss:
    def loss(k: Array, **how: Any) -> tuple[Array, Array]:
        how = {"stepsize_controller": diffrax.PIDController(rtol=1e-8, atol=1e-8)} | how
        sol = solve(decay, jnp.array(1.0), k, t1=5.0, saveat=with_mesh(diffrax.SubSaveAt(t1=True)), **how)
        assert isinstance(sol.ys, dict) and isinstance(sol.ts, dict)
        return sol.ys["asked"][-1], sol.ts["mesh"]

    return loss


def test_record_belongs_to_the_call(adjoint):
    """One compiled gradient called far apart replays the steps of each call, never those of an earlier one."""
    loss = long_decay()
    compiled = jax.jit(jax.value_and_grad(lambda k: loss(k, adjoint=adjoint), has_aux=True))
    for k in (0.1, 50.0):
        (value, mesh), slope = compiled(jnp.array(k))
        steps = np.asarray(mesh)[np.isfinite(mesh)]
        assert_close((value, slope), frozen_oracle(loss, jnp.array(k), steps), rtol=1e-8)


def test_ten_descent_steps_in_a_scan(adjoint):
    loss = long_decay()
    slope = lambda k, which: jax.grad(lambda k: loss(k, adjoint=which)[0])(k)

    def path(which: diffrax.AbstractAdjoint) -> Array:
        step = lambda k, _: (k - 0.05 * slope(k, which), k)
        return jax.lax.scan(step, jnp.array(0.1), length=10)[1]

    assert_close(jax.jit(path, static_argnums=0)(adjoint), jax.jit(path, static_argnums=0)(STOCK), rtol=1e-8)


def test_the_oracle_itself(adjoint):
    """On the steps just taken, stock gives the gradient that stock's own adaptive run gave."""
    loss = long_decay()
    value, mesh, slope = value_and_gradient(loss, jnp.array(0.4), adjoint=adjoint)
    assert_close((value, slope), frozen_oracle(loss, jnp.array(0.4), mesh), rtol=1e-12)
    assert_close(slope, np.float64(-5 * np.exp(-2.0)), rtol=1e-6)
