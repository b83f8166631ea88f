"""Events: times and states at them, several at once, boolean conditions, rejected steps."""

from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
from helpers import MODES, assert_close, decay, solve
from jaxtyping import Array

NEWTON = optx.Newton(1e-10, 1e-10)
TIGHTER = diffrax.PIDController(rtol=1e-11, atol=1e-11)


def below_threshold(t: Any, y: Array, args: Any, **kwargs: Any) -> Array:
    return y - 0.3


def time_and_state(k: Array, adjoint: diffrax.AbstractAdjoint) -> Array:
    """When y' = -k y, y(0) = 1 falls to 0.3, at most 2, and y then."""
    event = diffrax.Event(below_threshold, NEWTON)
    how = {"t1": 2.0, "event": event, "max_steps": 512, "stepsize_controller": TIGHTER, "adjoint": adjoint}
    sol = solve(decay, jnp.array(1.0), k, **how)
    assert sol.ts is not None and sol.ys is not None
    return jnp.stack([sol.ts[0], sol.ys[0]])


@pytest.mark.parametrize("mode", MODES)
def test_event_time_and_state_in_a_batch(adjoint, mode):
    """The time has its slope, the state at it has slope 0, and a member without event is plain (diffrax#451)."""
    ks = jnp.array([3.0, 1.5, 0.1])
    both = lambda k: (time_and_state(k, adjoint), mode(time_and_state)(k, adjoint))
    values, slopes = jax.jit(jax.vmap(both))(ks)
    at = np.log(1 / 0.3) / np.asarray(ks)
    assert_close(values, np.array([[at[0], 0.3], [at[1], 0.3], [2.0, np.exp(-0.2)]]), rtol=1e-8)
    wanted = np.array([[-at[0] / 3, 0.0], [-at[1] / 1.5, 0.0], [0.0, -2 * np.exp(-0.2)]])
    assert_close(slopes, wanted, rtol=1e-7, atol=1e-8)


def test_gradient_of_a_batch_of_events(adjoint):
    """`grad` of `vmap`, the order that once failed outright (diffrax#568)."""
    ks = jnp.array([3.0, 1.5])
    total = lambda ks: jnp.sum(jax.vmap(lambda k: time_and_state(k, adjoint))(ks))
    assert_close(jax.jit(jax.grad(total))(ks), -np.log(1 / 0.3) / np.asarray(ks) ** 2, rtol=1e-7)


def crossings(thresholds: list[float], adjoint: diffrax.AbstractAdjoint, counts: list[int]) -> diffrax.Solution:
    """One Euler step of y' = 1 across all `thresholds` on time; `counts` grows at each trace of a condition."""

    def condition(threshold: float) -> Any:
        def cond_fn(t: Any, y: Array, args: Any, **kwargs: Any) -> Array:
            counts.append(1)
            return t - threshold

        return cond_fn

    event = diffrax.Event([condition(threshold) for threshold in thresholds], NEWTON)
    constant = diffrax.ConstantStepSize()
    how = {"t1": 4.0, "dt0": 2.0, "solver": diffrax.Euler(), "stepsize_controller": constant, "event": event}
    return solve(lambda t, y, args: jnp.ones_like(y), jnp.array(0.0), adjoint=adjoint, max_steps=8, **how)


@pytest.mark.parametrize("thresholds", [[1.0, 0.5], [0.5, 1.0]], ids=["late first", "early first"])
def test_first_listed_of_two_events_in_one_step_wins(adjoint, thresholds):
    """Two conditions change sign in one step: the first listed is the event (diffrax#639)."""
    sol = crossings(thresholds, adjoint, [])
    assert sol.ts is not None and sol.event_mask is not None
    assert_close(sol.ts[0], np.float64(thresholds[0]))
    assert [bool(mask) for mask in sol.event_mask] == [True, False]


