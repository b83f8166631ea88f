"""The sweeps of `xla`: both forms of lanes, short and long solves, what is reserved, what is read."""

from collections.abc import Callable
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close
from jaxtyping import Array

from gradsolve_backend import GradSolveAdjoint, explain
from gradsolve_backend.kernels import forms, loops, primitives, replay
from gradsolve_backend.kernels.llvm import LlvmBackend
from gradsolve_backend.kernels.xla import XlaBackend

CONTROLLER = diffrax.PIDController(rtol=1e-6, atol=1e-6)
RATES = jnp.array([20.0, 22.0, 25.0])
XLA, STOCK = GradSolveAdjoint(backend="xla"), diffrax.RecursiveCheckpointAdjoint()


def lorenz(t: Any, y: Array, rate: Array) -> Array:
    return jnp.stack([10.0 * (y[1] - y[0]), rate * y[0] - y[1] - y[0] * y[2], y[0] * y[1] - 8.0 / 3.0 * y[2]])


def loss(adjoint: Any, t1: float = 0.5, max_steps: int | None = 512, **how: Any) -> Callable[[Array, Array], Array]:
    """The sum of saved values of a Lorenz solve, as a function of rate and initial value."""
    how = {"saveat": diffrax.SaveAt(ts=jnp.linspace(0.1, t1, 4), steps=2)} | how

    def of(rate: Array, y0: Array) -> Array:
        sol = diffrax.diffeqsolve(
            diffrax.ODETerm(lorenz), diffrax.Tsit5(), 0.0, t1, 0.01, y0, rate,
            stepsize_controller=CONTROLLER, adjoint=adjoint, max_steps=max_steps, **how,
        )  # fmt: skip
        assert sol.ys is not None
        return jnp.sum(jnp.where(jnp.isfinite(sol.ys), jnp.sin(sol.ys), 0.0))

    return of


def gradients(adjoint: Any, **how: Any) -> tuple[Array, Array]:
    """Gradients of an ensemble with one shared initial value."""
    total = lambda rates, y0: jnp.sum(jax.vmap(loss(adjoint, **how), in_axes=(0, None))(rates, y0))
    return jax.jit(jax.grad(total, argnums=(0, 1)))(RATES, jnp.array([1.0, 0.0, 0.0]))


