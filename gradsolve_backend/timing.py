"""Wall-clock times and memory of compiled functions, side by side in one process."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

SHORT = 0.02  # seconds


def compiled(function: Callable[..., Any], *arguments: Any) -> tuple[Callable[..., Any], float]:
    """`function` compiled for arguments like these, and the seconds that tracing and compiling took."""
    begin = time.perf_counter()
    executable = jax.jit(function).lower(*arguments).compile()
    return executable, time.perf_counter() - begin


def seconds_of(function: Callable[..., Any], arguments: Sequence[Any]) -> float:
    """Seconds of one call, until its result is there."""
    begin = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - begin


def steady_seconds_of(function: Callable[..., Any], arguments: Sequence[Any]) -> float:
    """Seconds of one call; of a short one, of the second of two, since the first suffers from what ran before it."""
    first = seconds_of(function, arguments)
    return seconds_of(function, arguments) if first < SHORT else first


def alternate(functions: Sequence[Callable[..., Any]], arguments: Sequence[Any], rounds: int) -> list[float]:
    """Median seconds of a call of each function; call each once before, as first calls are slower.

    They are called in turn, so that a moment in which the machine is busy hits all alike.
    """
    taken = [[steady_seconds_of(function, arguments) for function in functions] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*taken, strict=True)]


def reserved(executable: Any) -> int | None:
    """Bytes that XLA reserves for a compiled function besides arguments and results; None where it does not tell."""
    analysis = executable.memory_analysis()
    return None if analysis is None else analysis.temp_size_in_bytes
