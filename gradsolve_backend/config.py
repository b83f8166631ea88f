"""What the environment asks. Read whenever a solve is traced, never at import."""

import os

BACKEND_VARIABLE = "GRADSOLVE_BACKEND"
MEMORY_VARIABLE = "GRADSOLVE_MEMORY"
FOLDER_VARIABLE = "GRADSOLVE_CACHE_DIR"
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


def requested_memory(argument: int | None) -> int | None:
    """Bytes per lane that the record of a solve may reserve: by argument, else by environment variable, else None.

    Raises:
        ValueError: if what is asked for is no positive number of bytes.
    """
    asked = argument if argument is not None else os.environ.get(MEMORY_VARIABLE, "").strip() or None
    if asked is None:
        return None
    if not str(asked).isdecimal() or int(asked) == 0:
        origin = f"GradSolveAdjoint(memory={asked!r})" if argument is not None else f"{MEMORY_VARIABLE}={asked}"
        raise ValueError(f"{origin}: a whole, positive number of bytes is wanted, for the record of one lane.")
    return int(asked)


def cache_folder() -> str | None:
    """Where generated machine code is kept between processes; None where the variable is unset or empty."""
    return os.environ.get(FOLDER_VARIABLE, "").strip() or None
