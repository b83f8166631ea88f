"""Problems, and four ways to solve and differentiate them: stock Diffrax, GradSolve, and two other packages."""

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from side_by_side import STOCK, lorenz96

from gradsolve_backend import GradSolveAdjoint, explain
from gradsolve_backend.timing import compiled

LLVM = GradSolveAdjoint(backend="llvm")
FORWARD, GRADIENT = "forward", "gradient"
ABSENT = "not installed"
Calls = dict[str, Callable[[], Any]]  # what is measured, and a call that does it
Field = Callable[[Any, Any, Any], Any]


# ---- problems -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """`y' = field(t, y, p)` for t in [0, 1]; the parameter `p` is a number, from `low` to `high` over the lanes."""

    name: str
    field: Field
    y0: tuple[float, ...]
    low: float
    high: float

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Case:
    """A problem on some lanes, by Tsit5; the loss is the sum of squares of the final states, or of all saved ones."""

    problem: Problem
    lanes: int
    tolerance: float = 1e-8
    saved: int = 0  # number of saved times, equally far apart; 0: only the end

    def __str__(self) -> str:
        tolerance = "" if self.tolerance == 1e-8 else f", {self.tolerance:.0e}"
        return f"{self.problem.name} {self.lanes}{tolerance}" + (f", {self.saved} times" if self.saved else "")

    @property
    def times(self) -> Any:
        """The saved times."""
        return jnp.linspace(0.0, 1.0, self.saved)

    @property
    def inputs(self) -> tuple[Any, Any]:
        """Parameters and initial states of all lanes."""
        problem = self.problem
        # By numpy: what XLA makes has other last bits with another number of threads.
        return jnp.asarray(np.linspace(problem.low, problem.high, self.lanes)), jnp.tile(
            jnp.array(problem.y0), (self.lanes, 1)
        )


def lorenz(t: Any, y: Any, rho: Any) -> Any:
    """The Lorenz system, with sigma = 10 and beta = 8/3."""
    return jnp.stack([10.0 * (y[1] - y[0]), y[0] * (rho - y[2]) - y[1], y[0] * y[1] - 8.0 / 3.0 * y[2]])


LORENZ = Problem("lorenz", lorenz, (1.0, 0.0, 0.0), 20.0, 30.0)


def lorenz96_problem(dimension: int) -> Problem:
    """Lorenz-96; the parameter is its force."""
    y0 = 8.0 + 0.01 * np.sin(np.arange(dimension))
    return Problem(f"lorenz96d{dimension}", lorenz96, tuple(y0.tolist()), 7.0, 9.0)


def dense() -> Problem:
    """`y' = tanh(M y) p` of dimension 64, with a full matrix."""
    matrix = np.random.default_rng(0).standard_normal((64, 64)) / 8.0
    return Problem("dense64", lambda t, y, p: jnp.tanh(matrix @ y) * p, (0.5,) * 64, 0.5, 1.5)


def changed(problem: Problem, change: float) -> Problem:
    """The problem with a new vector field, which differs by a constant."""
    return replace(problem, field=lambda t, y, p: problem.field(t, y, p) + change)


# ---- Diffrax, with its own adjoint or that of GradSolve -----------------------------------------------


def solved(case: Case, adjoint: diffrax.AbstractAdjoint, p: Any, y0: Any) -> diffrax.Solution:
    """The solution of one lane."""
    saveat = diffrax.SaveAt(ts=case.times) if case.saved else diffrax.SaveAt(t1=True)
    control = diffrax.PIDController(rtol=case.tolerance, atol=case.tolerance)
    terms, solver = diffrax.ODETerm(case.problem.field), diffrax.Tsit5()
    how: dict[str, Any] = {"saveat": saveat, "stepsize_controller": control, "adjoint": adjoint}
    return diffrax.diffeqsolve(terms, solver, 0.0, 1.0, 0.01, y0, p, **how)


def loss(case: Case, adjoint: diffrax.AbstractAdjoint, p: Any, y0: Any) -> Any:
    """Sum of squares over all lanes; a single lane is solved without `jax.vmap`."""
    run = functools.partial(solved, case, adjoint)
    ys = run(p[0], y0[0]).ys if case.lanes == 1 else jax.vmap(run)(p, y0).ys
    assert isinstance(ys, jax.Array)
    return jnp.sum(ys**2)


def differentiated(function: Callable[..., Any], count: int = 2) -> Callable[..., Any]:
    """Value of a loss, and its gradient with respect to all inputs."""
    return jax.value_and_grad(function, argnums=tuple(range(count)))


def calls_of(function: Callable[..., Any], inputs: Sequence[Any], what: Sequence[str] = (FORWARD, GRADIENT)) -> Calls:
    """Calls of a loss, and of its value and gradient, as users make them: through `jax.jit`."""
    functions = {FORWARD: function, GRADIENT: differentiated(function, len(inputs))}
    return {name: functools.partial(jax.jit(functions[name]), *inputs) for name in what}


