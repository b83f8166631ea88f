"""Operations inside kernels of `pallas`: XLA's meaning on a CPU, and a form on a GPU for each that is promised."""

import inspect
from collections.abc import Callable
from typing import Any

import aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from gradsolve_backend.kernels import pallas_forms, pallas_ops
from gradsolve_backend.kernels.pallas_divide import quotient, root
from gradsolve_backend.kernels.pallas_power import power
from gradsolve_backend.kernels.scalar import scalarise

SPECIAL = np.array([0.0, -0.0, 1.0, -1.5, 2.5, 3.5, -0.49999999999999994, np.inf, -np.inf, np.nan, 1e300, 7.25])
LEFT, RIGHT = (x.reshape(-1) for x in np.meshgrid(SPECIAL, SPECIAL))
INTEGERS = np.array([-9, -1, 0, 1, 5, 40], np.int32)


def ran(function: Callable, *arrays: np.ndarray) -> list[Any]:
    """The outputs of a scalar function, evaluated as in a kernel."""
    closed = scalarise(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct((), x.dtype) for x in arrays))).jaxpr
    evaluation = pallas_ops.Evaluation(closed.jaxpr, len(arrays[0]))
    evaluation.give(dict(zip(closed.jaxpr.invars, map(jnp.asarray, arrays), strict=True)))
    return [evaluation.read(v) for v in closed.jaxpr.outvars]


def same(function: Callable, *arrays: np.ndarray) -> None:
    """Equal to XLA's results to the bit of a zero's sign."""
    for found, wanted in zip(ran(function, *arrays), function(*map(jnp.asarray, arrays)), strict=True):
        np.testing.assert_array_equal(found, wanted)
        if wanted.dtype.kind == "f":
            number = ~np.isnan(wanted)
            np.testing.assert_array_equal(np.signbit(found)[number], np.signbit(wanted)[number])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numbers_that_are_special(dtype):
    """What Triton's own rules treat otherwise: NaN, signs of zeros, halves."""
    x, y = LEFT.astype(dtype), RIGHT.astype(dtype)
    same(lambda x, y: [-x, lax.sign(x), jnp.isfinite(x), lax.integer_pow(x, 3), lax.square(y)], x, y)
    same(lambda x, y: [lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN), lax.round(y)], x, y)
    same(lambda x, y: [lax.select(x < y, y, x), lax.clamp(jnp.asarray(-1.0, dtype), x, jnp.asarray(2.0, dtype))], x, y)
    for choose in (lax.max, lax.min):
        (found,), wanted = ran(lambda x, y, f=choose: [f(x, y)], x, y), choose(jnp.asarray(x), jnp.asarray(y))
        np.testing.assert_array_equal(found, wanted)


def test_remainders():
    """Of floats, to rounding of the quotient; of integers exactly."""
    x, y = (v[~np.isin(v, [1e300])] for v in (LEFT, RIGHT))
    x, y = np.resize(x, 100), np.resize(y, 100)
    np.testing.assert_allclose(
        ran(lambda x, y: [lax.rem(x, y)], x, y)[0], lax.rem(jnp.asarray(x), jnp.asarray(y)), atol=1e-15
    )
    times = np.linspace(-40.0, 40.0, 1001)
    found, wanted = ran(lambda t: [jnp.mod(t, 0.7)], times)[0], np.mod(times, 0.7)
    near = np.minimum(np.abs(found - wanted), 0.7 - np.abs(found - wanted))
    assert np.max(near) < 1e-13 and np.all((found >= 0) & (found < 0.7 + 1e-13))


def test_integers():
    """Shifts by more than there are bits, conversions out of range, a choice among several."""
    x, by = (v.reshape(-1) for v in np.meshgrid(INTEGERS, INTEGERS))
    shifts = (lax.shift_left, lax.shift_right_logical, lax.shift_right_arithmetic)
    same(lambda x, by: [shift(x, by) for shift in shifts], x, by)
    same(lambda x: [x.astype(jnp.int32), x.astype(jnp.bool_)], SPECIAL[np.abs(SPECIAL) < 1e9])
    np.testing.assert_array_equal(
        ran(lambda x: [x.astype(jnp.int32)], np.array([np.nan, 1e300, -np.inf]))[0], [0, 2**31 - 1, -(2**31)]
    )
    (found,) = ran(lambda x: [lax.switch(x, [lambda: 1.0, lambda: 2.0, lambda: 3.0])], INTEGERS)
    np.testing.assert_array_equal(found, [1, 1, 1, 2, 3, 3])


# ---- arithmetic from the hardware's approximations ---------------------------------------------------------


def seeded(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[Any], Any]:
    """An approximation as of a GPU: 20 bits; what is no normal number is zero."""

    def seed(x: Any) -> Any:
        with np.errstate(all="ignore"):
            x = np.where(np.abs(x) < 2.0**-1022, np.copysign(0.0, x), x)
            exact = function(x)
            mantissa, exponent = np.frexp(exact)
            rounded = np.ldexp(np.round(mantissa * 2**20) / 2**20, exponent)
        return jnp.asarray(np.where(np.isfinite(exact), rounded, exact))

    return seed


