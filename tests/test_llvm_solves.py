"""What `llvm` solves: long, failing, threaded, in any dtype, with look-ups, with everything that can be saved."""

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ensembles import CLOSE, LLVM, STOCK, ensemble, expected, oscillator, pulled, run, weights
from helpers import assert_close, finite_difference
from jaxtyping import Array, PyTree

from gradsolve_backend import GradSolveAdjoint, explain
from gradsolve_backend.kernels import primitives
from gradsolve_backend.kernels.llvm_loops import CHECKPOINTS, ROWS

# ---- long solves -------------------------------------------------------------------------------------


def sway(t: Any, y: Array, rate: Array) -> Array:
    return rate * jnp.cos(5 * y) - y * jnp.sin(t)


def walk(adjoint: Any, y0: Array, rate: Array, dt: Array, max_steps: int | None = 20_000) -> tuple[Array, Array]:
    """Two values on the way, that at the end, and the number of steps; these are of constant size."""
    saveat = diffrax.SaveAt(ts=jnp.array([0.37, 0.8]), t1=True)
    sol = diffrax.diffeqsolve(
        diffrax.ODETerm(sway), diffrax.Euler(), 0.0, 1.0, dt, y0, rate,
        saveat=saveat, adjoint=adjoint, max_steps=max_steps, throw=False,
    )  # fmt: skip
    assert sol.ys is not None
    return sol.ys, sol.stats["num_steps"]


@functools.cache
def stock_walk() -> Callable:
    """Values, Jacobian over initial value and rate, number of steps."""
    whole = lambda *x: (lambda out: (out[0], out))(walk(STOCK, *x))
    return jax.jit(jax.jacrev(whole, argnums=(0, 1), has_aux=True))


AFTER = ROWS + 128 * CHECKPOINTS  # steps after which checkpoints of a full block are thinned
# Lanes of three blocks, if a vector has four elements: within the rows, beyond them, and a part of a block.
STEPS = [100, 127, 128, 128, 129, AFTER, AFTER + 1, 9000, 19_999]


@pytest.mark.parametrize("steps", [STEPS, [12_345]], ids=["ensemble", "one"])
def test_long_solves(steps):
    """Beyond the rows of a record, and beyond its checkpoints; both modes."""
    dts = 1 / jnp.array(steps, jnp.float64)
    y0s, rates = ensemble(len(steps), 7)[0][:, 0], 1 + ensemble(len(steps), 7)[1]
    cts = weights(len(steps), 3)
    found = [stock_walk()(*x) for x in zip(y0s, rates, dts, strict=True)]
    (by_y0, by_rate), (values, counts) = jax.tree.map(lambda *x: np.stack(x), *found)
    assert list(counts) == steps

    def both(y0: Array, rate: Array, dt: Array, ct: Array) -> Any:
        value, pull, count = jax.vjp(lambda *x: walk(LLVM, *x, dt), y0, rate, has_aux=True)
        ones = (jnp.ones(()), jnp.ones(()))
        return value, count, pull(ct), jax.jvp(lambda *x: walk(LLVM, *x, dt)[0], (y0, rate), ones)[1]

    value, count, slopes, push = jax.jit(jax.vmap(both) if len(steps) > 1 else _alone(both))(y0s, rates, dts, cts)
    np.testing.assert_array_equal(count, counts)
    assert_close(value, values, **CLOSE)
    assert_close(slopes, (np.sum(cts * by_y0, axis=1), np.sum(cts * by_rate, axis=1)), **CLOSE)
    assert_close(push, by_y0 + by_rate, **CLOSE)


def _alone(function: Callable) -> Callable:
    """A function of one lane, called with an axis of size one that it does not see."""
    return lambda *x: jax.tree.map(lambda y: y[None], function(*(y[0] for y in x)))


def test_no_bound_on_steps():
    """Reverse mode without `max_steps`: as with a bound."""
    steps = [100, 129, 5000]
    dts, (y0s, rates) = 1 / jnp.array(steps, jnp.float64), ensemble(3, 8)

    def slopes(adjoint: Any, max_steps: int | None) -> Any:
        one = lambda y0, rate, dt: jnp.sum(walk(adjoint, y0, rate, dt, max_steps)[0])
        return jax.jit(jax.vmap(jax.grad(one, argnums=(0, 1))))(y0s[:, 0], rates, dts)

    found = slopes(LLVM, None)
    assert_close(found, slopes(LLVM, 20_000), rtol=0)
    wanted = [stock_walk()(*x)[0] for x in zip(y0s[:, 0], rates, dts, strict=True)]
    assert_close(found, tuple(np.sum(np.stack(j), axis=1) for j in zip(*wanted, strict=True)), **CLOSE)


# ---- lanes that fail ---------------------------------------------------------------------------------


