"""What keeps the values of a kernel of `pallas` in few registers: order, what is computed again, a limit."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradsolve_backend.kernels import pallas_tuning
from gradsolve_backend.kernels.pallas_again import Again
from gradsolve_backend.kernels.pallas_ops import Evaluation
from gradsolve_backend.kernels.pallas_order import pressure


def program(function, count):
    return jax.make_jaxpr(function)(*[jnp.float32(0)] * count).jaxpr


@pytest.mark.parametrize("name", ["add", "sub"])
@pytest.mark.parametrize("values", [(1.1, 2.3, 0.7), (-3.0, 1e-3, 5.0), (jnp.inf, 1.0, 2.0), (jnp.nan, 1.0, 2.0)])
def test_what_is_computed_again_has_the_same_bits(name, values):
    """Where the product of a late value is taken, of sums whose terms are read late as well."""
    combine = {"add": jnp.add, "sub": jnp.subtract}[name]

    def function(x, y, ct):
        a, b = jnp.sin(x), jnp.cos(y)
        return [ct * combine(a, b), ct * a, ct * b]

    jaxpr = program(function, 3)
    again = Again(jaxpr, jaxpr.invars[2:])
    taken = [(e, v) for e in jaxpr.eqns for v in e.invars if (e, v) in again]
    assert [e.primitive.name for e, _ in taken] == ["mul"]
    inputs = dict(zip(jaxpr.invars, (jnp.full(4, x, jnp.float32) for x in values), strict=True))
    found = []
    for how in (again, None):
        evaluation = Evaluation(jaxpr, 4, lazy=True, again=how)
        evaluation.give(inputs)
        found.append([np.asarray(evaluation.read(v)) for v in jaxpr.outvars])
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y, ct: [ct / (x * x - y * y), ct * (x * x), ct * (y * y)],  # the sign of a zero would matter
        lambda x, y, ct: [ct * (jnp.sin(x) - jnp.cos(y))],  # its terms are not held
        lambda x, y, ct: [
            jnp.sin(x) - jnp.cos(y) + ct,
            ct * jnp.sin(x),
            ct * jnp.cos(y),
        ],  # it is added
    ],
)
def test_what_is_held(function):
    jaxpr = program(function, 3)
    again = Again(jaxpr, jaxpr.invars[2:])
    assert not any((e, v) in again for e in jaxpr.eqns for v in e.invars)


def test_registers_of_a_sum_that_grows():
    """A sum of products takes what it reads, the sum and one product: not one register for each product."""

    def total(*xs):
        products = [x * xs[0] for x in xs[1:]]
        return sum(products[1:], products[0])

    assert pressure(program(total, 9)) == 9 + 1
    assert pressure(jax.make_jaxpr(lambda x: x * x)(np.float64(0)).jaxpr) == 4


@pytest.mark.parametrize(("values", "registers"), [(30, 64), (100, 88), (400, None)])
def test_limit_of_registers(monkeypatch, values, registers):
    """With a record and many lanes, if so few are enough that more lanes fit onto a GPU."""

    step = SimpleNamespace(program=SimpleNamespace(jaxpr=jax.make_jaxpr(lambda x: x + x)(1.0)))
    call = SimpleNamespace(record=True)
    monkeypatch.setattr(pallas_tuning, "Pieces", lambda call: SimpleNamespace(step=lambda: step))
    monkeypatch.setattr(pallas_tuning, "pressure", lambda jaxpr: values)
    assert pallas_tuning.forward_tuning(call, pallas_tuning.MANY).registers == registers
    assert pallas_tuning.forward_tuning(call, pallas_tuning.MANY - 1).registers is None
    step.program.jaxpr = jax.make_jaxpr(lambda x: jax.lax.select(x > 0, x, x))(1.0)  # mostly choices
    assert pallas_tuning.forward_tuning(call, pallas_tuning.MANY).registers is None
    step.program.jaxpr, call.record = jax.make_jaxpr(lambda x: x + x)(1.0), False
    assert pallas_tuning.forward_tuning(call, pallas_tuning.MANY).registers is None
