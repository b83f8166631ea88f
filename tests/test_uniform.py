"""Ensembles that take the same steps in all lanes: `llvm` computes once for a block what its lanes share."""

from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import pytest
from ensembles import CLOSE, LLVM, STOCK, ensemble, oscillator, weights
from helpers import assert_close
from jaxtyping import Array

from gradsolve_backend.kernels.routines import ALIVE, KEPT, Pieces
from gradsolve_backend.kernels.uniform import uniform_places

TIMES = jnp.linspace(0.1, 1.9, 5)
CONSTANT, STEPS = diffrax.ConstantStepSize(), diffrax.StepTo(jnp.linspace(0.0, 2.0, 41) ** 1.1 * 2**-0.1)
ADAPTIVE = diffrax.PIDController(rtol=1e-3, atol=1e-3)


def states(adjoint: Any, y0: Array, rate: Array, dt: Any, control: Any = CONSTANT, **how: Any) -> tuple[Array, Array]:
    """Values on the way and at the end, and the number of steps."""
    sol = diffrax.diffeqsolve(
        diffrax.ODETerm(oscillator), diffrax.Heun(), 0.0, 2.0, None if control is STEPS else dt, y0, (rate, 0.3 * rate),
        stepsize_controller=control, adjoint=adjoint, saveat=diffrax.SaveAt(ts=TIMES, t1=True), throw=False, **how,
    )  # fmt: skip
    assert sol.ys is not None
    return sol.ys, sol.stats["num_steps"]


def assert_equal_stock(axes: Any, *arguments: Any, **how: Any) -> None:
    """Values, numbers of steps and gradients are stock's, and the tangent is the gradient's transpose."""
    cts = weights(len(arguments[1]), 6, 2)

    @jax.jit
    def both(*arguments: Any) -> Any:
        found = []
        for adjoint in (LLVM, STOCK):
            solve = jax.vmap(lambda *x, adjoint=adjoint: states(adjoint, *x, **how), axes)
            values, pull, steps = jax.vjp(solve, *arguments, has_aux=True)
            found.append((values, steps, pull(cts)))
        ones = jax.tree.map(jnp.ones_like, arguments)
        lanes = jax.vmap(lambda *x: states(LLVM, *x, **how)[0], axes)
        return found, jnp.vdot(cts, jax.jvp(lanes, arguments, ones)[1])

    (ours, stock), pushed = both(*arguments)
    assert_close(ours, stock, **CLOSE)
    assert_close(pushed, sum(jnp.sum(x) for x in stock[2]), **CLOSE)


@pytest.mark.parametrize("lanes", [48, 19], ids=["whole", "padded"])
@pytest.mark.parametrize("steps", [40, 300], ids=["rows", "beyond"])
def test_constant_steps(lanes, steps):
    """Lanes that fill their blocks or not, within the rows of a record and beyond them."""
    assert_equal_stock((0, 0, None), *ensemble(lanes, 3), jnp.asarray(2.0 / steps))


@pytest.mark.parametrize("how", [{"control": STEPS}, {"control": ADAPTIVE}, {"max_steps": 25}], ids=str)
def test_other_steps(how):
    """Steps of a list; steps of each lane's own from shared times; a solve that stops early."""
    assert_equal_stock((0, 0, None), *ensemble(32, 4), jnp.asarray(0.05), **how)


def test_shared_states():
    """All lanes start alike, and only a parameter is their own; or the parameter and the length of steps."""
    y0s, rates = ensemble(32, 5)
    assert_equal_stock((None, 0, None), y0s[0], rates, jnp.asarray(0.05))
    assert_equal_stock((None, 0, 0), y0s[0], rates, jnp.linspace(0.05, 0.08, 32))


def _places(control: Any) -> tuple[Any, set]:
    """The solve, and what stays the same in all lanes if all but the initial state is shared."""
    y0s, rates = ensemble(1)
    program = jax.make_jaxpr(lambda y0, rate: states(LLVM, y0, rate, 0.05, control))(y0s[0], rates[0])
    inner = program.eqns[-1].params["jaxpr"]
    (call,) = [e.params["call"] for e in inner.eqns if e.primitive.name == "gradsolve_forward"]
    solve = call.solve
    shared = [("carry", i) for i in range(solve.size) if solve.carry[i].shape != (2,)]
    shared += [("operand", i) for i in range(len(solve.operands))]
    return solve, set(uniform_places(Pieces(call), shared))


def test_times_are_shared_where_steps_are_constant():
    solve, constant = _places(CONSTANT)
    assert {ALIVE, KEPT, ("carry", solve.time), ("carry", solve.accepted)} <= constant
    assert not [p for p in constant if p[0] == "carry" and solve.carry[p[1]].shape == (2,)]
    solve, adaptive = _places(ADAPTIVE)
    assert not {ALIVE, KEPT, ("carry", solve.time), ("carry", solve.accepted)} & adaptive
