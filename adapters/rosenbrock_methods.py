"""Rosenbrock methods as data: coefficients that check their order conditions when they are built."""

import functools
from dataclasses import dataclass

import numpy as np

from gradsolve_backend.adapters.order_conditions import residual

ROUNDING = 5e-13  # of conditions, which are sums of terms up to 1000 in size
Row = tuple[float, ...]


@dataclass(frozen=True, eq=False)
class RosenbrockTableau:
    """A Rosenbrock method in the form that needs no product with the Jacobian.

    Each stage solves `(I / gamma - h J) u[i] = h f(t + times[i] h, y + sum a[i][j] u[j]) + sum c[i][j] u[j] + rates[i]
    h^2 df/dt`, with the sums over the stages before it. The solution is `y + sum solution[j] u[j]`, its error estimate
    `sum error[j] u[j]`. At the share s of the step dense output is `(1 - s) y + s y1 + s (1 - s) sum s^k dense[k][j]
    u[j]`.

    **Fields:** the coefficients, rows of `a` and `c` without what is zero by definition; `order` of the solution,
    `embedded` that of the solution minus its error estimate, `dense_order`; `singly`: the error estimate is the last
    stage, and the solution that stage and its argument.

    **Raises:** `ValueError` if an order condition is missed by more than round-off.
    """

    name: str
    order: int
    embedded: int
    dense_order: int
    gamma: float
    a: tuple[Row, ...]
    c: tuple[Row, ...]
    times: Row
    rates: Row
    solution: Row
    error: Row
    dense: tuple[Row, ...]

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.times)

    @functools.cached_property
    def singly(self) -> bool:
        """Whether the solution is the argument of the last stage plus that stage."""
        return self.solution == (*self.a[-1], 1.0)

    @property
    def error_order(self) -> int:
        """Order in the length of a step of the error estimate."""
        return 1 + min(self.order, self.embedded)

    def dense_weights(self, share: float) -> np.ndarray:
        """Weights of the stages in the dense output at a share of the step."""
        inner = sum(share**k * np.array(row) for k, row in enumerate(self.dense))
        return share * np.array(self.solution) + share * (1 - share) * inner

    def __post_init__(self) -> None:
        inverse = np.eye(self.stages) / self.gamma - _lower(self.c)
        products = np.linalg.inv(inverse)
        a = _lower(self.a) @ products
        missed = [abs(a.sum(1) - self.times).max(), abs(products.sum(1) - self.rates).max()]
        solution, error = np.array(self.solution), np.array(self.error)
        met = lambda w, order, s=1.0: residual(a, w @ products, order, single=a + products, theta=s)  # noqa: E731
        missed += [met(solution, self.order), met(solution - error, self.embedded)]
        missed += [met(self.dense_weights(s), self.dense_order, s) for s in (0.25, 0.5, 0.75)]
        if max(missed) > ROUNDING:
            raise ValueError(f"The coefficients of {self.name} miss their conditions by {max(missed):.1e}.")


def _lower(rows: tuple[Row, ...]) -> np.ndarray:
    """The square matrix whose rows begin with these."""
    out = np.zeros((len(rows), len(rows)))
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def _rosenbrock23() -> RosenbrockTableau:
    """From the formulas as published, in terms of slopes k = u / h transformed by the matrix of products."""
    d, e = 1 / (2 + 2**0.5), 6 + 2**0.5
    a = np.array([[0, 0, 0], [0.5, 0, 0], [0, 1, 0]])
    products = np.array([[d, 0, 0], [-d, d, 0], [(e - 2) * d, -e * d, d]])
    inverse = np.linalg.inv(products)
    row = lambda x: tuple((np.array(x) @ inverse).tolist())  # noqa: E731
    rows = lambda m: tuple(tuple(m[i, :i].tolist()) for i in range(3))  # noqa: E731
    share = 1 / (1 - 2 * d)
    return RosenbrockTableau(
        name="Rosenbrock23",
        order=2,
        embedded=3,
        dense_order=2,
        gamma=d,
        a=rows(a @ inverse),
        c=rows(np.eye(3) / d - inverse),
        times=(0.0, 0.5, 1.0),
        rates=(d, 0.0, -d),
        solution=row([0, 1, 0]),
        error=row([-1 / 6, 1 / 3, -1 / 6]),
        dense=(row([share, -share, 0]),),
    )


ROSENBROCK23 = _rosenbrock23()

