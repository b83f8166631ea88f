"""From a case to the solve that is put to the test: `(y0, args) -> outputs`, on the tested adjoint or on stock."""

import dataclasses
from collections.abc import Callable
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optimistix as optx

from gradsolve_backend.conformance import axes
from gradsolve_backend.conformance.grid import Case
from gradsolve_backend.conformance.problem import Problem
from gradsolve_backend.conformance.problems import PROBLEMS

MAX_STEPS = 4096


@dataclasses.dataclass(frozen=True)
class Solve:
    """The solve of one case as a function of what is differentiated.

    - `adjoint`: the adjoint under test, or the one of stock that knows the transform.
    - `with_mesh`: also record the step times, as one more output of the same solve.
    """

    case: Case
    adjoint: diffrax.AbstractAdjoint
    with_mesh: bool

    @property
    def problem(self) -> Problem:
        return PROBLEMS[self.case.problem]

    def inputs(self) -> tuple[Any, Any]:
        """`(y0, args)` in the dtype of the case."""
        return self.problem.inputs(self.case.jax_dtype)

    def times(self) -> dict[str, Any]:
        """The times of the call by name, in the dtype of the case."""
        case = self.case
        times = axes.start_times(self.problem, case.controller, case.saving, case.jax_dtype)
        if case.transform == "gradtime" and "dt0" not in times and case.controller != "stepto":
            times["dt0"] = (times["t1"] - times["t0"]) / (8 * self.problem.steps)
        return times

    def __call__(self, inputs: tuple[Any, Any], times: dict[str, Any], mesh: Any = None) -> tuple[Any, dict[str, Any]]:
        """Solve.

        Args:
            inputs: `(y0, args)`.
            times: as `Solve.times` gives them.
            mesh: None, or recorded step times, (MAX_STEPS + 1,), which then decide the steps instead of the controller.

        Returns:
            `outputs`, a PyTree of floating arrays without infinities, and a dictionary of `steps` (taken, accepted,
            rejected, (solves, 3)), `unused` (where the infinities were), `controller` (the arrays of its state, if
            saved) and, where asked for, `mesh` (MAX_STEPS + 1,).
        """
        if self.case.saving == "state":
            return self._in_two_parts(inputs, times)
        subs = _SUBS[self.case.saving](times)
        dense = self.case.saving == "dense"
        # Always as an auxiliary output of the same solve: another program may round, and so step, otherwise.
        both = {"case": subs, "mesh": diffrax.SubSaveAt(t0=True, steps=True, fn=lambda t, y, args: None)}
        sol = self._solve(inputs, times, mesh, diffrax.SaveAt(subs=both if self.with_mesh else subs, dense=dense))
        saved = (sol.ts["case"], sol.ys["case"]) if self.with_mesh else (sol.ts, sol.ys)
        aux = {"steps": _counts(sol), "unused": jtu.tree_map(jnp.isinf, saved)}
        if self.with_mesh:
            aux["mesh"] = jnp.where(jnp.isinf(sol.ts["mesh"]), times["t1"], sol.ts["mesh"])
        return _finite((saved, _evaluated(sol, times) if dense else ())), aux

    def _solve(self, inputs: tuple[Any, Any], times: dict[str, Any], mesh: Any, saveat: Any, **state: Any) -> Any:
        case, (y0, args) = self.case, inputs
        controller = axes.make_controller(case.controller, self.problem, self._tolerance, times)
        return diffrax.diffeqsolve(
            self.problem.terms(self.problem, case.jax_dtype),
            self._solver(),
            times["t0"],
            times["t1"],
            None if mesh is not None else times.get("dt0"),
            y0,
            args,
            stepsize_controller=controller if mesh is None else axes.RecordedMesh(mesh),
            saveat=saveat,
            adjoint=self.adjoint,
            max_steps=MAX_STEPS,
            **state,
        )

    @property
    def _tolerance(self) -> dict[str, Any]:
        return axes.tolerances(self.problem, axes.SOLVERS[self.case.solver], self.case.jax_dtype)

    def _solver(self) -> diffrax.AbstractSolver:
        """Solvers that iterate take inner tolerances from an adaptive controller; for any other they must be given."""
        row, case = axes.SOLVERS[self.case.solver], self.case
        fixed = case.controller in axes.FIXED
        if not row.implicit or row.family == "rosenbrock":
            return row.make()
        if row.family == "implicit" and not fixed and case.oracle == "plain":
            return row.make()
        # The default root finder takes changes as small as rounding for divergence, and has the controller try a
        # smaller step. A fixed mesh has none; and where half of a problem is explicit, rounding would decide the steps.
        finder = optx.Newton if fixed or row.family == "imex" else diffrax.VeryChord
        return row.make(root_finder=finder(**self._tolerance))

    def _in_two_parts(self, inputs: tuple[Any, Any], times: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Stop half-way, save everything, and go on from there with the states passed in."""
        middle = times["t0"] + (times["t1"] - times["t0"]) / 2
        saveat = diffrax.SaveAt(t1=True, solver_state=True, controller_state=True, made_jump=True)
        first = self._solve(inputs, times | {"t1": middle}, None, saveat)
        state = {"solver_state": first.solver_state, "made_jump": first.made_jump}
        if self.case.controller in ("pid", "fullpid"):
            # The other controllers keep the span, or positions in it, in their state.
            state["controller_state"] = first.controller_state
        y1 = jtu.tree_map(lambda x: x[-1], first.ys)
        second = self._solve((y1, inputs[1]), times | {"t0": middle}, None, diffrax.SaveAt(t1=True), **state)
        solver, controller = (
            jtu.tree_leaves(eqx.filter(state, eqx.is_inexact_array))
            for state in (first.solver_state, first.controller_state)
        )
        steps = jnp.concatenate([_counts(first), _counts(second)])
        return _finite((first.ys, second.ys, solver)), {"steps": steps, "unused": (), "controller": controller}


_SUBS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "t1": lambda times: diffrax.SubSaveAt(t1=True),
    "ts": lambda times: diffrax.SubSaveAt(t0=True, ts=times["ts"]),
    "steps": lambda times: diffrax.SubSaveAt(steps=True),
    "steps3": lambda times: diffrax.SubSaveAt(t0=True, steps=3),
    "dense": lambda times: diffrax.SubSaveAt(t1=True),
    "subs": lambda times: (diffrax.SubSaveAt(ts=times["ts"], fn=_statistics), diffrax.SubSaveAt(t0=True, t1=True)),
}


def _statistics(t: Any, y: Any, args: Any) -> dict[str, Any]:
    """What the saving `subs` keeps: a function of time, state and parameters."""
    state = jnp.concatenate([x.ravel() for x in jtu.tree_leaves(y)])
    first = jtu.tree_leaves(args)[0].ravel()[0]
    return {"power": jnp.sum(state**2), "mixed": first * state[0] * jnp.cos(t)}


def _evaluated(sol: diffrax.Solution, times: dict[str, Any]) -> Any:
    """What the saving `dense` is asked for: values, and the derivative in time."""
    span = times["t1"] - times["t0"]
    asked = times["t0"] + span * jnp.asarray([0.02, 0.31, 0.74, 0.99], span.dtype)
    return jax.vmap(sol.evaluate)(asked), sol.derivative(asked[1])


def _finite(tree: Any) -> Any:
    """Unused slots are infinite in Diffrax; users select on the result, which is what reaches the adjoint as zeros."""
    return jtu.tree_map(lambda x: jnp.where(jnp.isinf(x), jnp.zeros_like(x), x), tree)


def _counts(sol: diffrax.Solution) -> Any:
    names = ("num_steps", "num_accepted_steps", "num_rejected_steps")
    return jnp.stack([jnp.asarray(sol.stats[name], jnp.int32) for name in names])[None]
