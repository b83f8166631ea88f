"""One trial step of Diffrax's loop, as functions of its loop variables: for running it, and for differentiating it.

The order of events and the rules are those of Diffrax's own loop; the step size controller is called, never rewritten.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import diffrax
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from gradsolve_backend.adapters.method import AbstractMethod
from gradsolve_backend.kernels.compat import linear_rescale

RESULTS = diffrax.RESULTS


class EventData(NamedTuple):
    """What the loop tells the search for an event: the last step and the conditions after it."""

    tprev: Any
    tnext: Any
    dense_info: Any
    values: Any
    mask: Any


class Carry(NamedTuple):
    """Loop variables: those of Diffrax's state that are not buffers of saved values.

    `made_jump` and `result` are None where they never change.
    """

    y: Any
    tprev: Any
    tnext: Any
    made_jump: Any
    solver_state: Any
    controller_state: Any
    result: Any
    num_steps: Any
    num_accepted_steps: Any
    num_rejected_steps: Any
    progress: Any
    event: EventData | None


class Asked(NamedTuple):
    """The arguments of a solve that its steps need, as Diffrax hands them to an adjoint."""

    terms: Any
    solver: Any
    controller: Any
    event: Any
    saveat: Any
    t0: Any
    t1: Any
    dt0: Any
    args: Any
    max_steps: int | None
    progress_meter: Any

    @staticmethod
    def of(given: dict[str, Any]) -> "Asked":
        """From the keywords of `diffrax.AbstractAdjoint.loop`."""
        names = {"controller": "stepsize_controller"}
        return Asked(**{field: given[names.get(field, field)] for field in Asked._fields})


class Trial(NamedTuple):
    """Outcome of a trial step."""

    carry: Carry
    kept: Any
    dense: Any


def _choose(kept: Any, new: Any, old: Any) -> Any:
    """`where` that stays a Python value if both sides are the same one."""
    if type(new) is bool and type(old) is bool and new == old:
        return new
    return jnp.where(kept, new, old)


def _chosen(kept: Any, new: Any, old: Any) -> Any:
    return jtu.tree_map(lambda a, b: b if a is b else jnp.where(kept, a, b), new, old)


def clip_floor(t1: Any) -> Any:
    """The time, 100 units in the last place before `t1`, beyond which a step ends at `t1`."""
    t1 = jax.lax.stop_gradient(jnp.asarray(t1))
    bits = jax.lax.bitcast_convert_type(t1, f"int{8 * t1.dtype.itemsize}")
    # Bits as an integer are in the order of the numbers if those below zero, whose first bit is set, are turned around.
    turned = lambda x: jnp.where(x < 0, jnp.iinfo(x.dtype).min - x, x)  # noqa: E731
    return jax.lax.bitcast_convert_type(turned(turned(bits) - 100), t1.dtype)


def _to_end(tprev: Any, tnext: Any, t1: Any, floor: Any, kept: Any) -> Any:
    """The end of the next step, at `t1` if it would come close; halfway there after a rejection."""
    return jnp.where(tnext > floor, jnp.where(kept, t1, tprev + 0.5 * (t1 - tprev)), tnext)


@dataclass(frozen=True)
class Stepper:
    """Trial steps of one solve."""

    asked: Asked
    method: AbstractMethod
    floor: Any

    def run(self, carry: Carry) -> Trial:
        """One trial step."""
        jump = False if carry.made_jump is None else carry.made_jump
        y1, error, dense, state, solver_result = self.method.step(
            carry.tprev, carry.tnext, carry.y, carry.solver_state, jump
        )
        # A field that is NaN in the trial step rejects it.
        error = jtu.tree_map(lambda x: jnp.where(jnp.isnan(x), jnp.inf, x), error)
        kept, after, results = self.control(carry, y1, error, jump)
        result = self.result(carry, kept, solver_result, results)
        after = after._replace(
            y=_chosen(kept, y1, carry.y),
            solver_state=_chosen(kept, state, carry.solver_state),
            result=result,
            num_steps=carry.num_steps + 1,
            num_accepted_steps=carry.num_accepted_steps + jnp.where(kept, 1, 0),
            num_rejected_steps=carry.num_rejected_steps + jnp.where(kept, 0, 1),
        )
        if self.asked.event is not None:
            after = self.watched(carry, after, dense)
        return Trial(after, jnp.asarray(kept), dense)

    def control(self, carry: Carry, y1: Any, error: Any, jump: Any) -> tuple[Any, Carry, Any]:
        """Whether the step is kept, the loop variables with the next step's times, the controller's result."""
        a = self.asked
        order = a.solver.error_order(a.terms)
        kept, tprev, tnext, new_jump, state, result = a.controller.adapt_step_size(
            carry.tprev, carry.tnext, carry.y, y1, a.args, error, order, carry.controller_state
        )
        tprev = jnp.minimum(tprev, a.t1)
        tnext = _to_end(tprev, tnext, a.t1, self.floor, kept)
        after = carry._replace(
            tprev=tprev, tnext=tnext, made_jump=_choose(kept, new_jump, jump), controller_state=state
        )
        return kept, after, result

    def result(self, carry: Carry, kept: Any, solver: Any, controller: Any) -> Any:
        """The first failure, if any."""
        old = RESULTS.successful if carry.result is None else carry.result
        solver = RESULTS.where(kept, solver, RESULTS.successful)
        result = RESULTS.where(diffrax.is_okay(old), solver, old)
        return RESULTS.where(diffrax.is_okay(result), controller, result)

    def condition(self, function: Callable, t: Any, y: Any) -> Any:
        """An event's condition, called as Diffrax calls it."""
        a = self.asked
        return function(
            t, y, a.args, terms=a.terms, solver=a.solver, t0=a.t0, t1=a.t1, dt0=a.dt0, saveat=a.saveat,
            stepsize_controller=a.controller, max_steps=a.max_steps,
        )  # fmt: skip

    def watched(self, before: Carry, after: Carry, dense: Any) -> Carry:
        """The loop variables after the events' conditions were looked at."""
        assert before.event is not None
        functions, structure = jtu.tree_flatten(self.asked.event.cond_fn, is_leaf=callable)
        directions = jtu.tree_leaves(self.asked.event.direction, is_leaf=lambda x: x is None)
        old = structure.flatten_up_to(before.event.values)
        values = [self.condition(f, after.tprev, after.y) for f in functions]
        hits = [_fired(o, v, d) for o, v, d in zip(old, values, directions, strict=True)]
        mask, any_yet = [], False
        for hit in hits:  # the first listed wins
            mask.append(hit & jnp.invert(jnp.asarray(any_yet)))
            any_yet = hit | any_yet
        unflatten = structure.unflatten
        # Conditions are compared by sign only; the search for the root differentiates them itself.
        values = [jax.lax.stop_gradient(v) for v in values]
        event = EventData(before.tprev, before.tnext, dense, unflatten(values), unflatten(mask))
        result = RESULTS.where(jnp.asarray(any_yet), RESULTS.event_occurred, after.result)
        return after._replace(event=event, result=result)

    def report(self, before: Carry, after: Carry) -> Carry:
        """The loop variables after progress was shown."""
        a = self.asked
        state = a.progress_meter.step(before.progress, linear_rescale(a.t0, after.tprev, a.t1))
        return after._replace(progress=state)

    def live(self, carry: Carry) -> Any:
        """Whether a further step is wanted."""
        if isinstance(self.asked.controller, diffrax.StepTo):
            more = carry.num_steps < len(self.asked.controller.ts) - 1
        else:
            more = carry.tprev < self.asked.t1
        return more if carry.result is None else more & diffrax.is_successful(carry.result)