def test_failing_lanes_do_not_disturb_others():
    """One has a field that is NaN, one needs more steps than `max_steps`: bit for bit as without them."""
    y0s, rates = ensemble(7, 9)
    failing, drifts = np.array([1, 5]), jnp.linspace(-0.5, 0.5, 7)
    bad, cts = rates.at[jnp.array([1, 5])].set(jnp.array([jnp.nan, 1e7])), weights(7, 2)

    @jax.jit
    def found(rates: Array) -> Any:
        end, pull, counts = jax.vjp(jax.vmap(functools.partial(run, LLVM)), y0s, rates, drifts, has_aux=True)
        tangents = jnp.ones((7, 2)), jnp.ones(7), jnp.ones(7)
        push = jax.jvp(lambda *x: jax.vmap(functools.partial(run, LLVM))(*x)[0], (y0s, rates, drifts), tangents)[1]
        return end, counts, push, *pull(cts)

    with_them, without = found(bad), found(rates)
    others = np.delete(np.arange(7), failing)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[others], y[others]), with_them, without)
    jacobians, (end, counts) = expected(y0s, bad, drifts)
    np.testing.assert_array_equal(with_them[1], counts)
    assert np.all(counts[failing, 0] != 0) and np.all(counts[others, 0] == 0)
    assert_close(with_them[3][others], pulled(cts, jacobians)[0][others], **CLOSE)


def test_ended_lanes_where_the_field_is_infinite():
    """Lanes of one block end after unlike numbers of steps, at a time that no step begins at."""
    counts = np.array([4, 8, 16, 32])
    term = diffrax.ODETerm(lambda t, y, rate: -rate * y / (1 - t))

    def end(y0: Array, rate: Array, dt: Array) -> Array:
        sol = diffrax.diffeqsolve(term, diffrax.Euler(), 0.0, 1.0, dt, y0, rate, adjoint=LLVM, max_steps=64)
        assert sol.ys is not None
        return sol.ys[0]

    slopes = jax.jit(jax.vmap(jax.grad(end, argnums=(0, 1)), in_axes=(0, None, 0)))
    found = slopes(jnp.ones(4), jnp.array(1.5), 1 / jnp.asarray(counts, jnp.float64))
    parts = [1 / (n - np.arange(n)) for n in counts]  # the step size over the time that is left
    ends = np.array([np.prod(1 - 1.5 * part) for part in parts])
    by_rate = ends * np.array([np.sum(-part / (1 - 1.5 * part)) for part in parts])
    assert_close(found, (ends, by_rate), rtol=1e-10)


# ---- threads, and memory that nobody wrote -----------------------------------------------------------

