"""Finds the plugins and asks them for their backends."""

import contextlib
import functools
import importlib.metadata
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pluggy

from gradsolve_backend import hookspecs
from gradsolve_backend.backend import AbstractBackend

_FIELDS = {"name": str, "platforms": frozenset, "rank": int}


@functools.cache
def plugin_manager() -> pluggy.PluginManager:
    """The process's plug-in manager, with every installed plugin; built at the first call."""
    return load(importlib.metadata.entry_points(group=hookspecs.PROJECT))


@functools.cache
def backends() -> Mapping[str, AbstractBackend]:
    """All backends of all installed plugins by name, asked for at the first call; read-only."""
    return collect(plugin_manager())


def load(entry_points: Iterable[importlib.metadata.EntryPoint]) -> pluggy.PluginManager:
    """Import the plugins that these entry points name.

    Raises:
        Exception: whatever importing a plugin raises, with a note that says which distribution it came from.
        ValueError: if a plugin implements no hook.
        pluggy.PluginValidationError: if a plugin implements a hook that does not exist.
    """
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    for entry in entry_points:
        source = _source(entry)
        with blaming(source):
            plugin = entry.load()
            # Unlike pluggy's own loader, which passes over a second entry point of the same name.
            manager.register(plugin, name=source)
            if not manager.get_hookcallers(plugin):
                raise ValueError(
                    f"{entry.value} implements no hook of gradsolve_backend. "
                    "Decorate its function `gradsolve_backends` with `gradsolve_backend.hookimpl`."
                )
            manager.check_pending()
    return manager


def collect(manager: pluggy.PluginManager) -> Mapping[str, AbstractBackend]:
    """Ask every plugin of this manager for its backends.

    Raises:
        Exception: whatever a plugin raises, with a note that says which distribution it came from.
        TypeError: if a plugin offers something that is no backend, or one with a field of the wrong type.
        ValueError: if two backends have one name.
        RuntimeError: if there is no backend at all.
    """
    found: dict[str, AbstractBackend] = {}
    sources: dict[str, str] = {}
    for implementation in manager.hook.gradsolve_backends.get_hookimpls():
        source = implementation.plugin_name
        with blaming(source):
            offered = _offered(implementation)
        for backend in offered:
            if backend.name in found:
                raise ValueError(
                    f'Two plugins offer a backend named "{backend.name}": {sources[backend.name]}, and {source}. '
                    "Uninstall one of them."
                )
            found[backend.name], sources[backend.name] = backend, source
    if not found:
        raise RuntimeError(
            "No plugin offers a backend, not even the built-in ones: gradsolve_backend is imported from a "
            "folder and not installed. Install it, for example with `pip install -e .` in that folder."
        )
    return types.MappingProxyType(found)


def _offered(implementation: pluggy.HookImpl) -> list[AbstractBackend]:
    offered: Any = implementation.function()
    return [_checked(backend) for backend in offered or ()]


def _checked(backend: object) -> AbstractBackend:
    if not isinstance(backend, AbstractBackend):
        raise TypeError(f"gradsolve_backends() offers {backend!r}, which is no gradsolve_backend.AbstractBackend.")
    for field, kind in _FIELDS.items():
        value = getattr(backend, field)
        if not isinstance(value, kind):
            raise TypeError(f"{type(backend).__name__}.{field} is {value!r}, but must be a {kind.__name__}.")
    return backend


def _source(entry: importlib.metadata.EntryPoint) -> str:
    distribution = "an unknown distribution" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
    return f"{entry.name} = {entry.value} of {distribution}"


@contextlib.contextmanager
def blaming(source: str) -> Iterator[None]:
    """Add to whatever is raised a note that says which plugin it came from."""
    try:
        yield
    except Exception as error:
        error.add_note(f"This comes from the gradsolve_backend plugin {source}. Mend or uninstall it.")
        raise
