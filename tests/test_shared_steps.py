"""Steps of constant size: all lanes share times and counts, which then have no axis of lanes, in any mode."""

import itertools

import diffrax
import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close

from gradsolve_backend import GradSolveAdjoint
from gradsolve_backend.kernels import forms, primitives

STATES = jnp.array([[0.5, 0.7], [0.9, 1.1], [1.3, 1.5]])
RATES = jnp.array([2.0, 0.3])
ENDS = diffrax.SubSaveAt(t1=True)
TIMES = diffrax.SubSaveAt(ts=jnp.array([0.1, 0.35, 0.36, 1.0]))
STEPS = diffrax.SubSaveAt(steps=3, fn=lambda t, y, args: (t, y))
ALL = diffrax.SaveAt(subs=[ENDS, TIMES, STEPS])


def swing(t, y, args):
    return jnp.stack([y[1], -args[0] * jnp.sin(y[0]) - args[1] * y[1] + jnp.cos(t)])


def loss(y0, args, adjoint, saveat=ALL):
    """A sum over all that is saved in 21 steps."""
    how = {"t0": 0.0, "t1": 1.0, "dt0": 1 / 21, "max_steps": 64, "saveat": saveat, "adjoint": adjoint, "throw": False}
    ys = diffrax.diffeqsolve(diffrax.ODETerm(swing), diffrax.Euler(), y0=y0, args=args, **how).ys
    return sum(jnp.sum(jnp.where(jnp.isfinite(x), x, 0.0) ** 2) for x in jax.tree.leaves(ys))


def gradients(adjoint, states=STATES):
    """By the states of lanes, and by the rates that they share."""
    total = lambda y, a: jnp.sum(jax.vmap(lambda x: loss(x, a, adjoint))(y))
    return jax.jit(jax.grad(total, (0, 1)))(states, RATES)


def by_hand(y, args):
    """The same loss of one lane from Euler steps in plain Python."""
    mesh = [i / 21 for i in range(22)]
    asked, total = [0.1, 0.35, 0.36, 1.0], 0.0
    for i, (t, end) in enumerate(itertools.pairwise(mesh), 1):
        after = y + (end - t) * swing(t, y, args)
        inside = [y + (s - t) / (end - t) * (after - y) for s in asked if t < s <= end]
        stored = [jnp.array([end]), after] if i % 3 == 0 else []
        total += sum(jnp.sum(x**2) for x in [*inside, *stored])
        y = after
    return total + jnp.sum(y**2)


@pytest.fixture(scope="module")
def wanted():
    return jax.grad(lambda y, a: sum(by_hand(x, a) for x in y), (0, 1))(STATES, RATES)


@pytest.fixture(params=["scalar", "array"])
def form(request, monkeypatch):
    """Scalar lanes, which a system of this size takes, or array lanes, by force."""
    monkeypatch.setenv("GRADSOLVE_BACKEND", "xla")
    if request.param == "array":
        monkeypatch.setattr(forms, "STEP_EQUATIONS", 0)
    jax.clear_caches()
    return request.param


def test_reverse_mode(form, wanted, monkeypatch):
    """Scalar lanes with all rows recorded, array lanes with steps that are run again from checkpoints."""
    monkeypatch.setattr("gradsolve_backend.kernels.solve.ROWS", 128 if form == "scalar" else 8)
    assert_close(gradients(GradSolveAdjoint()), wanted, rtol=1e-11)


def test_forward_mode(form, wanted):
    """Columns of a Jacobian by what lanes share: the sum over lanes is the gradient."""
    rows = jax.jit(jax.vmap(jax.jacfwd(lambda a, y: loss(y, a, GradSolveAdjoint())), in_axes=(None, 0)))
    assert_close(jnp.sum(rows(RATES, STATES), axis=0), wanted[1], rtol=1e-11)


def test_no_lanes(monkeypatch):
    """A batch of none."""
    monkeypatch.setenv("GRADSOLVE_BACKEND", "xla")
    by_states, by_rates = gradients(GradSolveAdjoint(), STATES[:0])
    assert by_states.shape == (0, 2)
    assert_close(by_rates, jnp.zeros(2))


def test_what_has_an_axis_of_lanes(form):
    """In the loop of a forward pass the state has one and nothing else: no time, no count, no mark."""
    batched = jax.vmap(lambda y: loss(y, RATES, GradSolveAdjoint(), diffrax.SaveAt(t1=True)))
    [equation] = _found(primitives.forward_p.name, jax.make_jaxpr(batched)(STATES))
    call, inputs = equation.params["call"], [jnp.zeros(v.aval.shape, v.aval.dtype) for v in equation.invars]
    program = jax.make_jaxpr(lambda *x: call.kernels.forward(call, *x))(*inputs)
    [loop] = _found("while", program)
    with_axis = [v.aval.shape for v in loop.outvars if v.aval.shape]
    assert with_axis == ([(3,), (3,)] if form == "scalar" else [(3, 2)])
    assert len(loop.outvars) > 5


def _found(name, program):
    """Equations of one primitive, also inside `jax.jit`."""
    inner = [_found(name, e.params["jaxpr"]) for e in program.eqns if "jaxpr" in e.params]
    return [e for e in program.eqns if e.primitive.name == name] + [e for found in inner for e in found]


def test_noise_that_lanes_share(monkeypatch):
    """One Brownian path for all lanes: the Euler-Maruyama method on its increments, written out."""
    monkeypatch.setenv("GRADSOLVE_BACKEND", "xla")
    path = diffrax.VirtualBrownianTree(0.0, 1.0, tol=1e-2, shape=(), key=jax.random.key(1))
    noise = diffrax.ControlTerm(lambda t, y, args: 0.3 * y, path)
    terms = diffrax.MultiTerm(diffrax.ODETerm(lambda t, y, args: -y), noise)
    how = {"max_steps": 16, "adjoint": GradSolveAdjoint()}
    run = lambda x: diffrax.diffeqsolve(terms, diffrax.Euler(), 0.0, 1.0, 0.125, x, **how).ys
    value, slope = jax.jit(jax.value_and_grad(lambda y: jnp.sum(jax.vmap(run)(y) ** 2)))(STATES[:, 0])
    at = jnp.linspace(0.0, 1.0, 9)
    increments = jax.vmap(path.evaluate)(at[:-1], at[1:])
    end = STATES[:, 0] * jnp.prod(1 - 0.125 + 0.3 * increments)
    assert_close((value, slope), (jnp.sum(end**2), 2 * end**2 / STATES[:, 0]), rtol=1e-11)
