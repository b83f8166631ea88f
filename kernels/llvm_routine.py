"""A routine as LLVM functions `void @name(ptr %frame, ptr %row, ptr %column)` that read and write slots.

A long program is cut into functions of bounded length, because the time that LLVM needs for a block of code grows
faster than its length; a value that a later function needs goes through the frame. A program that is called becomes a
function of its own, with its arguments in the frame and its results where `%row` points.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from gradsolve_backend.kernels.compat import Literal
from gradsolve_backend.kernels.llvm_ir import BOOL, Body, Module, Table, Target, Value
from gradsolve_backend.kernels.llvm_layout import WORD, Layout, Slot
from gradsolve_backend.kernels.llvm_ops import Instruction, constant, instructions
from gradsolve_backend.kernels.routines import Place, Routine
from gradsolve_backend.kernels.scalar import SHARED, ScalarProgram
from gradsolve_backend.kernels.uniform import uniform_inputs, uniform_values

CHUNK = 1500  # instructions of one LLVM function
SIGNATURE = "internal void @{}(ptr noalias %frame, ptr noalias %row, ptr noalias %column)"
ADDRESS = np.dtype(np.int64)


@dataclass(frozen=True, slots=True)
class Element:
    """Where one vector lies: behind which pointer, at which offset; `lasting`: it changes in no routine.

    Of a `single` one, whose elements are all the same, only one is there.
    """

    base: str
    offset: int
    dtype: np.dtype
    lasting: bool = False
    single: bool = False


@dataclass(frozen=True, slots=True)
class Whole:
    """An operand that is read whole."""

    operand: int
    length: int
    dtype: np.dtype


@dataclass(frozen=True, slots=True)
class Certain:
    """A mark that holds in all lanes."""


Source: TypeAlias = Element | Whole | Certain


@dataclass(frozen=True, slots=True)
class Result:
    """Where an output of a program goes; `replaced`: the program reads what lies there."""

    variable: Any
    element: Element
    replaced: bool = False


@dataclass(eq=False)
class Writer:
    """Writes the routines of one kernel into its module."""

    module: Module
    target: Target
    layout: Layout
    uniform: frozenset[Place] = frozenset()  # places that are the same in all lanes
    tables: dict[int, Slot] = field(default_factory=dict)  # operands that are read whole: the address of each lane's

    def table(self, operand: int) -> Slot:
        """The slot that holds where each lane's array of an operand begins."""
        if operand not in self.tables:
            self.tables[operand] = self.layout.vectors(ADDRESS, 1)
        return self.tables[operand]

    def element(self, place: Place, index: int) -> Element:
        """One element of a place."""
        slot = self.layout.slot(place)
        kept = place[0] == "row"
        size = slot.dtype.itemsize * (self.layout.row_width if kept else self.layout.width)
        single = kept and self.layout.replicated
        return Element(self.layout.base(place), slot.offset + index * size, slot.dtype, place[0] == "operand", single)

    def write(self, routine: Routine) -> list[list[str]]:
        """The functions of a routine, by part: what depends on operands only, the early part, the rest."""
        program, read = routine.program, set(routine.reads)
        sources: dict[Any, Source] = {}
        late: set[Any] = set()
        variables = iter(program.jaxpr.jaxpr.invars)
        for place, whole, aval in zip(routine.reads, program.tables, program.in_avals, strict=True):
            if whole:
                sources[next(variables)] = Whole(place[1], aval.size, np.dtype(aval.dtype))
                continue
            own = [next(variables) for _ in range(aval.size)]
            certain = place in routine.some and place in self.uniform
            sources |= {v: Certain() if certain else self.element(place, i) for i, v in enumerate(own)}
            late |= set(own) if place in routine.late else set()
        outputs, results = iter(program.jaxpr.jaxpr.outvars), []
        for place, aval in zip(routine.writes, program.out_avals, strict=True):
            results += [Result(next(outputs), self.element(place, i), place in read) for i in range(aval.size)]
        results = [r for r in results if isinstance(r.variable, Literal) or sources.get(r.variable) != r.element]
        listed = instructions(program.jaxpr, self.target.fma)
        changing = {v for v, source in sources.items() if not (isinstance(source, Element) and source.lasting)}
        always, rest = _behind(changing, listed, calls=True)
        parts = [always, *(_behind(late, rest) if routine.late else [rest])]
        same = uniform_values(listed, uniform_inputs(routine, self.uniform)) if self.uniform else set()
        return Cut(self, routine.name, program, sources, results, parts, late, same).write()


