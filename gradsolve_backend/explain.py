"""Says which backend runs each solve of a function, without running it."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

from gradsolve_backend.config import refresh
from gradsolve_backend.route import Route

_COUNTS = ("lanes", "rows", "bytes forward", "bytes gradient")
_HEADER = ("", "backend", "on", "solver", "controller", "saved", "state", *_COUNTS)


class Routes(tuple[Route, ...]):
    """The routes of all solves in a function, in the order of the trace; `print` shows them as a table.

    To state the bytes, `print` has each solve compiled, which takes seconds; nothing is run.
    """

    def __str__(self) -> str:
        if not self:
            return "No solve with GradSolveAdjoint was found."
        rows = [_HEADER, *(_row(number, route) for number, route in enumerate(self, 1))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        for number, route in enumerate(self, 1):
            lines += ["", f"{number}. {route.backend}: {route.why}"]
            lines += [f"   not {name}: {reason}" for name, reason in route.others]
        return "\n".join(lines)


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Routes:
    """Trace `fn(*args, **kwargs)` without running it, and list the route of every solve inside.

    Args:
        fn: any function that calls `diffrax.diffeqsolve`, also under `jax.jit`, `jax.grad` or `jax.vmap`.
        args, kwargs: as for `fn`; an array may be replaced by a `jax.ShapeDtypeStruct`. As with
            `equinox.filter_jit`, what is no array is static.

    Returns:
        One `Route` for each solve in the traced program: a solve in the body of a loop counts once.
        Environment variables that changed since a function was compiled hold from here on.

    Raises:
        Exception: whatever tracing `fn` raises.
    """
    refresh()
    program, _, _ = eqx.filter_make_jaxpr(fn)(*args, **kwargs)
    return Routes(_routes(program.jaxpr))


def _routes(jaxpr: Jaxpr) -> Iterator[Route]:
    for equation in jaxpr.eqns:
        route = equation.params.get("route")
        if isinstance(route, Route):
            yield dataclasses.replace(route, lanes=_lanes(equation), call=equation.params.get("call"))
        # Flattened first, because a parameter may be a list or a dictionary of programs.
        for inner in jaxprs_in_params(dict(enumerate(jax.tree.leaves(equation.params)))):
            yield from _routes(inner)


def _lanes(equation: JaxprEqn) -> int | None:
    lanes = equation.params.get("lanes")
    return None if lanes is None else math.prod(lanes)


def _row(number: int, route: Route) -> tuple[str, ...]:
    problem = route.problem
    state = f"{problem.dimension} x {'/'.join(problem.dtypes)}"
    rows = None if route.lanes is None else route.record_rows
    counts = (route.lanes, rows, route.bytes_forward, route.bytes_gradient)
    names = (route.backend, problem.platform, problem.solver, problem.controller, ", ".join(problem.saving), state)
    return (str(number), *names, *("?" if count is None else f"{count:,}" for count in counts))
