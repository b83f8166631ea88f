"""The linear maps of a solve: tangent (forward sweep) and cotangent (reverse sweep) of its accepted steps.

Inputs of both: loop variables, operands, the record (steps, checkpoints, rows), then the linear inputs. A linear input
may have the axes of further levels, columns, that no primal value has: those are vmapped outside, so that all columns
share one evaluation of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradsolve_backend.kernels.evaluate import AbstractLanes
from gradsolve_backend.kernels.forms import takes_scalar
from gradsolve_backend.kernels.lanes import column, select, take, widened
from gradsolve_backend.kernels.levels import Layout, primal_count
from gradsolve_backend.kernels.loops import (
    Progress,
    Row,
    Step,
    advance,
    enter,
    going,
    make_lanes,
    make_row,
    move,
    reserve,
    row_shapes,
    sample_times,
    save,
    settled,
    shared_in_row,
    start,
    wanted,
    write,
)
from gradsolve_backend.kernels.solve import Call


def _lanes(layout: Layout, inputs: Sequence[Any], wanted: Sequence[Sequence[bool]], scalar: bool) -> AbstractLanes:
    """The lanes of the primal inputs; a perturbed operand has at least the own levels that `wanted` names."""
    call, solve = layout.call, layout.call.solve
    sizes = layout.lane_sizes
    operands = list(inputs[solve.size : solve.size + len(solve.operands)])
    flags = [[call.axes[i][solve.size + j] for i in layout.own] for j in range(len(operands))]
    for index, want in zip(call.operands, wanted, strict=True):
        union = [h or w for h, w in zip(flags[index], want, strict=True)]
        operands[index] = widened(operands[index], flags[index], union, sizes)
        flags[index] = union
    levels = tuple(tuple(f[i] for f in flags) for i in range(len(sizes)))
    return make_lanes(scalar, solve, sizes, levels, operands)


def sheltering(call: Call, lanes: AbstractLanes, step: Step) -> bool:
    """Whether lanes without a step stand in for others. With moving times those that rejected it have a part in it."""
    return lanes.solve.implicit and step.kept.ndim > 0 and not call.moving


def sheltered(call: Call, lanes: AbstractLanes, step: Step) -> AbstractLanes:
    """The lanes in which a step is differentiated."""
    return lanes.shelter(step.kept) if sheltering(call, lanes, step) else lanes


@dataclass(frozen=True)
class TangentValues:
    """What a tangent sweep writes into its outputs: the tangents of what a forward pass writes."""

    lanes: AbstractLanes
    before: Progress
    step: Step
    columns: int
    call: Call
    tangents: tuple[list[Any], list[Any]]  # of the reached loop variables before the step, of the replay's outputs
    operands: list[Any]

    def sampled(self, number: int, k: Any) -> list[Any]:
        """Tangents of an output at the `k`-th requested time."""
        call = self.call
        before, after = self.tangents
        sample = call.samples[number]
        assert sample is not None
        arguments = [k, *self.before.carry, *self.step.dense]
        count = len(call.reached)
        push = self.lanes.push(sample, arguments, call.sample_at, self.columns)
        return push([*before, *after[count : count + len(call.dense)]], self.operands)

    def emitted(self, number: int) -> list[Any]:
        """Tangents of an output at the end of the step."""
        return self.tangents[1][self.call.emits[number]]


def tangent(call: Call, *inputs: Any) -> list[Any]:
    """Tangents of the reached loop variables after the last step, and of the outputs.

    Linear inputs: tangents of the loop variables `call.carry` and of the operands `call.operands`.
    """
    solve, first = call.solve, primal_count(call)
    layout = Layout.of(call)
    own = [[call.axes[i][first + len(call.carry) + j] for i in layout.own] for j in range(len(call.operands))]
    lanes = _lanes(layout, inputs, own, takes_scalar(call, "push"))
    sizes, columns = layout.sizes((*layout.columns, *layout.own)), len(layout.columns)
    d, operands = _tangents_in(layout, lanes, inputs)
    saved = [[lanes.zeros((*sizes, o.slots), a) for a in call.saved(o)] for o in solve.outputs]

    def body(s: Any) -> Any:
        p, d, saved = s
        after, step = move(lanes, p, solve.advance)
        push = sheltered(call, lanes, step).push(call.replay, [*p.carry, step.kept, step.t_after], call.at, columns)
        out = push(d, operands)
        cursors, saved = save(TangentValues(lanes, p, step, columns, call, (d, out), operands), saved)
        moved = out[: len(call.reached)]
        mask = p.alive if call.moving else step.kept
        d = select(mask, moved, d, columns) if mask.ndim else moved
        return after._replace(cursors=cursors), d, saved

    p = start(lanes, _carry(layout, lanes, inputs))
    _, d, saved = jax.lax.while_loop(lambda s: going(solve, s[0]), body, (p, d, saved))
    out = [lanes.leave(x, solve.carry[i], sizes) for i, x in zip(call.reached, d, strict=True)]
    for o, buffer in zip(solve.outputs, saved, strict=True):
        out += [lanes.leave(x, a, (*sizes, o.slots)) for x, a in zip(buffer, call.saved(o), strict=True)]
    return [layout.result(x, True, i) for i, x in enumerate(out)]


def _carry(layout: Layout, lanes: AbstractLanes, inputs: Sequence[Any]) -> list[Any]:
    """The loop variables before the first step; lanes share none that the derivative reaches."""
    solve, call = lanes.solve, layout.call
    carry = enter(lanes, inputs[: solve.size], tuple(call.axes[level] for level in layout.own))
    for i in call.reached:
        carry[i] = lanes.full(carry[i], solve.carry[i])
    return settled(lanes, carry)


def _tangents_in(layout: Layout, lanes: AbstractLanes, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Tangents of the reached loop variables with every axis, and of the perturbed operands with all columns."""
    call, solve, first = layout.call, lanes.solve, layout.primal
    sizes = layout.sizes((*layout.columns, *layout.own))
    given = {i: layout.full(inputs[first + j], first + j) for j, i in enumerate(call.carry)}
    d = [
        lanes.enter(given[i], solve.carry[i]) if i in given else lanes.zeros(sizes, solve.carry[i])
        for i in call.reached
    ]
    operands = []
    for j, i in enumerate(call.operands, first + len(call.carry)):
        index = call.operands[j - first - len(call.carry)]
        x, columns, own = layout.entered(inputs[j], j)
        wanted = [*[True] * len(columns), *lanes.operand_flags(index)]
        x = widened(x, [*columns, *own], wanted, sizes)
        operands.append(lanes.enter(x, solve.operands[i]))
    return d, operands


