"""The one place where this package takes names that JAX, Equinox or Diffrax do not promise to keep.

Everything is taken at import, so that a version that moved a name fails here, with a sentence, and nowhere else.
"""

from typing import Any

try:
    from diffrax._heuristics import is_unsafe_sde
    from diffrax._integrate import SaveState, State
    from diffrax._misc import linear_rescale
    from diffrax._term import WrapTerm
    from jax.core import ShapedArray, Tracer, eval_jaxpr
    from jax.extend import core as _core
    from jax.extend.core import Jaxpr, Literal
    from jax.interpreters.partial_eval import dce_jaxpr
except ImportError as error:
    raise ImportError(
        "gradsolve_backend needs names of jax and diffrax that the installed versions do not have. "
        "Supported are jax>=0.10.2 and diffrax>=0.7.2; install such versions, or a newer gradsolve_backend."
    ) from error

# The class exists under this name in all versions; newer ones make it the same as `Jaxpr` and do not list it.
ClosedJaxpr: Any = _core.ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]

__all__ = [
    "ClosedJaxpr",
    "Jaxpr",
    "Literal",
    "SaveState",
    "ShapedArray",
    "State",
    "Tracer",
    "WrapTerm",
    "dce_jaxpr",
    "eval_jaxpr",
    "is_unsafe_sde",
    "linear_rescale",
    "without_names",
]


def without_names(jaxpr: Jaxpr) -> Any:
    """The debug information of a program whose inputs and outputs are no longer those that it names."""
    return jaxpr.debug_info._replace(arg_names=None, result_paths=None)
