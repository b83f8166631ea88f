"""Elementary and special functions of vectors in LLVM IR, to 4 units in the last place.

Where the target has glibc's libmvec, wide vectors are cut into registers and narrow ones filled up to one, so that a
number has the same function value at every width. Elsewhere each lane calls the C library. float32 is computed in
float64, because the float32 functions of both libraries are wrong by up to 4 units in the last place, 3e-7.
"""

import ctypes
import ctypes.util
import functools
import math
import platform
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

from gradsolve_backend.kernels.llvm_double import DOUBLE, Double
from gradsolve_backend.kernels.llvm_ir import Body, Value

__all__ = ["FUNCTIONS", "apply", "symbols"]

# names as JAX has them; all but those below are the C library's
_UNARY = """
acos acosh asin asinh atan atanh cbrt cos cosh erf erfc exp exp2 expm1 lgamma log log1p log2 sin sinh tan tanh
""".split()
_BINARY = {"atan2": "atan2", "pow": "pow", "rem": "fmod"}
_C_NAMES = {name: name for name in _UNARY} | _BINARY

# what LLVM may call for instructions that a machine lacks
_ROUNDING = [f"{name}{suffix}" for name in ("ceil", "floor", "nearbyint", "round", "trunc") for suffix in ("", "f")]


# ---- the libraries ---------------------------------------------------------------------------------


@functools.cache
def symbols() -> dict[str, int]:
    """Addresses of all functions that the code may call, by the names it calls them by."""
    found = _addresses(_c_library(), [*_C_NAMES.values(), *_ROUNDING])
    if sys.platform == "linux":
        variants = [_vector_name(c_name, bits) for c_name in _C_NAMES.values() for bits in (128, 256, 512)]
        found |= _addresses(_library("libmvec.so.1"), variants)
    return found


def _c_library() -> Any:
    if sys.platform == "win32":
        return _library("ucrtbase")
    return _library("libm.so.6" if sys.platform == "linux" else ctypes.util.find_library("m"))


def _library(name: str | None) -> Any:
    """A library, or the process itself where the library is part of another."""
    try:
        return ctypes.CDLL(name)
    except OSError:
        return ctypes.CDLL(None)


def _addresses(library: Any, names: Sequence[str]) -> dict[str, int]:
    functions = {name: getattr(library, name, None) for name in names}
    addresses = {name: ctypes.cast(f, ctypes.c_void_p).value for name, f in functions.items() if f is not None}
    return {name: address for name, address in addresses.items() if address is not None}


def _vector_name(c_name: str, bits: int) -> str:
    """The name in libmvec, by the vector function ABI of the machine, of a function of double vectors."""
    letter = "n" if platform.machine() in ("aarch64", "arm64") else {128: "b", 256: "d", 512: "e"}[bits]
    return f"_ZGV{letter}N{bits // 64}{'vv' if c_name in _BINARY.values() else 'v'}_{c_name}"


# ---- calls -----------------------------------------------------------------------------------------


def apply(body: Body, name: str, *operands: Value) -> Value:
    """The function `name`, one of `FUNCTIONS`, of float vectors."""
    dtype = operands[0].dtype
    if dtype != DOUBLE:
        wide = apply(body, name, *(body.cast("fpext", operand, DOUBLE) for operand in operands))
        return body.cast("fptrunc", wide, dtype)
    names = [operand.name for operand in operands]
    if name in _SHORT:
        return Value(_SHORT[name](Double(body, names[0])).name, dtype)
    if name in _LONG:
        return Value(_own_function(body, name, names, lambda inner, xs: _LONG[name](Double(inner, xs[0])).name), dtype)
    c_name = _C_NAMES[name]
    vector_name = _vector_name(c_name, body.target.native_bits)
    if body.target.vector_math and vector_name in symbols():
        return Value(_by_register(body, vector_name, names), dtype)
    return Value(_by_lane(body, c_name, names), dtype)


def _by_register(body: Body, function: str, operands: Sequence[str]) -> str:
    """Call a function of register-sized vectors as often as the vector needs."""
    lanes = body.target.native_bits // 64
    width = body.target.width
    starts = range(0, width, lanes)
    kind = f"<{lanes} x double>"
    if width == lanes:
        return body.call(kind, function, [(kind, name) for name in operands])
    # a narrow vector is filled up with its last lane: other numbers might take the slow way of the function
    places = [[min(start + k, width - 1) for k in range(lanes)] for start in starts]
    results = []
    for place in places:
        pieces = [_shuffle(body, width, name, "poison", place) for name in operands]
        results.append(body.call(kind, function, [(kind, piece) for piece in pieces]))
    return _joined(body, results, lanes)