@dataclass(frozen=True)
class Replayed:
    """One step of a record, as the reverse sweep reads it."""

    arguments: list[Any]  # of a replay; loop variables that it does not read are None
    before: Progress
    step: Step


def _read(call: Call, lanes: AbstractLanes, rows: Row, index: Any, begun: tuple[Progress, list[Any]]) -> Replayed:
    """The step at `index` of all lanes, which share the values that they share where they are.

    `begun`: that place, and the loop variables before the first step. A lane without a step here is put there, since
    a vector field need not be finite where a solve ended.
    """
    solve, (like, initial) = call.solve, begun
    row = jax.tree.map(lambda r: jax.lax.dynamic_index_in_dim(r, index, 0, False), rows)
    first = lambda x: x[(0,) * len(lanes.sizes)]  # noqa: E731
    row = jax.tree.map(lambda s, x: jax.tree.map(first, x) if s else x, shared_in_row(call, lanes, like), row)
    carry: list[Any] = [None] * solve.size
    mask = row.alive if call.moving else row.kept
    for i, x in zip(call.row, row.held, strict=True):
        same = mask.ndim == 0 or lanes.shares(x, solve.carry[i])
        carry[i] = x if same else select(mask, x, lanes.full(initial[i], solve.carry[i]))
    for i in call.reached:
        if carry[i] is None:  # nothing reads its value, but its cotangent is asked for
            carry[i] = lanes.zeros(lanes.sizes, solve.carry[i])
    before = Progress(index, row.alive, carry, row.cursors)
    step = Step(row.kept, row.alive, row.t_after, row.accepted, [], [])
    return Replayed([*carry, row.kept, row.t_after], before, step)


class Sums(NamedTuple):
    """Cotangents that the requested times of one step add up to."""

    arguments: list[Any]  # of `Call.sample_at`
    operands: list[Any]


def _plus(a: Any, b: Any) -> Any:
    """The sum of two values, of which the second may be none."""
    return a if b is None else jax.tree.map(jnp.add, a, b)


