"""The kernels of the backend `pallas`: forward, tangent and cotangent sweeps of a block of lanes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from gradsolve_backend.kernels.pallas_counters import counters
from gradsolve_backend.kernels.pallas_layout import WAITING, Frame, Memory
from gradsolve_backend.kernels.pallas_loops import COUNT, Block
from gradsolve_backend.kernels.routines import ALIVE, Pieces, Place, Routine
from gradsolve_backend.kernels.solve import Call


def forward_routines(call: Call, values: bool = True) -> list[Routine]:
    """What a forward pass runs."""
    pieces, found = Pieces(call), [Pieces(call).begin(), Pieces(call).step()]
    for o, output in enumerate(call.solve.outputs):
        if output.sample is not None:
            found += [pieces.due(o), pieces.sample(o) if values else pieces.passed(o)]
        if output.every:
            found.append(pieces.emit(o))
    return found


def _sampled(call: Call) -> list[int]:
    return [o for o, output in enumerate(call.solve.outputs) if output.sample is not None]


def cotangent_routines(call: Call) -> list[Routine]:
    """What a reverse sweep runs besides a forward pass."""
    pieces = Pieces(call)
    found = [pieces.back(), *(pieces.sample_back(o) for o in _sampled(call))]
    return found + [r for o in _sampled(call) for r in (pieces.due(o, replayed=True), pieces.here(o))]


def tangent_routines(call: Call) -> list[Routine]:
    """What a forward sweep of tangents runs besides a forward pass."""
    pieces = Pieces(call)
    found = [pieces.push(), *(pieces.sample_push(o) for o in _sampled(call))]
    return found + [pieces.due(o, replayed=True) for o in _sampled(call)]


def forward(block: Block) -> None:
    """Results: loop variables, cursors; then outputs, and the record if there is one."""
    frame, call = block.frame, block.call
    block.enter(forward_routines(call))
    block.start(frame)
    frame[COUNT] = [jnp.int32(0)]
    memory = Memory(block.pieces) if call.record else None
    counted = counters(block.pieces.step())
    frame.update({("counted", i): [block.full(0)] for i in counted})
    state = [COUNT, *(p for p in block.pieces.state if p not in {("carry", i) for i in counted})]
    state += [("counted", i) for i in counted]

    def step(frame: Frame) -> None:
        frame.update({("carry", i): block.zeros(("carry", i)) for i in counted})
        block.step(frame, values=True)
        for i in counted:
            frame["counted", i] = [frame["counted", i][0] + frame["carry", i][0].astype(jnp.int32)]
        n = frame[COUNT][0]
        if memory is not None:
            block.keep(block.refs.rows, memory.row, frame, (jnp.minimum(n, memory.rows - 1), n < memory.rows))
        frame[COUNT] = [n + 1]

    def part(frame: Frame) -> None:
        """The steps up to the next checkpoint, after leaving one here."""
        assert memory is not None
        n = frame[COUNT][0]
        number = jnp.minimum(jnp.maximum(n - memory.rows, 0) // memory.distance, memory.checkpoints - 1)
        block.keep(block.refs.checkpoints, memory.state, _counted(block, frame, counted), (number, n >= memory.rows))
        end = jnp.where(n >= memory.rows, n + memory.distance, memory.rows)
        block.during(frame, state, lambda f: block.more(f) & (f[COUNT][0] < end), step)

    block.during(frame, state, block.more, part if memory is not None and memory.checkpoints else step)
    frame = _counted(block, frame, counted)
    for place, held in zip(state_places(block), block.refs.results, strict=True):
        block.leave(held, frame[place])
    block.clear_tails(frame, {o: frame["cursor", o, 1][0] for o in range(len(call.solve.outputs))})
    if memory is not None:
        block.refs.steps[:] = lax.broadcast(frame[COUNT][0], (block.size,))


def _counted(block: Block, frame: Frame, counted: Sequence[int]) -> Frame:
    """The frame with the loop variables that were counted apart."""
    more: Frame = {}
    for i in counted:
        (first,) = block.entered(block.refs.carry[i], block.call.solve.carry[i])
        more["carry", i] = [first + frame["counted", i][0].astype(first.dtype)]
    return {**frame, **more}


def state_places(block: Block) -> list[Place]:
    """The places that a forward pass gives back."""
    return [*(("carry", i) for i in range(block.call.solve.size)), *block.pieces.cursors]


# ---- cotangents -----------------------------------------------------------------------------------------

LATE = {"ct", "ct value", "ct dense", "before", "sum"}  # kinds of places that a reverse sweep carries or is given


@dataclass(eq=False)
class Cotangent:
    """A reverse sweep, in two kernels: through the steps that have no row, then through the rows.

    The first needs more registers, and few solves have such steps. It gives the second what it has so far: cotangents
    of the reached loop variables, sums of those of the operands.
    """

    block: Block

    def __post_init__(self) -> None:
        self.memory = Memory(self.block.pieces)
        self.carried = self.memory.waiting.places

    def rows(self) -> None:
        """Results: cotangents of the perturbed loop variables, then of the perturbed operands."""
        block, call, frame = self.block, self.block.call, self.block.frame
        block.enter(cotangent_routines(call))
        frame.update(self._waited(0) if block.refs.waiting else self._first())
        steps = block.steps()
        count = jnp.minimum(jnp.max(steps), self.memory.rows)
        self._down(frame, count, lambda n: block.recorded_row(self.memory, n, steps))
        left: list[Place] = [*(("ct", i) for i in call.carry), *(("sum", i) for i in call.operands)]
        for place, held in zip(left, block.refs.results, strict=True):
            block.leave(held, frame[place])

    def beyond(self) -> None:
        """From the last checkpoint to the first; the result is what waits in the first place."""
        block, memory = self.block, self.memory
        block.enter([*forward_routines(block.call, values=False), *cotangent_routines(block.call)])
        total = jnp.max(block.steps())
        left = jnp.maximum(total - memory.rows, 0)
        whole = left // memory.distance
        count = whole * memory.parts + (left - whole * memory.distance + memory.again - 1) // memory.again
        self._wait({**block.frame, **self._first()}, count)
        block.counting(block.frame, (0, count), (), lambda f, done: self._part(f, count - 1 - done, total))

    def _first(self) -> Frame:
        """Cotangents after the last step."""
        block, call = self.block, self.block.call
        found: Frame = {("sum", i): block.zeros(("sum", i)) for i in call.operands}
        for i, held in zip(call.reached, block.refs.linear, strict=True):
            found["ct", i] = block.entered(held, call.solve.carry[i])
        return found

    def _wait(self, frame: Frame, number: Any) -> None:
        """Put what the sweep has so far into memory, while the steps of a part are run, which want its registers.

        There are two places in turn, so that no thread holds the addresses of one throughout.
        """
        where = (number % WAITING, jnp.asarray(True))
        self.block.keep(self.block.refs.waiting, self.memory.waiting, frame, where)

    def _waited(self, number: Any) -> Frame:
        return self.block.kept(self.block.refs.waiting, self.memory.waiting, number % WAITING)

    def _down(self, frame: Frame, count: Any, read: Any) -> None:
        """Back through the rows `count - 1` to 0."""

        def step(frame: Frame, done: Any) -> None:
            row = read(count - 1 - done)
            inner = {**frame, **row}
            self._back(inner)
            frame.update({p: inner[p] for p in self.carried})

        self.block.counting(frame, (0, count), self.carried, step)

    def _back(self, frame: Frame) -> None:
        """Back through the step of a row."""
        block, pieces = self.block, self.block.pieces
        back = pieces.back()
        evaluation = block.evaluation(back, late=lambda p: p[0] in LATE)
        if pieces.samples:
            block.give(evaluation, back, frame, skip=back.late)
            frame.update(block.results(evaluation, back, lambda p: p[0] == "dense"))
            for kind, numbers in (("before", block.call.reached), ("ct dense", block.call.dense)):
                frame.update({(kind, i): block.zeros((kind, i)) for i in numbers})
        for o, output in enumerate(block.call.solve.outputs):
            if output.sample is not None:
                self._back_samples(frame, o)
            if output.every:
                block.run(pieces.emit(o, replayed=output.sample is None), frame)
                self._gather(frame, o)
        block.give(evaluation, back, frame)
        frame.update(block.results(evaluation, back, lambda p: p[0] != "dense"))

    def _back_samples(self, frame: Frame, o: int) -> None:
        block, pieces = self.block, self.block.pieces
        routine = pieces.sample_back(o)
        block.run(pieces.due(o, replayed=True), frame)
        changed = [p for p in routine.writes if p[0] in ("before", "ct dense", "sum")]
        cursor: list[Place] = [("more", o), *(("cursor", o, j) for j in range(2))]

        def body(inner: Frame) -> None:
            block.run(pieces.here(o), inner)
            self._gather(inner, o)
            block.run(routine, inner)

        block.during(frame, [*cursor, *changed], lambda f: block.any(f["more", o][0]), body)

    def _gather(self, frame: Frame, o: int) -> None:
        """The cotangents of the values of an output at each lane's slot."""
        for j in self.block.pieces.leaves(o):
            frame["ct value", o, j] = self.block.gather(frame, o, j, self.block.call.solve.outputs[o].leaves[j])

    def _part(self, frame: Frame, number: Any, total: Any) -> None:
        """Run the steps of a part again, and go back through them."""
        block, memory, state = self.block, self.memory, self.block.pieces.state
        mark = number // memory.parts
        before = (number - mark * memory.parts) * memory.again
        inner = {**frame, **block.kept(block.refs.checkpoints, memory.state, mark)}
        start = memory.rows + mark * memory.distance
        there = lax.lt(lax.broadcast(start, (block.size,)), block.steps())
        inner[ALIVE] = [lax.bitwise_and(inner[ALIVE][0], there)]
        count = jnp.minimum(jnp.minimum(total - start, memory.distance) - before, memory.again)

        def step(frame: Frame, n: Any) -> None:
            block.step(frame, values=False)
            block.keep(block.refs.again, memory.row, frame, (jnp.maximum(n - before, 0), n >= before))

        block.counting(inner, (0, before + count), state, step)
        frame.update(self._waited(number + 1))
        self._down(frame, count, lambda n: block.kept(block.refs.again, memory.row, n))
        self._wait(frame, number)


