"""Rosenbrock methods in solves as users make them, with stock Diffrax and with the adjoint under test."""

import diffrax
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.integrate
from helpers import assert_close
from stiff_problems import PUBLISHED

from gradsolve_backend import GradSolveAdjoint, Rodas4, Rodas5P, Rosenbrock23, explain

ROSENBROCK = [Rosenbrock23, Rodas4, Rodas5P]
RESULTS = diffrax.RESULTS


def solve(field, solver, y0, args=None, t1=1.0, tolerance=1e-6, **how):
    """A solve from 0 with the usual controller."""
    controller = diffrax.PIDController(rtol=tolerance, atol=how.pop("atol", tolerance))
    how = {"stepsize_controller": controller, "max_steps": 20_000, "dt0": None} | how
    return diffrax.diffeqsolve(diffrax.ODETerm(field), solver, 0.0, t1, y0=y0, args=args, **how)


# Errors in units of the tolerance: a method of low order adds up more of them, over more steps.
@pytest.mark.parametrize(
    "solver, tolerance, factor", [(Rosenbrock23, 1e-5, 1000), (Rodas4, 1e-7, 10), (Rodas5P, 1e-8, 10)]
)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_end_states(name, solver, tolerance, factor):
    p = PUBLISHED[name]
    how = {"atol": tolerance * p.scale, "adjoint": GradSolveAdjoint()}
    run = jax.jit(lambda y0, args: solve(p.field, solver(), y0, args, p.t1, tolerance, **how).ys[-1])
    end = np.asarray(p.end)
    error = np.abs(run(jnp.asarray(p.y0), jnp.asarray(p.args)) - end) / (p.scale + np.abs(end))
    assert error.max() < factor * tolerance


def test_robertson_on_the_way():
    """At t = 1e5, where there is no published state, against the Radau method of scipy at a far smaller tolerance."""
    p, t1 = PUBLISHED["robertson"], 1e5
    compiled = jax.jit(p.field)
    field = lambda t, y: np.asarray(compiled(t, y, jnp.asarray(p.args)))  # noqa: E731
    found = scipy.integrate.solve_ivp(field, (0, t1), p.y0, method="Radau", rtol=1e-9, atol=1e-15)
    for solver, tolerance, factor in ((Rosenbrock23, 1e-5, 1000), (Rodas4, 1e-7, 10), (Rodas5P, 1e-8, 10)):
        how = {"atol": tolerance * p.scale, "adjoint": GradSolveAdjoint()}
        end = solve(p.field, solver(), jnp.asarray(p.y0), jnp.asarray(p.args), t1, tolerance, **how).ys[-1]
        error = np.abs(end - found.y[:, -1]) / (p.scale + np.abs(found.y[:, -1]))
        assert error.max() < factor * tolerance


def slow_manifold(t, start=2.0):
    """The state of a relaxing van der Pol oscillator: `log(y / 2) - (y^2 - 4) / 2 = t`, by bisection."""
    low, high = 1.0, start
    for _ in range(60):
        middle = (low + high) / 2
        late = np.log(middle / start) - (middle**2 - start**2) / 2 > t
        low, high = (middle, high) if late else (low, middle)
    return low


@pytest.mark.parametrize("solver", [Rodas4, Rodas5P])
def test_van_der_pol_with_mu_up_to_a_million(solver):
    """Against the limit of infinite stiffness: on the slow manifold, and after jumps at 1.5 - log 2 and twice that."""
    field, start = PUBLISHED["vanderpol"].field, jnp.array([2.0, -2 / 3])
    end = jax.jit(lambda mu, t1: solve(field, solver(), start, mu**-2, t1, 1e-7, adjoint=GradSolveAdjoint()).ys[-1, 0])
    for mu in (1e3, 1e4, 1e5, 1e6):
        np.testing.assert_allclose(end(mu, 0.5), slow_manifold(0.5), rtol=2 / mu**2 + 1e-6)
    np.testing.assert_allclose(end(1e6, 2.0), slow_manifold(2.0 - 2 * (1.5 - np.log(2))), rtol=1e-3)


def relaxation(t, y, k):
    """Fast relaxation of two components to slow ones, in a PyTree."""
    t = jnp.asarray(t, y["slow"].dtype)
    return {"slow": k * jnp.cos(t) * y["slow"], "fast": (1e3 * (y["slow"] - y["fast"][0]), -1e2 * y["fast"][1] + t)}


TREE = {"slow": jnp.ones((2, 1)), "fast": (jnp.zeros((2, 1)), jnp.asarray(0.5))}


