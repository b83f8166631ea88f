"""The order in which a kernel evaluates a program, and how many registers its values take at once."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from gradsolve_backend.kernels.compat import Literal


def read(equation: Any) -> list[Any]:
    """The variables that an equation reads, each once."""
    return list(dict.fromkeys(v for v in equation.invars if not isinstance(v, Literal)))


def users(jaxpr: Any) -> dict[Any, list[Any]]:
    """The equations that read each variable."""
    found: dict[Any, list[Any]] = {}
    for equation in jaxpr.eqns:
        for v in read(equation):
            found.setdefault(v, []).append(equation)
    return found


def in_order(equations: Iterable[Any], users: Mapping[Any, list[Any]], ready: Callable[[Any], bool]) -> Iterator[Any]:
    """Equations that are `ready`, which those that come are not any more: what one completes comes right after it."""
    for equation in equations:
        stack = [equation]
        while stack:
            one = stack.pop()
            if ready(one):
                yield one
                stack += reversed([u for v in one.outvars for u in users.get(v, ())])


def _registers(v: Any) -> int:
    """Of 32 bits that a value takes; tables are in memory, and marks in registers of their own."""
    dtype = np.dtype(v.aval.dtype)
    return 0 if v.aval.shape or dtype.kind == "b" else max(1, dtype.itemsize // 4)


def pressure(jaxpr: Any) -> int:
    """Registers that the values of a program take at once, at most, if it is evaluated in this order."""
    known, order = {*jaxpr.invars, *jaxpr.constvars}, []
    ready = lambda e: e.outvars[0] not in known and all(v in known for v in read(e))  # noqa: E731
    for equation in in_order(jaxpr.eqns, users(jaxpr), ready):
        known.update(equation.outvars)
        order.append(equation)
    last = {v: i for i, equation in enumerate(order) for v in read(equation)}
    last |= {v: len(order) for v in jaxpr.outvars if not isinstance(v, Literal)}
    ends: dict[int, int] = {}
    for v, i in last.items():
        ends[i] = ends.get(i, 0) + _registers(v)
    alive = most = sum(_registers(v) for v in jaxpr.invars if v in last)
    for i, equation in enumerate(order):
        alive += sum(_registers(v) for v in equation.outvars if v in last)
        most = max(most, alive)
        alive -= ends.get(i, 0)
    return most
