"""Asks the plugins what they have to say about one solve."""

from collections.abc import Callable, Iterator
from typing import Any

from gradsolve_backend.config import CHOOSE
from gradsolve_backend.log import log_route
from gradsolve_backend.plugins import blaming, plugin_manager
from gradsolve_backend.problem import Problem
from gradsolve_backend.route import Route


def _answers(hook: str, **arguments: Any) -> Iterator[tuple[str, Any]]:
    """Plugins, the one registered last first, and what each answers, but for None; asked one by one."""
    for implementation in reversed(getattr(plugin_manager().hook, hook).get_hookimpls()):
        source = implementation.plugin_name
        with blaming(source):
            answer = implementation.function(*(arguments[name] for name in implementation.argnames))
        if answer is not None:
            yield source, answer


def _wrong(hook: str, source: str, answer: Any, wanted: str) -> TypeError:
    return TypeError(f"{hook}() of the plugin {source} returns {answer!r}; {wanted} or None is wanted.")


def chosen_backend(problem: Problem) -> tuple[str | None, str] | None:
    """The backend that a plugin chooses for a problem, and who; None: no plugin chooses.

    Raises:
        Exception: whatever a plugin raises, with a note that says which distribution it came from.
        TypeError: if a plugin returns something else.
    """
    for source, answer in _answers("gradsolve_choose", problem=problem):
        if not isinstance(answer, str):
            raise _wrong("gradsolve_choose", source, answer, "the name of a backend")
        return answer, CHOOSE + source
    return None


def solver_step(solver: Any) -> tuple[str, Callable[..., Any]] | None:
    """The step that a plugin supplies for a solver, and who; None: no plugin has one. Raises as `chosen_backend`."""
    for source, answer in _answers("gradsolve_solver_step", solver=solver):
        if not callable(answer):
            raise _wrong("gradsolve_solver_step", source, answer, "a function")
        return source, answer
    return None


def announce(route: Route) -> None:
    """Tell the plugins, and the log if it is asked for, which way a solve takes. Raises as `chosen_backend`."""
    for source, answer in _answers("gradsolve_routed", route=route):
        raise _wrong("gradsolve_routed", source, answer, "nothing")
    log_route(route)