@pytest.mark.parametrize("solver", ROSENBROCK)
def test_trees_and_saved_times(solver, adjoint):
    """Dense output between the steps of a solve with a state that is a tree, against a closed form."""
    ts = jnp.linspace(0.1, 1.0, 7)
    ys = solve(relaxation, solver(), TREE, 0.3, saveat=diffrax.SaveAt(ts=ts), adjoint=adjoint).ys
    wanted = jnp.exp(0.3 * jnp.sin(ts))
    assert ys["slow"].shape == ys["fast"][0].shape == (7, 2, 1)
    for member in range(2):
        assert_close(ys["slow"][:, member, 0], wanted, rtol=1e-4)
    particular = lambda t: t / 1e2 - 1 / 1e4
    assert_close(ys["fast"][1], particular(ts) + (0.5 - particular(0.0)) * jnp.exp(-1e2 * ts), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("saveat", ["ts", "dense"])
def test_solves_backwards_in_time(saveat, adjoint):
    """Time-dependent, with a Jacobian of the user's, which sees the user's time."""
    field = lambda t, y, k: -k * jnp.stack([y[0] * t, y[1] - t])
    jacobian = lambda t, y, k: -k * jnp.diag(jnp.stack([t, jnp.ones_like(t)]))
    ts = jnp.array([1.7, 1.2, 1.0])
    saving = diffrax.SaveAt(ts=ts) if saveat == "ts" else diffrax.SaveAt(dense=True)
    controller = diffrax.PIDController(rtol=1e-8, atol=1e-8)
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(field), Rodas5P(jacobian), 2.0, 1.0, None, jnp.array([1.0, 2.0]), 0.5, saveat=saving,
        stepsize_controller=controller, adjoint=adjoint,
    )  # fmt: skip
    ys = solution.ys if saveat == "ts" else jax.vmap(solution.evaluate)(ts)
    first = jnp.exp(0.25 * (4 - ts**2))
    second = ts - 2 + 2 * jnp.exp(0.5 * (2 - ts))
    assert_close(ys, jnp.stack([first, second], axis=1), rtol=1e-6)


BANDED = np.diag([-1.0, -1e2, -1e4, -1e3]) + np.diag([1.0, 2.0, 3.0], 1) + np.diag([3.0, 2.0, 1.0], -1)
SOLVERS = {
    "user's Jacobian": Rodas5P(lambda t, y, k: k * jnp.asarray(BANDED)),
    "operator": Rodas5P(lambda t, y, k: lx.MatrixLinearOperator(k * jnp.asarray(BANDED))),
    "lineax's LU": Rodas5P(linear_solver=lx.LU()),
    "QR": Rodas5P(lambda t, y, k: k * jnp.asarray(BANDED), lx.QR()),
    "tridiagonal": Rodas5P(
        lambda t, y, k: lx.TridiagonalLinearOperator(*(k * jnp.diag(jnp.asarray(BANDED), d) for d in (0, -1, 1))),
        lx.Tridiagonal(),
    ),
    "iterative": Rodas5P(linear_solver=lx.GMRES(rtol=1e-12, atol=1e-12)),
}


@pytest.mark.parametrize("name", SOLVERS)
def test_jacobians_and_linear_solvers(name, adjoint):
    """Another way to the same solution and gradient."""

    def loss(k, solver):
        field = lambda t, y, k: k * (jnp.asarray(BANDED) @ y)
        mesh = diffrax.StepTo(jnp.linspace(0.0, 1.0, 9) ** 2)
        return solve(field, solver, jnp.ones(4), k, stepsize_controller=mesh, adjoint=adjoint).ys[-1].sum()

    found, wanted = (jax.jit(jax.value_and_grad(lambda k: loss(k, s)))(1.5) for s in (SOLVERS[name], Rodas5P()))  # noqa: B023
    assert_close(found, wanted, rtol=1e-8)


@pytest.mark.parametrize("backend", ["llvm", "xla", "stock"])
def test_a_singular_step_is_tried_again_shorter(backend):
    """The first step has the matrix 1 / gamma - h * 8 = 0."""
    how = {"dt0": 0.5, "adjoint": GradSolveAdjoint(backend=backend)}
    solution = solve(lambda t, y, k: k * y, Rodas4(), jnp.ones(1), 8.0, **how)
    assert solution.stats["num_rejected_steps"] >= 1
    np.testing.assert_allclose(solution.ys[-1], np.exp(8.0), rtol=1e-4)


@pytest.mark.parametrize("backend", ["llvm", "xla", "stock"])
def test_result_of_a_singular_step_that_nothing_rejects(backend):
    how = {"stepsize_controller": diffrax.ConstantStepSize(), "adjoint": GradSolveAdjoint(backend=backend)}
    solution = solve(lambda t, y, k: k * y, Rodas4(), jnp.ones(1), 8.0, dt0=0.5, throw=False, **how)
    assert solution.result == RESULTS.singular
    with pytest.raises(RuntimeError, match="linear solver returned non-finite"):
        solve(lambda t, y, k: k * y, Rodas4(), jnp.ones(1), 8.0, dt0=0.5, **how)


