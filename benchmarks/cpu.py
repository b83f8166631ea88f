"""GradSolve's backend `llvm` against stock Diffrax, gradsolve and diffsol-jax on a CPU, side by side in one process.

    python benchmarks/cpu.py                          everything (half an hour)
    python benchmarks/cpu.py --only "lorenz 64" --json times.json
    python benchmarks/cpu.py --limit                  how close the kernels come to the limit of the machine

Times are medians of at least 20 calls taken in turn. What takes over 3 seconds is called less often, and the number of
calls then stands behind the time. The other packages are compared where they are installed:
`pip install gradsolve==0.2.1 warp-lang diffsol-jax==0.0.2`.
"""

import argparse
import functools
import hashlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from limit import peak, register_lanes, step_operations, vector_width
from peers import (
    ABSENT,
    FORWARD,
    GRADIENT,
    LLVM,
    LORENZ,
    PEERS,
    Case,
    Problem,
    backend,
    bytes_of_record,
    changed,
    compiled_gradient,
    contenders,
    dense,
    differentiated,
    lorenz96_problem,
    loss,
    steps_taken,
    version_of,
    with_diffrax,
)
from side_by_side import STOCK, environment, relative_difference

from gradsolve_backend.timing import seconds_of, steady_seconds_of

CALLS, MOST = 20, 500  # of what takes no longer than SLOW seconds
SLOW, SLOW_BUDGET, FEWEST = 3.0, 30.0, 3
THREADED = [Case(LORENZ, 100_000)]


class Time(NamedTuple):
    """Median and least seconds of a number of calls."""

    seconds: float
    least: float
    calls: int


class Row(NamedTuple):
    """What one line says: times by contender, and other numbers."""

    section: str
    case: str
    measured: str
    times: dict[str, Time]
    numbers: dict[str, Any]


def in_turn(calls: Mapping[Any, Callable[[], Any]], budget: float) -> dict[Any, Time]:
    """Call all in turn for about `budget` seconds, so that a busy moment hits all alike; first calls do not count."""
    about = [min(seconds_of(call, ()) for _ in range(2)) for call in calls.values()]
    rounds = int(np.clip(budget / sum(about), CALLS, MOST))
    counts = [rounds if s <= SLOW else int(np.clip(SLOW_BUDGET / s, FEWEST, CALLS)) for s in about]
    taken: list[list[float]] = [[] for _ in counts]
    for i in range(max(counts)):
        for call, count, seconds in zip(calls.values(), counts, taken, strict=True):
            if i < count:
                seconds.append(steady_seconds_of(call, ()))
    return {key: Time(statistics.median(s), min(s), len(s)) for key, s in zip(calls, taken, strict=True)}


def say(text: str) -> None:
    """A line of the report."""
    print(text, flush=True)


def shown(time: Time | None, absent: str = "-", unit: float = 1e3) -> str:
    """A time as a cell of a table, with the number of calls if that is small."""
    if time is None:
        return absent
    return f"{unit * time.seconds:.4g}" + (f" ({time.calls})" if time.calls < CALLS else "")


# ---- value and gradient, saved times ------------------------------------------------------------------


def compared(section: str, cases: Sequence[Case], budget: float) -> list[Row]:
    """Forward solve and gradient by all contenders."""
    calls = {
        (case, name, what): call
        for case in cases
        for name, make in contenders().items()
        for what, call in make(case).items()
    }
    results = {key: jax.tree.leaves(call()) for key, call in calls.items()}
    times = in_turn(calls, budget)
    rows = []
    for case, what in ((case, what) for case in cases for what in (FORWARD, GRADIENT)):
        names = [name for at, name, of in calls if (at, of) == (case, what)]
        found = {name: times[case, name, what] for name in names}
        if (key := (case, "gradsolve", "record")) in times:
            found["record"] = times[key]
        stock = results[case, "stock", what]
        different = {n: relative_difference(r := results[case, n, what], stock[: len(r)]) for n in names}
        rows.append(Row(section, str(case), what, found, {"difference from stock": different}))
    return rows


