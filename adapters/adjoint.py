"""`GradSolveAdjoint`: the face towards `diffrax.diffeqsolve`."""

import functools
from typing import Any

import diffrax
import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from gradsolve_backend.adapters.build import Built, build
from gradsolve_backend.adapters.mesh import Record, drift_of, replaying
from gradsolve_backend.adapters.method import AbstractMethod, methods
from gradsolve_backend.adapters.saving import hides_stages
from gradsolve_backend.adapters.stock import own_loop
from gradsolve_backend.adapters.trial import Asked
from gradsolve_backend.config import Environment, requested_backend, requested_memory
from gradsolve_backend.hooks import announce, chosen_backend
from gradsolve_backend.kernels.compat import is_unsafe_sde
from gradsolve_backend.kernels.forms import runs_scalar, step_programs
from gradsolve_backend.kernels.held import held
from gradsolve_backend.kernels.lanes import varying
from gradsolve_backend.kernels.llvm_ops import unsupported
from gradsolve_backend.kernels.pallas_forms import unsupported as too_much_for_gpu
from gradsolve_backend.kernels.primitives import solve
from gradsolve_backend.kernels.solve import Call
from gradsolve_backend.marker import mark
from gradsolve_backend.plugins import backends
from gradsolve_backend.problem import Problem
from gradsolve_backend.route import Route, route


class GradSolveAdjoint(diffrax.AbstractAdjoint):
    """Differentiates `diffrax.diffeqsolve` by a replay of the steps that it accepted.

    Values, step counts and gradients equal those of Diffrax's default to round-off: the result is the exact
    derivative of the accepted steps. Forward and reverse mode, any nesting of `jax.vmap`, second derivatives.

    Arguments:
        backend: the name of the backend to use. By default the environment variable `GRADSOLVE_BACKEND`, and if that
            is not set the fastest one that can run the solve. What no backend can run takes Diffrax's own loop;
            `gradsolve_backend.explain` says which way a solve takes, and why.

        memory: bytes per lane (one trajectory under `jax.vmap`) that `llvm` and `pallas` reserve to differentiate the
            solve in reverse. By default the environment variable `GRADSOLVE_MEMORY`, else room for 128 steps. A solve
            of more steps is right all the same: what does not fit is run again.

        record: what `gradsolve_backend.record` made of the same solve at other values. Its mesh is replayed, without
            error control: the result is a smooth function of all inputs. `solution.stats["drift"]`, of shape (), is
            the largest scaled error on the mesh, 1 where it just meets the tolerance.

    Raises:
        ValueError: if the record is none; when a solve is traced, if no plugin offers a backend of this name, the
            memory is too little, or the record is of another solve.

    The method is published as GRADSOLVE, https://arxiv.org/abs/2609.02876.
    """

    backend: str | None = eqx.field(default=None, static=True)
    memory: int | None = eqx.field(default=None, static=True)
    record: Record | None = None
    environment: Environment = eqx.field(default_factory=Environment, init=False, repr=False)

    def __check_init__(self) -> None:
        if not (self.record is None or isinstance(self.record, Record)):
            wanted = "what `gradsolve_backend.record(...)` returns is wanted, or None."
            raise ValueError(f"GradSolveAdjoint(record={self.record!r}): {wanted}")

    def loop(self, **given: Any) -> Any:
        """Called by `diffrax.diffeqsolve`."""
        if self.record is None:
            return self._routed(given)
        state, stats = self._routed(replaying(self.record, given))
        return state, {**stats, "drift": drift_of(state)}

    def _routed(self, given: dict[str, Any]) -> Any:
        terms = given["terms"]
        if is_unsafe_sde(terms):
            raise ValueError(
                "`GradSolveAdjoint` was asked to solve an SDE driven by `UnsafeBrownianPath`, whose path cannot be "
                "replayed. Use `diffrax.VirtualBrownianTree`, or `adjoint=diffrax.ForwardMode()`."
            )
        backends_by_name = backends()
        name, origin = requested_backend(self.backend)
        if name is not None and name in backends_by_name and backends_by_name[name].kernels is None:
            chosen = route(_problem(given, None), name, origin, backends_by_name)
            return _stock(given, chosen)
        return self._run(given, name, origin)

    def _run(self, given: dict[str, Any], name: str | None, origin: str) -> Any:
        known, state = backends(), _varying_state(given)
        given = {**given, "init_state": state}
        asked = Asked.of(given)
        inner = hides_stages(asked) and not given["passed_solver_state"]
        running, replayed = methods(asked.solver, asked.terms, asked.args, (state.tprev, state.y), inner)

        def outer(cond_fun: Any, body_fun: Any, state: Any, **_: Any) -> Any:
            del cond_fun, body_fun
            built = build(asked, state, running, replayed)
            problem = _problem(given, built)
            asked_for = (name, origin) if name is not None else chosen_backend(problem) or (None, origin)
            chosen = route(problem, *asked_for, known)
            kernels = known[chosen.backend].kernels
            if kernels is None:
                raise _OwnLoop(chosen)
            memory = requested_memory(self.memory)
            chosen = chosen.holding(*kernels.record_room(built.solve, memory), held)
            announce(chosen)
            call = Call(built.solve, kernels, chosen, scalar=runs_scalar(built.solve), memory=memory)
            return built.finished(solve(call, *built.inputs))

        keywords = {k: v for k, v in given.items() if k not in PASSED}
        keywords["solver"] = StandIn(asked.solver, running)
        keywords["event"] = _with_solver(asked.event, asked.solver)
        inner = functools.partial(eqxi.while_loop, kind="lax")
        try:
            return self._loop(**keywords, inner_while_loop=inner, outer_while_loop=outer)
        except _OwnLoop as found:
            return _stock(given, found.route)


