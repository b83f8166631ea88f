"""Command line: `python -m gradsolve_backend run script.py`, and other commands."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from gradsolve_backend import commands, run

EXTRAS = ("matplotlib", "rich")


def loaded(name: str) -> ModuleType:
    """A module that needs packages which the library itself does not, loaded when its command is asked for.

    Raises SystemExit, with the command to install them, if these are missing.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRAS:
            raise
        raise SystemExit(f"This command needs {error.name}: pip install 'gradsolve_backend[demo]'") from error


def run_demo(arguments: argparse.Namespace) -> int:
    """Run the main job; 0 if its gradients agree with stock's."""
    demo, console = loaded("gradsolve_backend.demo"), loaded("rich.console")
    options = demo.Options(starts=arguments.starts, seed=arguments.seed, output=arguments.output)
    return demo.run(options, console.Console())


def run_program(arguments: argparse.Namespace) -> int:
    """Run a script or a module; what it raises leaves Python as if it ran alone."""
    try:
        run.prepare(arguments.program, arguments.arguments, module=arguments.module, replace=arguments.replace)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error
    run.execute(arguments.program, module=arguments.module)
    return 0


def run_measure(arguments: argparse.Namespace) -> int:
    """Measure a function of the user's; 0 if some backend could run it."""
    return loaded("gradsolve_backend.measure_command").run(arguments)


def run_doctor(arguments: argparse.Namespace) -> int:
    """Say what is there; 0 if the default backend works."""
    return loaded("gradsolve_backend.adapters.doctor").run()


def run_bench(arguments: argparse.Namespace) -> int:
    """Time the project's own problems; 0 if all gradients agree with stock's."""
    return loaded("gradsolve_backend.bench_command").run(arguments)


COMMANDS: dict[str, commands.Run] = {
    "demo": run_demo,
    "run": run_program,
    "measure": run_measure,
    "doctor": run_doctor,
    "bench": run_bench,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = commands.parser(COMMANDS).parse_args(argv)
    return arguments.command(arguments)


if __name__ == "__main__":
    sys.exit(main())