def say_compared(rows: Sequence[Row]) -> None:
    """A line for each; under a gradient what it costs in forward solves."""
    for row in rows:
        cells = [shown(row.times["stock"]), shown(row.times["llvm"])]
        cells.append(f"{row.times['stock'].seconds / row.times['llvm'].seconds:.1f}")
        cells += [shown(row.times.get(name), ABSENT) for name in ("gradsolve", "record", "diffsol-jax")]
        different = row.numbers["difference from stock"]["llvm"]
        say(f"{row.case:26} {row.measured:9}" + "".join(f"{cell:>14}" for cell in cells) + f"{different:>10.1e}")
    for forward, gradient in zip(rows[::2], rows[1::2], strict=True):
        ratios = {n: t.seconds / forward.times[n].seconds for n, t in gradient.times.items() if n != "record"}
        say(f"{'':26} gradient / forward: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()))


def say_columns() -> None:
    """The head of the table."""
    names = ("stock", "llvm", "ratio", "gradsolve", "its record", "diffsol-jax")
    say(f"{'milliseconds':36}" + "".join(f"{name:>14}" for name in names) + f"{'rel.diff.':>10}")


def ensembles(cases: Sequence[Case], budget: float) -> Iterator[Row]:
    """forward solve, and value and gradient with respect to initial states and parameters"""
    say_columns()
    for case in cases:
        rows = compared("ensembles", [case], budget)
        say_compared(rows)
        yield from rows


def saved_times(cases: Sequence[Case], budget: float) -> Iterator[Row]:
    """the loss is over many saved times, against the final state alone"""
    say_columns()
    for case in cases:
        rows = compared("saved times", [replace(case, saved=0), case], budget)
        say_compared(rows)
        for without, saving in zip(rows[:2], rows[2:], strict=True):
            factors = {n: t.seconds / without.times[n].seconds for n, t in saving.times.items()}
            say(f"{'':26} saving, {saving.measured}: " + ", ".join(f"{n} x {f:.2f}" for n, f in factors.items()))
        yield from rows


# ---- compilation --------------------------------------------------------------------------------------


def compilation(problems: Sequence[Problem], budget: float) -> Iterator[Row]:
    """to trace and compile value and gradient of a function that is new, in a process that has compiled others"""
    say(f"{'seconds':36}{'stock':>14}{'llvm':>14}   runs on")
    for problem in problems:
        calls = {name: _fresh(problem, adjoint) for name, adjoint in (("stock", STOCK), ("llvm", LLVM))}
        times = in_turn(calls, budget)
        taken = backend(Case(problem, 64))
        say(f"{problem.name:36}" + "".join(f"{shown(times[name], unit=1.0):>14}" for name in calls) + f"   {taken}")
        yield Row("compilation", problem.name, "compile", times, {"runs on": taken})
    # A process has 65,530 memory mappings, and compiled functions hold many.
    jax.clear_caches()


def _fresh(problem: Problem, adjoint: Any) -> Callable[[], Any]:
    """A call that compiles a gradient that was never compiled before: a constant in it is another each time."""
    changes = iter(np.arange(1, 1000) * 1e-9)
    return lambda: compiled_gradient(Case(changed(problem, next(changes)), 64), adjoint)


# ---- threads ------------------------------------------------------------------------------------------


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Processes that are started inside run on these cores only; so do the threads of XLA in them."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def threads(cases: Sequence[Case], budget: float) -> Iterator[Row]:
    """one thread against two, in processes that take turns"""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        say("threads: not measured, as there are not two cores to choose from")
        return
    for number, case in enumerate(cases):
        program = f"import cpu, json; print(json.dumps(cpu.alone({number}, {budget / 4})))"
        found: dict[str, list[dict[str, Any]]] = {"1": [], "2": []}
        for count in ("1", "2", "1", "2"):
            with on_cores(set(cores[: int(count)])):
                command = [sys.executable, "-c", program]
                output = subprocess.run(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, check=True).stdout
            found[count].append(json.loads(output))
        same = len({run["bits"] for runs in found.values() for run in runs}) == 1
        say(f"{f'milliseconds, {case}':36}{'1 thread':>14}{'2 threads':>14}{'ratio':>14}   same bits: {same}")
        for what in (FORWARD, GRADIENT):
            times = {n: _together([Time(*run[what]) for run in runs]) for n, runs in found.items()}
            ratio = times["1"].seconds / times["2"].seconds
            say(f"{what:36}{shown(times['1']):>14}{shown(times['2']):>14}{ratio:>13.2f}")
            yield Row("threads", str(case), what, times, {"same bits": same})


def _together(times: Sequence[Time]) -> Time:
    return Time(statistics.median(t.seconds for t in times), min(t.least for t in times), sum(t.calls for t in times))


def alone(number: int, budget: float) -> dict[str, Any]:
    """What a process of `threads` measures: times, and a hash of value and gradient."""
    prepare()
    calls = with_diffrax(LLVM, THREADED[number])
    found = jax.tree.leaves(calls[GRADIENT]())
    bits = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in found)).hexdigest()
    return {**in_turn(calls, budget), "bits": bits}


