"""Logs the way of each solve that is traced, where `GRADSOLVE_LOG=routes` or `configure(log="routes")` asks for it."""

import logging
import sys
import traceback
from collections.abc import Iterator

from gradsolve_backend.config import setting
from gradsolve_backend.route import Route

LOGGER = logging.getLogger("gradsolve_backend.routes")
# Where the program has set up no logging, as `logging.lastResort`, which takes warnings only.
_ALONE = logging.StreamHandler()
_ALONE.setFormatter(logging.Formatter("%(name)s: %(message)s"))
# Whose frames are between the user's call and this module. JAX's own use `jax._src`.
_PASSED = ("gradsolve_backend", "diffrax", "equinox", "jax", "jaxtyping", "optimistix", "lineax")


def log_route(route: Route) -> None:
    """Log a line, if that is asked for.

    Raises:
        ValueError: if what is asked for is not allowed.
    """
    if setting("log").value != "routes":
        return
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(logging.INFO)
    message = f"{_place()}{route.line}"
    if LOGGER.hasHandlers():
        LOGGER.info("%s", message)
    else:
        _ALONE.setStream(sys.stderr)
        _ALONE.handle(LOGGER.makeRecord(LOGGER.name, logging.INFO, "", 0, message, (), None))


def _place() -> str:
    """File and line of the user's call; empty if there is none."""
    return next((f"{frame}: " for frame in _frames()), "")


def _frames() -> Iterator[str]:
    for frame, line in traceback.walk_stack(None):
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _PASSED:
            yield f"{frame.f_code.co_filename}:{line}"
