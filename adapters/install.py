"""Makes `GradSolveAdjoint` the default of `diffrax.diffeqsolve` in this process, and takes that back.

The default is a keyword default of the function inside `diffrax.diffeqsolve`, and is changed there: the object
`diffrax.diffeqsolve` stays the same one, so that a name imported before sees the change as well.
"""

import inspect
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import diffrax

from gradsolve_backend.adapters.adjoint import GradSolveAdjoint
from gradsolve_backend.keyed import Keyed

Classes = tuple[type[diffrax.AbstractAdjoint], ...]


class Installed(NamedTuple):
    """What is in place: the classes of adjoints that a call may name and does not get."""

    replace: Classes


_INSTALLED: Keyed[Installed | None] = Keyed(None)
_LOCK = threading.Lock()
# The objects that were there before; empty while nothing is installed.
_defaults: dict[FunctionType, dict[str, Any]] = {}
_loops: dict[type, Callable] = {}


def _function() -> FunctionType:
    """The function inside `diffrax.diffeqsolve`, with its default."""
    found = inspect.unwrap(diffrax.diffeqsolve)
    if not isinstance(found, FunctionType) or "adjoint" not in (found.__kwdefaults__ or {}):
        raise RuntimeError(
            "gradsolve_backend.install() was asked for, but this `diffrax.diffeqsolve` has no keyword default for "
            "`adjoint`: another package replaced it, or this version of Diffrax differs. Pass "
            "`adjoint=GradSolveAdjoint()` to the call instead."
        )
    return found


def _replacing(kind: type, own: Callable) -> Callable:
    """The method `loop` of a class of adjoints, by which its instances, but not those of subclasses, are replaced."""

    def loop(self: Any, **given: Any) -> Any:
        return GradSolveAdjoint().loop(**given) if type(self) is kind else own(self, **given)

    return loop


def _checked(replace: Classes) -> Classes:
    for kind in replace:
        if not (isinstance(kind, type) and issubclass(kind, diffrax.AbstractAdjoint)) or kind is GradSolveAdjoint:
            raise ValueError(f"install(replace=({kind!r},)): a class of Diffrax's adjoints is wanted.")
        if "loop" not in vars(kind):
            raise ValueError(
                f"install(replace=({kind.__name__},)): this class takes `loop` from another. Name that other one."
            )
    return tuple(dict.fromkeys(replace))


def _put(wanted: Installed | None) -> None:
    """Bring Diffrax into the wanted state, whatever state it is in."""
    function = _function() if wanted is not None else None
    _restore()
    if wanted is not None and function is not None:
        _defaults[function] = function.__kwdefaults__ or {}
        function.__kwdefaults__ = {**_defaults[function], "adjoint": GradSolveAdjoint()}
        for kind in wanted.replace:
            _loops[kind] = vars(kind)["loop"]
            setattr(kind, "loop", _replacing(kind, _loops[kind]))  # noqa: B010
    _INSTALLED.set(wanted)


def _restore() -> None:
    while _defaults:
        function, defaults = _defaults.popitem()
        function.__kwdefaults__ = defaults
    while _loops:
        kind, loop = _loops.popitem()
        setattr(kind, "loop", loop)  # noqa: B010


class Installation:
    """What `install` has put in place; leaving the `with` statement brings back what was there before."""

    def __init__(self, before: Installed | None, now: Installed) -> None:
        self._before, self._now = before, now

    def __repr__(self) -> str:
        return f"install(replace=({''.join(f'{kind.__name__}, ' for kind in self._now.replace)}))"

    def __enter__(self) -> "Installation":
        return self

    def __exit__(self, *error: Any) -> None:
        with _LOCK:
            _put(self._before)


def install(*, replace: Classes = ()) -> Installation:
    """Make `GradSolveAdjoint()` the default adjoint of `diffrax.diffeqsolve`, wherever in this process it is called.

    Compiled functions are traced again at their next call. To do it again changes nothing; as the context of a `with`
    statement it is taken back at its end. A library that passes an adjoint of its own keeps it.

    Args:
        replace: classes of adjoints that calls name and that `GradSolveAdjoint()` is to take the place of, for
            example `(diffrax.RecursiveCheckpointAdjoint,)`. Their options, and subclasses, are not looked at.

    Returns:
        What a `with` statement takes as its context, and may be ignored.

    Raises:
        ValueError: if `replace` holds anything but classes of Diffrax's adjoints.
        RuntimeError: if `diffrax.diffeqsolve` is not the function that Diffrax defines.
    """
    wanted = Installed(_checked(replace))
    with _LOCK:
        before = _INSTALLED.everywhere
        if before != wanted:
            _put(wanted)
    return Installation(before, wanted)


def uninstall() -> None:
    """Take `install` back: Diffrax's objects are again the very same ones. Without an `install` it does nothing."""
    with _LOCK:
        if _INSTALLED.everywhere is not None:
            _put(None)
