"""LLVM IR as text: vectors with one element per lane, the functions made of them, and the module around those.

A value of a scalar program is one SIMD vector `<width x T>`; bools are `<width x i1>` in registers, and bytes, 0 or 1,
in memory. Text is written rather than built through objects, because emission must keep up with large programs.
"""

import copy
import ctypes
import dataclasses
import functools
import platform
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["BOOL", "Body", "Module", "Table", "Target", "Value", "has_type", "host_features", "scalar_type"]

_TYPES = {np.dtype(bool): "i1", np.dtype(np.float32): "float", np.dtype(np.float64): "double"}
_TYPES |= {np.dtype(f"{sign}{size}"): f"i{8 * size}" for sign in "iu" for size in (1, 2, 4, 8)}

BOOL, BYTE = np.dtype(bool), np.dtype(np.uint8)


def scalar_type(dtype: np.dtype) -> str:
    """The LLVM type of one element in a register. Raises `KeyError` for a dtype that has none."""
    return _TYPES[dtype]


def has_type(dtype: Any) -> bool:
    """Whether values of a dtype have an LLVM type."""
    return dtype in _TYPES


@dataclass(frozen=True, slots=True)
class Value:
    """A vector with one element per lane: the SSA name or the constant, and the dtype of an element."""

    name: str
    dtype: np.dtype


@dataclass(frozen=True, slots=True)
class Table:
    """A rank-1 array of each lane in memory: `pointers` is the SSA name of a `<width x ptr>`, the base per lane."""

    pointers: str
    length: int
    dtype: np.dtype


@dataclass(frozen=True, slots=True)
class Target:
    """What the code is written for.

    - `width`: lanes per vector; a vector may be wider than a register, then LLVM splits it.
    - `fma`: the machine has fused multiply-add instructions.
    - `vector_math`: libmvec, glibc's vector functions, may be called.
    - `native_bits`: size of a vector register.
    """

    width: int
    fma: bool
    vector_math: bool
    native_bits: int


@functools.cache
def host_features() -> tuple[bool, int, bool]:
    """The fields `fma`, `native_bits` and `vector_math` of targets on this machine."""
    import llvmlite.binding

    machine = platform.machine().lower()
    if machine in ("aarch64", "arm64"):
        return True, 128, _has_libmvec()
    features = llvmlite.binding.get_host_cpu_features() if machine in ("x86_64", "amd64") else {}
    bits = 512 if features.get("avx512f") else 256 if features.get("avx2") else 128
    return bool(features.get("fma")), bits, bool(features) and _has_libmvec()


def _has_libmvec() -> bool:
    if sys.platform != "linux":
        return False
    try:
        ctypes.CDLL("libmvec.so.1")
    except OSError:
        return False
    return True


@dataclass(eq=False)
class Module:
    """Declarations and constants, each once, and functions."""

    _declarations: dict[str, None] = field(default_factory=dict)
    _constants: dict[str, str] = field(default_factory=dict)
    _functions: list[str] = field(default_factory=list)
    _written: set[str] = field(default_factory=set)

    def declare(self, signature: str) -> None:
        """A function defined elsewhere, such as `double @exp(double)`."""
        self._declarations[signature] = None

    def constant(self, array: np.ndarray) -> str:
        """The name of a private global that holds the elements of an array, row-major, bools as bytes."""
        flat = np.ascontiguousarray(array).reshape(-1)
        flat = flat.view(np.uint8) if flat.dtype == BOOL else flat
        kind = _TYPES[flat.dtype]
        elements = ", ".join(f"{kind} {_literal(x, flat.dtype)}" for x in flat)
        text = f"private unnamed_addr constant [{flat.size} x {kind}] [{elements}], align {flat.dtype.itemsize}"
        return self._constants.setdefault(text, f"@constant.{len(self._constants)}")

    def add(self, function: str) -> None:
        """A function's text."""
        self._functions.append(function)

    def once(self, name: str, write: Callable[[], None]) -> None:
        """Call `write`, which adds the function `name`, unless it was added before."""
        if name not in self._written:
            self._written.add(name)
            write()

    def text(self) -> str:
        """The whole module."""
        constants = [f"{name} = {text}" for text, name in self._constants.items()]
        declarations = [f"declare {signature}" for signature in self._declarations]
        return "\n".join([*constants, *declarations, *self._functions, ""])


def _memory_type(dtype: np.dtype) -> str:
    return "i8" if dtype == BOOL else _TYPES[dtype]


def _literal(value: Any, dtype: np.dtype) -> str:
    """A constant as LLVM reads it; floats as the bits of a double, so that every number is exact."""
    if dtype == BOOL:
        return "true" if value else "false"
    if dtype.kind != "f":
        return str(int(value))
    return f"0x{struct.unpack('<Q', struct.pack('<d', float(value)))[0]:016X}"


