"""The linear maps of a solve: tangent (forward sweep) and cotangent (reverse sweep) of its accepted steps.

Inputs of both: loop variables, operands, the record (steps, checkpoints, rows), then the linear inputs. A linear input
may have the axes of further levels, columns, that no primal value has: those are vmapped outside, so that all columns
share one evaluation of the step.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradsolve_backend.kernels.lanes import column, reorder, select, spread, take, total
from gradsolve_backend.kernels.loops import (
    Lanes,
    Progress,
    Step,
    checkpoint_avals,
    going,
    move,
    row_avals,
    sample_times,
    save,
    segment,
    start,
    wanted,
)
from gradsolve_backend.kernels.solve import Call
from gradsolve_backend.kernels.trace import LaneFunction


@dataclass(frozen=True)
class Layout:
    """How the levels of a call divide into those of its trajectories and columns, and what its inputs are."""

    call: Call
    primal: int  # number of primal inputs

    @functools.cached_property
    def own(self) -> tuple[int, ...]:
        """Levels at which some primal input has an axis."""
        return tuple(i for i, level in enumerate(self.call.axes) if any(level[: self.primal]))

    @functools.cached_property
    def columns(self) -> tuple[int, ...]:
        """The other levels."""
        return tuple(i for i in range(len(self.call.sizes)) if i not in self.own)

    def sizes(self, levels: Sequence[int]) -> tuple[int, ...]:
        """Sizes of some levels."""
        return tuple(self.call.sizes[i] for i in levels)

    def entered(self, x: Any, index: int) -> tuple[Any, list[bool], list[bool]]:
        """A linear input with its column axes in front; which column and own levels it has."""
        has = column(self.call.axes, index)
        present = [i for i, h in enumerate(has) if h]
        order = [present.index(i) for i in (*self.columns, *self.own) if has[i]]
        return reorder(x, order), [has[i] for i in self.columns], [has[i] for i in self.own]

    def full(self, x: Any, index: int) -> Any:
        """A linear input with every axis, columns in front."""
        x, columns, own = self.entered(x, index)
        return spread(x, [*columns, *own], self.sizes((*self.columns, *self.own)))

    def left(self, x: Any, own: Sequence[bool], wanted: Sequence[bool]) -> Any:
        """An output that has all columns and these own levels, in the order of levels, summed to the wanted ones."""
        present = [*self.columns, *(i for i, h in zip(self.own, own, strict=True) if h)]
        x = reorder(x, sorted(range(len(present)), key=present.__getitem__))
        has = [i in present for i in range(len(wanted))]
        x = total(x, has, wanted)
        kept = [h and w for h, w in zip(has, wanted, strict=True)]
        sizes = [s for s, w in zip(self.call.sizes, wanted, strict=True) if w]
        return spread(x, [k for k, w in zip(kept, wanted, strict=True) if w], sizes)


def _lanes(layout: Layout, inputs: Sequence[Any], wanted: Sequence[Sequence[bool]]) -> Lanes:
    """The lanes of the primal inputs; a perturbed operand has at least the own levels that `wanted` names."""
    call, solve = layout.call, layout.call.solve
    sizes = layout.sizes(layout.own)
    operands = list(inputs[solve.size : solve.size + len(solve.operands)])
    flags = [[call.axes[i][solve.size + j] for i in layout.own] for j in range(len(operands))]
    for index, want in zip(call.operands, wanted, strict=True):
        union = [h or w for h, w in zip(flags[index], want, strict=True)]
        part = [h for h, u in zip(flags[index], union, strict=True) if u]
        operands[index] = spread(operands[index], part, [s for s, u in zip(sizes, union, strict=True) if u])
        flags[index] = union
    levels = tuple(tuple(f[i] for f in flags) for i in range(len(sizes)))
    return Lanes(solve, sizes, levels, operands)


def _carry(layout: Layout, inputs: Sequence[Any]) -> list[Any]:
    """The loop variables before the first step, with every own level."""
    sizes = layout.sizes(layout.own)
    has = lambda i: [layout.call.axes[level][i] for level in layout.own]  # noqa: E731
    return [spread(x, has(i), sizes) for i, x in enumerate(inputs[: layout.call.solve.size])]


def _perturbable(
    lanes: Lanes, call: Call, function: LaneFunction, arguments: Sequence[Any], which: Sequence[int]
) -> tuple[Callable, tuple[list[Any], list[Any]]]:
    """`function` on all lanes as a function of the arguments `which` and the perturbed operands, and their values."""

    def of(xs: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        args, ops = list(arguments), list(lanes.operands)
        for i, x in zip(which, xs, strict=True):
            args[i] = x
        for i, x in zip(call.operands, operands, strict=True):
            ops[i] = x
        return replace(lanes, operands=ops).evaluate(function, args)

    return of, ([arguments[i] for i in which], [lanes.operands[i] for i in call.operands])


def _columns(function: Callable, count: int) -> Callable:
    """A linear function vmapped over columns; what it closes over is shared by them."""
    for _ in range(count):
        function = jax.vmap(function)
    return function


def _sample_arguments(call: Call) -> tuple[int, ...]:
    """Arguments of a sample that a derivative reaches: loop variables, dense values."""
    size = call.solve.size
    return (*(1 + i for i in call.reached), *(1 + size + j for j in call.dense))


@dataclass(frozen=True)
class TangentValues:
    """What a tangent sweep writes into its outputs: tangents of `Values`."""

    lanes: Lanes
    before: Progress
    step: Step
    columns: int
    call: Call
    tangents: Sequence[Any]  # of the reached loop variables before the step, then of the replay's outputs
    operands: Sequence[Any]

    def sampled(self, number: int, k: Any) -> list[Any]:
        """Tangents of an output at the `k`-th requested time."""
        call = self.call
        before, after = self.tangents
        arguments = [k, *self.before.carry, *self.step.dense]
        sample = call.samples[number]
        assert sample is not None
        of, primals = _perturbable(self.lanes, call, sample, arguments, _sample_arguments(call))
        xs = [*before, *after[len(call.reached) : len(call.reached) + len(call.dense)]]
        push = lambda d: jax.jvp(of, primals, d)[1]  # noqa: E731
        return _columns(push, self.columns)((xs, list(self.operands)))

    def emitted(self, number: int) -> list[Any]:
        """Tangents of an output at the end of the step."""
        return self.tangents[1][self.call.emits[number]]


def tangent(call: Call, *inputs: Any) -> list[Any]:
    """Tangents of the reached loop variables after the last step, and of the outputs.

    Linear inputs: tangents of the loop variables `call.carry` and of the operands `call.operands`.
    """
    solve, first = call.solve, primal_count(call)
    layout = Layout(call, first)
    own = [[call.axes[i][first + len(call.carry) + j] for i in layout.own] for j in range(len(call.operands))]
    lanes, columns = _lanes(layout, inputs, own), len(layout.columns)
    sizes = layout.sizes((*layout.columns, *layout.own))
    given = {i: layout.full(inputs[first + j], first + j) for j, i in enumerate(call.carry)}
    zero = lambda i: jnp.zeros(sizes + solve.carry[i].shape, solve.carry[i].dtype)  # noqa: E731
    d = [given[i] if i in given else zero(i) for i in call.reached]
    operands = _operand_tangents(layout, lanes, inputs, first + len(call.carry))
    saved = [[jnp.zeros(sizes + (o.slots, *a.shape), a.dtype) for a in call.saved(o)] for o in solve.outputs]

    def body(s: Any) -> Any:
        p, d, saved = s
        after, step = move(lanes, p, solve.advance)
        of, primals = _perturbable(lanes, call, call.replay, [*p.carry, step.kept, step.t_after], call.reached)
        out = _columns(lambda x: jax.jvp(of, primals, x)[1], columns)((d, operands))
        cursors, saved = save(TangentValues(lanes, p, step, columns, call, (d, out), operands), saved)
        moved = out[: len(call.reached)]
        d = select(p.alive, moved, d, columns) if lanes.sizes else moved
        return after._replace(cursors=cursors), d, saved

    p = start(lanes, _carry(layout, inputs))
    _, d, saved = jax.lax.while_loop(lambda s: going(solve, s[0]), body, (p, d, saved))
    out = [*d, *jax.tree.leaves(saved)]
    every = [True] * len(layout.own)
    return [layout.left(x, every, column(call.keep, i)) for i, x in enumerate(out)]


def _operand_tangents(layout: Layout, lanes: Lanes, inputs: Sequence[Any], first: int) -> list[Any]:
    """Tangents of the perturbed operands with all columns, and the own levels of the operands themselves."""
    out = []
    for j, i in enumerate(layout.call.operands):
        x, columns, own = layout.entered(inputs[first + j], first + j)
        has = [level[i] for level in lanes.flags]
        part = [o for o, h in zip(own, has, strict=True) if h]
        sizes = [s for s, h in zip(lanes.sizes, has, strict=True) if h]
        out.append(spread(x, [*columns, *part], [*layout.sizes(layout.columns), *sizes]))
    return out


def primal_count(call: Call) -> int:
    """Number of primal inputs of the linear maps: loop variables, operands, record."""
    solve = call.solve
    record = 1 + len(checkpoint_avals(solve)) + len(row_avals(call)) if call.record else 0
    return solve.size + len(solve.operands) + record


@dataclass(frozen=True)
class Row:
    """One row of a record, as the reverse sweep reads it."""

    arguments: list[Any]  # of a replay; loop variables that it does not read are None
    before: Progress
    step: Step


def _read(call: Call, lanes: Lanes, rows: Sequence[Any], index: Any) -> Row:
    """The row at `index` of all lanes."""
    solve = call.solve
    row = [jax.lax.dynamic_index_in_dim(r, index, 0, False) for r in rows]
    held, rest = row[: len(call.row)], row[len(call.row) :]
    carry: list[Any] = [None] * solve.size
    for i, x in zip(call.row, held, strict=True):
        carry[i] = x
    for i in call.reached:
        if carry[i] is None:  # nothing reads its value, but its cotangent is asked for
            carry[i] = jnp.zeros(lanes.sizes + solve.carry[i].shape, solve.carry[i].dtype)
    count = 2 * len(solve.outputs)
    cursors = list(zip(rest[0:count:2], rest[1:count:2], strict=True))
    kept, alive, t_after, accepted = rest[count], rest[-3], rest[-2], rest[-1]
    before = Progress(index, alive, carry, cursors)
    return Row([*carry, kept, t_after], before, Step(kept, alive, t_after, accepted, [], []))


class Sums(NamedTuple):
    """Cotangents that the requested times of one step add up to."""

    arguments: list[Any]  # of `_sample_arguments`
    operands: list[Any]


def _sampled_back(call: Call, lanes: Lanes, row: Row, number: int, dense: Sequence[Any], state: Any) -> Any:
    """`cursor, sums` with the cotangents of an output's values at the requested times of a step."""
    buffer, columns, sums = state
    arguments = [None, *row.before.carry, *dense]
    sample = call.samples[number]
    assert sample is not None

    def visit(k: Any, slot: Any, sums: Sums) -> Sums:
        of, primals = _perturbable(lanes, call, sample, [k, *arguments[1:]], _sample_arguments(call))
        _, pull = jax.vjp(of, *primals)
        ct = take(buffer, slot, columns)
        return jax.tree.map(jnp.add, sums, Sums(*_columns(pull, columns)(ct)))

    return sample_times(lanes, number, row.before, row.step.kept, visit, sums)


