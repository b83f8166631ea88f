"""The command `python -m gradsolve_backend measure script.py:function`."""

import argparse
from collections.abc import Sequence
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gradsolve_backend.measure import measure
from gradsolve_backend.run import adjoints
from gradsolve_backend.table import Measurements
from gradsolve_backend.target import load


def run(arguments: argparse.Namespace, console: Console | None = None) -> int:
    """Measure and report; the exit code is 1 if no backend can run the function."""
    console = console or Console()
    if arguments.x64:
        jax.config.update("jax_enable_x64", True)
    names = arguments.backends.split(",") if arguments.backends else None
    try:
        target = load(arguments.target, arguments.arguments)
        found = measured(console, target, names, arguments.seconds, adjoints(arguments.replace))
    except ValueError as error:
        raise SystemExit(str(error)) from error
    report(console, found, arguments.target)
    if arguments.json:
        found.write_json(arguments.json)
    if arguments.plot:
        drawn(found, arguments.target, arguments.plot)
    return 0 if found.rows else 1


def measured(console: Console, target: Any, names: Sequence[str] | None, seconds: float, replace: Any) -> Measurements:
    """Measure with a bar that shows what is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("trace", total=1.0)

        def tell(what: str, share: float) -> None:
            progress.update(task, description=what, completed=share)
            if not console.is_terminal:
                console.print(f"... {what}", highlight=False)

        how = {"backends": names, "seconds": seconds, "replace": replace, "progress": tell}
        return measure(target.function, *target.arguments, **how)


def report(console: Console, found: Measurements, title: str) -> None:
    """The table under a title, what is left out, and the advice."""
    if found.rows:
        header, *lines = found.table
        table = Table(title=title, caption=f"medians of {found.rows[0].forward.calls} calls taken in turn")
        for name in header:
            table.add_column(name, justify="right" if name else "left", no_wrap=True)
        for line in lines:
            table.add_row(*line)
        console.print(table)
    for name, reason in found.left_out:
        console.print(f"not {name}: {reason}", highlight=False, soft_wrap=True, markup=False)
    console.print(found.advice, highlight=False, soft_wrap=True, markup=False)


def drawn(found: Measurements, title: str, path: str) -> None:
    """Draw what was found."""
    # Only who asks for a picture needs matplotlib.
    from gradsolve_backend.measure_plot import draw

    draw(found, title, path)
