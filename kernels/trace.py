"""Functions of one lane, traced once: a jaxpr whose inputs are loop variables and operands.

Operands are the arrays of a solve that do not change while it runs: parameters, arrays inside terms and controllers,
arrays that a vector field closes over. Tracing finds them; the lane axis of each is decided later, by `jax.vmap`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradsolve_backend.kernels.compat import Jaxpr, Tracer, dce_jaxpr, eval_jaxpr, without_names

CONSTANT_ELEMENTS = 256  # a concrete array up to this size is part of the program, a larger one is an operand
SPARSE_ELEMENTS = 4096  # the same for an array most of which is zero


def inexact(x: Any) -> bool:
    """Whether an array or abstract value can carry a derivative."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


class Operands:
    """Collects the operands of several lane functions, each array once."""

    def __init__(self) -> None:
        self.arrays: list[jax.Array] = []
        self._position: dict[int, int] = {}

    def add(self, array: Any) -> int:
        """Position of `array` among the operands; appended when it is new."""
        key = id(array)
        if key not in self._position:
            self._position[key] = len(self.arrays)
            self.arrays.append(array)
        return self._position[key]


def is_operand(const: Any) -> bool:
    """Whether what a function closes over is an operand, and not part of the program."""
    if isinstance(const, Tracer) or np.size(const) > SPARSE_ELEMENTS:
        return True
    return np.size(const) > CONSTANT_ELEMENTS and bool(4 * np.count_nonzero(const) > np.size(const))


@dataclass(frozen=True, eq=False)
class LaneFunction:
    """A program with, for each of its inputs, where the value comes from: argument `s >= 0` or operand `~s`.

    The first inputs of `jaxpr`, before those, are the arrays `fixed`.
    """

    jaxpr: Jaxpr
    fixed: tuple[Any, ...]
    sources: tuple[int, ...]
    scalars: dict[Any, Any] = field(default_factory=dict)  # scalar programs made of it, or why there is none

    @property
    def invars(self) -> list[Any]:
        """The inputs that come from arguments and operands."""
        return list(self.jaxpr.invars[len(self.fixed) :])

    @property
    def outputs(self) -> list[Any]:
        """Abstract values of the outputs."""
        return [v.aval for v in self.jaxpr.outvars]

    @property
    def arguments(self) -> frozenset[int]:
        """Positions of the arguments that the function reads."""
        return frozenset(s for s in self.sources if s >= 0)

    def inputs(self, arguments: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        """What the program is run on."""
        return [arguments[s] if s >= 0 else operands[~s] for s in self.sources]

    def run(self, *inputs: Any) -> list[Any]:
        """The outputs, for one lane."""
        return eval_jaxpr(self.jaxpr, (), *self.fixed, *inputs)

    def moved(self, mapping: dict[int, int]) -> "LaneFunction":
        """The same function with its argument `a` taken from `mapping[a]` instead."""
        return LaneFunction(self.jaxpr, self.fixed, tuple(mapping.get(s, s) for s in self.sources))

    def keep(self, outputs: Sequence[int]) -> "LaneFunction":
        """The same function with only these outputs, and what they need."""
        outvars = [self.jaxpr.outvars[i] for i in outputs]
        return _pruned(
            self.jaxpr.replace(outvars=outvars, debug_info=without_names(self.jaxpr)), self.fixed, self.sources
        )


def _pruned(jaxpr: Jaxpr, fixed: Sequence[Any], sources: Sequence[int]) -> LaneFunction:
    kept, used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    count = len(fixed)
    fixed = tuple(x for x, u in zip(fixed, used[:count], strict=True) if u)
    return LaneFunction(kept, fixed, tuple(s for s, u in zip(sources, used[count:], strict=True) if u))


def trace(function: Callable[..., Sequence[Any]], arguments: Sequence[Any], operands: Operands) -> LaneFunction:
    """Traces `function(*arguments)`; what it closes over joins `operands`, small constants stay in the program."""
    closed = jax.make_jaxpr(function)(*arguments)
    pairs = list(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    fixed = [(v, c) for v, c in pairs if not is_operand(c)]
    hoisted = [(v, c) for v, c in pairs if is_operand(c)]
    invars = [*(v for v, _ in fixed), *(v for v, _ in hoisted), *closed.jaxpr.invars]
    jaxpr = closed.jaxpr.replace(constvars=[], invars=invars, debug_info=without_names(closed.jaxpr))
    sources = (*(~operands.add(c) for _, c in hoisted), *range(len(arguments)))
    return _pruned(jaxpr, [c for _, c in fixed], sources)
