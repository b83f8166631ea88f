"""Runs a case on the tested adjoint and on stock, and says in what the two differ."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from gradsolve_backend.conformance import transforms
from gradsolve_backend.conformance.grid import Case
from gradsolve_backend.conformance.solve import Solve


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Largest difference in an array, as a share of the norm of the reference array.

    `floor`: the share of the norm of the whole result below which an array counts as rounding of the larger ones.
    """

    value: float
    slope: float
    floor: float


#: The state of a controller holds inverse error estimates, which are differences of numbers that are nearly equal.
CONTROLLER_STATE = 1e-3
TOLERANCES = {"f64": Tolerance(1e-10, 1e-9, 1e-12), "f32": Tolerance(1e-4, 1e-4, 1e-5)}


def stock_adjoint(transform: str) -> diffrax.AbstractAdjoint:
    """The adjoint of Diffrax that knows the transform: none of them knows all."""
    if transform in transforms.MIXED:
        return diffrax.DirectAdjoint()
    return diffrax.ForwardMode() if transform in transforms.FORWARD else diffrax.RecursiveCheckpointAdjoint()


def tested(case: Case, adjoint: diffrax.AbstractAdjoint) -> tuple[Callable[..., dict[str, Any]], tuple[Any, ...]]:
    """The transformed solve of a case on `adjoint`, and the arguments to call it with."""
    solve = Solve(case, adjoint, with_mesh=case.oracle == "mesh")

    def run(inputs: Any, times: Any) -> dict[str, Any]:
        return transforms.apply(case.transform, solve, jax.vmap, (inputs, times, None))

    return run, (solve.inputs(), solve.times())


def reference(case: Case, mesh: Any) -> dict[str, Any]:
    """What stock answers, one lane after the other: on `mesh`, or if that is None with the controller of the case."""
    solve = Solve(case, stock_adjoint(case.transform), with_mesh=False)

    def run(inputs: Any, times: Any, mesh: Any) -> dict[str, Any]:
        return transforms.apply(case.transform, solve, transforms.loop, (inputs, times, mesh))

    # The reference runs once: time spent on optimising it is lost.
    fast_to_compile = {"xla_backend_optimization_level": 0}
    return jax.jit(run, compiler_options=fast_to_compile)(solve.inputs(), solve.times(), mesh)


def check(case: Case, adjoint: diffrax.AbstractAdjoint) -> list[str]:
    """Everything in which `adjoint` differs from stock in a case, in words; empty if it conforms."""
    run, operands = tested(case, adjoint)
    found = jax.jit(run)(*operands)
    mesh = found["aux"].pop("mesh", None)
    return differences(case, found, reference(case, mesh))


def differences(case: Case, found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Compare two results of one case; the step counts only where a separate run must take the same steps."""
    tolerance = TOLERANCES[case.dtype]
    problems = list(_compare("value", found["value"], expected["value"], tolerance.value, tolerance.floor))
    if "slope" in expected:
        problems += _compare("slope", found["slope"], expected["slope"], tolerance.slope, tolerance.floor)
    states = found["aux"].get("controller", ()), expected["aux"].get("controller", ())
    problems += _compare("controller state", states[0], states[1], CONTROLLER_STATE, CONTROLLER_STATE)
    if not jtu.tree_all(jtu.tree_map(np.array_equal, found["aux"]["unused"], expected["aux"]["unused"])):
        problems.append("the slots left unused, which hold inf, are not those that stock leaves unused")
    steps, wanted = np.asarray(found["aux"]["steps"]), np.asarray(expected["aux"]["steps"])
    if case.exact_steps and not np.array_equal(steps, wanted):
        problems.append(f"steps (taken, accepted, rejected) are {steps.tolist()}, stock's {wanted.tolist()}")
    return problems


def _compare(name: str, found: Any, expected: Any, tolerance: float, floor: float) -> Iterator[str]:
    if jtu.tree_structure(found) != jtu.tree_structure(expected):
        yield f"{name} is {jtu.tree_structure(found)}, stock's {jtu.tree_structure(expected)}"
        return
    whole = float(np.sqrt(sum(_norm(x) ** 2 for x in jtu.tree_leaves(expected))))
    for (path, a), b in zip(jtu.tree_leaves_with_path(found), jtu.tree_leaves(expected), strict=True):
        where = name + jtu.keystr(path)
        if (jnp.shape(a), jnp.result_type(a)) != (jnp.shape(b), jnp.result_type(b)):
            yield f"{where} is {jnp.result_type(a)}{jnp.shape(a)}, stock's {jnp.result_type(b)}{jnp.shape(b)}"
        elif not np.array_equal(np.isfinite(a), np.isfinite(b)):
            yield f"{where} is finite in {np.sum(np.isfinite(a))} places, stock's in {np.sum(np.isfinite(b))} or others"
        elif (off := _norm(np.asarray(a) - np.asarray(b))) > (allowed := tolerance * _norm(b) + floor * whole):
            yield f"{where} is off by {off:.2e}, allowed {allowed:.2e}; norm of stock's {_norm(b):.2e}"


def _norm(x: Any) -> float:
    x = np.asarray(x, np.float64)
    return float(np.linalg.norm(np.where(np.isfinite(x), x, 0.0)))
