"""What a problem of the suite is: a differential equation with parameters, a span, tolerances and a known end.

Times are in the unit of the problem's own source; states and parameters are any PyTree of arrays.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import diffrax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

HULL = "Hull, Enright, Fellen, Sedgwick 1972, doi:10.1137/0709052; Enright, Pryce 1987, doi:10.1145/23002.27645"


def ode(field: Callable[..., Any]) -> Callable[["Problem", Any], Any]:
    """The usual builder of terms: one `ODETerm` around `field(t, y, args)`."""
    return lambda problem, dtype: diffrax.ODETerm(field)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One row of the problem axis.

    - `terms`: `(problem, dtype) -> terms` for `diffeqsolve`; nothing in them is differentiated.
    - `y0`, `args`: PyTrees of NumPy arrays, the differentiated inputs.
    - `kind`: which solvers fit: `ode`, `split` (explicit and implicit part), `hamiltonian` (two coupled parts), `sde`.
    - `rtol`, `atol`: tolerances of adaptive runs in float64.
    - `steps`: how many steps a run with a fixed mesh takes; enough for the solvers of low order to stay stable.
    - `stiff`: only implicit solvers with step size control make sense.
    - `mild`: rounding does not flip a step, so a separate adaptive run takes the same steps.
    - `heavy`: dear to compile; part of the long grid only.
    - `jumps`: times at which the vector field has a jump.
    - `end`: published state at `t1`, flattened; `end_rtol` is the accuracy to which it holds.
    """

    name: str
    terms: Callable[["Problem", Any], Any]
    y0: Any
    args: Any
    t1: float
    source: str
    t0: float = 0.0
    kind: str = "ode"
    rtol: float = 1e-6
    atol: float = 1e-6
    steps: int = 64
    stiff: bool = False
    mild: bool = False
    heavy: bool = False
    jumps: tuple[float, ...] = ()
    end: tuple[float, ...] = ()
    end_rtol: float = 1e-8

    def __post_init__(self) -> None:
        if self.kind not in ("ode", "split", "hamiltonian", "sde"):
            raise ValueError(f"{self.name}: kind {self.kind!r} is none of ode, split, hamiltonian, sde")
        if not self.t0 < self.t1:
            raise ValueError(f"{self.name}: t0 = {self.t0} is not before t1 = {self.t1}")
        if any(not self.t0 < t < self.t1 for t in self.jumps):
            raise ValueError(f"{self.name}: jumps {self.jumps} are not all inside ({self.t0}, {self.t1})")
        if self.end and len(self.end) != sum(np.size(x) for x in jtu.tree_leaves(self.y0)):
            raise ValueError(f"{self.name}: the published end has {len(self.end)} entries, unlike the state")

    def inputs(self, dtype: Any) -> tuple[Any, Any]:
        """`(y0, args)` as JAX arrays of `dtype`."""
        return jtu.tree_map(lambda x: jnp.asarray(x, dtype), (self.y0, self.args))


def by_name(*groups: tuple[Problem, ...]) -> Mapping[str, Problem]:
    """All problems under their names, in the order given.

    Raises ValueError where two have one name: case ids are built from it.
    """
    rows: dict[str, Problem] = {}
    for problem in (problem for group in groups for problem in group):
        if problem.name in rows:
            raise ValueError(f"two problems are named {problem.name!r}; rename one")
        rows[problem.name] = problem
    return rows
