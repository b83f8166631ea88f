"""Which outputs of a lane function differ from lane to lane, given which of its inputs do."""

from collections.abc import Sequence

from gradsolve_backend.kernels.compat import Literal
from gradsolve_backend.kernels.trace import LaneFunction


def differing_outputs(function: LaneFunction, inputs: Sequence[bool]) -> list[bool]:
    """For each output, whether it depends on a marked input; of one equation, all outputs do if one does.

    `jax.vmap` leaves out an axis wherever this says that there is no need of one.
    """
    marked = {v for v, mark in zip(function.invars, inputs, strict=True) if mark}
    depends = lambda v: not isinstance(v, Literal) and v in marked  # noqa: E731
    for eqn in function.jaxpr.eqns:
        if any(depends(v) for v in eqn.invars):
            marked.update(eqn.outvars)
    return [depends(v) for v in function.jaxpr.outvars]
