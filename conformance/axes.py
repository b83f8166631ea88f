"""The solver, controller and saving axes: what each name stands for in a call of `diffeqsolve`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import diffrax
import jax.numpy as jnp
from jax import Array

from gradsolve_backend.adapters.rosenbrock import Rodas4, Rodas5P, Rosenbrock23
from gradsolve_backend.adapters.verner import Vern7
from gradsolve_backend.conformance.problem import Problem


@dataclasses.dataclass(frozen=True)
class Solver:
    """One row of the solver axis.

    - `family`: what is alike to a backend; the short grid pairs families, not solvers, with the other axes.
    - `kind`: the kind of problem it fits, as in `Problem.kind`.
    - `error`: it estimates its error, so that a controller can adapt the step.
    - `loose`: factor on the tolerances, so that methods of low order take some hundred steps, not thousands.
    - `noisy`: of so high an order that the error estimate of a short step is rounding, which then decides the next one.
    """

    family: str
    make: Callable[..., diffrax.AbstractSolver]
    kind: str = "ode"
    error: bool = True
    implicit: bool = False
    loose: float = 1.0
    noisy: bool = False


SOLVERS: Mapping[str, Solver] = {
    "tsit5": Solver("erk", diffrax.Tsit5),
    "dopri5": Solver("erk", diffrax.Dopri5),
    "bosh3": Solver("erk", diffrax.Bosh3, loose=10),
    "heun": Solver("erk", diffrax.Heun, loose=1000),
    "midpoint": Solver("erk", diffrax.Midpoint, loose=1000),
    "ralston": Solver("erk", diffrax.Ralston, loose=1000),
    "euler": Solver("erk", diffrax.Euler, error=False),
    "dopri8": Solver("erk", diffrax.Dopri8, loose=0.1),
    "kvaerno3": Solver("implicit", diffrax.Kvaerno3, implicit=True, loose=10),
    "kvaerno5": Solver("implicit", diffrax.Kvaerno5, implicit=True),
    "kencarp3": Solver("imex", diffrax.KenCarp3, kind="split", implicit=True),
    "semieuler": Solver("symplectic", diffrax.SemiImplicitEuler, kind="hamiltonian", error=False),
    "leapfrog": Solver("leapfrog", diffrax.LeapfrogMidpoint, error=False),
    "reversible": Solver("reversible", diffrax.ReversibleHeun, loose=10000),
    "sdeheun": Solver("sde", diffrax.Heun, kind="sde"),
    "vern7": Solver("erk", Vern7, loose=0.1, noisy=True),
    "rosenbrock23": Solver("rosenbrock", Rosenbrock23, implicit=True, loose=1000),
    "rodas4": Solver("rosenbrock", Rodas4, implicit=True),
    "rodas5p": Solver("rosenbrock", Rodas5P, implicit=True),
}

#: The solvers of Diffrax: the grid covers them first, so that its cases do not depend on what else there is.
OF_DIFFRAX = tuple(name for name, row in SOLVERS.items() if row.make.__module__.startswith("diffrax."))

#: Controllers under which the mesh does not depend on the state.
FIXED = ("const", "stepto")
#: Default PID; PID with every coefficient and limit set; PID that is made to step to, and jump at, given times.
ADAPTIVE = ("pid", "fullpid", "clip")
CONTROLLERS = (*FIXED, *ADAPTIVE)

#: End; start and given times; every step; every third step; dense; two outputs, one of a function; all states, and a
#: second solve that starts from them.
SAVINGS = ("t1", "ts", "steps", "steps3", "dense", "subs", "state")
#: Savings that evaluate the solution between steps.
INTERPOLATED = ("ts", "dense", "subs")

DTYPES: Mapping[str, Any] = {"f64": jnp.float64, "f32": jnp.float32}


def tolerances(problem: Problem, solver: Solver, dtype: Any) -> dict[str, Any]:
    """`rtol` and `atol` of the controller; in float32 none is asked for that rounding would decide."""
    floor = 1e-4 if dtype == jnp.float32 else 0.0
    return {"rtol": max(problem.rtol * solver.loose, floor), "atol": max(problem.atol * solver.loose, floor)}


def jumps(problem: Problem) -> tuple[float, ...]:
    """Jump times of the clipping controller: the problem's, or one in the middle where that cannot flip a step."""
    middle = problem.t0 + 0.61 * (problem.t1 - problem.t0)
    return problem.jumps or ((middle,) if problem.mild else ())


