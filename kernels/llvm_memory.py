"""Helpers that move values between arrays, whose rows are lanes, and slots, whose vectors are lanes.

Each is one small function per element size, written once in a module. None reads or writes a row of a lane that is
padding, nor a saved value beyond its buffer.
"""

from collections.abc import Callable

import numpy as np

from gradsolve_backend.kernels.llvm_flow import arithmetic, counting
from gradsolve_backend.kernels.llvm_ir import Body, Module, Target

INT, LONG = np.dtype(np.int32), np.dtype(np.int64)


class Movers:
    """Writes and calls the helpers of one module."""

    def __init__(self, module: Module, target: Target) -> None:
        self.module, self.target = module, target

    def _call(self, body: Body, name: str, arguments: list[tuple[str, str]], write: Callable[[Body], None]) -> None:
        def define() -> None:
            formal = ", ".join(f"{kind} %{n}" for n, (kind, _) in enumerate(arguments))
            inner = Body(self.module, self.target, f"internal void @{name}({formal})")
            write(inner)
            inner.line("ret void")
            inner.close()

        self.module.once(name, define)
        body.line(f"call void @{name}({', '.join(f'{kind} {value}' for kind, value in arguments)})")

    def _element(self, body: Body, size: int, base: str, index: str) -> str:
        return body.emit(f"getelementptr i{8 * size}, ptr {base}, i64 {index}")

    def _vector(self, body: Body, size: int, base: str, element: str, lane: str) -> str:
        index = arithmetic(body, "add", arithmetic(body, "mul", element, self.target.width), lane)
        return self._element(body, size, base, index)

    # ---- all lanes at once: places in a buffer of rows, slots and elements

    def _vector_of(self, size: int) -> str:
        return f"<{self.target.width} x i{8 * size}>"

    def _places(self, b: Body, base: str, at: str, rows: str, shape: tuple[int, str, str]) -> tuple[str, str]:
        """For each lane the first element at its slot, which the place `at` holds, and whether there is such a slot."""
        size, slots, elements = shape
        long = b.vector("i64")
        slot = b.emit(f"zext {b.vector('i32')} {b.load(at, 0, INT).name} to {long}")
        inside = b.emit(f"icmp ult {long} {slot}, {b.broadcast(slots, LONG).name}")
        first = b.emit(f"mul {long} {rows}, {b.broadcast(slots, LONG).name}")
        number = b.emit(f"add {long} {first}, {slot}")
        return self._rows(b, size, base, number, elements), inside

    def _next(self, b: Body, size: int, places: str, e: str) -> str:
        return b.emit(f"getelementptr i{8 * size}, {b.vector('ptr')} {places}, i64 {e}")

    def _masked(self, b: Body, name: str, size: int) -> str:
        return f"llvm.masked.{name}.v{self.target.width}i{8 * size}.v{self.target.width}p0"

    def lanes_below(self, b: Body, count: str) -> tuple[str, str]:
        """The numbers of the lanes, and which are below a count."""
        long, lane = b.vector("i64"), f"<{', '.join(f'i64 {w}' for w in range(self.target.width))}>"
        return lane, b.emit(f"icmp slt {long} {lane}, {b.broadcast(count, LONG).name}")

    def _own_rows(self, b: Body, first: str, count: str) -> tuple[str, str]:
        """The row of each lane, counted from the first one's, and which lanes are no padding."""
        lane, valid = self.lanes_below(b, count)
        return b.emit(f"add {b.vector('i64')} {lane}, {b.broadcast(first, LONG).name}"), valid

    def _rows(self, b: Body, size: int, base: str, rows: str, elements: str) -> str:
        long = b.vector("i64")
        offset = b.emit(f"mul {long} {rows}, {b.broadcast(elements, LONG).name}")
        return b.emit(f"getelementptr i{8 * size}, ptr {base}, {long} {offset}")

    def _read(self, b: Body, size: int, target: str, places: str, mask: str) -> None:
        kind = self._vector_of(size)
        given = [(b.vector("ptr"), places), ("i32", str(size)), (b.vector("i1"), mask), (kind, "zeroinitializer")]
        value = b.call(kind, self._masked(b, "gather", size), given)
        b.line(f"store {kind} {value}, ptr {target}, align {size}")

    def _write(self, b: Body, size: int, source: str, places: str, mask: str) -> None:
        kind, name = self._vector_of(size), self._masked(b, "scatter", size)
        self.module.declare(f"void @{name}({kind}, {b.vector('ptr')}, i32, {b.vector('i1')})")
        value = b.emit(f"load {kind}, ptr {source}, align {size}")
        b.line(f"call void @{name}({kind} {value}, {b.vector('ptr')} {places}, i32 {size}, {b.vector('i1')} {mask})")

    def enter(self, body: Body, size: int, array: str, rows: str, elements: int, slot: str) -> None:
        """Read each lane's row, the one whose number is in the slot `rows`."""

        def write(b: Body) -> None:
            places = self._rows(b, size, "%0", b.load("%1", 0, LONG).name, "%2")
            with counting(b, 0, "%2") as e:
                target = self._vector(b, size, "%3", e, "0")
                self._read(b, size, target, self._next(b, size, places, e), "splat (i1 true)")

        self._call(body, f"enter{size}", [("ptr", array), ("ptr", rows), ("i64", str(elements)), ("ptr", slot)], write)

    def share(self, body: Body, size: int, array: str, elements: int, slot: str) -> None:
        """Read the one row of an array for all lanes."""
        integer = np.dtype(f"i{size}")

        def write(b: Body) -> None:
            with counting(b, 0, "%1") as e:
                value = b.emit(f"load i{8 * size}, ptr {self._element(b, size, '%0', e)}")
                b.store(b.broadcast(value, integer), self._vector(b, size, "%2", e, "0"), 0)

        self._call(body, f"share{size}", [("ptr", array), ("i64", str(elements)), ("ptr", slot)], write)

    def leave(self, body: Body, size: int, slot: str, array: str, elements: int, first: str, valid: str) -> None:
        """Write the rows of the lanes that are no padding, from row number `first` on."""

        def write(b: Body) -> None:
            rows, mask = self._own_rows(b, "%3", "%4")
            places = self._rows(b, size, "%1", rows, "%2")
            with counting(b, 0, "%2") as e:
                self._write(b, size, self._vector(b, size, "%0", e, "0"), self._next(b, size, places, e), mask)

        arguments = [("ptr", slot), ("ptr", array), ("i64", str(elements)), ("i64", first), ("i64", valid)]
        self._call(body, f"leave{size}", arguments, write)

    def scatter(
        self, body: Body, size: int, slot: str, array: str, shape: tuple[int, int], at: tuple[str, ...]
    ) -> None:
        """Write each lane's value into its own slot of a buffer; `at`: slots, first row, number of rows."""

        def write(b: Body) -> None:
            rows, valid = self._own_rows(b, "%5", "%6")
            places, inside = self._places(b, "%1", "%4", rows, (size, "%2", "%3"))
            mask = b.emit(f"and {b.vector('i1')} {valid}, {inside}")
            with counting(b, 0, "%3") as e:
                self._write(b, size, self._vector(b, size, "%0", e, "0"), self._next(b, size, places, e), mask)

        slots, elements = shape
        arguments = [("ptr", slot), ("ptr", array), ("i64", str(slots)), ("i64", str(elements))]
        arguments += [("ptr", at[0]), ("i64", at[1]), ("i64", at[2])]
        self._call(body, f"scatter{size}", arguments, write)

    def gather(self, body: Body, size: int, array: str, slot: str, shape: tuple[int, int], at: tuple[str, ...]) -> None:
        """Read each lane's value at its own slot of a buffer, zero beyond the end; `at`: slots, numbers of the rows."""

        def write(b: Body) -> None:
            places, inside = self._places(b, "%0", "%4", b.load("%5", 0, LONG).name, (size, "%2", "%3"))
            with counting(b, 0, "%3") as e:
                target = self._vector(b, size, "%1", e, "0")
                self._read(b, size, target, self._next(b, size, places, e), inside)

        slots, elements = shape
        arguments = [("ptr", array), ("ptr", slot), ("i64", str(slots)), ("i64", str(elements))]
        arguments += [("ptr", at[0]), ("ptr", at[1])]
        self._call(body, f"gather{size}", arguments, write)

    def clear(self, body: Body, size: int, array: str, shape: tuple[int, int], at: tuple[str, ...]) -> None:
        """Zero what was never written in a buffer; `at`: first slots to clear, first row, number of rows."""

        def write(b: Body) -> None:
            with counting(b, 0, "%5") as lane:
                row = arithmetic(b, "mul", arithmetic(b, "add", "%4", lane), "%1")
                slot = b.emit(f"load i32, ptr {self._element(b, INT.itemsize, '%3', lane)}")
                start = arithmetic(b, "mul", arithmetic(b, "add", row, b.emit(f"zext i32 {slot} to i64")), "%2")
                end = arithmetic(b, "mul", arithmetic(b, "add", row, "%1"), "%2")
                with counting(b, start, end) as e:
                    b.line(f"store i{8 * size} 0, ptr {self._element(b, size, '%0', e)}")

        slots, elements = shape
        arguments = [("ptr", array), ("i64", str(slots)), ("i64", str(elements))]
        arguments += [("ptr", at[0]), ("i64", at[1]), ("i64", at[2])]
        self._call(body, f"clear{size}", arguments, write)

    def total(self, body: Body, size: int, slot: str, array: str, elements: int, valid: str) -> None:
        """Add the values of the lanes that are no padding, in their order, to a row of an array of floats."""
        kind = {4: "float", 8: "double"}[size]

        def write(b: Body) -> None:
            with counting(b, 0, "%2") as e, counting(b, 0, "%3") as lane:
                target = self._element(b, size, "%1", e)
                old = b.emit(f"load {kind}, ptr {target}")
                new = b.emit(f"load {kind}, ptr {self._vector(b, size, '%0', e, lane)}")
                b.line(f"store {kind} {b.emit(f'fadd {kind} {old}, {new}')}, ptr {target}")

        arguments = [("ptr", slot), ("ptr", array), ("i64", str(elements)), ("i64", valid)]
        self._call(body, f"total{size}", arguments, write)
