"""Runs scalar programs, written as LLVM IR, on numpy arrays of lanes."""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import llvmlite.binding as llvm
import numpy as np
import pytest

from gradsolve_backend.kernels import llvm_math
from gradsolve_backend.kernels.llvm_ir import Body, Module, Table, Target, Value, host_features
from gradsolve_backend.kernels.llvm_ops import evaluate, unsupported

FMA, NATIVE_BITS, VECTOR_MATH = host_features()
FLOATS = [np.dtype(np.float32), np.dtype(np.float64)]
INTEGERS = [np.dtype(f"{sign}{size}") for sign in "iu" for size in (1, 2, 4, 8)]
DTYPES = [*FLOATS, *INTEGERS, np.dtype(bool)]


def widths(dtype: np.dtype) -> list[int]:
    """One lane, one register, two registers; at most 16 lanes."""
    native = min(NATIVE_BITS // (8 * dtype.itemsize), 16)
    return [1, native, min(2 * native, 16)]


def target(width: int, vector_math: bool = True, fma: bool = True, native_bits: int = NATIVE_BITS) -> Target:
    return Target(width, fma and FMA, vector_math and VECTOR_MATH, native_bits)


@functools.cache
def _prepare() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for name, address in llvm_math.symbols().items():
        llvm.add_symbol(name, address)


def _machine() -> Any:
    features = llvm.get_host_cpu_features().flatten()
    triple = llvm.Target.from_default_triple()
    return triple.create_target_machine(opt=1, cpu=llvm.get_host_cpu_name(), features=features)


def load(text: str, pointers: int) -> Callable[..., None]:
    """The function `f` of some pointers and an i64."""
    _prepare()
    module = llvm.parse_assembly(text)
    module.verify()
    engine = llvm.create_mcjit_compiler(module, _machine())
    engine.finalize_object()
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * pointers, ctypes.c_int64)(engine.get_function_address("f"))

    def run(*arguments: Any) -> None:
        function(*arguments)
        assert engine  # which owns the code

    return run


def program_text(closed: Any, to: Target) -> str:
    """`void f(a pointer per input and output, i64 lanes)`; a table input has one row per lane."""
    ins, outs = [v.aval for v in closed.jaxpr.invars], [v.aval for v in closed.jaxpr.outvars]
    pointers = [f"%x{k}" for k in range(len(ins))], [f"%y{k}" for k in range(len(outs))]
    module = Module()
    body = Body(module, to, f"void @f({', '.join(f'ptr {p}' for p in sum(pointers, []))}, i64 %lanes)")
    loop, end, entry = body.fresh_label("loop"), body.fresh_label("end"), body.block
    body.branch(loop)
    body.label(loop)
    lane = body.phi("i64", "0", entry)
    values = [_input(body, p, lane, aval) for p, aval in zip(pointers[0], ins, strict=True)]
    for pointer, value in zip(pointers[1], evaluate(body, closed, values), strict=True):
        body.store(value, pointer, body.emit(f"mul i64 {lane}, {value.dtype.itemsize}"))
    after = body.emit(f"add i64 {lane}, {to.width}")
    body.incoming(lane, after, body.block)
    body.branch_if(body.emit(f"icmp ult i64 {after}, %lanes"), loop, end)
    body.label(end)
    body.line("ret void")
    body.close()
    return module.text()


def _input(body: Body, pointer: str, lane: str, aval: Any) -> Value | Table:
    dtype = np.dtype(aval.dtype)
    if not aval.shape:
        return body.load(pointer, body.emit(f"mul i64 {lane}, {dtype.itemsize}"), dtype)
    step, kind = aval.size * dtype.itemsize, body.vector("i64")
    first = body.broadcast(body.emit(f"mul i64 {lane}, {step}"), np.dtype(np.int64))
    steps = ", ".join(f"i64 {k * step}" for k in range(body.target.width))
    offsets = body.emit(f"add {kind} {first.name}, <{steps}>")
    return Table(body.emit(f"getelementptr i8, ptr {pointer}, {kind} {offsets}"), aval.size, dtype)


