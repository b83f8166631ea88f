"""What a fit needs beside a least-squares solver: starts, a Jacobian that is computed once, the best fit, its errors.

The fits themselves are those of Optimistix, under `jax.vmap` over starts or data sets.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike
from scipy.special import ndtri
from scipy.stats import qmc

Tree = TypeVar("Tree")

# Sums of squares this close to the smallest, relatively, belong to the same optimum.
SAME_OPTIMUM = 1e-4


# ---- starts ------------------------------------------------------------------------------------------


def uniform_starts(count: int, low: ArrayLike, high: ArrayLike, seed: int) -> np.ndarray:
    """Starts of a fit between bounds, as a Latin hypercube.

    Of each parameter, every one of `count` slices of equal probability holds one start: a few starts cover its range
    better than independent ones do.

    Arguments:
        count: number of starts.
        low, high: bounds, shape (parameters,), of which one may be the same number for all.
        seed: of the random numbers.

    Returns:
        Parameter vectors, shape (count, parameters).

    McKay, Beckman and Conover 1979, https://doi.org/10.1080/00401706.1979.10489755
    """
    lowest, highest = np.broadcast_arrays(np.atleast_1d(low), np.atleast_1d(high))
    return lowest + (highest - lowest) * _hypercube(count, lowest.size, seed)


def normal_starts(count: int, mean: ArrayLike, deviation: ArrayLike, seed: int) -> np.ndarray:
    """As `uniform_starts`, normally distributed with this mean and standard deviation of each parameter."""
    middle, spread = np.broadcast_arrays(np.atleast_1d(mean), np.atleast_1d(deviation))
    return middle + spread * ndtri(_hypercube(count, middle.size, seed))


def _hypercube(count: int, dimension: int, seed: int) -> np.ndarray:
    return qmc.LatinHypercube(dimension, rng=seed).random(count)


# ---- residuals ---------------------------------------------------------------------------------------


def with_jacobian(residual: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The same residual, whose linearisation holds its Jacobian.

    Gauss-Newton, Levenberg-Marquardt and dogleg solvers linearise the residual at each iterate and apply the result
    several times: to every column for the linear system, and to the step for its predicted gain. Each application is
    a solve of the tangent equations. With the Jacobian at hand it is a product, and what a record of the solve holds
    needs not be kept from one iteration to the next.

    Arguments:
        residual: function of parameters and `args`, both PyTrees, with a PyTree of floating-point arrays as its value.
            Its derivative by the parameters is taken in forward mode, one column for each of them.

    Returns:
        A function with the same values and derivatives. For minimisers, which want one gradient in reverse mode,
        take `residual` itself.
    """

    def wrapped(parameters: Any, args: Any = None) -> Any:
        return _linearised_once(eqx.filter_closure_convert(residual, parameters, args), parameters, args)

    return wrapped


@eqx.filter_custom_jvp
def _linearised_once(residual: Callable[[Any, Any], Any], parameters: Any, args: Any) -> Any:
    return residual(parameters, args)


@_linearised_once.def_jvp
def _by_jacobian(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    residual, parameters, args = primals
    _, d_parameters, _ = tangents
    flat, unravel = ravel_pytree(parameters)
    given = jtu.tree_map(lambda x, d: jnp.zeros_like(x) if d is None else d, parameters, d_parameters)

    def column(direction: Array) -> tuple[Any, Any]:
        return jax.jvp(lambda p: residual(p, args), (parameters,), (unravel(direction),))

    value, columns = jax.vmap(column, out_axes=(None, -1))(jnp.eye(flat.size, dtype=flat.dtype))
    change = jtu.tree_map(lambda c: c @ ravel_pytree(given)[0].astype(c.dtype), columns)
    rest = (tangents[0], tangents[2])
    if not jtu.tree_leaves(rest):
        return value, change
    _, moved = eqx.filter_jvp(lambda f, a: f(parameters, a), (residual, args), rest)
    return value, jtu.tree_map(jnp.add, change, moved)


# ---- results -----------------------------------------------------------------------------------------


def best(fits: Tree, losses: ArrayLike) -> Tree:
    """The fit with the smallest loss, of a PyTree whose arrays have one entry for each fit; NaN is never the smallest.

    Arguments:
        fits: what `jax.vmap` of a fit returned, arrays of shape (fits, ...).
        losses: for example the sums of squared residuals, shape (fits,).

    Returns:
        The PyTree of one fit.
    """
    found = jnp.asarray(losses)
    index = jnp.argmin(jnp.where(jnp.isnan(found), jnp.inf, found))
    return jtu.tree_map(lambda x: x[index], fits)


def same_optimum(losses: ArrayLike, rtol: float = SAME_OPTIMUM) -> np.ndarray:
    """Which fits ended in the best optimum: those whose loss is the smallest, or greater by the fraction `rtol`."""
    found = np.asarray(losses)
    least = np.nanmin(found)
    return found <= least + rtol * np.abs(least)


def covariance(jacobian: ArrayLike, residuals: ArrayLike | None = None) -> Array:
    """Covariance of least-squares estimates, `s**2 (J^T J)**-1`, from the Jacobian at the optimum.

    Arguments:
        jacobian: of the residuals by the parameters, shape (..., parameters).
        residuals: at the optimum, shape (...); their sum of squares over the degrees of freedom is `s**2`. Without
            them `s` is 1, as for residuals that were divided by the known standard errors of the data.

    Returns:
        The covariance, shape (parameters, parameters). Its diagonal holds the squared standard errors. It is infinite
        or NaN where the data do not determine all parameters.

    Raises:
        ValueError: if there are not more residuals than parameters, or fewer with known errors.

    Seber and Wild 1989, Nonlinear Regression, section 2.1, https://doi.org/10.1002/0471725315
    """
    matrix = jnp.asarray(jacobian)
    matrix = matrix.reshape((-1, matrix.shape[-1]))
    rows, columns = matrix.shape
    if rows < columns + (residuals is not None):
        raise ValueError(
            f"The covariance of {columns} parameters was asked for, from {rows} residuals. Give at least as many "
            "residuals as parameters, one more if their variance is to be estimated, or fix some parameters."
        )
    inverse = jax.scipy.linalg.solve_triangular(jnp.linalg.qr(matrix, mode="r"), jnp.eye(columns, dtype=matrix.dtype))
    unit = inverse @ inverse.T
    return unit if residuals is None else jnp.sum(jnp.square(jnp.asarray(residuals))) / (rows - columns) * unit
