"""The forward loop over steps, with or without a record. Plain JAX, any backend can lower it.

All lanes advance together; the loop ends when no lane wants a further step. A record is the number of steps and the
rows of the first `solve.segment` of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradsolve_backend.kernels.evaluate import AbstractLanes, ArrayLanes, ScalarLanes, Shape, shaped
from gradsolve_backend.kernels.lanes import Flags, put, select, spread
from gradsolve_backend.kernels.solve import Call, Output, Solve, reached_carry
from gradsolve_backend.kernels.trace import LaneFunction, inexact


class Progress(NamedTuple):
    """Loop variables of all lanes at one step."""

    n: Any  # steps that the longest lane has taken
    alive: Any
    carry: list[Any]
    cursors: list[Any]  # per output: next requested time, next slot


class Step(NamedTuple):
    """What one trial step of all lanes gave."""

    kept: Any
    alive: Any  # before the step
    t_after: Any
    accepted: Any  # accepted steps after it
    dense: list[Any]
    emitted: list[Any]


def start(lanes: AbstractLanes, carry: Sequence[Any]) -> Progress:
    """The loop variables before the first step."""
    [alive] = lanes.evaluate(lanes.solve.live, carry)
    zero = jnp.zeros(lanes.sizes, jnp.int32)
    return Progress(jnp.int32(0), alive, list(carry), [(zero, zero) for _ in lanes.solve.outputs])


def going(solve: Solve, p: Progress) -> Any:
    """Whether any lane takes a further step."""
    more = jnp.any(p.alive)
    return more if solve.max_steps is None else more & (p.n < solve.max_steps)


def buffers(lanes: AbstractLanes) -> list[list[Any]]:
    """Buffers of the outputs. What is in a slot that is never written does not matter."""
    return [[lanes.zeros((*lanes.sizes, o.slots), a) for a in o.leaves] for o in lanes.solve.outputs]


@dataclass(frozen=True)
class Values:
    """What a forward pass writes into its outputs after a step."""

    lanes: AbstractLanes
    before: Progress
    step: Step
    columns: int = 0

    def sampled(self, number: int, k: Any) -> list[Any]:
        """Values of an output at the `k`-th requested time."""
        sample = self.lanes.solve.outputs[number].sample
        assert sample is not None
        return self.lanes.evaluate(sample, [k, *self.before.carry, *self.step.dense])

    def emitted(self, number: int) -> list[Any]:
        """Values of an output at the end of the step."""
        return self.step.emitted[self.lanes.solve.outputs[number].emit]


def sample_times(lanes: AbstractLanes, number: int, before: Progress, kept: Any, visit: Any, state: Any) -> Any:
    """`(k, slot), state` after `state = visit(k, slot, state)` for each requested time in the step.

    `slot` is that of the value, or beyond the end for lanes that have no (further) time in the step.
    """
    o = lanes.solve.outputs[number]
    due = o.due
    assert due is not None

    def is_due(k: Any) -> Any:
        return kept & lanes.evaluate(due, [k, *before.carry])[0]

    def body(s: Any) -> Any:
        more, k, slot, state = s
        state = visit(k, jnp.where(more, slot, o.slots), state)
        k, slot = k + more.astype(k.dtype), slot + more.astype(slot.dtype)
        return is_due(k), k, slot, state

    k, slot = before.cursors[number]
    _, k, slot, state = jax.lax.while_loop(lambda s: jnp.any(s[0]), body, (is_due(k), k, slot, state))
    return (k, slot), state


def wanted(o: Output, kept: Any, accepted: Any) -> Any:
    """Lanes whose step itself is saved to this output."""
    return kept if o.every == 1 else kept & (accepted % o.every == 0)


def save(values: Any, saved: Sequence[Any] | None) -> tuple[list[Any], list[Any] | None]:
    """Cursors and buffers after a step; without buffers the cursors only."""
    lanes, before, step = values.lanes, values.before, values.step
    cursors, out = [], []
    for i, o in enumerate(lanes.solve.outputs):
        cursor, buffer = before.cursors[i], None if saved is None else saved[i]

        def visit(k: Any, slot: Any, buffer: Any, i: int = i) -> Any:
            return None if buffer is None else put(buffer, slot, values.sampled(i, k), values.columns)

        if o.sample is not None:
            cursor, buffer = sample_times(lanes, i, before, step.kept, visit, buffer)
        if o.every:
            k, slot = cursor
            hit = wanted(o, step.kept, step.accepted)
            if buffer is not None:
                buffer = put(buffer, jnp.where(hit, slot, o.slots), values.emitted(i), values.columns)
            cursor = (k, slot + hit.astype(slot.dtype))
        cursors.append(cursor)
        out.append(buffer)
    return cursors, None if saved is None else out


def move(lanes: AbstractLanes, p: Progress, function: LaneFunction) -> tuple[Progress, Step]:
    """One trial step of all lanes, those that have ended left as they are; cursors are not moved."""
    solve = lanes.solve
    out = lanes.evaluate(function, p.carry)
    after, kept, rest = out[: solve.size], out[solve.size], out[solve.size + 1 :]
    accepted, dense, emitted = after[solve.accepted], rest[: solve.dense], rest[solve.dense :]
    step = Step(kept & p.alive, p.alive, after[solve.time], accepted, dense, emitted)
    carry = select(p.alive, after, p.carry) if lanes.sizes else after
    [alive] = lanes.evaluate(solve.live, carry)
    return Progress(p.n + 1, alive, carry, p.cursors), step


def advance(lanes: AbstractLanes, p: Progress, saved: Any, function: LaneFunction) -> tuple[Progress, Any, Step]:
    """One trial step of all lanes with its outputs saved."""
    after, step = move(lanes, p, function)
    cursors, saved = save(Values(lanes, p, step), saved)
    return after._replace(cursors=cursors), saved, step


def make_row(call: Call, p: Progress, step: Step) -> list[Any]:
    """What a replay of this step reads: loop variables before it, cursors, whether it was kept, its end."""
    held = [p.carry[i] for i in call.row]
    marks = [step.kept, p.alive] if call.moving else [step.kept]
    return [*held, *jax.tree.leaves(p.cursors), *marks, step.t_after, step.accepted]


def row_avals(call: Call) -> list[Any]:
    """One lane's row, as abstract values."""
    solve, mark = call.solve, jax.ShapeDtypeStruct((), jnp.bool_)
    cursors = [jax.ShapeDtypeStruct((), jnp.int32)] * (2 * len(solve.outputs))
    marks = [mark, mark] if call.moving else [mark]
    return [*(solve.carry[i] for i in call.row), *cursors, *marks, solve.carry[solve.time], solve.carry[solve.accepted]]


