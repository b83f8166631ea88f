"""What the user asks for, and where. Read whenever a solve is traced.

The first of these that says something holds: an argument of `GradSolveAdjoint`, `configure`, the environment, the
pyproject.toml of `python -m gradsolve_backend run`; else the choice is automatic.
"""

import dataclasses
import json
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from gradsolve_backend.keyed import Keyed

ARGUMENT = "argument"
CONFIGURE = "configure"
CHOOSE = "gradsolve_choose of "  # and the plugin
AUTOMATIC = "automatic"
TABLE = "tool.gradsolve_backend"


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting as it is in force: its value, None where the choice is automatic, and where it came from.

    `origin` is "argument", "configure", the name of an environment variable, the path of a file, or "automatic".
    """

    name: str
    value: Any
    origin: str

    @property
    def written(self) -> str:
        """The request as the user wrote it, for messages."""
        return as_written(self.value, self.origin, self.name)


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a setting may be: `read` turns what was written into its value, or None if it is not `allowed`."""

    variable: str
    read: Callable[[Any], Any]
    allowed: str


def _name(given: Any) -> str | None:
    return given if isinstance(given, str) else None


def _bytes(given: Any) -> int | None:
    number = None if isinstance(given, bool) or not str(given).isdecimal() else int(given)
    return number or None


def _log(given: Any) -> str | None:
    return given if given in ("routes", "off") else None


def _folder(given: Any) -> str | None:
    return os.fspath(given) if isinstance(given, (str, os.PathLike)) and str(given) else None


KINDS: Mapping[str, Kind] = {
    "backend": Kind("GRADSOLVE_BACKEND", _name, 'the name of a backend is wanted, or "automatic".'),
    "memory": Kind(
        "GRADSOLVE_MEMORY", _bytes, "a whole, positive number of bytes is wanted, for the record of one lane."
    ),
    "log": Kind("GRADSOLVE_LOG", _log, '"routes" is wanted, which logs a line for each traced solve, or "off".'),
    "cache_dir": Kind("GRADSOLVE_CACHE_DIR", _folder, "the path of a folder is wanted, for generated machine code."),
}

Given = tuple[tuple[str, Any], ...]  # settings by name, hashable


@dataclasses.dataclass(frozen=True)
class File:
    """The settings of a pyproject.toml."""

    path: str
    given: Given


_CONFIGURED: Keyed[Given] = Keyed(())
_FILE: Keyed[File | None] = Keyed(None)


def as_written(value: Any, origin: str, name: str = "backend") -> str:
    """A request as the user wrote it, for messages."""
    shown = json.dumps(value) if isinstance(value, str) else repr(value)
    if origin in (ARGUMENT, CONFIGURE):
        return f"{'GradSolveAdjoint' if origin == ARGUMENT else CONFIGURE}({name}={shown})"
    if origin.startswith(CHOOSE):
        return f"gradsolve_choose() -> {shown} of the plugin {origin.removeprefix(CHOOSE)}"
    return f"{name} = {shown} in [{TABLE}] of {origin}" if origin.endswith(".toml") else f"{origin}={value}"


def _checked(asked: Setting) -> Setting:
    """The setting with its value read.

    Raises:
        ValueError: if it is not allowed; says where it was written, what, and what is allowed.
    """
    if asked.value == AUTOMATIC:
        return Setting(asked.name, None, asked.origin)
    value = KINDS[asked.name].read(asked.value)
    if value is None:
        raise ValueError(f"{asked.written}: {KINDS[asked.name].allowed}")
    return dataclasses.replace(asked, value=value)


def setting(name: str, argument: Any = None) -> Setting:
    """What is in force for "backend", "memory", "log" or "cache_dir".

    Args:
        name: of the setting.
        argument: what `GradSolveAdjoint` was given; None: nothing.

    Raises:
        ValueError: if the value that is in force is not allowed.
    """
    variable, file = KINDS[name].variable, _FILE.value
    asked = [
        Setting(name, argument, ARGUMENT),
        Setting(name, dict(_CONFIGURED.value).get(name), CONFIGURE),
        Setting(name, os.environ.get(variable, "").strip() or None, variable),
        Setting(name, None if file is None else dict(file.given).get(name), "" if file is None else file.path),
    ]
    found = next((each for each in asked if each.value is not None), None)
    return Setting(name, None, AUTOMATIC) if found is None else _checked(found)


