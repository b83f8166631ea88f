"""The loss of the demo, as an example for `python -m gradsolve_backend measure gradsolve_backend.demo_loss:loss`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gradsolve_backend import GradSolveAdjoint, demo_model

STARTS = 64


def loss(starts: Array) -> Array:
    """Sum over all starts, shape (starts, 6), of half the squared residuals."""
    census, adjoint = demo_model.load_census(), GradSolveAdjoint()
    return jnp.sum(jax.vmap(lambda theta: demo_model.half_squares(theta, census, adjoint))(starts))


def arguments() -> tuple[np.ndarray]:
    """Random starts."""
    return (demo_model.random_starts(STARTS, seed=0),)