def _fired(old: Any, new: Any, direction: Any) -> Any:
    """Whether a condition became true, or its sign changed in the direction asked for."""
    if jtu.tree_structure(new) != jtu.tree_structure(0) or jnp.shape(new) != ():
        raise ValueError(f"Event functions must return a scalar; this one returned {jax.eval_shape(lambda: new)}.")
    if jnp.result_type(old) != jnp.result_type(new):
        raise ValueError(
            "Event functions must consistently return either a boolean or a float; this one changed from "
            f"{jnp.result_type(old)} to {jnp.result_type(new)}."
        )
    if jnp.issubdtype(jnp.result_type(new), jnp.bool_):
        return new
    if direction is None:
        return jnp.sign(old) != jnp.sign(new)
    if direction:
        return (jnp.sign(old) <= 0) & (jnp.sign(new) > 0)
    return (jnp.sign(old) > 0) & (jnp.sign(new) <= 0)


@dataclass(frozen=True)
class Replayer:
    """The accepted step again, to be differentiated. What was rejected, or is no step, is evaluated at a safe place.

    A step that was not kept is replaced by one of length zero from the same state, so that no derivative is taken
    where the field may not be finite.
    """

    stepper: Stepper

    def _safe(self, carry: Carry, kept: Any) -> tuple[Any, Any, Any, Any]:
        jump = False if carry.made_jump is None else carry.made_jump
        end = jnp.where(kept, carry.tnext, carry.tprev)
        y1, error, dense, state, _ = self.stepper.method.step(carry.tprev, end, carry.y, carry.solver_state, jump)
        return y1, error, dense, state

    def _after(self, carry: Carry, kept: Any, y1: Any, state: Any, dense: Any) -> Carry:
        after = carry._replace(y=_chosen(kept, y1, carry.y), solver_state=_chosen(kept, state, carry.solver_state))
        if carry.event is None:
            return after
        last = _chosen(kept, dense, carry.event.dense_info)
        return after._replace(event=carry.event._replace(dense_info=last))

    def fixed(self, carry: Carry, kept: Any) -> tuple[Carry, Any]:
        """Loop variables after the step, with its times as constants, and its dense values."""
        y1, _, dense, state = self._safe(carry, kept)
        return self._after(carry, kept, y1, state, dense), dense

    def moving(self, carry: Carry, kept: Any) -> tuple[Carry, Any]:
        """The same with the times of the next step, as the controller sets them from this one."""
        y1, error, dense, state = self._safe(carry, kept)
        stopped = jtu.tree_map(_stopped, carry)
        jump = False if stopped.made_jump is None else stopped.made_jump
        trial_y, trial_error, *_ = self.stepper.method.step(
            stopped.tprev, stopped.tnext, stopped.y, stopped.solver_state, jump
        )
        seen_y = _chosen(kept, y1, jtu.tree_map(_stopped, trial_y))
        seen_error = jtu.tree_map(
            lambda a, b: jnp.where(kept, a, _stopped(jnp.where(jnp.isnan(b), jnp.inf, b))), error, trial_error
        )
        _, after, _ = self.stepper.control(carry, seen_y, seen_error, jump)
        after = self._after(after, kept, y1, state, dense)
        if after.event is None:
            return after, dense
        return after._replace(event=after.event._replace(tprev=carry.tprev, tnext=carry.tnext)), dense


def _stopped(x: Any) -> Any:
    return jax.lax.stop_gradient(x)
