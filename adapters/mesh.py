"""A recorded mesh, and the step size controller that steps along it."""

from typing import Any, NamedTuple

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array

RESULTS = diffrax.RESULTS


class Described(NamedTuple):
    """What a mesh belongs to, apart from times."""

    solver: str
    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @staticmethod
    def of(solver: Any, y: Any) -> "Described":
        """The description of a solve of state `y`."""
        leaves, structure = jtu.tree_flatten(y)
        shapes = tuple(jnp.shape(x) for x in leaves)
        return Described(type(solver).__name__, structure, shapes, tuple(str(jnp.result_type(x)) for x in leaves))

    def difference(self, asked: "Described") -> str:
        """What the solve that is asked for has otherwise."""
        pairs = zip(self._fields, self, asked, strict=True)
        different = [f"{name} {mine} was recorded, {own} is asked for" for name, mine, own in pairs if mine != own]
        return "; ".join(different)


class Record(eqx.Module):
    """The steps that one solve accepted, to be replayed by `GradSolveAdjoint(record=...)`.

    A PyTree: `jax.vmap` of `record` gives a record whose arrays have a leading axis, for `jax.vmap` of the solve.

    - `ts`: the ends of the steps, shape `(max_steps + 1,)`, in the unit of `t0`; infinite where unused, and with the
      other sign if the solve runs backwards.
    - `steps`: number of steps, an integer of shape `()`.
    - `complete`: a boolean of shape `()`, whether the solve reached `t1`.
    """

    ts: Array
    steps: Array
    complete: Array
    described: Described = eqx.field(static=True)


class ReplayState(NamedTuple):
    """Number of the next step's end, and the largest scaled error so far."""

    index: Array
    drift: Array


class Replay(diffrax.AbstractStepSizeController):
    """Steps along a recorded mesh. Every step is kept; its error is compared with the tolerance and no more."""

    record: Record
    adaptive: diffrax.AbstractAdaptiveStepSizeController

    def wrap(self, direction: Any) -> "Replay":
        return self

    def init(
        self, terms: Any, t0: Any, t1: Any, y0: Any, dt0: Any, args: Any, func: Any, error_order: Any
    ) -> tuple[Any, ReplayState]:
        dtype = jnp.result_type(*(jnp.finfo(jnp.result_type(x)).dtype for x in jtu.tree_leaves(y0)))
        return self.record.ts[1], ReplayState(jnp.asarray(2), jnp.zeros((), dtype))

    def adapt_step_size(
        self, t0: Any, t1: Any, y0: Any, y1_candidate: Any, args: Any, y_error: Any, error_order: Any,
        controller_state: ReplayState,
    ) -> tuple[Any, ...]:  # fmt: skip
        index, drift = controller_state
        found = jax.lax.stop_gradient(self._scaled(y0, y1_candidate, y_error)).astype(drift.dtype)
        state = ReplayState(index + 1, jnp.maximum(drift, jnp.where(jnp.isnan(found), jnp.inf, found)))
        ends = self.record.complete | (index <= self.record.steps)
        result = RESULTS.where(ends, RESULTS.successful, RESULTS.max_steps_reached)
        return True, t1, self.record.ts[jnp.minimum(index, len(self.record.ts) - 1)], False, state, result

    def _scaled(self, y0: Any, y1: Any, error: Any) -> Any:
        a = self.adaptive

        def scaled(y0: Any, y1: Any, error: Any) -> Any:
            return error / (a.atol + a.rtol * jnp.maximum(jnp.abs(y0), jnp.abs(y1)))

        return a.norm(jtu.tree_map(scaled, y0, y1, error))


def _is_adaptive(x: Any) -> bool:
    return isinstance(x, diffrax.PIDController)


def adaptive_of(controller: Any) -> diffrax.PIDController:
    """The part of a step size controller that chooses the steps.

    Raises:
        ValueError: if there is none.
    """
    found = [x for x in jtu.tree_leaves(controller, is_leaf=_is_adaptive) if _is_adaptive(x)]
    if len(found) != 1:
        raise ValueError(
            f"A record was asked for of a solve with the step size controller {type(controller).__name__}. The steps "
            "of `diffrax.PIDController` can be recorded, alone or inside `diffrax.ClipStepSizeController`; other "
            "controllers have no tolerance that a replay could be compared with."
        )
    return found[0]


def _checked(record: Record, given: dict[str, Any]) -> Record:
    """The record, if it is one of the solve that is asked for."""
    state, t0, t1 = given["init_state"], given["t0"], given["t1"]
    if given["event"] is not None or given["saveat"].controller_state or given["passed_controller_state"]:
        raise ValueError(
            "`GradSolveAdjoint(record=...)` replays a mesh, and was used with an event or with the state of a step "
            "size controller, which a mesh does not have. Leave these out, or the record."
        )
    different = record.described.difference(Described.of(given["solver"], state.y))
    if different:
        raise ValueError(f"The record is of another solve: {different}. Make one with `gradsolve_backend.record`.")
    if record.ts.ndim != 1:
        raise ValueError(
            f"The record has times of shape {record.ts.shape}: it is that of several solves. Pass it through the same "
            "`jax.vmap` as the solve."
        )
    last = record.ts[record.steps]
    span = (record.ts[0] != t0) | (record.complete & (last != t1))
    message = "The record spans other times than the solve: record again with the same `t0` and `t1`."
    return eqx.tree_at(lambda r: r.ts, record, eqx.error_if(record.ts, span, message))


def replaying(record: Record, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `diffrax.AbstractAdjoint.loop` for a replay of the recorded mesh."""
    record = _checked(jtu.tree_map(jax.lax.stop_gradient, record), given)
    adaptive = adaptive_of(given["stepsize_controller"])
    swap = lambda x: Replay(record, adaptive) if x is adaptive else x  # noqa: E731
    controller = jtu.tree_map(swap, given["stepsize_controller"], is_leaf=_is_adaptive)
    solver, state = given["solver"], given["init_state"]
    start = controller.init(
        given["terms"], given["t0"], given["t1"], state.y, given["dt0"], given["args"], solver.func,
        solver.error_order(given["terms"]),
    )  # fmt: skip
    tnext = jnp.minimum(start[0], given["t1"])
    # In place of the state of the user's controller, whose structure is another.
    state = eqx.tree_at(lambda s: s.tnext, state, tnext)
    fields = {name: getattr(state, name) for name in type(state).__dataclass_fields__}
    return {
        **given,
        "stepsize_controller": controller,
        "init_state": type(state)(**{**fields, "controller_state": start[1]}),
    }


def drift_of(state: Any) -> Any:
    """The drift in the final state of a replay."""
    leaves = jtu.tree_leaves(state.controller_state, is_leaf=lambda x: isinstance(x, ReplayState))
    [found] = [x for x in leaves if isinstance(x, ReplayState)]
    return found.drift
