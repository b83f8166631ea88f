"""How each primitive of a scalar program is written in LLVM IR, with the meaning that XLA gives it on a CPU.

A rule takes the function that is written, the parameters of the primitive, and a `Value` per operand.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from gradsolve_backend.kernels import llvm_math
from gradsolve_backend.kernels.llvm_ir import BOOL, Body, Table, Value, constant_of, scalar_type
from gradsolve_backend.kernels.llvm_power import LARGEST, power

__all__ = ["RULES"]

Params: TypeAlias = dict[str, Any]
Rule: TypeAlias = Callable[..., Value]

_INT64 = np.dtype(np.int64)


# ---- how rules are written -------------------------------------------------------------------------


def _integer(dtype: np.dtype) -> np.dtype:
    """The signed integers of the size of a dtype."""
    return np.dtype(f"i{dtype.itemsize}")


def _emit(body: Body, operation: str, *values: Value) -> Value:
    """An operation whose operands and result have one type."""
    names = ", ".join(value.name for value in values)
    return Value(body.emit(f"{operation} {body.type(values[0].dtype)} {names}"), values[0].dtype)


def _compare(body: Body, operation: str, left: Value, right: Value) -> Value:
    return Value(body.emit(f"{operation} {body.type(left.dtype)} {left.name}, {right.name}"), BOOL)


def _select(body: Body, mask: Value, yes: Value, no: Value) -> Value:
    kind = body.type(yes.dtype)
    return Value(body.emit(f"select {body.type(BOOL)} {mask.name}, {kind} {yes.name}, {kind} {no.name}"), yes.dtype)


def _intrinsic(body: Body, name: str, *values: Value, flag: str = "") -> Value:
    """An intrinsic whose operands and result have one type, but for a flag at the end."""
    kind, dtype = body.type(values[0].dtype), values[0].dtype
    suffix = f"{'f' if dtype.kind == 'f' else 'i'}{1 if dtype == BOOL else 8 * dtype.itemsize}"
    operands = [(kind, value.name) for value in values] + ([("i1", flag)] if flag else [])
    return Value(body.call(kind, f"llvm.{name}.v{body.target.width}{suffix}", operands), dtype)


def _operation(**operations: str) -> Rule:
    """The rule that picks an operation by the kind of the operands' dtype."""
    return lambda body, _, *values: _emit(body, operations[values[0].dtype.kind], *values)


def _intrinsics(**names: str) -> Rule:
    """The rule that picks an intrinsic by the kind of the operands' dtype."""
    return lambda body, _, *values: _intrinsic(body, names[values[0].dtype.kind], *values)


def _comparison(name: str) -> Rule:
    signs = ("", "") if name in ("eq", "ne") else ("s", "u")
    operations = {"f": f"fcmp {'u' if name == 'ne' else 'o'}{name}", "i": f"icmp {signs[0]}{name}"}
    operations |= dict.fromkeys("ub", f"icmp {signs[1]}{name}")
    return lambda body, _, a, b: _compare(body, operations[a.dtype.kind], a, b)


def _function(name: str) -> Rule:
    return lambda body, _, *values: llvm_math.apply(body, name, *values)


# ---- arithmetic ------------------------------------------------------------------------------------


def _neg(body: Body, _: Params, x: Value) -> Value:
    return _emit(body, "fneg", x) if x.dtype.kind == "f" else _emit(body, "sub", body.splat(0, x.dtype), x)


def _abs(body: Body, _: Params, x: Value) -> Value:
    if x.dtype.kind == "f":
        out = _intrinsic(body, "fabs", x)
        body.without_sign.add(out.name)
        return out
    return x if x.dtype.kind == "u" else _intrinsic(body, "abs", x, flag="false")


def _sign(body: Body, _: Params, x: Value) -> Value:
    one, zero = body.splat(1, x.dtype), body.splat(0, x.dtype)
    if x.dtype.kind == "u":
        return _intrinsic(body, "umin", x, one)
    if x.dtype.kind == "i":
        return _intrinsic(body, "smax", _intrinsic(body, "smin", x, one), body.splat(-1, x.dtype))
    return _select(body, _compare(body, "fcmp one", x, zero), _intrinsic(body, "copysign", one, x), x)


