"""How a step is made: explicit Runge-Kutta methods as straight-line code, all others by `solver.step`.

A method closes over the terms and args of one solve. It may hold its solver state in another form inside the loop:
`enter` and `leave` convert.
"""

import abc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import diffrax
import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from gradsolve_backend.kernels.compat import eval_jaxpr
from gradsolve_backend.kernels.erk import Tableau, explicit_step
from gradsolve_backend.kernels.scalar import SHARED, SHARED_EQUATIONS, scalar_equations

Step = tuple[Any, Any, dict[str, Any], Any, Any]  # y1, error estimate, dense values, solver state, result


class Once:
    """A function of arrays that is traced at its first call with arguments of some shapes, and evaluated after that.

    The user's Python then runs once, however many stages, steps and derivatives use it. What the function closes over
    must outlive all calls: operands of the solve do.
    """

    def __init__(self, function: Callable) -> None:
        self.function = function
        self._traced: dict[Any, tuple[Any, Any, Any, Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        arrays, rest = eqx.partition(arguments, eqx.is_array)
        leaves, structure = jtu.tree_flatten(arrays)
        key = (structure, tuple(jax.typeof(x) for x in leaves), *jtu.tree_leaves(rest))
        if key not in self._traced:
            self._traced[key] = self._trace(leaves, structure, rest)
        run, consts, out_structure, static = self._traced[key]
        return eqx.combine(jtu.tree_unflatten(out_structure, run(consts, leaves)), static)

    def _trace(self, leaves: Any, structure: Any, rest: Any) -> tuple[Any, Any, Any, Any]:
        found: list[Any] = []

        def flat(*leaves: Any) -> list[Any]:
            out = self.function(*eqx.combine(jtu.tree_unflatten(structure, leaves), rest))
            dynamic, static = eqx.partition(out, eqx.is_array)
            out_leaves, out_structure = jtu.tree_flatten(dynamic)
            found.extend((out_structure, static))
            return out_leaves

        program = jax.make_jaxpr(flat)(*leaves)
        return _evaluation(program), program.consts, found[0], found[1]


def _evaluation(program: Any) -> Callable:
    """Runs a traced function on its constants and arguments; a large one by a call, which keeps it in one piece."""

    def evaluate(consts: Any, leaves: Any) -> list[Any]:
        return eval_jaxpr(program.jaxpr, consts, *leaves)

    evaluate.__name__ = SHARED
    return jax.jit(evaluate) if scalar_equations(program.jaxpr) >= SHARED_EQUATIONS else evaluate


@dataclass(frozen=True, eq=False)
class AbstractMethod(abc.ABC):
    """One solver applied to one problem."""

    solver: Any
    terms: Any
    args: Any

    @abc.abstractmethod
    def enter(self, t0: Any, y0: Any, state: Any) -> Any:
        """The solver state inside the loop, from Diffrax's."""

    @abc.abstractmethod
    def leave(self, before: Any, state: Any, accepted: Any) -> Any:
        """Diffrax's solver state after `accepted` steps, from the one that entered and the one inside the loop."""

    @abc.abstractmethod
    def step(self, t0: Any, t1: Any, y0: Any, state: Any, made_jump: Any) -> Step:
        """One step from `t0` to `t1`, as `diffrax.AbstractSolver.step`."""


@dataclass(frozen=True, eq=False)
class ExplicitRungeKutta(AbstractMethod):
    """Any `diffrax.AbstractERK` that steps as its base class does; `reuse`: its last stage is the next step's first.

    What is reused may be `stopped`, without a derivative, if the step that is differentiated computes its first stage
    `again`. Where only the next step reads it, that is the same derivative, of as many stages: the last one has none.
    """

    field: Callable
    reuse: bool
    stopped: bool = False
    again: bool = False

    def enter(self, t0: Any, y0: Any, state: Any) -> Any:
        if not self.reuse:
            return state
        first_step, first = state
        fresh = self._kept(self.field(t0, y0, self.args))
        return jtu.tree_map(lambda a, b: jnp.where(first_step, a, b), fresh, first)

    def _kept(self, stage: Any) -> Any:
        return jtu.tree_map(jax.lax.stop_gradient, stage) if self.stopped else stage

    def leave(self, before: Any, state: Any, accepted: Any) -> Any:
        if not self.reuse:
            return state
        first_step, first = before
        none = accepted == 0
        return first_step & none, jtu.tree_map(lambda a, b: jnp.where(none, a, b), first, state)

    def step(self, t0: Any, t1: Any, y0: Any, state: Any, made_jump: Any) -> Step:
        control = self.terms.contr(t0, t1)
        first = None
        if self.reuse:
            if not self.again:
                first = self._after_jump(t0, y0, state, made_jump)
            field = lambda t, y: self.field(t, y, self.args)  # noqa: E731
            product = lambda f: self.terms.prod(f, control)  # noqa: E731
        else:
            field = lambda t, y: self.terms.vf_prod(t, y, self.args, control)  # noqa: E731
            product = lambda k: k  # noqa: E731
        tableau = Tableau.of(self.solver.tableau)
        y1, error, dense, last = explicit_step(tableau, field, product, (t0, t1), y0, first)
        after = state if self.again or not self.reuse else self._kept(last)
        return y1, error, dense, after, diffrax.RESULTS.successful

    def _after_jump(self, t0: Any, y0: Any, state: Any, made_jump: Any) -> Any:
        """The first stage, evaluated again where the field has jumped since it was computed."""
        if made_jump is False:
            return state
        fresh = lambda: jtu.tree_map(lambda a, b: jnp.where(made_jump, a, b), self.field(t0, y0, self.args), state)  # noqa: E731
        return jax.lax.cond(eqxi.unvmap_any(made_jump), fresh, lambda: state)


@dataclass(frozen=True, eq=False)
class Generic(AbstractMethod):
    """Any solver, by its own `step(t0, t1, y0, state, made_jump)`."""

    own: Callable

    def enter(self, t0: Any, y0: Any, state: Any) -> Any:
        return state

    def leave(self, before: Any, state: Any, accepted: Any) -> Any:
        return state

    def step(self, t0: Any, t1: Any, y0: Any, state: Any, made_jump: Any) -> Step:
        return self.own(t0, t1, y0, state, made_jump)


def _has_stage_loop(x: Any) -> bool:
    return isinstance(x, (diffrax.AbstractRungeKutta, diffrax.AbstractSRK))


def _with_stage_loop(solver: Any, kind: Literal["lax", "bounded"]) -> Any:
    """The solver, or those inside it, with this kind of stage loop where the user chose none."""

    def chosen(x: Any) -> Any:
        if _has_stage_loop(x) and x.scan_kind is None:
            return eqx.tree_at(lambda s: s.scan_kind, x, kind, is_leaf=lambda s: s is None)
        return x

    return jtu.tree_map(chosen, solver, is_leaf=_has_stage_loop)


def _is_plain(solver: Any) -> bool:
    """Whether a solver is explicit Runge-Kutta and steps, starts and evaluates its field as the base class does."""
    if not isinstance(solver, diffrax.AbstractERK) or not isinstance(solver.tableau, diffrax.ButcherTableau):
        return False
    base = diffrax.AbstractRungeKutta
    return all(getattr(type(solver), name) is getattr(base, name) for name in ("step", "init", "func"))


def _generic(solver: Any, terms: Any, args: Any, kind: Literal["lax", "bounded"]) -> Generic:
    looped = _with_stage_loop(solver, kind)
    own = lambda t0, t1, y0, state, jump: looped.step(terms, t0, t1, y0, args, state, jump)  # noqa: E731
    return Generic(solver, terms, args, Once(own))


def methods(solver: Any, terms: Any, args: Any, start: Any, inner: bool) -> tuple[AbstractMethod, AbstractMethod]:
    """The method for running the loop from `start = (t0, y0)`, and the one to differentiate in a replay.

    `inner`: all that is seen of the solver state and of the stages is what the next step makes of them.
    """
    if not _is_plain(solver):
        return _generic(solver, terms, args, "lax"), _generic(solver, terms, args, "bounded")
    t0, y0 = start
    reuse = solver.tableau.fsal and not terms.is_vf_expensive(t0, t0, y0, args)
    method = ExplicitRungeKutta(solver, terms, args, Once(terms.vf), reuse)
    if not (reuse and inner):
        return method, method
    return replace(method, stopped=True), replace(method, again=True)