def _shuffle(body: Body, width: int, left: str, right: str, places: Sequence[int]) -> str:
    kind = f"<{width} x double>"
    mask = ", ".join(f"i32 {place}" for place in places)
    return body.emit(f"shufflevector {kind} {left}, {kind} {right}, <{len(places)} x i32> <{mask}>")


def _joined(body: Body, pieces: Sequence[str], lanes: int) -> str:
    """One vector of equal pieces, whose number is a power of two; a single piece is cut to the width."""
    if len(pieces) == 1:
        width = body.target.width
        return pieces[0] if width == lanes else _shuffle(body, lanes, pieces[0], "poison", range(width))
    pairs = zip(pieces[::2], pieces[1::2], strict=True)
    return _joined(body, [_shuffle(body, lanes, a, b, range(2 * lanes)) for a, b in pairs], 2 * lanes)


def _by_lane(body: Body, function: str, operands: Sequence[str]) -> str:
    """Call a function of one double for each lane, in a function of its own because that is long."""
    return _own_function(body, f"lanes.{function}", operands, functools.partial(_write_lanes, function))


def _own_function(body: Body, stem: str, operands: Sequence[str], write: Callable[[Body, list[str]], str]) -> str:
    """Call a function of double vectors that the module defines once; `write` gives the name of its result."""
    kind = body.type(DOUBLE)
    name = f"{stem}.{body.target.width}"
    arguments = [f"%x{k}" for k in range(len(operands))]

    def define() -> None:
        parameters = ", ".join(f"{kind} {argument}" for argument in arguments)
        inner = Body(body.module, body.target, f"internal {kind} @{name}({parameters})")
        inner.line(f"ret {kind} {write(inner, arguments)}")
        inner.close()

    body.module.once(name, define)
    return body.emit(f"call {kind} @{name}({', '.join(f'{kind} {operand}' for operand in operands)})")


def _write_lanes(function: str, body: Body, operands: list[str]) -> str:
    # nobuiltin: LLVM must not know better than the library for some operands
    body.module.declare(f"double @{function}({', '.join(['double'] * len(operands))}) nobuiltin")
    kind, result = body.type(DOUBLE), "poison"
    for k in range(body.target.width):
        lanes = [body.emit(f"extractelement {kind} {name}, i64 {k}") for name in operands]
        value = body.emit(f"call double @{function}({', '.join(f'double {lane}' for lane in lanes)})")
        result = body.emit(f"insertelement {kind} {result}, double {value}, i64 {k}")
    return result


# ---- functions that the libraries lack -------------------------------------------------------------


def _of(name: str, x: Double) -> Double:
    """A function of `FUNCTIONS`."""
    return Double(x.body, apply(x.body, name, Value(x.name, DOUBLE)).name)


def _polynomial(x: Double, coefficients: Sequence[float]) -> Double:
    """By Horner's rule; the constant term comes first."""
    total = x * coefficients[-1] + coefficients[-2]
    for coefficient in coefficients[-3::-1]:
        total = total.call("fma", x, coefficient) if x.body.target.fma else total * x + coefficient
    return total


def _rsqrt(x: Double) -> Double:
    return 1.0 / x.call("sqrt")


def _logistic(x: Double) -> Double:
    small = _of("exp", -x.call("fabs"))  # cannot overflow
    return x.compare("olt", 0.0).pick(small, 1.0) / (small + 1.0)


_Tables: TypeAlias = tuple[Sequence[float], Sequence[float]]  # numerator and denominator, constant terms first

# M. J. Wichura, "Algorithm AS 241: the percentage points of the normal distribution", Applied Statistics 37 (1988)
# 477-484, doi:10.2307/2347330: numerators and denominators near the median, and in the near and the far tail.
_CENTRE = (
    (
        3.3871328727963666080, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
        4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3,
    ),
    (
        1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3, 2.1213794301586595867e4,
        3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3,
    ),
)  # fmt: skip
_NEAR_TAIL = (
    (
        1.42343711074968357734, 4.63033784615654529590, 5.76949722146069140550, 3.64784832476320460504,
        1.27045825245236838258, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4,
    ),
    (
        1.0, 2.05319162663775882187, 1.67638483018380384940, 6.89767334985100004550e-1, 1.48103976427480074590e-1,
        1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9,
    ),
)  # fmt: skip
_FAR_TAIL = (
    (
        6.65790464350110377720, 5.46378491116411436990, 1.78482653991729133580, 2.96560571828504891230e-1,
        2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7,
    ),
    (
        1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
        7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15,
    ),
)  # fmt: skip


_SQRT_HALF = Fraction("0.70710678118654752440084436210485")


