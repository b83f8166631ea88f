"""A neural ODE learns the vector field of a spiral from short pieces of its path.

The spiral is that of Chen, Rubanova, Bettencourt and Duvenaud 2018, arXiv:1806.07366: the slope is a matrix times the
cubes of the two coordinates. The network sees those cubes, as theirs does. Each piece is one lane of a batched solve.
With so few weights BFGS of Optimistix gets further than stochastic gradients would.
"""

from functools import partial

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from common import BLUE, GREY, RED, Options, compare, difference, numbers, options, panels, save

from gradsolve_backend import GradSolveAdjoint

MATRIX = np.array([[-0.1, 2.0], [-2.0, -0.1]])
START, END, POINTS = np.array([2.0, 0.0]), 25.0, 1001
PIECE, PIECES, WIDTH = 41, 25, 16  # points of a piece, pieces, hidden units
ERROR = 0.01  # the error of a coordinate that counts as one in the loss


def spiral(t, y, args):
    """The true field."""
    return MATRIX @ y**3


def network(t, y, weights):
    """Two layers, 2 to 16 to 2, on the cubes of the coordinates."""
    first, shift, second = weights
    return second @ jnp.tanh(first @ y**3 + shift)


def path(field, y0: jax.Array, weights, times: jax.Array, adjoint: diffrax.AbstractAdjoint) -> jax.Array:
    """States at `times`, of which the first is the start; shape (times, 2)."""
    return diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        diffrax.Tsit5(),
        times[0],
        times[-1],
        None,
        y0,
        weights,
        saveat=diffrax.SaveAt(ts=times),
        stepsize_controller=diffrax.PIDController(rtol=1e-6, atol=1e-6),
        adjoint=adjoint,
        throw=False,
    ).ys


def loss(weights, pieces: jax.Array, times: jax.Array, adjoint: diffrax.AbstractAdjoint) -> jax.Array:
    """Mean square error of the pieces, shape (pieces, points, 2), each solved from its first point."""
    solved = jax.vmap(lambda piece: path(network, piece[0], weights, times, adjoint))(pieces)
    return jnp.mean((solved - pieces) ** 2) / ERROR**2


def train(weights, pieces: jax.Array, times: jax.Array, steps: int) -> tuple[jax.Array, ...]:
    """Weights after as many steps of BFGS."""
    return optx.minimise(
        lambda weights, _: loss(weights, pieces, times, GradSolveAdjoint()),
        optx.BFGS(rtol=1e-6, atol=1e-9),
        weights,
        max_steps=steps,
        throw=False,
    ).value


def draw(data: np.ndarray, before: np.ndarray, after: np.ndarray, chosen: Options) -> None:
    """The paths in the plane, one coordinate against time, and how far they are from the spiral."""
    figure, (plane, wave, away) = panels(3, "A neural ODE learns a spiral")
    times = np.linspace(0.0, END, POINTS)
    plane.plot(*data.T, color=BLUE, linewidth=3, alpha=0.4, label="spiral")
    plane.plot(*after.T, "--", color=RED, linewidth=1.3, label="trained network")
    plane.set(xlabel="y₁", ylabel="y₂", title="the whole path, from its start", aspect="equal", ylim=(-2.1, 2.6))
    plane.legend(frameon=False, loc="upper center", ncols=2)
    wave.plot(times, data[:, 0], color=BLUE, linewidth=3, alpha=0.4, label="spiral")
    wave.plot(times, after[:, 0], "--", color=RED, linewidth=1.3, label="trained network")
    wave.set(xlabel="time", ylabel="y₁", title="first coordinate", ylim=(-2.1, 2.6))
    wave.legend(frameon=False, ncols=2)
    for solved, colour, label in ((before, GREY, "untrained network"), (after, RED, "trained network")):
        away.semilogy(times[1:], np.linalg.norm(solved - data, axis=1)[1:], color=colour, label=label)
    away.set(xlabel="time", ylabel="distance from the spiral", title="error of the whole path")
    away.legend(frameon=False)
    save(figure, chosen.out)


def main() -> None:
    """Time a gradient with both, train, print, draw."""
    chosen, times = options(__doc__), jnp.linspace(0.0, END, POINTS)
    data = path(spiral, jnp.asarray(START), None, times, GradSolveAdjoint())
    normal = np.random.default_rng(0).standard_normal
    weights = (0.3 * normal((WIDTH, 2)), 0.1 * normal(WIDTH), 0.3 * normal((2, WIDTH)))
    weights = jax.tree.map(jnp.asarray, weights)
    pieces = data[jnp.linspace(0, POINTS - PIECE, PIECES).astype(int)[:, None] + jnp.arange(PIECE)]
    ours, stock = compare(
        f"gradient by {sum(w.size for w in weights)} weights, {PIECES} pieces",
        jax.grad(partial(loss, times=times[:PIECE], adjoint=GradSolveAdjoint())),
        jax.grad(partial(loss, times=times[:PIECE], adjoint=diffrax.RecursiveCheckpointAdjoint())),
        [weights, pieces],
        rounds=5 if chosen.short else 25,
    )
    trained = jax.jit(partial(train, steps=300 if chosen.short else 2000))(weights, pieces, times[:PIECE])
    whole = partial(path, network, jnp.asarray(START), times=times, adjoint=GradSolveAdjoint())
    before, after = (np.asarray(whole(w)) for w in (weights, trained))
    losses = [float(loss(w, pieces, times[:PIECE], GradSolveAdjoint())) for w in (trained, weights)]
    worst = [np.abs(solved - data).max() for solved in (after, before)]
    rows = [("loss", *losses), ("largest error of the whole path", *worst)]
    numbers("before training", rows)
    numbers("allowed", [("difference of the gradient from stock's", max(map(difference, ours, stock)), 1e-8)])
    draw(np.asarray(data), before, after, chosen)


if __name__ == "__main__":
    main()
