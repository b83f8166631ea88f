"""Order conditions of one-step methods: one equation for each rooted tree, for Runge-Kutta and Rosenbrock methods.

The theory is that of Butcher, in the form of Hairer, Norsett and Wanner, Solving Ordinary Differential Equations I,
section II.2 (https://doi.org/10.1007/978-3-540-78862-1), and for Rosenbrock methods of Hairer and Wanner, volume II,
section IV.7 (https://doi.org/10.1007/978-3-642-05221-7).
"""

import functools
import itertools
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

Tree: TypeAlias = tuple["Tree", ...]  # a vertex, as the trees that grow from it


def _partitions(total: int, largest: int) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
    for first in range(min(total, largest), 0, -1):
        for rest in _partitions(total - first, first):
            yield (first, *rest)


@functools.cache
def trees(order: int) -> tuple[Tree, ...]:
    """All rooted trees with `order` vertices."""
    found: dict[Tree, None] = {}
    for sizes in _partitions(order - 1, order - 1):
        for branches in itertools.product(*(trees(size) for size in sizes)):
            found[tuple(sorted(branches, key=repr))] = None
    return tuple(found)


def _vertices(tree: Tree) -> int:
    return 1 + sum(map(_vertices, tree))


def _density(tree: Tree) -> int:
    return _vertices(tree) * int(np.prod([_density(branch) for branch in tree], dtype=int))


def _weight(tree: Tree, a: np.ndarray, single: np.ndarray) -> np.ndarray:
    """What a tree gives in each stage; `single` stands in for `a` at a vertex with one branch."""
    if len(tree) == 1:
        return single @ _weight(tree[0], a, single)
    out = np.ones(len(a))
    for branch in tree:
        out = out * (a @ _weight(branch, a, single))
    return out


def residual(
    a: np.ndarray, b: np.ndarray, order: int, *, single: np.ndarray | None = None, theta: float = 1.0
) -> float:
    """By how much the conditions up to an order are missed, at most.

    Arguments:
        a: weights of the stages, shape (stages, stages).
        b: weights of the solution, or of the dense output at the share `theta` of the step; shape (stages,).
        single: for a Rosenbrock method, the sum of `a` and of the weights of the Jacobian's products.
    """
    single = a if single is None else single
    every = [tree for n in range(1, order + 1) for tree in trees(n)]
    return max(float(abs(b @ _weight(t, a, single) - theta ** _vertices(t) / _density(t))) for t in every)