def _divisor(body: Body, a: Value, b: Value) -> tuple[Value, Value]:
    """Where an integer divisor is zero, and a divisor that cannot trap: with 1, the least number over -1 is itself."""
    zero = _compare(body, "icmp eq", b, body.splat(0, b.dtype))
    unsafe = zero
    if a.dtype.kind == "i":
        least = _compare(body, "icmp eq", a, body.splat(np.iinfo(a.dtype).min, a.dtype))
        overflow = _emit(body, "and", least, _compare(body, "icmp eq", b, body.splat(-1, b.dtype)))
        unsafe = _emit(body, "or", zero, overflow)
    return zero, _select(body, unsafe, body.splat(1, b.dtype), b)


def _div(body: Body, _: Params, a: Value, b: Value) -> Value:
    if a.dtype.kind == "f":
        return _emit(body, "fdiv", a, b)
    zero, divisor = _divisor(body, a, b)
    quotient = _emit(body, "sdiv" if a.dtype.kind == "i" else "udiv", a, divisor)
    return _select(body, zero, _ones(body, a.dtype), quotient)


def _ones(body: Body, dtype: np.dtype) -> Value:
    """All bits set."""
    return body.splat(True if dtype == BOOL else -1 if dtype.kind == "i" else np.iinfo(dtype).max, dtype)


def _rem(body: Body, params: Params, a: Value, b: Value) -> Value:
    if a.dtype.kind == "f":
        return llvm_math.apply(body, "rem", a, b)
    zero, divisor = _divisor(body, a, b)
    return _select(body, zero, a, _emit(body, "srem" if a.dtype.kind == "i" else "urem", a, divisor))


_mul = _operation(f="fmul", i="mul", u="mul")


def _integer_pow(body: Body, params: Params, x: Value) -> Value:
    """By squaring, as XLA does it; one division for a negative power."""
    power, total = abs(params["y"]), None
    while power:
        if power & 1:
            total = x if total is None else _mul(body, params, total, x)
        power >>= 1
        if power:
            x = _mul(body, params, x, x)
    one = body.splat(1, x.dtype)
    total = one if total is None else total
    return _div(body, params, one, total) if params["y"] < 0 else total


def _pow(body: Body, params: Params, x: Value, y: Value) -> Value:
    exponent = constant_of(y)
    if exponent is not None and body.target.fma and x.dtype == np.float64 and 0 < abs(exponent) <= LARGEST:
        return Value(power(llvm_math.Double(body, x.name), exponent).name, x.dtype)
    return llvm_math.apply(body, "pow", x, _converted(body, y, x.dtype))


def _product_minus(body: Body, _: Params, a: Value, b: Value, c: Value) -> Value:
    return _intrinsic(body, "fma", a, b, _emit(body, "fneg", c))


def _minus_product(body: Body, _: Params, a: Value, b: Value, c: Value) -> Value:
    return _intrinsic(body, "fma", _emit(body, "fneg", a), b, c)


def _extreme(name: str, side: str) -> Rule:
    """The larger or the smaller: NaN if either is, and -0 less than 0, which is dear where zeros can differ in sign."""
    whole = _intrinsics(f=f"{name}imum", i=f"s{name}", u=f"u{name}", b=f"u{name}")

    def rule(body: Body, params: Params, a: Value, b: Value) -> Value:
        if a.dtype.kind != "f":
            return whole(body, params, a, b)
        known = next((x for x in (a, b) if constant_of(x) not in (None, 0.0)), None)
        if known is not None and constant_of(known) == constant_of(known):
            other = b if known is a else a
            return _select(body, _compare(body, f"fcmp o{side}", known, other), known, other)
        if {a.name, b.name} <= body.without_sign:
            chosen = _select(body, _compare(body, f"fcmp o{side}", a, b), a, b)
            return _select(body, _compare(body, "fcmp uno", a, a), a, chosen)
        return whole(body, params, a, b)

    return rule


_max = _extreme("max", "gt")
_min = _extreme("min", "lt")


def _clamp(body: Body, params: Params, low: Value, x: Value, high: Value) -> Value:
    return _min(body, params, _max(body, params, low, x), high)


def _round(body: Body, params: Params, x: Value) -> Value:
    away = int(params["rounding_method"]) == 0
    return _intrinsic(body, "round" if away else "nearbyint", x)


# ---- bits ------------------------------------------------------------------------------------------


def _not(body: Body, _: Params, x: Value) -> Value:
    return _emit(body, "xor", x, _ones(body, x.dtype))


