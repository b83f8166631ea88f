"""Debug switches of JAX and Equinox leave the numbers alone."""

import os
import subprocess
import sys
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from helpers import assert_close, decay, solve
from jaxtyping import Array


def masked_sum(k: Array, adjoint: diffrax.AbstractAdjoint, **how: Any) -> Array:
    """Sum over the rows that steps filled; all other rows are inf."""
    controller = diffrax.PIDController(rtol=1e-8, atol=1e-8)
    how = {"saveat": diffrax.SaveAt(steps=True), "max_steps": 32, "stepsize_controller": controller} | how
    sol = solve(decay, jnp.array(1.0), k, adjoint=adjoint, **how)
    assert sol.ts is not None and sol.ys is not None
    return jnp.sum(jnp.where(jnp.isfinite(sol.ts), sol.ys, 0.0))


def test_padding_makes_no_nan(adjoint):
    """`jax_debug_nans` would stop at the first one (diffrax#94, #363)."""
    with jax.debug_nans(True):
        slope = jax.jit(jax.grad(lambda k: masked_sum(k, adjoint)))(jnp.array(1.5))
    assert_close(slope, np.float64(-2.480743), rtol=1e-6)


def test_without_jit(adjoint):
    """`jax.disable_jit` gives the same number."""
    how = {"stepsize_controller": diffrax.PIDController(rtol=1e-3, atol=1e-3), "max_steps": 12}
    slope = jax.grad(lambda k: masked_sum(k, adjoint, **how))
    with jax.disable_jit():
        plain = slope(jnp.array(1.5))
    assert_close(plain, jax.jit(slope)(jnp.array(1.5)), rtol=1e-9)


SCRIPT = """
import diffrax, jax, jax.numpy as jnp
from {module} import {name}
jax.config.update("jax_enable_x64", True)
def end(k, t1):
    term, controller = diffrax.ODETerm(lambda t, y, k: k * y**2), diffrax.PIDController(rtol=1e-7, atol=1e-7)
    how = dict(stepsize_controller=controller, max_steps=64, adjoint={name}())
    return diffrax.diffeqsolve(term, diffrax.Tsit5(), 0.0, t1, None, jnp.array(1.0), k, **how).ys[-1]
both = jax.jit(jax.value_and_grad(end))
print(*map(float, both(0.5, 1.0)), float(both(0.5, 3.0)[0]))
"""


def test_errors_as_nan(adjoint):
    """With EQX_ON_ERROR=nan a good solve is unchanged and a failed one is NaN, which raises nothing (diffrax#368)."""
    name = type(adjoint).__name__
    module = type(adjoint).__module__
    environment = os.environ | {"EQX_ON_ERROR": "nan"}
    script = SCRIPT.format(module=module, name=name)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    value, slope, failed = map(float, done.stdout.split())
    np.testing.assert_allclose([value, slope], [2.0, 4.0], rtol=1e-5)
    assert np.isnan(failed)