def _behind(
    inputs: Iterable[Any], listed: Iterable[Instruction], calls: bool = False
) -> tuple[list[Instruction], list[Instruction]]:
    """The instructions that need none of these inputs, and the others, among which all `calls` of programs may be."""
    free, rest, behind = [], [], set(inputs)
    for one in listed:
        if calls and one.name == SHARED or any(v in behind for v in one.inputs if not isinstance(v, Literal)):
            behind.update(one.outputs)
            rest.append(one)
        else:
            free.append(one)
    return free, rest


@dataclass(eq=False)
class Cut:
    """One program, cut into functions."""

    writer: Writer
    name: str
    program: ScalarProgram
    sources: dict[Any, Source]
    results: list[Result]
    parts: list[list[Instruction]]
    late: set[Any]
    uniform: set[Any] = field(default_factory=set)  # variables that are the same in all lanes

    def write(self) -> list[list[str]]:
        """Write all functions; their names by part."""
        cut = [[part[i : i + CHUNK] for i in range(0, len(part), CHUNK)] or [[]] for part in self.parts]
        chunks = [chunk for part in cut for chunk in part]
        # Results of the first of several parts are stored by the one after it, which runs each time.
        self.first = len(cut[0]) if len(cut) > 1 else 0
        self.home = {v: n for n, chunk in enumerate(chunks) for one in chunk for v in one.outputs}
        self.callees = self._callees([one for chunk in chunks for one in chunk if one.name == SHARED])
        self.kept = self._kept(chunks)
        stores = self._stores(len(chunks), first_of_last_part=len(chunks) - len(cut[-1]))
        names = [f"{self.name}.part{n}" for n in range(len(chunks))]
        for name, chunk, results in zip(names, chunks, stores, strict=True):
            Function(self).write(name, chunk, results)
        found = iter(names)
        return [[next(found) for _ in part] for part in cut]

    def _stored_in(self, result: Result, last: int) -> int:
        """In which function a result is stored: where it is made, unless it replaces a value that others read."""
        return last if result.replaced else max(self.first, self.home[result.variable])

    def _kept(self, chunks: Sequence[Sequence[Instruction]]) -> dict[Any, Element]:
        """Where values are that cross from one function into another, or come from a call."""
        crossing: dict[Any, None] = {}
        for n, chunk in enumerate(chunks):
            reads = [v for one in chunk for v in one.inputs if not isinstance(v, Literal)]
            crossing |= dict.fromkeys(v for v in reads if self.home.get(v, n) != n)
        made = [r for r in self.results if not isinstance(r.variable, Literal) and r.variable in self.home]
        last = len(chunks) - 1
        crossing |= dict.fromkeys(r.variable for r in made if self._stored_in(r, last) != self.home[r.variable])
        calls = [one for chunk in chunks for one in chunk if one.name == SHARED]
        places = iter(self.writer.layout.strip(len(crossing) + sum(len(one.outputs) for one in calls)))
        kept = {v: Element("%frame", next(places), np.dtype(v.aval.dtype)) for one in calls for v in one.outputs}
        return kept | {v: Element("%frame", next(places), np.dtype(v.aval.dtype)) for v in crossing if v not in kept}

    def _stores(self, count: int, first_of_last_part: int) -> list[list[Result]]:
        out: list[list[Result]] = [[] for _ in range(count)]
        for result in self.results:
            v = result.variable
            if isinstance(v, Literal) or v not in self.home:  # a constant or an input
                known = isinstance(v, Literal) or v not in self.late
                out[count - 1 if result.replaced else self.first if known else first_of_last_part].append(result)
            else:
                out[self._stored_in(result, count - 1)].append(result)
        return out

    def _callees(self, calls: Sequence[Instruction]) -> "dict[ScalarProgram, Callee]":
        programs = dict.fromkeys(one.params["program"] for one in calls)
        mine = {p: [one for one in calls if one.params["program"] is p] for p in programs}
        return {p: self._callee(f"{self.name}.call{n}", p, mine[p]) for n, p in enumerate(programs)}

    def _callee(self, name: str, program: ScalarProgram, calls: Sequence[Instruction]) -> "Callee":
        """A program that is called: what is the same lasting input at all calls is read from where it lies."""
        columns = list(zip(*(one.inputs for one in calls), strict=True))
        places = iter(self.writer.layout.strip(len(columns)))
        arguments: list[Element | None] = []
        sources: dict[Any, Source] = {}
        variables: list[Any] = program.jaxpr.jaxpr.invars
        for v, column in zip(variables, columns, strict=True):
            known = None if isinstance(column[0], Literal) else self.sources.get(column[0])
            same = isinstance(known, Element) and known.lasting and all(x is column[0] for x in column)
            offset, dtype = next(places), np.dtype(v.aval.dtype)
            arguments.append(None if same else Element("%frame", offset, dtype))
            sources[v] = known if known is not None and same else Element("%frame", offset, dtype)
        size = self.writer.layout.width * WORD
        outputs: list[Any] = program.jaxpr.jaxpr.outvars
        results = [Result(v, Element("%row", i * size, np.dtype(v.aval.dtype))) for i, v in enumerate(outputs)]
        parts = [instructions(program.jaxpr, self.writer.target.fma)]
        names = Cut(self.writer, name, program, sources, results, parts, set()).write()
        return Callee([name for part in names for name in part], arguments)


