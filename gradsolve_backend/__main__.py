"""Command line: `python -m gradsolve_backend demo`."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

EXTRAS = ("matplotlib", "rich")


def demo_modules() -> tuple[ModuleType, ModuleType]:
    """The demo and rich's console, loaded when asked for: they need packages that the library itself does not.

    Raises SystemExit, with the command to install them, if these are missing.
    """
    try:
        return importlib.import_module("gradsolve_backend.demo"), importlib.import_module("rich.console")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRAS:
            raise
        raise SystemExit(f"The demo needs {error.name}: pip install 'gradsolve_backend[demo]'") from error


def run_demo(arguments: argparse.Namespace) -> int:
    """Run the main job; 0 if its gradients agree with stock's."""
    demo, console = demo_modules()
    options = demo.Options(starts=arguments.starts, seed=arguments.seed, output=arguments.output)
    return demo.run(options, console.Console())


def positive(text: str) -> int:
    """A whole number of at least one."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} given, at least 1 needed")
    return number


def parser() -> argparse.ArgumentParser:
    """All subcommands; each sets `command`, a function of the parsed arguments that returns the exit code."""
    top = argparse.ArgumentParser(prog="python -m gradsolve_backend")
    commands = top.add_subparsers(required=True, metavar="command")
    demo = commands.add_parser("demo", help="fit Lotka-Volterra to hare and lynx data, stock against GradSolve")
    demo.add_argument("--output", default="demo.png", help="file of the picture (default: %(default)s)")
    demo.add_argument("--starts", type=positive, default=64, help="number of random starts (default: %(default)s)")
    demo.add_argument("--seed", type=int, default=0, help="seed of the random starts (default: %(default)s)")
    demo.set_defaults(command=run_demo)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    arguments = parser().parse_args(argv)
    return arguments.command(arguments)


if __name__ == "__main__":
    sys.exit(main())
