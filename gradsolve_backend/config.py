"""What the environment asks. Read whenever a solve is traced, never at import."""

import os

BACKEND_VARIABLE = "GRADSOLVE_BACKEND"
ARGUMENT = "argument"
AUTOMATIC = "automatic"


def requested_backend(argument: str | None) -> tuple[str | None, str]:
    """The backend that the user asks for: by argument, else by environment variable, else none.

    Args:
        argument: the `backend` of `GradSolveAdjoint`.

    Returns:
        Its name, None where the choice is automatic, and where it came from: "argument",
        "GRADSOLVE_BACKEND" or "automatic". A variable that is empty counts as unset. Whether such a
        backend exists is seen by `gradsolve_backend.route.route`.
    """
    if argument is not None:
        return argument, ARGUMENT
    name = os.environ.get(BACKEND_VARIABLE, "").strip()
    return (name, BACKEND_VARIABLE) if name else (None, AUTOMATIC)


def as_written(name: str, origin: str) -> str:
    """A request as the user wrote it, for messages."""
    return f'GradSolveAdjoint(backend="{name}")' if origin == ARGUMENT else f"{origin}={name}"