class _OwnLoop(Exception):
    """Leaves the tracing of a solve whose route, known only once its steps are traced, is Diffrax's own loop."""

    def __init__(self, chosen: Route) -> None:
        super().__init__(chosen.why)
        self.route = chosen


class StandIn(eqx.Module):
    """What Diffrax's loop sees of a solver: it evaluates the shape of a step, which should not trace a stage loop."""

    solver: Any
    method: AbstractMethod = eqx.field(static=True)

    @property
    def interpolation_cls(self) -> Any:
        """Dense output of the solver."""
        return self.solver.interpolation_cls

    def error_order(self, terms: Any) -> Any:
        """Order of the solver's error estimate."""
        return self.solver.error_order(terms)

    def step(self, terms: Any, t0: Any, t1: Any, y0: Any, args: Any, solver_state: Any, made_jump: Any) -> Any:
        """A step of the solver; only its shape is used."""
        inside = self.method.enter(t0, y0, solver_state)
        y1, error, dense, inside, result = self.method.step(t0, t1, y0, inside, made_jump)
        return y1, error, dense, self.method.leave(solver_state, inside, jnp.asarray(1)), result


def _varying_state(given: dict[str, Any]) -> Any:
    """The initial state, whose buffers vary over the axes of a mesh over which the solve does."""
    state = given["init_state"]
    own, rest = eqx.partition(state, eqx.is_array)
    leaves, structure = jtu.tree_flatten(own)
    others = [x for x in jtu.tree_leaves((given["args"], given["terms"], given["t1"])) if eqx.is_array(x)]
    return eqx.combine(jtu.tree_unflatten(structure, varying([*leaves, *others])[: len(leaves)]), rest)


def _with_solver(event: Any, solver: Any) -> Any:
    """The event whose conditions are called with the user's solver."""
    if event is None:
        return None

    def called(condition: Any) -> Any:
        return lambda *args, **kwargs: condition(*args, **{**kwargs, "solver": solver})

    conditions = jtu.tree_map(called, event.cond_fn, is_leaf=callable)
    return eqx.tree_at(lambda e: e.cond_fn, event, conditions)


PASSED = ("throw", "passed_solver_state", "passed_controller_state")


def _stock(given: dict[str, Any], chosen: Route) -> Any:
    """Diffrax's own loop and derivative."""
    announce(chosen)
    state = given["init_state"]
    given["init_state"] = eqx.tree_at(lambda s: s.tprev, state, mark(jnp.asarray(state.tprev), chosen))
    return own_loop(**given)


def _problem(given: dict[str, Any], built: Built | None) -> Problem:
    """What is asked, for routing."""
    leaves = jtu.tree_leaves(given["init_state"].y)
    platform = jax.default_backend()
    programs, reason = (
        ([], "not looked at: Diffrax's own loop was asked for") if built is None else step_programs(built.solve)
    )
    return Problem(
        platform="cuda" if platform == "gpu" else platform,
        solver=_solver_name(given["solver"], built),
        controller=type(given["stepsize_controller"]).__name__,
        saving=_saving(given["saveat"]),
        dimension=sum(jnp.size(x) * (2 if jnp.iscomplexobj(x) else 1) for x in leaves),
        dtypes=tuple(sorted({str(jnp.result_type(x)) for x in leaves})),
        equations=programs[0].equations if programs else None,
        no_scalar_form=reason,
        no_machine_code=next((r for p in programs if (r := unsupported(p.jaxpr))), ""),
        obstacles=(),
        max_steps=given["max_steps"],
        no_gpu_kernel=next((r for p in programs if (r := too_much_for_gpu(p))), ""),
    )


def _solver_name(solver: Any, built: Built | None) -> str:
    """The solver's class, and who steps it if not the class."""
    source = getattr(built.method, "source", "") if built is not None else ""
    return type(solver).__name__ + (f", stepped by the plugin {source}" if source else "")


def _saving(saveat: Any) -> tuple[str, ...]:
    subs = jtu.tree_leaves(saveat.subs, is_leaf=lambda x: isinstance(x, diffrax.SubSaveAt))
    kinds = [
        k for s in subs for k, on in (("t0", s.t0), ("t1", s.t1), ("ts", s.ts is not None), ("steps", s.steps)) if on
    ]
    return tuple(dict.fromkeys([*kinds, *(["dense"] if saveat.dense else [])]))
