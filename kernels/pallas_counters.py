"""Loop variables that only count: a kernel holds how much was added, in half the registers."""

from typing import Any

import numpy as np

from gradsolve_backend.kernels.compat import Literal
from gradsolve_backend.kernels.routines import ALIVE, Routine


def counters(step: Routine) -> tuple[int, ...]:
    """The loop variables of 64 bits that a step adds to where a lane is alive, and that nothing else reads.

    `step` is `Pieces.step`. Run with such a variable at zero, it gives what is added.
    """
    jaxpr, found = step.program.jaxpr.jaxpr, []
    uses: dict[Any, list[Any]] = {}
    for reader in (*jaxpr.eqns, jaxpr):
        for v in reader.outvars if reader is jaxpr else reader.invars:
            if not isinstance(v, Literal):
                uses.setdefault(v, []).append(reader)
    inputs = _variables(step.reads, step.program.in_avals, step.program.tables, jaxpr.invars)
    outputs = _variables(step.writes, step.program.out_avals, [False] * len(step.writes), jaxpr.outvars)
    for place, v in inputs.items():
        if place[0] == "carry" and np.dtype(v.aval.dtype) == np.int64:
            if _counts(v, inputs.get(ALIVE), outputs.get(place), uses):
                found.append(place[1])
    return tuple(found)


def _variables(places: Any, avals: Any, tables: Any, variables: Any) -> dict[Any, Any]:
    """The variables of the places that hold one number."""
    found, rest = {}, iter(variables)
    for place, aval, whole in zip(places, avals, tables, strict=True):
        own = [next(rest) for _ in range(1 if whole else int(np.prod(aval.shape, dtype=int)))]
        if aval.shape == () and not whole:
            found[place] = own[0]
    return found


def _counts(v: Any, alive: Any, out: Any, uses: dict[Any, list[Any]]) -> bool:
    """Whether `out` is `select(alive, v, v + x)`, and none of the three is read elsewhere."""
    readers = uses.get(v, [])
    names = sorted(getattr(getattr(r, "primitive", None), "name", "") for r in readers)
    if names != ["add", "select_n"] or out is None:
        return False
    add, choice = sorted(readers, key=lambda r: r.primitive.name)
    return (
        choice.invars == [alive, v, add.outvars[0]]
        and choice.outvars[0] is out
        and sum(x is v for x in add.invars) == 1
        and len(uses[add.outvars[0]]) == 1
        and len(uses[out]) == 1
    )
