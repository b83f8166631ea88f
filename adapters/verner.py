"""Verner's pair of orders 7 and 6, for smooth problems and tight tolerances."""

from collections.abc import Callable
from typing import Any, ClassVar

import diffrax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from gradsolve_backend.adapters.order_conditions import residual
from gradsolve_backend.kernels.compat import linear_rescale

# Stages 11 to 16 serve dense output alone.
_A = (
    (0.005,),
    (-1.07679012345679, 1.185679012345679),
    (0.04083333333333333, 0, 0.1225),
    (0.6389139236255726, 0, -2.455672638223657, 2.272258714598084),
    (-2.6615773750187572, 0, 10.804513886456137, -8.3539146573962, 0.820487594956657),
    (6.067741434696771, 0, -24.711273635911084, 20.427517930788895, -1.9061579788166472, 1.006172249242068),
    (
        12.054670076253203,
        0,
        -49.75478495046899,
        41.142888638604674,
        -4.461760149974004,
        2.042334822239175,
        -0.09834843665406108,
    ),
    (
        10.138146522881808,
        0,
        -42.6411360317175,
        35.76384003992257,
        -4.3480228403929075,
        2.0098622683770357,
        0.3487490460338272,
        -0.27143900510483127,
    ),
    (
        -45.030072034298676,
        0,
        187.3272437654589,
        -154.02882369350186,
        18.56465306347536,
        -7.141809679295079,
        1.3088085781613785,
        0,
        0,
    ),
    (
        0.04715561848627222,
        0,
        0,
        0.25750564298434153,
        0.2621665397741262,
        0.15216092656738558,
        0.49399691700324844,
        -0.29430311714032503,
        0.0813174723249511,
        0,
    ),
    (
        0.0523222769159969,
        0,
        0,
        0.22495861826705715,
        0.017443709248776376,
        -0.007669379876829393,
        0.03435896044073285,
        -0.0410209723009395,
        0.025651133005205617,
        0,
        -0.0160443457,
    ),
    (
        0.053053341257859085,
        0,
        0,
        0.12195301011401886,
        0.017746840737602496,
        -0.0005928372667681495,
        0.008381833970853752,
        -0.01293369259698612,
        0.009412056815253861,
        0,
        -0.005353253107275676,
        -0.06666729992455811,
    ),
    (
        0.03887903257436304,
        0,
        0,
        -0.0024403203308301317,
        -0.0013928917214672623,
        -0.00047446291558680135,
        0.00039207932413159514,
        -0.00040554733285128004,
        0.00019897093147716726,
        0,
        -0.00010278198793179169,
        0.03385661513870267,
        0.1814893063199928,
    ),
    (
        0.05723681204690013,
        0,
        0,
        0.22265948066761182,
        0.12344864200186899,
        0.04006332526666491,
        -0.05269894848581452,
        0.04765971214244523,
        -0.02138895885042213,
        0,
        0.015193891064036402,
        0.12060546716289655,
        -0.022779423016187374,
        0,
    ),
    (
        0.051372038802756814,
        0,
        0,
        0.5414214473439406,
        0.350399806692184,
        0.14193112269692182,
        0.10527377478429423,
        -0.031081847805874016,
        -0.007401883149519145,
        0,
        -0.006377932504865363,
        -0.17325495908361865,
        -0.18228156777622026,
        0,
        0,
    ),
)
_C = (
    0.005,
    0.10888888888888888,
    0.16333333333333333,
    0.4555,
    0.6095094489978381,
    0.884,
    0.925,
    1,
    1,
    1,
    0.29,
    0.125,
    0.25,
    0.53,
    0.79,
)
_B = (
    0.04715561848627222,
    0,
    0,
    0.25750564298434153,
    0.2621665397741262,
    0.15216092656738558,
    0.49399691700324844,
    -0.29430311714032503,
    0.0813174723249511,
    0,
    0,
    0,
    0,
    0,
    0,
    0,
)
_ERROR = (
    0.0025470118799310456,
    0,
    0,
    -0.00965839487279575,
    0.0420647097563969,
    -0.0666822437469301,
    0.26500974646212816,
    -0.29430311714032503,
    0.0813174723249511,
    -0.020295184663356284,
    0,
    0,
    0,
    0,
    0,
    0,
)
# Row i: the polynomial by which stage i enters dense output, from the first power on.
_DENSE = (
    (
        1,
        -8.413387198332767,
        33.675508884490895,
        -70.80159089484886,
        80.64695108301298,
        -47.19413969837522,
        11.133813442539243,
    ),
    (0, 0, 0, 0, 0, 0, 0),
    (0, 0, 0, 0, 0, 0, 0),
    (
        0,
        8.754921980674396,
        -88.4596828699771,
        346.9017638429916,
        -629.2580030059837,
        529.6773755604193,
        -167.35886986514018,
    ),
    (
        0,
        8.913387586637922,
        -90.06081846893218,
        353.1807459217058,
        -640.6476819744374,
        539.2646279047156,
        -170.38809442991547,
    ),
    (
        0,
        5.1733120298478,
        -52.271115900055385,
        204.9853867374073,
        -371.8306118563603,
        312.9880934374529,
        -98.89290352172495,
    ),
    (
        0,
        16.79537744079696,
        -169.70040000059728,
        665.4937727009246,
        -1207.1638892336007,
        1016.1291515818546,
        -321.06001557237494,
    ),
    (
        0,
        -10.005997536098665,
        101.1005433052275,
        -396.47391512378437,
        719.1787707014183,
        -605.3681033918824,
        191.27439892797935,
    ),
    (
        0,
        2.764708833638599,
        -27.934602637390462,
        109.54779186137893,
        -198.7128113064482,
        167.26633571640318,
        -52.85010499525706,
    ),
    (0, 0, 0, 0, 0, 0, 0),
    (
        0,
        -2.1696320280163506,
        22.016696037569876,
        -86.90152427798948,
        159.22388973861476,
        -135.9618306534588,
        43.792401183280006,
    ),
    (
        0,
        -4.890070188793804,
        22.75407737425176,
        -30.78034218537731,
        -2.797194317207249,
        31.369456637508403,
        -15.655927320381801,
    ),
    (
        0,
        10.862170929551967,
        -50.542971417827104,
        68.37148040407511,
        6.213326521632409,
        -69.68006323194157,
        34.776056794509195,
    ),
    (
        0,
        -11.37286691922923,
        130.79058078246717,
        -488.65113677785604,
        832.2148793276441,
        -664.7743368554426,
        201.79288044241662,
    ),
    (
        0,
        -5.919778732715007,
        63.27679965889219,
        -265.432682088738,
        520.1009254140611,
        -467.412109533902,
        155.3868452824017,
    ),
    (
        0,
        -10.492146197961823,
        105.35538525188011,
        -409.43975011988937,
        732.831448907654,
        -606.3044574733512,
        188.0495196316683,
    ),
)
_USED = np.flatnonzero(np.any(_DENSE, axis=1))  # stages that dense output reads


