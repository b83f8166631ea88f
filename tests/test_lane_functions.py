"""Small parts below the sweeps: which outputs a derivative reaches, where values are stored, axes of lanes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradsolve_backend.kernels import cuts, lanes
from gradsolve_backend.kernels.perturb import reached_in_loop, reached_outputs
from gradsolve_backend.kernels.trace import Operands, trace

ONE = jax.ShapeDtypeStruct((), jnp.float64)
COUNT = jax.ShapeDtypeStruct((), jnp.int64)

REACHED = {
    "plain": (lambda x, y: [x * 2.0, y + 1.0], [True, False]),
    "both": (lambda x, y: [x * y, y], [True, False]),
    "stopped": (lambda x, y: [jax.lax.stop_gradient(x) + y, x], [False, True]),
    "compared": (lambda x, y: [jnp.where(x > 0.0, y, 2.0 * y), x], [False, True]),
    "counted": (lambda x, y: [jnp.floor(x).astype(int), x], [False, True]),
    "inside a call": (lambda x, y: [jax.jit(lambda a, b: b)(x, y), jax.jit(jnp.sin)(x)], [False, True]),
}


@pytest.mark.parametrize("name", REACHED)
def test_outputs_that_a_derivative_reaches(name):
    """With respect to the first of two arguments."""
    function, wanted = REACHED[name]
    assert reached_outputs(trace(function, [ONE, ONE], Operands()), [0], []) == wanted


def test_what_a_derivative_reaches_in_the_course_of_a_loop():
    """A chain of loop variables is reached one step after another; a count never is."""
    step = lambda a, b, c, n: [b, c, c * 1.0, n + 1]
    found = reached_in_loop([trace(step, [ONE, ONE, ONE, COUNT], Operands())], frozenset(range(4)), [2], [])
    assert found == {0, 1, 2}


def test_operands_are_found_and_counted_once():
    """An array that two functions close over is one operand; a small constant is part of the program."""

    def both(q):
        operands = Operands()
        small = np.arange(3.0)
        first = trace(lambda x: [x * q + small.sum()], [ONE], operands)
        second = trace(lambda x: [x - q], [ONE], operands)
        assert len(operands.arrays) == 1
        run = lambda f: f.run(*f.inputs([jnp.float64(2.0)], operands.arrays))
        return run(first) + run(second)

    assert [float(x) for x in jax.jit(both)(jnp.float64(5.0))] == [13.0, -3.0]


def test_values_that_are_stored_are_shared_and_long_enough():
    """What two outputs share is stored once it takes enough equations, and the results are the same bits."""

    def program(x, y):
        for _ in range(12):
            x, y = x * y + 0.5, y - 0.1 * x
        return [x + y, x - y]

    closed = jax.make_jaxpr(program)(1.0, 2.0)
    stored = cuts.cuts(closed.jaxpr)
    assert 0 < len(stored) < len(closed.jaxpr.eqns) / 4
    assert not cuts.cuts(closed.jaxpr, least=1000)
    out = cuts.evaluate(closed.jaxpr, closed.consts, (1.0, 2.0), stored)
    np.testing.assert_array_equal(out, program(np.float64(1.0), np.float64(2.0)))


def test_missing_axes_are_spread_and_extra_ones_summed():
    """Three levels, of which an array has the first and the last."""
    x = jnp.arange(12.0).reshape(2, 3, 2)  # levels 0 and 2, then its own axis
    full = lanes.spread(x, [True, False, True], [2, 4, 3])
    assert full.shape == (2, 4, 3, 2)
    np.testing.assert_array_equal(full[:, 1], x)
    back = lanes.total(full, [True, True, True], [True, False, True])
    np.testing.assert_array_equal(back, 4 * x)


def test_writing_and_reading_beyond_the_end_do_nothing():
    """A lane whose slot is the buffer's length writes nothing and reads zeros."""
    buffer = jnp.arange(6.0).reshape(2, 3)
    slot = jnp.array([1, 3])
    np.testing.assert_array_equal(lanes.put(buffer, slot, jnp.array([9.0, 9.0])), [[0, 9, 2], [3, 4, 5]])
    np.testing.assert_array_equal(lanes.take(buffer, slot), [1, 0])