@pytest.mark.parametrize("backend", ["llvm", "xla", "stock"])
def test_result_where_the_field_is_never_finite(backend):
    field = lambda t, y, k: jnp.sqrt(k) * y
    how = {"throw": False, "adjoint": GradSolveAdjoint(backend=backend), "dt0": 0.1}
    ends = lambda **more: solve(field, Rodas5P(), jnp.ones(1), -1.0, **how, **more).result
    assert ends(max_steps=50) == RESULTS.max_steps_reached
    limited = lambda force: diffrax.PIDController(rtol=1e-6, atol=1e-6, dtmin=1e-3, force_dtmin=force)
    assert ends(stepsize_controller=limited(False)) == RESULTS.dt_min_reached
    assert ends(stepsize_controller=limited(True)) == RESULTS.singular  # the shortest step was taken all the same


def test_a_member_that_fails_leaves_the_others_alone(adjoint):
    """Values and slopes of `exp(-sqrt s)`; the third member is NaN at every step."""

    def end(s):
        field = lambda t, y, s: -jnp.sqrt(s) * y
        found = solve(field, Rodas4(), 1.0, s, tolerance=1e-8, max_steps=60, throw=False, dt0=0.01, adjoint=adjoint)
        return jnp.where(found.result == RESULTS.successful, found.ys[-1], 0.0)

    values, slopes = jax.vmap(jax.value_and_grad(end))(jnp.array([1.0, 4.0, -1.0]))
    roots = np.array([1.0, 2.0])
    np.testing.assert_allclose(values[:2], np.exp(-roots), rtol=1e-6)
    np.testing.assert_allclose(slopes[:2], -np.exp(-roots) / (2 * roots), rtol=1e-6)
    assert values[2] == 0


def test_single_precision(adjoint):
    y0, k, t1 = jax.tree.map(jnp.float32, (TREE, 0.3, 1.0))
    found = solve(relaxation, Rodas5P(), y0, k, t1, tolerance=1e-4, adjoint=adjoint)
    slow = found.ys["slow"][-1]
    assert slow.dtype == jnp.float32
    np.testing.assert_allclose(slow, np.exp(0.3 * np.sin(1.0)), rtol=1e-3)


def test_one_solve_traces_the_field_few_times():
    """Once for each kind of time and state that it meets, however many stages and derivatives there are."""
    count = 0

    def field(t, y, k):
        nonlocal count
        count += 1
        return -k * y

    solved = lambda k: solve(field, Rodas5P(), jnp.ones(2), k, dt0=0.1, adjoint=GradSolveAdjoint()).ys.sum()
    jax.jit(jax.grad(solved)).trace(1.0)
    assert count <= 4


def test_unlike_terms_are_refused(adjoint):
    two = diffrax.MultiTerm(diffrax.ODETerm(lambda t, y, args: y), diffrax.ODETerm(lambda t, y, args: y))
    with pytest.raises(ValueError, match="ODETerm"):
        diffrax.diffeqsolve(two, Rodas5P(), 0.0, 1.0, 0.1, jnp.ones(1), adjoint=adjoint)


def test_complex_states_are_refused(adjoint):
    with pytest.raises(ValueError, match="real and imaginary parts"):
        solve(lambda t, y, args: 1j * y, Rodas5P(), jnp.ones(1, complex), adjoint=adjoint)


def total(size, solver):
    """The sum over a ring of cells that decay and feed each other; its closed form is `size exp(1 - k)`."""
    field = lambda t, y, k: -k * y + jnp.roll(y, 1)
    how = {"stepsize_controller": diffrax.StepTo(jnp.linspace(0.0, 1.0, 33)), "adjoint": GradSolveAdjoint()}
    return lambda k: solve(field, solver, jnp.ones(size), k, **how).ys.sum()


@pytest.mark.parametrize("solver", ROSENBROCK)
def test_small_systems_take_machine_code(solver):
    (route,) = explain(jax.grad(total(3, solver())), 2.0)
    assert route.backend == "llvm"


def test_large_systems_take_arrays():
    (route,) = explain(jax.grad(total(33, Rosenbrock23())), 2.0)
    assert route.backend == "xla"
    assert "a linear system of dimension 33 has no scalar form" in dict(route.others)["llvm"]


@pytest.mark.parametrize("size", [3, 33])
def test_gradient_by_a_closed_form(size):
    found = jax.jit(jax.grad(total(size, Rosenbrock23())))(2.0)
    np.testing.assert_allclose(found, -size * np.exp(-1.0), rtol=1e-3)
