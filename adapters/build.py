"""From what Diffrax asks of an adjoint to the static description of a solve, and from its result back."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.extend.core.primitives import convert_element_type_p

from gradsolve_backend.adapters import saving
from gradsolve_backend.adapters.flat import Flat, strong
from gradsolve_backend.adapters.method import AbstractMethod
from gradsolve_backend.adapters.trial import Asked, Carry, EventData, Replayer, Stepper, Trial, clip_floor
from gradsolve_backend.kernels.compat import Literal, State
from gradsolve_backend.kernels.solve import Output, Solve
from gradsolve_backend.kernels.trace import LaneFunction, Operands, trace


def _carry(state: Any, method: AbstractMethod, jump: bool, result: bool) -> Carry:
    """The loop variables before the first step; `made_jump` and `result` only where they can change."""
    event = None
    if state.event_mask is not None:
        event = EventData(
            state.event_tprev, state.event_tnext, state.event_dense_info, state.event_values, state.event_mask
        )
    solver_state = method.enter(state.tprev, state.y, state.solver_state)
    return Carry(
        state.y, state.tprev, state.tnext, state.made_jump if jump else None, solver_state, state.controller_state,
        state.result if result else None, state.num_steps, state.num_accepted_steps, state.num_rejected_steps,
        state.progress_meter_state, event,
    )  # fmt: skip


@dataclass(frozen=True)
class Built:
    """A solve, its inputs, and what is needed to give Diffrax its state back."""

    solve: Solve
    inputs: list[Any]
    asked: Asked
    state: Any
    method: AbstractMethod
    flat: Flat
    saved: list[saving.Saved]
    varying: tuple[int, ...]
    constants: list[Any]

    def finished(self, out: Sequence[Any]) -> Any:
        """Diffrax's state after the loop."""
        size = len(self.varying)
        arrays = list(self.constants)
        for i, x in zip(self.varying, out[:size], strict=True):
            arrays[i] = x
        carry = self.flat.unpack(arrays)
        count = 2 * len(self.saved)
        rest, buffers = [_weak(x) for x in out[size : size + count]], iter(out[size + count :])
        cursors = list(zip(rest[0::2], rest[1::2], strict=True))
        written = [[next(buffers) for _ in s.buffers] for s in self.saved]
        old = self.state
        fields = {
            "save_state": old.save_state,
            "dense_ts": old.dense_ts,
            "dense_infos": old.dense_infos,
            "dense_save_index": old.dense_save_index,
        }
        fields |= saving.finished(self.asked, old, self.saved, cursors, written)
        event = carry.event
        return State(
            y=carry.y,
            tprev=carry.tprev,
            tnext=carry.tnext,
            made_jump=old.made_jump if carry.made_jump is None else carry.made_jump,
            solver_state=self.method.leave(old.solver_state, carry.solver_state, carry.num_accepted_steps),
            controller_state=carry.controller_state,
            progress_meter_state=carry.progress,
            result=old.result if carry.result is None else carry.result,
            num_steps=_weak(carry.num_steps),
            num_accepted_steps=_weak(carry.num_accepted_steps),
            num_rejected_steps=_weak(carry.num_rejected_steps),
            event_tprev=None if event is None else event.tprev,
            event_tnext=None if event is None else event.tnext,
            event_dense_info=None if event is None else event.dense_info,
            event_values=None if event is None else event.values,
            event_mask=None if event is None else event.mask,
            **fields,
        )


def _like(carry: Carry, before: Carry) -> Carry:
    """The loop variables after a step, without those that the ones before it say never change."""
    unchanged = {name: None for name in ("made_jump", "result") if getattr(before, name) is None}
    return carry._replace(**unchanged)


