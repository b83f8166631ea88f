"""The loops of the `llvm` backend, as LLVM text: forward, tangent and cotangent, for any solve.

A task is a range of blocks, a block is one vector of lanes. Blocks are independent: each runs its own loop over steps
until its last lane has ended. What a loop carries and what its pieces exchange is in the frame of the worker.

The record of a block is the rows of its first steps and, beyond them, checkpoints at a distance that doubles when they
are full. A reverse sweep runs the steps after a checkpoint again, by the same code on the same bits, into a few rows of
the frame. What identifies a block's record is in its marks; one that is not the record of these lanes (a caller took
residuals apart) is not used, and the block starts from the beginning.
"""

import abc
from dataclasses import dataclass, field

import numpy as np

from gradsolve_backend.kernels.llvm_arrays import Array, Arrays
from gradsolve_backend.kernels.llvm_flow import Number, arithmetic, compare, counting, during, smaller
from gradsolve_backend.kernels.llvm_ir import Body, Module, Target, Value
from gradsolve_backend.kernels.llvm_layout import LINE, Layout, Slot, lane_bytes, rounded
from gradsolve_backend.kernels.llvm_memory import Movers
from gradsolve_backend.kernels.llvm_routine import Writer
from gradsolve_backend.kernels.routines import ALIVE, KEPT, WAS_ALIVE, Pieces, Place, Routine
from gradsolve_backend.kernels.solve import Call
from gradsolve_backend.kernels.uniform import uniform_places

ROWS = 128  # of a record, where no memory was asked for
FEWEST = 8
WIDEST = 16  # lanes of a vector
CHECKPOINTS = 2 * WIDEST  # of a record; an even number for every lane of a block
AGAIN = 128  # rows of the frame, for steps that are run again
GROUP = 16  # columns that a sweep takes together, so that what they share is computed once
MARKS = 4  # per lane: steps of its block, number of the lane, of all lanes, a hash of the final state

LANES, COLUMNS, PER_TASK = 3, 4, 5  # parameters of a kernel after those that the entry reads
INT, LONG, BOOL = np.dtype(np.int32), np.dtype(np.int64), np.dtype(bool)


def record_rows(pieces: Pieces) -> int:
    """Rows of a record: those of the memory that was asked for, beside the checkpoints.

    Raises:
        ValueError: if it has not room for a few.
    """
    memory = pieces.call.memory
    if memory is None:
        return ROWS
    row, fixed = lane_bytes(pieces, pieces.row), CHECKPOINTS * lane_bytes(pieces, pieces.state)
    if memory < fixed + FEWEST * row:
        raise ValueError(
            f"A record of {memory} bytes per lane was asked for, by `GradSolveAdjoint(memory=)` or GRADSOLVE_MEMORY. "
            f"This solve needs at least {fixed + FEWEST * row}, and {row} for each further step that is not run again."
        )
    return (memory - fixed) // row


def record_bytes(pieces: Pieces) -> tuple[int, int]:
    """Bytes per lane of a record's rows, and of its checkpoints. What is never reached is never touched."""
    rows = record_rows(pieces) * lane_bytes(pieces, pieces.row)
    return rows, CHECKPOINTS * lane_bytes(pieces, pieces.state)


NUMBERS = (
    "lanes", "first", "valid", "column", "group", "members", "steps", "next", "count", "distance", "piece",
)  # fmt: skip


class Frame:
    """Numbers in the frame's head."""

    def __init__(self, body: Body, head: int) -> None:
        self.numbers = {name: Number(body, "%frame", head + 8 * i) for i, name in enumerate(NUMBERS)}

    def __getattr__(self, name: str) -> Number:
        return self.numbers[name]