# ---- cost of a step -----------------------------------------------------------------------------------


def lane_steps(cases: Sequence[Case], budget: float) -> Iterator[Row]:
    """time for one trial step of one lane; (GB): the record of the gradient might not fit into memory"""
    say(f"{'nanoseconds':36}{'steps a lane':>14}{FORWARD:>14}{GRADIENT:>14}")
    for case in cases:
        steps = int(steps_taken(case).sum())
        room, record = _memory(), bytes_of_record(case)
        what = (FORWARD, GRADIENT) if record < room else (FORWARD,)
        calls = with_diffrax(LLVM, case, what)
        times = in_turn(calls, budget)
        cells = [shown(times.get(w), f"({record / 1e9:.1f} GB)", 1e9 / steps) for w in (FORWARD, GRADIENT)]
        say(f"{case!s:36}{steps / case.lanes:>13.1f}" + "".join(f"{cell:>14}" for cell in cells))
        yield Row("lane steps", str(case), "all", times, {"steps": steps, "record bytes": record})


def _memory() -> float:
    """Bytes that a record may take."""
    return 0.75 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def tolerances(cases: Sequence[Case], budget: float) -> Iterator[Row]:
    """time against steps of all vectors of lanes, and how far it is from a straight line"""
    calls = {(case, what): call for case in cases for what, call in with_diffrax(LLVM, case).items()}
    times = in_turn(calls, budget)
    steps = np.array([_block_steps(case) for case in cases])
    for what in (FORWARD, GRADIENT):
        own = [times[case, what] for case in cases]
        seconds = np.array([time.seconds for time in own])
        # Relative deviations count, so that short solves have a say.
        slope, start = np.polyfit(steps, seconds, 1, w=1 / seconds)
        off = seconds / (start + slope * steps) - 1
        say(f"{what}, {cases[0].problem} {cases[0].lanes}: {1e6 * start:.3g} us a call, {1e9 * slope:.4g} ns a step")
        for case, time, count, wrong in zip(cases, own, steps, off, strict=True):
            each = 1e9 * time.seconds / count
            cells = f"{count:>6} steps {shown(time):>9} ms {each:>8.4g} ns a step {wrong:>+8.2%} off the line"
            say(f"tolerance {case.tolerance:<26.0e}{cells}")
            numbers = {"steps": int(count), "off": float(wrong), "call": float(start), "step": float(slope)}
            yield Row("tolerances", str(case), what, {"llvm": time}, numbers)
        say(f"within 1 % of a straight line: {'yes' if np.abs(off).max() <= 0.01 else 'no'}")


