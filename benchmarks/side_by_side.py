"""Stock Diffrax against GradSolveAdjoint, side by side in one process.

    python benchmarks/side_by_side.py                 value and gradient, and the forward solve alone (under 5 minutes)
    python benchmarks/side_by_side.py --conformance   the forward solve alone on every conformance problem
    python benchmarks/side_by_side.py --only lorenz96 --json times.json

Times are medians of calls taken in turn. The backend is GradSolve's own choice, or that of GRADSOLVE_BACKEND.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import diffrax
import jax
import jax.numpy as jnp
import numpy as np

from gradsolve_backend import GradSolveAdjoint, explain
from gradsolve_backend.bench import lorenz, lorenz96, network
from gradsolve_backend.conformance.problem import Problem
from gradsolve_backend.conformance.problems import PROBLEMS
from gradsolve_backend.timing import alternate, seconds_of

STOCK = diffrax.RecursiveCheckpointAdjoint()
# Solvers of the conformance problems by kind; those in FIXED take constant steps, stiff ones take Kvaerno5.
SOLVERS = {
    "ode": diffrax.Tsit5,
    "split": diffrax.KenCarp4,
    "hamiltonian": diffrax.SemiImplicitEuler,
    "sde": diffrax.Heun,
}
FIXED = ("hamiltonian", "sde")
Loss = Callable[[diffrax.AbstractAdjoint, Any, Any], Any]


class Case(NamedTuple):
    """One row.

    loss: `(adjoint, inputs, shared) -> scalar` for one lane. inputs: with a leading lane axis. shared: the same for all
    lanes. The gradient is that of the sum over lanes, by `inputs` and `shared`.
    """

    name: str
    lanes: int
    loss: Loss
    inputs: Any
    shared: Any = None


class Row(NamedTuple):
    """Times of one case: milliseconds a call, seconds to the first result, largest relative difference."""

    case: str
    lanes: int
    measured: str
    backend: str
    stock_ms: float
    ours_ms: float
    stock_first_s: float
    ours_first_s: float
    difference: float


def final(field: Callable[..., Any], inputs: Any, tolerance: float, adjoint: diffrax.AbstractAdjoint) -> Any:
    """State after one unit of time, by Tsit5; `inputs` are initial state and parameters, time has the state's dtype."""
    y0, args = inputs
    zero, one, first = (jnp.asarray(x, y0.dtype) for x in (0.0, 1.0, 0.01))
    control = diffrax.PIDController(rtol=tolerance, atol=tolerance)
    terms = diffrax.ODETerm(field)
    how: dict[str, Any] = {"stepsize_controller": control, "adjoint": adjoint}
    ys = diffrax.diffeqsolve(terms, diffrax.Tsit5(), zero, one, first, y0, args, **how).ys
    assert isinstance(ys, jax.Array)
    return ys[-1]


def squares(field: Callable[..., Any], tolerance: float) -> Loss:
    """Sum of squares of the final state; both initial state and parameters are of the lane."""
    return lambda adjoint, inputs, shared: jnp.sum(final(field, inputs, tolerance, adjoint) ** 2)


def lorenz_case(lanes: int) -> Case:
    """Each lane has its own rho; gradient by initial state and the three parameters."""
    rho = np.linspace(20.0, 28.0, lanes)
    args = np.stack([np.full(lanes, 10.0), rho, np.full(lanes, 8 / 3)], axis=1)
    y0 = np.tile([1.0, 0.0, 0.0], (lanes, 1))
    return Case("lorenz", lanes, squares(lorenz, 1e-8), (jnp.asarray(y0), jnp.asarray(args)))


def lorenz96_case(dimension: int, lanes: int) -> Case:
    """Each lane has its own force; gradient by initial state and force."""
    y0 = np.tile(8.0 + np.sin(np.arange(dimension)), (lanes, 1))
    force = jnp.linspace(7.0, 9.0, lanes)
    return Case(f"lorenz96d{dimension}", lanes, squares(lorenz96, 1e-8), (jnp.asarray(y0), force))


def network_case(lanes: int) -> Case:
    """A neural vector field 2 -> 64 -> 64 -> 2 in float32; all lanes share the weights, the gradient is theirs."""
    random = np.random.default_rng(0)
    sizes = (2, 64, 64, 2)
    layers = [
        (random.standard_normal((rows, columns)) / np.sqrt(columns), np.zeros(rows))
        for columns, rows in zip(sizes[:-1], sizes[1:], strict=True)
    ]
    weights, y0 = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (layers, random.standard_normal((lanes, 2))))

    def loss(adjoint: diffrax.AbstractAdjoint, y0: Any, weights: Any) -> Any:
        return jnp.sum(final(network, (y0, weights), 1e-5, adjoint) ** 2)

    return Case("network", lanes, loss, y0, weights)


