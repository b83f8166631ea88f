"""Recorded meshes: what a replay gives, how far it has drifted, and what is refused."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import STOCK, van_der_pol

from gradsolve_backend import GradSolveAdjoint, Record, record

LOOSE = diffrax.PIDController(rtol=1e-5, atol=1e-6)
Y0 = jnp.array([2.0, 0.0])
TERM = diffrax.ODETerm(van_der_pol)
BACKENDS = ["llvm", "xla", "stock"]


def recorded(mu, y0=Y0, span=(0.0, 3.0), **how):
    how = {"stepsize_controller": LOOSE, "max_steps": 64} | how
    return record(TERM, diffrax.Tsit5(), *span, None, y0, mu, **how)


def solved(mu, adjoint, y0=Y0, span=(0.0, 3.0), **how):
    how = {"stepsize_controller": LOOSE, "max_steps": 64, "saveat": diffrax.SaveAt(ts=jnp.linspace(*span, 4))} | how
    return diffrax.diffeqsolve(TERM, diffrax.Tsit5(), *span, None, y0, mu, adjoint=adjoint, **how)


def mesh_of(made: Record) -> np.ndarray:
    return np.asarray(made.ts)[: int(made.steps) + 1]


def drift_along(mesh, mu, y) -> float:
    """The largest scaled error of Diffrax's own steps along a mesh."""
    solver, worst = diffrax.Tsit5(), 0.0
    state = solver.init(TERM, mesh[0], mesh[1], y, mu)
    for t0, t1 in zip(mesh[:-1], mesh[1:], strict=True):
        after, error, _, state, _ = solver.step(TERM, t0, t1, y, mu, state, made_jump=False)
        scale = LOOSE.atol + LOOSE.rtol * jnp.maximum(jnp.abs(y), jnp.abs(after))
        worst, y = max(worst, float(jnp.sqrt(jnp.mean((error / scale) ** 2)))), after
    return worst


@pytest.mark.parametrize("backend", BACKENDS)
def test_replay_is_the_solve_on_that_mesh(backend):
    """Values, drift, and derivatives in both modes are those of stock Diffrax stepping along the mesh."""
    made, mu = recorded(1.0), 1.1
    adjoint = GradSolveAdjoint(backend=backend, record=made)
    along = lambda mu: solved(mu, STOCK, stepsize_controller=diffrax.StepTo(mesh_of(made))).ys
    replay = lambda mu: solved(mu, adjoint).ys
    found = solved(mu, adjoint)
    np.testing.assert_allclose(found.ys, along(mu), rtol=1e-12)
    np.testing.assert_allclose(found.stats["drift"], drift_along(mesh_of(made), mu, Y0), rtol=1e-6)
    assert found.stats["num_accepted_steps"] == made.steps and found.stats["num_rejected_steps"] == 0
    wanted = jax.jacrev(along)(mu)
    np.testing.assert_allclose(jax.jacrev(replay)(mu), wanted, rtol=1e-9, atol=1e-11)
    if backend != "stock":
        np.testing.assert_allclose(jax.jacfwd(replay)(mu), wanted, rtol=1e-9, atol=1e-11)


def test_drift_tells_whether_the_tolerance_is_met():
    """Below 1 where it was recorded, as each step was accepted; above 1 where the solution is much faster."""
    adjoint = GradSolveAdjoint(record=recorded(1.0))
    assert solved(1.0, adjoint).stats["drift"] < 1 < solved(3.0, adjoint).stats["drift"]


def test_each_lane_its_own_mesh():
    mus = jnp.array([0.5, 1.0, 2.0])
    made = jax.vmap(recorded)(mus)
    assert len(set(made.steps.tolist())) > 1
    run = lambda mu, made: solved(mu, GradSolveAdjoint(record=made)).ys
    found = jax.jit(jax.vmap(jax.jacrev(run), in_axes=(0, 0)))(1.1 * mus, made)
    for i, mu in enumerate(mus):
        mesh = mesh_of(jax.tree.map(lambda x, i=i: x[i], made))
        along = lambda mu, mesh=mesh: solved(mu, STOCK, stepsize_controller=diffrax.StepTo(mesh)).ys
        np.testing.assert_allclose(found[i], jax.jacrev(along)(1.1 * mu), rtol=1e-9, atol=1e-11)


