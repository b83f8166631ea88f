"""Vectors of doubles to calculate with, while LLVM IR is written."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradsolve_backend.kernels.llvm_ir import Body

__all__ = ["DOUBLE", "Bits", "Double", "Mask", "estrin"]

DOUBLE, INTEGER = np.dtype(np.float64), np.dtype(np.int64)


@dataclass(frozen=True, slots=True)
class Double:
    """A double vector to calculate with; ordinary numbers stand for constants."""

    body: Body
    name: str

    def _with(self, operation: str, left: "Double | float", right: "Double | float") -> "Double":
        kind = self.body.type(DOUBLE)
        return Double(self.body, self.body.emit(f"{operation} {kind} {self._operand(left)}, {self._operand(right)}"))

    def _operand(self, x: "Double | float") -> str:
        return x.name if isinstance(x, Double) else self.body.splat(x, DOUBLE).name

    def __add__(self, other: "Double | float") -> "Double":
        return self._with("fadd", self, other)

    def __sub__(self, other: "Double | float") -> "Double":
        return self._with("fsub", self, other)

    def __rsub__(self, other: float) -> "Double":
        return self._with("fsub", other, self)

    def __mul__(self, other: "Double | float") -> "Double":
        return self._with("fmul", self, other)

    def __truediv__(self, other: "Double | float") -> "Double":
        return self._with("fdiv", self, other)

    def __rtruediv__(self, other: float) -> "Double":
        return self._with("fdiv", other, self)

    def __neg__(self) -> "Double":
        return Double(self.body, self.body.emit(f"fneg {self.body.type(DOUBLE)} {self.name}"))

    def compare(self, predicate: str, other: "Double | float") -> "Mask":
        """Compare, by a predicate of `fcmp`."""
        return Mask(self.body, self._with(f"fcmp {predicate}", self, other).name)

    def call(self, intrinsic: str, *others: "Double | float") -> "Double":
        """An intrinsic of this and other vectors."""
        kind = self.body.type(DOUBLE)
        operands = [(kind, self._operand(x)) for x in (self, *others)]
        return Double(self.body, self.body.call(kind, f"llvm.{intrinsic}.v{self.body.target.width}f64", operands))

    def bits(self) -> "Bits":
        """The same bits as an integer."""
        kinds = self.body.type(DOUBLE), self.body.type(INTEGER)
        return Bits(self.body, self.body.emit(f"bitcast {kinds[0]} {self.name} to {kinds[1]}"))


@dataclass(frozen=True, slots=True)
class Bits:
    """A vector of 64-bit integers to calculate with."""

    body: Body
    name: str

    def _with(self, operation: str, other: "Bits | int") -> "Bits":
        name = other.name if isinstance(other, Bits) else self.body.splat(other, INTEGER).name
        return Bits(self.body, self.body.emit(f"{operation} {self.body.type(INTEGER)} {self.name}, {name}"))

    def __add__(self, other: "Bits | int") -> "Bits":
        return self._with("add", other)

    def __sub__(self, other: "Bits | int") -> "Bits":
        return self._with("sub", other)

    def __lshift__(self, count: int) -> "Bits":
        return self._with("shl", count)

    def __rshift__(self, count: int) -> "Bits":
        """With the sign kept."""
        return self._with("ashr", count)

    def double(self) -> Double:
        """The same bits as a double."""
        kinds = self.body.type(INTEGER), self.body.type(DOUBLE)
        return Double(self.body, self.body.emit(f"bitcast {kinds[0]} {self.name} to {kinds[1]}"))


@dataclass(frozen=True, slots=True)
class Mask:
    """A bool vector."""

    body: Body
    name: str

    def pick(self, yes: Double | float, no: Double | float) -> Double:
        """`yes` where the mask holds, else `no`."""
        kind = self.body.type(DOUBLE)
        names = [x.name if isinstance(x, Double) else self.body.splat(x, DOUBLE).name for x in (yes, no)]
        mask = f"{self.body.vector('i1')} {self.name}"
        return Double(self.body, self.body.emit(f"select {mask}, {kind} {names[0]}, {kind} {names[1]}"))


def estrin(x: Double, coefficients: Sequence[float]) -> Double:
    """A polynomial in pairs, and pairs of pairs, by fused multiply-adds; the constant term comes first.

    Short for a processor that works on several at once.
    """
    terms: list[Double | float] = list(coefficients)
    while len(terms) > 1:
        pairs = [terms[i : i + 2] for i in range(0, len(terms), 2)]
        terms = [x.call("fma", p[1], p[0]) if len(p) == 2 else p[0] for p in pairs]
        x = x * x
    assert isinstance(terms[0], Double)
    return terms[0]
