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

from gradsolve_backend.adapters.once import Once
from gradsolve_backend.adapters.rosenbrock import AbstractRosenbrock
from gradsolve_backend.hooks import solver_step
from gradsolve_backend.kernels.erk import Tableau, explicit_step

Step = tuple[Any, Any, dict[str, Any], Any, Any]  # y1, error estimate, dense values, solver state, result


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

    A step that is differentiated may compute its first stage `again` and leave the solver state as it is. Where only
    the next step reads that state, the derivative is the same, of as many stages: the last one needs none.
    """

    field: Callable
    reuse: bool
    again: bool = False

    def enter(self, t0: Any, y0: Any, state: Any) -> Any:
        if not self.reuse:
            return state
        first_step, first = state
        fresh = self.field(t0, y0, self.args)
        return jtu.tree_map(lambda a, b: jnp.where(first_step, a, b), fresh, first)

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
        after = state if self.again or not self.reuse else last
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
    source: str = ""  # the plugin that supplies the step, if one does

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


def _rosenbrock(solver: Any, terms: Any, args: Any) -> Generic:
    """The step of a Rosenbrock method is one piece of straight-line code; the vector field in it may be another."""
    own = lambda t0, t1, y0, state, jump: solver.step(terms, t0, t1, y0, args, state, jump)  # noqa: E731
    return Generic(solver, terms, args, Once(own, inline=True))


def _supplied(solver: Any, terms: Any, args: Any, source: str, step: Callable) -> Generic:
    """A step that a plugin supplies."""
    own = lambda t0, t1, y0, state, jump: step(terms, t0, t1, y0, args, state, jump)  # noqa: E731
    return Generic(solver, terms, args, Once(own), source)


def methods(solver: Any, terms: Any, args: Any, start: Any, inner: bool) -> tuple[AbstractMethod, AbstractMethod]:
    """The method for running the loop from `start = (t0, y0)`, and the one to differentiate in a replay.

    `inner`: all that is seen of the solver state and of the stages is what the next step makes of them.
    """
    if (found := solver_step(solver)) is not None:
        method = _supplied(solver, terms, args, *found)
        return method, method
    if isinstance(solver, AbstractRosenbrock):
        method = _rosenbrock(solver, terms, args)
        return method, method
    if not _is_plain(solver):
        return _generic(solver, terms, args, "lax"), _generic(solver, terms, args, "bounded")
    t0, y0 = start
    reuse = solver.tableau.fsal and not terms.is_vf_expensive(t0, t0, y0, args)
    method = ExplicitRungeKutta(solver, terms, args, Once(terms.vf), reuse)
    return method, replace(method, again=reuse and inner)
