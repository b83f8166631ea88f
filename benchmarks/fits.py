"""Levenberg-Marquardt on the hare and lynx data: stock Diffrax against GradSolveAdjoint, side by side in one process.

    python benchmarks/fits.py                        1, 64 and 4096 fits at once (half an hour)
    python benchmarks/fits.py --fits 64 --json fits.json
    python benchmarks/fits.py --jacobians            forward against reverse Jacobians

Each has rows for Optimistix's forward Jacobians, as they come (`fwd`) and computed once at each iterate by
`gradsolve_backend.fits.with_jacobian` (`once`), and for reverse ones (`bwd`); stock needs `ForwardMode()` for the
first two. MB is what XLA reserves for a call. Times are medians of calls taken in turn.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from side_by_side import environment

from gradsolve_backend import GradSolveAdjoint
from gradsolve_backend.demo_model import fit, load_census, random_starts
from gradsolve_backend.fits import same_optimum
from gradsolve_backend.timing import alternate, compiled, reserved, steady_seconds_of

TOLERANCE = 1e-8
CALLS, SLOW = 11, 20.0


class Row(NamedTuple):
    """One way to fit: seconds to compile, median seconds of a call, MB that XLA reserves, share in the best optimum."""

    fits: int
    how: str
    compile: float
    seconds: float
    calls: int
    reserved: float
    share: float


WAYS: dict[str, tuple[diffrax.AbstractAdjoint, str]] = {
    "GradSolve, once": (GradSolveAdjoint(), "once"),
    "GradSolve, fwd": (GradSolveAdjoint(), "fwd"),
    "GradSolve, bwd": (GradSolveAdjoint(), "bwd"),
    "stock, once": (diffrax.ForwardMode(), "once"),
    "stock, fwd": (diffrax.ForwardMode(), "fwd"),
    "stock, bwd": (diffrax.RecursiveCheckpointAdjoint(), "bwd"),
}


def measured(count: int, ways: Iterable[str]) -> list[Row]:
    """These ways on the same starts; a single fit begins elsewhere in each call."""
    census, starts = load_census(), jnp.asarray(random_starts(max(count, CALLS), seed=0))
    batches = [starts[i : i + 1] for i in range(CALLS)] if count == 1 else [starts[:count]]
    runs, compiling, share = {}, {}, {}
    taken: dict[str, list[float]] = {}
    for name in ways:
        adjoint, jac = WAYS[name]
        function = functools.partial(fit, census=census, adjoint=adjoint, tolerance=TOLERANCE, jac=jac)
        runs[name], compiling[name] = compiled(function, batches[0])
        begin = time.perf_counter()
        losses = [runs[name](batch).loss for batch in batches]
        share[name] = float(np.mean(same_optimum(np.concatenate(losses))))
        first = time.perf_counter() - begin
        taken[name] = [first] if first > SLOW else []
    for i in range(CALLS):
        for name, run in runs.items():
            if not taken[name] or taken[name][0] * max(i, 1) < SLOW:
                taken[name].append(steady_seconds_of(run, (batches[i % len(batches)],)))
    median = {name: float(np.median(times)) for name, times in taken.items()}
    held = {name: (reserved(run) or 0) / 1e6 for name, run in runs.items()}
    return [Row(count, n, compiling[n], median[n], len(taken[n]), held[n], share[n]) for n in runs]


def print_fits(counts: Iterable[int], ways: Iterable[str]) -> list[Row]:
    """A table of fits, as it is measured."""
    print(f"{'fits':>6} {'with':20}{'compile s':>10}{'call ms':>12}{'calls':>7}{'MB':>10}{'best':>8}{'slower':>10}")
    rows: list[Row] = []
    for count in counts:
        found = measured(count, ways)
        for row in found:
            print(
                f"{row.fits:>6} {row.how:20}{row.compile:>10.2f}{1e3 * row.seconds:>12.3f}{row.calls:>7}"
                f"{row.reserved:>10.1f}{row.share:>8.1%}{row.seconds / found[0].seconds:>9.1f}x",
                flush=True,
            )
        rows += found
    return rows


# ---- forward against reverse Jacobians


class Jacobian(NamedTuple):
    """Median seconds of a Jacobian in either mode."""

    residuals: int
    parameters: int
    lanes: int
    forward: float
    reverse: float


def pendulum(theta: jax.Array, times: np.ndarray) -> jax.Array:
    """Angles at `times` of a damped pendulum driven by a polynomial of time with the coefficients `theta`."""

    def field(t: Any, y: jax.Array, theta: jax.Array) -> jax.Array:
        drive = jnp.zeros(())
        for coefficient in theta:
            drive = drive * (t / 10.0) + coefficient
        return jnp.stack([y[1], drive - jnp.sin(y[0]) - 0.1 * y[1]])

    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        diffrax.Tsit5(),
        0.0,
        10.0,
        None,
        jnp.array([1.0, 0.0]),
        theta,
        saveat=diffrax.SaveAt(ts=times),
        stepsize_controller=diffrax.PIDController(rtol=TOLERANCE, atol=TOLERANCE),
        adjoint=GradSolveAdjoint(),
    )
    assert isinstance(solution.ys, jax.Array)
    return solution.ys[:, 0]


def jacobian_seconds(residuals: int, parameters: int, lanes: int) -> Jacobian:
    """Both modes in turn."""
    times = np.linspace(0.0, 10.0, residuals + 1)[1:]
    thetas = 0.3 * np.random.default_rng(0).standard_normal((lanes, parameters))
    modes: tuple[Callable[..., Any], ...] = (jax.jacfwd, jax.jacrev)
    runs = [compiled(jax.vmap(mode(functools.partial(pendulum, times=times))), thetas)[0] for mode in modes]
    results = [np.asarray(run(thetas)) for run in runs]
    np.testing.assert_allclose(*results, rtol=1e-9, atol=1e-9 * np.max(np.abs(results[0])))
    return Jacobian(residuals, parameters, lanes, *alternate(runs, [thetas], CALLS))


def print_jacobians() -> list[Jacobian]:
    """A table of Jacobians, as it is measured."""
    print(
        f"{'residuals':>9}{'parameters':>11}{'lanes':>7}{'forward ms':>12}{'reverse ms':>12}{'reverse / forward':>19}"
    )
    rows = []
    for lanes in (1, 64):
        for residuals in (2, 16, 64):
            for parameters in (2, 8, 32):
                row = jacobian_seconds(residuals, parameters, lanes)
                rows.append(row)
                print(
                    f"{row.residuals:>9}{row.parameters:>11}{row.lanes:>7}{1e3 * row.forward:>12.3f}"
                    f"{1e3 * row.reverse:>12.3f}{row.reverse / row.forward:>8.2f}",
                    flush=True,
                )
    return rows


def main() -> None:
    """Print a table, and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fits", type=int, nargs="+", default=[1, 64, 4096], metavar="COUNT")
    parser.add_argument("--ways", nargs="+", default=[*WAYS], choices=[*WAYS], metavar="WAY", help=f"of {[*WAYS]}")
    parser.add_argument("--jacobians", action="store_true", help="time Jacobians instead of fits")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write environment and rows here")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    print(", ".join(f"{k} {v}" for k, v in environment().items()))
    rows: list[Any] = [*print_jacobians()] if options.jacobians else [*print_fits(options.fits, options.ways)]
    if options.json:
        written = {"environment": environment(), "rows": [row._asdict() for row in rows]}
        options.json.write_text(json.dumps(written, indent=1))


if __name__ == "__main__":
    main()
