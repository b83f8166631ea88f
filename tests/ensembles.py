"""An ensemble of van der Pol oscillators, and what stock Diffrax says of each lane by itself."""

import functools
from collections.abc import Callable
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from gradsolve_backend import GradSolveAdjoint

LLVM, STOCK = GradSolveAdjoint(backend="llvm"), diffrax.RecursiveCheckpointAdjoint()
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def oscillator(t: Any, y: Array, args: tuple[Array, Array]) -> Array:
    rate, drift = args
    return jnp.stack([y[1] + drift * jnp.cos(t), rate * (1 - y[0] ** 2) * y[1] - y[0]])


def run(adjoint: Any, y0: Array, rate: Array, drift: Array, **how: Any) -> tuple[Array, Array]:
    """The state at the end, and result and counts of steps; some fifty steps, some of which are rejected."""
    how = {"stepsize_controller": diffrax.PIDController(rtol=1e-3, atol=1e-3), "max_steps": 256} | how
    sol = diffrax.diffeqsolve(
        diffrax.ODETerm(oscillator), diffrax.Heun(), 0.0, 2.0, 0.05, y0, (rate, drift),
        adjoint=adjoint, throw=False, **how,
    )  # fmt: skip
    assert sol.ys is not None
    counts = [sol.result._value, *(sol.stats[f"num_{kind}steps"] for kind in ("", "accepted_", "rejected_"))]
    return sol.ys[0], jnp.stack([x.astype(jnp.int32) for x in counts])


def ensemble(lanes: int, seed: int = 0) -> tuple[Array, Array]:
    """Initial values and rates."""
    draw = np.random.default_rng(seed).uniform
    return jnp.asarray(draw(-1.5, 1.5, (lanes, 2))), jnp.asarray(draw(0.2, 3.0, lanes))


@functools.cache
def stock_jacobian() -> Callable:
    """Stock's Jacobian of `run` over initial value, rate and drift, with what `run` returns."""
    whole = lambda *x: (lambda out: (out[0], out))(run(STOCK, *x))
    return jax.jit(jax.jacrev(whole, argnums=(0, 1, 2), has_aux=True))


def expected(y0s: Array, rates: Array, drifts: Any) -> Any:
    """Jacobians, end states and counts of stock, lane by lane."""
    found = [stock_jacobian()(y0, rate, drift) for y0, rate, drift in zip(y0s, rates, drifts, strict=True)]
    return jax.tree.map(lambda *x: np.stack(x), *found)


def weights(*shape: int) -> Array:
    """Cotangents of some shape."""
    return jnp.asarray(np.random.default_rng(1).normal(size=shape))


def pulled(cts: Any, jacobians: Any) -> Any:
    """Cotangents of the inputs of each lane."""
    return [np.einsum("li,li...->l...", np.asarray(cts), j) for j in jacobians]