@pytest.fixture(params=["scalar", "array"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Scalar lanes, which a system of this size takes, or array lanes, by force."""
    if request.param == "array":
        monkeypatch.setattr(forms, "STEP_EQUATIONS", 0)
    jax.clear_caches()
    return request.param


@pytest.mark.smoke
@pytest.mark.parametrize("rows", [128, 8], ids=["short", "long"])
def test_gradient_equals_stock(form, rows, monkeypatch):
    """Whether all rows were recorded, or a solve longer than the record is run again from checkpoints."""
    monkeypatch.setattr("gradsolve_backend.kernels.solve.ROWS", rows)
    monkeypatch.setattr("gradsolve_backend.kernels.solve.math.isqrt", lambda n: 1)
    assert_close(gradients(XLA), gradients(STOCK), rtol=1e-9)


def test_tangent_equals_stock(form):
    """Forward mode through the same outputs; the terms are of size one and nearly cancel."""
    push = lambda adjoint: jax.jvp(lambda r: loss(adjoint)(r, jnp.ones(3)), (RATES[0],), (jnp.array(1.0),))
    assert_close(push(XLA), push(diffrax.ForwardMode()), rtol=1e-9, atol=1e-9)


def test_nothing_reserved_is_read_before_it_is_written(form, monkeypatch):
    """Rows, checkpoints and output slots that hold NaN from the start change no gradient."""
    wanted = gradients(XLA)
    poisoned = lambda make: lambda *x: jax.tree.map(_poison, make(*x))
    monkeypatch.setattr(loops, "reserve", poisoned(loops.reserve))
    monkeypatch.setattr(replay, "reserve", poisoned(replay.reserve))
    monkeypatch.setattr(loops, "buffers", poisoned(loops.buffers))
    jax.clear_caches()
    assert_close(gradients(XLA), wanted, rtol=0)


def _poison(x: Array) -> Array:
    return jnp.full_like(x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.full_like(x, 1)


@pytest.mark.parametrize("max_steps", [256, 4096, 100_000])
def test_memory_of_the_record_is_what_the_route_says(max_steps):
    """The arrays between forward and reverse pass and the checkpoints of the latter, to the byte."""
    how: dict[str, Any] = {"max_steps": max_steps, "saveat": diffrax.SaveAt(t1=True)}
    slope = jax.grad(loss(XLA, **how))
    [route] = explain(jax.vmap(slope, in_axes=(0, None)), RATES, jnp.ones(3))
    jaxpr = jax.make_jaxpr(jax.vmap(slope, in_axes=(0, None)))(RATES, jnp.ones(3))
    [call] = [e.params["call"] for e in _equations(jaxpr.jaxpr) if e.primitive is primitives.forward_p]
    record = [a for a, _ in loops.record_outcome(call)[1:]]
    marks = [(call.solve.checkpoints, *call.sizes, *a.shape, a.dtype) for a in loops.checkpoint_avals(call.solve)]
    held = sum(a.size * a.dtype.itemsize for a in record)
    held += sum(int(jnp.prod(jnp.array(shape))) * dtype.itemsize for *shape, dtype in marks)
    assert route.lanes * route.record_bytes == held
    assert held < 3 * 8 * 20 * (3 * max_steps**0.5 + 256)  # a lane's row or checkpoint has fewer than 20 numbers


def _equations(jaxpr: Any) -> list[Any]:
    inner = [p.jaxpr for e in jaxpr.eqns for p in e.params.values() if hasattr(p, "jaxpr")]
    return [*jaxpr.eqns, *(e for j in inner for e in _equations(j))]


@pytest.mark.parametrize("name", [None, "xla"])
def test_what_a_backend_refuses_takes_the_loop_of_diffrax(name, monkeypatch):
    """Asked for or not, with the reason in the route and the gradient of stock."""
    for backend in (XlaBackend, LlvmBackend):
        monkeypatch.setattr(backend, "supports", lambda self, problem: ("it is out of order",))
    jax.clear_caches()
    slopes = lambda adjoint: jax.grad(loss(adjoint, saveat=diffrax.SaveAt(t1=True)))
    slope = slopes(GradSolveAdjoint(backend=name))
    [route] = explain(slope, RATES[0], jnp.ones(3))
    assert route.backend == "stock" and "it is out of order" in route.why
    jax.clear_caches()
    wanted = slopes(STOCK)(RATES[0], jnp.ones(3))
    assert_close(slope(RATES[0], jnp.ones(3)), wanted, rtol=1e-12)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
def test_implicit_ensemble_of_unlike_step_counts(shared):
    """Lanes that rejected a step or have ended give nothing to the gradient of what all lanes share."""
    field = diffrax.ODETerm(lambda t, y, a: -a * (y + 0.1 * y**3))
    y0s = jnp.array([[0.5, 1.0], [0.6, 1.1], [0.3, 0.01]])
    rates = jnp.array([1.0, 20.0]) if shared else jnp.array([[1.0, 20.0], [2.0, 9.0], [0.1, 0.2]])

    def total(rates: Array, adjoint: Any) -> Array:
        def one(y0: Array, rate: Array) -> Array:
            how = {"stepsize_controller": CONTROLLER, "adjoint": adjoint, "max_steps": 256}
            sol = diffrax.diffeqsolve(field, diffrax.Kvaerno3(), 0.0, 1.0, 0.05, y0, rate, **how)
            assert sol.ys is not None
            return jnp.sum(sol.ys)

        return jnp.sum(jax.vmap(one, in_axes=(0, None if shared else 0))(y0s, rates))

    slope = lambda adjoint: jax.jit(jax.grad(total), static_argnums=1)(rates, adjoint)
    assert_close(slope(XLA), slope(STOCK), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("lanes", [0, 1, 7])
def test_odd_numbers_of_lanes(form, lanes):
    """None, one, and a prime number of them. Of none, Equinox's error check cannot take the maximum."""
    slope = jax.grad(loss(XLA, saveat=diffrax.SaveAt(t1=True), throw=lanes > 0))
    rates, y0 = jnp.linspace(20.0, 25.0, lanes), jnp.array([1.0, 0.0, 0.0])
    found = jax.vmap(slope, in_axes=(0, None))(rates, y0)
    wanted = [jax.grad(loss(STOCK, saveat=diffrax.SaveAt(t1=True)))(r, y0) for r in rates]
    assert found.shape == (lanes,)
    assert_close(found, jnp.array(wanted), rtol=1e-9)


@pytest.mark.parametrize("name", ["xla", "llvm"])
def test_ended_lanes_give_nothing_to_the_end_of_time(name):
    """The time of the last step is `t1`, however many steps other lanes go on to take."""

    def last(t1: Array, dt: Array) -> Array:
        how = {"adjoint": GradSolveAdjoint(backend=name), "max_steps": 64}
        sol = diffrax.diffeqsolve(diffrax.ODETerm(lambda t, y, _: -y), diffrax.Euler(), 0.0, t1, dt, jnp.ones(1), **how)
        assert sol.ts is not None
        return sol.ts[0]

    slopes = jax.vmap(jax.grad(last, argnums=(0, 1)))(jnp.ones(3), jnp.array([0.5, 0.125, 0.25]))
    assert_close(slopes, (jnp.ones(3), jnp.zeros(3)), rtol=0)


@pytest.mark.parametrize("name", ["xla", "llvm"])
def test_a_lane_that_ended_where_the_field_is_not_finite(name):
    """It stays there while others go on; what they give to a parameter of all is finite (stock's is NaN)."""

    def end(rate: Array, last: Array, adjoint: Any) -> Array:
        field = lambda t, y, _: rate / jnp.sqrt(last - t)
        sol = diffrax.diffeqsolve(
            diffrax.ODETerm(field), diffrax.Midpoint(), 0.0, last, 0.25, jnp.zeros(()), adjoint=adjoint
        )
        assert sol.ys is not None
        return sol.ys[0]

    ends, rate = jnp.array([1.0, 2.0, 1.5]), jnp.array(1.3)
    wanted = sum(jax.grad(end)(rate, last, STOCK) for last in ends)
    both = lambda rate: jnp.sum(jax.vmap(lambda last: end(rate, last, GradSolveAdjoint(backend=name)))(ends))
    assert_close(jax.grad(both)(rate), wanted, rtol=1e-12)


def test_record_needs_a_bound_on_steps():
    """Reverse mode says what to pass; the backend `llvm` needs none."""
    with pytest.raises(ValueError, match="max_steps"):
        jax.grad(loss(XLA, max_steps=None, saveat=diffrax.SaveAt(t1=True)))(RATES[0], jnp.ones(3))


def test_forward_pass_keeps_no_record():
    """Undifferentiated, the memory of a solve does not grow with `max_steps`."""
    size = lambda n: _temporary(loss(XLA, max_steps=n, saveat=diffrax.SaveAt(t1=True)))
    assert size(2**19) == size(16)


def _temporary(function: Callable) -> int:
    compiled = jax.jit(jax.vmap(function, in_axes=(0, None))).lower(RATES, jnp.ones(3)).compile()
    return compiled.memory_analysis().temp_size_in_bytes
