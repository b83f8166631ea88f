"""Gradients with respect to times: start, end, jumps, doses, save times, and spans that differ per member."""

from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TIGHT, assert_close, decay, final, finite_difference, logistic, solve
from jaxtyping import Array

TIGHTER = diffrax.PIDController(rtol=1e-11, atol=1e-11)


def switched_off(params: tuple[Array, Array], adjoint: diffrax.AbstractAdjoint) -> Array:
    """y' = -k y until the time T, then 0, with T declared as a jump."""

    def field(t: Any, y: Array, args: tuple[Array, Array]) -> Array:
        time, k = args
        return jnp.where(t < time, -k * y, 0.0)

    controller = diffrax.ClipStepSizeController(TIGHTER, jump_ts=[params[0]])
    return final(field, jnp.array(2.0), params, t1=3.0, stepsize_controller=controller, adjoint=adjoint)


def test_slope_over_a_switching_time(adjoint):
    """A parameter that only moves a jump time has the slope of the closed form (diffrax#363, #716)."""
    gradient = jax.jit(jax.grad(switched_off), static_argnums=1)((jnp.array(1.2), jnp.array(0.8)), adjoint)
    assert_close(gradient, (np.float64(-0.612629), np.float64(-0.918943)), rtol=2e-6)
    exact = 2 * np.exp(-0.8 * 1.2)
    assert_close(gradient, (-0.8 * exact, -1.2 * exact), rtol=1e-8)


def test_slope_over_switching_times_in_a_batch(adjoint):
    times = jnp.array([0.3, 1.2, 2.0, 2.9])
    batched = jax.jit(jax.vmap(lambda time: jax.grad(switched_off)((time, jnp.array(0.8)), adjoint)))
    exact = 2 * jnp.exp(-0.8 * times)
    assert_close(batched(times), (-0.8 * exact, -times * exact), rtol=1e-8)


def dosed(params: dict[str, Array], adjoint: diffrax.AbstractAdjoint) -> Array:
    """Amount at the end of three segments, a dose being added before each."""

    def segment(y: Array, row: tuple[Array, Array, Array]) -> tuple[Array, None]:
        start, stop, dose = row
        y1 = final(decay, y + dose, params["k"], t0=start, t1=stop, adjoint=adjoint, stepsize_controller=TIGHTER)
        return y1, None

    stops = jnp.append(params["times"][1:], params["end"])
    y, _ = jax.lax.scan(segment, jnp.array(0.0), (params["times"], stops, params["doses"]))
    return y


def dosed_exactly(params: dict[str, Array]) -> Array:
    return jnp.sum(params["doses"] * jnp.exp(-params["k"] * (params["end"] - params["times"])))


def test_slopes_over_dose_times_in_a_batch_of_patients(adjoint):
    """Dose times are the ends of chained solves; each patient has its own (diffrax#244, #492)."""
    patients = {
        "times": jnp.array([[0.0, 0.7, 1.5], [0.2, 1.0, 1.1]]),
        "doses": jnp.array([[1.0, 2.0, 0.5], [3.0, 0.1, 1.0]]),
        "k": jnp.array([0.9, 0.4]),
        "end": jnp.array([2.5, 4.0]),
    }
    gradient = jax.jit(jax.vmap(jax.grad(lambda patient: dosed(patient, adjoint))))(patients)
    assert_close(gradient, jax.vmap(jax.grad(dosed_exactly))(patients), rtol=1e-8)


def test_slopes_over_start_and_end_of_a_backwards_solve(adjoint):
    @jax.jit
    def end(span: Array) -> Array:
        field = lambda t, y, args: -0.6 * y + jnp.sin(t)
        how = {"t0": span[0], "t1": span[1], "stepsize_controller": TIGHTER, "adjoint": adjoint}
        return final(field, jnp.array(1.0), **how)

    span = np.array([1.0, 0.2])
    by_hand = [finite_difference(lambda x, i=i: end(np.where(np.arange(2) == i, x, span)), span[i]) for i in (0, 1)]
    assert abs(by_hand[0]) > 0.1 and abs(by_hand[1]) > 0.1
    assert_close(jax.jit(jax.grad(end))(jnp.asarray(span)), np.array(by_hand), rtol=1e-7)


def test_slopes_over_save_times_in_a_batch(adjoint):
    """Moving a save time moves the saved value by the slope of the solution there (diffrax#584)."""
    weights = jnp.array([1.0, -0.5, 2.0])

    def loss(ts: Array, y0: Array, r: Array) -> Array:
        saveat = diffrax.SaveAt(ts=ts)
        sol = solve(logistic, y0, r, t1=2.0, saveat=saveat, adjoint=adjoint, stepsize_controller=TIGHTER)
        assert sol.ys is not None
        return jnp.sum(weights * sol.ys)

    def exact(ts: Array, y0: Array, r: Array) -> Array:
        grown = y0 * jnp.exp(r * ts)
        return jnp.sum(weights * grown / (1 - y0 + grown))

    rows = jnp.array([[0.3, 1.1, 2.0], [0.0, 1.9, 2.0]])
    y0, r = jnp.array(0.2), jnp.array(1.3)
    batched = lambda function: jax.vmap(jax.grad(function, argnums=(0, 1, 2)), in_axes=(0, None, None))
    ts_slope, y0_slope, r_slope = jax.jit(batched(loss))(rows, y0, r)
    wanted = batched(exact)(rows, y0, r)
    # The last save time is not the end of the solve's own variable t1: stock moves it along the interpolant as well.
    assert_close(ts_slope, wanted[0], rtol=1e-5, atol=1e-6)
    assert_close((y0_slope, r_slope), wanted[1:], rtol=1e-7)


