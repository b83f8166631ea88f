"""The command `python -m gradsolve_backend bench`."""

import argparse
import json
from pathlib import Path

import jax
from rich.console import Console

from gradsolve_backend.bench import Case, cases
from gradsolve_backend.measure_command import measured, report
from gradsolve_backend.table import ALIKE, Measurements, Row
from gradsolve_backend.target import Target

Found = list[tuple[Case, Measurements]]
ALIKE_FLOAT32 = 1e-3


def run(arguments: argparse.Namespace, console: Console | None = None) -> int:
    """Time each problem; the exit code is 1 if a gradient differs from stock's by more than round-off."""
    console, found = console or Console(), Found()
    with jax.enable_x64(True):
        for case in cases(arguments.long):
            if arguments.only in str(case):
                target = Target(case.loss, case.arguments)
                found.append((case, measured(console, target, None, arguments.seconds, ())))
                report(console, found[-1][1], str(case))
    if arguments.json:
        data = [{"problem": case.name, "lanes": case.lanes} | each.as_data() for case, each in found]
        Path(arguments.json).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if arguments.plot:
        drawn(found, arguments.plot)
    wrong = [f"{case}, {row.backend}: {row.difference:.1e}" for case, row in _rows(found) if not alike(case, row)]
    if wrong:
        console.print(f"FAILED: these gradients differ from stock's: {'; '.join(wrong)}.", highlight=False)
    return 1 if wrong else 0


def _rows(found: Found) -> list[tuple[Case, Row]]:
    return [(case, row) for case, each in found for row in each.rows]


def alike(case: Case, row: Row) -> bool:
    """Whether a gradient is stock's up to round-off. False for NaN."""
    limit = ALIKE if all(x.dtype.itemsize == 8 for x in jax.tree.leaves(case.arguments)) else ALIKE_FLOAT32
    return row.difference is None or row.difference <= limit


def drawn(found: Found, path: str) -> None:
    """Draw what was found."""
    # Only who asks for a picture needs matplotlib.
    from gradsolve_backend.bench_plot import draw

    draw([(str(case), each) for case, each in found], path)
