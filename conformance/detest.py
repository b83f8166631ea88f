"""The non-stiff DETEST set: classes A (one equation) to E (higher order), five problems each, on [0, 20].

The constants of the equations are parameters (`args`), so that gradients reach them. The published end states are those
of the driver in Enright and Pryce 1987; the problems with a closed form have none here, the tests hold the formula.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from gradsolve_backend.conformance.problem import HULL, Problem, ode


def _row(name: str, field: Any, y0: Any, args: Any, **options: Any) -> Problem:
    y0 = np.asarray(y0, float)
    return Problem(name, ode(field), y0, np.asarray(args, float), 20.0, HULL, **options)


def _a1(t: Any, y: Any, args: Any) -> Any:
    return -args * y


def _a2(t: Any, y: Any, args: Any) -> Any:
    return -args * y**3


def _a3(t: Any, y: Any, args: Any) -> Any:
    return args * y * jnp.cos(t)


def _a4(t: Any, y: Any, args: Any) -> Any:
    return args[0] * y * (1 - y / args[1])


def _a5(t: Any, y: Any, args: Any) -> Any:
    return (y - args * t) / (y + t)


def _b1(t: Any, y: Any, args: Any) -> Any:
    product = y[0] * y[1]
    return jnp.stack([args[0] * (y[0] - product), args[1] * (product - y[1])])


def _b2(t: Any, y: Any, args: Any) -> Any:
    first, second = args[0] * (y[1] - y[0]), args[1] * (y[2] - y[1])
    return jnp.stack([first, second - first, -second])


def _b3(t: Any, y: Any, args: Any) -> Any:
    decay, pairs = args[0] * y[0], args[1] * y[1] ** 2
    return jnp.stack([-decay, decay - pairs, pairs])


def _b4(t: Any, y: Any, args: Any) -> Any:
    r = jnp.sqrt(y[0] ** 2 + y[1] ** 2)
    return jnp.stack([-args[0] * y[1] - y[0] * y[2] / r, args[0] * y[0] - y[1] * y[2] / r, args[1] * y[0] / r])


def _b5(t: Any, y: Any, args: Any) -> Any:
    return args * jnp.stack([y[1] * y[2], y[0] * y[2], y[0] * y[1]])


def _chain(t: Any, y: Any, args: Any) -> Any:
    """C1, C2: each member decays into the next, the last one is stable."""
    decay = args * y[:-1]
    zero = jnp.zeros_like(y[:1])
    return jnp.concatenate([zero, decay]) - jnp.concatenate([decay, zero])


def _diffusion(t: Any, y: Any, args: Any) -> Any:
    """C3, C4: heat on a rod whose ends are held at zero."""
    zero = jnp.zeros_like(y[:1])
    return args * (jnp.concatenate([y[1:], zero]) - 2 * y + jnp.concatenate([zero, y[:-1]]))


def _five_bodies(t: Any, y: Any, args: Any) -> Any:
    """C5: the outer planets; `y`: positions and velocities, (2, 5, 3); `args`: k2, the mass of the sun, five masses."""
    place, velocity = y[0], y[1]
    k2, sun, mass = args[0], args[1], args[2:]
    apart = place[None, :, :] - place[:, None, :]
    # The diagonal is a body's distance to itself: one there keeps its gradient finite, and its difference is zero.
    cube = (jnp.sum(apart**2, axis=2) + jnp.eye(5, dtype=y.dtype)) ** 1.5
    to_sun = place / jnp.sum(place**2, axis=1, keepdims=True) ** 1.5
    direct = jnp.sum(mass[None, :, None] * apart / cube[:, :, None], axis=1)
    indirect = jnp.sum(mass[:, None] * to_sun, axis=0, keepdims=True) - mass[:, None] * to_sun
    return jnp.stack([velocity, k2 * (direct - indirect - (sun + mass)[:, None] * to_sun)])


def _orbit(t: Any, y: Any, args: Any) -> Any:
    """D1 to D5: two bodies, eccentricity 0.1 to 0.9 by the starting point."""
    pull = -args / (y[0] ** 2 + y[1] ** 2) ** 1.5
    return jnp.stack([y[2], y[3], pull * y[0], pull * y[1]])


def _e1(t: Any, y: Any, args: Any) -> Any:
    s = t + args[0]
    return jnp.stack([y[1], -(y[1] / s + (1 - args[1] / s**2) * y[0])])


def _e2(t: Any, y: Any, args: Any) -> Any:
    return jnp.stack([y[1], args * (1 - y[0] ** 2) * y[1] - y[0]])


def _e3(t: Any, y: Any, args: Any) -> Any:
    return jnp.stack([y[1], args[0] * y[0] ** 3 - y[0] + args[1] * jnp.sin(args[2] * t)])


def _e4(t: Any, y: Any, args: Any) -> Any:
    return jnp.stack([y[1], args[0] - args[1] * y[1] ** 2])


def _e5(t: Any, y: Any, args: Any) -> Any:
    return jnp.stack([y[1], jnp.sqrt(1 + y[1] ** 2) / (args - t)])


_PLANETS = (
    ((3.42947415189, 3.35386959711, 1.35494901715), (-0.557160570446, 0.505696783289, 0.230578543901)),
    ((6.64145542550, 5.97156957878, 2.18231499728), (-0.415570776342, 0.365682722812, 0.169143213293)),
    ((11.2630437207, 14.6952576794, 6.27960525067), (-0.325325669158, 0.189706021964, 0.0877265322780)),
    ((-30.1552268759, 1.65699966404, 1.43785752721), (-0.0240476254170, -0.287659532608, -0.117219543175)),
    ((-21.1238353380, 28.4465098142, 15.3882659679), (-0.176860753121, -0.216393453025, -0.0148647893090)),
)
_MASSES = (0.000954786104043, 0.000285583733151, 0.0000437273164546, 0.0000517759138449, 0.00000277777777778)
_PLANETS_END = (
    *(-4.792730224323733, -2.420550725448973, -0.9212509306014886),
    *(-4.217310404035213, 7.356202947498970, 3.223785985421212),
    *(4.035559443262270, 17.19865528670555, 7.478910794233703),
    *(-29.98759326324844, -4.107310937550929, -0.9277008321754407),
    *(-24.42125302518482, 23.81459045746554, 14.92096306951359),
    *(0.3499208963063806, -0.5748487687912825, -0.2551694020879149),
    *(-0.5237040978903326, -0.2493000463579661, -0.08045341642044464),
    *(-0.3875289237334110, 0.05648603288767891, 0.03023606472143342),
    *(0.04133856546712445, -0.2862393029841379, -0.1183032405136207),
    *(-0.1511986457359206, -0.2460068894318766, -0.03189687411323877),
)
_START_AT_ONE = [1.0] + [0.0] * 9


def _ellipse(name: str, eccentricity: float, mild: bool) -> Problem:
    speed = np.sqrt((1 + eccentricity) / (1 - eccentricity))
    return _row(name, _orbit, [1 - eccentricity, 0, 0, speed], 1.0, mild=mild, steps=200)


CLASS_A = (
    _row("a1", _a1, 1.0, 1.0),
    _row("a2", _a2, 1.0, 0.5, mild=True),
    _row("a3", _a3, 1.0, 1.0, mild=True),
    _row("a4", _a4, 1.0, [0.25, 20.0], mild=True),
    _row("a5", _a5, 4.0, 1.0, mild=True, end=(-0.7887826688964196,)),
)
CLASS_B = (
    _row("b1", _b1, [1, 3], [2, 1], mild=True, steps=200, end=(0.6761876008576667, 0.1860816099640036)),
    _row("b2", _b2, [2, 0, 1], [1, 1]),
    _row("b3", _b3, [1, 0, 0], [1, 1], end=(2.061153488557776e-9, 5.257228022048349e-2, 0.9474277177183630)),
    _row("b4", _b4, [3, 0, 0], [1, 1], mild=True, end=(0.9826950928005993, 2.198447081694832, 0.9129452507276399)),
    _row("b5", _b5, [0, 1, 1], [1, -1, -0.51], mild=True),
)
CLASS_C = (
    _row("c1", _chain, _START_AT_ONE, [1.0] * 9),
    _row("c2", _chain, _START_AT_ONE, np.arange(1.0, 10.0), steps=128),
    _row("c3", _diffusion, _START_AT_ONE, 1.0, steps=80),
    _row("c4", _diffusion, [1.0] + [0.0] * 50, 1.0, steps=80),
    _row(
        "c5",
        _five_bodies,
        np.transpose(_PLANETS, (1, 0, 2)),
        (2.95912208286, 1.00000597682, *_MASSES),
        heavy=True,
        end=_PLANETS_END,
    ),
)
CLASS_D = tuple(_ellipse(f"d{i + 1}", 0.1 + 0.2 * i, mild=i < 3) for i in range(5))
CLASS_E = (
    _row("e1", _e1, [0.6713967071418030, 0.09540051444747446], [1, 0.25], mild=True),
    _row("e2", _e2, [2, 0], 1.0, steps=200, end=(2.008149762174948, -4.250887527320057e-2)),
    _row("e3", _e3, [0, 0], [1 / 6, 2, 2.78535], mild=True, end=(-0.1004178858647128, 0.2411400132095954)),
    _row("e4", _e4, [30, 0], [0.032, 0.4], mild=True),
    _row("e5", _e5, [0, 0], 25.0, mild=True),
)
DETEST = CLASS_A + CLASS_B + CLASS_C + CLASS_D + CLASS_E