def test_quotients_and_roots():
    """Within two units in the last place over the range of doubles; zero, infinity and NaN as they should be."""
    draw = np.random.default_rng(0)
    x, y = (10.0 ** draw.uniform(-140, 140, 20_000) * draw.choice([-1, 1], 20_000) for _ in range(2))
    found = quotient(jnp.asarray(x), jnp.asarray(y), seeded(lambda v: 1 / v))
    np.testing.assert_allclose(found, x / y, rtol=2.0**-51)
    found = root(jnp.asarray(np.abs(x)), seeded(lambda v: 1 / np.sqrt(v)))
    np.testing.assert_allclose(found, np.sqrt(np.abs(x)), rtol=2.0**-51)
    with np.errstate(all="ignore"):
        keep = (np.abs(RIGHT) < 2.0**1022) | np.isinf(RIGHT)
        found = quotient(jnp.asarray(LEFT), jnp.asarray(RIGHT), seeded(lambda v: 1 / v))
        np.testing.assert_allclose(np.asarray(found)[keep], (LEFT / RIGHT)[keep], rtol=1e-15)
        found = root(jnp.asarray(SPECIAL), seeded(lambda v: 1 / np.sqrt(v)))
        np.testing.assert_allclose(found, np.sqrt(SPECIAL), rtol=1e-15)


@pytest.mark.parametrize("exponent", [0.2, 0.49, -1 / 3, 1 / 9])
def test_powers(exponent):
    """Of a step size controller, also compiled: older XLA takes x + c - c for x."""
    x = np.concatenate([10.0 ** np.random.default_rng(1).uniform(-300, 300, 20_000), SPECIAL])
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(jax.jit(lambda x: power(x, exponent))(x), x**exponent, rtol=1e-15)


# ---- forms on a GPU ----------------------------------------------------------------------------------------


def on_gpu(function: Callable, *avals: Any) -> None:
    """Lower a kernel that applies a scalar function."""
    closed = scalarise(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct((), a.dtype) for a in avals))).jaxpr

    def kernel(*refs: Any) -> None:
        evaluation = pallas_ops.Evaluation(closed.jaxpr, 32, native=True)
        evaluation.give({v: ref[...] for v, ref in zip(closed.jaxpr.invars, refs, strict=False)})
        for v, ref in zip(closed.jaxpr.outvars, refs[len(avals) :], strict=True):
            ref[...] = evaluation.read(v).astype(ref.dtype)

    out = [jax.ShapeDtypeStruct((32,), "int32" if v.aval.dtype == bool else v.aval.dtype) for v in closed.jaxpr.outvars]
    aot.lowered(lambda *x: pl.pallas_call(kernel, out_shape=out, compiler_params=plt.CompilerParams())(*x), *avals)


def _named(name: str) -> Callable:
    others = {"and": lax.bitwise_and, "or": lax.bitwise_or, "not": lax.bitwise_not, "xor": lax.bitwise_xor}
    return others.get(name) or getattr(lax, name, None) or (lambda x: jnp.log2(x))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_each_primitive_lowers_for_a_gpu(dtype):
    """Those that are said to have a form there."""
    x, n = jax.ShapeDtypeStruct((32,), dtype), jax.ShapeDtypeStruct((32,), "int32")
    integer = {"and", "or", "not", "xor", "shift_left", "shift_right_logical", "shift_right_arithmetic"}
    special = {"add_any", "bitcast_convert_type", "clamp", "convert_element_type", "integer_pow", "round", "select_n"}
    for name in sorted((pallas_forms.PLAIN | pallas_forms.REWRITTEN) - special):
        function = _named(name)
        count = sum(p.default is p.empty for p in inspect.signature(function).parameters.values())
        on_gpu(lambda *a, f=function: [f(*a)], *[n if name in integer else x] * count)
    on_gpu(
        lambda x: [lax.clamp(jnp.asarray(0, dtype), x, jnp.asarray(1, dtype)), lax.round(x), lax.integer_pow(x, -3)], x
    )
    on_gpu(lambda x: [x.astype(t) for t in ("int32", "int64", "uint32", "float32", "float64", "bool")], x)
    on_gpu(lambda x, n: [lax.bitcast_convert_type(n, jnp.float32), lax.select(n > 0, x, -x), lax.pow(x, n)], x, n)


def test_what_has_no_form_says_so():
    x, half = jax.ShapeDtypeStruct((), "float64"), jax.ShapeDtypeStruct((), "float16")
    reason = lambda f, a: pallas_forms.unsupported(scalarise(jax.make_jaxpr(f)(a)))
    assert "`erf`" in reason(lax.erf, x) and "float16" in reason(lambda x: x + x, half)
    assert reason(jnp.sin, x) == ""
    assert "room for" in pallas_forms.unsupported(scalarise(jax.make_jaxpr(lambda x: jnp.sin(x) + x)(x)), 1)
