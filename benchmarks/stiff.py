"""Stiff systems on GradSolve's backend `llvm`, by stock Diffrax, gradsolve and diffsol-jax, side by side.

    python benchmarks/stiff.py                       everything
    python benchmarks/stiff.py --only "64, 1e-06"    one case
    python benchmarks/stiff.py --json times.json

Robertson's reactions to t = 100: states, and the gradient of a sum of them by the three rates of each lane. What counts
is the error: at each tolerance, stock Kvaerno5 sets it, and each other method takes the loosest of its own tolerances
that is no worse. Times are medians of short bursts of calls taken in turn; their number stands behind a time if it is
small. gradsolve replays a mesh recorded before; the recording does not count. Other packages are compared where they
are installed: `pip install gradsolve==0.2.1 diffsol-jax==0.0.2`.
"""

import argparse
import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from cpu import Row, Time, in_turn, prepare, say, shown
from peers import ABSENT, LLVM, version_of
from side_by_side import STOCK, environment

from gradsolve_backend import Rodas5P, explain
from gradsolve_backend.timing import compiled, seconds_of

RATES, START, END = np.array([0.04, 3e7, 1e4]), np.array([1.0, 0.0, 0.0]), 100.0
WEIGHTS = np.array([1.0, 1e4, 1.0])
FIRST_STEP = 1e-6
ABSOLUTE = 1e-3  # absolute tolerance, in units of the relative one: the second state is at most 4e-5
BURST = 0.005  # seconds of calls in a row: the first one after another program finds its memory cold
TRIED = 10.0 ** -np.arange(3, 13, 0.25)  # tolerances, the loosest first
OURS, SAME, BASE = "Rodas5P, llvm", "Kvaerno5, llvm", "Kvaerno5, stock"
Run = Callable[[Any], Any]  # final states of all lanes, shape (lanes, 3), from their rates of the same shape


@dataclass(frozen=True)
class Case:
    """A number of lanes, whose rates differ by up to 10 %, and the tolerance of stock."""

    lanes: int
    tolerance: float

    def __str__(self) -> str:
        return f"robertson {self.lanes}, {self.tolerance:.0e}"

    @property
    def rates(self) -> np.ndarray:
        """The rates of each lane."""
        return RATES * np.linspace(1.0, 1.1, self.lanes)[:, None]


def robertson(t: Any, y: Any, k: Any) -> Any:
    """Robertson's reactions."""
    slow, square, cross = k[0] * y[0], k[1] * y[1] * y[1], k[2] * y[1] * y[2]
    return jnp.stack([cross - slow, slow - square - cross, square])


def by_diffrax(solver: Any, adjoint: diffrax.AbstractAdjoint, tolerance: float, lanes: int) -> Run:
    """Through `diffrax.diffeqsolve`."""
    control = diffrax.PIDController(rtol=tolerance, atol=ABSOLUTE * tolerance)
    how: dict[str, Any] = {"stepsize_controller": control, "adjoint": adjoint, "max_steps": 8192}

    def end(k: Any) -> Any:
        terms = diffrax.ODETerm(robertson)
        ys = diffrax.diffeqsolve(terms, solver, 0.0, END, FIRST_STEP, jnp.asarray(START), k, **how).ys
        assert isinstance(ys, jax.Array)
        return ys[-1]

    return (lambda k: end(k[0])[None]) if lanes == 1 else jax.vmap(end)


@dataclass(frozen=True)
class Posed:
    """The problem as gradsolve takes it."""

    name: str = "robertson"
    dim: int = 3
    t0: float = 0.0
    t1: float = END
    is_stiff: bool = True

    def f_jax(self, t: Any, y: Any, p: Any) -> Any:
        """The vector field."""
        return robertson(t, y, p)


def by_gradsolve(tolerance: float, case: Case) -> Run:
    """A replay of the mesh that gradsolve records for these rates."""
    import gradsolve  # pyright: ignore[reportMissingImports]

    starts = np.tile(START, (case.lanes, 1))
    with contextlib.redirect_stdout(sys.stderr):
        return gradsolve.grad_closure(
            Posed(), starts, case.rates, engine="rodas5p_replay", rtol=tolerance, atol=ABSOLUTE * tolerance
        )


def by_diffsol(tolerance: float, case: Case) -> Run:
    """diffsol's BDF, one lane after the other."""
    import diffsol_jax  # pyright: ignore[reportMissingImports]

    field = lambda t, y, k: tuple(robertson_parts(y, k))  # noqa: E731
    posed = diffsol_jax.ODEProblem(field, y0=jnp.asarray(START), params=jnp.asarray(RATES))
    how = {"ode_solver": "bdf", "h0": FIRST_STEP, "rtol": tolerance, "atol": ABSOLUTE * tolerance}
    # What is compiled knows the problem by a number only: the function keeps it alive.
    return lambda k: jax.vmap(lambda k: posed.solve(k, jnp.array([0.0, END]), **how)[1][-1])(k)


def robertson_parts(y: Any, k: Any) -> list[Any]:
    """The same without an operation on whole vectors, which diffsol does not know."""
    slow, square, cross = k[0] * y[0], k[1] * y[1] * y[1], k[2] * y[1] * y[2]
    return [cross - slow, slow - square - cross, square]


