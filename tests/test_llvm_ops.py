"""Primitives in LLVM IR give what exact arithmetic, Python's integers and numpy give, at every width."""

import operator
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from llvm_lanes import (
    DTYPES,
    FLOATS,
    FMA,
    INTEGERS,
    assert_identical,
    at_widths,
    compiled,
    edges,
    grid,
    target,
    trace,
)

from gradsolve_backend.kernels.llvm_ir import Body, Module
from gradsolve_backend.kernels.llvm_ops import Instruction, evaluate, instructions, unsupported
from gradsolve_backend.kernels.scalar import scalarise

AWAY, EVEN = lax.RoundingMethod.AWAY_FROM_ZERO, lax.RoundingMethod.TO_NEAREST_EVEN
BOOL = np.dtype(bool)


def check(rows: dict[str, tuple[Callable, Callable]], dtypes: Sequence[np.dtype], width: int) -> None:
    """Every function of `rows`, in one program, against its oracle on arrays."""
    inputs = grid(dtypes)
    closed = trace(lambda *xs: [function(*xs) for function, _ in rows.values()], *dtypes)
    results = compiled(closed, target(width))(*inputs)
    with np.errstate(all="ignore"):
        for (name, (_, oracle)), result in zip(rows.items(), results, strict=True):
            assert_identical(result, oracle(*inputs), name)


# ---- floats ----------------------------------------------------------------------------------------


def _sign(x: np.ndarray) -> np.ndarray:
    return np.where((x == 0) | np.isnan(x), x, np.copysign(np.ones_like(x), x))


BOUNDS = (1.5, -2.0, 0.0, np.inf, np.nan)