# ---- tangents -------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Tangent:
    """Results: tangents of the reached loop variables, then of the values of the outputs.

    The rows are those of a call with a record, also where there is no `memory` that holds one.
    """

    block: Block
    memory: Memory | None

    def __post_init__(self) -> None:
        call = self.block.call
        self.slots: list[Place] = [("cursor", o, 1) for o in range(len(call.solve.outputs))]
        self.carried: list[Place] = [("d", i) for i in call.reached]

    def run(self) -> None:
        """Through the rows, then on from where they end; from the start if there is no record."""
        block, call, frame, memory = self.block, self.block.call, self.block.frame, self.memory
        block.enter([*forward_routines(call, values=False), *tangent_routines(call)])
        self._enter()
        block.clear_tails(frame, {o: block.full(0) for o in range(len(call.solve.outputs))})
        frame[COUNT] = [jnp.int32(0)]
        if memory is None:
            block.start(frame)
            self._onward(frame)
        else:
            self._rows(frame, memory)
        for place, held in zip(self.carried, block.refs.results, strict=True):
            block.leave(held, frame[place])

    def _enter(self) -> None:
        block, call, frame = self.block, self.block.call, self.block.frame
        given = dict(zip(call.carry, block.refs.linear, strict=False))
        for i in call.reached:
            frame["d", i] = block.entered(given[i], call.solve.carry[i]) if i in given else block.zeros(("d", i))
        for i, held in zip(call.operands, block.refs.linear[len(call.carry) :], strict=True):
            frame["d operand", i] = block.entered(held, call.solve.operands[i])

    def _rows(self, frame: Frame, memory: Memory) -> None:
        block = self.block
        steps = block.steps()
        total = jnp.max(steps)

        def step(frame: Frame, n: Any) -> None:
            inner = {**frame, **block.recorded_row(memory, n, steps)}
            self._push(inner)
            frame.update({p: inner[p] for p in self.carried})

        block.counting(frame, (0, jnp.minimum(total, memory.rows)), self.carried, step)
        if memory.checkpoints:
            frame.update(block.kept(block.refs.checkpoints, memory.state, 0))
            there = lax.lt(block.full(memory.rows), steps)
            frame[ALIVE] = [lax.bitwise_and(frame[ALIVE][0], there)]
            frame[COUNT] = [jnp.int32(memory.rows)]
            self._onward(frame)

    def _onward(self, frame: Frame) -> None:
        """Run the steps that are left, and push through each."""
        block = self.block

        def step(frame: Frame) -> None:
            inner = dict(frame)
            block.step(inner, values=False)
            after = {p: inner[p] for p in block.pieces.state}
            self._push(inner)
            frame.update({p: inner[p] for p in self.carried} | after)
            frame[COUNT] = [frame[COUNT][0] + 1]

        block.during(frame, (COUNT, *block.pieces.state, *self.carried), block.more, step)

    def _push(self, frame: Frame) -> None:
        """Forward through the step of a row."""
        block, pieces = self.block, self.block.pieces
        block.run(pieces.push(), frame)
        for o, output in enumerate(block.call.solve.outputs):
            leaves = pieces.leaves(o)
            if output.sample is not None:
                block.run(pieces.due(o, replayed=True), frame)
                scatter = lambda f, o=o, leaves=leaves: block.scatter(f, o, "d value", leaves)  # noqa: E731
                block.visit(frame, o, pieces.sample_push(o), (), scatter)
            if output.every:
                block.run(pieces.emit(o, replayed=output.sample is None), frame)
                block.scatter(frame, o, "d emitted", leaves)
