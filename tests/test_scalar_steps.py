"""Steps of real systems: the scalar program of a step, of its jvp and of its vjp."""

from collections.abc import Callable
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scalar_rows import (
    FORCING_T,
    FORCING_U,
    TIMES,
    assert_same,
    cotangents_of,
    names,
    normal,
    program_of,
    run,
    tangents_of,
)

STAGES = diffrax.Tsit5.tableau


def step(field: Callable[..., jax.Array]) -> Callable[..., Any]:
    """One step of Tsit5 with its error estimate, in the form in which a kernel differentiates it."""

    def advance(t: jax.Array, h: jax.Array, y: jax.Array, *args: Any) -> tuple[jax.Array, jax.Array]:
        slopes = [field(t, y, *args)]
        for c, row in zip(STAGES.c, STAGES.a_lower, strict=True):
            slopes.append(field(t + c * h, y + h * (row @ jnp.stack(slopes)), *args))
        slopes = jnp.stack(slopes)
        return y + h * (STAGES.b_sol @ slopes), h * (STAGES.b_error @ slopes)

    return advance


def lorenz(t: Any, y: jax.Array, args: jax.Array) -> jax.Array:
    a, b, c = args
    return jnp.stack([a * (y[1] - y[0]), y[0] * (b - y[2]) - y[1], y[0] * y[1] - c * y[2]])


def van_der_pol(t: Any, y: jax.Array, mu: jax.Array) -> jax.Array:
    return jnp.array([y[1], mu * (1 - y[0] ** 2) * y[1] - y[0]])


STOICHIOMETRY = np.array([[-1.0, 1.0, 0.0], [1.0, -1.0, -1.0], [0.0, 0.0, 1.0]])


def mass_action(t: Any, y: jax.Array, rates: jax.Array) -> jax.Array:
    flux = jnp.exp(rates) * jnp.array([y[0], y[1] * y[2], y[1] ** 2])
    return jnp.einsum("ij,j->i", STOICHIOMETRY, flux)


def network(t: Any, y: jax.Array, first: jax.Array, bias: jax.Array, second: jax.Array) -> jax.Array:
    return second @ jnp.tanh(first @ y + bias)


def forced(t: Any, y: jax.Array, k: jax.Array) -> jax.Array:
    return -k * y + jnp.interp(t, jnp.asarray(FORCING_T), jnp.asarray(FORCING_U))


def forced_by_argument(t: Any, y: jax.Array, u: jax.Array) -> jax.Array:
    return -y + jnp.interp(t, jnp.asarray(TIMES), u)


def scanned(t: Any, y: jax.Array, k: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda z, c: (jnp.sin(z) * c, None), y, k)[0]


def branching(t: Any, y: jax.Array, k: jax.Array) -> jax.Array:
    return jax.lax.cond(y[0] > t, lambda z: -k * z, lambda z: z**2, y)


def switching(t: Any, y: jax.Array, k: jax.Array) -> jax.Array:
    regime = jnp.floor(2 * jnp.abs(y[0])).astype(jnp.int32)
    return jax.lax.switch(regime, [lambda z: -k * z, jnp.sin, lambda z: z[::-1]], y)


def looped(t: Any, y: jax.Array, k: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 3, lambda i, z: z * jnp.roll(z, 1) + k * i, y)


def picked(t: Any, y: jax.Array, doses: jax.Array) -> jax.Array:
    return -y * doses[jnp.floor(3 * t).astype(jnp.int32)]


def advected(t: Any, y: jax.Array, speed: jax.Array) -> jax.Array:
    return speed * (jnp.roll(y, -1) - 2 * y + jnp.roll(y, 1)) + jnp.cumsum(y) - jnp.max(y) + jnp.prod(y)


def written(t: Any, y: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.zeros(3).at[0].set(k * y[1]).at[1:].add(y[:2] * y[2]).at[jnp.argmax(y)].mul(2.0)


@jax.custom_jvp
def softened(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.abs(x))


@softened.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    return softened(x), dx / (1.0 + softened(x))


@jax.custom_vjp
def clipped_slope(x: jax.Array) -> jax.Array:
    return x**3


clipped_slope.defvjp(lambda x: (x**3, x), lambda x, ct: (ct * jnp.clip(3 * x**2, 0.0, 0.1),))

BOTH_WAYS: list[tuple[str, Callable[..., Any], Any]] = [
    ("lorenz", lorenz, (normal(3), np.array([10.0, 28.0, 8 / 3]))),
    ("van_der_pol", van_der_pol, (normal(2), np.array(5.0))),
    ("mass_action", mass_action, (np.abs(normal(3)), normal(3))),
    ("network", network, (normal(2), normal(8, 2), normal(8), normal(2, 8))),
    ("forced", forced, (normal(2), np.array(0.3))),
    ("forced_by_argument", forced_by_argument, (normal(2), normal(12))),
    ("scan", scanned, (normal(2), normal(5))),
    ("cond", branching, (normal(2), np.array(0.3))),
    ("switch", switching, (normal(2), np.array(0.3))),
    ("fori_loop", looped, (normal(3), np.array(0.3))),
    ("index", picked, (normal(2), normal(4))),
    ("stencil", advected, (normal(6), np.array(0.3))),
    ("written", written, (normal(3), np.array(0.3))),
    ("custom_jvp", lambda t, y, k: -k * softened(y), (normal(2), np.array(0.3))),
]
REVERSE_ONLY = [("custom_vjp", lambda t, y, k: -k * clipped_slope(y), (normal(2), np.array(0.3)))]
CLOCK = (np.array(0.2), np.array(0.5))  # a long step, whose error estimate is far above round-off


@pytest.mark.parametrize(("name", "field", "inputs"), BOTH_WAYS, ids=names(BOTH_WAYS))
def test_step_and_tangent(name: str, field: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
    assert_same(tangents_of(step(field)), (*CLOCK, *inputs), rtol=1e-12)


@pytest.mark.parametrize(("name", "field", "inputs"), BOTH_WAYS + REVERSE_ONLY, ids=names(BOTH_WAYS + REVERSE_ONLY))
def test_cotangent(name: str, field: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
    assert_same(cotangents_of(step(field)), (*CLOCK, *inputs), rtol=1e-12)


def test_lanes() -> None:
    """The scalar program under vmap is the original under vmap, with the table shared by all lanes."""

    def field(t: jax.Array, y: jax.Array, u: jax.Array) -> jax.Array:
        return jnp.interp(t, jnp.asarray(TIMES), u) * lorenz(t, y, jnp.array([10.0, 28.0, 8 / 3]))

    ts, ys, u = np.linspace(0.1, 1.9, 7), normal(7, 3), normal(12)
    program = program_of(field, ts[0], ys[0], u)
    assert program.tables == (False, False, True)
    (got,) = jax.vmap(lambda t, y: run(program, t, y, u))(ts, ys)
    np.testing.assert_allclose(got, jax.vmap(field, in_axes=(0, 0, None))(ts, ys, u), rtol=1e-13)