def test_many_conditions_are_traced_in_proportion(adjoint):
    """Eight conditions cost four times the traces of two (diffrax#637)."""
    two: list[int] = []
    eight: list[int] = []
    crossings([1.0, 0.5], adjoint, two)
    sol = crossings([0.2 * i + 0.1 for i in range(8)], adjoint, eight)
    assert sum(bool(mask) for mask in sol.event_mask or []) == 1
    assert len(eight) <= 4 * len(two)


def test_steady_state_from_the_start(adjoint):
    """A solve that is steady at t0 returns y0 (diffrax#720)."""
    event = diffrax.Event(diffrax.steady_state_event(), NEWTON)
    how = {"event": event, "adjoint": adjoint, "solver": diffrax.Kvaerno5(), "t1": 100.0, "max_steps": 256}
    sol = solve(lambda t, y, args: jnp.zeros_like(y), jnp.array(10.0), **how)
    assert_close(sol.ys, np.array([10.0]))


@pytest.mark.parametrize("mode", MODES)
def test_steady_state_of_an_implicit_solve(adjoint, mode):
    """y' = -k (y - a) comes to rest at a, whatever k is."""

    def rest(params: Array) -> Array:
        event = diffrax.Event(diffrax.steady_state_event(rtol=1e-8, atol=1e-8), NEWTON)
        controller = diffrax.PIDController(rtol=1e-6, atol=1e-8)
        how = {"event": event, "adjoint": adjoint, "solver": diffrax.Kvaerno5(), "t1": 1e3, "max_steps": 256}
        field = lambda t, y, p: -p[0] * (y - p[1])
        sol = solve(field, jnp.array(10.0), params, stepsize_controller=controller, **how)
        assert sol.ys is not None
        return sol.ys[0]

    value, slope = jax.jit(lambda p: (rest(p), mode(rest)(p)))(jnp.array([0.9, 3.0]))
    assert_close(value, np.float64(3.0), atol=1e-6)
    assert_close(slope, np.array([0.0, 1.0]), atol=1e-5)


def stopped_by_flag(span: Array, threshold: Array, adjoint: diffrax.AbstractAdjoint) -> Array:
    """End of the first of eight equal steps at which time is beyond the threshold."""
    event = diffrax.Event(lambda t, y, args, **kwargs: t > threshold)
    how = {"event": event, "solver": diffrax.Heun(), "stepsize_controller": diffrax.ConstantStepSize()}
    sol = solve(decay, jnp.array(1.0), 0.5, t0=span[0], t1=span[1], dt0=0.125, max_steps=16, adjoint=adjoint, **how)
    assert sol.ts is not None
    return sol.ts[0]


@pytest.mark.parametrize("mode", MODES)
def test_boolean_event_at_the_start_and_later(adjoint, mode):
    """A condition that holds at t0 stops there; later the time moves with the steps, not with the threshold."""
    stopped = lambda span, threshold: stopped_by_flag(span, threshold, adjoint)
    both = lambda *xs: (stopped(*xs), mode(stopped, (0, 1))(*xs))
    spans = jnp.array([[0.0, 1.0], [0.0, 1.0]])
    values, (by_span, by_threshold) = jax.jit(jax.vmap(both))(spans, jnp.array([-1.0, 0.3]))
    assert_close(values, np.array([0.0, 0.375]))
    assert_close(by_span, np.array([[1.0, 0.0], [0.625, 0.375]]))
    assert_close(by_threshold, np.zeros(2))


def test_rejected_step_does_not_fire_an_event(adjoint):
    """Only a rejected trial goes below -0.5: conditions judge accepted states (diffrax#464)."""
    event = diffrax.Event(lambda t, y, args, **kwargs: y < -0.5)
    sol = solve(decay, jnp.array(1.0), 50.0, dt0=1.0, event=event, adjoint=adjoint)
    assert sol.stats["num_rejected_steps"] > 0
    assert sol.result == diffrax.RESULTS.successful
    assert not bool(sol.event_mask)
    assert_close(sol.ts, np.array([1.0]))
