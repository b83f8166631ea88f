"""The one place where this package takes names that JAX, Equinox or Diffrax do not promise to keep.

Everything is taken at import, so that a version that moved a name fails here, with a sentence, and nowhere else.
"""

try:
    from diffrax._heuristics import is_unsafe_sde
    from diffrax._integrate import SaveState, State
    from diffrax._misc import linear_rescale
    from jax.interpreters.partial_eval import dce_jaxpr
except ImportError as error:
    raise ImportError(
        "gradsolve_backend needs names of jax and diffrax that the installed versions do not have. "
        "Supported are jax>=0.10.2 and diffrax>=0.7.2; install such versions, or a newer gradsolve_backend."
    ) from error

__all__ = ["SaveState", "State", "dce_jaxpr", "is_unsafe_sde", "linear_rescale"]
