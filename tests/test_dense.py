"""Linear systems as scalar programs and on arrays, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import MODES, assert_close

from gradsolve_backend.kernels.dense import factorise, implicit_solve, solver
from gradsolve_backend.kernels.scalar import NoScalarForm, scalarise
from gradsolve_backend.kernels.scalar_dense import DIMENSION, elimination_order

RANDOM = np.random.default_rng(7)


def solution(matrix, right, transposed=False):
    return solver(factorise(matrix), transposed)(right)


def both(matrix, right, transposed=False):
    """What the scalar program gives for arrays of this shape, and what LAPACK does."""
    run = lambda m, b: solution(m, b, transposed)
    return evaluated(scalarise(jax.make_jaxpr(run)(matrix, right)), matrix, right), run(matrix, right)


def evaluated(program, *arrays):
    closed = program.jaxpr
    (out,) = program.implode(jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *program.explode(*arrays)))
    return out


SYSTEMS = {
    "one": np.array([[-3.0]]),
    "ordinary": RANDOM.normal(size=(5, 5)),
    "turned": RANDOM.normal(size=(4, 4))[::-1] * [1e-8, 1.0, 1e8, 1.0],
    "needs exchanges": np.array([[0.0, 2.0, 1.0], [0.0, 0.0, 3.0], [4.0, 1.0, 1.0]]),
    "of sixteen": RANDOM.normal(size=(16, 16)),
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", SYSTEMS)
def test_solution(name, transposed):
    matrix = jnp.asarray(SYSTEMS[name])
    right = jnp.asarray(RANDOM.normal(size=len(matrix)))
    wanted = np.linalg.solve(matrix.T if transposed else matrix, right)
    for found in both(matrix, right, transposed):
        np.testing.assert_allclose(found, wanted, rtol=1e-9)


def test_pivots_keep_a_small_one_from_spoiling_the_solution():
    matrix, right = jnp.array([[1e-20, 1.0], [1.0, 1.0]]), jnp.array([1.0, 2.0])
    for found in both(matrix, right):
        np.testing.assert_allclose(found, [1.0, 1.0], rtol=1e-15)


@pytest.mark.parametrize(
    "matrix", [np.zeros((2, 2)), np.ones((3, 3)), np.array([[1.0, np.nan], [0.0, 1.0]]), np.diag([1.0, 0.0])]
)
def test_what_has_no_solution_is_not_finite(matrix):
    for found in both(jnp.asarray(matrix), jnp.ones(len(matrix))):
        assert not np.isfinite(found).all()


def sparse(values):
    """A matrix of dimension 12 with an arrow of places that are not zero."""
    matrix = jnp.zeros((12, 12)).at[np.arange(12), np.arange(12)].set(values[:12])
    return matrix.at[0, 1:].set(values[12:23]).at[1:, 0].set(values[23:])


def test_zeros_known_beforehand_make_a_shorter_program():
    values = jnp.asarray(RANDOM.normal(size=34))
    full, right = sparse(values), jnp.ones(12)
    short = scalarise(jax.make_jaxpr(lambda v: solution(sparse(v), right))(values))
    long = scalarise(jax.make_jaxpr(lambda m: solution(m, right))(full))
    assert short.equations < long.equations / 4
    np.testing.assert_allclose(evaluated(short, values), np.linalg.solve(full, right), rtol=1e-10)


def test_an_arrow_is_eliminated_from_its_tip():
    order = elimination_order(np.asarray(sparse(jnp.ones(34))) != 0)
    assert sorted(order) == list(range(12))
    assert 0 in order[-2:]  # the row and column that are full come last


def test_a_larger_system_has_no_scalar_form():
    size = DIMENSION + 1
    closed = jax.make_jaxpr(solution)(jnp.eye(size), jnp.ones(size))
    with pytest.raises(NoScalarForm, match=f"dimension {size} has no scalar form: at most {DIMENSION}"):
        scalarise(closed)


def by_implicit_rule(matrix, right):
    factors = factorise(matrix)
    return implicit_solve(lambda x: matrix @ x, right, solver(factors), solver(factors, transposed=True))


POINT = (jnp.asarray(RANDOM.normal(size=(3, 3))), jnp.asarray(RANDOM.normal(size=3)))


@pytest.mark.parametrize("jacobian", MODES)
def test_derivative(jacobian):
    found = jax.jit(jacobian(by_implicit_rule, argnums=(0, 1)))(*POINT)
    assert_close(found, jax.jacfwd(jnp.linalg.solve, argnums=(0, 1))(*POINT))


@pytest.mark.parametrize("outer", [jax.jacfwd, jax.jacrev])
@pytest.mark.parametrize("inner", [jax.jacfwd, jax.jacrev])
def test_second_derivative(outer, inner):
    twice = lambda f: jax.jit(outer(inner(f)))(*POINT)
    assert_close(twice(by_implicit_rule), twice(jnp.linalg.solve), atol=1e-9)


def test_batches():
    matrices, rights = jnp.asarray(RANDOM.normal(size=(4, 3, 3))), jnp.asarray(RANDOM.normal(size=(4, 3)))
    found = jax.vmap(jax.vmap(by_implicit_rule, (None, 0)), (0, None))(matrices, rights)
    wanted = np.linalg.solve(matrices[:, None], rights[None, :, :, None])[..., 0]
    np.testing.assert_allclose(found, wanted, rtol=1e-10)
