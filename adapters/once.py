"""Functions of the user's that are traced once, however often a step and its derivatives use them."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu

from gradsolve_backend.kernels.compat import eval_jaxpr
from gradsolve_backend.kernels.scalar import SHARED, SHARED_EQUATIONS, scalar_equations
from gradsolve_backend.kernels.trace import is_operand


class Once:
    """A function of arrays that is traced at its first call with arguments of some shapes, and evaluated after that.

    The user's Python then runs once, however many stages, steps and derivatives use it. What the function closes over
    must outlive all calls: operands of the solve do. A large function is called, which keeps it in one piece, unless it
    is to be written out `inline`.
    """

    def __init__(self, function: Callable, inline: bool = False) -> None:
        self.function = function
        self.inline = inline
        self._traced: dict[Any, tuple[Any, Any, Any, Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        arrays, rest = eqx.partition(arguments, eqx.is_array)
        leaves, structure = jtu.tree_flatten(arrays)
        key = (structure, tuple(jax.typeof(x) for x in leaves), *jtu.tree_leaves(rest))
        if key not in self._traced:
            self._traced[key] = self._trace(leaves, structure, rest)
        run, operands, out_structure, static = self._traced[key]
        return eqx.combine(jtu.tree_unflatten(out_structure, run(operands, leaves)), static)

    def _trace(self, leaves: Any, structure: Any, rest: Any) -> tuple[Any, Any, Any, Any]:
        found: list[Any] = []

        def flat(*leaves: Any) -> list[Any]:
            out = self.function(*eqx.combine(jtu.tree_unflatten(structure, leaves), rest))
            dynamic, static = eqx.partition(out, eqx.is_array)
            out_leaves, out_structure = jtu.tree_flatten(dynamic)
            found.extend((out_structure, static))
            return out_leaves

        program = jax.make_jaxpr(flat)(*leaves)
        return *_evaluation(program, self.inline), found[0], found[1]


def _evaluation(program: Any, inline: bool) -> tuple[Callable, list[Any]]:
    """Runs a traced function on its operands and arguments; the operands."""
    operands = [c for c in program.consts if is_operand(c)]

    def evaluate(operands: Any, leaves: Any) -> list[Any]:
        rest = iter(operands)
        return eval_jaxpr(program.jaxpr, [next(rest) if is_operand(c) else c for c in program.consts], *leaves)

    evaluate.__name__ = SHARED
    short = inline or scalar_equations(program.jaxpr) < SHARED_EQUATIONS
    return evaluate if short else jax.jit(evaluate), operands