def conformance_case(problem: Problem, lanes: int) -> Case:
    """A problem of the conformance suite; the lanes start at slightly different states."""
    solver = diffrax.Kvaerno5() if problem.stiff else SOLVERS[problem.kind]()
    fixed = problem.kind in FIXED
    first = (problem.t1 - problem.t0) / problem.steps if fixed else None
    control = diffrax.ConstantStepSize() if fixed else diffrax.PIDController(rtol=problem.rtol, atol=problem.atol)
    y0, args = problem.inputs(jnp.float64)
    factors = 1.0 + 1e-3 * np.arange(lanes) / lanes

    def loss(adjoint: diffrax.AbstractAdjoint, y0: Any, args: Any) -> Any:
        solution = diffrax.diffeqsolve(
            problem.terms(problem, jnp.float64),
            solver,
            problem.t0,
            problem.t1,
            first,
            y0,
            args,
            stepsize_controller=control,
            adjoint=adjoint,
            throw=False,
        )
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(solution.ys))

    inputs = jax.tree.map(lambda leaf: jnp.asarray(np.multiply.outer(factors, leaf)), y0)
    return Case(problem.name, lanes, loss, inputs, args)


def total(case: Case, adjoint: diffrax.AbstractAdjoint) -> Callable[..., Any]:
    """Sum of the loss over all lanes; a single lane is solved without `jax.vmap`."""

    def function(inputs: Any, shared: Any) -> Any:
        if case.lanes == 1:
            return case.loss(adjoint, jax.tree.map(lambda leaf: leaf[0], inputs), shared)
        return jnp.sum(jax.vmap(lambda lane: case.loss(adjoint, lane, shared))(inputs))

    return function


def relative_difference(ours: Any, stock: Any) -> float:
    """Largest difference of two results, each leaf relative to its largest entry."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(stock), strict=True)
    return max(float(jnp.max(jnp.abs(a - b)) / (jnp.max(jnp.abs(b)) + 1e-300)) for a, b in pairs)


def measure(case: Case, gradient: bool, budget: float) -> Row:
    """Compile with both, compare the results, then time them in turn for about `budget` seconds."""
    arguments = (case.inputs, case.shared)
    both = [total(case, adjoint) for adjoint in (STOCK, GradSolveAdjoint())]
    if gradient:
        which = 0 if case.shared is None else (0, 1)
        both = [jax.value_and_grad(function, argnums=which) for function in both]
    backends = {route.backend for route in explain(both[1], *arguments)}
    runs, first, results = [], [], []
    for function in both:
        run = jax.jit(function)  # its calls are quicker than those of an executable compiled ahead of time
        begin = time.perf_counter()
        results.append(jax.block_until_ready(run(*arguments)))
        first.append(time.perf_counter() - begin)
        runs.append(run)
    rounds = int(np.clip(budget / sum(seconds_of(run, arguments) for run in runs), 3, 500))
    stock_s, ours_s = alternate(runs, arguments, rounds)
    return Row(
        case.name,
        case.lanes,
        "gradient" if gradient else "forward",
        ", ".join(sorted(backends)),
        stock_ms=1e3 * stock_s,
        ours_ms=1e3 * ours_s,
        stock_first_s=first[0],
        ours_first_s=first[1],
        difference=relative_difference(results[1], results[0]),
    )


def default_rows(only: str, budget: float) -> Iterator[Row]:
    cases = [lorenz_case(1), lorenz_case(64), lorenz_case(1024), network_case(256)]
    for case in cases + [lorenz96_case(10, 256), lorenz96_case(40, 256)]:
        if only in case.name:
            yield measure(case, True, budget)
            yield measure(case, False, budget)


def conformance_rows(only: str, budget: float) -> Iterator[Row]:
    for problem in PROBLEMS.values():
        for lanes in (1, 64, 1024) if only in problem.name else ():
            yield measure(conformance_case(problem, lanes), False, budget)
        # A process has 65,530 memory mappings, and compiled functions hold many.
        jax.clear_caches()


def environment() -> dict[str, Any]:
    """What the times depend on, next to the code."""
    packages = {name: version(name) for name in ("jax", "diffrax", "equinox", "gradsolve_backend")}
    return packages | {
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def shown(row: Row) -> str:
    """One line of the table."""
    return (
        f"{row.case:12} {row.lanes:>5} {row.measured:9} {row.backend:8} {row.stock_ms:>10.4g} {row.ours_ms:>10.4g} "
        f"{row.stock_ms / row.ours_ms:>6.2f} {row.stock_first_s:>8.2f} {row.ours_first_s:>8.2f} {row.difference:>9.1e}"
    )


def main() -> None:
    """Print one line a case as it is measured, and write all of them as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conformance", action="store_true", help="forward solve alone on every conformance problem")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=2.0, help="time to spend on each line (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write environment and rows here")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    about = environment()
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print("milliseconds a call (median); first: seconds to trace, compile and run once; gradient: value and gradient")
    print(
        f"{'case':12} {'lanes':>5} {'measured':9} {'backend':8} {'stock':>10} {'GradSolve':>10} {'ratio':>6} "
        f"{'first':>8} {'first':>8} {'rel.diff.':>9}"
    )
    rows = []
    for row in (conformance_rows if options.conformance else default_rows)(options.only, options.seconds):
        print(shown(row), flush=True)
        rows.append(row)
    if options.json is not None:
        options.json.write_text(json.dumps({"environment": about, "rows": [row._asdict() for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
