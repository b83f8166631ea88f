"""The power to a constant exponent: against more digits, and at the special values of IEEE."""

import numpy as np
import pytest
from jax import lax
from llvm_lanes import compiled, target, trace, ulps

EXPONENTS = [0.2, -0.2, 0.5, 0.125, 1 / 3, -0.04, 0.3 / 5, 1e-3, -0.5]


def power(x: np.ndarray, exponent: float, width: int) -> np.ndarray:
    return compiled(trace(lambda x: lax.pow(x, np.float64(exponent)), np.float64), target(width))(x)[0]


def numbers() -> np.ndarray:
    random = np.random.default_rng(0)
    ends = [5e-324, 2.2e-308, 2.0**-1022, np.finfo(float).max, 1.0, np.nextafter(1, 0), np.nextafter(1, 2), 0.5, 2.0]
    return np.concatenate([2.0 ** random.uniform(-1074, 1023, 30000), 1 + random.uniform(-0.5, 1, 30000), ends])


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 60, reason="numpy has no more digits here than a double")
def test_is_right_to_three_units_in_the_last_place(exponent):
    x = numbers()
    assert ulps(power(x, exponent, 4), x.astype(np.longdouble) ** np.longdouble(exponent)).max() < 3


@pytest.mark.parametrize("exponent", [0.2, -0.2])
@pytest.mark.parametrize("width", [1, 8])
def test_special_values(exponent, width):
    found = power(np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -1.0, 1.0]), exponent, width)
    ends = (0.0, np.inf) if exponent > 0 else (np.inf, 0.0)
    np.testing.assert_array_equal(found, [ends[0], ends[0], ends[1], np.nan, np.nan, np.nan, 1.0])