def reserve(lanes: AbstractLanes, count: int, avals: Sequence[Any]) -> list[Any]:
    """`count` rows for every lane; each is written before it is read."""
    return [lanes.zeros((count, *lanes.sizes), a) for a in avals]


def write(rows: Sequence[Any], row: Sequence[Any], index: Any) -> list[Any]:
    """Rows with one replaced."""
    return jax.tree.map(lambda old, new: jax.lax.dynamic_update_index_in_dim(old, new, index, 0), list(rows), list(row))


def make_lanes(scalar: bool, solve: Solve, sizes: Shape, flags: Flags, operands: list[Any]) -> AbstractLanes:
    """Lanes of one form."""
    make = ScalarLanes.of if scalar else ArrayLanes
    return make(solve, sizes, flags, operands)


def entered(call: Call, inputs: Sequence[Any]) -> tuple[AbstractLanes, list[Any]]:
    """The lanes of a forward call and its loop variables."""
    solve = call.solve
    flags = tuple(a[solve.size :] for a in call.axes)
    lanes = make_lanes(call.scalar, solve, call.sizes, flags, list(inputs[solve.size :]))
    has = lambda i: [a[i] for a in call.axes]  # noqa: E731
    carry = [spread(x, has(i), call.sizes) for i, x in enumerate(inputs[: solve.size])]
    return lanes, [lanes.enter(x, a) for x, a in zip(carry, solve.carry, strict=True)]


