"""What a kernel of the backend `pallas` can express, and what is too large for one."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from gradsolve_backend.kernels.routines import Routine
from gradsolve_backend.kernels.scalar import SHARED, NoScalarForm, ScalarProgram

DTYPES = frozenset(np.dtype(d) for d in ("bool", "int32", "int64", "uint32", "uint64", "float32", "float64"))
EQUATIONS = 2_000  # of a trial step: a thread holds its lane in registers, and Triton takes minutes to compile more
DERIVATIVE_EQUATIONS = 2 * EQUATIONS
SUMS = 256  # elements of operands that are differentiated: a lane sums the cotangent of each in registers

#: Primitives that Triton and XLA give one meaning.
PLAIN = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil cos cosh div eq exp
    exp2 expm1 floor ge gt le log log1p log2 lt mul ne nextafter not or rsqrt sin sinh sqrt sub tan tanh xor""".split()
)
#: Primitives that are written in terms of others.
REWRITTEN = frozenset(
    """clamp convert_element_type integer_pow is_finite logistic max min neg pow rem round select_n shift_left
    shift_right_arithmetic shift_right_logical sign square""".split()
)
NAMES = PLAIN | REWRITTEN | {"dynamic_slice", "squeeze", SHARED}


def equations(closed: Any) -> int:
    """Equations of a scalar program with all that it calls written out."""
    return sum(equations(e.params["program"].jaxpr) if e.primitive.name == SHARED else 1 for e in closed.jaxpr.eqns)


def _foreign(closed: Any) -> str:
    for equation in closed.jaxpr.eqns:
        name = equation.primitive.name
        reason = _foreign(equation.params["program"].jaxpr) if name == SHARED else ""
        if name not in NAMES:
            reason = f"primitive `{name}` has no form in a kernel for GPUs"
        if reason:
            return reason
    atoms = [*closed.jaxpr.invars, *closed.jaxpr.constvars, *(v for e in closed.jaxpr.eqns for v in e.outvars)]
    for dtype in dict.fromkeys(np.dtype(atom.aval.dtype) for atom in atoms):
        if dtype not in DTYPES:
            return f"values of dtype {dtype} have no form in a kernel for GPUs"
    return ""


def unsupported(program: ScalarProgram, limit: int = EQUATIONS) -> str:
    """Why a scalar program cannot run in a kernel, a sentence; empty if it can."""
    count = equations(program.jaxpr)
    if count > limit:
        return f"a kernel for GPUs has room for {limit} equations, and this has {count}"
    return _foreign(program.jaxpr)


def without_form(*routines: Callable[[], Routine]) -> str:
    """Why one of these routines of a derivative cannot be in a kernel."""
    try:
        made: Iterable[Routine] = [routine() for routine in routines]
    except NoScalarForm as error:
        return str(error)
    return next((reason for r in made if (reason := unsupported(r.program, DERIVATIVE_EQUATIONS))), "")