@dataclass(frozen=True)
class Tracer:
    """Traces the lane functions of one solve."""

    stepper: Stepper
    replayer: Replayer
    flat: Flat
    arrays: list[Any]
    saved: list[saving.Saved]
    dense: Flat
    dense_avals: list[Any]
    operands: Operands

    def _after(self, carry: Carry, dense: Any) -> list[Any]:
        emitted = [x for s in self.saved if s.emit is not None for x in s.emit(carry, dense)]
        return [*self.dense.pack(dense), *emitted]

    def advance(self, *arrays: Any) -> list[Any]:
        before = self.flat.unpack(arrays)
        out = self.stepper.run(before)
        return [*self.flat.pack(_like(out.carry, before)), out.kept, *self._after(out.carry, out.dense)]

    def observed(self, *arrays: Any) -> list[Any]:
        before = self.flat.unpack(arrays)
        out = self.stepper.run(before)
        shown = _like(self.stepper.report(before, out.carry), before)
        return [*self.flat.pack(shown), out.kept, *self._after(out.carry, out.dense)]

    def live(self, *arrays: Any) -> list[Any]:
        return [jnp.asarray(self.stepper.live(self.flat.unpack(arrays)))]

    def fixed(self, *arrays: Any) -> list[Any]:
        *before, kept, t_after = arrays
        after, dense = self.replayer.fixed(self.flat.unpack(before), kept)
        seen = after._replace(tprev=t_after)
        return [*self.flat.pack(after), *self._after(seen, dense)]

    def moving(self, *arrays: Any) -> list[Any]:
        *leaves, kept, _ = arrays
        before = self.flat.unpack(leaves)
        after, dense = self.replayer.moving(before, kept)
        return [*self.flat.pack(_like(after, before)), *self._after(after, dense)]

    def trace(self, function: Any, arguments: Sequence[Any]) -> LaneFunction:
        """A lane function whose outputs have the dtypes of the loop variables that they replace."""

        def cast(*x: Any) -> list[Any]:
            return [strong(o) for o in function(*x)]

        return trace(cast, arguments, self.operands)

    def output(self, s: saving.Saved, position: int) -> Output:
        """One output; its emitted values start at `position`."""
        k = jax.ShapeDtypeStruct((), jnp.int32)
        due = sample = None
        if s.due is not None and s.sample is not None:
            due = self.trace(lambda k, *c: [s.due(k, self.flat.unpack(c))], [k, *self.arrays])  # type: ignore[misc]
            size = len(self.arrays)
            at = lambda k, *x: s.sample(k, self.flat.unpack(x[:size]), self.dense.unpack(x[size:]))  # type: ignore[misc]  # noqa: E731
            sample = self.trace(at, [k, *self.arrays, *self.dense_avals])
        count = 0 if s.emit is None else len(s.buffers)
        return Output(s.slots, saving.leaves_of(s), due, sample, s.every, slice(position, position + count))


def _stepper(asked: Asked, state: Any, method: AbstractMethod) -> tuple[Stepper, Carry, Trial]:
    """The stepper, the loop variables, and the shapes of a trial step; `made_jump` and `result` only if they change."""
    stepper = Stepper(asked, method, clip_floor(asked.t1))

    def probe(carry: Carry) -> tuple[Trial, bool, bool]:
        out = stepper.run(carry)
        return out, type(out.carry.made_jump) is not bool, out.carry.result.is_traced()

    jump, result = type(state.made_jump) is not bool, state.result.is_traced()
    while True:
        carry = _carry(state, method, jump, result)
        shapes, new_jump, new_result = eqx.filter_eval_shape(probe, carry)
        if (jump or new_jump, result or new_result) == (jump, result):
            return stepper, carry, shapes
        jump, result = jump or new_jump, result or new_result


def _weak(x: Any) -> Any:
    """A count as weakly typed as Diffrax's own, so that it combines with any other integer."""
    return convert_element_type_p.bind(x, new_dtype=jnp.result_type(int), weak_type=True, sharding=None)


def _names(carry: Carry) -> list[str]:
    """For each array among the loop variables, the field it belongs to: `y`, `event.dense_info`, ..."""
    out = []
    for path, leaf in jtu.tree_flatten_with_path(carry)[0]:
        if eqx.is_array_like(leaf):
            inner = f".{path[1].name}" if path[0].name == "event" else ""
            out.append(path[0].name + inner)
    return out


