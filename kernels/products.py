"""Products over lanes in a reverse sweep: those that give cotangents of operands that lanes share.

XLA multiplies matrices on a CPU fast if the left factor is the narrower one and has the axis that is summed last. What
`jax.vjp` writes has neither: the cotangent of the first layer of a network, which has few inputs, takes three times as
long as with its factors in this order.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
    transposed: dict[Any, tuple[Any, Sequence[int]]] = {}  # the array before, and the order of its axes
    read = lambda v: v.val if isinstance(v, Literal) else env[v]  # noqa: E731
    for eqn in jaxpr.eqns:
        given, is_late = [read(v) for v in eqn.invars], [v not in early for v in eqn.outvars]
        if eqn.primitive.name == "transpose":
            transposed[eqn.outvars[0]] = given[0], eqn.params["permutation"]
        if eqn.primitive.name == "dot_general" and all(is_late):
            sources = [transposed.get(v, (x, range(x.ndim))) for v, x in zip(eqn.invars, given, strict=True)]
            out = [_product(given, sources, eqn.params)]
        else:
            out = _equation(eqn, given, is_late)
        env.update(zip(eqn.outvars, out, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _equation(eqn: Any, given: Sequence[Any], late: Sequence[bool]) -> Sequence[Any]:
    inner = eqn.params.get(CALLS.get(eqn.primitive.name, ""))
    if inner is not None and any(late):
        return _evaluate(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), given, late)
    out = eqn.primitive.bind(*given, **eqn.params)
    return out if eqn.primitive.multiple_results else [out]


class Factor(NamedTuple):
    """A factor of a product, with those of its axes that the product keeps, in their order there, and the others."""

    x: Any
    kept: list[int]
    summed: list[int]

    @property
    def width(self) -> int:
        """Number of elements along the axes that are kept."""
        return math.prod(self.x.shape[i] for i in self.kept)


def _product(given: Sequence[Any], sources: Sequence[tuple[Any, Sequence[int]]], params: dict[str, Any]) -> Any:
    """What `dot_general` makes of the `given` arrays, of which each is a transpose of its source."""
    summed, (batch, _) = params["dimension_numbers"]
    a, b = (
        Factor(x, [order[i] for i in range(x.ndim) if i not in axes], [order[i] for i in axes])
        for (x, order), axes in zip(sources, summed, strict=True)
    )
    if batch or min(a.width, b.width) < 2 or any(f.kept != sorted(f.kept) for f in (a, b)):
        return jax.lax.dot_general_p.bind(*given, **params)
    if a.width <= b.width:
        return _ordered(a, b, params)
    # Behind a barrier, as XLA would otherwise turn the product back.
    out = jax.lax.optimization_barrier(_ordered(b, a, params))
    return jnp.moveaxis(out, range(len(b.kept)), range(-len(b.kept), 0))


def _ordered(a: Factor, b: Factor, params: dict[str, Any]) -> Any:
    """A product with the left factor stored as the fast order wants it."""
    left = jax.lax.optimization_barrier(jnp.transpose(a.x, (*a.kept, *a.summed)))
    numbers = ((tuple(range(len(a.kept), left.ndim)), tuple(b.summed)), ((), ()))
    return jax.lax.dot_general_p.bind(left, b.x, **{**params, "dimension_numbers": numbers})
