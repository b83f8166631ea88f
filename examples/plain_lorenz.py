"""A plain script of Diffrax, which `switch_backend.py` runs with several backends. It names nothing of GradSolve."""

import json
import statistics
import sys
import time

import diffrax
import jax
import jax.numpy as jnp

jax.config.update("jax_enable_x64", True)


def lorenz(t, y, p):
    """The equations of Lorenz 1963, doi:10.1175/1520-0469(1963)020<0130:DNF>2.0.CO;2."""
    return jnp.stack([p[0] * (y[1] - y[0]), y[0] * (p[1] - y[2]) - y[1], y[0] * y[1] - p[2] * y[2]])


def end(y0, p):
    """The state at time 2."""
    controller = diffrax.PIDController(rtol=1e-8, atol=1e-8)
    return diffrax.diffeqsolve(
        diffrax.ODETerm(lorenz), diffrax.Tsit5(), 0.0, 2.0, None, y0, p, stepsize_controller=controller
    ).ys[0]


@jax.jit
@jax.value_and_grad
def loss(p, starts):
    """Mean square of the end states over all starts."""
    return jnp.mean(jax.vmap(end, (0, None))(starts, p) ** 2)


parameters = jnp.array([10.0, 28.0, 8.0 / 3.0])
starts = jnp.array([1.0, 1.0, 1.0]) + 0.1 * jax.random.normal(jax.random.key(0), (int(sys.argv[1]), 3))
begin = time.perf_counter()
value, slope = jax.block_until_ready(loss(parameters, starts))
seconds = [time.perf_counter() - begin]
for _ in range(11):
    begin = time.perf_counter()
    jax.block_until_ready(loss(parameters, starts))
    seconds.append(time.perf_counter() - begin)
found = {"value": float(value), "slope": slope.tolist()}
print(json.dumps(found | {"first": seconds[0], "median": statistics.median(seconds[1:])}))
