"""Values of a derivative that are computed again where it goes back, since a thread has no registers to hold them.

A reverse sweep reads the stages of a step from the last to the first, after all of them were computed. A sum or a
difference of two values that it reads as well need not be held besides them. It is computed again in the opposite
order, as the compiler would take the same operation for the same value, and hold it after all. The result has the same
bits, but for the sign of a zero; where that could matter, values are held.
"""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jax import lax

from gradsolve_backend.kernels.compat import Literal
from gradsolve_backend.kernels.pallas_order import read


class Again:
    """The sums and differences of a program that are computed again; `late` are the inputs that are known last."""

    def __init__(self, jaxpr: Any, late: Iterable[Any]) -> None:
        known = set(late)
        self._late: set[int] = set()  # equations that depend on them, by `id`
        readers: dict[Any, set[str]] = {}
        for equation in jaxpr.eqns:
            if any(v in known for v in read(equation)):
                known.update(equation.outvars)
                self._late.add(id(equation))
                for v in read(equation):
                    readers.setdefault(v, set()).add(equation.primitive.name)
        held = {v for v in readers if v not in known}
        self._equations: dict[Any, Any] = {}
        for equation in jaxpr.eqns:
            (v, *_), inputs = equation.outvars, read(equation)
            takes = equation.primitive.name in ("add", "sub") and jnp.issubdtype(v.aval.dtype, jnp.floating)
            if takes and v in held and readers[v] == {"mul"} and len(inputs) == 2:
                if all(x in held and x not in self._equations for x in inputs):
                    self._equations[v] = equation
        self._values: dict[Any, Any] = {}

    def __contains__(self, at: tuple[Any, Any]) -> bool:
        """Whether `equation, variable = at` reads a value that is computed again."""
        equation, v = at
        return id(equation) in self._late and not isinstance(v, Literal) and v in self._equations

    def value(self, v: Any, known: Any) -> Any:
        """The value, from what `known` gives of the variables that it depends on."""
        if v not in self._values:
            equation = self._equations[v]
            x, y = (known(x) for x in equation.invars)
            minus = lambda x: lax.mul(x, lax.full_like(x, -1))  # noqa: E731
            other = lax.sub(minus(x), y) if equation.primitive.name == "add" else lax.sub(y, x)
            self._values[v] = minus(other)
        return self._values[v]