RODAS4 = RosenbrockTableau(
    name="Rodas4",
    order=4,
    embedded=3,
    dense_order=3,
    gamma=0.25,
    a=(
        (),
        (1.544,),
        (0.9466785280815826, 0.2557011698983284),
        (3.314825187068521, 2.896124015972201, 0.9986419139977817),
        (1.221224509226641, 6.019134481288629, 12.53708332932087, -0.687886036105895),
        (1.221224509226641, 6.019134481288629, 12.53708332932087, -0.687886036105895, 1.0),
    ),
    c=(
        (),
        (-5.6688,),
        (-2.430093356833875, -0.2063599157091915),
        (-0.1073529058151375, -9.594562251023355, -20.47028614809616),
        (7.496443313967647, -10.24680431464352, -33.99990352819905, 11.7089089320616),
        (8.083246795921522, -7.981132988064893, -31.52159432874371, 16.31930543123136, -6.058818238834054),
    ),
    times=(0.0, 0.386, 0.21, 0.63, 1.0, 1.0),
    rates=(0.25, -0.1043, 0.1035, -0.0362, 0.0, 0.0),
    solution=(1.221224509226641, 6.019134481288629, 12.53708332932087, -0.687886036105895, 1.0, 1.0),
    error=(0.0, 0.0, 0.0, 0.0, 0.0, 1.0),
    dense=(
        (10.12623508344586, -7.487995877610167, -34.80091861555747, -7.992771707568823, 1.025137723295662, 0.0),
        (-0.6762803392801253, 6.087714651680015, 16.43084320892478, 24.76722511418386, -6.594389125716872, 0.0),
    ),
)

RODAS5P = RosenbrockTableau(
    name="Rodas5P",
    order=5,
    embedded=4,
    dense_order=4,
    gamma=0.21193756319429014,
    a=(
        (),
        (3.0,),
        (2.849394379747939, 0.45842242204463923),
        (-6.954028509809101, 2.489845061869568, -10.358996098473584),
        (2.8029986275628964, 0.5072464736228206, -0.3988312541770524, -0.04721187230404641),
        (-7.502846399306121, 2.561846144803919, -11.627539656261098, -0.18268767659942256, 0.030198172008377946),
        (-7.502846399306121, 2.561846144803919, -11.627539656261098, -0.18268767659942256, 0.030198172008377946, 1.0),
        (
            -7.502846399306121,
            2.561846144803919,
            -11.627539656261098,
            -0.18268767659942256,
            0.030198172008377946,
            1.0,
            1.0,
        ),
    ),
    c=(
        (),
        (-14.155112264123755,),
        (-17.97296035885952, -2.859693295451294),
        (147.12150275711716, -1.41221402718213, 71.68940251302358),
        (165.43517024871676, -0.4592823456491126, 42.90938336958603, -5.961986721573306),
        (24.854864614690072, -3.0009227002832186, 47.4931110020768, 5.5814197821558125, -0.6610691825249471),
        (
            30.91273214028599,
            -3.1208243349937974,
            77.79954646070892,
            34.28646028294783,
            -19.097331116725623,
            -28.087943162872662,
        ),
        (
            37.80277123390563,
            -3.2571969029072276,
            112.26918849496327,
            66.9347231244047,
            -40.06618937091002,
            -54.66780262877968,
            -9.48861652309627,
        ),
    ),
    times=(0.0, 0.6358126895828704, 0.4095798393397535, 0.9769306725060716, 0.4288403609558664, 1.0, 1.0, 1.0),
    rates=(
        0.21193756319429014,
        -0.42387512638858027,
        -0.3384627126235924,
        1.8046452872882734,
        2.325825639765069,
        0.0,
        0.0,
        0.0,
    ),
    solution=(
        -7.502846399306121,
        2.561846144803919,
        -11.627539656261098,
        -0.18268767659942256,
        0.030198172008377946,
        1.0,
        1.0,
        1.0,
    ),
    error=(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0),
    dense=(
        (
            25.948786856663858,
            -2.5579724845846235,
            10.433815404888879,
            -2.3679251022685204,
            0.524948541321073,
            1.1241088310450404,
            0.4272876194431874,
            -0.17202221070155493,
        ),
        (
            -9.91568850695171,
            -0.9689944594115154,
            3.0438037242978453,
            -24.495224566215796,
            20.176138334709044,
            15.98066361424651,
            -6.789040303419874,
            -6.710236069923372,
        ),
        (
            11.419903575922262,
            2.8879645146136994,
            72.92137995996029,
            80.12511834622643,
            -52.072871366152654,
            -59.78993625266729,
            -0.15582684282751913,
            4.883087185713722,
        ),
    ),
)
