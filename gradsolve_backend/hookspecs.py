"""The hooks that a plugin may implement. Plugins are found by the entry-point group `gradsolve_backend`."""

from collections.abc import Callable, Sequence
from typing import Any

import pluggy

from gradsolve_backend.backend import AbstractBackend
from gradsolve_backend.problem import Problem
from gradsolve_backend.route import Route

PROJECT = "gradsolve_backend"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def gradsolve_backends() -> Sequence[AbstractBackend] | None:
    """Called once in a process, when the first solve is traced; None means: no backend on this machine.

    A plugin that lacks what it needs (a compiler, a device) returns None or an empty sequence
    rather than raise: what it raises reaches the user.

    Returns:
        The backends that this plugin offers. Their names must be unlike those of other plugins.
    """


@hookspec(firstresult=True)
def gradsolve_choose(problem: Problem) -> str | None:
    """Called when a solve is traced for which the user asks for no backend; None means: no opinion.

    Of several plugins the one that was registered last is asked first, and the first name counts. Where that backend
    cannot run the solve the choice is automatic, and the route says so. The answer must depend on `problem` alone.

    Args:
        problem: what is asked.

    Returns:
        The name of a backend.
    """


@hookspec(firstresult=True)
def gradsolve_solver_step(solver: Any) -> Callable[..., Any] | None:
    """Called when a solve is traced, with its solver; None means: it steps as its class says.

    For a solver whose step has loops inside, for example. Straight-line code for the same step runs as machine code,
    and has derivatives in every mode.

    Args:
        solver: the `diffrax.AbstractSolver` of the solve. Look at its exact type: a subclass may step otherwise.

    Returns:
        `step(terms, t0, t1, y0, args, solver_state, made_jump)`, which returns what `solver.step` does, to round-off:
        the state at `t1`, the error estimate or None, the values for dense output, the solver's state, the result.
    """


@hookspec
def gradsolve_routed(route: Route) -> None:
    """Called when a solve has been routed, and again if its derivative takes another way; None means: nothing else can.

    It runs while JAX traces, hence once for each solve that is compiled, not each time one runs. What it raises reaches
    the user.

    Args:
        route: which backend runs the solve, why, and why not the others. Its `lanes` are not yet known.
    """
