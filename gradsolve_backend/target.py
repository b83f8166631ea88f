"""Finds the function that a command line names, and its arguments."""

import importlib
import runpy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gradsolve_backend import install
from gradsolve_backend.config import nearest_file, read_file, use_file

LOADED = "gradsolve_target"  # what `__name__` is in the script


class Target(NamedTuple):
    """A function and the arguments to call it with."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def load(text: str, arguments: str) -> Target:
    """The function that `script.py:function` or `package.module:function` names.

    The script is run first, as an import would; settings are taken from the pyproject.toml nearest to it.

    Args:
        text: where the function is.
        arguments: name of its arguments beside it: a tuple, or a function without arguments that returns one.

    Raises:
        ValueError: if there is no such file, function or tuple.
        Exception: whatever the script raises.
    """
    place, colon, name = text.rpartition(":")
    if not (place and colon and name.isidentifier()):
        raise ValueError(f"{text}: script.py:function or package.module:function is wanted.")
    names = _script(place) if place.endswith(".py") else vars(importlib.import_module(place))
    function, given = names.get(name), names.get(arguments)
    if not callable(function):
        raise ValueError(f"{text}: {place} has no function {name}.")
    if given is None:
        raise ValueError(
            f"{text}: the arguments to call {name} with are not there. Name them in {place} as a tuple "
            f"`{arguments} = (...)`, or as a function that returns one, or name another with --arguments."
        )
    given = given() if callable(given) else given
    return Target(function, given if isinstance(given, tuple) else (given,))


def _script(place: str) -> Mapping[str, Any]:
    path = Path(place)
    if not path.is_file():
        raise ValueError(f"{place}: no such file.")
    folder = path.resolve().parent
    if (file := nearest_file(folder)) is not None:
        use_file(read_file(file))
    if not sys.flags.safe_path:
        sys.path[0] = str(folder)
    with install():
        return runpy.run_path(place, run_name=LOADED)