def forward(call: Call, *inputs: Any) -> list[Any]:
    """Final loop variables, cursors, outputs; with `call.record` the number of steps and the rows as well."""
    solve = call.solve
    lanes, carry = entered(call, inputs)
    p, saved = start(lanes, carry), buffers(lanes)
    if not call.record:
        body = lambda s: advance(lanes, s[0], s[1], solve.observed)[:2]  # noqa: E731
        return _left(lanes, *jax.lax.while_loop(lambda s: going(solve, s[0]), body, (p, saved)))

    def recording(s: Any) -> Any:
        p, saved, rows = s
        after, saved, step = advance(lanes, p, saved, solve.observed)
        return after, saved, write(rows, make_row(call, p, step), p.n)  # beyond the end: to the last row

    state = (p, saved, reserve(lanes, solve.segment, row_avals(call)))
    p, saved, rows = jax.lax.while_loop(lambda s: going(solve, s[0]), recording, state)
    return [*_left(lanes, p, saved), p.n, *jax.tree.leaves(rows)]


def _left(lanes: AbstractLanes, p: Progress, saved: Sequence[Any]) -> list[Any]:
    """The outputs of a forward pass as arrays."""
    solve, sizes = lanes.solve, lanes.sizes
    carry = [lanes.leave(x, a, sizes) for x, a in zip(p.carry, solve.carry, strict=True)]
    out = [*carry, *jax.tree.leaves(p.cursors)]
    for o, buffer in zip(solve.outputs, saved, strict=True):
        out += [lanes.leave(x, a, (*sizes, o.slots)) for x, a in zip(buffer, o.leaves, strict=True)]
    return out


def checkpoint_avals(solve: Solve) -> list[Any]:
    """One lane's checkpoint, as abstract values."""
    return [*solve.carry, *[jax.ShapeDtypeStruct((), jnp.int32)] * (2 * len(solve.outputs))]


def row_shapes(call: Call) -> list[Any]:
    """The rows of a record, as trees of abstract arrays."""
    return [shaped(call.scalar, (call.solve.segment, *call.sizes), a) for a in row_avals(call)]


def outcome(call: Call) -> list[Any]:
    """Abstract values of a forward call's outputs without the record; each has the axes of all lanes in front."""
    solve, sizes = call.solve, call.sizes
    one = checkpoint_avals(solve)
    one += [jax.ShapeDtypeStruct((o.slots, *a.shape), a.dtype) for o in solve.outputs for a in o.leaves]
    return [jax.ShapeDtypeStruct(sizes + a.shape, a.dtype) for a in one]


def record_outcome(call: Call) -> list[Any]:
    """Abstract values of a record: the number of steps, then arrays whose lane axes are behind the first."""
    return [jax.ShapeDtypeStruct((), jnp.int32), *jax.tree.leaves(row_shapes(call))] if call.record else []


def _bytes(avals: Sequence[Any]) -> int:
    return sum(a.size * a.dtype.itemsize for a in avals)


def lane_bytes(solve: Solve) -> tuple[int, int]:
    """Bytes that one lane holds: the loop variables, and what is reserved to differentiate the solve in reverse.

    The latter are the rows of a record and the checkpoints of a longer solve, for a derivative with respect to
    whatever has no part in step times. If those are differentiated as well, rows are longer.
    """
    carry = _bytes(checkpoint_avals(solve))
    still = [i for i, a in enumerate(solve.operands) if inexact(a) and not reached_carry(solve, (i,)) - solve.covered]
    call = Call(solve, None, None, carry=tuple(sorted(solve.covered)), operands=tuple(still))
    return carry, solve.segment * _bytes(row_avals(call)) + solve.checkpoints * carry
