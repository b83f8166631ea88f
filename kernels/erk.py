"""One explicit Runge-Kutta step as straight-line code from a tableau, for a state that is any PyTree of arrays."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Tableau:
    """Coefficients of an explicit Runge-Kutta method as Python floats.

    `a[i]` are the weights of stage `i` (the first is empty), `c[i]` its time, `b` the weights of the solution, or None
    where the last stage is the solution; `error` those of the error estimate.
    """

    a: tuple[tuple[float, ...], ...]
    c: tuple[float, ...]
    b: tuple[float, ...] | None
    error: tuple[float, ...]

    @staticmethod
    def of(tableau: Any) -> "Tableau":
        """From a `diffrax.ButcherTableau`."""
        floats = lambda row: tuple(float(x) for x in row)  # noqa: E731
        first = 0.0 if tableau.c1 is None else float(tableau.c1)
        b = None if tableau.ssal else floats(tableau.b_sol)
        return Tableau(
            ((), *(floats(row) for row in tableau.a_lower)), (first, *floats(tableau.c)), b, floats(tableau.b_error)
        )


def combine(weights: Sequence[float], values: Sequence[Any]) -> Any:
    """The sum of `w * v` over those weights that are not zero, leaf by leaf; None if all are."""
    terms = [(w, v) for w, v in zip(weights, values, strict=False) if w != 0]
    if not terms:
        return None

    def leaf(*xs: Any) -> Any:
        out = terms[0][0] * xs[0]
        for (w, _), x in zip(terms[1:], xs[1:], strict=True):
            out = out + w * x
        return out

    return jax.tree.map(leaf, *(v for _, v in terms))


def explicit_step(
    tableau: Tableau,
    field: Callable[[Any, Any], Any],
    product: Callable[[Any], Any],
    interval: tuple[Any, Any],
    y0: Any,
    first: Any,
) -> tuple[Any, Any, dict[str, Any], Any]:
    """One step over `interval = (t0, t1)`.

    `product(field(t, y))` is a stage: the field times the step; `first` is the field at the first one if it is known.
    Returns the solution at `t1`, the error estimate, the dense values (`y0`, `y1`, `k` with stages in front), and the
    field at the last stage.
    """
    t0, t1 = interval
    step = t1 - t0
    plus = lambda a, b: a if b is None else jax.tree.map(jnp.add, a, b)  # noqa: E731
    # What is stored XLA does not compute again in each loop that reads it.
    stored = jax.lax.optimization_barrier
    ks: list[Any] = []
    y, last = y0, first
    for i, (weights, c) in enumerate(zip(tableau.a, tableau.c, strict=True)):
        y = stored(plus(y0, combine(weights, ks)))
        t = t1 if c == 1 else t0 if c == 0 else t0 + c * step
        if i == len(tableau.c) - 1:
            last = stored(field(t, y))
            k = product(last)
        else:
            k = product(first) if i == 0 and first is not None else stored(product(field(t, y)))
        ks.append(k)
    y1 = y if tableau.b is None else plus(y0, combine(tableau.b, ks))
    error = combine(tableau.error, ks)
    error = jax.tree.map(jnp.zeros_like, y0) if error is None else error
    k = jax.tree.map(lambda *x: jnp.stack(x), *ks)
    return y1, error, {"y0": y0, "y1": y1, "k": k}, last