@dataclass(frozen=True, eq=False)
class Callee:
    """The functions of a program that is called, and where its arguments go; None: nowhere, it reads them itself."""

    names: list[str]
    arguments: list[Element | None]


@dataclass(eq=False)
class Function:
    """One LLVM function of a program."""

    cut: Cut
    known: dict[Any, Value | Table] = field(default_factory=dict)
    numbers: dict[Any, Any] = field(default_factory=dict)  # values for one lane

    def write(self, name: str, chunk: Sequence[Instruction], results: Sequence[Result]) -> None:
        """Write the function."""
        writer = self.cut.writer
        self.body = Body(writer.module, writer.target, SIGNATURE.format(name))
        self.one_lane = self.body.single()
        for one in chunk:
            if one.name == SHARED:
                self._call(one)
                continue
            same = one.outputs[0] in self.cut.uniform
            body, known = (self.one_lane, self.numbers) if same else (self.body, self.known)
            made = one.emit(body, [self._read(v, body) for v in one.inputs])
            known.update(zip(one.outputs, made, strict=True))
            for v in one.outputs:
                if v in self.cut.kept:
                    self._store(self._read(v), self.cut.kept[v])
        values = [self._read(result.variable) for result in results]
        for value, result in zip(values, results, strict=True):
            self._store(value, result.element, result.replaced)
        self.body.line("ret void")
        self.body.close()

    def _store(self, value: Any, element: Element, replaced: bool = False) -> None:
        if element.single:
            self.body.store_one(value, element.base, element.offset)
        else:
            self.body.store(value, element.base, element.offset, replaced)

    def _call(self, one: Instruction) -> None:
        callee = self.cut.callees[one.params["program"]]
        for v, argument in zip(one.inputs, callee.arguments, strict=True):
            if argument is not None:
                self._store(self._read(v), argument)
        results = self.body.address("%frame", self.cut.kept[one.outputs[0]].offset)
        for name in callee.names:
            self.body.line(f"call void @{name}(ptr %frame, ptr {results}, ptr null)")

    def _read(self, v: Any, body: Body | None = None) -> Any:
        """A variable or literal in all lanes, or for the body of one lane."""
        body = body or self.body
        if isinstance(v, Literal):
            aval: Any = v.aval
            return body.splat(v.val, np.dtype(aval.dtype))
        known = self.numbers if body is self.one_lane else self.known
        if v not in known:
            made = v in self.cut.home and v in self.numbers
            known[v] = self.body.spread(self.numbers[v]) if made else self._load(v, body)
        return known[v]

    def _load(self, v: Any, body: Body) -> Value | Table:
        source = self.cut.kept.get(v) or self.cut.sources.get(v)
        if source is None:
            closed = self.cut.program.jaxpr
            return constant(body, closed.consts[closed.jaxpr.constvars.index(v)])
        if isinstance(source, Certain):
            return body.splat(True, BOOL)
        if isinstance(source, Element):
            load = body.load_one if source.single else body.load
            return load(source.base, source.offset, source.dtype)
        addresses = body.load("%frame", self.cut.writer.table(source.operand).offset, ADDRESS)
        kind = body.vector("ptr")
        pointers = body.emit(f"inttoptr {body.type(ADDRESS)} {addresses.name} to {kind}")
        return Table(pointers, source.length, source.dtype)
