"""The scalar program of a function gives what the function gives, has the promised form, or says what is in the way."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scalar_rows import (
    FORCING_U,
    MATRIX,
    PLAIN,
    UNIT,
    VECTOR,
    assert_same,
    cotangents_of,
    names,
    normal,
    program_of,
    run,
    tangents_of,
)

from gradsolve_backend.kernels.scalar import NoScalarForm


@pytest.mark.parametrize(("name", "function", "inputs"), PLAIN, ids=names(PLAIN))
def test_plain(name: str, function: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
    assert_same(function, inputs)


DIFFERENTIABLE_NAMES = """
arithmetic associative_scan batched checkpoint convolve cumulative cumulative_extrema extrema fixed_modify fixed_set
grid_gather map mask matmul norms pad pad_negative prod roll row_gather scan slice split sums tile triangle where
""".split()
DIFFERENTIABLE = [row for row in PLAIN if row[0] in DIFFERENTIABLE_NAMES]


@pytest.mark.parametrize("transform", [tangents_of, cotangents_of])
@pytest.mark.parametrize(("name", "function", "inputs"), DIFFERENTIABLE, ids=names(DIFFERENTIABLE))
def test_what_differentiation_emits(
    name: str, function: Callable[..., Any], inputs: tuple[Any, ...], transform: Callable[..., Any]
) -> None:
    def inexact(*args: Any) -> Any:
        return [x for x in jax.tree.leaves(function(*args)) if jnp.issubdtype(x.dtype, jnp.inexact)]

    assert_same(transform(inexact), inputs, rtol=1e-12)


# ---- form of the program ---------------------------------------------------------------------------


def test_tables_follow_use_and_permission() -> None:
    def pick(x: jax.Array, y: jax.Array, i: jax.Array) -> jax.Array:
        return x[i] + y[1]

    inputs = (VECTOR, UNIT, 3)
    assert program_of(pick, *inputs).tables == (True, False, False)
    exploded = program_of(pick, *inputs, table_inputs=[False] * 3)
    assert exploded.tables == (False, False, False)
    np.testing.assert_array_equal(run(exploded, *inputs)[0], VECTOR[3] + UNIT[1])
    with pytest.raises(NoScalarForm, match="an index known only at run time into 300 computed values"):
        program_of(lambda x, i: x[i], FORCING_U, 3, table_inputs=[False, False])


def test_avals_and_order() -> None:
    program = program_of(lambda x, n: (x.T, n + 1), MATRIX, np.int32(2))
    assert [(a.shape, a.dtype) for a in program.in_avals] == [((3, 4), np.float64), ((), np.int32)]
    assert [(a.shape, a.dtype) for a in program.out_avals] == [((4, 3), np.float64), ((), np.int32)]
    np.testing.assert_array_equal([float(x) for x in program.explode(MATRIX, np.int32(2))[:-1]], MATRIX.ravel())


def count(function: Callable[..., Any], *inputs: Any) -> int:
    return program_of(function, *inputs).equations


def test_moving_atoms_costs_nothing() -> None:
    assert count(lambda x: (jnp.roll(x[::-1], 2), jnp.stack([x, x]).T[1:]), VECTOR) == 0
    assert count(lambda x: x.at[2].set(0.0)[np.array([0, 2])] + 0.0, VECTOR) == 0


def test_equal_equations_are_shared_and_dead_ones_dropped() -> None:
    assert count(lambda x: jnp.sin(x) + jnp.sin(x), np.array(1.0)) == 2
    assert count(lambda x: (jnp.stack([jnp.sin(x), jnp.cos(x)])[0],), np.array(1.0)) == 1


def test_zero_times_nan_is_kept_for_operands_only() -> None:
    def product(a: jax.Array, x: jax.Array) -> jax.Array:
        return a @ x

    matrix, x = np.array([[0.0, 1.0]]), np.array([np.nan, 2.0])
    assert np.isnan(run(program_of(product, matrix, x), matrix, x)[0]).all()
    assert run(program_of(lambda x: 0.0 * x[0], x), x)[0] != 0
    np.testing.assert_array_equal(run(program_of(lambda x: jnp.asarray(matrix) @ x, x), x)[0], [2.0])


def test_unasked_failures_do_not_matter() -> None:
    """A result that nobody uses, and the branch not taken, may have no scalar form."""

    def first(x: jax.Array) -> jax.Array:
        return jnp.stack([x.sum(), jnp.sort(x)[0]])[0]

    def unused(x: jax.Array) -> jax.Array:
        jnp.sort(x)
        return 2 * x

    assert_same(unused, (VECTOR,))
    with pytest.raises(NoScalarForm):
        program_of(first, VECTOR)


REFUSED: list[tuple[str, Callable[..., Any], tuple[Any, ...], str]] = [
    ("sort", jnp.sort, (VECTOR,), "primitive `sort` has no scalar form"),
    ("while", lambda x: jax.lax.while_loop(lambda y: y[0] < 9.0, jnp.sort, x), (VECTOR,), "`sort` has no scalar form"),
    ("scan", lambda x: jax.lax.scan(lambda c, r: (c + r, None), 0.0, x)[0], (normal(65),), "a scan of 65 iterations"),
    ("complex", lambda x: x * 1j, (1.0,), "complex values have no scalar form"),
    ("complex_input", lambda x: x.real, (np.array(1j),), "complex values have no scalar form"),
    ("scatter", lambda x, i: x.at[i].set(1.0), (normal(65), 3), "primitive `scatter` at an index known only at run"),
    (
        "select",
        lambda x, i: jnp.stack([x[0], *jnp.sin(x[1:])])[i],
        (normal(65), 3),
        "would have about|into 65 computed",
    ),
    (
        "size",
        lambda x: jnp.sin(x),
        (normal(101),),
        "the scalar program has more than 100 equations, which is the limit",
    ),
    ("random", lambda k: jax.random.normal(k), (np.zeros(2, np.uint32),), "primitive `random_wrap` has no scalar form"),
]


@pytest.mark.parametrize(("name", "function", "inputs", "message"), REFUSED, ids=names(REFUSED))
def test_refused(name: str, function: Callable[..., Any], inputs: tuple[Any, ...], message: str) -> None:
    with pytest.raises(NoScalarForm, match=message):
        program_of(function, *inputs, limit=100)


def test_growth_is_stopped_early() -> None:
    with pytest.raises(NoScalarForm, match="would have about 20000 equations"):
        program_of(lambda x: jnp.sin(x).sum(), np.zeros(10_000), limit=100)


def test_filtered_functions() -> None:
    """Calls that equinox inserts vanish."""
    mlp = eqx.nn.MLP(2, 2, 4, 2, activation=jnp.tanh, key=jax.random.key(0))
    assert_same(lambda y: eqx.filter_jit(mlp)(y), (normal(2),))
