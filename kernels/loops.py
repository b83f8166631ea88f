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


def settled(lanes: AbstractLanes, carry: Sequence[Any]) -> list[Any]:
    """The loop variables with axes of lanes where some step may give them any; if steps end at different times, all."""
    solve, carry = lanes.solve, list(carry)
    while True:
        ends = lanes.differs(solve.live, carry)[0] or 0 in lanes.sizes
        differs = [ends or d for d in lanes.differs(solve.advance, carry)[: solve.size]]
        grown = [lanes.full(x, a) if d else x for x, a, d in zip(carry, solve.carry, differs, strict=True)]
        if all(old is new for old, new in zip(carry, grown, strict=True)):
            return carry
        carry = grown


def wanting(lanes: AbstractLanes, carry: Sequence[Any]) -> Any:
    """The lanes that want a further step."""
    return lanes.evaluate(lanes.solve.live, carry, shared(lanes.differs(lanes.solve.live, carry)))[0]


def shared(differs: Sequence[bool]) -> list[int]:
    """The outputs that do not differ."""
    return [i for i, d in enumerate(differs) if not d]


def start(lanes: AbstractLanes, carry: Sequence[Any]) -> Progress:
    """The loop variables before the first step."""
    zeros = [jnp.zeros(() if s else lanes.sizes, jnp.int32) for s in shares_cursors(lanes, carry)]
    return Progress(jnp.int32(0), wanting(lanes, carry), list(carry), [(zero, zero) for zero in zeros])


def shares_kept(lanes: AbstractLanes, carry: Sequence[Any]) -> bool:
    """Whether a step is kept by all lanes or by none."""
    return not lanes.differs(lanes.solve.advance, carry)[lanes.solve.size]


def shares_cursors(lanes: AbstractLanes, carry: Sequence[Any]) -> list[bool]:
    """For each output, whether all lanes have saved the same number of values at any time."""
    solve, zero = lanes.solve, jnp.int32(0)
    step = shares_kept(lanes, carry) and lanes.shares(carry[solve.accepted], solve.carry[solve.accepted])
    return [step and (o.due is None or not any(lanes.differs(o.due, [zero, *carry]))) for o in solve.outputs]


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
        return kept & lanes.evaluate(due, [k, *before.carry], () if k.ndim else (0,))[0]

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


def lacking(values: Any, slot: Any) -> int:
    """How many leading axes of saved values a slot does not have: those of columns, those of lanes that share it."""
    return values.columns + len(values.lanes.sizes) - slot.ndim


def save(values: Any, saved: Sequence[Any] | None) -> tuple[list[Any], list[Any] | None]:
    """Cursors and buffers after a step; without buffers the cursors only."""
    lanes, before, step = values.lanes, values.before, values.step
    cursors, out = [], []
    for i, o in enumerate(lanes.solve.outputs):
        cursor, buffer = before.cursors[i], None if saved is None else saved[i]

        def visit(k: Any, slot: Any, buffer: Any, i: int = i) -> Any:
            return None if buffer is None else put(buffer, slot, values.sampled(i, k), lacking(values, slot))

        if o.sample is not None:
            cursor, buffer = sample_times(lanes, i, before, step.kept, visit, buffer)
        if o.every:
            k, slot = cursor
            hit = wanted(o, step.kept, step.accepted)
            if buffer is not None:
                buffer = put(buffer, jnp.where(hit, slot, o.slots), values.emitted(i), lacking(values, slot))
            cursor = (k, slot + hit.astype(slot.dtype))
        cursors.append(cursor)
        out.append(buffer)
    return cursors, None if saved is None else out


