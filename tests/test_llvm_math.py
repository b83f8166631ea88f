"""Functions in LLVM IR are right to 4 units in the last place, and at special values what the C standard says."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from jax import lax
from llvm_lanes import FLOATS, NATIVE_BITS, VECTOR_MATH, assert_identical, compiled, program_text, target, trace, ulps
from scipy import special

from gradsolve_backend.kernels import llvm_math

DOUBLE, SINGLE = np.dtype(np.float64), np.dtype(np.float32)
LONG = np.finfo(np.longdouble).nmant >= 63
NATIVE = NATIVE_BITS // 64
PATHS = [pytest.param(True, id="vector"), pytest.param(False, id="portable")]

# What numpy offers for the widest float there is.
WIDE: dict[str, Callable] = {
    **{name: getattr(np, name) for name in "exp exp2 expm1 log log1p log2 sin cos tan sinh cosh tanh cbrt".split()},
    **{name: getattr(np, f"arc{name[1:]}") for name in "asin acos atan asinh acosh atanh".split()},
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "rsqrt": lambda x: 1 / np.sqrt(x),
}
SPECIAL: dict[str, Callable] = {
    "erf": special.erf,
    "erfc": special.erfc,
    "erf_inv": special.erfinv,
    "digamma": special.digamma,
    "lgamma": lambda x: np.where(np.abs(x) < 1e-300, -np.log(np.abs(x)), special.gammaln(x)),
}
# Older versions of jax have no log2.
UNARY = {name: oracle for name, oracle in (WIDE | SPECIAL).items() if name in dir(lax)}
# Computed with mpmath to 60 digits.
REFERENCE: dict[str, dict[float, str]] = {
    "erf": {
        5e-324: "5.574933819448522712676e-324",
        1e-300: "1.128379167095512602172e-300",
        1e-09: "1.128379167095512643797e-9",
        0.1: "0.1124629160182848984047",
        0.5: "0.5204998778130465376827",
        0.84375: "0.767225661232341633459",
        0.9: "0.7969082124228321396647",
        1.25: "0.9229001282564582301365",
        2.0: "0.9953222650189527341621",
        3.5: "0.9999992569016276585873",
        5.5: "0.9999999999999926421521",
        5.95: "0.9999999999999999605664",
    },
    "erfc": {
        -6.0: "1.99999999999999997848",
        -1.0: "1.842700792949714869341",
        -1e-20: "1.000000000000000000011",
        1e-09: "0.9999999988716208329045",
        0.3: "0.6713732405408725838104",
        0.5: "0.4795001221869534623173",
        0.84375: "0.232774338767658366541",
        1.2274: "0.08259819124248854516509",
        2.0: "0.004677734981047265837931",
        5.0: "1.537459794428034850188e-12",
        10.0: "2.088487583762544757001e-45",
        20.0: "5.395865611607900928935e-176",
        26.0: "5.663192408856142846476e-296",
    },
    "erf_inv": {
        1e-300: "8.862269254527580358571e-301",
        1e-10: "8.862269254527580459386e-11",
        0.1: "0.08885599049425769197428",
        0.25: "0.225312055012178104725",
        0.4548269128982583: "0.4278058916714372409999",
        0.5: "0.4769362762044698733814",
        0.84: "0.9935356283473041871847",
        0.86: "1.04354184363975883759",
        0.9: "1.163087153676674162844",
        0.99: "1.821386367718449455873",
        0.999: "2.326753765513524493866",
        0.9999999: "3.766562581638470888715",
        0.99999999999: "4.812924058944832544914",
        0.9999999999999999: "5.863584748755167927208",
    },
    "digamma": {
        -100000.25: "14.65452561853606340334",
        -201.75: "2.167912920963274211939",
        -15.99375: "-157.1763032111247368851",
        -1.25: "3.714139120213527830373",
        -0.75: "-2.894120200042932074756",
        1e-300: "-9.999999999999999749409e+299",
        1e-05: "-100000.5771992156728887",
        0.25: "-4.22745353337626540809",
        0.5: "-1.963510026021423479441",
        0.999: "-0.5788618021086454279191",
        1.0: "-0.5772156649015328606065",
        1.25: "-0.2274535333762654080895",
        1.46: "-0.001580561987083452106151",
        1.4616321449683622: "-9.241265521729427516792e-17",
        1.47: "0.008066489011364868442326",
        1.99: "0.4163147060454149508128",
        2.0: "0.4227843350984671393935",
        2.5: "0.7031566406452431872257",
        3.0: "0.9227843350984671393935",
        5.5: "1.611093148581751123734",
        9.999: "2.251647417205735314158",
        10.0: "2.251752589066721107647",
        11.5: "2.398239129535781613368",
        1000.0: "6.90725519564881205205",
        10000000000.0: "23.02585092989045684018",
        1e300: "690.7755278982137052579",
    },
    "lgamma": {
        -20.25: "-41.60096191534052430187",
        -1.75: "1.016088809214435698539",
        -0.5: "1.265512123484645396489",
        1e-300: "690.7755278982137051803",
        1e-05: "11.51291969289582562562",
        0.25: "1.288022524698077457371",
        0.5: "0.5723649429247000870717",
        0.999: "0.0005780385328913802381689",
        1.001: "-0.0005763935982833061515192",
        1.25: "-0.09827183642181316146385",
        1.5: "-0.1207822376352452223455",
        1.999: "-0.0004224618006921072841757",
        2.001: "0.0004231067348001169911903",
        2.5: "0.2846828704729191596325",
        5.5: "3.957813967618716293877",
        7.9: "8.324265868008809634861",
        8.1: "8.727388263432039799011",
        33.3: "82.60372358165494300782",
        1000.0: "5905.220423209181211826",
        10000000000.0: "220258509288.81058147",
        1e300: "6.897755278982137414744e+302",
    },
}


def numbers(dtype: np.dtype) -> np.ndarray:
    """Dense where functions bend, and of all sizes and signs, subnormal ones too."""
    rng, count = np.random.default_rng(0), 4000
    info = np.finfo(dtype)
    low, high = math.log2(float(info.smallest_subnormal)), math.log2(float(info.max))
    sizes = np.exp2(np.concatenate([rng.uniform(low, high, count), rng.uniform(-20, 10, count)]))
    near = [rng.uniform(-1, 1, count), rng.uniform(0, 3, count), 1 + 1e-3 * rng.normal(size=count)]
    wide = [rng.uniform(-110, 110, count), rng.uniform(-760, 760, count)]
    return np.concatenate([sizes, -sizes, *near, *wide]).astype(dtype)


def unary(dtype: np.dtype, width: int, vector_math: bool) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
    """All functions of one number, in one program."""
    closed = trace(lambda x: [getattr(lax, name)(x) for name in UNARY], dtype)
    function = compiled(closed, target(width, vector_math))
    return lambda x: dict(zip(UNARY, function(x), strict=True))


def tolerance(dtype: np.dtype) -> float:
    """Units in the last place; for float32 such that no relative error exceeds 1e-7."""
    return 4 if dtype == DOUBLE else 1e-7 / np.finfo(SINGLE).eps


@pytest.mark.parametrize(
    "dtype", [pytest.param(DOUBLE, marks=pytest.mark.skipif(not LONG, reason="no oracle")), SINGLE]
)
@pytest.mark.parametrize("vector_math", PATHS)
def test_elementary_functions(dtype: np.dtype, vector_math: bool) -> None:
    x = numbers(dtype)
    with np.errstate(all="ignore"):
        wide = x.astype(np.longdouble)
        for name, got in unary(dtype, 2 * NATIVE, vector_math)(x).items():
            errors = ulps(got, WIDE[name](wide)) if name in WIDE else np.zeros(1)
            at = np.argmax(errors)
            assert errors[at] <= tolerance(dtype), (name, x[at], got[at], errors[at])


@pytest.mark.parametrize("width", [1, 2, 16])
def test_registers_of_two_doubles(width: int) -> None:
    x = np.array([0.25, -1.5, 700.0, -700.0, 5e-324, 1e300, 30.0, 3.0] * 4)
    closed = trace(lambda x: [lax.exp(x), lax.sin(x), lax.atan2(x, x + 1)], DOUBLE)
    exp, sin, atan2 = compiled(closed, target(width, native_bits=128))(x)
    with np.errstate(over="ignore"):
        wants = np.exp(x), np.sin(x), np.arctan2(x, x + 1)
    for got, want in zip((exp, sin, atan2), wants, strict=True):
        assert ulps(got, want).max() <= 4


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("vector_math", PATHS)
@pytest.mark.parametrize("name", REFERENCE)
def test_special_functions_at_reference_values(name: str, vector_math: bool, dtype: np.dtype) -> None:
    with np.errstate(over="ignore"):
        points = [p for p in REFERENCE[name] if float(dtype.type(p)) == p]
    wants = [np.longdouble(REFERENCE[name][p]) for p in points]
    (got,) = compiled(trace(getattr(lax, name), dtype), target(NATIVE, vector_math))(np.array(points, dtype))
    assert points and ulps(got, wants).max() <= tolerance(dtype)


@pytest.mark.parametrize("vector_math", PATHS)
def test_special_functions_between(vector_math: bool) -> None:
    """Against scipy, which is itself some units off, and more in erfc's tail and near digamma's poles."""
    x = numbers(DOUBLE)
    x = x[(np.abs(x) > 1e-300) & ((x > 0) | (np.abs(x - np.rint(x)) > 1e-3))]
    results = unary(DOUBLE, NATIVE, vector_math)(x)
    for name, oracle in SPECIAL.items():
        want = oracle(x)
        # zeros lie between the poles of negative numbers, and at some positive numbers
        atol = np.where(x < 0, 1e-13 * (1 + 1e-3 * np.abs(x)), 1e-15) if name in ("digamma", "lgamma") else 1e-307
        rtol = np.where((name == "erfc") | (name == "digamma") & (x < 0), 1e-13, 2e-15)
        special_value = (results[name] == want) | np.isnan(want) & np.isnan(results[name])
        with np.errstate(invalid="ignore"):
            close = np.abs(results[name] - want) <= atol + rtol * np.abs(want)
        wrong = np.flatnonzero(~(special_value | close))
        assert not wrong.size, (name, x[wrong[:4]], results[name][wrong[:4]], want[wrong[:4]])


def test_digamma_of_negative_numbers_in_float32() -> None:
    x = -np.random.default_rng(3).uniform(0, 30, 2000).astype(np.float32)
    (got,) = compiled(trace(lax.digamma, SINGLE), target(8))(x)
    assert ulps(got, special.digamma(x.astype(float))).max() <= 0.6


EDGES = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 2.0, -2.0, 0.5, -1.5, 3.0, -3.0]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("vector_math", PATHS)
@pytest.mark.parametrize("width", [1, NATIVE, 2 * NATIVE])
def test_values_at_the_edges(width: int, vector_math: bool, dtype: np.dtype) -> None:
    x = np.array(EDGES, dtype)
    exact = lambda y: ~np.isfinite(y) | (y == np.rint(y))
    with np.errstate(all="ignore"):
        for name, got in unary(dtype, width, vector_math)(x).items():
            want = UNARY[name](x.astype(float))
            if name == "lgamma":
                want[3] = np.inf  # as C has it
            if name == "erf_inv":
                want[:2] = x[:2]  # scipy drops the sign of zero
            if name == "digamma":
                want[:2], want[3] = -np.inf, np.nan  # as XLA has it, where scipy looks at the sign of zero
            assert_identical(got[exact(want)], want[exact(want)], name)
            assert ulps(got, want.astype(dtype)).max() <= 4, name


TINY = [5e-324, -5e-324, 1e-310, -1e-310, 2.3e-308, -2.3e-308]
HUGE = [1.7976931348623157e308, -1.7976931348623157e308, 1e300, -1e300, 709.78, 709.79, -745.1, -745.2, -708.5, 1e22]


@pytest.mark.skipif(not LONG, reason="no oracle")
@pytest.mark.parametrize("vector_math", PATHS)
def test_tiny_and_huge(vector_math: bool) -> None:
    x = np.array(TINY + HUGE)
    with np.errstate(all="ignore"):
        for name, got in unary(DOUBLE, NATIVE, vector_math)(x).items():
            want = WIDE[name](x.astype(np.longdouble)) if name in WIDE else SPECIAL[name](x)
            want = np.where((name == "digamma") & (x < -1e16), np.nan, want)  # only poles are left there
            assert ulps(got, want).max() <= 4, (name, ulps(got, want))


BINARY = {"pow": (lax.pow, np.power), "atan2": (lax.atan2, np.arctan2), "rem": (lax.rem, np.fmod)}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("vector_math", PATHS)
@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_numbers(name: str, vector_math: bool, dtype: np.dtype) -> None:
    function, oracle = BINARY[name]
    edges = [a.reshape(-1) for a in np.meshgrid(np.array(EDGES, dtype), np.array(EDGES, dtype))]
    run = compiled(trace(function, dtype, dtype), target(2 * NATIVE, vector_math))
    with np.errstate(all="ignore"):
        want = oracle(*(edge.astype(float) for edge in edges)).astype(dtype)
        (got,) = run(*edges)
        assert ulps(got, want).max() <= tolerance(dtype)
        zero = want == 0
        np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(want[zero]))
        x = numbers(dtype)
        y = np.random.default_rng(1).permutation(x)
        (got,) = run(x, y)
        if dtype == SINGLE or LONG:
            assert ulps(got, oracle(x.astype(np.longdouble), y.astype(np.longdouble))).max() <= tolerance(dtype)


def test_power_with_an_integer() -> None:
    x, n = np.array([2.0, -2.0, 0.0, 3.0]), np.array([3, 3, -1, -2], np.int32)
    (got,) = compiled(trace(lax.pow, DOUBLE, np.int32), target(4))(x, n)
    np.testing.assert_allclose(got, [8.0, -8.0, np.inf, 1 / 9], rtol=4e-16)


@pytest.mark.parametrize("vector_math", PATHS)
def test_lanes_do_not_see_each_other(vector_math: bool) -> None:
    """A lane that takes the slow way of a function leaves its neighbours as they were."""
    x = np.random.default_rng(4).normal(size=64)
    mixed = np.where(np.arange(64) % 3, x, np.resize([np.nan, np.inf, 1e300, 5e-324, -800.0], 64))
    function = unary(DOUBLE, NATIVE, vector_math)
    plain, disturbed = function(x), function(mixed)
    for name in UNARY:
        kept = np.arange(64) % 3 > 0
        np.testing.assert_array_equal(plain[name][kept], disturbed[name][kept])


@pytest.mark.parametrize("vector_math", PATHS)
def test_every_function_that_is_called_has_an_address(vector_math: bool) -> None:
    names = [*UNARY, *BINARY]
    closed = trace(lambda x: [getattr(lax, n)(*[x] * (2 if n in BINARY else 1)) for n in names], DOUBLE)
    text = program_text(closed, target(2 * NATIVE, vector_math))
    called = {name for name in re.findall(r"declare [^@]*@([\w.]+)", text) if not name.startswith("llvm.")}
    assert called and called <= llvm_math.symbols().keys()
    assert any(name.startswith("_ZGV") for name in called) == (vector_math and VECTOR_MATH)
    assert set(names) | {"log2"} == llvm_math.FUNCTIONS


def test_a_long_function_is_written_once() -> None:
    def function(x: Any, y: Any) -> Any:
        return lax.digamma(x) + lax.digamma(y) + lax.erf_inv(x) * lax.erf_inv(y)

    text = program_text(trace(function, DOUBLE, DOUBLE), target(4))
    assert text.count("define internal") == 2