def constant_of(value: Value) -> float | None:
    """The number of a float vector that is the same constant in all lanes; None if it is none."""
    text = value.name.removeprefix("splat (").removesuffix(")").split()
    if value.dtype.kind != "f" or text[0] not in ("double", "float"):
        return None
    return struct.unpack("<d", struct.pack("<Q", int(text[1], 16)))[0]


class Body:
    """The text of one function while it is written.

    Straight-line code needs `emit`, `splat`, `load` and `store`; around it, `label`, `branch`, `branch_if`, `phi` and
    `incoming` make loops. Names of labels come without the percent sign, names of values with it.
    """

    def __init__(self, module: Module, target: Target, signature: str):
        """`signature` is what follows `define`, such as `void @kernel(ptr %buffers)`."""
        self.module = module
        self.target = target
        self._lines = [f"define {signature} {{", "entry:"]
        self._block = "entry"
        self._stem, self._count = "%v", 0
        self._phis: dict[str, int] = {}
        self._splats: dict[tuple[bytes, np.dtype], Value] = {}
        self.without_sign: set[str] = set()  # values that are no number below zero, nor -0

    # ---- lines

    @property
    def block(self) -> str:
        """The label of the block that is being written."""
        return self._block

    def fresh(self) -> str:
        """A name that no other value of this function has."""
        self._count += 1
        return f"{self._stem}{self._count}"

    def emit(self, rhs: str) -> str:
        """The name of the result of an instruction."""
        name = self.fresh()
        self._lines.append(f"  {name} = {rhs}")
        return name

    def single(self) -> "Body":
        """What writes straight-line code into the same function for one lane, of which `spread` makes all."""
        out = copy.copy(self)
        out.target = dataclasses.replace(self.target, width=1)
        out._stem, out._splats = "%u", {}
        return out

    def line(self, text: str) -> None:
        """An instruction without a result, or a line of the author's own."""
        self._lines.append(f"  {text}")

    def close(self) -> None:
        """End the function and add it to the module."""
        self._lines.append("}")
        self.module.add("\n".join(self._lines))

    # ---- blocks

    def fresh_label(self, stem: str) -> str:
        """A label that no other block of this function has."""
        self._count += 1
        return f"{stem}.{self._count}"

    def label(self, label: str) -> None:
        """Start a block; the block before must have ended in a branch or a return."""
        self._lines.append(f"{label}:")
        self._block = label

    def branch(self, label: str) -> None:
        """End the block."""
        self.line(f"br label %{label}")

    def branch_if(self, condition: str, then: str, otherwise: str) -> None:
        """End the block on an `i1`."""
        self.line(f"br i1 {condition}, label %{then}, label %{otherwise}")

    def phi(self, kind: str, value: str, block: str) -> str:
        """A value of LLVM type `kind` that is `value` when control comes from `block`; `incoming` adds the others."""
        name = self.emit(f"phi {kind} [ {value}, %{block} ]")
        self._phis[name] = len(self._lines) - 1
        return name

    def incoming(self, phi: str, value: str, block: str) -> None:
        """Let `phi` be `value` when control comes from `block`."""
        self._lines[self._phis[phi]] += f", [ {value}, %{block} ]"

    # ---- vectors

    def vector(self, kind: str) -> str:
        """The type of vectors of an LLVM type."""
        return f"<{self.target.width} x {kind}>"

    def type(self, dtype: np.dtype) -> str:
        """The type of a `Value`."""
        return f"<{self.target.width} x {_TYPES[dtype]}>"

    def splat(self, value: Any, dtype: np.dtype) -> Value:
        """The same number in all lanes."""
        number = np.asarray(value, dtype)
        key = (number.tobytes(), dtype)
        found = self._splats.get(key)
        if found is None:
            found = self._splats[key] = Value(f"splat ({_TYPES[dtype]} {_literal(number[()], dtype)})", dtype)
        return found

    def broadcast(self, scalar: str, dtype: np.dtype) -> Value:
        """A scalar register in all lanes."""
        kind = self.type(dtype)
        first = self.emit(f"insertelement {kind} poison, {_TYPES[dtype]} {scalar}, i64 0")
        zeros = f"{self.vector('i32')} zeroinitializer"
        return Value(self.emit(f"shufflevector {kind} {first}, {kind} poison, {zeros}"), dtype)

    def spread(self, value: Value) -> Value:
        """A value of the body of one lane, in all lanes."""
        if value.name.startswith("splat"):
            return value
        kind, name, zeros = f"<1 x {_memory_type(value.dtype)}>", value.name, f"{self.vector('i32')} zeroinitializer"
        if value.dtype == BOOL:  # of bytes LLVM makes much shorter code than of bits
            name = self.emit(f"zext <1 x i1> {name} to {kind}")
        return self._loaded(self.emit(f"shufflevector {kind} {name}, {kind} poison, {zeros}"), value.dtype)

    def cast(self, operation: str, value: Value, dtype: np.dtype) -> Value:
        """A conversion instruction."""
        return Value(self.emit(f"{operation} {self.type(value.dtype)} {value.name} to {self.type(dtype)}"), dtype)

    def any_lane(self, value: Value) -> str:
        """An `i1`: does a bool vector hold in some lane?"""
        kind = f"i{self.target.width}"
        bits = self.emit(f"bitcast {self.type(BOOL)} {value.name} to {kind}")
        return self.emit(f"icmp ne {kind} {bits}, 0")

    def call(self, result: str, function: str, arguments: Sequence[tuple[str, str]]) -> str:
        """The result of a function, which is declared; `arguments` are types and names."""
        self.module.declare(f"{result} @{function}({', '.join(kind for kind, _ in arguments)})")
        return self.emit(f"call {result} @{function}({', '.join(f'{kind} {name}' for kind, name in arguments)})")

    # ---- memory: a slot is `width` elements side by side

    def address(self, pointer: str, byte_offset: int | str) -> str:
        """A pointer moved by bytes: a number or an `i64` register."""
        return pointer if byte_offset == 0 else self.emit(f"getelementptr i8, ptr {pointer}, i64 {byte_offset}")

    def load(self, pointer: str, byte_offset: int | str, dtype: np.dtype) -> Value:
        """The slot at a byte offset, which is aligned to one element."""
        kind = self.vector(_memory_type(dtype))
        name = self.emit(f"load {kind}, ptr {self.address(pointer, byte_offset)}, align {dtype.itemsize}")
        return self._loaded(name, dtype)

    def store(self, value: Value, pointer: str, byte_offset: int | str, replaced: bool = False) -> None:
        """Write a slot at a byte offset, which is aligned to one element.

        `replaced`: the value may be a choice between the old one and another. The store is volatile then, or LLVM
        makes of both one masked store, from which a load that follows has to wait for the cache.
        """
        how = "store volatile" if replaced else "store"
        kind, name = self.vector(_memory_type(value.dtype)), value.name
        if value.dtype == BOOL:
            name = self.cast("zext", value, np.dtype(np.uint8)).name
        self.line(f"{how} {kind} {name}, ptr {self.address(pointer, byte_offset)}, align {value.dtype.itemsize}")

    def load_one(self, pointer: str, byte_offset: int, dtype: np.dtype) -> Value:
        """One element at a byte offset, in all lanes."""
        kind = _memory_type(dtype)
        one = self.emit(f"load {kind}, ptr {self.address(pointer, byte_offset)}, align {dtype.itemsize}")
        whole = self.broadcast(one, BYTE if dtype == BOOL else dtype)
        return self._loaded(whole.name, dtype)

    def store_one(self, value: Value, pointer: str, byte_offset: int) -> None:
        """Write the element of the first lane at a byte offset."""
        if value.dtype == BOOL:
            value = self.cast("zext", value, BYTE)
        one = self.emit(f"extractelement {self.type(value.dtype)} {value.name}, i64 0")
        place = self.address(pointer, byte_offset)
        self.line(f"store {_TYPES[value.dtype]} {one}, ptr {place}, align {value.dtype.itemsize}")

    def gather(self, table: Table, index: Value) -> Value:
        """The element of each lane's table at an `int64` index, which must lie in the table."""
        kind, pointers = _memory_type(table.dtype), self.vector("ptr")
        places = self.emit(f"getelementptr {kind}, {pointers} {table.pointers}, {self.vector('i64')} {index.name}")
        element = f"{'f' if table.dtype.kind == 'f' else 'i'}{8 * table.dtype.itemsize}"
        operands = [
            (pointers, places),
            ("i32", str(table.dtype.itemsize)),
            (self.vector("i1"), "splat (i1 true)"),
            (self.vector(kind), "poison"),
        ]
        name = f"llvm.masked.gather.v{self.target.width}{element}.v{self.target.width}p0"
        return self._loaded(self.call(self.vector(kind), name, operands), table.dtype)

    def _loaded(self, name: str, dtype: np.dtype) -> Value:
        """What was read from memory, in the form that registers have."""
        return Value(
            self.emit(f"icmp ne {self.vector('i8')} {name}, zeroinitializer") if dtype == BOOL else name, dtype
        )