def move(lanes: AbstractLanes, p: Progress, function: LaneFunction) -> tuple[Progress, Step]:
    """One trial step of all lanes, those that have ended left as they are; cursors are not moved."""
    solve = lanes.solve
    own = [not lanes.shares(x, a) for x, a in zip(p.carry, solve.carry, strict=True)]
    out = lanes.evaluate(function, p.carry, shared([*own, not shares_kept(lanes, p.carry)]))
    after, kept, rest = out[: solve.size], out[solve.size], out[solve.size + 1 :]
    accepted, dense, emitted = after[solve.accepted], rest[: solve.dense], rest[solve.dense :]
    step = Step(kept & p.alive, p.alive, after[solve.time], accepted, dense, emitted)
    carry = select(p.alive, after, p.carry) if p.alive.ndim else after
    return Progress(p.n + 1, wanting(lanes, carry), carry, p.cursors), step


def advance(lanes: AbstractLanes, p: Progress, saved: Any, function: LaneFunction) -> tuple[Progress, Any, Step]:
    """One trial step of all lanes with its outputs saved."""
    after, step = move(lanes, p, function)
    cursors, saved = save(Values(lanes, p, step), saved)
    return after._replace(cursors=cursors), saved, step


class Row(NamedTuple):
    """What a replay of one step reads. Values that this call's replay has no use for are None."""

    held: list[Any]  # the loop variables `Call.row` before the step
    cursors: list[Any]
    kept: Any
    alive: Any  # before the step
    t_after: Any
    accepted: Any  # accepted steps after it


def make_row(call: Call, lanes: AbstractLanes, p: Progress, step: Step) -> Row:
    """The row of a step from `p`; in it lanes share nothing."""
    held = [p.carry[i] for i in call.row]
    row = Row(held, p.cursors, step.kept, step.alive, step.t_after, step.accepted)
    return jax.tree.map(lambda a, x: lanes.full(x, a), row_avals(call), read_only(call, row))


def row_avals(call: Call) -> Row:
    """One lane's row, as abstract values."""
    solve, mark = call.solve, jax.ShapeDtypeStruct((), jnp.bool_)
    k = jax.ShapeDtypeStruct((), jnp.int32)
    held, cursors = [solve.carry[i] for i in call.row], [(k, k)] * len(solve.outputs)
    return read_only(call, Row(held, cursors, mark, mark, solve.carry[solve.time], solve.carry[solve.accepted]))


def read_only(call: Call, row: Row) -> Row:
    """A row without what the call's replay does not read."""
    solve = call.solve
    alive = row.alive if call.moving else None
    t_after = row.t_after if solve.size + 1 in call.replay.arguments else None
    accepted = row.accepted if any(o.every > 1 for o in solve.outputs) else None
    return row._replace(alive=alive, t_after=t_after, accepted=accepted)


def shared_in_row(call: Call, lanes: AbstractLanes, like: Progress) -> Row:
    """Which values of a row the lanes share."""
    solve = call.solve
    carry = [lanes.shares(x, a) for x, a in zip(like.carry, solve.carry, strict=True)]
    cursors = jax.tree.map(lambda x: x.ndim == 0, like.cursors)
    alive = like.alive.ndim == 0
    kept = alive and shares_kept(lanes, like.carry)
    held = [carry[i] for i in call.row]
    return read_only(call, Row(held, cursors, kept, alive, carry[solve.time], carry[solve.accepted]))


def reserve(count: int, like: Any) -> Any:
    """Room for `count` trees of such arrays; each is written before it is read."""
    return jax.tree.map(lambda a: jnp.zeros((count, *a.shape), a.dtype), like)


def write(rows: Any, row: Any, index: Any) -> Any:
    """Rows with one replaced."""
    return jax.tree.map(lambda old, new: jax.lax.dynamic_update_index_in_dim(old, new, index, 0), rows, row)


def make_lanes(scalar: bool, solve: Solve, sizes: Shape, flags: Flags, operands: list[Any]) -> AbstractLanes:
    """Lanes of one form."""
    make = ScalarLanes.of if scalar else ArrayLanes
    return make(solve, sizes, flags, operands)


