"""Problems to time the backends on: small and large systems, one lane and many."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import diffrax
import jax
import jax.numpy as jnp
import numpy as np

from gradsolve_backend import GradSolveAdjoint


class Case(NamedTuple):
    """A problem on a number of lanes. `loss(*arguments)` is a sum over lanes; the gradient is by all arguments."""

    name: str
    lanes: int
    loss: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.name} x {self.lanes}"


def lorenz(t: Any, y: Any, args: Any) -> Any:
    """The Lorenz system; `args`, of shape (3,), are its parameters."""
    return jnp.stack([args[0] * (y[1] - y[0]), y[0] * (args[1] - y[2]) - y[1], y[0] * y[1] - args[2] * y[2]])


def lorenz96(t: Any, y: Any, force: Any) -> Any:
    """The Lorenz-96 system of any dimension."""
    return (jnp.roll(y, -1) - jnp.roll(y, 2)) * jnp.roll(y, 1) - y + force


def network(t: Any, y: Any, layers: Any) -> Any:
    """A neural vector field; `layers` are pairs of a matrix and an offset."""
    for matrix, offset in layers[:-1]:
        y = jnp.tanh(matrix @ y + offset)
    matrix, offset = layers[-1]
    return matrix @ y + offset


def _final(field: Callable[..., Any], tolerance: float, y0: Any, args: Any) -> Any:
    zero, one, first = (jnp.asarray(x, y0.dtype) for x in (0.0, 1.0, 0.01))
    how: dict[str, Any] = {
        "stepsize_controller": diffrax.PIDController(rtol=tolerance, atol=tolerance),
        "adjoint": GradSolveAdjoint(),
    }
    ys = diffrax.diffeqsolve(diffrax.ODETerm(field), diffrax.Tsit5(), zero, one, first, y0, args, **how).ys
    assert isinstance(ys, jax.Array)
    return ys[-1]


def _squares(field: Callable[..., Any], tolerance: float, own: bool) -> Callable[..., Any]:
    """Sum of squares of the states after one unit of time; `own`: each lane has its own parameters."""

    def loss(y0: Any, args: Any) -> Any:
        solve = lambda y0, args: _final(field, tolerance, y0, args)  # noqa: E731
        return jnp.sum(jax.vmap(solve, in_axes=(0, 0 if own else None))(y0, args) ** 2)

    return loss


def lorenz_case(lanes: int) -> Case:
    """Each lane has its own parameters, in float64."""
    args = np.stack([np.full(lanes, 10.0), np.linspace(20.0, 28.0, lanes), np.full(lanes, 8 / 3)], axis=1)
    y0 = np.tile([1.0, 0.0, 0.0], (lanes, 1))
    return Case("Lorenz", lanes, _squares(lorenz, 1e-8, own=True), (y0, args))


def lorenz96_case(dimension: int, lanes: int) -> Case:
    """Each lane has its own force, in float64."""
    y0 = np.tile(8.0 + np.sin(np.arange(dimension)), (lanes, 1))
    force = np.linspace(7.0, 9.0, lanes)
    return Case(f"Lorenz-96, dimension {dimension}", lanes, _squares(lorenz96, 1e-8, own=True), (y0, force))


def network_case(lanes: int) -> Case:
    """A neural vector field 2 -> 64 -> 64 -> 2 in float32, whose weights all lanes share."""
    random, sizes = np.random.default_rng(0), (2, 64, 64, 2)
    layers = [
        (random.standard_normal((rows, columns)) / np.sqrt(columns), np.zeros(rows))
        for columns, rows in zip(sizes[:-1], sizes[1:], strict=True)
    ]
    y0, weights = jax.tree.map(np.float32, (random.standard_normal((lanes, 2)), layers))
    return Case("neural network, float32", lanes, _squares(network, 1e-5, own=False), (y0, weights))


def cases(long: bool) -> Iterator[Case]:
    """The problems of the short form, and those of the long one after them."""
    yield from (lorenz_case(1), lorenz_case(64), lorenz96_case(10, 64))
    if long:
        yield from (lorenz_case(1024), lorenz96_case(10, 256), lorenz96_case(40, 256), network_case(256))
