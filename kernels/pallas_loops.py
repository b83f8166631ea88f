"""The bodies of the kernels of the backend `pallas`: loops over steps, for a block of lanes.

What a kernel holds is a frame: the elements of each place, each an array over the lanes of the block. A block runs
until its own lanes have ended. Row `n` of a record is the `n`-th step of each lane's block; a lane without a step
there, as it has ended or its block had fewer steps, has a row without effect.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from gradsolve_backend.kernels import cuts
from gradsolve_backend.kernels.pallas_again import Again
from gradsolve_backend.kernels.pallas_layout import (
    INT,
    Frame,
    Memory,
    Packing,
    elements,
    loaded,
    loaded_places,
    stored_dtype,
)
from gradsolve_backend.kernels.pallas_ops import Evaluation, Table
from gradsolve_backend.kernels.routines import ALIVE, KEPT, WAS_ALIVE, Pieces, Place, Routine
from gradsolve_backend.kernels.solve import Call

COUNT: Place = ("steps",)  # of the block, a number


@dataclass(frozen=True)
class Held:
    """An array of a kernel: the reference, and which axes it has in front of those of its elements.

    With `lanes` its last axis is that of lanes; without, an axis of size one comes before the elements. A result with
    lanes is a list of references, one for each element.
    """

    ref: Any
    lanes: bool


@dataclass(frozen=True)
class Refs:
    """The references of one kernel."""

    carry: Sequence[Held | None]
    operands: Sequence[Held | None]
    constants: Mapping[int, Any]  # tables of programs, by `id`
    linear: Sequence[Held | None] = ()  # tangents or cotangents
    saved: Mapping[tuple[int, int], Held] = field(default_factory=dict)  # values of outputs, or what belongs to them
    results: Sequence[Held | None] = ()
    steps: Any = None
    rows: Mapping[Any, Any] = field(default_factory=dict)
    checkpoints: Mapping[Any, Any] = field(default_factory=dict)
    again: Mapping[Any, Any] = field(default_factory=dict)
    waiting: Mapping[Any, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Block:
    """One block of lanes in a kernel."""

    call: Call
    refs: Refs
    size: int
    count: int  # of all lanes
    stored: bool  # whether XLA compiles this, which wants to be told what to keep

    def __post_init__(self) -> None:
        self.pieces = Pieces(self.call)
        self.lanes = lax.iota(INT, self.size)
        self.valid = lax.lt(pl.program_id(0) * self.size + self.lanes, self.full(self.count))
        self.frame: Frame = {}
        self.tables: dict[int, Table] = {}

    def full(self, value: Any, dtype: Any = INT) -> Any:
        """One value on all lanes."""
        return lax.full((self.size,), value, dtype)

    def zeros(self, place: Place) -> list[Any]:
        """A place full of zeros."""
        aval = self.pieces.aval(place)
        return [self.full(0, aval.dtype)] * elements(aval)

    # ---- arrays

    def entered(self, held: Held | None, aval: Any) -> list[Any]:
        """The elements of an array on all lanes."""
        if held is None:
            return []
        if held.lanes:
            return [loaded(held.ref[k, :], aval.dtype) for k in range(elements(aval))]
        found = [lax.broadcast(held.ref[0, k], (self.size,)) for k in range(elements(aval))]
        return [loaded(x, aval.dtype) for x in found]

    def leave(self, held: Held | None, values: Sequence[Any]) -> None:
        """Write elements into a result; into one without lanes their sums."""
        if held is None:
            return
        for k, x in enumerate(values):
            if held.lanes:
                held.ref[k][:] = x.astype(stored_dtype(x.dtype))
            else:
                held.ref[0, k] = jnp.sum(lax.select(self.valid, x, lax.full_like(x, 0)))

    def enter(self, routines: Iterable[Routine]) -> None:
        """The operands that these routines read: element by element, as tables, or both."""
        apart, whole = set(), set()
        for r in routines:
            for place, is_table in zip(r.reads, r.program.tables, strict=True):
                if place[0] == "operand":
                    (whole if is_table else apart).add(place[1])
        for i, held in enumerate(self.refs.operands):
            aval = self.call.solve.operands[i]
            if i in apart:
                self.frame["operand", i] = self.entered(held, aval)
            if i in whole:
                assert held is not None
                self.tables[i] = Table(held.ref, elements(aval), self.lanes if held.lanes else None)

    # ---- routines

    def evaluation(self, routine: Routine, late: Callable[[Place], bool] | None = None) -> Evaluation:
        """A routine that has been given its constants and nothing else; `late`: the places of a reverse sweep."""
        closed = routine.program.jaxpr
        stored = cuts.cuts(closed.jaxpr) if self.stored else frozenset()
        again = None
        if late is not None:
            again = Again(closed.jaxpr, [v for p, own in self._inputs(routine) if late(p) for v in own])
        evaluation = Evaluation(closed.jaxpr, self.size, not self.stored, stored, late is not None, again)
        constants = zip(closed.jaxpr.constvars, closed.consts, strict=True)
        evaluation.give({v: self._constant(c) for v, c in constants})
        return evaluation

    def _inputs(self, routine: Routine) -> Iterator[tuple[Place, list[Any]]]:
        """The places that a routine reads, and the variables of each."""
        program, variables = routine.program, iter(routine.program.jaxpr.jaxpr.invars)
        for place, is_table, aval in zip(routine.reads, program.tables, program.in_avals, strict=True):
            yield place, [next(variables) for _ in range(1 if is_table else elements(aval))]

    def _constant(self, value: Any) -> Any:
        return Table(self.refs.constants[id(value)], value.size) if jnp.ndim(value) else value

    def give(self, evaluation: Evaluation, routine: Routine, frame: Frame, skip: Iterable[Place] = ()) -> None:
        """Give a routine the places that it reads, but for some."""
        values: dict[Any, Any] = {}
        for (place, own), is_table in zip(self._inputs(routine), routine.program.tables, strict=True):
            if place not in skip:
                values |= zip(own, [self.tables[place[1]]] if is_table else frame[place], strict=True)
        evaluation.give(values)

    def results(self, evaluation: Evaluation, routine: Routine, wanted: Callable[[Place], bool] | None = None) -> Frame:
        """The places that a routine writes, or those of them that are wanted."""
        variables, found = iter(routine.program.jaxpr.jaxpr.outvars), {}
        for place, aval in zip(routine.writes, routine.program.out_avals, strict=True):
            own = [next(variables) for _ in range(elements(aval))]
            if wanted is None or wanted(place):
                found[place] = [evaluation.read(v) for v in own]
        return found

    def run(self, routine: Routine, frame: Frame) -> None:
        """Run a routine on a frame."""
        evaluation = self.evaluation(routine)
        self.give(evaluation, routine, frame)
        frame.update(self.results(evaluation, routine))

    # ---- loops

    def any(self, mark: Any) -> Any:
        """Whether a mark holds in some lane."""
        return jnp.max(mark.astype(INT)) > 0

    def during(
        self, frame: Frame, places: Iterable[Place], going: Callable[[Frame], Any], body: Callable[[Frame], None]
    ) -> None:
        """`while going(frame): body(frame)`, where the body changes these places only."""
        places = tuple(places)
        sizes = [len(frame[p]) for p in places]

        def framed(flat: Sequence[Any]) -> Frame:
            values = iter(flat)
            return {**frame, **{p: [next(values) for _ in range(n)] for p, n in zip(places, sizes, strict=True)}}

        def step(flat: Sequence[Any]) -> list[Any]:
            inner = framed(flat)
            body(inner)
            return loaded_places(places, inner)

        end = lax.while_loop(lambda flat: going(framed(flat)), step, loaded_places(places, frame))
        frame.update({p: x for p, x in framed(end).items() if p in places})

    def counting(self, frame: Frame, bounds: tuple[Any, Any], places: Iterable[Place], body: Callable) -> None:
        """`for n in range(*bounds): body(frame, n)`."""
        counter: Place = ("counter",)
        inner = {**frame, counter: [jnp.asarray(bounds[0], INT)]}

        def step(frame: Frame) -> None:
            body(frame, frame[counter][0])
            frame[counter] = [frame[counter][0] + 1]

        self.during(inner, (counter, *places), lambda f: f[counter][0] < bounds[1], step)
        frame.update({p: inner[p] for p in places})

    # ---- steps

    def start(self, frame: Frame) -> None:
        """The loop variables before the first step."""
        for i, held in enumerate(self.refs.carry):
            frame["carry", i] = self.entered(held, self.call.solve.carry[i])
        frame[ALIVE] = [self.valid]
        self.run(self.pieces.begin(), frame)

    def more(self, frame: Frame) -> Any:
        """Whether a lane wants a further step, and may take it."""
        alive, limit = self.any(frame[ALIVE][0]), self.call.solve.max_steps
        return alive if limit is None else alive & (frame[COUNT][0] < limit)

    def step(self, frame: Frame, values: bool) -> None:
        """A trial step, with the values of outputs or only past them."""
        pieces = self.pieces
        self.run(pieces.step(), frame)
        for o, output in enumerate(self.call.solve.outputs):
            if output.sample is not None:
                visit = pieces.sample(o) if values else pieces.passed(o)
                leaves = range(len(output.leaves)) if values else ()
                self.run(pieces.due(o), frame)
                self.visit(frame, o, visit, (), lambda f, o=o, leaves=leaves: self.scatter(f, o, "value", leaves))
            if output.every:
                self.run(pieces.emit(o), frame)
                if values:
                    self.scatter(frame, o, "emitted", range(len(output.leaves)))

    def visit(
        self, frame: Frame, o: int, routine: Routine, places: Iterable[Place], also: Callable[[Frame], None]
    ) -> None:
        """Run a routine once for each requested time in a step."""
        cursor = [("cursor", o, j) for j in range(2)]

        def body(inner: Frame) -> None:
            self.run(routine, inner)
            also(inner)

        self.during(frame, [("more", o), *cursor, *places], lambda f: self.any(f["more", o][0]), body)

    def _slot(self, frame: Frame, o: int) -> tuple[Any, Any]:
        """The slot of each lane's value in an output, within the buffer, and whether there is one."""
        at, slots = frame["at", o][0], self.call.solve.outputs[o].slots
        inside = lax.bitwise_and(lax.ge(at, self.full(0)), lax.lt(at, self.full(slots)))
        return lax.select(inside, at, self.full(0)), inside

    def scatter(self, frame: Frame, o: int, kind: str, leaves: Iterable[int]) -> None:
        """Write each lane's values into an output at its slot."""
        slot, inside = self._slot(frame, o)
        for j in leaves:
            held = self.refs.saved.get((o, j))
            if held is None:
                continue
            for k, x in enumerate(frame[kind, o, j]):
                plt.store(held.ref.at[slot, self.full(k), self.lanes], x.astype(stored_dtype(x.dtype)), mask=inside)

    def gather(self, frame: Frame, o: int, j: int, aval: Any) -> list[Any]:
        """Each lane's values of an output at its slot, zero where there is none."""
        slot, inside = self._slot(frame, o)
        held = self.refs.saved.get((o, j))
        if held is None:
            return [self.full(0, aval.dtype)] * elements(aval)
        lanes = self.lanes if held.lanes else self.full(0)
        zero = self.full(0, aval.dtype)
        return [
            plt.load(held.ref.at[slot, self.full(k), lanes], mask=inside, other=zero) for k in range(elements(aval))
        ]

    def clear_tails(self, frame: Frame, slots: Mapping[int, Any]) -> None:
        """Zero what is never written of the outputs, from each lane's slot on."""
        for (o, _), held in self.refs.saved.items():
            first = lax.select(self.valid, slots[o], self.full(self.call.solve.outputs[o].slots))

            def clear(_: Frame, n: Any, held: Held = held, first: Any = first) -> None:
                at = lax.broadcast(n, (self.size,))
                mask = lax.ge(at, first)
                for k in range(held.ref.shape[1]):
                    plt.store(held.ref.at[at, self.full(k), self.lanes], self.full(0, held.ref.dtype), mask=mask)

            self.counting(frame, (jnp.min(first), self.call.solve.outputs[o].slots), (), clear)

    # ---- rows and checkpoints

    def steps(self) -> Any:
        """The steps that each lane's block took."""
        return lax.select(self.valid, self.refs.steps[:], self.full(0))

    def keep(self, refs: Mapping[Any, Any], packing: Packing, frame: Frame, where: tuple[Any, Any]) -> None:
        """Write places at `where = (index, condition)`; if that is not met, nothing.

        An index for each lane, as Pallas's interpreter copies the whole array for a masked slice.
        """
        at, mask = (lax.broadcast(x, (self.size,)) for x in where)
        for dtype, values in packing.packed(frame).items():
            for k, x in enumerate(values):
                plt.store(packing.at(refs, dtype, k, at, self.lanes), x, mask=mask)

    def kept(self, refs: Mapping[Any, Any], packing: Packing, index: Any) -> Frame:
        """Read places."""
        return packing.unpacked(lambda dtype, k: packing.at(refs, dtype, k, index, slice(None))[...])

    def recorded_row(self, memory: Memory, n: Any, steps: Any) -> Frame:
        """A row of the record; it has no effect on lanes whose block had fewer steps."""
        row = self.kept(self.refs.rows, memory.row, n)
        inside = lax.lt(lax.broadcast(n, (self.size,)), steps)
        for mark in (KEPT, WAS_ALIVE):
            if mark in row:
                row[mark] = [lax.bitwise_and(row[mark][0], inside)]
        return row
