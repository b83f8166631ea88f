"""What each command of `python -m gradsolve_backend` takes. Nothing here needs more than the library itself."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

Run = Callable[[argparse.Namespace], int]


def parser(commands: Mapping[str, Run]) -> argparse.ArgumentParser:
    """All commands; the parsed arguments hold in `command` the function among `commands` that runs it."""
    top = argparse.ArgumentParser(prog="python -m gradsolve_backend")
    added = top.add_subparsers(required=True, metavar="command")
    for name, describe in DESCRIPTIONS.items():
        text = (describe.__doc__ or "").partition("\n")[0].rstrip(".")
        command = added.add_parser(name, help=text, description=text)
        describe(command)
        command.set_defaults(command=commands[name])
    return top


def positive(text: str) -> int:
    """A whole number of at least one."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} given, at least 1 needed")
    return number


def demo(command: Any) -> None:
    """fit Lotka-Volterra to hare and lynx data, stock against GradSolve"""
    command.add_argument("--output", default="demo.png", help="file of the picture (default: %(default)s)")
    command.add_argument("--starts", type=positive, default=64, help="number of random starts (default: %(default)s)")
    command.add_argument("--seed", type=int, default=0, help="seed of the random starts (default: %(default)s)")


def run(command: Any) -> None:
    """run a program with GradSolveAdjoint as the default adjoint of diffrax.diffeqsolve"""
    command.add_argument("-m", dest="module", action="store_true", help="the program is the name of a module")
    _replace(command)
    command.add_argument("program", help="path of a script, or name of a module")
    command.add_argument("arguments", nargs=argparse.REMAINDER, help="of the program, also what looks like an option")


def measure(command: Any) -> None:
    """time a function and its gradient with each backend, side by side"""
    command.add_argument("target", help="script.py:function or package.module:function; it returns a real number")
    command.add_argument(
        "--arguments", default="arguments", metavar="NAME", help="tuple beside it, or what returns one"
    )
    command.add_argument("--backends", metavar="NAMES", help="only those, separated by commas, beside stock")
    command.add_argument("--seconds", type=float, default=3.0, help="to spend on timing (default: %(default)s)")
    command.add_argument("--x64", action="store_true", help="set jax_enable_x64 first")
    _replace(command)
    _files(command)


def doctor(command: Any) -> None:
    """show versions, devices, plugins, backends and settings; the exit code is 1 if the default backend fails"""


def bench(command: Any) -> None:
    """time the project's own problems with each backend, side by side"""
    command.add_argument("--long", action="store_true", help="more and larger problems, minutes")
    command.add_argument("--only", default="", metavar="TEXT", help="only problems whose name contains this")
    command.add_argument("--seconds", type=float, default=2.0, help="to spend on timing each (default: %(default)s)")
    _files(command)


def _replace(command: Any) -> None:
    text = "also where the program names this adjoint of Diffrax itself, such as RecursiveCheckpointAdjoint"
    command.add_argument("--replace", action="append", default=[], metavar="ADJOINT", help=text)


def _files(command: Any) -> None:
    command.add_argument("--json", metavar="FILE", help="write everything here")
    command.add_argument("--plot", metavar="FILE", help="draw it, in the format of the ending")


DESCRIPTIONS: Mapping[str, Callable[[Any], None]] = {
    "demo": demo,
    "run": run,
    "measure": measure,
    "doctor": doctor,
    "bench": bench,
}
