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
#: In a noisy case the inputs of stock are changed by so many units of rounding, and so many times what this changes in
#: a slope is allowed on top.
NUDGE, NOISE = 4, 30
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


def reference(case: Case, mesh: Any) -> Callable[[float], dict[str, Any]]:
    """What stock answers, one lane after the other: on `mesh`, or if that is None with the controller of the case.

    Returns a function of a factor on state and parameters, which compiles once.
    """
    solve = Solve(case, stock_adjoint(case.transform), with_mesh=False)

    def run(inputs: Any, times: Any, mesh: Any) -> dict[str, Any]:
        return transforms.apply(case.transform, solve, transforms.loop, (inputs, times, mesh))

    # The reference runs once or twice: time spent on optimising it is lost.
    compiled = jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})
    return lambda factor: compiled(jtu.tree_map(lambda x: factor * x, solve.inputs()), solve.times(), mesh)


def check(case: Case, adjoint: diffrax.AbstractAdjoint) -> list[str]:
    """Everything in which `adjoint` differs from stock in a case, in words; empty if it conforms."""
    run, operands = tested(case, adjoint)
    found = jax.jit(run)(*operands)
    stock = reference(case, found["aux"].pop("mesh", None))
    nudged = stock(1 + NUDGE * float(jnp.finfo(case.jax_dtype).eps)) if case.noisy else None
    return differences(case, found, stock(1.0), nudged)


def differences(case: Case, found: dict[str, Any], expected: dict[str, Any], nudged: Any = None) -> list[str]:
    """Compare two results of one case; the step counts only where a separate run must take the same steps.

    `nudged` is stock's result at inputs changed by rounding, for a case that is noisy.
    """
    tolerance = TOLERANCES[case.dtype]
    problems: list[str] = []
    for name, share in (("value", tolerance.value), ("slope", tolerance.slope)):
        if name in expected:
            noise = None if nudged is None else nudged[name]
            problems += _compare(name, found[name], expected[name], (share, tolerance.floor), noise)
    states = found["aux"].get("controller", ()), expected["aux"].get("controller", ())
    problems += _compare("controller state", *states, (CONTROLLER_STATE, CONTROLLER_STATE))
    if not jtu.tree_all(jtu.tree_map(np.array_equal, found["aux"]["unused"], expected["aux"]["unused"])):
        problems.append("the slots left unused, which hold inf, are not those that stock leaves unused")
    steps, wanted = np.asarray(found["aux"]["steps"]), np.asarray(expected["aux"]["steps"])
    if case.exact_steps and not np.array_equal(steps, wanted):
        problems.append(f"steps (taken, accepted, rejected) are {steps.tolist()}, stock's {wanted.tolist()}")
    return problems


def _compare(name: str, found: Any, expected: Any, shares: tuple[float, float], nudged: Any = None) -> Iterator[str]:
    if jtu.tree_structure(found) != jtu.tree_structure(expected):
        yield f"{name} is {jtu.tree_structure(found)}, stock's {jtu.tree_structure(expected)}"
        return
    own, floor = shares
    whole = float(np.sqrt(sum(_norm(x) ** 2 for x in jtu.tree_leaves(expected))))
    others = jtu.tree_leaves(expected if nudged is None else nudged)
    leaves = zip(jtu.tree_leaves_with_path(found), jtu.tree_leaves(expected), others, strict=True)
    for (path, a), b, c in leaves:
        noise = _norm(np.asarray(c) - np.asarray(b))
        difference = _differs(a, b, own * _norm(b) + floor * whole + NOISE * noise)
        if difference:
            yield f"{name}{jtu.keystr(path)} is {difference}"


def _differs(a: Any, b: Any, allowed: float) -> str:
    if (jnp.shape(a), jnp.result_type(a)) != (jnp.shape(b), jnp.result_type(b)):
        return f"{jnp.result_type(a)}{jnp.shape(a)}, stock's {jnp.result_type(b)}{jnp.shape(b)}"
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return f"finite in {np.sum(np.isfinite(a))} places, stock's in {np.sum(np.isfinite(b))} or in others"
    off = _norm(np.asarray(a) - np.asarray(b))
    return f"off by {off:.2e}, allowed {allowed:.2e}; norm of stock's {_norm(b):.2e}" if off > allowed else ""


def _norm(x: Any) -> float:
    x = np.asarray(x, np.float64)
    return float(np.linalg.norm(np.where(np.isfinite(x), x, 0.0)))
