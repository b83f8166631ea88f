"""A primitive that does nothing but carry a route, so that `explain` finds solves that take Diffrax's own loop."""

from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from gradsolve_backend.route import Route

gradsolve_route_p = Primitive("gradsolve_route")


def mark(x: Array, route: Route) -> Array:
    """Return `x`, an array of any shape and dtype, and leave `route` in the trace."""
    return gradsolve_route_p.bind(x, route=route)


def _same(x, *, route):
    return x


def _jvp(primals, tangents, *, route):
    # The tangent goes past the marker: a solve that is differentiated is still one solve.
    return gradsolve_route_p.bind(*primals, route=route), *tangents


def _transpose(cotangent, x, *, route):
    return (cotangent,)


def _batch(arrays, axes, *, route):
    return gradsolve_route_p.bind(*arrays, route=route), *axes


def _lower(context, x, *, route):
    return (x,)


gradsolve_route_p.def_impl(_same)
gradsolve_route_p.def_abstract_eval(_same)
ad.primitive_jvps[gradsolve_route_p] = _jvp
ad.primitive_transposes[gradsolve_route_p] = _transpose
batching.primitive_batchers[gradsolve_route_p] = _batch
mlir.register_lowering(gradsolve_route_p, _lower)
