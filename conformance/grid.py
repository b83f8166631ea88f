"""Which cases there are: the rules that say what makes sense together, and a design that meets every pair."""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gradsolve_backend.conformance.axes import (
    ADAPTIVE,
    CONTROLLERS,
    DTYPES,
    FIXED,
    INTERPOLATED,
    OF_DIFFRAX,
    SAVINGS,
    SOLVERS,
    jumps,
)
from gradsolve_backend.conformance.problems import PROBLEMS
from gradsolve_backend.conformance.transforms import TRANSFORMS

AXES: Mapping[str, tuple[str, ...]] = {
    "solver": tuple(SOLVERS),
    "problem": tuple(PROBLEMS),
    "controller": CONTROLLERS,
    "saving": SAVINGS,
    "transform": TRANSFORMS,
    "dtype": tuple(DTYPES),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One point of the grid. Its text is its id: stable, and what an xfail file names."""

    problem: str
    solver: str
    controller: str
    saving: str
    transform: str
    dtype: str

    def __str__(self) -> str:
        return "-".join(dataclasses.astuple(self))

    @property
    def jax_dtype(self) -> Any:
        return DTYPES[self.dtype]

    @property
    def exact_steps(self) -> bool:
        """Whether a separate run takes the same steps, so that the counts must be equal."""
        mild = PROBLEMS[self.problem].mild and not SOLVERS[self.solver].noisy
        return self.dtype == "f64" and (self.controller in FIXED or mild)

    @property
    def noisy(self) -> bool:
        """Whether rounding may change stock's own values and slopes by more than the tolerance.

        In float32 it may where a solution is sensitive. In float64 it may for the slope of a step time: it carries the
        factors of all steps before, and these the rounding of error estimates, differences of nearly equal numbers.
        """
        return self.dtype == "f32" or (self.transform == "gradtime" and self.controller in ADAPTIVE)

    @property
    def oracle(self) -> str:
        """`plain`: stock with the same controller. `mesh`: stock on the steps that the tested solve recorded.

        A mesh knows no derivative of its times, no state of a controller and no jump, so these are compared plainly.
        """
        jumping = self.controller == "clip" and bool(jumps(PROBLEMS[self.problem]))
        needs_plain = self.transform == "gradtime" or self.saving == "state" or jumping
        return "plain" if self.exact_steps or needs_plain else "mesh"


#: Axes a rule looks at, and what it demands of them.
Rule = tuple[tuple[str, ...], Callable[..., bool]]
RULES: tuple[Rule, ...] = (
    (("solver", "problem"), lambda s, p: SOLVERS[s].kind == PROBLEMS[p].kind),
    (("solver", "problem"), lambda s, p: SOLVERS[s].implicit or not PROBLEMS[p].stiff),
    # Where their error estimates pass through zero on this problem, rounding decides the next step.
    (("solver", "problem"), lambda s, p: p != "a3" or SOLVERS[s].family != "rosenbrock"),
    (("solver", "controller"), lambda s, c: SOLVERS[s].error or c in FIXED),
    (("problem", "controller"), lambda p, c: c in ADAPTIVE or not PROBLEMS[p].stiff),
    # This method is unstable where the solution decays: a controller would shrink the steps without end.
    (("solver", "problem", "controller"), lambda s, p, c: s != "reversible" or c in FIXED or PROBLEMS[p].mild),
    # There it grows without bound, and rounding with it.
    (("solver", "problem", "dtype"), lambda s, p, d: s != "reversible" or d == "f64" or PROBLEMS[p].mild),
    # A jump that no controller knows of is found by rejected steps, and rounding decides how many.
    (("problem", "controller"), lambda p, c: c in ("clip", "const") or not PROBLEMS[p].jumps),
    (("problem", "dtype"), lambda p, d: d == "f64" or not PROBLEMS[p].stiff),
    # Stock interpolates this method with coefficients in float64.
    (("solver", "dtype", "saving"), lambda s, d, saving: (s, d) != ("kencarp3", "f32") or saving not in INTERPOLATED),
    # A Brownian path has no derivative in time.
    (("problem", "transform"), lambda p, t: t != "gradtime" or PROBLEMS[p].kind != "sde"),
    # Given times of the whole span do not fit its halves.
    (("controller", "saving"), lambda c, s: c != "stepto" or s != "state"),
    # Where only a separate run can be the reference, that run must take the same steps.
    (("controller", "dtype", "transform"), lambda c, d, t: t != "gradtime" or c in FIXED or d == "f64"),
    (("controller", "dtype", "saving"), lambda c, d, s: s != "state" or c in FIXED or d == "f64"),
    (("controller", "problem", "transform"), lambda c, p, t: t != "gradtime" or c in FIXED or PROBLEMS[p].mild),
    (("controller", "problem", "saving"), lambda c, p, s: s != "state" or c in FIXED or PROBLEMS[p].mild),
    (("solver", "controller", "transform"), lambda s, c, t: t != "gradtime" or c in FIXED or not SOLVERS[s].noisy),
    (("solver", "controller", "saving"), lambda s, c, saving: saving != "state" or c in FIXED or not SOLVERS[s].noisy),
    (
        ("solver", "controller", "problem"),
        lambda s, c, p: c != "clip" or not SOLVERS[s].noisy or not jumps(PROBLEMS[p]),
    ),
    (("controller", "dtype", "problem"), lambda c, d, p: c != "clip" or d == "f64" or not jumps(PROBLEMS[p])),
)


def makes_sense(point: Mapping[str, str]) -> bool:
    """Whether some values, of all axes or of a few, can stand together in one case."""
    return all(demand(*(point[a] for a in axes)) for axes, demand in RULES if all(a in point for a in axes))


Pair = tuple[tuple[str, str], tuple[str, str]]


def _views(point: Mapping[str, str]) -> dict[str, str]:
    """The values that pairs are made of: the axes, and the family of the solver."""
    views = dict(point)
    if "solver" in point:
        views["family"] = SOLVERS[point["solver"]].family
    return views


_SHORT_PAIRS = (
    *itertools.combinations(("transform", "saving", "family", "controller", "dtype"), 2),
    ("problem", "problem"),
    ("solver", "dtype"),
    ("solver", "controller"),
)
_LONG_PAIRS = (
    *_SHORT_PAIRS,
    *(("solver", other) for other in ("saving", "transform")),
    *(("problem", other) for other in ("family", "controller", "saving", "transform", "dtype")),
)


def pairs(point: Mapping[str, str], kinds: Sequence[tuple[str, str]]) -> set[Pair]:
    """The pairs of values that a case, whole or in part, meets. A value with itself stands for that value alone."""
    views = _views(point)
    return {((a, views[a]), (b, views[b])) for a, b in kinds if a in views and b in views}


def wanted_pairs(grid: str) -> tuple[tuple[str, str], ...]:
    """The kinds of pairs each of which the grid, `short` or `long`, meets at least once where it makes sense."""
    return _SHORT_PAIRS if grid == "short" else _LONG_PAIRS


@functools.cache
def cases(grid: str) -> tuple[Case, ...]:
    """All cases of the grid `short` or `long`; the long one starts with the short one.

    Raises:
        ValueError: if there is no such grid.
    """
    if grid not in ("short", "long"):
        raise ValueError(f"there is no grid {grid!r}; there are short and long")
    chosen = tuple(_cover(grid, (), OF_DIFFRAX)) if grid == "short" else cases("short")
    return (*chosen, *_cover(grid, chosen, tuple(SOLVERS)))


def _cover(grid: str, chosen: Sequence[Case], solvers: tuple[str, ...]) -> Iterator[Case]:
    """Add cases until each wanted pair is met; the same cases in the same order on every machine."""
    kinds = wanted_pairs(grid)
    problems = tuple(name for name in PROBLEMS if grid == "long" or not PROBLEMS[name].heavy)
    values = dict(AXES) | {"problem": problems, "solver": solvers}
    met: set[Pair] = set()
    usage: Counter[tuple[str, str]] = Counter()
    for case in chosen:
        met |= pairs(dataclasses.asdict(case), kinds)
        usage.update(dataclasses.asdict(case).items())
    for seed in _seeds(values, kinds):
        if seed in met:
            continue
        start = {axis: value for axis, value in seed if axis in AXES}
        point = next(_complete(_Search(values, kinds, met, usage, seed), start), None)
        if point is None:
            continue  # the pair makes no sense
        met |= pairs(point, kinds)
        usage.update(point.items())
        yield Case(**point)


def _seeds(values: Mapping[str, Sequence[str]], kinds: Sequence[tuple[str, str]]) -> Iterator[Pair]:
    families = tuple(dict.fromkeys(row.family for row in SOLVERS.values()))
    choices = {**values, "family": families}
    for a, b in kinds:
        for x, y in itertools.product(choices[a], choices[b]):
            if a != b or x == y:
                yield (a, x), (b, y)


@dataclasses.dataclass(frozen=True)
class _Search:
    values: Mapping[str, Sequence[str]]
    kinds: Sequence[tuple[str, str]]
    met: set[Pair]
    usage: Counter[tuple[str, str]]
    seed: Pair

    def fits(self, point: Mapping[str, str]) -> bool:
        views = _views(point)
        return makes_sense(point) and all(views.get(axis, value) == value for axis, value in self.seed)

    def rank(self, point: Mapping[str, str], axis: str) -> tuple[int, int]:
        """First what meets most new pairs, then what is used least."""
        return -len(pairs(point, self.kinds) - self.met), self.usage[axis, point[axis]]


def _complete(search: _Search, point: dict[str, str]) -> Iterator[dict[str, str]]:
    axis = next((axis for axis in AXES if axis not in point), None)
    if axis is None:
        yield from filter(search.fits, [point])
        return
    options = [point | {axis: value} for value in search.values[axis]]
    options = sorted(filter(search.fits, options), key=lambda option: search.rank(option, axis))
    for option in options:
        yield from _complete(search, option)