def trace(function: Callable[..., Any], *dtypes: Any) -> Any:
    return jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct((), dtype) for dtype in dtypes))


def compiled(closed: Any, to: Target) -> Callable[..., list[np.ndarray]]:
    """A function of arrays with one row per lane."""
    assert unsupported(closed) == ""
    outs = [np.dtype(v.aval.dtype) for v in closed.jaxpr.outvars]
    ins = [np.dtype(v.aval.dtype) for v in closed.jaxpr.invars]
    function = load(program_text(closed, to), len(ins) + len(outs))

    def run(*arrays: Any) -> list[np.ndarray]:
        lanes = len(arrays[0])
        fill = -lanes % to.width
        padded = [np.concatenate([a, np.repeat(a[-1:], fill, 0)]) for a in map(np.asarray, arrays)]
        assert [a.dtype for a in padded] == ins
        results = [np.empty(lanes + fill, dtype) for dtype in outs]
        function(*(a.ctypes.data for a in [*padded, *results]), lanes + fill)
        return [result[:lanes] for result in results]

    return run


def assert_identical(got: np.ndarray, want: np.ndarray, what: Any = "") -> None:
    """Equal numbers and signs of zero; all NaN count as one."""
    want = np.asarray(want, got.dtype)
    same = got == want
    if got.dtype.kind == "f":
        same = same & (np.signbit(got) == np.signbit(want)) | np.isnan(got) & np.isnan(want)
    wrong = np.flatnonzero(~same)
    assert not wrong.size, (what, wrong[:5], got[wrong[:5]], want[wrong[:5]])


def ulps(got: np.ndarray, want: Sequence[Any] | np.ndarray) -> np.ndarray:
    """Distance in units of the last place of the result's dtype; infinite where NaN or infinities disagree."""
    with np.errstate(all="ignore"):
        wide = np.asarray(want)
        rounded = wide.astype(got.dtype)
        distance = np.abs(got.astype(wide.dtype) - wide) / np.spacing(np.abs(rounded)).astype(wide.dtype)
        special = np.where((got == rounded) | np.isnan(got) & np.isnan(rounded), 0, np.inf)
        return np.where(np.isfinite(rounded) & np.isfinite(got), distance, special).astype(float)


def grid(dtypes: Sequence[np.dtype]) -> list[np.ndarray]:
    """All combinations of numbers at the edges of the dtypes."""
    sides = [edges(dtype) for dtype in dtypes]
    places = np.meshgrid(*(np.arange(len(e)) for e in sides), indexing="ij")
    return [e[place.reshape(-1)] for e, place in zip(sides, places, strict=True)]


def edges(dtype: np.dtype) -> np.ndarray:
    if dtype.kind == "b":
        return np.array([False, True])
    if dtype.kind == "f":
        info = np.finfo(dtype)
        sizes = [0, 1, 2, 0.5, 0.49999997, 1.5, 2.5, 3, 7, 123.456, 1e5, 300, info.max, info.tiny]
        sizes += [info.smallest_subnormal, np.inf]
        return np.array([*sizes, *(-s for s in sizes), np.nan], dtype)
    info = np.iinfo(dtype)
    numbers = [info.min, info.min + 1, info.max, info.max - 1, info.bits, 0, 1, 2, 3, 7, 100]
    return np.array(numbers + ([-1, -2, -3, -100] if dtype.kind == "i" else []), dtype)


def at_widths(dtypes: Sequence[np.dtype]) -> Any:
    """A test of each dtype at each of its widths."""
    rows = [pytest.param(d, w, id=f"{d}-{w}") for d in dtypes for w in dict.fromkeys(widths(d))]
    return pytest.mark.parametrize(("dtype", "width"), rows)
