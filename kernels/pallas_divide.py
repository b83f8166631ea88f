"""Quotient and square root of doubles in a kernel, from the hardware's approximation and Newton's iteration.

What a compiler makes of them has a call for the cases that are rare. These have neither calls nor branches, and are
within some units in the last place. A denominator that is too small for a normal number counts as zero, one above
2**1022 as infinite.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import triton as plt


def _approximate(instruction: str, x: Any) -> Any:
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    (found,) = plt.elementwise_inline_asm(
        f"{instruction} $0, $1;", args=[x], constraints="=d,d", pack=1, result_shape_dtypes=[shape]
    )
    return found


def reciprocal_seed(x: Any) -> Any:
    """The reciprocal to 20 bits or more."""
    return _approximate("rcp.approx.ftz.f64", x)


def root_seed(x: Any) -> Any:
    """The reciprocal square root to 20 bits or more."""
    return _approximate("rsqrt.approx.ftz.f64", x)


def _finite(x: Any) -> Any:
    return lax.lt(lax.abs(x), lax.full_like(x, math.inf))


def quotient(x: Any, y: Any, seed: Callable[[Any], Any] = reciprocal_seed) -> Any:
    """`x / y`."""
    r = seed(y)
    rough = x * r
    left = lax.full_like(y, 1.0) - y * r
    q = rough + rough * (left + left * left)
    q = q + r * (x - y * q)
    return lax.select(_finite(q), q, rough)


def root(x: Any, seed: Callable[[Any], Any] = root_seed) -> Any:
    """The square root of `x`."""
    half = lax.full_like(x, 0.5)
    r = seed(x)
    s, h = x * r, half * r
    s = s + s * (half - h * s)
    s = s + h * (x - s * s)
    rest = lax.select(lax.lt(x, lax.full_like(x, 0.0)), lax.full_like(x, math.nan), x)
    return lax.select(_finite(s), s, rest)