def _outputs_back(call: Call, lanes: Lanes, row: Row, dense: Sequence[Any], state: Any) -> tuple[Sums, list[Any]]:
    """Cotangents that the outputs of one step give: to a sample's arguments, to operands, to emitted values."""
    saved, columns, sums = state
    emitted: list[Any] = []
    for i, (o, buffer) in enumerate(zip(lanes.solve.outputs, saved, strict=True)):
        slot = row.before.cursors[i][1]
        if o.sample is not None:
            (_, slot), sums = _sampled_back(call, lanes, row, i, dense, (buffer, columns, sums))
        if o.every:
            hit = wanted(o, row.step.kept, row.step.accepted)
            emitted += take(buffer, jnp.where(hit, slot, o.slots), columns)
    return sums, emitted


def _step_back(call: Call, lanes: Lanes, row: Row, sizes: tuple[int, ...], state: Any) -> Any:
    """Cotangents before one step from those after it: of the reached loop variables, of the operands."""
    ct, operands, saved = state
    count, columns = len(call.reached), len(sizes)
    of, primals = _perturbable(lanes, call, call.replay, row.arguments, call.reached)
    out, pull = jax.vjp(of, *primals)
    dense = dict(zip(call.dense, out[count : count + len(call.dense)], strict=True))
    values = [dense.get(j) for j in range(call.solve.dense)]
    zeros = [jnp.zeros(sizes + x.shape, x.dtype) for x in (*primals[0], *dense.values())]
    sums = Sums(zeros, jax.tree.map(jnp.zeros_like, operands))
    sums, emitted = _outputs_back(call, lanes, row, values, (saved, columns, sums))
    back, more = _columns(pull, columns)([*ct, *sums.arguments[count:], *emitted])
    back = jax.tree.map(jnp.add, back, sums.arguments[:count])
    if call.moving and lanes.sizes:
        back = select(row.step.alive, back, ct, columns)
    return back, jax.tree.map(lambda a, b, c: a + b + c, operands, more, sums.operands)