CONTENDERS: dict[str, Callable[[float, Case], Run]] = {
    BASE: lambda tolerance, case: by_diffrax(diffrax.Kvaerno5(), STOCK, tolerance, case.lanes),
    SAME: lambda tolerance, case: by_diffrax(diffrax.Kvaerno5(), LLVM, tolerance, case.lanes),
    OURS: lambda tolerance, case: by_diffrax(Rodas5P(), LLVM, tolerance, case.lanes),
    "gradsolve": by_gradsolve,
    "diffsol-jax": by_diffsol,
}


def reference(case: Case) -> np.ndarray:
    """Final states to all digits that count here."""
    return np.asarray(jax.jit(by_diffrax(Rodas5P(), LLVM, 1e-12, case.lanes))(jnp.asarray(case.rates)))


def error(run: Run, case: Case, exact: np.ndarray) -> float:
    """Largest relative error of a component of a final state."""
    return float(np.max(np.abs(np.asarray(run(jnp.asarray(case.rates))) / exact - 1)))


def matched(name: str, case: Case, exact: np.ndarray, allowed: float) -> tuple[Run, float, float] | None:
    """The loosest tolerance of a contender that meets an error: the function, the tolerance, the error."""
    for tolerance in map(float, TRIED[TRIED < 30 * case.tolerance]):
        run = jax.jit(CONTENDERS[name](tolerance, case))
        try:
            found = error(run, case, exact)
        except Exception as failure:  # noqa: BLE001, a solver that gives up at this tolerance
            say(f"   {name} at {tolerance:.0e}: {str(failure).splitlines()[0][:80]}")
            continue
        if found <= allowed:
            return run, tolerance, found
    return None


def gradient(run: Run) -> Callable[[Any], Any]:
    """Value and gradient of a weighted sum of the final states."""
    return jax.value_and_grad(lambda k: jnp.sum(run(k) * WEIGHTS))


def bursts(calls: dict[str, Callable[[], Any]], budget: float) -> dict[str, Time]:
    """Times of one call of each, of which short ones are called several times in a row."""
    counts = {name: max(1, int(BURST / min(seconds_of(call, ()) for _ in range(3)))) for name, call in calls.items()}

    def repeated(name: str) -> None:
        for _ in range(counts[name]):
            jax.block_until_ready(calls[name]())

    taken = in_turn({name: functools.partial(repeated, name) for name in calls}, budget)
    return {n: Time(t.seconds / counts[n], t.least / counts[n], t.calls) for n, t in taken.items()}


def measured(case: Case, budget: float) -> Iterator[Row]:
    """One case: times of value and gradient, and of the first one of ours and of stock."""
    exact, rates = reference(case), jnp.asarray(case.rates)
    base = CONTENDERS[BASE](case.tolerance, case)
    allowed = error(jax.jit(base), case, exact)
    fused = CONTENDERS[SAME](case.tolerance, case)
    chosen: dict[str, tuple[Run, float, float]] = {BASE: (base, case.tolerance, allowed)}
    chosen[SAME] = fused, case.tolerance, error(jax.jit(fused), case, exact)
    for name in [n for n in CONTENDERS if n not in (BASE, SAME)]:
        if name in ("gradsolve", "diffsol-jax") and version_of(name) == ABSENT:
            say(f"   {name}: {ABSENT}")
        elif (found := matched(name, case, exact, allowed)) is None:
            say(f"   {name}: no tolerance down to {TRIED[-1]:.0e} has an error of at most {allowed:.1e}")
        else:
            chosen[name] = found
    (route,) = explain(gradient(chosen[OURS][0]), rates)
    first = {n: compiled(gradient(chosen[n][0]), rates)[1] for n in (BASE, SAME, OURS)}
    calls = {n: functools.partial(jax.jit(gradient(run)), rates) for n, (run, _, _) in chosen.items()}
    times = bursts(calls, budget)
    for name, (_, tolerance, found) in chosen.items():
        ratio = times[name].seconds / times[OURS].seconds
        about = f"tolerance {tolerance:.1e}, error {found:.1e}"
        say(f"{case!s:24}{name:18}{shown(times[name]):>12} ms {ratio:>9.1f} x   {about}")
    say(f"   runs on {route.backend}; to trace and compile: {', '.join(f'{n} {s:.2f} s' for n, s in first.items())}")
    numbers = {n: {"tolerance": t, "error": e} for n, (_, t, e) in chosen.items()}
    yield Row("stiff", str(case), "gradient", times, {"compilation": first, **numbers})


CASES = [Case(lanes, tolerance) for tolerance in (1e-6, 1e-10) for lanes in (1, 64)]


def main() -> None:
    """Print a table case by case, and write all rows as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=5.0, help="time to spend on each case (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write environment and rows here")
    options = parser.parse_args()
    prepare()
    about = environment() | {name: version_of(name) for name in ("llvmlite", "gradsolve", "diffsol-jax")}
    say(", ".join(f"{name} {value}" for name, value in about.items()))
    chosen: Sequence[Case] = [case for case in CASES if options.only in str(case)]
    rows = [row for case in chosen for row in measured(case, options.seconds)]
    if options.json is not None:
        found = [row._asdict() | {"times": {n: t._asdict() for n, t in row.times.items()}} for row in rows]
        options.json.write_text(json.dumps({"environment": about, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
