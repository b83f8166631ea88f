"""Products over lanes in a reverse sweep: those that give cotangents of operands that lanes share.

XLA multiplies matrices on a CPU fast if the left factor is the narrower one and has the axis that is summed last. What
`jax.vjp` writes has neither: the cotangent of the first layer of a network, which has few inputs, takes three times as
long as with its factors in this order.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gradsolve_backend.kernels.compat import Jaxpr, Literal
from gradsolve_backend.kernels.perturb import CALLS


def arranged(pull: Callable) -> Callable:
    """`pull(cotangents) -> (arguments, operands)` with the products that `operands` alone need in the fast order."""

    def function(cotangents: Any) -> Any:
        closed, shapes = jax.make_jaxpr(pull, return_shape=True)(cotangents)
        leaves, structure = jax.tree.flatten(shapes)
        count = len(jax.tree.leaves(shapes[0]))
        late = [i >= count for i in range(len(leaves))]
        return structure.unflatten(_evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(cotangents), late))

    return function


def _early(jaxpr: Jaxpr, late: Sequence[bool]) -> set[Any]:
    """The variables that outputs need which are not late."""
    needed = {v for v, is_late in zip(jaxpr.outvars, late, strict=True) if not is_late and not isinstance(v, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    return needed


def _evaluate(jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any], late: Sequence[bool]) -> list[Any]:
    early = _early(jaxpr, late)
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *inputs), strict=True))
    read = lambda v: v.val if isinstance(v, Literal) else env[v]  # noqa: E731
    for eqn in jaxpr.eqns:
        given, is_late = [read(v) for v in eqn.invars], [v not in early for v in eqn.outvars]
        out = _equation(eqn, given, is_late)
        env.update(zip(eqn.outvars, out, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _equation(eqn: Any, given: Sequence[Any], late: Sequence[bool]) -> Sequence[Any]:
    inner = eqn.params.get(CALLS.get(eqn.primitive.name, ""))
    if inner is not None and any(late):
        return _evaluate(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), given, late)
    if eqn.primitive.name == "dot_general" and all(late):
        a, b = given
        return [_product(a, b, eqn.params)]
    out = eqn.primitive.bind(*given, **eqn.params)
    return out if eqn.primitive.multiple_results else [out]


def _product(a: Any, b: Any, params: dict[str, Any]) -> Any:
    """A product of two matrices, or of what acts as such, whose left factor is stored as the fast order wants it."""
    ((in_a, in_b), (batch, _)) = params["dimension_numbers"]
    free_a, free_b = _others(a, in_a), _others(b, in_b)
    rows, columns = (math.prod(x.shape[i] for i in free) for x, free in ((a, free_a), (b, free_b)))
    if batch or min(rows, columns) < 2:
        return jax.lax.dot_general_p.bind(a, b, **params)
    if rows > columns:
        turned = {**params, "dimension_numbers": ((in_b, in_a), ((), ()))}
        # Behind a barrier, as XLA would otherwise turn the product back.
        out = jax.lax.optimization_barrier(_product(b, a, turned))
        return jnp.moveaxis(out, range(len(free_b)), range(-len(free_b), 0))
    left = jax.lax.optimization_barrier(jnp.transpose(a, (*free_a, *in_a)))
    inner = tuple(range(len(free_a), left.ndim))
    return jax.lax.dot_general_p.bind(left, b, **{**params, "dimension_numbers": ((inner, in_b), ((), ()))})


def _others(x: Any, axes: Sequence[int]) -> list[int]:
    return [i for i in range(x.ndim) if i not in axes]
