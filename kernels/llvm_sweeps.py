"""The sweeps of the `llvm` backend over the record of a forward pass: what both need, and the cotangent sweep."""

import abc
import contextlib
from collections.abc import Iterator

from gradsolve_backend.kernels.llvm_arrays import Array
from gradsolve_backend.kernels.llvm_flow import Number, arithmetic, compare, counting, during, smaller, when
from gradsolve_backend.kernels.llvm_ir import Body
from gradsolve_backend.kernels.llvm_loops import AGAIN, GROUP, INT, MARKS, Frame, Kernel
from gradsolve_backend.kernels.routines import Place


class Sweep(Kernel):
    """What both sweeps need: groups of columns, the record's marks, and the steps beyond its rows."""

    @property
    def group(self) -> int:
        """Columns that are in the frame at a time."""
        return max(1, min(GROUP, self.arrays.columns))

    @property
    def apart(self) -> bool:
        """Whether what columns share is computed apart from what each has for itself."""
        return self.group > 1

    def make(self) -> str:
        """The text of the kernel."""
        arrays = self.arrays
        for array in (*arrays.carry, *arrays.operands, *arrays.linear, *(a for s in arrays.saved for a in s)):
            self.rows_of(array)
        self.write_start()
        self.write_step(values=False)
        self.write_steps()
        body = self.block()
        self.locate(body)
        with self.groups(body):
            with self.each_column(body):
                self.write_rows(body)
                self.enter_linear(body)
            self.enter_operands(body)
            self.sweep(body)
            with self.each_column(body):
                self.leave_linear(body)
        self.end(body)
        return self.write_kernel(tuple(self.summed.values()))

    @property
    @abc.abstractmethod
    def summed(self) -> dict[int, Array]:
        """Results that are sums over lanes, by operand."""

    @abc.abstractmethod
    def write_steps(self) -> None:
        """The functions of a step of the sweep."""

    @abc.abstractmethod
    def enter_linear(self, body: Body) -> None:
        """Read the linear inputs of a column."""

    @abc.abstractmethod
    def sweep(self, body: Body) -> None:
        """Through all steps of the block."""

    @abc.abstractmethod
    def leave_linear(self, body: Body) -> None:
        """Write the results of a column."""

    @contextlib.contextmanager
    def groups(self, body: Body) -> Iterator[None]:
        """For each group of columns."""
        frame = Frame(body, self.head)
        count = arithmetic(body, "udiv", arithmetic(body, "add", "%columns", self.group - 1), self.group)
        with counting(body, 0, count) as i:
            first = arithmetic(body, "mul", i, self.group)
            frame.group.set(first)
            frame.members.set(smaller(body, arithmetic(body, "sub", "%columns", first), self.group))
            yield

    @contextlib.contextmanager
    def each_column(self, body: Body) -> Iterator[None]:
        """For each column of the group."""
        frame, first = Frame(body, self.head), self.column
        with counting(body, 0, frame.members.get()) as i:
            frame.column.set(arithmetic(body, "add", frame.group.get(), i))
            size = body.emit("load i64, ptr @column")
            self.column = body.address(first, arithmetic(body, "mul", i, size))
            yield
        self.column = first

    def verified(self, body: Body) -> str:
        """An `i1`: whether the record is that of the lanes of this block."""
        assert self.arrays.record is not None
        frame, (first, valid) = Frame(body, self.head), self.recorded_lanes(body)
        marks = self.buffer(body, self.arrays.record[0])

        def read(lane: str, i: int) -> str:
            own = body.address(marks, arithmetic(body, "mul", lane, MARKS * INT.itemsize))
            return body.emit(f"load i32, ptr {body.address(own, i * INT.itemsize)}")

        steps, code = read(first, 0), read(first, 3)
        frame.steps.set(body.emit(f"zext i32 {steps} to i64"))
        lanes = "1" if self.layout.replicated else body.emit(f"trunc i64 {frame.lanes.get()} to i32")
        wrong = frame.piece
        wrong.set(0)
        with counting(body, 0, valid) as w:
            lane = arithmetic(body, "add", first, w)
            expected = (steps, body.emit(f"trunc i64 {lane} to i32"), lanes, code)
            for i, value in enumerate(expected):
                different = body.emit(f"icmp ne i32 {read(lane, i)}, {value}")
                wrong.set(arithmetic(body, "or", wrong.get(), body.emit(f"zext i1 {different} to i64")))
        return compare(body, "eq", wrong.get(), 0)

    def resume(self, body: Body, checkpoint: str) -> None:
        """Put the state that a checkpoint holds into the frame."""
        if not self.layout.replicated:
            self.copy(body, "%frame", checkpoint, self.layout.state_bytes)
            return
        for slot, offset in self.layout.kept_state():
            for e in range(slot.elements):
                value = body.load_one(checkpoint, offset + e * slot.dtype.itemsize, slot.dtype)
                body.store(value, "%frame", slot.offset + e * slot.dtype.itemsize * self.target.width)

    def run_to_end(self, body: Body) -> None:
        """From the initial state to the end, without keeping anything but the number of steps."""
        frame = Frame(body, self.head)
        self.call_step(body, "start", "null")
        frame.steps.set(0)
        with during(body, lambda: self.more_steps(body, frame.steps)):
            self.call_step(body, "forward_step", body.address("%frame", self.local_row))
            frame.steps.set(arithmetic(body, "add", frame.steps.get(), 1))