@dataclass(eq=False)
class Kernel(abc.ABC):
    """Writes one kernel."""

    call: Call
    target: Target
    arrays: Arrays
    module: Module = field(default_factory=Module)

    def __post_init__(self) -> None:
        self.pieces = Pieces(self.call)
        self.layout = Layout(self.pieces, self.target.width, self.arrays.replicated)
        self.writer = Writer(self.module, self.target, self.layout, self._uniform())
        self.movers = Movers(self.module, self.target)
        self.head = self.layout.reserve(8 * len(NUMBERS))
        self.local_row = self.layout.reserve(self.layout.row_bytes)
        self.lane_rows: dict[tuple, Slot] = {}
        self.functions: dict[str, list[list[str]]] = {}
        self.column = "null"  # the area of the column that the function being written is at

    @abc.abstractmethod
    def make(self) -> str:
        """The text of the kernel."""

    @property
    @abc.abstractmethod
    def saved_results(self) -> dict[tuple[int, int], Array]:
        """Results that are buffers of saved values, by output and leaf."""

    def _uniform(self) -> frozenset[Place]:
        """Places that are the same in all lanes of each block; none if a block has padding, which is never alive."""
        if self.target.width == 1 or self.arrays.replicated or self.arrays.lanes % self.target.width:
            return frozenset()
        groups = {"carry": self.arrays.carry, "operand": self.arrays.operands}
        shared = [(kind, i) for kind, group in groups.items() for i, array in enumerate(group) if array.shared]
        return uniform_places(self.pieces, shared)

    # ---- functions

    def body(self, name: str, more: str = "") -> Body:
        """A function of a frame, a row and the buffers; it begins at the first of the columns."""
        body = Body(self.module, self.target, f"internal void @{name}(ptr %frame, ptr %row, ptr %buffers{more})")
        self.column = body.address("%frame", body.emit("load i64, ptr @columns"))
        return body

    def end(self, body: Body) -> None:
        """Return, and add the function."""
        body.line("ret void")
        body.close()

    def write(self, *routines: Routine) -> None:
        """Write routines into the module, each once."""
        for routine in routines:
            if routine.name not in self.functions:
                self.functions[routine.name] = self.writer.write(routine)

    def run(self, body: Body, name: str, row: str = "%row", part: int | None = None) -> None:
        """Call a routine but for what is done once for each block, or one part of the rest."""
        parts = self.functions[name][1:]
        for function in [f for p in (parts if part is None else [parts[part]]) for f in p]:
            body.line(f"call void @{function}(ptr %frame, ptr {row}, ptr {self.column})")

    def run_once(self, body: Body) -> None:
        """What of all routines depends on operands only; they must be there."""
        for parts in self.functions.values():
            for function in parts[0]:
                body.line(f"call void @{function}(ptr %frame, ptr null, ptr null)")

    def buffer(self, body: Body, number: int) -> str:
        """The data of an array."""
        return body.emit(f"load ptr, ptr {body.address('%buffers', 8 * number)}")

    def place(self, body: Body, place: Place, row: str = "%row") -> str:
        """The address of a place."""
        return body.address(self.pointer(place, row), self.layout.slot(place).offset)

    def pointer(self, place: Place, row: str = "%row") -> str:
        """What the offset of a place counts from."""
        return {"%row": row, "%frame": "%frame", "%column": self.column}[self.layout.base(place)]

    def any(self, body: Body, place: Place, row: str = "%row") -> str:
        """Whether a mark holds in some lane."""
        load = body.load_one if self.layout.replicated and place[0] == "row" else body.load
        return body.any_lane(load(self.pointer(place, row), self.layout.slot(place).offset, BOOL))

    def copy(self, body: Body, target: str, source: str, size: int) -> None:
        """Copy bytes."""
        self.module.declare("void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)")
        body.line(f"call void @llvm.memcpy.p0.p0.i64(ptr {target}, ptr {source}, i64 {size}, i1 false)")

    # ---- which row of an array belongs to a lane

    def rows_of(self, array: Array) -> Slot:
        """The slot with the row number of each lane, which every column has."""
        kind = (array.lanes, array.columns, array.index)
        if kind not in self.lane_rows:
            self.lane_rows[kind] = self.layout.vectors(LONG, 1, column=True)
        return self.lane_rows[kind]

    def write_rows(self, body: Body) -> None:
        """Fill the slots of `rows_of` for this block and column."""
        frame = Frame(body, self.head)
        first, column, lanes = frame.first.get(), frame.column.get(), self.lanes(body)
        last = arithmetic(body, "sub", lanes, 1)
        for kind, slot in self.lane_rows.items():
            by_lane, by_column, index = kind
            with counting(body, 0, self.target.width) as w:
                lane = smaller(body, arithmetic(body, "add", first, w), last)
                both = arithmetic(body, "add", arithmetic(body, "mul", column, lanes), lane)
                row = both if by_lane and by_column else lane if by_lane else column if by_column else "0"
                if index is not None:
                    entry = body.emit(f"getelementptr i32, ptr {self.buffer(body, index)}, i64 {both}")
                    row = body.emit(f"sext i32 {body.emit(f'load i32, ptr {entry}')} to i64")
                target = body.emit(f"getelementptr i64, ptr {body.address(self.column, slot.offset)}, i64 {w}")
                body.line(f"store i64 {row}, ptr {target}")

    def lanes(self, body: Body) -> str:
        """The number of lanes."""
        return Frame(body, self.head).lanes.get()

    def enter(self, body: Body, array: Array, place: Place) -> None:
        """Read an array's rows into a place."""
        buffer, target, size = self.buffer(body, array.buffer), self.place(body, place), array.dtype.itemsize
        if array.elements and array.shared:
            self.movers.share(body, size, buffer, array.elements, target)
        elif array.elements:
            rows = body.address(self.column, self.rows_of(array).offset)
            self.movers.enter(body, size, buffer, rows, array.elements, target)

    def leave(self, body: Body, place: Place, array: Array) -> None:
        """Write a place into an array that has a row per lane, and per column where there are any."""
        frame = Frame(body, self.head)
        first = frame.first.get()
        if array.columns:
            first = arithmetic(body, "add", first, arithmetic(body, "mul", frame.column.get(), self.lanes(body)))
        self.movers.leave(
            body, array.dtype.itemsize, self.place(body, place), self.buffer(body, array.buffer), array.elements, first,
            frame.valid.get(),
        )  # fmt: skip

    def written(self, body: Body, place: Place) -> tuple[str, str, str]:
        """Slots of the lanes, the first row, and the number of rows of an output in this block."""
        frame = Frame(body, self.head)
        first = arithmetic(body, "mul", frame.column.get(), self.lanes(body))
        return self.place(body, place), arithmetic(body, "add", first, frame.first.get()), frame.valid.get()

    # ---- the beginning of a block

    def write_start(self) -> None:
        """`@start`: the loop variables before the first step."""
        self.write(self.pieces.begin())
        body = self.body("start")
        for i, array in enumerate(self.arrays.carry):
            self.enter(body, array, ("carry", i))
        _, alive = self.movers.lanes_below(body, Frame(body, self.head).valid.get())
        body.store(Value(alive, BOOL), "%frame", self.layout.slot(ALIVE).offset)
        self.run(body, "begin")
        self.end(body)

    def enter_operands(self, body: Body) -> None:
        """Operands that are read element by element, and the addresses of those that are read whole."""
        for i, array in enumerate(self.arrays.operands):
            if ("operand", i) in self.layout.slots:
                self.enter(body, array, ("operand", i))
            if i in self.writer.tables:
                rows = body.load(self.column, self.rows_of(array).offset, LONG)
                size = body.splat(array.elements * array.dtype.itemsize, LONG)
                offset = body.emit(f"mul {body.type(LONG)} {rows.name}, {size.name}")
                base = body.emit(f"ptrtoint ptr {self.buffer(body, array.buffer)} to i64")
                address = body.emit(f"add {body.type(LONG)} {offset}, {body.broadcast(base, LONG).name}")
                body.store(Value(address, LONG), "%frame", self.writer.tables[i].offset)
        self.run_once(body)

    def locate(self, body: Body) -> None:
        """Which lanes the block `%block` has."""
        frame = Frame(body, self.head)
        first = arithmetic(body, "mul", "%block", self.target.width)
        frame.first.set(first)
        left = arithmetic(body, "sub", frame.lanes.get(), first)
        frame.valid.set(smaller(body, left, self.target.width))
        frame.column.set(0)

    def recorded_lanes(self, body: Body) -> tuple[str, str]:
        """The first of the lanes whose record the block reads or writes, and their number."""
        frame = Frame(body, self.head)
        return ("0", "1") if self.layout.replicated else (frame.first.get(), frame.valid.get())

    def region(self, body: Body) -> tuple[str, str, str, str]:
        """The record of the block: its rows, how many there are, its checkpoints, how many there are."""
        assert self.arrays.record is not None
        first, lanes = self.recorded_lanes(body)
        found: list[str] = []
        units = self.layout.row_bytes, self.layout.state_bytes
        for buffer, size, unit in zip(self.arrays.record[1:], record_bytes(self.pieces), units, strict=True):
            found.append(body.address(self.buffer(body, buffer), arithmetic(body, "mul", first, size)))
            found.append(arithmetic(body, "udiv", arithmetic(body, "mul", lanes, size), unit))
        rows, count, checkpoints, most = found
        return rows, count, checkpoints, arithmetic(body, "and", most, -2)

    def prepare(self, body: Body, first: str, last: str) -> None:
        """What a task does before its blocks; nothing, for most kernels."""
        del body, first, last

    def write_kernel(self, clear: tuple[Array, ...] = ()) -> str:
        """`@kernel`: the blocks of a task, after clearing the task's part of results that are summed over lanes."""
        signature = "void @kernel(ptr %buffers, ptr %params, i64 %task, i64 %worker)"
        body = Body(self.module, self.target, signature)
        size = self.frame_bytes
        frames = body.emit(f"load ptr, ptr {body.address('%buffers', 8 * self.arrays.frames)}")
        body.line(f"%frame = getelementptr i8, ptr {frames}, i64 {arithmetic(body, 'mul', '%worker', size)}")
        number = lambda i: Number(body, "%params", 8 * i).get()  # noqa: E731
        lanes, per_task = number(LANES), number(PER_TASK)
        Frame(body, self.head).lanes.set(lanes)
        columns, tasks = number(COLUMNS), number(0)
        for array in clear:
            with counting(body, 0, columns) as column:
                row = arithmetic(body, "add", arithmetic(body, "mul", column, tasks), "%task")
                start = arithmetic(body, "mul", row, array.elements * array.dtype.itemsize)
                target = body.address(self.buffer(body, array.buffer), start)
                self.module.declare("void @llvm.memset.p0.i64(ptr, i8, i64, i1)")
                size_of = array.elements * array.dtype.itemsize
                body.line(f"call void @llvm.memset.p0.i64(ptr {target}, i8 0, i64 {size_of}, i1 false)")
        blocks = arithmetic(body, "udiv", arithmetic(body, "add", lanes, self.target.width - 1), self.target.width)
        first = arithmetic(body, "mul", "%task", per_task)
        last = smaller(body, arithmetic(body, "add", first, per_task), blocks)
        self.prepare(body, first, last)
        with counting(body, first, last) as block:
            arguments = f"ptr %frame, ptr null, ptr %buffers, i64 {block}, i64 {columns}, i64 {tasks}, i64 %task"
            body.line(f"call void @block({arguments})")
        self.end(body)
        self.module.add(f"@columns = internal constant i64 {rounded(self.layout.frame_bytes, LINE)}")
        self.module.add(f"@column = internal constant i64 {self.layout.column_bytes}")
        return self.module.text()

    @property
    def group(self) -> int:
        """Columns that are in the frame at a time."""
        return 1

    @property
    def frame_bytes(self) -> int:
        """Bytes of a worker's frame, with the columns."""
        return rounded(rounded(self.layout.frame_bytes, LINE) + self.group * self.layout.column_bytes, 4096)

    def block(self) -> Body:
        """`@block`, to be written."""
        return self.body("block", ", i64 %block, i64 %columns, i64 %tasks, i64 %task")

    # ---- steps

    def write_step(self, values: bool) -> None:
        """`@forward_step`: a trial step, with the values of outputs or only past them."""
        solve, pieces = self.call.solve, self.pieces
        self.write(pieces.step())
        body = self.body("forward_step")
        self.run(body, "step")
        for o, output in enumerate(solve.outputs):
            visit = "sample" if values else "pass"
            if output.sample is not None:
                self.write(pieces.due(o), pieces.sample(o) if values else pieces.passed(o))
                self.run(body, f"due.{o}")
                with during(body, lambda o=o: self.any(body, ("more", o))):
                    self.run(body, f"{visit}.{o}")
                    self.scatter(body, o, "value", range(len(output.leaves)) if values else ())
            if output.every:
                self.write(pieces.emit(o))
                self.run(body, f"emit.{o}")
                self.scatter(body, o, "emitted", range(len(output.leaves)) if values else ())
        self.end(body)

    def scatter(self, body: Body, o: int, kind: str, leaves: range | tuple[int, ...] | list[int]) -> None:
        """Write each lane's values into an output at its slot."""
        for j in leaves:
            array = self.saved_results[o, j]
            shape = (self.call.solve.outputs[o].slots, array.elements)
            slot = self.place(body, (kind, o, j))
            at = self.written(body, ("at", o))
            self.movers.scatter(body, array.dtype.itemsize, slot, self.buffer(body, array.buffer), shape, at)

    def clear_tails(self, body: Body, slots: dict[int, Place]) -> None:
        """Zero what is never written of the outputs, from each lane's slot on."""
        for (o, _), array in self.saved_results.items():
            shape = (self.call.solve.outputs[o].slots, array.elements)
            at = self.written(body, slots[o])
            self.movers.clear(body, array.dtype.itemsize, self.buffer(body, array.buffer), shape, at)

    def call_step(self, body: Body, name: str, row: str) -> None:
        """Call a function of a frame, a row and the buffers."""
        body.line(f"call void @{name}(ptr %frame, ptr {row}, ptr %buffers)")

    def more_steps(self, body: Body, steps: Number) -> str:
        """Whether a lane wants a further step, and may take it."""
        alive, limit = self.any(body, ALIVE), self.call.solve.max_steps
        return alive if limit is None else body.emit(f"and i1 {alive}, {compare(body, 'slt', steps.get(), limit)}")

    def moved_row(self, body: Body, row: str = "%row") -> str:
        """Whether a row has a part in the derivative of some lane."""
        return self.any(body, WAS_ALIVE if self.call.moving else KEPT, row)
