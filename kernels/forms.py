"""Which form the lanes of a call take, and the scalar programs of its lane functions and of their derivatives.

Scalar lanes are for small systems: one fused loop instead of many small arrays. XLA's compile time and code quality
fall off with the length of a scalar program, so that the longest step that takes this form there was measured.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from gradsolve_backend.kernels.scalar import LINEAR, NoScalarForm, ScalarProgram, scalarise
from gradsolve_backend.kernels.solve import Call, Solve
from gradsolve_backend.kernels.trace import LaneFunction

EQUATIONS = 10_000  # of a program of the forward pass; what is longer, matrices mostly, is faster on arrays
LINEAR_EQUATIONS = 16_000  # of one that solves linear systems, which is not
DERIVATIVE_EQUATIONS = 40_000  # of its derivative
STEP_EQUATIONS = 600  # of a trial step that XLA compiles
PULL_EQUATIONS = 1500  # of the cotangent of an accepted step that XLA compiles
ELEMENTS = 100_000  # of all operands


def _push(function: LaneFunction, at: Sequence[int]) -> tuple[Callable, list[Any]]:
    """The tangent of a lane function, and what it takes besides the function's own inputs."""
    count = len(function.invars)

    def run(*inputs: Any) -> list[Any]:
        of, primals = _of(function, inputs[:count], at)
        return jax.jvp(of, primals, inputs[count:])[1]

    return run, [function.invars[i].aval for i in at]


def _pull(function: LaneFunction, at: Sequence[int]) -> tuple[Callable, list[Any]]:
    """The cotangent of a lane function, and what it takes besides the function's own inputs."""
    count = len(function.invars)

    def run(*inputs: Any) -> list[Any]:
        of, primals = _of(function, inputs[:count], at)
        return list(jax.vjp(of, *primals)[1](list(inputs[count:])))

    return run, function.outputs


def _of(function: LaneFunction, inputs: Sequence[Any], at: Sequence[int]) -> tuple[Callable, tuple[Any, ...]]:
    def of(*xs: Any) -> list[Any]:
        full = list(inputs)
        for i, x in zip(at, xs, strict=True):
            full[i] = x
        return function.run(*full)

    return of, tuple(inputs[i] for i in at)


DERIVATIVES = {"push": _push, "pull": _pull}


def scalar_program(function: LaneFunction, kind: str = "", at: tuple[int, ...] = ()) -> ScalarProgram:
    """The scalar program of a lane function, or of its tangent (`push`) or cotangent (`pull`) at some inputs.

    Derivatives are taken on arrays, so that rules of the user's own hold, and made scalar after that.

    Raises:
        NoScalarForm: it has none, with the reason.
    """
    found = function.scalars.get((kind, at))
    if found is None:
        try:
            found = _built(function, kind, at)
        except NoScalarForm as error:
            found = error
        function.scalars[kind, at] = found
    if isinstance(found, NoScalarForm):
        raise found
    return found


def _built(function: LaneFunction, kind: str, at: tuple[int, ...]) -> ScalarProgram:
    own: list[Any] = [v.aval for v in function.invars]
    elements = sum(a.size for a in own)
    if elements > ELEMENTS:
        raise NoScalarForm(f"its inputs have {elements} elements; at most {ELEMENTS} can be held one by one")
    run, more = DERIVATIVES[kind](function, at) if kind else (function.run, [])
    tables = [*(s < 0 for s in function.sources), *[False] * len(more)]
    longest = LINEAR_EQUATIONS if _solves(function.jaxpr) else EQUATIONS
    limit = DERIVATIVE_EQUATIONS if kind else longest
    return scalarise(jax.make_jaxpr(run)(*own, *more), limit=limit, table_inputs=tables)


def _solves(jaxpr: Any) -> bool:
    """Whether a program solves linear systems."""
    inner = [j for e in jaxpr.eqns for j in jax.tree.leaves(dict(e.params)) if hasattr(j, "eqns")]
    return any(e.primitive.name in LINEAR for e in jaxpr.eqns) or any(_solves(getattr(j, "jaxpr", j)) for j in inner)


def _forward(solve: Solve) -> list[LaneFunction]:
    return [solve.advance, solve.live, *(f for o in solve.outputs for f in (o.due, o.sample) if f is not None)]


def step_programs(solve: Solve) -> tuple[list[ScalarProgram], str]:
    """The scalar programs of a forward pass, that of a trial step first; or none and why it has no scalar form."""
    if solve.observed is not solve.advance:
        return [], "a progress meter has no scalar form"
    try:
        return [scalar_program(f) for f in _forward(solve)], ""
    except NoScalarForm as error:
        return [], str(error)


def _derived(call: Call, kind: str) -> Iterable[tuple[LaneFunction, str, tuple[int, ...]]]:
    yield call.replay, "", ()
    yield call.replay, kind, call.at.inputs(call.replay)[0]
    for sample in call.samples:
        if sample is not None:
            yield sample, "", ()
            yield sample, kind, call.sample_at.inputs(sample)[0]


def runs_scalar(solve: Solve) -> bool:
    """Whether XLA runs a forward pass on scalar lanes."""
    programs, _ = step_programs(solve)
    return bool(programs) and all(p.equations <= STEP_EQUATIONS and not p.calls for p in programs)


def takes_scalar(call: Call, kind: str) -> bool:
    """Whether XLA runs the forward pass and the derivative `kind` of a call on scalar lanes."""
    if not runs_scalar(call.solve):
        return False
    try:
        found = [(scalar_program(f, kind, at), kind) for f, kind, at in _derived(call, kind)]
    except NoScalarForm:
        return False
    return all(p.equations <= (PULL_EQUATIONS if kind else STEP_EQUATIONS) and not p.calls for p, kind in found)
