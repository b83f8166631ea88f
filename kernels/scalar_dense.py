"""Rules of the scalariser for small dense linear systems: elimination with partial pivoting as straight-line code.

A place of the matrix that is zero for all values of the inputs is never a pivot's and never worked on, so that sparse
systems give shorter programs; unknowns are eliminated in an order that keeps such places. Rows k and i are exchanged by
a choice between the two, for each candidate i in turn, so that the largest entry of the column ends up in row k.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradsolve_backend.kernels.dense import FACTOR, SOLVE
from gradsolve_backend.kernels.scalar_graph import Atom, Graph, NoScalarForm, Value, atoms, pack

DIMENSION = 32  # of the largest matrix that is unrolled; a full one makes too long a program before that


def is_zero(x: Atom) -> bool:
    """Whether an entry is known to be zero."""
    return isinstance(x, np.generic) and bool(x == 0)


def minus_product(graph: Graph, x: Atom, a: Atom, b: Atom) -> Atom:
    """x - a b, where a structural zero of either factor leaves x as it is."""
    return x if is_zero(a) or is_zero(b) else graph.call("sub", x, graph.call("mul", a, b))


def swap(graph: Graph, which: Atom, x: Atom, y: Atom) -> tuple[Atom, Atom]:
    return graph.call("select_n", which, x, y), graph.call("select_n", which, y, x)


def elimination_order(nonzero: np.ndarray) -> list[int]:
    """An order of unknowns in which the next one costs the least work, whichever rows turn out to be exchanged.

    Rows among which the pivot is chosen may end up in each other's place, and have all of their places filled.
    """
    filled, rest, order = nonzero.copy(), list(range(len(nonzero))), []
    for _ in range(len(nonzero)):
        rows = {k: [i for i in rest if i == k or filled[i, k]] for k in rest}
        width = {k: filled[np.ix_(rows[k], rest)].any(0).sum() for k in rest}
        best = min(rest, key=lambda k: (len(rows[k]) - 1) * width[k])
        filled[rows[best]] = filled[rows[best]].any(0)
        rest.remove(best)
        order.append(best)
    return order


def _exchange(graph: Graph, a: np.ndarray, k: int, i: int) -> Atom:
    """Exchange rows k and i if the entry below is larger, and say whether."""
    if is_zero(a[i, k]):
        return np.bool_(False)
    size = lambda x: graph.call("abs", x)  # noqa: E731
    larger = np.bool_(True) if is_zero(a[k, k]) else graph.call("gt", size(a[i, k]), size(a[k, k]))
    for j in range(k, len(a)):
        a[k, j], a[i, j] = swap(graph, larger, a[k, j], a[i, j])
    return larger


def _factor(graph: Graph, equation: Any, matrix: Value) -> list[Value] | None:
    if matrix.ndim != 2:
        return None
    n, dtype = len(matrix), equation.outvars[0].aval.dtype
    order = elimination_order(np.array([[not is_zero(x) for x in row] for row in atoms(matrix)]))
    a, inverses = atoms(matrix)[np.ix_(order, order)], []
    exchanged = np.full((n, n), np.bool_(False), object)
    for k in range(n):
        for i in range(k + 1, n):
            exchanged[k, i] = _exchange(graph, a, k, i)
        inverses.append(graph.call("div", dtype.type(1), a[k, k]))
        for i in range(k + 1, n):
            if not is_zero(a[i, k]):
                a[i, k] = graph.call("mul", a[i, k], inverses[k])
                for j in range(k + 1, n):
                    a[i, j] = minus_product(graph, a[i, j], a[i, k], a[k, j])
    outputs = [(a.reshape(-1), (n, n), dtype), (inverses, (n,), dtype)]
    swaps = pack(exchanged.reshape(-1).tolist(), (n, n), np.dtype(bool))
    orders = np.array([order, np.argsort(order)], np.int32)
    return [*(pack(list(x), shape, d) for x, shape, d in outputs), orders, swaps]


def _solve(graph: Graph, equation: Any, *values: Value) -> list[Value] | None:
    lu, inverses, orders, exchanged, b = values
    if b.ndim != 1:
        return None
    run = _transposed if equation.params["transposed"] else _forward
    x = run(graph, (atoms(lu), atoms(inverses), atoms(exchanged)), atoms(b)[orders[0]].tolist())
    return [pack([x[k] for k in orders[1]], b.shape, equation.outvars[0].aval.dtype)]


def _forward(graph: Graph, factors: Sequence[np.ndarray], x: list[Atom]) -> list[Atom]:
    lu, inverses, exchanged = factors
    n = len(x)
    for k in range(n):
        for i in range(k + 1, n):
            x[k], x[i] = swap(graph, exchanged[k, i], x[k], x[i])
        for i in range(k + 1, n):
            x[i] = minus_product(graph, x[i], lu[i, k], x[k])
    for k in reversed(range(n)):
        for j in range(k + 1, n):
            x[k] = minus_product(graph, x[k], lu[k, j], x[j])
        x[k] = graph.call("mul", x[k], inverses[k])
    return x


def _transposed(graph: Graph, factors: Sequence[np.ndarray], x: list[Atom]) -> list[Atom]:
    """The same with all steps transposed, in the opposite order."""
    lu, inverses, exchanged = factors
    n = len(x)
    for k in range(n):
        x[k] = graph.call("mul", x[k], inverses[k])
        for j in range(k + 1, n):
            x[j] = minus_product(graph, x[j], lu[k, j], x[k])
    for k in reversed(range(n)):
        for i in range(k + 1, n):
            x[k] = minus_product(graph, x[k], lu[i, k], x[i])
        for i in reversed(range(k + 1, n)):
            x[k], x[i] = swap(graph, exchanged[k, i], x[k], x[i])
    return x


def about(power: int, share: int) -> Callable[[Any], int]:
    """About how many scalar equations a system of dimension n gives, if one in `share` of its places is not zero."""

    def count(equation: Any) -> int:
        n = equation.invars[0].aval.shape[-1]
        if n > DIMENSION:
            raise NoScalarForm(f"a linear system of dimension {n} has no scalar form: at most {DIMENSION} are unrolled")
        return n**power // share

    return count


EQUATIONS: dict[str, Callable[[Any], int]] = {FACTOR: about(3, 8), SOLVE: about(2, 8)}
RULES: dict[str, Callable[..., list[Value] | None]] = {FACTOR: _factor, SOLVE: _solve}
