"""The fastest way of a ship through a current: an optimal control problem whose final time is free.

Zermelo's problem: a ship of speed 1 heads wherever it chooses, while a current of speed -y carries it in the direction
of x. It starts at (3.66, -1.86) and is to reach the origin as soon as possible. The heading is a polynomial of the
fraction of the time that has passed. Its coefficients and the final time t1 are optimised together, by BFGS with an
augmented Lagrangian for the two conditions at the end. The gradient with respect to t1 is that of `diffeqsolve`.

Published: Bryson and Ho 1975, Applied Optimal Control, section 2.7; the optimal heading turns from 105 to 240 degrees,
and its tangent is linear in time.
"""

from functools import partial

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from common import BLUE, GREY, RED, Options, compare, difference, numbers, options, panels, save

from gradsolve_backend import GradSolveAdjoint

FIRST, LAST = np.deg2rad([105.0, 240.0])
EXACT_TIME = np.tan(LAST) - np.tan(FIRST)
COEFFICIENTS, WEIGHT = 12, 10.0


def exact_way(to_go: np.ndarray | float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Place and heading of the optimal ship when there is this time to go: the closed form."""
    heading = np.pi + np.arctan(np.tan(LAST) - to_go)
    tangents, secants = (np.tan(LAST), np.tan(heading)), (1.0 / np.cos(LAST), 1.0 / np.cos(heading))
    logarithm = np.log((tangents[0] + secants[0]) / (tangents[1] + secants[1]))
    sheared = secants[0] * (tangents[0] - tangents[1]) - tangents[1] * (secants[0] - secants[1])
    return -0.5 * (sheared + logarithm), secants[1] - secants[0], heading


def heading(fraction, coefficients):
    """Heading, radians, when this fraction of the time has passed: a sum of Chebyshev polynomials, by Clenshaw."""
    z, ahead, beyond = 2.0 * fraction - 1.0, 0.0, 0.0
    for coefficient in coefficients[:0:-1]:
        ahead, beyond = coefficient + 2.0 * z * ahead - beyond, ahead
    return coefficients[0] + z * ahead - beyond


def ship(t, y, control):
    """Velocity over ground."""
    angle = heading(t / control[0], control[1:])
    return jnp.stack([jnp.cos(angle) - y[1], jnp.sin(angle)])


def sail(control: jax.Array, adjoint: diffrax.AbstractAdjoint, saveat: diffrax.SaveAt) -> jax.Array:
    """Places of the ship; `control` holds t1 and then the coefficients, shape (13,)."""
    return diffrax.diffeqsolve(
        diffrax.ODETerm(ship),
        diffrax.Tsit5(),
        0.0,
        control[0],
        None,
        jnp.stack(exact_way(EXACT_TIME)[:2]),
        control,
        saveat=saveat,
        stepsize_controller=diffrax.PIDController(rtol=1e-9, atol=1e-9),
        adjoint=adjoint,
        throw=False,
    ).ys


def lagrangian(control: jax.Array, prices: jax.Array, adjoint: diffrax.AbstractAdjoint) -> tuple[jax.Array, jax.Array]:
    """Final time, plus what it costs to miss the origin; and by how much it is missed, shape (2,)."""
    missed = sail(control, adjoint, diffrax.SaveAt(t1=True))[0]
    return control[0] + prices @ missed + 0.5 * WEIGHT * missed @ missed, missed


def optimise(start: jax.Array, rounds: int, adjoint: diffrax.AbstractAdjoint) -> tuple[jax.Array, jax.Array]:
    """Minimise for fixed prices of the two conditions, change the prices, and again; also returns what was missed."""

    def improve(carry, _):
        control, prices = carry
        method = optx.BFGS(rtol=1e-7, atol=1e-7)
        found = optx.minimise(
            lambda control, prices: lagrangian(control, prices, adjoint),
            method,
            control,
            args=prices,
            has_aux=True,
            max_steps=200,
            throw=False,
        ).value
        missed = lagrangian(found, prices, adjoint)[1]
        return (found, prices + WEIGHT * missed), missed

    (control, _), missed = jax.lax.scan(improve, (start, jnp.zeros(2)), length=rounds)
    return control, missed[-1]


def draw(start: jax.Array, control: jax.Array, chosen: Options) -> None:
    """The way through the current, and the heading."""
    figure, (way, turn) = panels(2, f"Zermelo's ship reaches the origin at t1 = {control[0]:.4f}")
    fractions = np.linspace(0.0, 1.0, 200)
    x, y, angle = exact_way(EXACT_TIME * (1.0 - fractions))
    for given, colour, style, label in ((start, GREY, "-", "first guess"), (control, RED, "--", "found")):
        saveat = diffrax.SaveAt(ts=given[0] * fractions)
        way.plot(*sail(given, GradSolveAdjoint(), saveat).T, style, color=colour, label=label, zorder=3)
        headings = np.rad2deg(jax.vmap(heading, (0, None))(fractions, given[1:]))
        turn.plot(given[0] * fractions, headings, style, color=colour, label=label, zorder=3)
    way.plot(x, y, color=BLUE, linewidth=4, alpha=0.4, label="closed form")
    turn.plot(EXACT_TIME * fractions, np.rad2deg(angle), color=BLUE, linewidth=4, alpha=0.4, label="closed form")
    way.plot([x[0], 0.0], [y[0], 0.0], "ko")
    way.annotate("start", (x[0], y[0]), (6, -12), textcoords="offset points")
    way.annotate("goal", (0.0, 0.0), (8, -4), textcoords="offset points")
    across, along = np.meshgrid(np.linspace(*way.get_xlim(), 9), np.linspace(*way.get_ylim(), 9))
    way.quiver(across, along, -along, 0.0 * along, color=GREY, alpha=0.5, width=0.003)
    way.set(xlabel="x", ylabel="y", title="way (arrows: current)")
    turn.set(xlabel="time", ylabel="heading, degrees", title="control")
    way.legend(loc="lower left", framealpha=1.0, edgecolor="none", fontsize=9).set_zorder(4)
    turn.legend(frameon=False)
    save(figure, chosen.out)


def main() -> None:
    """Optimise with both, print, draw."""
    chosen = options(__doc__)
    rounds = 4 if chosen.short else 10
    start = jnp.zeros(1 + COEFFICIENTS).at[:3].set([7.0, np.pi, 0.5 * np.pi])
    (control, missed), (stock, _) = compare(
        f"optimal control with {len(start)} unknowns",
        partial(optimise, rounds=rounds, adjoint=GradSolveAdjoint()),
        partial(optimise, rounds=rounds, adjoint=diffrax.RecursiveCheckpointAdjoint()),
        [start],
        rounds=2 if chosen.short else 5,
    )
    first, last = np.rad2deg([heading(0.0, control[1:]), heading(1.0, control[1:])])
    rows = [("final time t1", control[0], EXACT_TIME), ("first heading, degrees", first, 105.0)]
    numbers("published", [*rows, ("last heading, degrees", last, 240.0)])
    numbers("allowed", [("distance to the goal", jnp.linalg.norm(missed), 1e-2 if chosen.short else 1e-4)])
    slopes = [
        jax.jit(jax.grad(lambda c, a=a: lagrangian(c, jnp.ones(2), a)[0]))(start)
        for a in (GradSolveAdjoint(), diffrax.RecursiveCheckpointAdjoint())
    ]
    numbers("stock", [("derivative of the Lagrangian by t1, at the start", slopes[0][0], slopes[1][0])])
    numbers("allowed", [("difference of the gradient from stock's", difference(*slopes), 1e-8)])
    draw(start, control, chosen)


if __name__ == "__main__":
    main()
