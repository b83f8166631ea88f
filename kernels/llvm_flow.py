"""Loops and conditions around straight-line code, and numbers kept in memory while they run."""

import contextlib
from collections.abc import Callable, Iterator

from gradsolve_backend.kernels.llvm_ir import Body


@contextlib.contextmanager
def counting(body: Body, start: int | str, stop: int | str) -> Iterator[str]:
    """`for i in range(start, stop)`; the code inside may have blocks of its own."""
    head, inside, end = (body.fresh_label(stem) for stem in ("count", "inside", "end"))
    before = body.block
    body.branch(head)
    body.label(head)
    i = body.phi("i64", str(start), before)
    body.branch_if(body.emit(f"icmp slt i64 {i}, {stop}"), inside, end)
    body.label(inside)
    yield i
    after = body.emit(f"add i64 {i}, 1")
    body.incoming(i, after, body.block)
    body.branch(head)
    body.label(end)


@contextlib.contextmanager
def during(body: Body, condition: Callable[[], str]) -> Iterator[None]:
    """`while condition():`; the condition gives an `i1`."""
    head, inside, end = (body.fresh_label(stem) for stem in ("while", "inside", "end"))
    body.branch(head)
    body.label(head)
    body.branch_if(condition(), inside, end)
    body.label(inside)
    yield
    body.branch(head)
    body.label(end)


@contextlib.contextmanager
def when(body: Body, condition: str) -> Iterator[None]:
    """`if condition:`."""
    inside, end = body.fresh_label("then"), body.fresh_label("end")
    body.branch_if(condition, inside, end)
    body.label(inside)
    yield
    body.branch(end)
    body.label(end)


class Number:
    """An `i64` in memory."""

    def __init__(self, body: Body, pointer: str, offset: int) -> None:
        self.body, self.pointer, self.offset = body, pointer, offset

    def get(self) -> str:
        """Its value now."""
        return self.body.emit(f"load i64, ptr {self.body.address(self.pointer, self.offset)}")

    def set(self, value: int | str) -> None:
        """Give it another value."""
        self.body.line(f"store i64 {value}, ptr {self.body.address(self.pointer, self.offset)}")


def arithmetic(body: Body, operation: str, a: int | str, b: int | str) -> str:
    """An `i64` operation: `add`, `sub`, `mul`, `udiv`, `urem`, `shl`."""
    return body.emit(f"{operation} i64 {a}, {b}")


def compare(body: Body, predicate: str, a: int | str, b: int | str) -> str:
    """An `i64` comparison: `eq`, `ne`, `slt`, `sle`, `sgt`, `sge`, `ult`."""
    return body.emit(f"icmp {predicate} i64 {a}, {b}")


def smaller(body: Body, a: int | str, b: int | str) -> str:
    """The smaller of two `i64`."""
    return body.emit(f"select i1 {compare(body, 'slt', a, b)}, i64 {a}, i64 {b}")


def larger(body: Body, a: int | str, b: int | str) -> str:
    """The larger of two `i64`."""
    return body.emit(f"select i1 {compare(body, 'sgt', a, b)}, i64 {a}, i64 {b}")