def _block_steps(case: Case) -> int:
    """Steps of all vectors of lanes; each takes as many as its slowest lane."""
    width = vector_width(functools.partial(loss, case, LLVM), *case.inputs)
    return int(steps_taken(case).reshape(-1, width).max(axis=1).sum())


# ---- the limit of the machine -------------------------------------------------------------------------


def limit(cases: Sequence[Case], budget: float) -> Iterator[Row]:
    """floating-point operations a second, against a loop of nothing but multiply-adds"""
    cores, lanes = environment()["cores"], register_lanes()
    flat_out, most = peak(cores)
    for case in cases:
        step, back = step_operations(differentiated(functools.partial(loss, case, LLVM)), *case.inputs)
        calls = with_diffrax(LLVM, case)
        times = in_turn({**calls, "peak": flat_out}, budget)
        fastest = most / times["peak"].least
        hertz = fastest / (cores * lanes * 4)
        say(f"peak: {cores} cores x {hertz / 1e9:.2f} GHz x {lanes} lanes x 2 fma x 2 = {fastest / 1e9:.1f} GFLOP/s")
        trials, accepted = (int(steps_taken(case, f"num_{kind}").sum()) for kind in ("steps", "accepted_steps"))
        say(f"{case}: {step} operations a lane in each of {trials} steps, {back} on the way back in {accepted} of them")
        for what, total in ((FORWARD, step * trials), (GRADIENT, step * trials + back * accepted)):
            rate = total / times[what].seconds
            say(f"{what:9} {rate / 1e9:.1f} GFLOP/s, {rate / fastest:.1%} of the peak")
            numbers = {"operations": total, "peak": fastest}
            yield Row("limit", str(case), what, {"llvm": times[what]}, numbers)


# ---- the command --------------------------------------------------------------------------------------

Sections = dict[str, tuple[Callable[..., Iterator[Row]], Sequence[Case | Problem]]]
LIMIT: Sections = {"limit": (limit, [Case(LORENZ, 16_384), Case(lorenz96_problem(40), 1024)])}
SECTIONS: Sections = {
    "ensembles": (
        ensembles,
        [
            *(Case(LORENZ, lanes) for lanes in (1, 64, 1024, 100_000)),
            *(Case(lorenz96_problem(dimension), 256) for dimension in (10, 40)),
        ],
    ),
    "saved times": (saved_times, [Case(LORENZ, 64, saved=1000)]),
    "compilation": (compilation, [LORENZ, lorenz96_problem(40), dense()]),
    "threads": (threads, THREADED),
    "lane steps": (lane_steps, [Case(LORENZ, lanes) for lanes in (64, 1024, 16_384, 1_000_000)]),
    "tolerances": (tolerances, [Case(LORENZ, 64, tolerance=float(f"1e-{n}")) for n in range(4, 13)]),
}


def prepare() -> None:
    """No code may come from a folder: times of compilation would be those of reading."""
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_enable_compilation_cache", False)
    os.environ.pop("GRADSOLVE_CACHE_DIR", None)


def main() -> None:
    """Print a table for each section as it is measured, and write all rows as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", action="store_true", help="only how close the kernels come to the machine's limit")
    parser.add_argument("--only", default="", metavar="TEXT", help="only lines whose section and case contain this")
    parser.add_argument("--seconds", type=float, default=5.0, help="time to spend on each line (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write environment and rows here")
    options = parser.parse_args()
    prepare()
    about = environment() | {name: version_of(name) for name in ("llvmlite", *PEERS, "warp-lang")}
    say(", ".join(f"{name} {value}" for name, value in about.items()))
    rows: list[Row] = []
    for name, (section, cases) in (LIMIT if options.limit else SECTIONS).items():
        if chosen := [case for case in cases if options.only in f"{name} {case}"]:
            say(f"\n{name}: {section.__doc__}")
            rows += section(chosen, options.seconds)
    if options.json is not None:
        found = [row._asdict() | {"times": {n: t._asdict() for n, t in row.times.items()}} for row in rows]
        options.json.write_text(json.dumps({"environment": about, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
