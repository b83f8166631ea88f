"""The forward loop of the `llvm` backend, with or without a record."""

import functools
import sys

from gradsolve_backend.kernels.llvm_arrays import Array
from gradsolve_backend.kernels.llvm_flow import Number, arithmetic, compare, counting, during, larger, smaller, when
from gradsolve_backend.kernels.llvm_ir import Body
from gradsolve_backend.kernels.llvm_loops import AGAIN, INT, MARKS, Frame, Kernel, record_bytes

HUGE_PAGES = sys.platform == "linux"
_PAGE, _ADVICE = 2 << 20, 14  # bytes of a huge page; MADV_HUGEPAGE


class Forward(Kernel):
    """Results: loop variables, cursors, outputs; then the record's marks and rows, if there is one."""

    @functools.cached_property
    def saved_results(self) -> dict[tuple[int, int], Array]:
        """Results that are buffers of saved values, by output and leaf."""
        keys = [(o, j) for o, output in enumerate(self.call.solve.outputs) for j in range(len(output.leaves))]
        return dict(zip(keys, self.arrays.results[self._ended :], strict=True))

    @property
    def _ended(self) -> int:
        return self.call.solve.size + 2 * len(self.call.solve.outputs)

    def make(self) -> str:
        """The text of the kernel."""
        for array in (*self.arrays.carry, *self.arrays.operands):
            self.rows_of(array)
        self.write_start()
        self.write_step(values=True)
        body = self.block()
        frame = Frame(body, self.head)
        self.locate(body)
        self.write_rows(body)
        self.enter_operands(body)
        self.call_step(body, "start", "null")
        frame.steps.set(0)
        self._steps(body, frame.steps)
        places = [*(("carry", i) for i in range(self.call.solve.size)), *self.pieces.cursors]
        for place, array in zip(places, self.arrays.results, strict=False):
            self.leave(body, place, array)
        self.clear_tails(body, {o: ("cursor", o, 1) for o in range(len(self.call.solve.outputs))})
        if self.arrays.record is not None:
            self._mark(body, frame)
        self.end(body)
        return self.write_kernel()

    def prepare(self, body: Body, first: str, last: str) -> None:
        """Ask for huge pages where a task's part of a record has some, since those cost much less to touch first."""
        if self.arrays.record is None or not HUGE_PAGES:
            return
        rows = body.emit(f"ptrtoint ptr {self.buffer(body, self.arrays.record[1])} to i64")
        size, _ = record_bytes(self.pieces)
        address = lambda lane: arithmetic(body, "add", rows, arithmetic(body, "mul", lane, size))  # noqa: E731
        page = lambda x, more: arithmetic(body, "and", arithmetic(body, "add", x, more), -_PAGE)  # noqa: E731
        lane = lambda block: arithmetic(body, "mul", block, self.target.width)  # noqa: E731
        whole = page(rows, _PAGE - 1), page(address(Frame(body, self.head).lanes.get()), 0)
        begin = larger(body, page(address(lane(first)), 0), whole[0])
        end = smaller(body, page(address(lane(last)), _PAGE - 1), whole[1])
        length = arithmetic(body, "sub", end, begin)
        with when(body, compare(body, "sgt", length, 0)):
            self.module.declare("i32 @madvise(ptr, i64, i32)")
            start = body.emit(f"inttoptr i64 {begin} to ptr")
            body.emit(f"call i32 @madvise(ptr {start}, i64 {length}, i32 {_ADVICE})")

    def _steps(self, body: Body, steps: Number) -> None:
        local = body.address("%frame", self.local_row)
        if self.arrays.record is None:
            with during(body, lambda: self.more_steps(body, steps)):
                self.call_step(body, "forward_step", local)
                steps.set(arithmetic(body, "add", steps.get(), 1))
            return
        rows, count, checkpoints, most = self.region(body)
        frame = Frame(body, self.head)
        frame.next.set(count)
        frame.count.set(0)
        frame.distance.set(AGAIN)
        with during(body, lambda: self.more_steps(body, steps)):
            n = steps.get()
            inside = compare(body, "slt", n, count)
            own = body.address(rows, arithmetic(body, "mul", n, self.layout.row_bytes))
            row = body.emit(f"select i1 {inside}, ptr {own}, ptr {local}")
            with when(body, compare(body, "eq", n, frame.next.get())):
                self._checkpoint(body, checkpoints, most)
            self.call_step(body, "forward_step", row)
            steps.set(arithmetic(body, "add", n, 1))

    def _checkpoint(self, body: Body, checkpoints: str, most: str) -> None:
        """Keep the state; when there is no room, let go of every second one first, and double the distance."""
        frame, size = Frame(body, self.head), self.layout.state_bytes
        at = lambda i: body.address(checkpoints, arithmetic(body, "mul", i, size))  # noqa: E731
        with when(body, compare(body, "eq", frame.count.get(), most)):
            half = arithmetic(body, "udiv", most, 2)
            with counting(body, 1, half) as i:
                self.copy(body, at(i), at(arithmetic(body, "mul", i, 2)), size)
            frame.count.set(half)
            frame.distance.set(arithmetic(body, "mul", frame.distance.get(), 2))
        count = frame.count.get()
        self.copy(body, at(count), "%frame", size)
        frame.count.set(arithmetic(body, "add", count, 1))
        frame.next.set(arithmetic(body, "add", frame.next.get(), frame.distance.get()))

    def _mark(self, body: Body, frame: Frame) -> None:
        """What identifies the record of the block, for each of its lanes."""
        assert self.arrays.record is not None
        marks, first = self.buffer(body, self.arrays.record[0]), frame.first.get()
        values = [frame.steps.get(), "", frame.lanes.get(), self._hash(body)]
        with counting(body, 0, frame.valid.get()) as w:
            values[1] = lane = arithmetic(body, "add", first, w)
            target = body.address(marks, arithmetic(body, "mul", lane, MARKS * INT.itemsize))
            for i, value in enumerate(values):
                number = body.emit(f"trunc i64 {value} to i32")
                body.line(f"store i32 {number}, ptr {body.address(target, i * INT.itemsize)}")

    def _hash(self, body: Body) -> str:
        """A number made of the final state of all lanes of the block, and of how many were made before it."""
        slots = [self.layout.slot(place) for place in self.pieces.state]
        end = max(s.offset + s.elements * s.dtype.itemsize * self.target.width for s in slots)
        total = Frame(body, self.head).piece
        self.module.once("stamp", lambda: self.module.add("@stamp = internal global i64 0"))
        total.set(arithmetic(body, "add", body.emit("atomicrmw add ptr @stamp, i64 1 monotonic"), end))
        with counting(body, 0, end // 8) as i:
            word = body.emit(f"load i64, ptr {body.emit(f'getelementptr i64, ptr %frame, i64 {i}')}")
            mixed = arithmetic(body, "mul", body.emit(f"xor i64 {total.get()}, {word}"), 0x9E3779B97F4A7C15 - (1 << 64))
            total.set(body.emit(f"xor i64 {mixed}, {arithmetic(body, 'lshr', mixed, 29)}"))
        return arithmetic(body, "lshr", total.get(), 32)
