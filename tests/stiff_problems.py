"""Stiff problems with published end states: Test Set for IVP Solvers, release 2.4, Mazzia and Magherini (2008),
https://archimede.uniba.it/~testset/; each is `y' = field(t, y, args)`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Stiff:
    """A field, its parameters, where it starts at time 0, and the published state `end` at `t1`.

    `scale`: below which a component is not resolved, as the absolute tolerance is that times the relative one.
    """

    field: Callable
    args: Any
    y0: tuple[float, ...]
    t1: float
    end: tuple[float, ...]
    scale: float = 1.0


def robertson(t, y, k):
    a, b, c = y
    slow, square, cross = k[0] * a, k[1] * b * b, k[2] * b * c
    return jnp.stack([cross - slow, slow - square - cross, square])


def hires(t, y, k):
    y1, y2, y3, y4, y5, y6, y7, y8 = y
    return jnp.stack(
        [
            -1.71 * y1 + 0.43 * y2 + 8.32 * y3 + k[1],
            1.71 * y1 - 8.75 * y2,
            -10.03 * y3 + 0.43 * y4 + 0.035 * y5,
            8.32 * y2 + 1.71 * y3 - 1.12 * y4,
            -1.745 * y5 + 0.43 * y6 + 0.43 * y7,
            -k[0] * y6 * y8 + 0.69 * y4 + 1.71 * y5 - 0.43 * y6 + 0.69 * y7,
            k[0] * y6 * y8 - 1.81 * y7,
            -k[0] * y6 * y8 + 1.81 * y7,
        ]
    )


def oregonator(t, y, k):
    a, b, c = y
    return jnp.stack([k[0] * (b + a * (1 - k[1] * a - b)), (c - (1 + a) * b) / k[0], k[2] * (a - c)])


def van_der_pol(t, y, epsilon):
    return jnp.stack([y[1], ((1 - y[0] ** 2) * y[1] - y[0]) / epsilon])


# Of each reaction of POLLU: its rate constant, what it takes, and what it gives, with the times it does.
REACTIONS = (
    (0.35, (1,), {2: 1, 3: 1}),
    (26.6, (2, 4), {1: 1}),
    (1.23e4, (5, 2), {1: 1, 6: 1}),
    (8.6e-4, (7,), {5: 2, 8: 1}),
    (8.2e-4, (7,), {8: 1}),
    (1.5e4, (7, 6), {5: 1, 8: 1}),
    (1.3e-4, (9,), {5: 1, 8: 1, 10: 1}),
    (2.4e4, (9, 6), {11: 1}),
    (1.65e4, (11, 2), {1: 1, 10: 1, 12: 1}),
    (9.0e3, (11, 1), {13: 1}),
    (2.2e-2, (13,), {1: 1, 11: 1}),
    (1.2e4, (10, 2), {1: 1, 14: 1}),
    (1.88, (14,), {5: 1, 7: 1}),
    (1.63e4, (1, 6), {15: 1}),
    (4.8e6, (3,), {4: 1}),
    (3.5e-4, (4,), {16: 1}),
    (1.75e-2, (4,), {3: 1}),
    (1.0e8, (16,), {6: 2}),
    (4.44e11, (16,), {3: 1}),
    (1.24e3, (17, 6), {5: 1, 18: 1}),
    (2.1, (19,), {2: 1}),
    (5.78, (19,), {1: 1, 3: 1}),
    (4.74e-2, (1, 4), {19: 1}),
    (1.78e3, (19, 1), {20: 1}),
    (3.12, (20,), {1: 1, 19: 1}),
)


def _stoichiometry() -> np.ndarray:
    out = np.zeros((20, len(REACTIONS)))
    for r, (_, taken, given) in enumerate(REACTIONS):
        for species in taken:
            out[species - 1, r] -= 1
        for species, times in given.items():
            out[species - 1, r] += times
    return out


STOICHIOMETRY = _stoichiometry()


def pollution(t, y, k):
    rates = [k[r] * jnp.prod(jnp.stack([y[s - 1] for s in taken])) for r, (_, taken, _) in enumerate(REACTIONS)]
    return STOICHIOMETRY @ jnp.stack(rates)


def _pollution_start() -> tuple[float, ...]:
    start = {2: 0.2, 4: 0.04, 7: 0.1, 8: 0.3, 9: 0.01, 17: 0.007}
    return tuple(start.get(s, 0.0) for s in range(1, 21))


ROBERTSON = Stiff(
    robertson,
    (0.04, 3e7, 1e4),
    (1.0, 0.0, 0.0),
    1e11,
    (0.2083340149701255e-7, 0.8333360770334713e-13, 0.9999999791665050),
    scale=1e-8,
)
HIRES = Stiff(
    hires,
    (280.0, 0.0007),
    (1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0057),
    321.8122,
    (
        0.7371312573325668e-3,
        0.1442485726316185e-3,
        0.5888729740967575e-4,
        0.1175651343283149e-2,
        0.2386356198831331e-2,
        0.6238968252742796e-2,
        0.2849998395185769e-2,
        0.2850001604814231e-2,
    ),
    scale=1e-3,
)
OREGONATOR = Stiff(
    oregonator,
    (77.27, 8.375e-6, 0.161),
    (1.0, 2.0, 3.0),
    360.0,
    (0.1000814870318523e1, 0.1228178521549917e4, 0.1320554942846706e3),
)
VAN_DER_POL = Stiff(van_der_pol, 1e-6, (2.0, 0.0), 2.0, (0.1706167732170483e1, -0.8928097010247975))
POLLUTION = Stiff(
    pollution,
    tuple(k for k, _, _ in REACTIONS),
    _pollution_start(),
    60.0,
    (
        0.5646255480022769e-1,
        0.1342484130422339,
        0.4139734331099427e-8,
        0.5523140207484359e-2,
        0.2018977262302196e-6,
        0.1464541863493966e-6,
        0.7784249118997964e-1,
        0.3245075353396018,
        0.7494013383880406e-2,
        0.1622293157301561e-7,
        0.1135863833257075e-7,
        0.2230505975721359e-2,
        0.2087162882798630e-3,
        0.1396921016840158e-4,
        0.8964884856898295e-2,
        0.4352846369330103e-17,
        0.6899219696263405e-2,
        0.1007803037365946e-3,
        0.1772146513969984e-5,
        0.5682943292316392e-4,
    ),
    scale=1e-4,
)
PUBLISHED = {
    "robertson": ROBERTSON,
    "hires": HIRES,
    "oregonator": OREGONATOR,
    "vanderpol": VAN_DER_POL,
    "pollution": POLLUTION,
}