PROGRAM = """
import os, sys
if sys.argv[2] == "one":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax, numpy as np
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp
from ensembles import LLVM, ensemble, run, weights

y0s, rates = ensemble(1001)
batch = lambda *x: jax.vmap(lambda y0, rate, drift: run(LLVM, y0, rate, drift)[0], in_axes=(0, 0, None))(*x)

@jax.jit
def found(y0s, rates, drift, ct):
    end, pull = jax.vjp(batch, y0s, rates, drift)
    return end, *pull(ct), jax.jvp(lambda drift: batch(y0s, rates, drift), (drift,), (drift,))[1]

np.savez(sys.argv[1], *map(np.asarray, found(y0s, rates, jnp.array(0.3), weights(1001, 2))))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a process cannot be bound to a core")
def test_results_do_not_depend_on_threads(tmp_path):
    """Bit for bit, on all cores and on one; there with memory that comes filled with large numbers (glibc)."""
    here, package = Path(__file__).parent, os.environ.get("PYTHONPATH", "")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(here), package)))}
    started = []
    for cores in ("all", "one"):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / cores), cores]
        filled = {"MALLOC_PERTURB_": "128"} if cores == "one" else {}
        started.append(subprocess.Popen(command, env=environment | filled, stderr=subprocess.PIPE, text=True))
    for process in started:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    on_all, on_one = (np.load(tmp_path / f"{cores}.npz") for cores in ("all", "one"))
    assert len(on_all.files) == 5
    for name in on_all.files:
        assert np.all(np.isfinite(on_all[name])) and on_all[name].tobytes() == on_one[name].tobytes()


def test_memory_of_the_record_is_what_the_route_says():
    """Rows and checkpoints of all lanes, to the byte; they do not grow with `max_steps`."""
    y0s, rates = ensemble(5)
    sizes = set()
    for max_steps in (256, 100_000):
        slope = jax.grad(lambda y0, rate, n=max_steps: jnp.sum(run(LLVM, y0, rate, jnp.array(0.3), max_steps=n)[0]))
        [route] = explain(jax.vmap(slope), y0s, rates)
        jaxpr = jax.make_jaxpr(jax.vmap(slope))(y0s, rates)
        [call] = [e.params["call"] for e in _equations(jaxpr.jaxpr) if e.primitive is primitives.forward_p]
        buffers = [a for a, _ in call.recorded][1:]
        held = sum(a.size * a.dtype.itemsize for a in buffers)
        assert route.backend == "llvm" and route.lanes * route.record_bytes == held
        sizes.add(route.record_bytes)
    assert len(sizes) == 1


def test_memory_that_is_asked_for():
    """The record keeps within it; what does not fit is run again, to the last bit as it ran."""
    y0s, rates = ensemble(5, 13)

    def slopes(memory: int | None) -> Callable:
        adjoint = GradSolveAdjoint(backend="llvm", memory=memory)
        return jax.jit(jax.vmap(jax.grad(lambda *x: jnp.sum(run(adjoint, *x, jnp.array(0.3))[0]), argnums=(0, 1))))

    wanted = slopes(None)(y0s, rates)
    with pytest.raises(ValueError, match="at least [0-9]+") as told:
        slopes(64)(y0s, rates)
    for memory in (int(str(told.value).partition("at least ")[2].partition(",")[0]), 100_000):
        [route] = explain(slopes(memory), y0s, rates)
        assert 0.9 * memory < route.record_bytes <= memory
        assert_close(slopes(memory)(y0s, rates), wanted, rtol=0)


def _equations(jaxpr: Any) -> list[Any]:
    inner = [p.jaxpr for e in jaxpr.eqns for p in e.params.values() if hasattr(p, "jaxpr")]
    return [*jaxpr.eqns, *(e for j in inner for e in _equations(j))]


# ---- dtypes and look-ups -----------------------------------------------------------------------------


def heun(field: Callable, y0: PyTree[Array], args: Any, steps: int = 32) -> PyTree[Array]:
    """Heun's method from 0 to 2, written out."""
    dt = 2.0 / steps
    add = lambda y, h, slope: jax.tree.map(lambda a, b: a + h * b, y, slope)

    def step(y: PyTree[Array], t: Array) -> tuple[PyTree[Array], None]:
        first = field(t, y, args)
        return add(add(y, dt / 2, first), dt / 2, field(t + dt, add(y, dt, first), args)), None

    return jax.lax.scan(step, y0, dt * jnp.arange(float(steps)))[0]