def _less(tables: _Tables, scale: Fraction, line: tuple[Fraction, Fraction]) -> _Tables:
    """The rational function `scale` times the given one, less `line[0] + line[1] * x`.

    A small correction of something exact keeps the rounding errors of two polynomials and a division small.
    """
    numerator, denominator = tables
    exact = [scale * Fraction(c) for c in numerator] + [Fraction(0)]
    for power, factor in enumerate(line):
        for k, c in enumerate(denominator):
            exact[k + power] -= factor * Fraction(c)
    return tuple(float(c) for c in exact), denominator


_SHARE = Fraction(3, 4)  # of the result in the tails: about this times the root of the logarithm
_CENTRE_LESS = _less(_CENTRE, _SQRT_HALF / 2, (Fraction(1), Fraction(0)))
_NEAR_TAIL_LESS = _less(_NEAR_TAIL, _SQRT_HALF, (_SHARE * Fraction(1.6), _SHARE))
_FAR_TAIL_LESS = _less(_FAR_TAIL, _SQRT_HALF, (_SHARE * 5, _SHARE))


def _ratio(x: Double, tables: _Tables) -> Double:
    numerator, denominator = tables
    return _polynomial(x, numerator) / _polynomial(x, denominator)


def _erf_inv(x: Double) -> Double:
    """By the quantile of the normal distribution at (1 + x) / 2."""
    size = x.call("fabs")
    half = size * 0.5
    centre = size + size * _ratio(0.180625 - half * half, _CENTRE_LESS)
    depth = (-_of("log", (1.0 - size) * 0.5)).call("sqrt")
    near, far = _ratio(depth - 1.6, _NEAR_TAIL_LESS), _ratio(depth - 5.0, _FAR_TAIL_LESS)
    tail = depth * float(_SHARE) + depth.compare("ole", 5.0).pick(near, far)
    tail = size.compare("oeq", 1.0).pick(math.inf, tail)
    return size.compare("ole", 0.85).pick(centre, tail).call("copysign", x)


# Between 1 and 2 digamma(x) is (x - zero) * (_SLOPE + P(x - 1) / Q(x - 1)), with its zero in three parts: J. Maddock
# and others, Boost.Math, boost/math/special_functions/digamma.hpp.
_ZERO = (1569415565 / 2.0**30, 381566830 / 2.0**60, 0.9016312093258695918615325266959189453125e-19)
_SLOPE = 0.99558162689208984375
_NEAR_ZERO = (
    (
        0.25479851061131551, -0.32555031186804491, -0.65031853770896507, -0.28919126444774784, -0.045251321448739056,
        -0.0020713321167745952,
    ),
    (
        1.0, 2.0767117023730469, 1.4606242909763515, 0.43593529692665969, 0.054151797245674225, 0.0021284987017821144,
        -0.55789841321675513e-6,
    ),
)  # fmt: skip
# B(2k) / 2k with the Bernoulli numbers B
_BERNOULLI = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12, -3617 / 8160)


def _digamma(x: Double) -> Double:
    """By the asymptotic series from 10 on, by recurrence below, and by reflection for negative numbers."""
    negative = x.compare("olt", 0.0)
    positive = negative.pick(1.0 - x, x.call("fabs"))
    value = positive.compare("oge", 10.0).pick(_digamma_large(positive), _digamma_small(positive))
    distance = x - x.call("nearbyint")  # from the nearest pole; exact
    tangent = _of("tan", distance.compare("oeq", 0.0).pick(math.nan, distance) * math.pi)
    return negative.pick(value - math.pi / tangent, value)


def _digamma_large(x: Double) -> Double:
    x = x - 1.0
    inverse = 1.0 / (x * x)
    return _of("log", x) + 0.5 / x - inverse * _polynomial(inverse, _BERNOULLI)


def _digamma_small(x: Double) -> Double:
    low = x.compare("olt", 1.0)
    total, x = low.pick(-1.0 / x, 0.0), low.pick(x + 1.0, x)
    for _ in range(8):
        above = x.compare("ogt", 2.0)
        x = above.pick(x - 1.0, x)
        total = total + above.pick(1.0 / x, 0.0)
    distance = x - _ZERO[0] - _ZERO[1] - _ZERO[2]
    return distance * _SLOPE + distance * _ratio(x - 1.0, _NEAR_ZERO) + total


_SHORT: dict[str, Callable[[Double], Double]] = {"rsqrt": _rsqrt, "logistic": _logistic}
_LONG: dict[str, Callable[[Double], Double]] = {"digamma": _digamma, "erf_inv": _erf_inv}
FUNCTIONS = frozenset({*_C_NAMES, *_SHORT, *_LONG})
