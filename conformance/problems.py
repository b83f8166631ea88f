"""The problem axis: DETEST, and what users bring: chaos, stiffness, networks, data, doses, noise."""

from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np

from gradsolve_backend.conformance.detest import DETEST
from gradsolve_backend.conformance.problem import Problem, by_name, ode

_HAIRER = "Hairer, Wanner: Solving Ordinary Differential Equations II, 1996, doi:10.1007/978-3-642-05221-7"
_LORENZ = "Lorenz 1963, doi:10.1175/1520-0469(1963)020<0130:DNF>2.0.CO;2"
_LORENZ96 = "Lorenz: Predictability, a problem partly solved, 1996"
_OWN = "made for this suite"


def _lorenz(t: Any, y: Any, args: Any) -> Any:
    sigma, rho, beta = args[0], args[1], args[2]
    return jnp.stack([sigma * (y[1] - y[0]), y[0] * (rho - y[2]) - y[1], y[0] * y[1] - beta * y[2]])


def _lorenz96(t: Any, y: Any, args: Any) -> Any:
    return (jnp.roll(y, -1) - jnp.roll(y, 2)) * jnp.roll(y, 1) - y + args


def _van_der_pol(t: Any, y: Any, args: Any) -> Any:
    return jnp.stack([y[1], args * (1 - y[0] ** 2) * y[1] - y[0]])


def _robertson(t: Any, y: Any, args: Any) -> Any:
    rates = jnp.exp(args)  # the parameters are logarithms: the rates span nine decades
    slow, fast, back = rates[0] * y[0], rates[1] * y[1] ** 2, rates[2] * y[1] * y[2]
    return jnp.stack([back - slow, slow - back - fast, fast])


def _hires(t: Any, y: Any, args: Any) -> Any:
    a, b, c, d, e, f, g, h = (y[i] for i in range(8))
    k = args
    bound, freed = k[5] * f * h, k[6] * g
    return jnp.stack(
        [
            -k[0] * a + k[1] * b + k[2] * c + k[3],
            k[0] * a - (k[2] + k[1]) * b,
            -(k[0] + k[2]) * c + k[1] * d + k[4] * e,
            k[2] * b + k[0] * c - (k[1] + k[7]) * d,
            -(k[4] + k[0]) * e + k[1] * (f + g),
            -bound + k[7] * d + k[0] * e - k[1] * f + k[7] * g,
            bound - freed,
            freed - bound,
        ]
    )


def _network(t: Any, y: Any, args: Any) -> Any:
    """A perceptron with two hidden layers; `args` is a tuple of (matrix, offset)."""
    for matrix, offset in args[:-1]:
        y = jnp.tanh(matrix @ y + offset)
    matrix, offset = args[-1]
    return matrix @ y + offset