def _shift(operation: str, body: Body, _: Params, x: Value, by: Value) -> Value:
    """Zero where `by`, taken as unsigned, is not below the number of bits."""
    inside = _compare(body, "icmp ult", by, body.splat(8 * x.dtype.itemsize, by.dtype))
    return _select(body, inside, _emit(body, operation, x, by), body.splat(0, x.dtype))


def _shift_right_arithmetic(body: Body, _: Params, x: Value, by: Value) -> Value:
    return _emit(body, "ashr", x, _intrinsic(body, "umin", by, body.splat(8 * x.dtype.itemsize - 1, by.dtype)))


def _clz(body: Body, _: Params, x: Value) -> Value:
    return _intrinsic(body, "ctlz", x, flag="false")


def _bits(body: Body, x: Value) -> Value:
    return body.cast("bitcast", x, _integer(x.dtype))


def _is_finite(body: Body, _: Params, x: Value) -> Value:
    return _compare(body, "fcmp olt", _intrinsic(body, "fabs", x), body.splat(np.inf, x.dtype))


def _nextafter(body: Body, _: Params, x: Value, y: Value) -> Value:
    """One step of the bits, up in magnitude if `y` lies farther from zero on the same side."""
    start, end = _bits(body, x), _bits(body, y)
    sign = body.splat(np.iinfo(start.dtype).min, start.dtype)
    one, zero, ones = (body.splat(k, start.dtype) for k in (1, 0, -1))
    start_size, end_size = (_emit(body, "and", v, _not_sign(body, v.dtype)) for v in (start, end))
    opposite = _compare(body, "icmp slt", _emit(body, "xor", start, end), zero)
    inwards = _emit(body, "or", _compare(body, "icmp ugt", start_size, end_size), opposite)
    step = _emit(body, "add", start, _select(body, inwards, ones, one))
    least = _emit(body, "or", _emit(body, "and", end, sign), one)
    at_zero = _select(body, _compare(body, "icmp eq", end_size, zero), end, least)
    step = _select(body, _compare(body, "icmp eq", start_size, zero), at_zero, step)
    step = body.cast("bitcast", _select(body, _compare(body, "icmp eq", start, end), end, step), x.dtype)
    return _select(body, _compare(body, "fcmp uno", x, y), _emit(body, "fadd", x, y), step)


def _not_sign(body: Body, dtype: np.dtype) -> Value:
    return body.splat(np.iinfo(dtype).max, dtype)


def _reduce_precision(body: Body, params: Params, x: Value) -> Value:
    """Round the mantissa half to even; what the exponent then exceeds is infinite or zero."""
    info = np.finfo(x.dtype)
    bits, dtype = _bits(body, x), _integer(x.dtype)
    dropped = info.nmant - params["mantissa_bits"]
    rounded = bits
    if dropped > 0:
        odd = _emit(body, "and", _emit(body, "lshr", bits, body.splat(dropped, dtype)), body.splat(1, dtype))
        half = _emit(body, "add", odd, body.splat((1 << (dropped - 1)) - 1, dtype))
        rounded = _emit(body, "and", _emit(body, "add", bits, half), body.splat(-1 << dropped, dtype))
    if params["exponent_bits"] < info.nexp:
        rounded = _limited(body, rounded, info, params["exponent_bits"])
    return _select(body, _compare(body, "fcmp uno", x, x), x, body.cast("bitcast", rounded, x.dtype))


def _limited(body: Body, bits: Value, info: Any, exponent_bits: int) -> Value:
    """Infinite or zero where the exponent of a float, given as bits, does not fit in fewer bits."""
    dtype = bits.dtype
    bias, reach = (1 << (info.nexp - 1)) - 1, (1 << (exponent_bits - 1)) - 1
    size = _emit(body, "and", bits, _not_sign(body, dtype))
    sign = _emit(body, "and", bits, body.splat(np.iinfo(dtype).min, dtype))
    infinite = _emit(body, "or", sign, body.splat(((1 << info.nexp) - 1) << info.nmant, dtype))
    large = _compare(body, "icmp sge", size, body.splat((bias + reach + 1) << info.nmant, dtype))
    small = _compare(body, "icmp slt", size, body.splat((bias - reach + 1) << info.nmant, dtype))
    return _select(body, large, infinite, _select(body, small, sign, bits))


# ---- conversion, choice, memory --------------------------------------------------------------------


