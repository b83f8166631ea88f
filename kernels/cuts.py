"""Where XLA should store a value of a scalar program instead of computing it again for each output.

XLA's CPU compiler makes one loop per output and computes in it all that the output needs; what several outputs share is
computed several times. A value behind an `optimization_barrier` is stored once and read by all of them.
"""

from collections.abc import Sequence
from typing import Any

import jax

from gradsolve_backend.kernels.compat import Literal

SHARED_EQUATIONS = 8  # a shared value is stored if computing it takes at least so many equations


def _consumers(jaxpr: Any) -> dict[Any, int]:
    """How many equations read each variable."""
    counts: dict[Any, int] = {}
    for eqn in jaxpr.eqns:
        for v in {v for v in eqn.invars if not isinstance(v, Literal)}:
            counts[v] = counts.get(v, 0) + 1
    return counts


def cuts(jaxpr: Any, least: int = SHARED_EQUATIONS) -> frozenset[Any]:
    """The variables to store: read at least twice, and the end of at least `least` equations since the last stored."""
    consumers = _consumers(jaxpr)
    behind: dict[Any, int] = {}  # per variable the equations that compute it, as bits
    stored = set()
    for number, eqn in enumerate(jaxpr.eqns):
        bits = 1 << number
        for v in eqn.invars:
            if not isinstance(v, Literal):
                bits |= behind.get(v, 0)
        for v in eqn.outvars:
            behind[v] = bits
            if consumers.get(v, 0) > 1 and bits.bit_count() >= least:
                stored.add(v)
                behind[v] = 0
    return frozenset(stored)


def evaluate(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any], stored: frozenset[Any]) -> list[Any]:
    """The outputs of a scalar program, with these variables stored."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *inputs), strict=True))
    read = lambda v: v.val if isinstance(v, Literal) else env[v]  # noqa: E731
    for eqn in jaxpr.eqns:
        out = eqn.primitive.bind(*(read(v) for v in eqn.invars), **eqn.params)
        for v, x in zip(eqn.outvars, out if eqn.primitive.multiple_results else [out], strict=True):
            env[v] = jax.lax.optimization_barrier(x) if v in stored else x
    return [read(v) for v in jaxpr.outvars]