class Cotangent(Sweep):
    """Results: cotangents of the perturbed loop variables, then of the perturbed operands.

    Those of an operand that no lane has for itself are summed over the lanes of a task.
    """

    @property
    def saved_results(self) -> dict[tuple[int, int], Array]:
        return {}

    @property
    def summed(self) -> dict[int, Array]:
        """Results that are sums over lanes, by operand."""
        results = self.arrays.results[len(self.call.carry) :]
        return {i: a for i, a in zip(self.call.operands, results, strict=True) if not a.lanes}

    def write_steps(self) -> None:
        self.again = self.layout.reserve(AGAIN * self.layout.row_bytes)
        self._write_back()
        self._write_segment()

    def enter_linear(self, body: Body) -> None:
        """The cotangents at the end, and no cotangents of operands yet."""
        for i, array in zip(self.call.reached, self.arrays.linear, strict=True):
            self.enter(body, array, ("ct", i))
        for i in self.call.operands:
            slot = self.layout.slot(("sum", i))
            self.module.declare("void @llvm.memset.p0.i64(ptr, i8, i64, i1)")
            size = slot.elements * slot.dtype.itemsize * self.target.width
            place = self.place(body, ("sum", i))
            body.line(f"call void @llvm.memset.p0.i64(ptr {place}, i8 0, i64 {size}, i1 false)")

    def leave_linear(self, body: Body) -> None:
        column = Frame(body, self.head).column.get()
        results = iter(self.arrays.results)
        for i in self.call.carry:
            self.leave(body, ("ct", i), next(results))
        for i, array in zip(self.call.operands, results, strict=True):
            if array.lanes:
                self.leave(body, ("sum", i), array)
                continue
            row = arithmetic(body, "add", arithmetic(body, "mul", column, "%tasks"), "%task")
            size = array.dtype.itemsize
            target = body.address(self.buffer(body, array.buffer), arithmetic(body, "mul", row, array.elements * size))
            valid = Frame(body, self.head).valid.get()
            self.movers.total(body, size, self.place(body, ("sum", i)), target, array.elements, valid)

    def _write_back(self) -> None:
        """`@back_step`: back through the step of a row."""
        pieces, solve = self.pieces, self.call.solve
        back = pieces.back(self.apart)
        self.write(back)
        body = self.body("back_step")
        with when(body, self.moved_row(body)):
            if back.late:
                self.run(body, back.name, part=0)
            if pieces.samples:
                self.write(pieces.clear())
                with self.each_column(body):
                    self.run(body, "clear")
            for o, output in enumerate(solve.outputs):
                if output.sample is not None:
                    self._back_samples(body, o)
                if output.every:
                    emit = pieces.emit(o, replayed=output.sample is None)
                    self.write(emit)
                    self.run(body, emit.name)
                    with self.each_column(body):
                        self._gather(body, o)
            with self.each_column(body):
                self.run(body, back.name, part=1 if back.late else None)
        self.end(body)

    def _back_samples(self, body: Body, o: int) -> None:
        """Walk through the requested times in the step; with many columns each stays there until all have been."""
        pieces = self.pieces
        sample = pieces.sample_back(o, self.apart)
        self.write(pieces.due(o, replayed=True), pieces.here(o), sample)
        self.run(body, f"redue.{o}")
        with during(body, lambda: self.any(body, ("more", o))):
            self.run(body, f"here.{o}")
            if sample.late:
                self.run(body, sample.name, part=0)
            with self.each_column(body):
                self._gather(body, o)
                self.run(body, sample.name, part=1 if sample.late else None)
            if self.apart:
                self.write(pieces.passed(o))
                self.run(body, f"pass.{o}")

    def _gather(self, body: Body, o: int) -> None:
        """The cotangents of the values of an output at each lane's slot."""
        for j, array in zip(self.pieces.leaves(o), self.arrays.saved[o], strict=True):
            place: Place = ("ct value", o, j)
            if place not in self.layout.slots:
                continue  # nothing reads it
            shape = (self.call.solve.outputs[o].slots, array.elements // max(1, self.call.solve.outputs[o].slots))
            at = (self.place(body, ("at", o)), body.address(self.column, self.rows_of(array).offset))
            source = self.buffer(body, array.buffer)
            self.movers.gather(body, array.dtype.itemsize, source, self.place(body, place), shape, at)

    def _write_segment(self) -> None:
        """`@segment`: back through `%count` steps from the state at `%source`, or the initial one if that is null."""
        body = self.body("segment", ", ptr %source, i64 %count")
        size = self.layout.row_bytes
        local, again = body.address("%frame", self.local_row), body.address("%frame", self.again)
        pieces = arithmetic(body, "udiv", arithmetic(body, "add", "%count", AGAIN - 1), AGAIN)
        with counting(body, 0, pieces) as done:
            piece = arithmetic(body, "sub", arithmetic(body, "sub", pieces, 1), done)
            self._restore(body)
            before = arithmetic(body, "mul", piece, AGAIN)
            with counting(body, 0, before):
                self.call_step(body, "forward_step", local)
            count = smaller(body, arithmetic(body, "sub", "%count", before), AGAIN)
            with counting(body, 0, count) as i:
                self.call_step(body, "forward_step", body.address(again, arithmetic(body, "mul", i, size)))
            self._back_rows(body, again, count)
        self.end(body)

    def _restore(self, body: Body) -> None:
        initial, kept, end = (body.fresh_label(stem) for stem in ("initial", "kept", "restored"))
        body.branch_if(body.emit("icmp eq ptr %source, null"), initial, kept)
        body.label(initial)
        self.call_step(body, "start", "null")
        body.branch(end)
        body.label(kept)
        self.resume(body, "%source")
        body.branch(end)
        body.label(end)

    def _back_rows(self, body: Body, rows: str, count: str) -> None:
        with counting(body, 0, count) as done:
            i = arithmetic(body, "sub", arithmetic(body, "sub", count, 1), done)
            row = body.address(rows, arithmetic(body, "mul", i, self.layout.row_bytes))
            self.call_step(body, "back_step", row)

    def sweep(self, body: Body) -> None:
        """Back through all steps of the block."""
        right, wrong, end = (body.fresh_label(stem) for stem in ("right", "wrong", "swept"))
        body.branch_if(self.verified(body), right, wrong)
        body.label(wrong)
        self.run_to_end(body)
        self._call_segment(body, "null", Frame(body, self.head).steps.get())
        body.branch(end)
        body.label(right)
        self._recorded(body)
        body.branch(end)
        body.label(end)

    def _call_segment(self, body: Body, source: str, count: str) -> None:
        body.line(f"call void @segment(ptr %frame, ptr null, ptr %buffers, ptr {source}, i64 {count})")

    def _recorded(self, body: Body) -> None:
        """Back through the checkpoints, then through the rows."""
        frame = Frame(body, self.head)
        rows, count, checkpoints, most = self.region(body)
        steps = frame.steps.get()
        with when(body, compare(body, "sgt", steps, count)):
            self._checkpoints(body, checkpoints, most, steps, count)
        self._back_rows(body, rows, smaller(body, steps, count))

    def _checkpoints(self, body: Body, checkpoints: str, most: str, steps: str, count: str) -> None:
        frame = Frame(body, self.head)
        last = arithmetic(body, "sub", arithmetic(body, "sub", steps, 1), count)
        index = lambda: arithmetic(body, "udiv", last, frame.distance.get())  # noqa: E731
        frame.distance.set(AGAIN)
        with during(body, lambda: compare(body, "sge", index(), most)):
            frame.distance.set(arithmetic(body, "mul", frame.distance.get(), 2))
        number: Number = frame.count
        number.set(index())
        with during(body, lambda: compare(body, "sge", number.get(), 0)):
            n, distance = number.get(), frame.distance.get()
            start = arithmetic(body, "add", count, arithmetic(body, "mul", n, distance))
            length = smaller(body, arithmetic(body, "sub", steps, start), distance)
            source = body.address(checkpoints, arithmetic(body, "mul", n, self.layout.state_bytes))
            self._call_segment(body, source, length)
            number.set(arithmetic(body, "sub", n, 1))
