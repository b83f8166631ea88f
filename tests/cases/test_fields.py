"""Right-hand sides: what a kernel cannot take, large constants, and rules of derivative of the user's own."""

from collections.abc import Callable

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import STOCK, assert_close, final
from jaxtyping import Array

MEDIUM = diffrax.PIDController(rtol=1e-6, atol=1e-6)
CONSTANT = {"stepsize_controller": diffrax.ConstantStepSize(), "dt0": 0.125, "max_steps": 16}
MATRIX = jnp.array([[-0.5, 1.0, 0.0], [-1.0, -0.5, 0.2], [0.1, 0.0, -0.3]])


def sliced(t: Array, y: Array, k: Array) -> Array:
    start = jnp.floor(2 * t).astype(jnp.int32)
    return -k * y + jax.lax.dynamic_slice(jnp.arange(5.0), (start,), (3,))


def interpolated(t: Array, y: Array, k: Array) -> Array:
    return jnp.interp(k * t + y, jnp.linspace(0.0, 3.0, 7), jnp.cos(jnp.arange(7.0)))


def multiplied(t: Array, y: Array, k: Array) -> Array:
    return k * (MATRIX @ y)


def scanned(t: Array, y: Array, k: Array) -> Array:
    return jax.lax.scan(lambda total, row: (total + jnp.sin(row * y), None), -k * y, MATRIX)[0]


def branched(t: Array, y: Array, k: Array) -> Array:
    return jax.lax.cond(k > 1.0, lambda x: -k * x, lambda x: jnp.sin(k * x), y)


def largest(t: Array, y: Array, k: Array) -> Array:
    return -k * y * MATRIX[jnp.argmax(y), 0]


def random(t: Array, y: Array, k: Array) -> Array:
    return -k * y + jax.random.normal(jax.random.key(0), (3,))


@pytest.mark.parametrize("field", [sliced, interpolated, multiplied, scanned, branched, largest, random])
def test_fields_that_kernels_find_hard(adjoint, field):
    """Same numbers in float64 whichever way the solve takes (jax#24145, #19214, #23179, #18847)."""

    def loss(k: Array, y0: Array, which: diffrax.AbstractAdjoint) -> Array:
        return jnp.sum(final(field, y0, k, **CONSTANT, adjoint=which) ** 2)

    slopes = jax.value_and_grad(loss, argnums=(0, 1))
    run = lambda which: jax.jit(jax.vmap(lambda k, y0: slopes(k, y0, which)))(ks, y0s)
    ks, y0s = jnp.array([0.7, 1.6]), jnp.array([[1.0, 0.5, 0.2], [0.3, 0.9, 0.1]])
    value, gradient = run(adjoint)
    assert value.dtype == jnp.float64
    assert_close((value, gradient), run(STOCK), rtol=1e-9, atol=1e-12)


def perceptron(weights: list[Array], y: Array) -> Array:
    for matrix in weights[:-1]:
        y = jnp.tanh(matrix @ y)
    return weights[-1] @ y


def ensemble_loss(weights: list[Array], y0s: Array, adjoint: diffrax.AbstractAdjoint) -> Array:
    """Sum over members that share the weights."""
    field = lambda t, y, args: perceptron(args, y)
    return jnp.sum(jax.vmap(lambda y0: final(field, y0, weights, **CONSTANT, adjoint=adjoint))(y0s) ** 2)


def network(*sizes: int) -> list[Array]:
    shapes = zip(sizes[1:], sizes[:-1], strict=True)
    return [0.4 * jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]


def test_shared_weights_of_a_network(adjoint):
    """Cotangents of weights that 256 members share are summed into their own shape (diffrax#179, #213)."""
    weights, y0s = network(2, 64, 2), jax.random.normal(jax.random.key(9), (256, 2))
    gradient = jax.jit(jax.grad(lambda w: ensemble_loss(w, y0s, adjoint)))(weights)
    assert [leaf.shape for leaf in gradient] == [(64, 2), (2, 64)]
    assert_close(gradient, jax.jit(jax.grad(lambda w: ensemble_loss(w, y0s, STOCK)))(weights), rtol=1e-9, atol=1e-11)


@pytest.mark.stock_fails(raises=AssertionError)
def test_shared_weights_are_not_copied_per_member(adjoint):
    """The whole gradient takes less memory than one copy of the inner weights for each member (diffrax#605)."""
    weights, y0s = network(2, 64, 64, 2), jnp.ones((256, 2))
    compiled = jax.jit(jax.grad(lambda w: ensemble_loss(w, y0s, adjoint))).lower(weights).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 256 * 64 * 64 * 8


@jax.custom_vjp
def negative(x: Array) -> Array:
    return -x


negative.defvjp(lambda x: (-x, None), lambda _, cotangent: (-cotangent,))


def by_custom_vjp(k: Array, adjoint: diffrax.AbstractAdjoint) -> Array:
    field = lambda t, y, k: negative(k * y)
    return final(field, jnp.array(1.0), k, max_steps=64, adjoint=adjoint)


def test_field_with_reverse_rule_only(adjoint):
    """Reverse mode needs no forward rule (jax#18311, equinox#927)."""
    slope = jax.jit(jax.grad(lambda k: by_custom_vjp(k, adjoint)))(jnp.array(1.5))
    assert_close(slope, np.float64(-0.223130160), rtol=1e-7)


def test_field_with_reverse_rule_in_forward_mode(adjoint):
    """JAX itself has no forward mode here, and its own error says so."""
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jacfwd(lambda k: by_custom_vjp(k, adjoint))(jnp.array(1.5))


def with_reverse_rule() -> Callable[[Array], Array]:
    function = jax.custom_vjp(jnp.sin)
    function.defvjp(lambda x: (jnp.sin(x), x), lambda x, cotangent: (3.0 * cotangent,))
    return function


def with_forward_rule() -> Callable[[Array], Array]:
    function = jax.custom_jvp(jnp.sin)
    function.defjvp(lambda primals, tangents: (jnp.sin(*primals), 3.0 * tangents[0]))
    return function


@pytest.mark.parametrize("rule", [with_reverse_rule, with_forward_rule])
def test_rule_of_the_user_is_the_one_used(adjoint, rule):
    """A rule that is not the true derivative shows whether it was used."""
    sine = rule()

    def slope(field: Callable[..., Array], which: diffrax.AbstractAdjoint) -> Array:
        value = lambda k: final(field, jnp.array(1.0), k, max_steps=64, stepsize_controller=MEDIUM, adjoint=which)
        return jax.jit(jax.grad(value))(jnp.array(1.5))

    ours = slope(lambda t, y, k: sine(-k * y), adjoint)
    assert_close(ours, slope(lambda t, y, k: sine(-k * y), STOCK), rtol=1e-8)
    assert abs(ours - slope(lambda t, y, k: jnp.sin(-k * y), adjoint)) > 0.01