def _layer(rows: int, columns: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    matrix = np.sin(1.0 + seed + 1.7 * np.arange(rows * columns)).reshape(rows, columns)
    return 1.5 * matrix / np.sqrt(columns), 0.1 * np.cos(seed + np.arange(rows))


_TABLE_TIMES = np.linspace(0.0, 4.0, 17)
_TABLE = np.sin(2.1 * _TABLE_TIMES) + 0.2 * _TABLE_TIMES


def _forced(t: Any, y: Any, args: Any) -> Any:
    """A damped oscillator driven by measured data; the table of the drive is differentiated too."""
    drive = jnp.interp(t, jnp.asarray(_TABLE_TIMES, y.dtype), args["table"])
    return jnp.stack([y[1], -args["stiffness"] * y[0] - args["damping"] * y[1] + drive])


_DOSE_STARTS, _DOSE_ENDS = np.array([0.513, 4.171]), np.array([1.027, 4.683])


def _infusion(t: Any, y: Any, args: Any) -> Any:
    """Two compartments; a dose is an infusion that starts and stops at known times (hours)."""
    on = (t >= jnp.asarray(_DOSE_STARTS, y["centre"].dtype)) & (t < jnp.asarray(_DOSE_ENDS, y["centre"].dtype))
    flow = jnp.sum(jnp.where(on, args["rates"], 0.0))
    out, into, back = args["k"][0] * y["centre"], args["k"][1] * y["centre"], args["k"][2] * y["edge"]
    return {"centre": flow - out - into + back, "edge": into - back}


def _velocity(t: Any, momentum: Any, args: Any) -> Any:
    return momentum


def _force(t: Any, place: Any, args: Any) -> Any:
    x, y = place[0], place[1]
    return jnp.stack([-x - 2 * args * x * y, -y - args * (x**2 - y**2)])


def _henon_heiles(problem: Problem, dtype: Any) -> Any:
    return diffrax.ODETerm(_velocity), diffrax.ODETerm(_force)


def _coupling(t: Any, y: Any, args: Any) -> Any:
    return jnp.stack([args["drive"] * jnp.cos(3 * t), y[0] * y[2], -y[0] * y[1]])


def _relaxation(t: Any, y: Any, args: Any) -> Any:
    return -args["rates"] * (y + 0.1 * y**3)


def _split(problem: Problem, dtype: Any) -> Any:
    return diffrax.MultiTerm(diffrax.ODETerm(_coupling), diffrax.ODETerm(_relaxation))


def _drift(t: Any, y: Any, args: Any) -> Any:
    return jnp.stack([y[1], -args["stiffness"] * y[0] - args["damping"] * y[1]])


def _noise(t: Any, y: Any, args: Any) -> Any:
    return args["noise"] * jnp.stack([jnp.zeros_like(y[0]), jnp.cos(y[0])])


def _noisy(problem: Problem, dtype: Any) -> Any:
    shape = jax.ShapeDtypeStruct((), dtype)
    t0, t1 = jnp.asarray(problem.t0, dtype), jnp.asarray(problem.t1, dtype)
    path = diffrax.VirtualBrownianTree(t0, t1, tol=1e-2, shape=shape, key=jax.random.key(3))
    return diffrax.MultiTerm(diffrax.ODETerm(_drift), diffrax.ControlTerm(_noise, path))


_CHAOS = (
    Problem("lorenz", ode(_lorenz), np.ones(3), np.array([10, 28, 8 / 3]), 2.0, _LORENZ, steps=200),
    Problem("lorenz96d4", ode(_lorenz96), np.array([8.01, 8, 8, 8.1]), np.array(8.0), 2.0, _LORENZ96, steps=100),
    Problem("lorenz96d10", ode(_lorenz96), 8 + np.sin(np.arange(10.0)), np.array(8.0), 1.0, _LORENZ96, steps=100),
)
_STIFF = (
    Problem("vanderpol", ode(_van_der_pol), np.array([2.0, 0]), np.array(5.0), 8.0, _HAIRER, steps=400),
    Problem(
        "robertson",
        ode(_robertson),
        np.array([1.0, 0, 0]),
        np.log([0.04, 3e7, 1e4]),
        40.0,
        _HAIRER,
        atol=1e-9,
        stiff=True,
        end=(0.7158270687, 9.185534765e-6, 0.2841637457),
    ),
    Problem(
        "hires",
        ode(_hires),
        np.array([1, 0, 0, 0, 0, 0, 0, 0.0057]),
        np.array([1.71, 0.43, 8.32, 0.0007, 0.035, 280, 1.81, 0.69]),
        321.8122,
        _HAIRER,
        atol=1e-8,
        stiff=True,
        end=(
            *(0.7371312573325668e-3, 0.1442485726316185e-3, 0.5888729740967575e-4, 0.1175651343283149e-2),
            *(0.2386356198831331e-2, 0.6238968252742796e-2, 0.2849998395185769e-2, 0.2850001604814231e-2),
        ),
    ),
)
_APPLIED = (
    Problem(
        "network",
        ode(_network),
        np.array([0.5, -0.3]),
        (_layer(6, 2, 1), _layer(6, 6, 2), _layer(2, 6, 3)),
        2.0,
        _OWN,
        mild=True,
    ),
    Problem(
        "forced",
        ode(_forced),
        np.array([0.2, 0.0]),
        {
            "stiffness": np.array(2.0),
            "damping": np.array(0.3),
            "table": _TABLE,
        },
        4.0,
        _OWN,
    ),
    Problem(
        "doses",
        ode(_infusion),
        {"centre": np.array(0.0), "edge": np.array(0.1)},
        {"rates": np.array([9.0, 6.0]), "k": np.array([0.6, 0.35, 0.2])},
        8.0,
        _OWN,
        mild=True,
        jumps=(0.513, 1.027, 4.171, 4.683),
    ),
    Problem(
        "henonheiles",
        _henon_heiles,
        (np.array([0.3, -0.1]), np.array([0.0, 0.35])),
        np.array(1.0),
        6.0,
        "Henon, Heiles 1964, doi:10.1086/109234",
        kind="hamiltonian",
        steps=80,
    ),
    Problem(
        "relaxation",
        _split,
        np.array([0.5, 1.0, -0.4]),
        {"drive": np.array(1.5), "rates": np.array([0.1, 20.0, 1.0])},
        3.0,
        _OWN,
        kind="split",
        mild=True,
    ),
    Problem(
        "noisy",
        _noisy,
        np.array([1.0, 0.0]),
        {"stiffness": np.array(2.0), "damping": np.array(0.4), "noise": np.array(0.3)},
        2.0,
        _OWN,
        kind="sde",
        rtol=1e-2,
        atol=1e-2,
    ),
)

PROBLEMS = by_name(DETEST, _CHAOS, _STIFF, _APPLIED)
