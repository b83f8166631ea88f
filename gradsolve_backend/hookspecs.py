"""The hooks that a plugin may implement. Plugins are found by the entry-point group `gradsolve_backend`."""

from collections.abc import Sequence

import pluggy

from gradsolve_backend.backend import AbstractBackend

PROJECT = "gradsolve_backend"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def gradsolve_backends() -> Sequence[AbstractBackend] | None:
    """Called once in a process, when the first solve is traced; None means: no backend on this machine.

    A plugin that lacks what it needs (a compiler, a device) returns None or an empty sequence
    rather than raise: what it raises reaches the user.

    Returns:
        The backends that this plugin offers. Their names must be unlike those of other plugins.
    """