COVERED = frozenset({"y", "solver_state", "event.dense_info"})


def _sources(arrays: Sequence[Any], varying: Sequence[int], operands: Operands) -> list[int]:
    """Where each loop variable comes from, once those that no step changes are operands."""
    place = {i: j for j, i in enumerate(varying)}
    return [place[i] if i in place else ~operands.add(x) for i, x in enumerate(arrays)]


def _moved(function: LaneFunction, sources: Sequence[int], first: int = 0) -> LaneFunction:
    """A lane function of `first` arguments, the loop variables, and others, with the loop variables that vary only."""
    varying = sum(s >= 0 for s in sources)
    mapping = {first + i: first + s if s >= 0 else s for i, s in enumerate(sources)}
    end = first + len(sources)
    mapping |= {a: a - len(sources) + varying for a in function.arguments if a >= end}
    return function.moved(mapping)


def _varying(advance: LaneFunction, size: int) -> tuple[int, ...]:
    """Loop variables that a step changes."""
    given = {v: s for v, s in zip(advance.invars, advance.sources, strict=True)}
    outs = advance.jaxpr.outvars[:size]
    return tuple(i for i, v in enumerate(outs) if isinstance(v, Literal) or given.get(v) != i)


def _outputs(tracer: Tracer, sources: Sequence[int]) -> tuple[Output, ...]:
    out, position = [], 0
    for s in tracer.saved:
        o = tracer.output(s, position)
        position = o.emit.stop
        if o.due is not None and o.sample is not None:
            o = dataclasses.replace(o, due=_moved(o.due, sources, 1), sample=_moved(o.sample, sources, 1))
        out.append(o)
    return tuple(out)


def build(asked: Asked, state: Any, method: AbstractMethod, replayed: AbstractMethod) -> Built:
    """The solve that Diffrax's loop would run from `state`, by one method, differentiated by the other."""
    stepper, carry, shapes = _stepper(asked, state, method)
    arrays, flat = Flat.of(carry)
    names = _names(carry)
    dense_avals, dense = Flat.shapes(shapes.dense)
    saved, operands = saving.outputs(asked, state), Operands()
    replayer = Replayer(Stepper(asked, replayed, stepper.floor))
    tracer = Tracer(stepper, replayer, flat, arrays, saved, dense, dense_avals, operands)
    marks = [jnp.asarray(True), arrays[names.index("tprev")]]
    functions = {"advance": tracer.trace(tracer.advance, arrays), "live": tracer.trace(tracer.live, arrays)}
    shows = not isinstance(asked.progress_meter, diffrax.NoProgressMeter)
    functions["observed"] = tracer.trace(tracer.observed, arrays) if shows else functions["advance"]
    functions["fixed"] = tracer.trace(tracer.fixed, [*arrays, *marks])
    functions["moving"] = tracer.trace(tracer.moving, [*arrays, *marks])
    varying = _varying(functions["observed"], len(arrays))
    sources = _sources(arrays, varying, operands)
    moved = {name: _moved(f, sources) for name, f in functions.items()}
    for name in ("advance", "observed", "fixed", "moving"):
        rest = range(len(arrays), len(moved[name].outputs))
        moved[name] = moved[name].keep([*varying, *rest])
    if not shows:
        moved["observed"] = moved["advance"]
    kept = [names[i] for i in varying]
    solve = Solve(
        **moved,
        covered=frozenset(i for i, name in enumerate(kept) if name in COVERED),
        carry=tuple(_struct(arrays[i]) for i in varying),
        time=kept.index("tprev"),
        accepted=kept.index("num_accepted_steps"),
        dense=len(dense_avals),
        outputs=_outputs(tracer, sources),
        operands=tuple(_struct(x) for x in operands.arrays),
        max_steps=asked.max_steps,
        implicit=isinstance(asked.solver, diffrax.AbstractImplicitSolver),
    )
    inputs = [*(arrays[i] for i in varying), *operands.arrays]
    return Built(solve, inputs, asked, state, method, flat, saved, varying, arrays)


def _struct(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