def forced(start: Array, stop: Array, ts: Array, adjoint: diffrax.AbstractAdjoint) -> Array:
    field = lambda t, y, args: -y + jnp.sin(t)
    saveat = diffrax.SaveAt(ts=ts, t1=True)
    sol = solve(field, jnp.array(1.0), t0=start, t1=stop, saveat=saveat, adjoint=adjoint)
    assert sol.ys is not None
    return sol.ys


def test_each_member_has_its_own_span_and_save_times(adjoint):
    """Spans of length 0.1 to 40, one of them backwards, give what single solves give."""
    start, stop = jnp.array([0.0, 1.0, 2.0, 1.5]), jnp.array([40.0, 1.1, 9.0, 0.5])
    ts = start[:, None] + (stop - start)[:, None] * jnp.array([[0.1, 0.5, 0.9]])
    value = lambda a, b, c: forced(a, b, c, adjoint)
    single = jax.jit(value)
    alone = np.stack([single(a, b, c) for a, b, c in zip(start, stop, ts, strict=True)])
    assert_close(jax.jit(jax.vmap(value))(start, stop, ts), alone, rtol=1e-8, atol=1e-9)


def test_spans_of_members_have_no_cross_terms(adjoint):
    start, stop = jnp.array([0.0, 1.0, 1.5]), jnp.array([8.0, 1.1, 0.5])
    ts = start[:, None] + (stop - start)[:, None] * jnp.array([[0.25, 0.75]])
    batch = lambda spans: jax.vmap(lambda a, b, c: forced(a, b, c, adjoint))(*spans).sum(axis=1)
    by_start, by_stop, by_ts = jax.jit(jax.jacrev(batch))((start, stop, ts))
    outside = ~np.eye(3, dtype=bool)
    for jacobian in (by_start, by_stop, by_ts.sum(axis=2)):
        assert np.all(np.asarray(jacobian)[outside] == 0)
        assert np.all(np.abs(np.asarray(jacobian)[~outside]) > 1e-3)
    slope_at_end = -forced(start[0], stop[0], ts[0], adjoint)[-1] + jnp.sin(stop[0])
    assert_close(by_stop[0, 0], slope_at_end, rtol=1e-6)


def test_zero_length_solve_in_a_batch(adjoint):
    """A member with t0 == t1 keeps its state and the slopes of y'=-y/t, y(1)=1 (diffrax#488)."""

    def end(y0: Array, stop: Array) -> Array:
        return final(lambda t, y, args: -y / t, y0, t0=1.0, t1=stop, adjoint=adjoint)

    stops = jnp.array([1.0, 1.5, 3.0])
    total = lambda y0: jnp.sum(jax.vmap(lambda stop: end(y0, stop))(stops))
    assert_close(jax.jit(jax.grad(total))(jnp.array(2.0)), np.sum(1 / np.asarray(stops)), rtol=1e-8)
    pair = lambda y0: jnp.sum(jax.vmap(lambda stop: end(y0, stop))(stops[:2]))
    assert_close(jax.jit(jax.grad(pair))(jnp.array(2.0)), np.float64(1 + 1 / 1.5), rtol=1e-8)


@pytest.mark.parametrize("dense", [False, True], ids=["saved", "dense"])
def test_rows_of_a_zero_length_solve(adjoint, dense):
    """Every row is y0 and its slope is 1: no infinity and no NaN leaves the padding."""

    def rows(y0: Array, stop: Array) -> Array:
        saveat = diffrax.SaveAt(dense=True) if dense else diffrax.SaveAt(ts=jnp.stack([jnp.array(0.5), stop]))
        sol = solve(decay, y0, 0.7, t0=0.5, t1=stop, saveat=saveat, max_steps=64, adjoint=adjoint)
        if dense:
            return jnp.stack([sol.evaluate(0.5), sol.evaluate(stop)])
        assert sol.ys is not None
        return sol.ys

    both = lambda y0, stop: (rows(y0, stop), jax.jacrev(rows)(y0, stop))
    value, slope = jax.jit(both)(jnp.array(3.0), jnp.array(0.5))
    assert_close((value, slope), (np.full(2, 3.0), np.ones(2)), rtol=1e-12)
    stops = jnp.array([0.5, 1.5])
    values, slopes = jax.jit(jax.vmap(both, in_axes=(None, 0)))(jnp.array(3.0), stops)
    ends = np.array([[1.0, 1.0], [1.0, np.exp(-0.7)]])
    assert_close((values, slopes), (3 * ends, ends), rtol=1e-7)


def test_first_order_jump_of_slope_at_a_declared_time(adjoint):
    """A declared jump makes the first stage be evaluated anew behind it (diffrax#58, #211, #723)."""

    def rows(k: Array) -> Array:
        field = lambda t, y, k: jnp.where(t < 0.5, -k * y, k)
        controller = diffrax.ClipStepSizeController(TIGHT, jump_ts=jnp.array([0.5]))
        saveat = diffrax.SaveAt(ts=jnp.array([0.25, 0.5, 0.75, 1.0]))
        sol = solve(field, jnp.array(1.0), k, saveat=saveat, stepsize_controller=controller, adjoint=adjoint)
        assert sol.ys is not None
        return sol.ys

    value, slope = jax.jit(lambda k: (rows(k), jax.jacrev(rows)(k)))(jnp.array(1.5))
    assert_close(value, np.array([0.687289, 0.472367, 0.847367, 1.222367]), rtol=2e-6)
    low = lambda t: -t * np.exp(-1.5 * t)
    assert_close(slope, np.array([low(0.25), low(0.5), low(0.5) + 0.25, low(0.5) + 0.5]), rtol=1e-6)