@dataclass(frozen=True)
class Record:
    """Steps taken, checkpoints and rows of the last segment, with the own levels that each array has."""

    steps: Any
    marks: list[Any]
    rows: list[Any]
    mark_flags: list[list[bool]]
    row_flags: list[list[bool]]


def _record(layout: Layout, inputs: Sequence[Any]) -> Record:
    call = layout.call
    first = call.solve.size + len(call.solve.operands)
    split, last = first + 1 + len(checkpoint_avals(call.solve)), primal_count(call)
    has = lambda i: [call.axes[level][i] for level in layout.own]  # noqa: E731
    flags = [has(i) for i in range(last)]
    return Record(
        inputs[first], list(inputs[first + 1 : split]), list(inputs[split:last]), flags[first + 1 : split], flags[split:]
    )


def _again(call: Call, lanes: Lanes, record: Record, number: Any, rows: list[Any]) -> list[Any]:
    """The rows of an earlier segment, made again from its checkpoint."""
    flags = record.mark_flags
    mark = [jax.lax.dynamic_index_in_dim(m, number, 0, False) for m in record.marks]
    mark = [spread(m, h, lanes.sizes) for m, h in zip(mark, flags, strict=True)]
    carry, rest = mark[: call.solve.size], mark[call.solve.size :]
    p = start(lanes, carry)
    p = p._replace(n=number * call.solve.segment, cursors=list(zip(rest[0::2], rest[1::2], strict=True)))
    return segment(call, lanes, (p, None, rows), call.solve.advance)[2]