def _max(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(a == b, np.where(np.signbit(a), b, a), np.maximum(a, b))


def _min(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(a == b, np.where(np.signbit(a), a, b), np.minimum(a, b))


def _away(x: np.ndarray) -> np.ndarray:
    size = np.abs(x)
    return np.copysign(np.where(size - np.floor(size) >= 0.5, np.ceil(size), np.floor(size)), x)


def _seventh(x: np.ndarray) -> np.ndarray:
    return (x * (x * x)) * ((x * x) * (x * x))


# By squaring, in the order that XLA has.
POWERS: dict[int, Callable] = {
    0: np.ones_like,
    1: np.positive,
    2: np.square,
    3: lambda x: x * (x * x),
    7: _seventh,
    8: lambda x: np.square(np.square(x * x)),
    -1: lambda x: 1 / x,
    -2: lambda x: 1 / (x * x),
    -7: lambda x: 1 / _seventh(x),
}


def _reduced(kind: Any, least: float, x: np.ndarray) -> np.ndarray:
    """Through a small float dtype, whose subnormal numbers become zero; no double rounding in these inputs."""
    small = x.astype(kind).astype(x.dtype)
    return np.where(np.abs(small) < least, np.copysign(np.zeros_like(x), x), small)


ROUNDINGS = {
    "neg": (lax.neg, np.negative),
    "abs": (lax.abs, np.abs),
    "sign": (lax.sign, _sign),
    "floor": (lax.floor, np.floor),
    "ceil": (lax.ceil, np.ceil),
    "round_away": (partial(lax.round, rounding_method=AWAY), _away),
    "round_even": (partial(lax.round, rounding_method=EVEN), np.rint),
    "sqrt": (lax.sqrt, np.sqrt),
    "square": (lax.square, np.square),
    **{f"max {c}": (partial(lambda c, x: lax.max(x, x.dtype.type(c)), c), partial(_max, c)) for c in BOUNDS},
    **{f"min {c}": (partial(lambda c, x: lax.min(x.dtype.type(c), x), c), partial(_min, c)) for c in BOUNDS},
    "is_finite": (lax.is_finite, np.isfinite),
    "float16": (lambda x: lax.reduce_precision(x, 5, 10), partial(_reduced, np.float16, 2.0**-14)),
    "bfloat16": (lambda x: lax.reduce_precision(x, 8, 7), partial(_reduced, ml_dtypes.bfloat16, 2.0**-126)),
    **{f"power{y}": (partial(lax.integer_pow, y=y), oracle) for y, oracle in POWERS.items()},
}
COMPARISONS = {name: (getattr(lax, name), getattr(operator, name)) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
PAIRS = COMPARISONS | {
    "add": (lax.add, np.add),
    "sub": (lax.sub, np.subtract),
    "mul": (lax.mul, np.multiply),
    "div": (lax.div, np.divide),
    "rem": (lax.rem, np.fmod),
    "max": (lax.max, _max),
    "min": (lax.min, _min),
    "nextafter": (lax.nextafter, np.nextafter),
    "larger": (lambda a, b: lax.max(lax.abs(a), lax.abs(b)), lambda a, b: _max(np.abs(a), np.abs(b))),
    "smaller": (lambda a, b: lax.min(lax.abs(a), lax.abs(b)), lambda a, b: _min(np.abs(a), np.abs(b))),
}


@at_widths(FLOATS)
def test_floats(dtype: np.dtype, width: int) -> None:
    check(ROUNDINGS, [dtype], width)
    check(PAIRS, [dtype, dtype], width)


@at_widths(FLOATS)
def test_clamp_floats(dtype: np.dtype, width: int) -> None:
    check({"clamp": (lax.clamp, lambda low, x, high: _min(_max(low, x), high))}, [dtype] * 3, width)


# ---- integers: Python's, wrapped -------------------------------------------------------------------


def _wrapped(function: Callable[..., int]) -> Callable[..., np.ndarray]:
    def apply(*arrays: np.ndarray) -> np.ndarray:
        dtype = arrays[0].dtype
        bits = 8 * dtype.itemsize
        numbers = [function(*row, bits) % (1 << bits) for row in zip(*(a.tolist() for a in arrays), strict=True)]
        return np.array(numbers, f"u{dtype.itemsize}").view(dtype)

    return apply


def _quotient(a: int, b: int, bits: int) -> int:
    return -1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _shifted(a: int, by: int, bits: int, right: bool) -> int:
    by %= 1 << bits
    return 0 if by >= bits else a % (1 << bits) >> by if right else a << by


def _power_of_int(y: int) -> tuple[Callable, Callable]:
    return partial(lax.integer_pow, y=y), _wrapped(lambda x, bits: x**y)


UNARY_INTEGER = {
    "not": (lax.bitwise_not, _wrapped(lambda x, bits: ~x)),
    "sign": (lax.sign, _wrapped(lambda x, bits: (x > 0) - (x < 0))),
    "square": (lax.square, _wrapped(lambda x, bits: x * x)),
    "population_count": (lax.population_count, _wrapped(lambda x, bits: (x % (1 << bits)).bit_count())),
    "clz": (lax.clz, _wrapped(lambda x, bits: bits - (x % (1 << bits)).bit_length())),
    **{f"power{y}": _power_of_int(y) for y in (0, 1, 3, 6)},
}
SIGNED = {
    "neg": (lax.neg, _wrapped(lambda x, bits: -x)),
    "abs": (lax.abs, _wrapped(lambda x, bits: abs(x))),
}
BINARY_INTEGER = {
    "add": (lax.add, _wrapped(lambda a, b, bits: a + b)),
    "sub": (lax.sub, _wrapped(lambda a, b, bits: a - b)),
    "mul": (lax.mul, _wrapped(lambda a, b, bits: a * b)),
    "div": (lax.div, _wrapped(_quotient)),
    "rem": (lax.rem, _wrapped(lambda a, b, bits: a if b == 0 else a - b * _quotient(a, b, bits))),
    "max": (lax.max, _wrapped(lambda a, b, bits: max(a, b))),
    "min": (lax.min, _wrapped(lambda a, b, bits: min(a, b))),
    "and": (lax.bitwise_and, _wrapped(lambda a, b, bits: a & b)),
    "or": (lax.bitwise_or, _wrapped(lambda a, b, bits: a | b)),
    "xor": (lax.bitwise_xor, _wrapped(lambda a, b, bits: a ^ b)),
    "shift_left": (lax.shift_left, _wrapped(partial(_shifted, right=False))),
    "shift_right_logical": (lax.shift_right_logical, _wrapped(partial(_shifted, right=True))),
    "shift_right_arithmetic": (
        lax.shift_right_arithmetic,
        _wrapped(
            lambda a, by, bits: (a + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1) >> min(by % (1 << bits), bits)
        ),
    ),
}


@at_widths(INTEGERS)
def test_integers(dtype: np.dtype, width: int) -> None:
    check(UNARY_INTEGER | (SIGNED if dtype.kind == "i" else {}), [dtype], width)
    check(BINARY_INTEGER | COMPARISONS, [dtype, dtype], width)


@at_widths([BOOL])
def test_bools(dtype: np.dtype, width: int) -> None:
    names = {"bitwise_and": np.logical_and, "bitwise_or": np.logical_or, "bitwise_xor": np.logical_xor}
    rows = {name: (getattr(lax, name), oracle) for name, oracle in names.items()}
    rows |= {"max": (lax.max, np.logical_or), "min": (lax.min, np.logical_and)}
    check(COMPARISONS | rows, [dtype, dtype], width)
    check({"not": (lax.bitwise_not, np.logical_not)}, [dtype], width)


# ---- conversion, choice, look-up -------------------------------------------------------------------


def _converted(to: np.dtype, x: np.ndarray) -> np.ndarray:
    if x.dtype.kind != "f" or to.kind not in "iu":
        return x.astype(to)
    info = np.iinfo(to)
    numbers = [0 if np.isnan(v) else info.max if v > info.max else info.min if v < info.min else int(v) for v in x]
    return np.array(numbers, to)


@at_widths(DTYPES)
def test_conversion(dtype: np.dtype, width: int) -> None:
    rows = {str(to): (partial(lax.convert_element_type, new_dtype=to), partial(_converted, to)) for to in DTYPES}
    same_size = [to for to in DTYPES if to.itemsize == dtype.itemsize and BOOL not in (to, dtype)]
    rows |= {
        f"bits {to}": (partial(lax.bitcast_convert_type, new_dtype=to), lambda x, to=to: x.view(to)) for to in same_size
    }
    check(rows, [dtype], width)


@at_widths(DTYPES)
def test_select(dtype: np.dtype, width: int) -> None:
    check({"bool": (lax.select_n, lambda p, a, b: np.where(p, b, a))}, [BOOL, dtype, dtype], width)
    for kind in ("int32", "uint8"):
        choose = lambda which, a, b: np.choose(np.clip(which, 0, 2).astype(int), [a, b, a])
        rows = {"number": (lambda which, a, b: lax.select_n(which, a, b, a), choose)}
        check(rows, [np.dtype(kind), dtype, dtype], width)


@pytest.mark.parametrize("index", [np.int8, np.int32, np.int64, np.uint32])
@at_widths([np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.int32), BOOL])
def test_look_up_clamps(dtype: np.dtype, width: int, index: Any) -> None:
    shared = np.array([1, 0, 0, 1, 1, 0, 1], dtype)
    own = np.random.default_rng(0).integers(0, 2, (20, 5)).astype(dtype)
    places = np.resize(edges(np.dtype(index)), 20)

    def function(own: Any, place: Any) -> Any:
        return [lax.dynamic_index_in_dim(t, place, keepdims=False, allow_negative_indices=False) for t in (shared, own)]

    closed = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((5,), dtype), jax.ShapeDtypeStruct((), index))
    got_shared, got_own = compiled(scalarise(closed).jaxpr, target(width))(own, places)
    clipped = [np.array([min(max(p, 0), n - 1) for p in places.tolist()]) for n in (7, 5)]
    assert_identical(got_shared, shared[clipped[0]])
    assert_identical(got_own, own[np.arange(20), clipped[1]])


@pytest.mark.parametrize("width", [1, 4, 16])
def test_loops_end_for_each_lane_by_itself(width: int) -> None:
    """In a table of all lanes, in one of each lane, and a loop in a loop; in some lanes no loop begins."""
    shared, rng = np.sort(np.random.default_rng(0).uniform(size=9)), np.random.default_rng(1)
    own, sought, starts = np.sort(rng.uniform(size=(21, 5))), rng.uniform(size=21), rng.integers(0, 5, 21)
    sought[[3, 8]] = np.nan, np.inf

    def up(table: Any, x: Any, start: Any) -> Any:
        return lax.while_loop(lambda i: (i < table.size) & (table[i] <= x), lambda i: i + 1, start)

    def function(own: Any, x: Any, start: Any) -> Any:
        rows = lambda c: (c[0] + up(own, x, c[1]), c[1] + 1)  # noqa: E731
        return (
            up(jnp.asarray(shared), x, start),
            up(own, x, start),
            lax.while_loop(lambda c: c[1] < start, rows, (0 * start, 0))[0],
        )

    structs = [jax.ShapeDtypeStruct((5,), "float64"), *(jax.ShapeDtypeStruct((), d) for d in ("float64", "int64"))]
    got = compiled(scalarise(jax.make_jaxpr(function)(*structs)).jaxpr, target(width))(own, sought, starts)

    def first(table: np.ndarray, x: float, start: int) -> int:
        return next((i for i in range(start, len(table)) if not table[i] <= x), max(start, len(table)))

    lanes = list(zip(own, sought.tolist(), starts.tolist(), strict=True))
    wanted = [[first(shared, x, k) for _, x, k in lanes], [first(row, x, k) for row, x, k in lanes]]
    wanted.append([sum(first(row, x, j) for j in range(k)) for row, x, k in lanes])
    for g, w in zip(got, wanted, strict=True):
        assert_identical(g, np.array(w))


@pytest.mark.parametrize("width", [1, 4, 16])
def test_loops_begin_only_where_they_are_reached(width: int) -> None:
    """In a branch that is not taken, and inside a loop that a lane has left, they might never end."""
    until = lambda x, end: lax.while_loop(lambda y: y < end, lambda y: 2 * y, x)  # noqa: E731

    def function(x: Any) -> Any:
        branch = lax.cond(x > 0, lambda x: until(x, 10.0), lambda x: x, x)
        rest = lambda c: (c[0] + until(c[1], 10.0), c[1] - 1.0)  # noqa: E731
        return branch, lax.while_loop(lambda c: c[1] > 0.5, rest, (0.0, x))[0]

    def doubled(x: float) -> float:
        while x < 10.0:
            x *= 2
        return x

    xs = np.array([0.25, -1.0, 3.5, 0.0, 20.0, 2.0, 0.75, -7.0, 1.5, 6.0, 0.0, 1.0, 40.0])
    got = compiled(scalarise(jax.make_jaxpr(function)(jax.ShapeDtypeStruct((), "float64"))).jaxpr, target(width))(xs)
    assert_identical(got[0], np.array([doubled(x) if x > 0 else x for x in xs]))
    assert_identical(got[1], np.array([sum(doubled(x - k) for k in range(50) if x - k > 0.5) for x in xs]))


# ---- contraction -----------------------------------------------------------------------------------

CONTRACTED: dict[str, tuple[Callable, Callable]] = {
    "product_plus": (lambda a, b, c: a * b + c, lambda a, b, c: a * b + c),
    "plus_product": (lambda a, b, c: c + a * b, lambda a, b, c: a * b + c),
    "product_minus": (lambda a, b, c: a * b - c, lambda a, b, c: a * b - c),
    "minus_product": (lambda a, b, c: c - a * b, lambda a, b, c: c - a * b),
    "square": (lambda a, b, c: lax.square(a) + c, lambda a, b, c: a * a + c),
    "power": (lambda a, b, c: c - lax.integer_pow(a, 2), lambda a, b, c: c - a * a),
}


def _near_cancellation(dtype: np.dtype) -> list[np.ndarray]:
    a, b = np.random.default_rng(1).normal(size=(2, 200)).astype(dtype)
    c = -(a * b)
    return [a, b, np.where(np.arange(200) % 2, c, c * dtype.type(1.5))]


@pytest.mark.skipif(not FMA, reason="this machine has no fused multiply-add")
@pytest.mark.parametrize("name", CONTRACTED)
@at_widths(FLOATS)
def test_contraction_rounds_once(dtype: np.dtype, width: int, name: str) -> None:
    function, exact = CONTRACTED[name]
    inputs = _near_cancellation(dtype)
    closed = trace(function, dtype, dtype, dtype)
    assert len(instructions(closed, True)) == 1
    (got,) = compiled(closed, target(width))(*inputs)
    for x, *row in zip(got, *inputs, strict=True):
        want = exact(*(Fraction(float(v)) for v in row))
        others = [Fraction(float(np.nextafter(x, dtype.type(side)))) for side in (-np.inf, np.inf)]
        assert all(abs(Fraction(float(x)) - want) <= abs(other - want) for other in others)


@pytest.mark.parametrize("dtype", FLOATS)
def test_without_fma_every_operation_rounds(dtype: np.dtype) -> None:
    a, b, c = _near_cancellation(dtype)
    function = lambda a, b, c: (a * b + c, c - a * b)
    plus, minus = compiled(trace(function, *[dtype] * 3), target(4, fma=False))(a, b, c)
    assert_identical(plus, a * b + c)
    assert_identical(minus, c - a * b)


def _names(function: Callable, *dtypes: Any) -> list[str]:
    return [instruction.name for instruction in instructions(trace(function, *dtypes), True)]


def test_what_is_not_contracted() -> None:
    f64 = [np.float64] * 3

    def used_twice(a: Any, b: Any, c: Any) -> Any:
        product = a * b
        return product + c, product * c

    assert _names(used_twice, *f64) == ["mul", "add", "mul"]
    assert _names(lambda a, b, c: (lambda p: p + p)(a * b), *f64) == ["mul", "add"]
    assert _names(lambda a, b, c: (lambda p: (p, p + c))(a * b), *f64) == ["mul", "add"]
    assert _names(lambda a, b, c: a * b + c, *[np.int32] * 3) == ["mul", "add"]
    assert [i.name for i in instructions(trace(lambda a, b, c: a * b + c, *f64), False)] == ["mul", "add"]


def test_of_two_products_the_first_is_contracted() -> None:
    closed = trace(lambda a, b, c, d: a * b - c * d, *[np.float64] * 4)
    first, second = instructions(closed, True)
    a, b, c, d = closed.jaxpr.invars
    assert (first.name, first.inputs) == ("mul", (c, d))
    assert (second.name, second.inputs) == ("product_minus", (a, b, first.output))


@cache
def _mixture(width: int, dtype: np.dtype) -> list[np.ndarray]:
    def function(x: Any, y: Any, n: Any) -> Any:
        z = jnp.exp(x) * jnp.sin(y) + jnp.tanh(x * y) - jnp.log1p(jnp.abs(x))
        w = jnp.where(z > y, z / (y * y + 1), lax.max(z, y)) + lax.convert_element_type(n, dtype)
        return [z, w, lax.pow(jnp.abs(w), y), lax.erf_inv(lax.clamp(dtype.type(-1), z, dtype.type(1))), n * n // 3]

    rng = np.random.default_rng(2)
    inputs = *rng.normal(size=(2, 96)).astype(dtype), rng.integers(0, 9, 96)
    closed = scalarise(trace(function, dtype, dtype, np.int64)).jaxpr
    return [result.view(f"u{result.itemsize}") for result in compiled(closed, target(width))(*inputs)]


@pytest.mark.parametrize("width", [2, 4, 8, 16])
@pytest.mark.parametrize("dtype", FLOATS)
def test_same_bits_at_every_width(dtype: np.dtype, width: int) -> None:
    for got, want in zip(_mixture(width, dtype), _mixture(1, dtype), strict=True):
        np.testing.assert_array_equal(got, want)


# ---- programs --------------------------------------------------------------------------------------


def test_unsupported() -> None:
    f64 = np.float64
    assert unsupported(trace(lambda x: jnp.sin(x) + 1, f64)) == ""
    assert unsupported(trace(lax.igamma, f64, f64)) == "primitive `igamma` has no LLVM form"
    assert unsupported(trace(lax.bessel_i0e, f64)) == "primitive `bessel_i0e` has no LLVM form"
    assert unsupported(trace(lax.neg, jnp.bfloat16)) == "values of dtype bfloat16 have no LLVM form"
    half = trace(lambda x: lax.convert_element_type(lax.convert_element_type(x, np.float16), f64), f64)
    assert unsupported(half) == "values of dtype float16 have no LLVM form"


def test_outputs_may_be_inputs_and_literals() -> None:
    closed = trace(lambda x: (x, lax.full_like(x, np.nan), jnp.float64(-np.inf), jnp.bool_(True)), np.float64)
    x = np.array([1.5, -0.0])
    wants = [x, [np.nan] * 2, [-np.inf] * 2, [True] * 2]
    for got, want in zip(compiled(closed, target(4))(x), wants, strict=True):
        assert_identical(got, np.asarray(want))


def test_twenty_thousand_equations_in_a_second() -> None:
    def part(x: Any, y: Any) -> Any:
        for k in range(500):
            x, y = lax.max(x + y * (k + 0.5), y) - x / y, x
        return x, y

    closed = trace(part, np.float64, np.float64)
    copies = -(-20000 // len(closed.jaxpr.eqns))
    module = Module()
    body = Body(module, target(8), "void @f(ptr %x)")
    values = [body.load("%x", 0, np.dtype(float))] * 2
    start = time.process_time()
    for _ in range(copies):
        values = evaluate(body, closed, values)
    body.close()
    module.text()
    assert time.process_time() - start < 1


def test_instructions_can_be_written_one_by_one() -> None:
    closed = trace(lambda x, y: jnp.exp(x) + y, np.float64, np.float64)
    exp, add = instructions(closed, True)
    assert isinstance(exp, Instruction) and exp.inputs == (closed.jaxpr.invars[0],)
    assert add.inputs == (exp.output, closed.jaxpr.invars[1]) and add.output == closed.jaxpr.outvars[0]