def requested_backend(argument: str | None) -> tuple[str | None, str]:
    """Name of the backend that the user asks for, None where the choice is automatic, and where that came from.

    Whether such a backend exists is seen by `gradsolve_backend.route.route`.
    """
    found = setting("backend", argument)
    return found.value, found.origin


def requested_memory(argument: int | None) -> int | None:
    """Bytes per lane that the record of a solve may reserve; None: as many as the backend finds right."""
    return setting("memory", argument).value


def cache_folder() -> str | None:
    """Where generated machine code is kept between processes; None where nobody asks for a folder."""
    return setting("cache_dir").value


class Configured:
    """What `configure` has set; leaving the `with` statement takes it back."""

    def __init__(self, given: Given) -> None:
        self._before = _CONFIGURED.everywhere
        self._given = given
        self._context: Any = None
        _CONFIGURED.set(_merged(self._before, given))

    def __repr__(self) -> str:
        return f"configure({', '.join(f'{name}={value!r}' for name, value in self._given)})"

    def __enter__(self) -> "Configured":
        # From here on only this thread sees it.
        _CONFIGURED.set(self._before)
        self._context = _CONFIGURED.within(_merged(_CONFIGURED.value, self._given))
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


def _merged(old: Given, new: Given) -> Given:
    return tuple(sorted((dict(old) | dict(new)).items()))


def configure(
    *,
    backend: str | None = None,
    memory: int | None = None,
    log: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Configured:
    """Set what solves take that do not say it themselves, in place of the environment variables.

    Holds for the process; as the context of a `with` statement for the statement, in its thread. JAX traces every
    compiled function again at its next call, since what it was compiled with may hold no longer.

    Args:
        backend: the name of a backend; "automatic": the fastest that can run the solve, whatever the environment says.
        memory: bytes per lane for the record of a solve.
        log: "routes" logs a line for each traced solve; "off" does not.
        cache_dir: folder for generated machine code. It must be trusted: what lies in it is executed.
            None, for any of them: leave it as it is.

    Returns:
        What a `with` statement takes as its context, and may be ignored.

    Raises:
        ValueError: if a value is not allowed.
    """
    refresh()
    asked = {"backend": backend, "memory": memory, "log": log, "cache_dir": cache_dir}
    given = {name: value for name, value in asked.items() if value is not None}
    for name, value in given.items():
        _checked(Setting(name, value, CONFIGURE))
    if cache_dir is not None:
        given["cache_dir"] = os.fspath(cache_dir)
    return Configured(tuple(sorted(given.items())))


@dataclasses.dataclass(frozen=True)
class Environment:
    """Stands for the environment variables as they are: a field of what JAX compiles for, which it compares.

    It flattens to their present values, so that a function compiled under others does not serve.
    """


def _variables() -> tuple[str | None, ...]:
    return tuple(os.environ.get(kind.variable) for kind in KINDS.values())


jax.tree_util.register_pytree_node(Environment, lambda _: ((), _variables()), lambda *_: Environment())
_SEEN: Keyed[tuple[str | None, ...]] = Keyed(_variables())


def refresh() -> None:
    """Have every compiled function traced again if an environment variable changed since this was last called.

    Nothing tells JAX of such a change: without it, a function that holds a solve goes on as it was compiled.
    """
    _SEEN.set(_variables())


def nearest_file(folder: Path) -> Path | None:
    """The pyproject.toml of this folder, or of the nearest one above that has any."""
    return next((p for f in (folder, *folder.parents) if (p := f / "pyproject.toml").is_file()), None)


def read_file(path: Path) -> File:
    """The table `[tool.gradsolve_backend]` of a pyproject.toml; empty where there is none.

    Raises:
        ValueError: if the table has a key that is no setting, or a value that is not allowed.
    """
    table = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("gradsolve_backend", {})
    for name, value in table.items():
        if name not in KINDS:
            raise ValueError(f"{as_written(value, str(path), name)}: no such setting. There are: {', '.join(KINDS)}.")
        _checked(Setting(name, value, str(path)))
    return File(str(path), tuple(sorted(table.items())))


def use_file(file: File | None) -> None:
    """Take settings from this file where nothing else says them."""
    _FILE.set(file)
