"""Dense linear systems: one LU decomposition for many right-hand sides, differentiated through the solution.

The decomposition and the solution are primitives, which have two forms. On arrays they are LAPACK's, or what JAX has
in its place. In a scalar program they are straight-line code: `gradsolve_backend.kernels.scalar_dense`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from gradsolve_backend.kernels.lowering import local

__all__ = ["Factors", "factorise", "implicit_solve", "solver"]


class Factors(NamedTuple):
    """What one form of the decomposition hands to the same form of the solution.

    `lu`: both triangles, shape (..., n, n). `order`: a permutation and its inverse, shape (..., 2, n): of the rows on
    arrays, of the unknowns in scalar programs. Only these use `inverses`, of the pivots, shape (..., n), and
    `exchanged[k, i]`: whether step k exchanged rows k and i, shape (..., n, n).
    """

    lu: Any
    inverses: Any
    order: Any
    exchanged: Any


def _factor_arrays(matrix: Any) -> list[Any]:
    lu, _, order = jax.lax.linalg.lu(matrix)
    inverses = 1 / jnp.diagonal(lu, axis1=-2, axis2=-1)
    both = jnp.stack([order, jnp.argsort(order, axis=-1).astype(order.dtype)], axis=-2)
    return [lu, inverses, both, jnp.zeros(matrix.shape, bool)]


def _factor_avals(matrix: Any) -> list[Any]:
    *batch, n = matrix.shape[:-1]
    like = lambda shape, dtype: matrix.update(shape=tuple(shape), dtype=jnp.dtype(dtype), weak_type=False)  # noqa: E731
    return [
        like(matrix.shape, matrix.dtype),
        like((*batch, n), matrix.dtype),
        like((*batch, 2, n), jnp.int32),
        like(matrix.shape, bool),
    ]


def _solve_arrays(lu: Any, inverses: Any, order: Any, exchanged: Any, b: Any, *, transposed: bool) -> list[Any]:
    del inverses, exchanged

    def triangular(x: Any, lower: bool) -> Any:
        return jax.lax.linalg.triangular_solve(
            lu, x, left_side=True, lower=lower, unit_diagonal=lower, transpose_a=transposed
        )

    def permuted(x: Any, order: Any) -> Any:
        return jnp.take_along_axis(x, order, axis=-1)

    if transposed:
        x = triangular(triangular(b[..., None], lower=False), lower=True)[..., 0]
        return [permuted(x, order[..., 1, :])]
    return [triangular(triangular(permuted(b, order[..., 0, :])[..., None], lower=True), lower=False)[..., 0]]


def _solve_avals(lu: Any, inverses: Any, order: Any, exchanged: Any, b: Any, *, transposed: bool) -> list[Any]:
    return [b.update(weak_type=False)]


def _primitive(name: str, implementation: Callable, avals: Callable) -> Primitive:
    """A primitive whose implementation takes leading axes, which is all that `jax.vmap` needs of it."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(avals)
    primitive.def_impl(lambda *x, **params: jax.jit(lambda *y: implementation(*y, **params))(*x))
    mlir.register_lowering(primitive, local(implementation))

    def batch(inputs: Sequence[Any], axes: Sequence[Any], **params: Any) -> Any:
        size = next(x.shape[a] for x, a in zip(inputs, axes, strict=True) if isinstance(a, int))
        spread = lambda x: jnp.broadcast_to(x, (size, *x.shape))  # noqa: E731
        moved = [jnp.moveaxis(x, a, 0) if isinstance(a, int) else spread(x) for x, a in zip(inputs, axes, strict=True)]
        outputs = primitive.bind(*moved, **params)
        return outputs, [0] * len(outputs)

    batching.primitive_batchers[primitive] = batch
    return primitive


FACTOR, SOLVE = "gradsolve_lu_factor", "gradsolve_lu_solve"
factor_p = _primitive(FACTOR, _factor_arrays, _factor_avals)
solve_p = _primitive(SOLVE, _solve_arrays, _solve_avals)


def factorise(matrix: Any) -> Factors:
    """The decomposition of a matrix of shape (n, n), by partial pivoting; it has no derivative."""
    return Factors(*factor_p.bind(jax.lax.stop_gradient(matrix)))


def solver(factors: Factors, transposed: bool = False) -> Callable[[Any], Any]:
    """Solves for a right-hand side of shape (n,). The solution is not finite where the matrix is singular."""
    return lambda b: solve_p.bind(*factors, b, transposed=transposed)[0]


def implicit_solve(product: Callable, right: Any, solve: Callable, transpose: Callable) -> Any:
    """The solution x of `product(x) = right`, by `solve(right)`; `transpose` solves with the transposed matrix.

    Its derivative is that of the solution, by the implicit function theorem: `solve` itself is not differentiated.
    """
    return jax.lax.custom_linear_solve(product, right, lambda _, b: solve(b), lambda _, b: transpose(b))
