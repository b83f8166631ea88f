"""The bytes that a route states, against those that XLA reserves for the user's whole program."""

import functools
from collections.abc import Callable
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from gradsolve_backend import GradSolveAdjoint, explain

SIZE = 4
FORCE = jnp.array(8.0)


def field(t: Any, y: Any, force: Any) -> Any:
    return (jnp.roll(y, -1) - jnp.roll(y, 2)) * jnp.roll(y, 1) - y + force


def loss(backend: str, times: int, memory: int | None, max_steps: int | None, y0: Any, force: Any, **how: Any) -> Any:
    saveat = diffrax.SaveAt(ts=jnp.linspace(0, 1, times)) if times else diffrax.SaveAt(t1=True)
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(field), diffrax.Tsit5(), 0.0, 1.0, 0.01, y0, force, saveat=saveat, max_steps=max_steps,
        stepsize_controller=diffrax.PIDController(rtol=1e-6, atol=1e-6), adjoint=GradSolveAdjoint(backend, memory),
        **how,
    )  # fmt: skip
    return jnp.sum(solution.ys**2)


def programs(*how: Any) -> tuple[Callable, Callable]:
    """The sum over lanes, and its gradient."""
    total = lambda y0, force: jnp.sum(jax.vmap(functools.partial(loss, *how), in_axes=(0, None))(y0, force))
    return total, jax.grad(total, argnums=(0, 1))


def reserved(function: Callable, *args: Any) -> int:
    """What XLA reserves for the program besides arguments and results."""
    return jax.jit(function).lower(*args).compile().memory_analysis().temp_size_in_bytes


# Backend, saved times, lanes, bytes asked for.
CASES = [
    ("xla", 0, 64, None),
    ("xla", 30, 64, None),
    ("llvm", 0, 64, None),
    ("llvm", 30, 64, None),
    ("llvm", 0, 1024, 30_000),
]


@pytest.mark.parametrize("backend, times, lanes, memory", CASES)
def test_bytes_are_those_of_the_compiled_program(backend, times, lanes, memory):
    y0 = jnp.ones((lanes, SIZE)) + jnp.linspace(0, 0.1, SIZE)[None]
    forward, gradient = programs(backend, times, memory, 4096)
    # A program that does not differentiate says what it would take.
    (route,) = explain(forward if times else gradient, y0, FORCE)
    assert route.backend == backend
    assert abs(route.bytes_forward / reserved(forward, y0, FORCE) - 1) < 0.1
    assert abs(route.bytes_gradient / reserved(gradient, y0, FORCE) - 1) < 0.1


@pytest.mark.parametrize("backend", ["xla", "llvm"])
def test_rows(backend):
    y0 = jnp.ones(SIZE)
    rows = {n: explain(functools.partial(loss, backend, 0, None, n), y0, FORCE)[0].record_rows for n in (16, 4096)}
    assert rows[4096] == 128 and rows[16] == (16 if backend == "xla" else 128)


def test_no_reverse_mode_no_bytes():
    """On `xla` a solve without a bound on its steps has none."""
    (route,) = explain(functools.partial(loss, "xla", 0, None, None), jnp.ones(SIZE), FORCE)
    assert route.bytes_forward > 0 and route.bytes_gradient is None


@pytest.mark.parametrize("check", [False, True])
def test_inside_a_mesh(check):
    """The bytes are those of one device; with the check of varying axes the solve has no meaning outside."""
    mesh, spec = Mesh(np.array(jax.devices()[:2]), ("batch",)), PartitionSpec("batch")
    function = jax.vmap(lambda y0: loss("llvm", 0, None, 4096, y0, FORCE, throw=False))
    on_mesh = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check)
    (route,) = explain(on_mesh, jnp.ones((4, SIZE)))
    assert route.lanes == 2 and (route.bytes_gradient is None) == check


def test_the_loop_of_diffrax_does_not_tell():
    (route,) = explain(functools.partial(loss, "stock", 0, None, 4096), jnp.ones(SIZE), FORCE)
    assert route.bytes_forward is None and route.bytes_gradient is None
