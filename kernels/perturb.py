"""Which outputs of a program a derivative can reach: an analysis of the primal jaxpr, no differentiation traced."""

from collections.abc import Iterable, Sequence
from typing import Any

from gradsolve_backend.kernels.compat import Jaxpr, Literal
from gradsolve_backend.kernels.trace import LaneFunction, inexact

CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}
STOPS = frozenset({"stop_gradient"})


def _equation(eqn: Any, reached: Sequence[bool]) -> list[bool]:
    """Conservative: every inexact output depends on every input, except through plain calls and `stop_gradient`."""
    inner = eqn.params.get(CALLS.get(eqn.primitive.name, ""))
    if inner is not None:
        return _program(getattr(inner, "jaxpr", inner), reached)
    hit = any(reached) and eqn.primitive.name not in STOPS
    return [hit and inexact(v.aval) for v in eqn.outvars]


def _program(jaxpr: Jaxpr, reached: Sequence[bool]) -> list[bool]:
    known = {v for v, r in zip(jaxpr.invars, reached, strict=True) if r}
    hit = lambda v: not isinstance(v, Literal) and v in known  # noqa: E731
    for eqn in jaxpr.eqns:
        out = _equation(eqn, [hit(v) for v in eqn.invars])
        known.update(v for v, r in zip(eqn.outvars, out, strict=True) if r)
    return [hit(v) for v in jaxpr.outvars]


def reached_outputs(function: LaneFunction, arguments: Iterable[int], operands: Iterable[int]) -> list[bool]:
    """For each output, whether a derivative with respect to these arguments and operands can reach it."""
    roots = set(arguments) | {~o for o in operands}
    return _program(function.jaxpr, [*[False] * len(function.fixed), *(s in roots for s in function.sources)])


def reached_in_loop(
    steps: Sequence[LaneFunction], among: frozenset[int], carry: Iterable[int], operands: Iterable[int]
) -> frozenset[int]:
    """Which of some loop variables a derivative reaches in the course of a loop, through any function of a step.

    Loop variables are the first arguments and outputs.
    """
    operands, known = tuple(operands), among & frozenset(carry)
    while True:
        found = [reached_outputs(step, known, operands) for step in steps]
        grown = known | {i for i in among if any(reached[i] for reached in found)}
        if grown == known:
            return known
        known = grown
