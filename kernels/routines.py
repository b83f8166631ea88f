"""The straight-line pieces of a solve's loops, as scalar programs whose inputs and outputs have places.

A backend that writes its own loops runs these pieces, and moves values between places and memory. A place is a tuple:
its kind, then what counts it. `("row", ...)` are the places of the row of one step, all others belong to the block of
lanes that runs. The loops around them are those of `gradsolve_backend.kernels.loops` and `.replay`.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from gradsolve_backend.kernels.forms import DERIVATIVE_EQUATIONS
from gradsolve_backend.kernels.scalar import ScalarProgram, scalarise
from gradsolve_backend.kernels.solve import Call
from gradsolve_backend.kernels.trace import LaneFunction

Place: TypeAlias = tuple[Any, ...]
Values: TypeAlias = Mapping[Place, Any]

ALIVE: Place = ("alive",)
KEPT: Place = ("row", "kept")
WAS_ALIVE: Place = ("row", "alive")
END: Place = ("row", "end")
ACCEPTED: Place = ("row", "accepted")


@dataclass(frozen=True, eq=False)
class Routine:
    """A scalar program that reads some places and writes some; what it writes it writes after all reads.

    Inputs in `late` are known later than the others. Outputs that do not depend on them come first, in a part of
    their own. Those in `some` hold for at least one lane whenever it runs.
    """

    name: str
    program: ScalarProgram
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    late: frozenset[Place] = frozenset()
    some: frozenset[Place] = frozenset()


def _operands(functions: Iterable[LaneFunction]) -> list[Place]:
    return sorted({("operand", ~s) for f in functions for s in f.sources if s < 0})


def _run(function: LaneFunction, arguments: Mapping[int, Place], values: Values) -> list[Any]:
    """A lane function with its arguments and operands taken from places."""
    inputs = [values[arguments[s] if s >= 0 else ("operand", ~s)] for s in function.sources]
    return function.run(*inputs)


@dataclass(frozen=True, eq=False)
class Pieces:
    """The routines of one call."""

    call: Call

    # ---- places

    @functools.cached_property
    def held(self) -> tuple[int, ...]:
        """Loop variables that a row holds: those that a replay or an output reads."""
        solve = self.call.solve
        samplers = [f for o in solve.outputs for f in (o.due, o.sample) if f is not None]
        used = {a - 1 for f in samplers for a in f.arguments if 0 < a <= solve.size}
        if self.call.record:
            used |= {a for a in self.call.replay.arguments if a < solve.size}
        return tuple(sorted(used))

    @functools.cached_property
    def row(self) -> tuple[Place, ...]:
        """The places of a row."""
        call, solve = self.call, self.call.solve
        out: list[Place] = [("row", "carry", i) for i in self.held]
        out += [("row", *place) for place in self.cursors]
        out.append(KEPT)
        if call.record and call.moving:
            out.append(WAS_ALIVE)
        if call.record and solve.size + 1 in call.replay.arguments:
            out.append(END)
        if any(o.every > 1 for o in solve.outputs):
            out.append(ACCEPTED)
        return tuple(out)

    @functools.cached_property
    def cursors(self) -> tuple[Place, ...]:
        """Next requested time and next slot of each output."""
        return tuple(("cursor", o, j) for o in range(len(self.call.solve.outputs)) for j in range(2))

    @functools.cached_property
    def state(self) -> tuple[Place, ...]:
        """All that a loop over steps carries."""
        return (*(("carry", i) for i in range(self.call.solve.size)), ALIVE, *self.cursors)

    @functools.cached_property
    def sampled(self) -> tuple[int, ...]:
        """Dense values that a sample reads."""
        solve = self.call.solve
        reads = {a for o in solve.outputs if o.sample is not None for a in o.sample.arguments}
        return tuple(j for j in range(solve.dense) if solve.size + 1 + j in reads)

    @property
    def samples(self) -> bool:
        """Whether some output has values inside steps."""
        return any(o.sample is not None for o in self.call.solve.outputs)

    def aval(self, place: Place) -> jax.ShapeDtypeStruct:
        """Shape and dtype of what lies in a place, for one lane."""
        aval = self._aval(place[1:] if place[0] == "row" else place)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)

    def _aval(self, place: Place) -> Any:
        solve, kind = self.call.solve, place[0]
        if kind in ("alive", "kept", "more"):
            return jax.ShapeDtypeStruct((), jnp.bool_)
        if kind in ("cursor", "at"):
            return jax.ShapeDtypeStruct((), jnp.int32)
        if kind in ("carry", "ct", "before", "d", "d before"):
            return solve.carry[place[1]]
        if kind in ("operand", "sum", "d operand"):
            return solve.operands[place[1]]
        if kind in ("dense", "ct dense", "d dense"):
            return solve.fixed.outputs[solve.size + place[1]]
        if kind in ("end", "accepted"):
            return solve.carry[solve.time if kind == "end" else solve.accepted]
        return solve.outputs[place[1]].leaves[place[2]]  # values of an output

    # ---- arguments of lane functions

    @functools.cached_property
    def _of_step(self) -> dict[int, Place]:
        return {i: ("carry", i) for i in range(self.call.solve.size)}

    @functools.cached_property
    def _of_replay(self) -> dict[int, Place]:
        size = self.call.solve.size
        return {**{i: ("row", "carry", i) for i in range(size)}, size: KEPT, size + 1: END}

    def _of_sample(self, o: int) -> dict[int, Place]:
        solve = self.call.solve
        out: dict[int, Place] = {0: ("cursor", o, 0)}
        out |= {1 + i: ("row", "carry", i) for i in range(solve.size)}
        return out | {1 + solve.size + j: ("dense", j) for j in range(solve.dense)}

    def _reads(self, function: LaneFunction, arguments: Mapping[int, Place]) -> list[Place]:
        return [*(arguments[a] for a in sorted(function.arguments)), *_operands([function])]

    def make(
        self, name: str, reads: Iterable[Place], function: Callable[[Values], Values], **marks: Iterable[Place]
    ) -> Routine:
        """The routine of a function from the values of places to the values of places; each is made once."""
        call = self.call
        key = (name, call.record, call.carry, call.operands)
        if key not in call.solve.routines:
            found = {mark: frozenset(places) for mark, places in marks.items()}
            call.solve.routines[key] = self._made(name, tuple(dict.fromkeys(reads)), function, **found)
        return call.solve.routines[key]

    def _made(
        self, name: str, reads: tuple[Place, ...], function: Callable[[Values], Values], **marks: frozenset[Place]
    ) -> Routine:
        writes: list[Place] = []

        def flat(*arrays: Any) -> list[Any]:
            found = function(dict(zip(reads, arrays, strict=True)))
            writes[:] = found
            return [jnp.asarray(x, self.aval(place).dtype) for place, x in found.items()]

        closed = jax.make_jaxpr(flat)(*(self.aval(place) for place in reads))
        tables = [place[0] == "operand" for place in reads]
        program = scalarise(closed, limit=DERIVATIVE_EQUATIONS, table_inputs=tables)
        return Routine(name, program, reads, tuple(writes), **marks)

    # ---- running the solve

    def begin(self) -> Routine:
        """Before the first step: cursors, and which lanes want one; a lane that is padding comes as not alive."""
        live = self.call.solve.live

        def run(v: Values) -> Values:
            out: dict[Place, Any] = {place: jnp.int32(0) for place in self.cursors}
            out[ALIVE] = v[ALIVE] & _run(live, self._of_step, v)[0]
            return out

        return self.make("begin", [ALIVE, *self._reads(live, self._of_step)], run)

    def step(self) -> Routine:
        """One trial step: the loop variables, the row, what outputs read."""
        solve = self.call.solve

        def run(v: Values) -> Values:
            out = _run(solve.advance, self._of_step, v)
            after, kept, rest = out[: solve.size], out[solve.size], out[solve.size + 1 :]
            found: dict[Place, Any] = {("carry", i): jnp.where(v[ALIVE], a, v["carry", i]) for i, a in enumerate(after)}
            found[ALIVE] = v[ALIVE] & _run(solve.live, self._of_step, {**v, **found})[0]
            marks = {KEPT: kept & v[ALIVE], WAS_ALIVE: v[ALIVE]}
            marks |= {END: after[solve.time], ACCEPTED: after[solve.accepted]}
            found |= {place: marks[place] if place in marks else v[place[1:]] for place in self.row}
            found |= {("dense", j): rest[j] for j in self.sampled}
            for o, output in enumerate(solve.outputs):
                emitted = rest[solve.dense :][output.emit]
                found |= {("emitted", o, j): x for j, x in enumerate(emitted)}
            return found

        reads = [*self.state, *_operands([solve.advance, solve.live])]
        return self.make("step", reads, run, some=[ALIVE])

    # ---- outputs

    def due(self, o: int, replayed: bool = False) -> Routine:
        """Whether the next requested time lies in the step; `replayed`: the cursor is that of the row."""
        due = self.call.solve.outputs[o].due
        assert due is not None
        arguments = self._of_sample(o)
        own = [("cursor", o, j) for j in range(2)]

        def run(v: Values) -> Values:
            moved = {place: v["row", *place] for place in own} if replayed else {}
            return {**moved, ("more", o): v[KEPT] & _run(due, arguments, {**v, **moved})[0]}

        reads = [KEPT, *self._reads(due, arguments)]
        if replayed:
            reads = [*(r for r in reads if r not in own), *(("row", *place) for place in own)]
        return self.make(f"{'redue' if replayed else 'due'}.{o}", reads, run)

    def here(self, o: int) -> Routine:
        """The slot of the requested time that comes next."""
        slots = self.call.solve.outputs[o].slots
        run = lambda v: {("at", o): jnp.where(v["more", o], v["cursor", o, 1], slots)}  # noqa: E731
        return self.make(f"here.{o}", [("more", o), ("cursor", o, 1)], run)

    def _visit(self, o: int, v: Values) -> dict[Place, Any]:
        """The slot of the requested time `v` is at, and the next one."""
        output = self.call.solve.outputs[o]
        assert output.due is not None
        more, k, slot = v["more", o], v["cursor", o, 0], v["cursor", o, 1]
        out = {("at", o): jnp.where(more, slot, output.slots)}
        out |= {("cursor", o, 0): k + more.astype(k.dtype), ("cursor", o, 1): slot + more.astype(slot.dtype)}
        out["more", o] = v[KEPT] & _run(output.due, self._of_sample(o), {**v, **out})[0]
        return out

    def _visit_reads(self, o: int) -> list[Place]:
        due = self.call.solve.outputs[o].due
        assert due is not None
        return [KEPT, ("more", o), ("cursor", o, 0), ("cursor", o, 1), *self._reads(due, self._of_sample(o))]

    def passed(self, o: int) -> Routine:
        """Past one requested time, without its value."""
        return self.make(f"pass.{o}", self._visit_reads(o), lambda v: self._visit(o, v))

    def sample(self, o: int) -> Routine:
        """The value at one requested time, and on to the next."""
        sample = self.call.solve.outputs[o].sample
        assert sample is not None
        arguments = self._of_sample(o)

        def run(v: Values) -> Values:
            values = _run(sample, arguments, v)
            return {**{("value", o, j): x for j, x in enumerate(values)}, **self._visit(o, v)}

        return self.make(f"sample.{o}", [*self._visit_reads(o), *self._reads(sample, arguments)], run)

    def emit(self, o: int, replayed: bool = False) -> Routine:
        """The slot of the step's own value; `replayed`: the cursor is that of the row."""
        output = self.call.solve.outputs[o]
        cursor: Place = ("row", "cursor", o, 1) if replayed else ("cursor", o, 1)
        reads = [KEPT, cursor, *([ACCEPTED] if output.every > 1 else [])]

        def run(v: Values) -> Values:
            hit = v[KEPT] if output.every == 1 else v[KEPT] & (v[ACCEPTED] % output.every == 0)
            slot = v[cursor]
            return {("at", o): jnp.where(hit, slot, output.slots), ("cursor", o, 1): slot + hit.astype(slot.dtype)}

        return self.make(f"{'reemit' if replayed else 'emit'}.{o}", reads, run)

    # ---- derivatives

    def _differentiated(self, function: LaneFunction, arguments: Mapping[int, Place], v: Values) -> Any:
        """The function at the places it reads among the perturbed ones, which are they, and their values."""
        perturbed = [("row", "carry", i) for i in self.call.reached]
        perturbed += [("dense", j) for j in self.call.dense]
        perturbed += [("operand", i) for i in self.call.operands]
        reads = set(self._reads(function, arguments))
        places = [p for p in perturbed if p in reads]

        def of(*xs: Any) -> list[Any]:
            return _run(function, arguments, {**v, **dict(zip(places, xs, strict=True))})

        return of, places, tuple(v[p] for p in places)

    def leaves(self, o: int) -> list[int]:
        """The leaves of an output that can carry a derivative."""
        return [j for j, a in enumerate(self.call.solve.outputs[o].leaves) if jnp.issubdtype(a.dtype, jnp.inexact)]

    def _emitted(self) -> list[tuple[int, int]]:
        return [(o, j) for o, out in enumerate(self.call.solve.outputs) if out.every for j in self.leaves(o)]

    def clear(self) -> Routine:
        """No cotangents of one step's samples yet."""
        places: list[Place] = [("before", i) for i in self.call.reached] + [("ct dense", j) for j in self.call.dense]
        zeros = lambda v: {p: jnp.zeros(self.aval(p).shape, self.aval(p).dtype) for p in places}  # noqa: E731
        return self.make("clear", [], zeros)

    def back(self, apart: bool = False) -> Routine:
        """Cotangents before a step from those after it; dense values of the step come before those are known.

        `apart`: so does all else that does not depend on cotangents.
        """
        call = self.call
        cts: list[Place] = [("ct", i) for i in call.reached]
        sums: list[Place] = [("sum", i) for i in call.operands]
        values: list[Place] = [("ct value", o, j) for o, j in self._emitted()]
        before: list[Place] = [("before", i) for i in call.reached] if self.samples else []
        dense: list[Place] = [("ct dense", j) for j in call.dense]
        moved = WAS_ALIVE if call.moving else KEPT
        late = [*cts, *sums, *values, *before, *dense]

        def run(v: Values) -> Values:
            of, places, primals = self._differentiated(call.replay, self._of_replay, v)
            out, pull = jax.vjp(of, *primals)
            found = dict(zip(places, pull([v[p] for p in (*cts, *dense, *values)]), strict=True))
            count = len(call.reached)
            result: dict[Place, Any] = {("dense", j): x for j, x in zip(call.dense, out[count:], strict=False)}
            for i in call.reached:
                x = _total(found.get(("row", "carry", i)), v.get(("before", i)), v["ct", i])
                result["ct", i] = jnp.where(v[moved], x, v["ct", i])
            given = {p: jnp.where(v[moved], x, jnp.zeros_like(x)) for p, x in found.items()}
            return result | {("sum", i): _total(v["sum", i], given.get(("operand", i)), 0) for i in call.operands}

        reads = [*self._reads(call.replay, self._of_replay), moved, *late]
        return self.make("back.apart" if apart else "back", reads, run, late=late if self.samples or apart else ())

    def sample_back(self, o: int, apart: bool = False) -> Routine:
        """Adds what the value at one requested time gives to the cotangents of a step, and on to the next.

        `apart`: stays there, and what does not depend on cotangents comes first.
        """
        call, sample, arguments = self.call, self.call.samples[o], self._of_sample(o)
        assert sample is not None
        values: list[Place] = [("ct value", o, j) for j in self.leaves(o)]
        into = {("row", "carry", i): ("before", i) for i in call.reached}
        into |= {("dense", j): ("ct dense", j) for j in call.dense}
        into |= {("operand", i): ("sum", i) for i in call.operands}

        def run(v: Values) -> Values:
            of, places, primals = self._differentiated(sample, arguments, v)
            found = jax.vjp(of, *primals)[1]([v[p] for p in values])
            sums = {into[p]: v[into[p]] + x for p, x in zip(places, found, strict=True)}
            return sums if apart else {**sums, **self._visit(o, v)}

        reads = [*([] if apart else self._visit_reads(o)), *self._reads(sample, arguments)]
        given = [*values, *(into[r] for r in reads if r in into)]
        name, late = (f"sample_back.apart.{o}", given) if apart else (f"sample_back.{o}", [])
        return self.make(name, [*reads, *given], run, late=late)

    def _tangents(self, function: LaneFunction, arguments: Mapping[int, Place]) -> dict[Place, Place]:
        """For each perturbed place that a function reads, where its tangent is."""
        kind = "d" if arguments.get(0) == ("row", "carry", 0) else "d before"
        names = {("row", "carry", i): (kind, i) for i in self.call.reached}
        names |= {("dense", j): ("d dense", j) for j in self.call.dense}
        names |= {("operand", i): ("d operand", i) for i in self.call.operands}
        return {r: names[r] for r in self._reads(function, arguments) if r in names}

    def push(self, apart: bool = False) -> Routine:
        """Tangents after a step from those before it, and the step's dense values for samples.

        `apart`: what does not depend on tangents comes first.
        """
        call, arguments = self.call, self._of_replay
        tangents = self._tangents(call.replay, arguments)
        moved = WAS_ALIVE if call.moving else KEPT
        d: list[Place] = [("d", i) for i in call.reached]

        def run(v: Values) -> Values:
            of, places, primals = self._differentiated(call.replay, arguments, v)
            out, pushed = jax.jvp(of, primals, tuple(v[tangents[p]] for p in places))
            found: dict[Place, Any] = {p: jnp.where(v[moved], x, v[p]) for p, x in zip(d, pushed, strict=False)}
            count = len(d)
            for n, j in enumerate(call.dense, count):
                found |= {("dense", j): out[n], ("d dense", j): pushed[n]}
            rest = pushed[count + len(call.dense) :]
            found |= {("d emitted", o, j): x for (o, j), x in zip(self._emitted(), rest, strict=True)}
            return found | ({("d before", i): v["d", i] for i in call.reached} if self.samples else {})

        given = list(dict.fromkeys([*d, *tangents.values()]))
        reads, name = [*self._reads(call.replay, arguments), moved, *given], "push.apart" if apart else "push"
        return self.make(name, reads, run, late=given if apart else ())

    def sample_push(self, o: int, apart: bool = False) -> Routine:
        """The tangent of the value at one requested time, and on to the next.

        `apart`: stays there, and what does not depend on tangents comes first.
        """
        sample, arguments = self.call.samples[o], self._of_sample(o)
        assert sample is not None
        tangents = self._tangents(sample, arguments)

        def run(v: Values) -> Values:
            of, places, primals = self._differentiated(sample, arguments, v)
            pushed = jax.jvp(of, primals, tuple(v[tangents[p]] for p in places))[1]
            found: dict[Place, Any] = {("d value", o, j): x for j, x in zip(self.leaves(o), pushed, strict=True)}
            return found if apart else {**found, **self._visit(o, v)}

        reads, given = self._reads(sample, arguments), list(tangents.values())
        if apart:
            return self.make(f"sample_push.apart.{o}", [*reads, *given], run, late=given)
        return self.make(f"sample_push.{o}", [*self._visit_reads(o), *reads, *given], run)


def _total(a: Any, b: Any, like: Any) -> Any:
    """The sum of two values of which either may be missing; zero if both are."""
    if a is None:
        return jnp.zeros_like(like) if b is None else b
    return a if b is None else a + b