def _added(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    return [_plus(x, y) for x, y in zip(a, b, strict=True)]


def _sampled_back(
    call: Call, lanes: AbstractLanes, row: Replayed, number: int, dense: Sequence[Any], state: Any
) -> Any:
    """`cursor, sums` with the cotangents of an output's values at the requested times of a step."""
    buffer, columns, sums = state
    sample = call.samples[number]
    assert sample is not None

    def visit(k: Any, slot: Any, sums: Sums) -> Sums:
        _, pull = lanes.pull(sample, [k, *row.before.carry, *dense], call.sample_at, columns)
        arguments, operands = pull(take(buffer, slot, columns + len(lanes.sizes) - slot.ndim))
        return Sums(_added(sums.arguments, arguments), _added(sums.operands, operands))

    return sample_times(lanes, number, row.before, row.step.kept, visit, sums)


def _outputs_back(
    call: Call, lanes: AbstractLanes, row: Replayed, dense: Sequence[Any], state: Any
) -> tuple[Sums, list[Any]]:
    """Cotangents that the outputs of one step give: to a sample's arguments, to operands, to emitted values."""
    saved, columns, sums = state
    emitted: list[Any] = []
    for i, (o, buffer) in enumerate(zip(lanes.solve.outputs, saved, strict=True)):
        slot = row.before.cursors[i][1]
        if o.sample is not None:
            (_, slot), sums = _sampled_back(call, lanes, row, i, dense, (buffer, columns, sums))
        if o.every:
            hit = wanted(o, row.step.kept, row.step.accepted)
            emitted += take(buffer, jnp.where(hit, slot, o.slots), columns + len(lanes.sizes) - slot.ndim)
    return sums, emitted


def _step_back(call: Call, lanes: AbstractLanes, row: Replayed, sizes: tuple[int, ...], state: Any) -> Any:
    """Cotangents before one step from those after it: of the reached loop variables, of the operands."""
    ct, operands, saved = state
    solve, columns, count = call.solve, len(sizes), len(call.reached)
    out, pull = sheltered(call, lanes, row.step).pull(call.replay, row.arguments, call.at, columns)
    dense: list[Any] = [None] * solve.dense
    for j, x in zip(call.dense, out[count:], strict=False):
        dense[j] = x
    avals = [*(solve.carry[i] for i in call.reached), *(solve.fixed.outputs[solve.size + j] for j in call.dense)]
    zeros = [lanes.zeros(sizes + lanes.sizes, a) for a in avals]
    sampled = any(o.sample is not None for o in solve.outputs)
    sums = Sums(zeros, [lanes.operand_zeros(sizes, i) if sampled else None for i in call.operands])
    sums, emitted = _outputs_back(call, lanes, row, dense, (saved, columns, sums))
    given = ct
    mask = row.step.alive if call.moving else row.step.kept
    apart = mask.ndim > 0 and (call.moving or sheltering(call, lanes, row.step))
    if apart:  # what a lane that has ended, or stands in for another, gives to operands is nothing
        given = select(mask, ct, jax.tree.map(jnp.zeros_like, ct), columns)
    back, more = pull([*given, *sums.arguments[count:], *emitted])
    before = sums.arguments[:count]
    back = _added(before, back) if sampled else [z if b is None else b for z, b in zip(before, back, strict=True)]
    if apart:
        back = select(mask, back, ct, columns)
    return back, _added(_added(operands, more), sums.operands)


class Sweep(NamedTuple):
    """Loop variables of the reverse sweep: a segment is run, then swept, from the last to the first.

    A solve with more steps than the record has rows is first run `ahead` once more to leave a checkpoint at each
    segment; all runs are the same code, so that they take the same steps to the last bit.
    """

    number: Any  # of the segment
    ahead: Any
    at: Progress
    marks: list[Any]
    rows: Row
    ct: list[Any]
    sums: list[Any]


def _recorded(layout: Layout, lanes: AbstractLanes, inputs: Sequence[Any]) -> tuple[Progress, Row]:
    """Where a sweep starts, and the rows of the record: at the end if they are all of the solve, else at the start."""
    call = layout.call
    first = call.solve.size + len(call.solve.operands)
    arrays = [layout.recorded(inputs[i], i, 1) for i in range(first + 1, layout.primal)]
    steps, p = inputs[first], start(lanes, _carry(layout, lanes, inputs))
    short = steps <= call.solve.segment
    p = p._replace(n=jnp.where(short, steps, 0), alive=p.alive & ~short)
    return p, jax.tree.unflatten(jax.tree.structure(row_shapes(call)), arrays)


def _segment(call: Call, lanes: AbstractLanes, p: Progress, rows: Row) -> tuple[Progress, Row]:
    """Up to one segment of steps, each leaving its row."""

    def body(s: Any) -> Any:
        j, p, rows = s
        after, _, step = advance(lanes, p, None, call.solve.advance)
        return j + 1, after, write(rows, make_row(call, lanes, p, step), j)

    more = lambda s: going(call.solve, s[1]) & (s[0] < call.solve.segment)  # noqa: E731
    return jax.lax.while_loop(more, body, (jnp.int32(0), p, rows))[1:]


def _resumed(lanes: AbstractLanes, s: Sweep, segment: int) -> Progress:
    """Where the segment of a sweep starts: where the run ahead is, or at its checkpoint."""
    mark = jax.tree.map(lambda m: jax.lax.dynamic_index_in_dim(m, s.number, 0, False), s.marks)
    carry, rest = mark[: lanes.solve.size], mark[lanes.solve.size :]
    cursors = list(zip(rest[0::2], rest[1::2], strict=True))
    back = start(lanes, carry)._replace(n=s.number * segment, cursors=cursors)
    return jax.tree.map(lambda a, b: jnp.where(s.ahead, a, b), s.at, back)


def cotangent(call: Call, *inputs: Any) -> list[Any]:
    """Cotangents of the loop variables `call.carry` before the first step, and of the operands `call.operands`.

    Linear inputs: cotangents of the reached loop variables after the last step, and of the outputs.
    """
    solve, layout = call.solve, Layout.of(call)
    given = len(call.carry)
    own = [[call.keep[i][given + j] for i in layout.own] for j in range(len(call.operands))]
    lanes = _lanes(layout, inputs, own, call.scalar)
    sizes = layout.column_sizes
    ct, saved = _cotangents_in(layout, lanes, inputs)
    at, rows = _recorded(layout, lanes, inputs)
    marks = reserve(solve.checkpoints, [*at.carry, *jax.tree.leaves(at.cursors)])
    initial = at.carry
    sums = [lanes.operand_zeros(sizes, i) for i in call.operands]

    def back(s: Any) -> Any:
        j, rows, ct, sums = s
        row = _read(call, lanes, rows, j - 1, (at, initial))
        return j - 1, rows, *_step_back(call, lanes, row, sizes, (ct, sums, saved))

    def body(s: Sweep) -> Sweep:
        begin = _resumed(lanes, s, solve.segment)
        marks = write(s.marks, [*begin.carry, *jax.tree.leaves(begin.cursors)], s.number)
        at, rows = _segment(call, lanes, begin, s.rows)
        ahead = s.ahead & going(solve, at)
        count = jnp.where(ahead, 0, at.n - s.number * solve.segment)
        _, rows, ct, sums = jax.lax.while_loop(lambda s: s[0] > 0, back, (count, rows, s.ct, s.sums))
        return Sweep(jnp.where(ahead, s.number + 1, s.number - 1), ahead, at, marks, rows, ct, sums)

    swept = Sweep(jnp.int32(0), jnp.asarray(True), at, marks, rows, ct, sums)
    swept = jax.lax.while_loop(lambda s: s.number >= 0, body, swept)
    ct, sums = swept.ct, swept.sums
    full = sizes + lanes.sizes
    found = {i: lanes.leave(x, solve.carry[i], full) for i, x in zip(call.reached, ct, strict=True)}
    out = [layout.result(found[i], True, j) for j, i in enumerate(call.carry)]
    for j, (i, x) in enumerate(zip(call.operands, sums, strict=True)):
        x = lanes.operand_leave(x, sizes, i)
        out.append(layout.left(x, lanes.operand_flags(i), column(call.keep, given + j)))
    return out


def _cotangents_in(layout: Layout, lanes: AbstractLanes, inputs: Sequence[Any]) -> tuple[list[Any], list[list[Any]]]:
    """Cotangents of the reached loop variables, and of each output's saved values, with every axis."""
    call, solve, first = layout.call, lanes.solve, layout.primal
    arrays = iter([layout.full(x, first + i) for i, x in enumerate(inputs[first:])])
    ct = [lanes.enter(next(arrays), solve.carry[i]) for i in call.reached]
    return ct, [[lanes.enter(next(arrays), a) for a in call.saved(o)] for o in solve.outputs]
