"""Compiles and times a function and its gradient with each backend, side by side."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from gradsolve_backend import install
from gradsolve_backend.config import configure
from gradsolve_backend.explain import explain
from gradsolve_backend.plugins import backends as all_backends
from gradsolve_backend.table import Measurements, Row, Spread
from gradsolve_backend.timing import reserved, seconds_of

STOCK = "stock"
FEWEST, MOST = 5, 200
RUNTIME = "EquinoxRuntimeError: "
Progress = Callable[[str, float], None]


@dataclasses.dataclass
class _Contestant:
    """One backend's compiled functions, and what their first calls gave."""

    backend: str
    forward: Any
    gradient: Any
    first: float
    slopes: list[np.ndarray]
    about: float  # seconds of a call of both

    @property
    def bytes(self) -> tuple[int | None, int | None]:
        """What XLA reserves for each."""
        return reserved(self.forward), reserved(self.gradient)


def measure(
    fn: Callable[..., Any],
    *args: Any,
    backends: Sequence[str] | None = None,
    seconds: float = 3.0,
    replace: Sequence[Any] = (),
    progress: Progress | None = None,
) -> Measurements:
    """Compile and time `fn(*args)` and its gradient with Diffrax's own loop and with each backend that can run it.

    Solves in `fn` that name no adjoint take `GradSolveAdjoint()`. The backends take turns, so that a busy moment of the
    machine hits all alike.

    Args:
        fn: returns a real number, and calls `diffrax.diffeqsolve`.
        args: of `fn`. The gradient is by all real and complex numbers in them.
        backends: names of those to compare with "stock"; None: all that are taken here without being asked for.
        seconds: about how long to call the compiled functions.
        replace: as for `gradsolve_backend.install`.
        progress: is told what is done next, and which share of all is done.

    Returns:
        Times, bytes and differences for each backend; `print` shows a table and an advice.

    Raises:
        ValueError: if `fn` returns anything else, holds no solve that can be switched, or a name is no backend's.
        Exception: whatever `fn` raises with the backend that is taken by default.
    """
    tell = progress or (lambda what, share: None)
    dynamic, static = eqx.partition(args, eqx.is_inexact_array_like)
    dynamic = jax.tree.map(jnp.asarray, dynamic)
    value = lambda inputs: fn(*eqx.combine(inputs, static))  # noqa: E731
    with install(replace=tuple(replace)):
        platform = _checked(value, dynamic)
        names = _names(backends, platform)
        contestants, left_out = [], []
        for i, name in enumerate(names):
            tell(f"compile for {name}", 0.8 * i / len(names))
            found = _entered(name, value, dynamic)
            (left_out if isinstance(found, str) else contestants).append((name, found))
    tell("time all in turn", 0.8)
    rows = _timed([c for _, c in contestants], dynamic, seconds)
    tell("done", 1.0)
    return Measurements(tuple(rows), tuple(left_out), platform)


def _checked(value: Callable[[Any], Any], dynamic: Any) -> str:
    """The platform of the solves, once it is known that the function can be measured."""
    out = jax.eval_shape(value, dynamic)
    if not isinstance(out, jax.ShapeDtypeStruct) or out.shape or not jnp.issubdtype(out.dtype, jnp.floating):
        raise ValueError(
            f"measure: the function returns {out}, and a real number is wanted, whose gradient is measured. "
            "Return for example jnp.sum(result**2)."
        )
    if not jax.tree.leaves(dynamic):
        raise ValueError("measure: there is no real or complex number in the arguments to take the gradient by.")
    routes = explain(value, dynamic)
    if not routes:
        raise ValueError(
            "measure: the function has no solve that takes `GradSolveAdjoint`. If its solves name another adjoint, "
            "pass the class: measure(fn, ..., replace=(diffrax.RecursiveCheckpointAdjoint,))."
        )
    return routes[0].problem.platform


def _names(asked: Sequence[str] | None, platform: str) -> list[str]:
    known = all_backends()
    ranked = sorted(known.values(), key=lambda backend: (backend.rank, backend.name))
    names = [b.name for b in ranked if platform not in b.on_request] if asked is None else list(asked)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"measure: no plugin offers {', '.join(unknown)}. There are: {', '.join(sorted(known))}.")
    return [STOCK, *(name for name in names if name != STOCK)]


def _entered(name: str, value: Callable[[Any], Any], dynamic: Any) -> _Contestant | str:
    """The contestant, or why it cannot take part."""
    both = jax.value_and_grad(value)
    with configure(backend=name):
        try:
            for route in explain(both, dynamic):
                if route.backend != name:
                    return dict(route.others).get(name, route.why)
            begin = time.perf_counter()
            gradient = jax.jit(lambda inputs: both(inputs)).lower(dynamic).compile()
            _, slopes = jax.block_until_ready(gradient(dynamic))
            first = time.perf_counter() - begin
            forward = jax.jit(lambda inputs: value(inputs)).lower(dynamic).compile()
        except Exception as error:  # Of the function, which may do what not every backend can; it is reported.
            return _summary(error)
    seconds_of(forward, [dynamic])
    about = seconds_of(forward, [dynamic]) + seconds_of(gradient, [dynamic])
    return _Contestant(name, forward, gradient, first, [np.asarray(x) for x in jax.tree.leaves(slopes)], about)


def _summary(error: Exception) -> str:
    """An error in a line: what the solve says of itself, if it failed while it ran, else the first one."""
    lines = str(error).splitlines() or [""]
    own = next((line for line in lines if RUNTIME in line), "")
    return own.rpartition(RUNTIME)[2] if own else f"{type(error).__name__}: {lines[0]}"


def _timed(contestants: Sequence[_Contestant], dynamic: Any, seconds: float) -> list[Row]:
    if not contestants:
        return []
    rounds = int(np.clip(seconds / (2 * sum(c.about for c in contestants)), FEWEST, MOST))
    timed = [_again(f) for c in contestants for f in (c.forward, c.gradient)]
    taken = iter(zip(*([call(dynamic) for call in timed] for _ in range(rounds)), strict=True))
    spreads = [(_spread(next(taken)), _spread(next(taken))) for _ in contestants]
    wanted = contestants[0].slopes if contestants[0].backend == STOCK else None
    return [
        Row(c.backend, c.first, *spread, *c.bytes, None if wanted is None else _difference(c.slopes, wanted))
        for c, spread in zip(contestants, spreads, strict=True)
    ]


def _again(function: Callable[[Any], Any]) -> Callable[[Any], float]:
    """Seconds of a call that follows one of the same function, as in a loop of the user's, and not one of another."""

    def timed(inputs: Any) -> float:
        jax.block_until_ready(function(inputs))
        return seconds_of(function, [inputs])

    return timed


def _spread(taken: Sequence[float]) -> Spread:
    low, _, high = statistics.quantiles(taken, n=4)
    return Spread(statistics.median(taken), low, high, len(taken))


def _difference(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
    """Largest difference, relative to the largest entry of each array; NaN where only one of them is."""
    worst = 0.0
    for x, y in zip(found, wanted, strict=True):
        scale = np.max(np.abs(y), initial=0.0)
        gap = np.max(np.abs(x - y), initial=0.0)
        worst = np.maximum(worst, gap if scale == 0 else gap / scale)
    return float(worst)
