"""Problems, solves and oracles that several test modules share."""

import re
from collections.abc import Callable
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, PyTree

# Reverse mode and forward mode, of which Diffrax's default adjoint has the first.
MODES = [
    pytest.param(jax.jacrev, id="reverse"),
    pytest.param(jax.jacfwd, id="forward", marks=pytest.mark.stock_fails(raises=TypeError)),
]
STOCK = diffrax.RecursiveCheckpointAdjoint()
TIGHT = diffrax.PIDController(rtol=1e-9, atol=1e-9)


def decay(t: Any, y: PyTree[Array], k: Any) -> PyTree[Array]:
    return jax.tree.map(lambda x: -k * x, y)


def logistic(t: Any, y: Array, r: Any) -> Array:
    return r * y * (1 - y)


def van_der_pol(t: Any, y: Array, mu: Any) -> Array:
    return jnp.stack([y[1], mu * (1 - y[0] ** 2) * y[1] - y[0]])


def solve(field: Callable | diffrax.AbstractTerm, y0: PyTree, args: PyTree = None, **how: Any) -> diffrax.Solution:
    """`diffeqsolve` from 0 to 1 with tight tolerances, each of which `how` may replace."""
    how = {"t0": 0.0, "t1": 1.0, "dt0": None, "solver": diffrax.Tsit5(), "stepsize_controller": TIGHT} | how
    terms = field if isinstance(field, diffrax.AbstractTerm) else diffrax.ODETerm(field)
    return diffrax.diffeqsolve(terms, y0=y0, args=args, **how)


def final(field: Callable | diffrax.AbstractTerm, y0: PyTree, args: PyTree = None, **how: Any) -> PyTree[Array]:
    """State at the end of `solve`."""
    ys = solve(field, y0, args, **how).ys
    return jax.tree.map(lambda y: y[-1], ys)


def with_mesh(saved: diffrax.SubSaveAt) -> diffrax.SaveAt:
    """Saves what is asked as `ys["asked"]`, and the step times as `ts["mesh"]`."""
    mesh = diffrax.SubSaveAt(t0=True, steps=True, fn=lambda t, y, args: None)
    return diffrax.SaveAt(subs={"asked": saved, "mesh": mesh})


Loss = Callable[..., tuple[Array, Array]]


def value_and_gradient(loss: Loss, params: PyTree, **how: Any) -> tuple[Array, np.ndarray, PyTree]:
    """Value, step times taken and gradient of `loss(params, **how) -> (value, padded step times)`."""
    function = jax.jit(jax.value_and_grad(lambda p: loss(p, **how), has_aux=True))
    (value, mesh), gradient = function(params)
    return value, np.asarray(mesh)[np.isfinite(mesh)], gradient


def frozen_oracle(loss: Loss, params: PyTree, mesh: np.ndarray) -> tuple[Array, PyTree]:
    """Stock's value and gradient of `loss` on given step times: the exact discrete adjoint of those steps.

    Rounding may make two adaptive runs step differently; on one mesh they must agree to round-off.
    """
    frozen = {"stepsize_controller": diffrax.StepTo(jnp.asarray(mesh)), "dt0": None}
    value, _, gradient = value_and_gradient(loss, params, adjoint=STOCK, **frozen)
    return value, gradient


def assert_close(actual: PyTree, wanted: PyTree, rtol: float = 1e-9, atol: float = 0.0) -> None:
    """Same structure, shapes and dtypes, and close values."""
    assert jax.tree.structure(actual) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=rtol, atol=atol)


def finite_difference(function: Callable[[float], Any], x: float, step: float = 1e-5) -> np.ndarray:
    """Central difference, of fourth order."""
    near = np.asarray(function(x + step)) - np.asarray(function(x - step))
    far = np.asarray(function(x + 2 * step)) - np.asarray(function(x - 2 * step))
    return (8 * near - far) / (12 * step)


def blocks(language: str, text: str) -> list[str]:
    """The code blocks of a language in Markdown."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