def _checked() -> diffrax.ButcherTableau:
    """The tableau, once its order conditions and those of its dense output are met to round-off."""
    a, b, error, dense = np.zeros((len(_B), len(_B))), np.array(_B), np.array(_ERROR), np.array(_DENSE)
    for i, row in enumerate(_A, 1):
        a[i, :i] = row
    missed = [residual(a, b, 7), residual(a, b - error, 6)]
    missed += [residual(a, dense @ share ** np.arange(1, 8), 6, theta=share) for share in (0.3, 0.6, 0.9)]
    if max(missed) > 1e-12:
        raise ValueError(f"The coefficients of Vern7 miss their conditions by {max(missed):.1e}.")
    rows = tuple(np.array(row, float) for row in _A)
    return diffrax.ButcherTableau(c=np.array(_C), b_sol=b, b_error=error, a_lower=rows)


class Vern7Interpolation(diffrax.AbstractLocalInterpolation):
    """Dense output of order 6.

    **Arguments:** `t0`, `t1`, `y0`: the step. `k`: its stages, in an axis in front of each leaf of the state.
    """

    t0: Any
    t1: Any
    y0: Any
    k: Any

    def __init__(self, *, t0: Any, t1: Any, y0: Any, y1: Any, k: Any) -> None:
        del y1
        self.t0, self.t1, self.y0, self.k = t0, t1, y0, k

    def evaluate(self, t0: Any, t1: Any | None = None, left: bool = True) -> Any:
        """The state at `t0`, or the difference of that at `t1` and that at `t0`."""
        if t1 is not None:
            return jtu.tree_map(jnp.subtract, self.evaluate(t1), self.evaluate(t0))
        share = jnp.asarray(linear_rescale(self.t0, t0, self.t1))

        def leaf(y0: Any, k: Any) -> Any:
            s = share.astype(y0.dtype)
            weights = jnp.zeros(len(_USED), y0.dtype)
            for column in np.array(_DENSE)[_USED].T[::-1]:
                weights = s * (weights + jnp.asarray(column, y0.dtype))
            return y0 + jnp.tensordot(weights, k[_USED], axes=1)

        return jtu.tree_map(leaf, self.y0, self.k)


class Vern7(diffrax.AbstractERK):
    """Verner's "most efficient" pair: order 7 with an error estimate of order 7, dense output of order 6.

    Ten stages, and six more for dense output, which `GradSolveAdjoint` leaves out where nothing is saved inside steps.
    Verner, Numerically optimal Runge-Kutta pairs with interpolants, Numerical Algorithms 53 (2010),
    https://doi.org/10.1007/s11075-009-9290-3.
    """

    tableau: ClassVar[diffrax.ButcherTableau] = _checked()
    interpolation_cls: ClassVar[Callable[..., Vern7Interpolation]] = Vern7Interpolation

    def order(self, terms: Any) -> int:
        """Order of the solution."""
        return 7
