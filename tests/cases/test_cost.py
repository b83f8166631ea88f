"""What solves cost: memory of the record, traces of the right-hand side, compilations, entries of the compile cache."""

import gc
import logging
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import STOCK, assert_close, decay, final, solve
from jax.experimental.compilation_cache import compilation_cache
from jaxtyping import Array

MEMBERS, STATES, MAX_STEPS = 100_000, 3, 4096
# The carry is kept every K steps and one segment of K rows is recomputed, with K about sqrt(max_steps). A row holds
# the state, its time and its step; a carry the state, its slope, times, the controller's memory and counts.
SEGMENT = math.isqrt(MAX_STEPS)
ROW_NUMBERS, CARRY_NUMBERS = STATES + 2, 2 * STATES + 8
RECORD_BYTES = SEGMENT * (ROW_NUMBERS + CARRY_NUMBERS) * MEMBERS * 8


def temporary_bytes(function: Callable[..., Any], *structs: jax.ShapeDtypeStruct) -> int:
    memory = jax.jit(function).lower(*structs).compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def ensemble(y0s: Array, ks: Array, adjoint: diffrax.AbstractAdjoint) -> Array:
    end = lambda y0, k: final(decay, y0, k, max_steps=MAX_STEPS, adjoint=adjoint)
    return jnp.sum(jax.vmap(end)(y0s, ks))


LANES = (jax.ShapeDtypeStruct((MEMBERS, STATES), float), jax.ShapeDtypeStruct((MEMBERS,), float))


def test_undifferentiated_ensemble_keeps_no_record(adjoint):
    """Its memory is some tens of states for each member, whatever max_steps is (diffrax#685, #564)."""
    taken = temporary_bytes(lambda y0s, ks: ensemble(y0s, ks, adjoint), *LANES)
    assert taken < 60 * MEMBERS * STATES * 8


def test_memory_of_a_gradient_is_bounded(adjoint):
    """Record and as much again to work in: far below max_steps * members * states, 9.8 GB (diffrax#574, #668)."""
    gradient = jax.grad(lambda y0s, ks: ensemble(y0s, ks, adjoint), argnums=1)
    assert temporary_bytes(gradient, *LANES) < 2 * RECORD_BYTES


def mass_action(t: Any, y: Array, rates: Array) -> Array:
    flow = rates * y * jnp.roll(y, 1)
    return jnp.roll(flow, 1) - flow


def traces(which: diffrax.AbstractAdjoint, field: Callable[..., Array], y0: Array, args: Array, **how: Any) -> int:
    """How often `field` is traced by the forward solve and its gradient, lowering included."""
    calls = []

    def counted(t: Any, y: Array, args: Array) -> Array:
        calls.append(1)
        return field(t, y, args)

    def loss(args: Array) -> Array:
        sol = solve(counted, y0, args, adjoint=which, max_steps=256, **how)
        assert sol.ys is not None
        return jnp.sum(sol.ys)

    jax.jit(jax.value_and_grad(loss)).lower(args)
    return len(calls)


@pytest.mark.parametrize("saveat", [diffrax.SaveAt(t1=True), diffrax.SaveAt(ts=jnp.linspace(0.0, 1.0, 100))])
def test_explicit_solve_traces_its_field_few_times(adjoint, saveat):
    """Twenty states of mass action: at most twelve traces for value and gradient (diffrax#94, #606)."""
    assert 0 < traces(adjoint, mass_action, jnp.ones(20), jnp.linspace(0.1, 1.0, 20), saveat=saveat) <= 12


def test_implicit_solve_traces_its_field_few_times(adjoint):
    """Not more than half as often again as stock."""
    how = {"solver": diffrax.Kvaerno5(), "dt0": 0.1}
    count = lambda which: traces(which, decay, jnp.ones(3), jnp.array(0.4), **how)
    assert 0 < count(adjoint) <= 1.5 * count(STOCK)


