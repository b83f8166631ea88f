"""Text of modules and functions: constants and memory keep every bit, blocks join, everything is there once."""

import numpy as np
import pytest
from llvm_lanes import DTYPES, NATIVE_BITS, VECTOR_MATH, at_widths, edges, load, target

from gradsolve_backend.kernels.llvm_ir import BOOL, Body, Module, Table, Value, has_type


@at_widths(DTYPES)
def test_constants_and_slots_keep_every_bit(dtype: np.dtype, width: int) -> None:
    numbers = edges(dtype)
    module = Module()
    body = Body(module, target(width), "void @f(ptr %in, ptr %out, i64 %unused)")
    table = Table(f"splat (ptr {module.constant(numbers)})", numbers.size, dtype)
    size = width * dtype.itemsize
    for k, number in enumerate(numbers):
        body.store(body.splat(number, dtype), "%out", 3 * k * size)
        body.store(body.load("%in", k * size, dtype), "%out", (3 * k + 1) * size)
        body.store(body.gather(table, body.splat(k, np.dtype(np.int64))), "%out", (3 * k + 2) * size)
    body.line("ret void")
    body.close()
    slots, out = np.repeat(numbers, width), np.empty((numbers.size, 3, width), dtype)
    load(module.text(), 2)(slots.ctypes.data, out.ctypes.data, 0)
    np.testing.assert_array_equal(out.view(np.uint8), np.repeat(numbers, 3 * width).reshape(out.shape).view(np.uint8))


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
def test_any_lane(width: int) -> None:
    module = Module()
    body = Body(module, target(width), "void @f(ptr %in, ptr %out, i64 %unused)")
    found = body.any_lane(body.load("%in", 0, BOOL))
    body.line(f"store i8 {body.emit(f'zext i1 {found} to i8')}, ptr %out")
    body.line("ret void")
    body.close()
    function, out = load(module.text(), 2), np.zeros(1, np.uint8)
    for lanes in (np.zeros(width, bool), np.arange(width) == width - 1, np.ones(width, bool)):
        function(lanes.ctypes.data, out.ctypes.data, 0)
        assert out[0] == lanes.any()


def test_a_module_has_everything_once() -> None:
    module, calls = Module(), []
    for _ in range(2):
        module.declare("double @exp(double)")
        module.once("f", lambda: calls.append("f"))
    assert module.constant(np.ones(3)) == module.constant(np.ones(3)) != module.constant(np.ones(3, np.float32))
    assert calls == ["f"] and module.text().count("@exp") == 1


@pytest.mark.parametrize("width", [1, 4])
def test_a_loop_with_phis(width: int) -> None:
    """Powers of two below a bound, counted per vector."""
    module, double = Module(), np.dtype(np.float64)
    body = Body(module, target(width), "void @f(ptr %in, ptr %out, i64 %count)")
    bound, loop, end, entry = body.load("%in", 0, double), body.fresh_label("loop"), body.fresh_label("end"), body.block
    body.branch(loop)
    body.label(loop)
    count, power = body.phi("i64", "0", entry), body.phi(body.type(double), body.splat(1, double).name, entry)
    doubled = body.emit(f"fadd {body.type(double)} {power}, {power}")
    body.incoming(count, body.emit(f"add i64 {count}, 1"), body.block)
    body.incoming(power, doubled, body.block)
    below = Value(body.emit(f"fcmp olt {body.type(double)} {doubled}, {bound.name}"), BOOL)
    body.branch_if(body.any_lane(below), loop, end)
    body.label(end)
    body.store(body.broadcast(count, np.dtype(np.int64)), "%out", "0")
    body.line("ret void")
    body.close()
    bounds, out = np.geomspace(9.0, 1000.0, width), np.zeros(width, int)
    load(module.text(), 2)(bounds.ctypes.data, out.ctypes.data, 0)
    assert out.tolist() == [int(np.ceil(np.log2(bounds.max()))) - 1] * width


def test_types_and_features() -> None:
    assert all(has_type(dtype) for dtype in DTYPES)
    assert not any(has_type(dtype) for dtype in (np.dtype(np.float16), np.dtype(complex), np.dtype(object)))
    assert NATIVE_BITS in (128, 256, 512) and isinstance(VECTOR_MATH, bool)
