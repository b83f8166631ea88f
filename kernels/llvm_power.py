"""The power of a double to a constant exponent of at most 1/2 in size, as step size controllers take it at each step.

Without the branches, tables and extra digits of a general power: a logarithm to base 2, an exponential, and the product
with the exponent of the number taken exactly. Less than 3 ulp.
"""

import math

from gradsolve_backend.kernels.llvm_double import Bits, Double, estrin

LARGEST = 0.5  # exponents up to this keep the exponential of a result within the range of normal numbers

_ROOT_HALF = 0x3FE6A09E667F3BCD  # the bits of the root of 1/2
_MANTISSA = 52
_SMALLEST = 2.0**-1022  # normal
_SHIFT = 1.5 * 2.0**52  # added to a small integer, it leaves it in the low bits
_SHIFT_BITS = 0x4338000000000000

# log2((1 + s) / (1 - s)) / s in powers of s**2, |s| <= 0.172; 2**w in powers of w, |w| <= 0.76
_LOGARITHM = tuple(2 / math.log(2) / (2 * k + 1) for k in range(11))
_EXPONENTIAL = tuple(math.log(2) ** k / math.factorial(k) for k in range(16))


def power(x: Double, exponent: float) -> Double:
    """`x ** exponent`, where 0 < |exponent| <= 1/2."""
    subnormal = x.compare("olt", _SMALLEST)
    bits = subnormal.pick(x * 2.0**54, x).bits()
    count = (bits - _ROOT_HALF) >> _MANTISSA
    mantissa = (bits - (count << _MANTISSA)).double()
    whole = _number(count) - subnormal.pick(54.0, 0.0)
    less = mantissa - 1.0
    s = less / (mantissa + 1.0)
    logarithm = estrin(s * s, _LOGARITHM) * s
    product = whole * exponent
    integer = (product + _SHIFT) - _SHIFT
    # The product itself is not exact, but what is left of it after its integer is.
    left = whole.call("fma", exponent, -integer)
    fraction = logarithm.call("fma", exponent, left)
    scale = ((integer + _SHIFT).bits() << _MANTISSA) + (1023 << _MANTISSA)
    return _special(x, exponent, estrin(fraction, _EXPONENTIAL) * scale.double())


def _number(count: Bits) -> Double:
    """A small integer as a double; a vector conversion of 64 bits is not to be had everywhere."""
    return (count + _SHIFT_BITS).double() - _SHIFT


def _special(x: Double, exponent: float, result: Double) -> Double:
    at_zero, at_infinity = (0.0, math.inf) if exponent > 0 else (math.inf, 0.0)
    result = x.compare("oeq", 0.0).pick(at_zero, result)
    result = x.compare("oeq", math.inf).pick(at_infinity, result)
    return x.compare("uge", 0.0).pick(x.compare("uno", 0.0).pick(x, result), math.nan)