def constant(
    field: Callable, y0: PyTree[Array], args: Any, time: Callable[[float], Any] = jnp.float64
) -> PyTree[Array]:
    """The same by `llvm`."""
    t0, t1, dt0 = (time(x) for x in (0.0, 2.0, 2.0 / 32))
    term = diffrax.ODETerm(field)
    sol = diffrax.diffeqsolve(term, diffrax.Heun(), t0, t1, dt0, y0, args, adjoint=LLVM, max_steps=64)
    return jax.tree.map(lambda y: y[0], sol.ys)


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float32", "float64")], ids=["single", "mixed"])
def test_dtypes_of_state_and_time(dtypes):
    """All of float32, or a state of both with times of float32. (With wider times Diffrax widens the state.)"""
    y0s, rates = ensemble(19, 10)
    inputs, cts = (tuple(y0s.T), (rates, jnp.linspace(-0.5, 0.5, 19))), tuple(weights(2, 19))
    single = jax.tree.map(lambda x: x.astype(jnp.float32), inputs[1])
    given = lambda pair: tuple(x.astype(d) for x, d in zip(pair, dtypes, strict=True))

    def field(t: Array, y: tuple[Array, Array], args: Any) -> tuple[Array, ...]:
        assert (t.dtype, *(x.dtype for x in y)) == ("float32", *dtypes)
        return given(oscillator(t, jnp.stack([x.astype(jnp.float32) for x in y]), args))

    exact = lambda t, y, args: tuple(oscillator(t, jnp.stack(y), args))
    pull = lambda solve: jax.jit(jax.vmap(lambda y0, args, ct: jax.vjp(solve, y0, args)[1](ct)))
    found = pull(lambda y0, args: constant(field, y0, args, jnp.float32))(given(inputs[0]), single, given(cts))
    assert jax.tree.map(lambda x: x.dtype, found) == (dtypes, ("float32", "float32"))
    wanted = pull(lambda y0, args: heun(exact, y0, args))(*inputs, cts)
    assert_close(jax.tree.map(lambda x: x.astype(jnp.float64), found), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
def test_tables(shared):
    """Tabulated input that all lanes read, or each its own, and the slopes of its entries."""
    grid = jnp.linspace(0.0, 3.0, 16)
    field = lambda t, y, data: jnp.stack([y[1] + jnp.interp(t + 0.1 * y[0], grid, data), -y[0] * y[1]])
    y0s = ensemble(6, 11)[0]
    data = jnp.sin(3 * grid) if shared else jnp.outer(jnp.arange(6.0), jnp.sin(3 * grid))
    axes, cts = (0, None if shared else 0), weights(6, 2)

    def found(solve: Callable) -> Any:
        batch = lambda *x: jax.vmap(functools.partial(solve, field), in_axes=axes)(*x)
        value, pull = jax.vjp(batch, y0s, data)
        return value, pull(cts), jax.jvp(batch, (y0s, data), (y0s, jnp.cos(data)))[1]

    assert_close(jax.jit(found, static_argnums=0)(constant), jax.jit(found, static_argnums=0)(heun), **CLOSE)


def test_derivative_without_machine_code():
    """That of `digamma`, in reverse mode by `xla`; forward mode remains."""
    field = lambda t, y, rate: rate * jax.scipy.special.digamma(y)
    end = lambda rate: constant(field, jnp.array(2.0), rate)
    [route] = explain(jax.grad(end), jnp.array(0.7))
    assert route.backend == "xla" and "polygamma" in route.why and dict(route.others)["llvm"] == route.why
    [route] = explain(end, jnp.array(0.7))
    assert route.backend == "llvm"
    wanted = finite_difference(lambda rate: end(jnp.array(rate)), 0.7, 1e-3)
    for derive in (jax.grad, jax.jacfwd):
        assert_close(jax.jit(derive(end))(jnp.array(0.7)), wanted, rtol=1e-9)


# ---- what is saved -----------------------------------------------------------------------------------


def everything(adjoint: Any, y0: Array, rate: Array, drift: Array, t1: Array) -> tuple[Array, Array]:
    """Values at given times, of every second step and of dense output; the latter two weighted by their slot."""
    fn = lambda t, y, args: args[0] * jnp.sin(y[0])
    times = diffrax.SubSaveAt(t0=True, ts=jnp.array([0.21, 0.22, 0.9]), fn=fn)
    sol = diffrax.diffeqsolve(
        diffrax.ODETerm(oscillator), diffrax.Heun(), 0.0, t1, 0.05, y0, (rate, drift),
        saveat=diffrax.SaveAt(subs={"times": times, "steps": diffrax.SubSaveAt(steps=2, t1=True)}, dense=True),
        stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-3), adjoint=adjoint, max_steps=64, throw=False,
    )  # fmt: skip
    assert sol.ys is not None and sol.ts is not None
    steps = jnp.where(jnp.isfinite(sol.ys["steps"]), sol.ys["steps"], 0.0)
    ends = jnp.where(jnp.isfinite(sol.ts["steps"]), sol.ts["steps"], 0.0)
    slots = jnp.linspace(1.0, 2.0, len(steps))
    values = jnp.concatenate([sol.ys["times"], slots @ steps, (slots @ ends)[None], sol.evaluate(jnp.array(0.37))])
    return values, sol.stats["num_accepted_steps"]


def pulled_by_stock(ct: Array, *inputs: Array) -> tuple[Array, Any]:
    """Number of steps and cotangents of all inputs."""
    _, pull, steps = jax.vjp(functools.partial(everything, STOCK), *inputs, has_aux=True)
    return steps, pull(ct)


STOCK_EVERYTHING = jax.jit(pulled_by_stock)


@pytest.mark.parametrize("count", [3, 4], ids=["still", "moving"])
def test_all_that_is_saved(count):
    """Sub-saves, steps, dense output, in both modes; without and with the slope over the end of the time interval."""
    y0s, rates = ensemble(3, 12)
    inputs = (y0s, rates, jnp.linspace(-0.3, 0.3, 3), jnp.linspace(1.2, 1.6, 3))
    cts = weights(3, 9)

    def both(ct: Array, *inputs: Array) -> tuple[Array, Any, Array]:
        function = lambda *x: everything(LLVM, *x, *inputs[count:])
        _, pull, steps = jax.vjp(function, *inputs[:count], has_aux=True)
        push = jax.jvp(lambda *x: function(*x)[0], inputs[:count], jax.tree.map(jnp.ones_like, inputs[:count]))[1]
        return steps, pull(ct), ct @ push

    steps, slopes, pushed = jax.jit(jax.vmap(both))(cts, *inputs)
    stock = [STOCK_EVERYTHING(*x) for x in zip(cts, *inputs, strict=True)]
    counts, wanted = jax.tree.map(lambda *x: np.stack(x), *stock)
    np.testing.assert_array_equal(steps, counts)
    assert_close(slopes, wanted[:count], **CLOSE)
    assert_close(pushed, sum(x.reshape(3, -1).sum(1) for x in wanted[:count]), **CLOSE)