def cotangent(call: Call, *inputs: Any) -> list[Any]:
    """Cotangents of the loop variables `call.carry` before the first step, and of the operands `call.operands`.

    Linear inputs: cotangents of the reached loop variables after the last step, and of the outputs.
    """
    solve, layout = call.solve, Layout(call, primal_count(call))
    first, given = layout.primal, len(call.carry)
    own = [[call.keep[i][given + j] for i in layout.own] for j in range(len(call.operands))]
    lanes, record = _lanes(layout, inputs, own), _record(layout, inputs)
    sizes = layout.sizes(layout.columns)
    linear = [layout.full(x, first + i) for i, x in enumerate(inputs[first:])]
    ct, saved = linear[: len(call.reached)], _per_output(call, linear[len(call.reached) :])
    sums = [jnp.zeros(sizes + lanes.operands[i].shape, lanes.operands[i].dtype) for i in call.operands]
    rows = [spread(r, h, lanes.sizes, offset=1) for r, h in zip(record.rows, record.row_flags, strict=True)]

    def sweep(s: Any) -> Any:
        j, rows, ct, sums = s
        row = _read(call, lanes, rows, j - 1)
        return j - 1, rows, *_step_back(call, lanes, row, sizes, (ct, sums, saved))

    def body(s: Any) -> Any:
        number, rows, ct, sums = s
        count = jnp.minimum(record.steps - number * solve.segment, solve.segment)
        _, rows, ct, sums = jax.lax.while_loop(lambda s: s[0] > 0, sweep, (count, rows, ct, sums))
        again = lambda r: _again(call, lanes, record, number - 1, r)  # noqa: E731
        return number - 1, jax.lax.cond(number > 0, again, lambda r: r, rows), ct, sums

    last = (record.steps - 1) // solve.segment
    _, _, ct, sums = jax.lax.while_loop(lambda s: s[0] >= 0, body, (last, rows, ct, sums))
    found = dict(zip(call.reached, ct, strict=True))
    out = [layout.left(found[i], [True] * len(layout.own), column(call.keep, j)) for j, i in enumerate(call.carry)]
    for j, (i, x) in enumerate(zip(call.operands, sums, strict=True)):
        out.append(layout.left(x, [level[i] for level in lanes.flags], column(call.keep, given + j)))
    return out


def _per_output(call: Call, leaves: Sequence[Any]) -> list[list[Any]]:
    out, position = [], 0
    for o in call.solve.outputs:
        count = len(call.saved(o))
        out.append(list(leaves[position : position + count]))
        position += count
    return out
