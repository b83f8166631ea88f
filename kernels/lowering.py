"""How primitives of this package are lowered by a function of arrays."""

from collections.abc import Callable
from typing import Any

from jax.interpreters import mlir

from gradsolve_backend.kernels.compat import ShapedArray


def local(function: Callable) -> Callable:
    """The lowering of a function, whose loops are local to a device and need not know of a mesh."""
    rule = mlir.lower_fun(function, multiple_results=True)

    def lowered(context: Any, *inputs: Any, **params: Any) -> Any:
        plain = lambda avals: [ShapedArray(a.shape, a.dtype) for a in avals]  # noqa: E731
        return rule(
            context.replace(avals_in=plain(context.avals_in), avals_out=plain(context.avals_out)), *inputs, **params
        )

    return lowered