def _converted(body: Body, x: Value, dtype: np.dtype) -> Value:
    """The numbers in another dtype; floats become integers towards zero, within the range, NaN becomes 0."""
    if x.dtype == dtype:
        return x
    if dtype == BOOL:
        operation = "fcmp une" if x.dtype.kind == "f" else "icmp ne"
        return _compare(body, operation, x, body.splat(0, x.dtype))
    if x.dtype.kind == "f" and dtype.kind in "iu":
        return _saturated(body, x, dtype)
    return body.cast(_conversion(x.dtype, dtype), x, dtype)


def _conversion(source: np.dtype, dtype: np.dtype) -> str:
    if source.kind == "f":
        return "fpext" if dtype.itemsize > source.itemsize else "fptrunc"
    if dtype.kind == "f":
        return "sitofp" if source.kind == "i" else "uitofp"
    if source != BOOL and source.itemsize >= dtype.itemsize:
        return "trunc" if source.itemsize > dtype.itemsize else "bitcast"
    return "sext" if source.kind == "i" else "zext"


def _saturated(body: Body, x: Value, dtype: np.dtype) -> Value:
    width, bits = body.target.width, 8 * x.dtype.itemsize
    name = f"llvm.fpto{'s' if dtype.kind == 'i' else 'u'}i.sat.v{width}{scalar_type(dtype)}.v{width}f{bits}"
    return Value(body.call(body.type(dtype), name, [(body.type(x.dtype), x.name)]), dtype)


def _convert(body: Body, params: Params, x: Value) -> Value:
    return _converted(body, x, np.dtype(params["new_dtype"]))


def _bitcast(body: Body, params: Params, x: Value) -> Value:
    return body.cast("bitcast", x, np.dtype(params["new_dtype"]))


def _select_n(body: Body, _: Params, which: Value, *cases: Value) -> Value:
    """The case of a bool or of a number, which counts as the nearest that there is."""
    if which.dtype == BOOL:
        return _select(body, which, cases[-1], cases[0])
    at_least = "icmp sge" if which.dtype.kind == "i" else "icmp uge"
    chosen = cases[0]
    for k, case in enumerate(cases[1:], 1):
        chosen = _select(body, _compare(body, at_least, which, body.splat(k, which.dtype)), case, chosen)
    return chosen


def _look_up(body: Body, _: Params, table: Table, index: Value) -> Value:
    """The element of the table nearest to the index."""
    last = body.splat(min(table.length - 1, np.iinfo(index.dtype).max), index.dtype)
    if index.dtype.kind == "i":
        index = _intrinsic(body, "smax", index, body.splat(0, index.dtype))
    place = _converted(body, _intrinsic(body, "smin" if index.dtype.kind == "i" else "umin", index, last), _INT64)
    return body.gather(table, place)


RULES: dict[str, Rule] = {
    **{name: _function(name) for name in llvm_math.FUNCTIONS},
    **{name: _comparison(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "add": (_add := _operation(f="fadd", i="add", u="add")),
    "add_any": _add,
    "sub": _operation(f="fsub", i="sub", u="sub"),
    "mul": _mul,
    "div": _div,
    "rem": _rem,
    "neg": _neg,
    "abs": _abs,
    "sign": _sign,
    "max": _max,
    "min": _min,
    "clamp": _clamp,
    "square": lambda body, params, x: _mul(body, params, x, x),
    "integer_pow": _integer_pow,
    "pow": _pow,
    "product_plus": _intrinsics(f="fma"),
    "product_minus": _product_minus,
    "minus_product": _minus_product,
    "sqrt": _intrinsics(f="sqrt"),
    "floor": _intrinsics(f="floor"),
    "ceil": _intrinsics(f="ceil"),
    "round": _round,
    "is_finite": _is_finite,
    "nextafter": _nextafter,
    "reduce_precision": _reduce_precision,
    **{name: _operation(i=name, u=name, b=name) for name in ("and", "or", "xor")},
    "not": _not,
    "shift_left": functools.partial(_shift, "shl"),
    "shift_right_logical": functools.partial(_shift, "lshr"),
    "shift_right_arithmetic": _shift_right_arithmetic,
    "population_count": _intrinsics(i="ctpop", u="ctpop"),
    "clz": _clz,
    "convert_element_type": _convert,
    "bitcast_convert_type": _bitcast,
    "select_n": _select_n,
    "look_up": _look_up,
}
