"""Levenberg-Marquardt on the hare and lynx data: stock Diffrax against GradSolveAdjoint, side by side in one process.

    python benchmarks/fits.py                        1, 64 and 4096 fits at once (some minutes)
    python benchmarks/fits.py --fits 64 --json fits.json

Stock has two rows: with `ForwardMode()`, and with its default and reverse-mode Jacobians. Times of a fit are
medians of calls taken in turn.
"""

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from side_by_side import environment

from gradsolve_backend import GradSolveAdjoint
from gradsolve_backend.demo_model import fit, load_census, random_starts, same_optimum
from gradsolve_backend.timing import steady_seconds_of

TOLERANCE = 1e-8
CALLS, SLOW = 11, 20.0


class Row(NamedTuple):
    """One way to fit: seconds to trace, compile and run once, median seconds of a fit, share in the best optimum."""

    fits: int
    how: str
    first: float
    seconds: float
    calls: int
    share: float


WAYS: dict[str, tuple[diffrax.AbstractAdjoint, str]] = {
    "GradSolve": (GradSolveAdjoint(), "fwd"),
    "GradSolve, reverse Jacobians": (GradSolveAdjoint(), "bwd"),
    "stock, ForwardMode": (diffrax.ForwardMode(), "fwd"),
    "stock, reverse Jacobians": (diffrax.RecursiveCheckpointAdjoint(), "bwd"),
}


def measured(count: int) -> list[Row]:
    """All ways on the same starts."""
    starts, census = jnp.asarray(random_starts(count, seed=0)), load_census()
    runs, first, share = {}, {}, {}
    for name, (adjoint, jac) in WAYS.items():
        run = jax.jit(functools.partial(fit, census=census, adjoint=adjoint, tolerance=TOLERANCE, jac=jac))
        begin = time.perf_counter()
        found = jax.block_until_ready(run(starts))
        first[name], runs[name] = time.perf_counter() - begin, run
        share[name] = float(np.mean(same_optimum(found)))
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(CALLS):
        for name, run in runs.items():
            if i == 0 or taken[name][0] * i < SLOW:
                taken[name].append(steady_seconds_of(run, (starts,)))
    return [Row(count, n, first[n], float(np.median(taken[n])), len(taken[n]), share[n]) for n in runs]


def main() -> None:
    """Print a table as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fits", type=int, nargs="+", default=[1, 64, 4096], metavar="COUNT")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write environment and rows here")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    print(", ".join(f"{k} {v}" for k, v in environment().items()))
    print(
        f"{'fits':>6} {'with':30}{'first s':>10}{'fit ms':>12}{'calls':>7}{'in best optimum':>17}{'against ours':>14}"
    )
    rows: list[Row] = []
    for count in options.fits:
        found = measured(count)
        for row in found:
            times = row.seconds / found[0].seconds
            print(
                f"{row.fits:>6} {row.how:30}{row.first:>10.2f}{1e3 * row.seconds:>12.3f}{row.calls:>7}"
                f"{row.share:>17.1%}{times:>13.1f}x",
                flush=True,
            )
        rows += found
    if options.json:
        written: dict[str, Any] = {"environment": environment(), "rows": [row._asdict() for row in rows]}
        options.json.write_text(json.dumps(written, indent=1))


if __name__ == "__main__":
    main()
