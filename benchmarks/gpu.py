"""GradSolve's fused kernels on an NVIDIA GPU against stock Diffrax and gradsolve, under 8 minutes on one GPU.

    python benchmarks/gpu.py --json gpu.json --png gpu.png

Forward solve, and value and gradient, of ensembles of 10^2 to 10^6 Lorenz systems, in both precisions. GradSolve and
stock Diffrax take the same steps; the error reached is stated for each. Without a GPU the script runs in a small size
in Pallas's interpret mode, so that it is tested itself, and times nothing.
"""

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from limit import step_operations
from side_by_side import STOCK, environment, relative_difference

from gradsolve_backend import GradSolveAdjoint, explain
from gradsolve_backend.timing import compiled, seconds_of

NOT_MEASURED = "not measured"
SIZES, SMALL = (100, 1_000, 10_000, 100_000, 1_000_000), (3, 40)
TOLERANCES = {"float64": 1e-8, "float32": 1e-5}
SECONDS = 450.0  # of the whole run
CALLS, LINE_SECONDS = 20, 1.5  # of one measurement
PALLAS, XLA = (GradSolveAdjoint(backend=name) for name in ("pallas", "xla"))
ADJOINTS = {"stock": STOCK, "pallas": PALLAS, "xla": XLA}
FORWARD, GRADIENT = "forward", "gradient"

