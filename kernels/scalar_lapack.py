"""Rules of the scalariser for what Lineax makes of small dense systems: LAPACK's decomposition and its solution.

They keep LAPACK's meaning, pivots and row order included, since the steps between them are the user's or a library's;
but for pivots below the normal numbers. The rows below are candidates for a pivot one after the other, at run time, and
two rows are exchanged by choices.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradsolve_backend.kernels.scalar_dense import DIMENSION, about, is_zero, minus_product, swap
from gradsolve_backend.kernels.scalar_graph import Atom, Graph, NoScalarForm, Value, atoms, pack

__all__ = ["EQUATIONS", "RULES"]


def _exchange(graph: Graph, which: Atom, first: np.ndarray, second: np.ndarray) -> None:
    """Exchange two rows where `which` holds."""
    for j, (x, y) in enumerate(zip(first.tolist(), second.tolist(), strict=True)):
        first[j], second[j] = swap(graph, which, x, y)


def _put_first(graph: Graph, row: Atom, k: int, *arrays: np.ndarray) -> None:
    """Exchange row k of some arrays with another one below it, or itself, whose number is known at run time."""
    for i in range(k + 1, len(arrays[0])):
        which = graph.call("eq", row, np.int32(i))
        for array in arrays:
            _exchange(graph, which, array[k], array[i])


def _rows(count: int) -> np.ndarray:
    """The numbers of rows, one in each row."""
    return atoms(np.arange(count, dtype=np.int32)[:, None]).copy()


def _pivot(graph: Graph, column: Sequence[Atom], k: int) -> Atom:
    """The row of the largest entry from row k on, the first of several."""
    best, row = graph.call("abs", column[k]), np.int32(k)
    for i in range(k + 1, len(column)):
        if not is_zero(column[i]):
            size = graph.call("abs", column[i])
            larger = graph.call("gt", size, best)
            best, row = graph.call("select_n", larger, best, size), graph.call("select_n", larger, row, np.int32(i))
    return row


def _lu(graph: Graph, equation: Any, matrix: Value) -> list[Value] | None:
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        return None
    n, dtype = len(matrix), equation.outvars[0].aval.dtype
    a, order = atoms(matrix).copy(), _rows(n)
    pivots = []
    for k in range(n):
        pivots.append(_pivot(graph, a[:, k].tolist(), k))
        _put_first(graph, pivots[k], k, a, order)
        # As in LAPACK, a column of zeros is left as it is.
        pivot = graph.call("select_n", graph.call("eq", a[k, k], dtype.type(0)), a[k, k], dtype.type(1))
        inverse = graph.call("div", dtype.type(1), pivot)
        for i in range(k + 1, n):
            if not is_zero(a[i, k]):
                a[i, k] = graph.call("mul", a[i, k], inverse)
                a[i, k + 1 :] = [
                    minus_product(graph, x, a[i, k], y) for x, y in zip(a[i, k + 1 :], a[k, k + 1 :], strict=True)
                ]
    results = [
        (a.reshape(-1).tolist(), (n, n), dtype),
        (pivots, (n,), np.int32),
        (order.reshape(-1).tolist(), (n,), np.int32),
    ]
    return [pack(x, shape, np.dtype(kind)) for x, shape, kind in results]


def _permutation(graph: Graph, equation: Any, pivots: Value) -> list[Value] | None:
    """The order of rows after exchanging each row with its pivot's."""
    count = equation.params["permutation_size"]
    if pivots.ndim != 1:
        return None
    order = _rows(count)
    for k, pivot in enumerate(atoms(pivots).tolist()):
        _put_first(graph, pivot, k, order)
    return [pack(order.reshape(-1).tolist(), (count,), np.dtype(np.int32))]


def _triangular_solve(graph: Graph, equation: Any, a: Value, b: Value) -> list[Value] | None:
    params = equation.params
    if a.ndim != 2 or b.ndim != 2 or not params["left_side"]:
        return None
    matrix, x = atoms(a).T if params["transpose_a"] else atoms(a), atoms(b).copy()
    n, forwards = len(matrix), params["lower"] != params["transpose_a"]
    for k in range(n) if forwards else reversed(range(n)):
        known = range(k) if forwards else range(k + 1, n)
        for column in range(x.shape[1]):
            less = lambda r, j, k=k, c=column: minus_product(graph, r, matrix[k, j], x[j, c])  # noqa: E731
            rest = functools.reduce(less, known, x[k, column])
            x[k, column] = rest if params["unit_diagonal"] else graph.call("div", rest, matrix[k, k])
    return [pack(x.reshape(-1).tolist(), b.shape, equation.outvars[0].aval.dtype)]


def _sort(graph: Graph, equation: Any, *values: Value) -> list[Value] | None:
    """Columns in the order of the first, which holds integers, as the order of rows does."""
    keys = values[0]
    if keys.ndim != 1 or keys.dtype.kind == "f" or _float(keys) or equation.params["num_keys"] != 1:
        return None
    if keys.size > DIMENSION:
        raise NoScalarForm(f"a sort of {keys.size} integers has no scalar form: at most {DIMENSION} are sorted")
    columns = np.array([atoms(value) for value in values])
    for end in reversed(range(1, keys.size)):
        for i in range(end):
            which = graph.call("gt", columns[0, i], columns[0, i + 1])
            _exchange(graph, which, columns[:, i], columns[:, i + 1])
    return [pack(c.tolist(), keys.shape, v.aval.dtype) for c, v in zip(columns, equation.outvars, strict=True)]


def _float(value: Value) -> bool:
    return any(np.dtype(x.dtype).kind not in "iub" for x in atoms(value).tolist())


EQUATIONS: dict[str, Callable[[Any], int]] = {"lu": about(3, 1), "triangular_solve": about(2, 1)}
RULES: dict[str, Callable[..., list[Value] | None]] = {
    "lu": _lu,
    "lu_pivots_to_permutation": _permutation,
    "triangular_solve": _triangular_solve,
    "sort": _sort,
}