def with_diffrax(adjoint: diffrax.AbstractAdjoint, case: Case, what: Sequence[str] = (FORWARD, GRADIENT)) -> Calls:
    """Calls of `diffrax.diffeqsolve`."""
    assert adjoint is STOCK or backend(case) == "llvm", f"{case} runs on {backend(case)}"
    return calls_of(functools.partial(loss, case, adjoint), case.inputs, what)


def backend(case: Case) -> str:
    """The backend that runs the gradient where `llvm` is asked for."""
    (route,) = explain(differentiated(functools.partial(loss, case, LLVM)), *case.inputs)
    return route.backend


def compiled_gradient(case: Case, adjoint: diffrax.AbstractAdjoint) -> Any:
    """Trace and compile the gradient."""
    return compiled(differentiated(functools.partial(loss, case, adjoint)), *case.inputs)[0]


def steps_taken(case: Case, kind: str = "num_steps") -> np.ndarray:
    """Trial steps of each lane, or another of Diffrax's statistics."""
    solve = lambda p, y0: solved(case, LLVM, p, y0).stats[kind]  # noqa: E731
    return np.asarray(jax.jit(jax.vmap(solve))(*case.inputs))


def bytes_of_record(case: Case) -> int:
    """Bytes reserved for the record of all lanes."""
    (route,) = explain(functools.partial(loss, case, LLVM), *case.inputs)
    return (route.lanes or 0) * route.record_bytes


# ---- gradsolve: records a mesh once, then replays it --------------------------------------------------


@dataclass(frozen=True)
class Posed:
    """A problem as gradsolve takes it."""

    name: str
    dim: int
    field: Field
    t0: float = 0.0
    t1: float = 1.0
    is_stiff: bool = False

    def f_jax(self, t: Any, y: Any, p: Any) -> Any:
        """The vector field, with the parameters of one lane in a vector."""
        return self.field(t, y, p[0])


def with_gradsolve(case: Case) -> Calls:
    """`record` makes the mesh of these inputs, with fused kernels where Warp is installed; the others replay it."""
    import gradsolve  # pyright: ignore[reportMissingImports]

    problem, (p, y0) = case.problem, case.inputs
    posed = Posed(f"{problem.name}_posed", len(problem.y0), problem.field)
    how: dict[str, Any] = {"rtol": case.tolerance, "atol": case.tolerance, "device": "cpu", "fused": True}
    if case.saved:
        how["saveat"] = np.asarray(case.times)
    initial, parameters = np.asarray(y0), np.asarray(p)[:, None]

    def record() -> Any:
        return gradsolve.grad_closure(posed, initial, parameters, wrt=("y0", "params"), **how)

    with contextlib.redirect_stdout(sys.stderr):  # Warp says what it compiles
        replay = record()
    return {"record": record, **calls_of(lambda p, y0: jnp.sum(replay(y0, p[:, None]) ** 2), (p, y0))}


# ---- diffsol-jax: one lane after the other, gradient by parameters only -------------------------------


def with_diffsol(case: Case) -> Calls:
    """Its Runge-Kutta method `tsit45`."""
    import diffsol_jax  # pyright: ignore[reportMissingImports]

    problem, (p, _) = case.problem, case.inputs
    field = lambda t, y, p: _components(problem, t, y, p[0])  # noqa: E731
    posed = diffsol_jax.ODEProblem(field, y0=jnp.array(problem.y0), params=p[:1])
    times = case.times if case.saved else jnp.array([0.0, 1.0])
    how: dict[str, Any] = {"ode_solver": "tsit45", "h0": 0.01, "rtol": case.tolerance, "atol": case.tolerance}

    def states(parameter: Any) -> Any:
        ys = posed.solve(parameter[None], times, **how)[1]
        return ys if case.saved else ys[-1]

    calls = calls_of(lambda p: jnp.sum(jax.vmap(states)(p) ** 2), (p,))
    # What is compiled knows the problem by a number only: the calls have to keep it alive.
    return {name: lambda call=call, posed=posed: call() for name, call in calls.items()}


def _components(problem: Problem, t: Any, y: Any, p: Any) -> Any:
    """The vector field as it must be written there: no operation on whole vectors."""
    if problem.field is not lorenz96:
        return problem.field(t, y, p)
    size = len(problem.y0)
    return tuple((y[(i + 1) % size] - y[i - 2]) * y[i - 1] - y[i] + p for i in range(size))


# ---- all of them --------------------------------------------------------------------------------------

PEERS: dict[str, Callable[[Case], Calls]] = {"gradsolve": with_gradsolve, "diffsol-jax": with_diffsol}


def version_of(package: str) -> str:
    """The version of a package, or that it is not here."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ABSENT


def contenders() -> dict[str, Callable[[Case], Calls]]:
    """All that are here."""
    peers = {name: make for name, make in PEERS.items() if version_of(name) != ABSENT}
    return {"stock": functools.partial(with_diffrax, STOCK), "llvm": functools.partial(with_diffrax, LLVM), **peers}