#: Additions and multiplications a second, in double and in single precision, from the makers' data sheets.
PEAKS = {
    "A100": (9.7e12, 19.5e12), "H100": (33.5e12, 66.9e12), "H200": (33.5e12, 66.9e12), "B200": (37e12, 75e12),
    "RTX 4090": (1.29e12, 82.6e12), "L40": (1.41e12, 90.5e12),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One line: a contender on one case."""

    dtype: str
    lanes: int
    what: str
    contender: str
    milliseconds: float | str
    first_seconds: float | str  # to trace, compile and run once
    record_bytes: int | str  # reserved for the records of all lanes
    error: float  # largest relative one of the final states, of some lanes
    difference: float  # from stock, of all results
    peak_share: float | str  # of the card's peak rate, by the operations of the program


@dataclass(eq=False)
class Report:
    """What is known so far."""

    gpu: bool
    start: float = field(default_factory=time.perf_counter)
    rows: list[Row] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def left(self) -> float:
        """Seconds that are left."""
        return SECONDS - (time.perf_counter() - self.start)


def lorenz(t: Any, y: Any, rho: Any) -> Any:
    """The Lorenz system, with sigma = 10 and beta = 8/3."""
    return jnp.stack([10.0 * (y[1] - y[0]), y[0] * (rho - y[2]) - y[1], y[0] * y[1] - (8.0 / 3.0) * y[2]])


def inputs(lanes: int, dtype: str) -> tuple[Any, Any]:
    """Initial states and parameters of all lanes."""
    return jnp.tile(jnp.array([1.0, 0.0, 0.0], dtype), (lanes, 1)), jnp.linspace(20.0, 30.0, lanes, dtype=dtype)


def final(adjoint: Any, tolerance: float, y0: Any, rho: Any) -> diffrax.Solution:
    """The solution of one lane at t = 1."""
    control = diffrax.PIDController(rtol=tolerance, atol=tolerance)
    terms = diffrax.ODETerm(lorenz)
    how: dict[str, Any] = {"stepsize_controller": control, "adjoint": adjoint}
    return diffrax.diffeqsolve(terms, diffrax.Tsit5(), 0.0, 1.0, 0.01, y0, rho, **how)


def states(adjoint: Any, tolerance: float, y0s: Any, rhos: Any) -> Any:
    """Final states of all lanes."""
    return jax.vmap(lambda y0, rho: final(adjoint, tolerance, y0, rho).ys[0])(y0s, rhos)  # type: ignore[index]


def functions(adjoint: Any, tolerance: float) -> dict[str, Callable[..., Any]]:
    """What is measured: final states, and the value and gradient of the sum of their squares by all inputs."""
    ends = functools.partial(states, adjoint, tolerance)
    return {FORWARD: ends, GRADIENT: jax.value_and_grad(lambda *x: jnp.sum(ends(*x) ** 2), argnums=(0, 1))}


def reference(lanes: int) -> np.ndarray:
    """Final states of some lanes by a method of order 8 at a tight tolerance, in double precision."""
    jax.config.update("jax_enable_x64", True)
    y0s, rhos = inputs(lanes, "float64")
    few = slice(0, lanes, max(1, lanes // 50))
    solve = lambda y0, rho: diffrax.diffeqsolve(  # noqa: E731
        diffrax.ODETerm(lorenz), diffrax.Dopri8(), 0.0, 1.0, 0.01, y0, rho, max_steps=10_000,
        stepsize_controller=diffrax.PIDController(rtol=1e-12, atol=1e-12),
    ).ys[0]  # type: ignore[index]  # fmt: skip
    return np.asarray(jax.jit(jax.vmap(solve))(y0s[few], rhos[few]))


def timed(call: Callable[..., Any], arguments: Sequence[Any]) -> float:
    """Median milliseconds of a call."""
    about = seconds_of(call, arguments)
    count = int(np.clip(LINE_SECONDS / max(about, 1e-6), 3, CALLS))
    return 1e3 * statistics.median(seconds_of(call, arguments) for _ in range(count))


def peak() -> tuple[float, float] | None:
    """The card's peak rates, if they are known."""
    kind = jax.devices()[0].device_kind
    return next((rates for name, rates in PEAKS.items() if name in kind), None)


def operations(dtype: str, lanes: int) -> dict[str, float]:
    """Operations of a whole solve: those of its trial steps, and for the gradient those of the way back as well."""
    function, arguments = functions(PALLAS, TOLERANCES[dtype])[GRADIENT], inputs(2, dtype)
    step, back = step_operations(function, *arguments)
    count = lambda y0, rho: final(PALLAS, TOLERANCES[dtype], y0, rho).stats["num_steps"]  # noqa: E731
    steps = float(np.mean(jax.jit(jax.vmap(count))(*inputs(min(lanes, 1000), dtype)))) * lanes
    return {FORWARD: steps * step, GRADIENT: steps * (step + back)}


def measured(report: Report, dtype: str, lanes: int) -> Iterator[Row]:
    """All contenders on one case."""
    exact = reference(lanes)
    jax.config.update("jax_enable_x64", dtype == "float64")  # times are of the default precision
    tolerance, arguments = TOLERANCES[dtype], inputs(lanes, dtype)
    work, rates = (operations(dtype, lanes), peak()) if report.gpu else ({}, None)
    for what in (FORWARD, GRADIENT):
        wanted: Any = None
        for name, adjoint in ADJOINTS.items():
            if name == "xla" and not report.gpu:
                continue
            if report.left() < 0:
                report.missing.append(f"{dtype}, {lanes} lanes, {what}, {name}: the time was over")
                continue
            executable, seconds = compiled(functions(adjoint, tolerance)[what], *arguments)
            begin = time.perf_counter()
            found = jax.block_until_ready(executable(*arguments))
            seconds += time.perf_counter() - begin
            wanted = found if wanted is None else wanted
            milliseconds = timed(executable, arguments) if report.gpu else NOT_MEASURED
            share: float | str = NOT_MEASURED
            if isinstance(milliseconds, float) and rates is not None:
                share = work[what] / (1e-3 * milliseconds) / rates[dtype == "float32"]
            times = (milliseconds, round(seconds, 2) if report.gpu else NOT_MEASURED)
            accuracy = (error(adjoint, dtype, lanes, exact), relative_difference(found, wanted))
            yield Row(dtype, lanes, what, name, *times, held(adjoint, dtype, lanes), *accuracy, share)


def error(adjoint: Any, dtype: str, lanes: int, exact: np.ndarray) -> float:
    """Largest relative error of final states."""
    few = slice(0, lanes, max(1, lanes // 50))
    ends = jax.jit(functools.partial(states, adjoint, TOLERANCES[dtype]))(*(x[few] for x in inputs(lanes, dtype)))
    return float(np.max(np.linalg.norm(np.asarray(ends) - exact, axis=1) / np.linalg.norm(exact, axis=1)))


def held(adjoint: Any, dtype: str, lanes: int) -> int | str:
    """Bytes that GradSolve states for the records of all lanes; stock Diffrax states none."""
    if adjoint is STOCK:
        return "-"
    function = functions(adjoint, TOLERANCES[dtype])[GRADIENT]
    (route,) = explain(function, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs(lanes, dtype)))
    return lanes * route.record_bytes


def with_gradsolve(report: Report, lanes: int) -> Iterator[Row]:
    """The package gradsolve, in double precision, by the engine that it chooses itself."""
    import gradsolve  # pyright: ignore[reportMissingImports]  # an optional dependency
    from peers import Posed

    exact, few = reference(lanes), slice(0, lanes, max(1, lanes // 50))
    posed, (y0s, rhos) = Posed("lorenz_posed", 3, lorenz), inputs(lanes, "float64")
    how: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-8, "fused": True}
    initial, parameters = np.asarray(y0s), np.asarray(rhos)[:, None]
    record = lambda: gradsolve.grad_closure(posed, initial, parameters, wrt=("y0", "params"), **how)  # noqa: E731
    replay = record()
    ends = np.asarray(replay(y0s, rhos[:, None]))[few]
    error = float(np.max(np.linalg.norm(ends - exact, axis=1) / np.linalg.norm(exact, axis=1)))
    loss = jax.jit(jax.value_and_grad(lambda y0, p: jnp.sum(replay(y0, p) ** 2), argnums=(0, 1)))
    calls = {"record": (record, ()), "gradient of a replay": (loss, (y0s, rhos[:, None]))}
    for what, (call, arguments) in calls.items():
        milliseconds = timed(call, arguments) if report.gpu else NOT_MEASURED
        yield Row("float64", lanes, what, "gradsolve", milliseconds, NOT_MEASURED, "-", error, math.nan, NOT_MEASURED)


def cell(value: Any, scale: str = ".4g") -> str:
    """A value as a cell of the table."""
    return format(value, scale) if isinstance(value, float) else str(value)


COLUMNS = ("dtype", "lanes", "what", "contender", "ms", "first s", "record bytes", "error", "difference", "of peak")


def show(rows: Sequence[Sequence[Any]]) -> None:
    """Lines of the table."""
    for row in rows:
        print("  ".join(cell(x).rjust(12) for x in row), flush=True)


def draw(report: Report, path: Path) -> None:
    """Times over the number of lanes; without a GPU empty axes that say so."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # an optional dependency
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, what in zip(figure.subplots(1, 2), (FORWARD, GRADIENT), strict=True):
        axes.set(title=f"Lorenz, {what}", xlabel="lanes", ylabel="milliseconds")
        timed_rows = [r for r in report.rows if r.what == what and isinstance(r.milliseconds, float)]
        for name, dtype in dict.fromkeys((r.contender, r.dtype) for r in timed_rows):
            own = [(r.lanes, r.milliseconds) for r in timed_rows if (r.contender, r.dtype) == (name, dtype)]
            axes.loglog(*zip(*own, strict=True), "o-" if dtype == "float64" else "s--", label=f"{name}, {dtype}")
        if timed_rows:
            axes.legend()
        else:
            axes.text(0.5, 0.5, f"no GPU: {NOT_MEASURED}", ha="center", transform=axes.transAxes)
    figure.savefig(path, dpi=150)


def run(report: Report) -> None:
    """Measure everything, smallest ensembles first."""
    for lanes in SIZES if report.gpu else SMALL:
        for dtype in TOLERANCES:
            for row in measured(report, dtype, lanes):
                report.rows.append(row)
                show([asdict(row).values()])
        try:
            version("gradsolve")
        except PackageNotFoundError:
            continue
        for row in with_gradsolve(report, lanes):
            report.rows.append(row)
            show([asdict(row).values()])


def main() -> None:
    """Print the table, and write it and a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), metavar="FILE")
    parser.add_argument("--png", type=Path, default=Path("gpu.png"), metavar="FILE")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    report, about = Report(jax.default_backend() == "gpu"), environment()
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    if not report.gpu:
        print(f"There is no GPU here: small sizes in interpret mode, every time is {NOT_MEASURED}.")
        report.missing.append("all times, and the share of a card's peak: there is no GPU")
    try:
        version("gradsolve")
    except PackageNotFoundError:
        report.missing.append("gradsolve: not installed (pip install gradsolve==0.2.1)")
    show([COLUMNS])
    run(report)
    for line in report.missing:
        print(f"not run: {line}")
    found = {"environment": about, "rows": [asdict(row) for row in report.rows], "not run": report.missing}
    options.json.write_text(json.dumps(found, indent=1))
    draw(report, options.png)


if __name__ == "__main__":
    main()