def test_backwards_in_time_and_in_single_precision():
    y0, span = Y0.astype(jnp.float32), (jnp.float32(3.0), jnp.float32(0.0))
    made = recorded(jnp.float32(-1.0), y0, span)
    run = lambda mu: solved(mu, GradSolveAdjoint(record=made), y0, span).ys
    mesh = -mesh_of(made)
    along = lambda mu: solved(mu, STOCK, y0, span, stepsize_controller=diffrax.StepTo(mesh)).ys
    mu = jnp.float32(-1.1)
    np.testing.assert_allclose(run(mu), along(mu), rtol=1e-5)
    np.testing.assert_allclose(jax.jacrev(run)(mu), jax.jacrev(along)(mu), rtol=1e-4, atol=1e-4)


def test_jumps_stay_where_the_controller_has_them():
    """y' = -k y until T, then 0, with the moment of the jump moved after the mesh was recorded."""
    term = diffrax.ODETerm(lambda t, y, args: jnp.where(t < args[1], -args[0] * y, 0.0 * y))

    def clip(switch):
        return diffrax.ClipStepSizeController(LOOSE, jump_ts=jnp.stack([switch]))

    def end(args, adjoint):
        how = {"stepsize_controller": clip(args[1]), "adjoint": adjoint}
        return diffrax.diffeqsolve(term, diffrax.Tsit5(), 0.0, 3.0, None, 2.0, args, **how).ys[0]

    k, switch = 0.8, 1.2
    args = (jnp.array(k), jnp.array(switch))
    made = record(term, diffrax.Tsit5(), 0.0, 3.0, None, 2.0, args, stepsize_controller=clip(args[1]))
    value, slope = jax.value_and_grad(end)(args, GradSolveAdjoint(record=made))
    np.testing.assert_allclose(value, 2 * np.exp(-k * switch), rtol=1e-5)
    np.testing.assert_allclose(slope[0], -switch * 2 * np.exp(-k * switch), rtol=1e-4)
    np.testing.assert_allclose(slope[1], -k * 2 * np.exp(-k * switch), rtol=1e-4)


def test_record_has_no_derivative():
    made = jax.jacrev(lambda mu: recorded(mu).ts[5])(1.0)
    assert made == 0


def test_a_solve_that_failed():
    """Its record ends where it ended, and so does the replay."""
    made = recorded(1.0, max_steps=4, throw=False)
    found = solved(1.0, GradSolveAdjoint(record=made), throw=False)
    assert not made.complete and found.result == diffrax.RESULTS.max_steps_reached


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y0": jnp.ones(3)}, "shapes"),
        ({"y0": Y0.astype(jnp.complex128)}, "dtypes"),
        ({"solver": diffrax.Dopri5()}, "solver Tsit5 was recorded, Dopri5 is asked for"),
        ({"t1": 3.5}, "spans other times"),
        ({"stepsize_controller": diffrax.ConstantStepSize(), "dt0": 0.1}, "ConstantStepSize"),
        ({"event": diffrax.Event(lambda t, y, args, **_: y[0])}, "event"),
        ({"saveat": diffrax.SaveAt(t1=True, controller_state=True)}, "controller"),
    ],
)
def test_refused_replays(change, message):
    how = {"solver": diffrax.Tsit5(), "t0": 0.0, "t1": 3.0, "dt0": None, "y0": Y0, "stepsize_controller": LOOSE}
    term = diffrax.ODETerm(lambda t, y, mu: -y)
    adjoint = GradSolveAdjoint(record=recorded(1.0))
    with pytest.raises((ValueError, RuntimeError), match=message):
        diffrax.diffeqsolve(term, **{**how, **change}, adjoint=adjoint)


def test_refused_records():
    with pytest.raises(ValueError, match="jax.vmap"):
        solved(1.0, GradSolveAdjoint(record=jax.vmap(recorded)(jnp.ones(2))))
    with pytest.raises(ValueError, match="PIDController"):
        recorded(1.0, stepsize_controller=diffrax.ConstantStepSize())
    with pytest.raises(ValueError, match="max_steps"):
        recorded(1.0, max_steps=None)


def test_what_is_no_record_is_refused():
    with pytest.raises(ValueError, match=r"GradSolveAdjoint\(record=3\): what `gradsolve_backend.record"):
        GradSolveAdjoint(record=3)