def test_adjoints_with_the_same_options_are_one(make_adjoint):
    assert make_adjoint() == make_adjoint()
    assert hash(make_adjoint()) == hash(make_adjoint())


def test_fresh_adjoints_compile_nothing_new(make_adjoint):
    """Fifty calls, each with its own adjoint, trace the field as often as one (diffrax#142, #333)."""
    calls = []

    def field(t: Any, y: Array, k: Array) -> Array:
        calls.append(1)
        return -k * y

    slope = eqx.filter_jit(
        lambda k, which: jax.grad(lambda k: final(field, jnp.array(1.0), k, max_steps=64, adjoint=which))(k)
    )
    first = slope(jnp.array(1.5), make_adjoint())
    once = len(calls)
    assert once > 0
    for _ in range(49):
        again = slope(jnp.array(1.5), make_adjoint())
    assert len(calls) == once
    assert_close(again, first, rtol=0)


def test_fresh_fields_and_tolerances_compile_as_often_as_stock(make_adjoint, caplog):
    """A new lambda or a new Python float compiles anew, but no more than with stock (diffrax#466)."""

    def run(rtol: float, which: diffrax.AbstractAdjoint) -> None:
        how = {"stepsize_controller": diffrax.PIDController(rtol=rtol, atol=1e-6), "max_steps": 64, "adjoint": which}
        jax.grad(lambda k: final(lambda t, y, k: -k * y, jnp.array(1.0), k, **how))(jnp.array(1.5))

    def compilations(make: Callable[[], diffrax.AbstractAdjoint]) -> int:
        run(1e-3, make())
        caplog.clear()
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            for rtol in (1e-4, 2e-4):
                run(rtol, make())
        return sum("Finished XLA compilation" in record.getMessage() for record in caplog.records)

    ours = compilations(make_adjoint)
    assert 0 < ours <= compilations(lambda: STOCK)


class Held:
    rate = 1.5


def released(which: diffrax.AbstractAdjoint) -> bool:
    """Whether what a field captured is gone once JAX has dropped its own caches."""

    def run(held: Held) -> None:
        end = lambda k: final(lambda t, y, k: -held.rate * k * y, jnp.array(1.0), k, max_steps=64, adjoint=which)
        assert_close(jax.jit(jax.grad(end))(jnp.array(1.0)), -1.5 * jnp.exp(-1.5), rtol=1e-7)

    held = Held()
    gone = weakref.ref(held)
    run(held)
    del held
    eqx.clear_caches()
    jax.clear_caches()
    gc.collect()
    return gone() is None


def test_closures_are_released(adjoint):
    """No cache of the package keeps the user's field alive; some versions of JAX themselves do."""
    assert released(adjoint) or not released(STOCK)


def quiet_slope(k: Array, adjoint: diffrax.AbstractAdjoint) -> Array:
    """Gradient of a solve that checks no error, hence needs no callback."""
    return jax.grad(lambda k: final(decay, jnp.array(1.0), k, max_steps=64, throw=False, adjoint=adjoint))(k)


def test_no_callback_of_our_own(adjoint):
    """Host callbacks keep programs from being cached and sharded (diffrax#664, #247)."""
    text = jax.jit(lambda k: quiet_slope(k, adjoint)).lower(jnp.array(1.5)).as_text()
    assert "callback" not in text


@pytest.fixture
def compile_cache(tmp_path: Path):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(tmp_path), 0), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_persistent_compile_cache_is_used(adjoint, compile_cache):
    """A second process-like run finds the program of the first and adds none."""

    def run() -> set[str]:
        def cached_slope(k: Array) -> Array:
            return quiet_slope(k, adjoint)

        jax.clear_caches()
        assert_close(jax.jit(cached_slope)(jnp.array(1.5)), -jnp.exp(-1.5), rtol=1e-7)
        return {path.name for path in compile_cache.glob("*cached_slope*-cache")}

    first = run()
    assert len(first) == 1
    assert run() == first