def start_times(problem: Problem, controller: str, saving: str, dtype: Any) -> dict[str, Any]:
    """Every time that enters the call, by name: the inputs of the time gradient.

    `t0`, `t1`, `dt0` (absent where the step to start with is left to the controller), `ts` of the saving, and the
    times inside the controller (`knots`, `step_ts`, `jump_ts`).
    """
    span = problem.t1 - problem.t0
    times: dict[str, Any] = {"t0": problem.t0, "t1": problem.t1}
    if controller in ("fullpid", "clip"):
        times["dt0"] = span / (8 * problem.steps)
    if controller == "const":
        times["dt0"] = span / problem.steps
    if controller == "stepto":
        even = jnp.linspace(0.0, 1.0, problem.steps + 1, dtype=jnp.float64)
        uneven = (even + 0.1 * jnp.sin(2 * jnp.pi * even)).at[jnp.array([0, -1])].set(jnp.array([0.0, 1.0]))
        times["knots"] = problem.t0 + span * uneven
    if controller == "clip":
        times["step_ts"] = [problem.t0 + 0.37 * span]
        if jumps(problem):
            times["jump_ts"] = list(jumps(problem))
    if saving in ("ts", "subs"):
        times["ts"] = [problem.t0 + share * span for share in (0.13, 0.41, 0.42, 0.83, 1.0)]
    return {name: jnp.asarray(time, dtype) for name, time in times.items()}


def make_controller(
    name: str, problem: Problem, tolerance: dict[str, Any], times: dict[str, Any]
) -> diffrax.AbstractStepSizeController:
    """The controller called `name`, with the times it needs; see `tolerances` and `start_times`."""
    if name == "const":
        return diffrax.ConstantStepSize()
    if name == "stepto":
        return diffrax.StepTo(ts=times["knots"])
    if name == "fullpid":
        return _full_pid(tolerance, problem.t1 - problem.t0)
    pid = diffrax.PIDController(**tolerance)
    if name == "clip":
        return diffrax.ClipStepSizeController(pid, step_ts=times["step_ts"], jump_ts=times.get("jump_ts"))
    return pid


def _full_pid(tolerance: dict[str, Any], span: float) -> diffrax.PIDController:
    return diffrax.PIDController(
        **tolerance,
        pcoeff=0.2,
        icoeff=0.4,
        dcoeff=0.05,
        dtmin=1e-7 * span,
        dtmax=0.1 * span,
        factormin=0.3,
        factormax=4.0,
        safety=0.85,
    )


class RecordedMesh(diffrax.AbstractStepSizeController[Any, Any]):
    """Step through recorded times: `diffrax.StepTo` for a mesh of any length in a buffer of one length.

    `ts` starts at `t0`; behind the last step every entry is `t1`. Many lanes can so share one compiled function, which
    `StepTo`, whose times must increase strictly up to the last, does not allow.
    """

    ts: Array

    def wrap(self, direction: Any) -> "RecordedMesh":
        return RecordedMesh(self.ts * direction)

    def init(self, terms, t0, t1, y0, dt0, args, func, error_order):
        del terms, t0, t1, y0, dt0, args, func, error_order
        return self.ts[1], jnp.asarray(2)

    def adapt_step_size(self, t0, t1, y0, y1_candidate, args, y_error, error_order, controller_state):
        del t0, y0, y1_candidate, args, y_error, error_order
        last = jnp.minimum(controller_state, self.ts.size - 1)
        return True, t1, self.ts[last], False, controller_state + 1, diffrax.RESULTS.successful
