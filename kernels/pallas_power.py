"""The power of a double to a constant exponent of at most 1/2 in size, as step size controllers take it at each step.

Without the branches, tables and extra digits of a general power: a logarithm to base 2 and an exponential, on the
exponent and the mantissa of the number apart. Some units in the last place. The constant exponent is split so that its
product with that of the number is exact with or without fused multiply-adds.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

LARGEST = 0.5  # exponents up to this keep the exponential of a result within the range of normal numbers

_ROOT_HALF = 0x3FE6A09E667F3BCD  # the bits of the root of 1/2
_MANTISSA = 52
_SMALLEST = 2.0**-1022  # normal
_SHIFT = 1.5 * 2.0**52  # added to a small integer, it leaves it in the low bits

# log2((1 + s) / (1 - s)) / s in powers of s**2, |s| <= 0.172; 2**w in powers of w, |w| <= 1/2
_LOGARITHM = tuple(2 / math.log(2) / (2 * k + 1) for k in range(10))
_EXPONENTIAL = tuple(math.log(2) ** k / math.factorial(k) for k in range(14))


def takes_power(x: Any, exponent: Any) -> bool:
    """Whether `power` is for this base and exponent, which is None if it is not constant."""
    return exponent is not None and getattr(x, "dtype", None) == np.float64 and 0 < abs(float(exponent)) <= LARGEST


def power(x: Any, exponent: float, divide: Any = lax.div) -> Any:
    """`x ** exponent`, where 0 < |exponent| <= 1/2."""
    like = lambda value: lax.full_like(x, value)  # noqa: E731
    long = lambda value: lax.full(x.shape, value, jnp.int64)  # noqa: E731
    subnormal = lax.lt(x, like(_SMALLEST))
    bits = lax.bitcast_convert_type(lax.select(subnormal, x * like(2.0**54), x), jnp.int64)
    count = lax.shift_right_arithmetic(bits - long(_ROOT_HALF), long(_MANTISSA))
    mantissa = lax.bitcast_convert_type(bits - lax.shift_left(count, long(_MANTISSA)), jnp.float64)
    whole = count.astype(jnp.int32).astype(jnp.float64) - lax.select(subnormal, like(54.0), like(0.0))
    s = divide(mantissa - like(1.0), mantissa + like(1.0))
    logarithm = polynomial(s * s, _LOGARITHM) * s
    high = float(np.float32(exponent))
    # The number of the nearest integer is in the low bits. Older versions of XLA take x + c - c for x.
    part = logarithm * like(exponent)
    nearest = lax.bitcast_convert_type((whole * like(exponent) + part) + like(_SHIFT), jnp.int64).astype(jnp.int32)
    integer = nearest.astype(jnp.float64)
    fraction = part + (whole * like(exponent - high) + (whole * like(high) - integer))
    scale = lax.shift_left(nearest.astype(jnp.int64) + long(1023), long(_MANTISSA))
    scale = lax.bitcast_convert_type(scale, jnp.float64)
    return _special(x, exponent, polynomial(fraction, _EXPONENTIAL) * scale)


def _special(x: Any, exponent: float, result: Any) -> Any:
    like = lambda value: lax.full_like(x, value)  # noqa: E731
    at_zero, at_infinity = (0.0, math.inf) if exponent > 0 else (math.inf, 0.0)
    result = lax.select(lax.eq(x, like(0.0)), like(at_zero), result)
    result = lax.select(lax.ge(x, like(0.0)), result, lax.select(lax.ne(x, x), x, like(math.nan)))
    return lax.select(lax.eq(lax.abs(x), like(math.inf)), like(at_infinity), result)


def polynomial(x: Any, coefficients: Sequence[float]) -> Any:
    """From the last coefficient to the constant term, which is first: short of registers rather than of time."""
    total = lax.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * x + lax.full_like(x, c)
    return total
