"""What is the same in all lanes of a block, such as the times of constant steps that all lanes take together.

It is computed once, as a number, and not for each lane.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from gradsolve_backend.kernels.compat import Literal
from gradsolve_backend.kernels.llvm_ops import Instruction, instructions
from gradsolve_backend.kernels.routines import ALIVE, Pieces, Place, Routine
from gradsolve_backend.kernels.scalar import SHARED
from gradsolve_backend.kernels.scalar_graph import LOOP

__all__ = ["uniform_places", "uniform_values"]


def uniform_values(listed: Sequence[Instruction], inputs: Iterable[Any]) -> set[Any]:
    """The variables that are the same in all lanes if these inputs of a program are."""
    found = set(inputs)
    for one in listed:
        if one.name not in (LOOP, SHARED) and all(isinstance(v, Literal) or v in found for v in one.inputs):
            found.update(one.outputs)
    return found


def uniform_inputs(routine: Routine, places: Iterable[Place]) -> set[Any]:
    """The inputs and constants of a routine's program that are the same in all lanes if these places are."""
    program, own = routine.program, set(places)
    found, variables = set(program.jaxpr.jaxpr.constvars), iter(program.jaxpr.jaxpr.invars)
    for place, whole, aval in zip(routine.reads, program.tables, program.in_avals, strict=True):
        values = [next(variables) for _ in range(1 if whole else aval.size)]
        if place in own and not whole:
            found.update(values)
    return found


def _written(routine: Routine, places: Iterable[Place]) -> tuple[set[Place], set[Place]]:
    """The places that a routine fills with the same in all lanes, and all others that it writes."""
    program, same, other = routine.program, set(), set()
    values = uniform_values(instructions(program.jaxpr, False), uniform_inputs(routine, places))
    outputs = iter(program.jaxpr.jaxpr.outvars)
    for place, aval in zip(routine.writes, program.out_avals, strict=True):
        own = [next(outputs) for _ in range(int(np.prod(aval.shape, dtype=int)))]
        (same if all(isinstance(v, Literal) or v in values for v in own) else other).add(place)
    return same, other


def uniform_places(pieces: Pieces, shared: Iterable[Place]) -> frozenset[Place]:
    """The places of loop variables, operands and steps that are the same in all lanes of a block without padding.

    `shared`: the loop variables and operands that are the same before the first step. Which lanes are alive, and what
    a step leaves beside the loop variables, may be so as well. Cursors are not followed.
    """
    places = {*shared, ALIVE}
    while True:
        written = [_written(routine, places) for routine in (pieces.begin(), pieces.step())]
        changed = places & set().union(*(other for _, other in written))
        if not changed:
            return frozenset(places | (written[1][0] - set(pieces.state)))
        places -= changed