def entered(call: Call, inputs: Sequence[Any]) -> tuple[AbstractLanes, list[Any]]:
    """The lanes of a forward call and its loop variables."""
    solve = call.solve
    flags = tuple(a[solve.size :] for a in call.axes)
    lanes = make_lanes(call.scalar, solve, call.sizes, flags, list(inputs[solve.size :]))
    return lanes, settled(lanes, enter(lanes, inputs[: solve.size], call.axes))


def enter(lanes: AbstractLanes, carry: Sequence[Any], levels: Flags) -> list[Any]:
    """Loop variables as values; one that has the axes of some levels gets those of all."""
    has = lambda i: [level[i] for level in levels]  # noqa: E731
    spreaded = [spread(x, has(i), lanes.sizes) if any(has(i)) else x for i, x in enumerate(carry)]
    return [lanes.enter(x, a) for x, a in zip(spreaded, lanes.solve.carry, strict=True)]


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
        return after, saved, write(rows, make_row(call, lanes, p, step), p.n)  # beyond the end: to the last row

    rows = reserve(solve.segment, jax.tree.map(lambda a: shaped(call.scalar, call.sizes, a), row_avals(call)))
    state = (p, saved, rows)
    p, saved, rows = jax.lax.while_loop(lambda s: going(solve, s[0]), recording, state)
    return [*_left(lanes, p, saved), p.n, *jax.tree.leaves(rows)]


def _left(lanes: AbstractLanes, p: Progress, saved: Sequence[Any]) -> list[Any]:
    """The outputs of a forward pass as arrays."""
    solve, sizes = lanes.solve, lanes.sizes
    carry = [lanes.leave(lanes.full(x, a), a, sizes) for x, a in zip(p.carry, solve.carry, strict=True)]
    out = [*carry, *(jnp.broadcast_to(x, sizes) for x in jax.tree.leaves(p.cursors))]
    for o, buffer in zip(solve.outputs, saved, strict=True):
        out += [lanes.leave(x, a, (*sizes, o.slots)) for x, a in zip(buffer, o.leaves, strict=True)]
    return out


def checkpoint_avals(solve: Solve) -> list[Any]:
    """One lane's checkpoint, as abstract values."""
    return [*solve.carry, *[jax.ShapeDtypeStruct((), jnp.int32)] * (2 * len(solve.outputs))]


def row_shapes(call: Call) -> Row:
    """The rows of a record, as a tree of abstract arrays."""
    return jax.tree.map(lambda a: shaped(call.scalar, (call.solve.segment, *call.sizes), a), row_avals(call))


def outcome(call: Call) -> list[Any]:
    """Abstract values of a forward call's outputs without the record; each has the axes of all lanes in front."""
    solve, sizes = call.solve, call.sizes
    one = checkpoint_avals(solve)
    one += [jax.ShapeDtypeStruct((o.slots, *a.shape), a.dtype) for o in solve.outputs for a in o.leaves]
    return [jax.ShapeDtypeStruct(sizes + a.shape, a.dtype) for a in one]


def record_outcome(call: Call) -> list[tuple[Any, int | None]]:
    """The arrays of a record, and how many axes precede their levels: the number of steps, which has none, rows."""
    rows = jax.tree.leaves(row_shapes(call))
    return [(jax.ShapeDtypeStruct((), jnp.int32), None), *((row, 1) for row in rows)]


def _bytes(avals: Sequence[Any]) -> int:
    return sum(a.size * a.dtype.itemsize for a in avals)


def record_room(solve: Solve) -> tuple[int, int]:
    """Rows of a record, and bytes per lane of these rows and of the checkpoints of a longer solve.

    For a derivative with respect to whatever has no part in step times. If those are differentiated as well, rows are
    longer.
    """
    carry = _bytes(checkpoint_avals(solve))
    still = [i for i, a in enumerate(solve.operands) if inexact(a) and not reached_carry(solve, (i,)) - solve.covered]
    call = Call(solve, None, None, carry=solve.differentiated, operands=tuple(still))
    rows = solve.segment * _bytes(jax.tree.leaves(row_avals(call)))
    return solve.segment, rows + solve.checkpoints * carry
