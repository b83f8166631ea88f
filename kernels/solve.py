"""The static description of one solve: its lane functions, its outputs, and one call of a primitive on it."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradsolve_backend.kernels.compat import Literal
from gradsolve_backend.kernels.perturb import reached_in_loop
from gradsolve_backend.kernels.trace import LaneFunction, inexact

ROWS = 128  # a solve of up to so many steps is differentiated without running any of it again


@dataclass(frozen=True, eq=False)
class Output:
    """One buffer of saved values: `slots` rows of `leaves`, written in order and each slot once.

    `due(k, *carry)` says whether the `k`-th requested time lies in the step from `carry`; `sample(k, *carry, *dense)`
    is the value there. `every = n > 0` saves the step's own value (`emit`: where it lies among the emitted values)
    after every n-th accepted step.
    """

    slots: int
    leaves: tuple[Any, ...]
    due: LaneFunction | None = None
    sample: LaneFunction | None = None
    every: int = 0
    emit: slice = dataclasses.field(default_factory=lambda: slice(0, 0))


@dataclass(frozen=True, eq=False)
class Solve:
    """One trajectory on arrays. `carry` are the loop variables; every function may read operands as well.

    - `live(*carry)`: whether a further step is wanted.
    - `advance(*carry) -> (*carry, kept, *dense, *emitted)`: one trial step.
    - `observed`: the same, reporting progress; called once per step of the first forward pass only.
    - `fixed(*carry, kept, t_after) -> (*carry, *dense, *emitted)`: the accepted step, differentiable with step times
      as constants; gives the derivative of the loop variables `covered`.
    - `moving`: the same with the controller's step times differentiated as well.
    - `implicit`: a step solves equations, and a linear solver in its derivative raises on values that are not finite.
    """

    live: LaneFunction
    advance: LaneFunction
    observed: LaneFunction
    fixed: LaneFunction
    moving: LaneFunction
    covered: frozenset[int]
    carry: tuple[Any, ...]
    time: int
    accepted: int
    dense: int
    outputs: tuple[Output, ...]
    operands: tuple[Any, ...]
    max_steps: int | None
    implicit: bool
    routines: dict[Any, Any] = dataclasses.field(
        default_factory=dict, init=False
    )  # see `gradsolve_backend.kernels.routines`

    @property
    def size(self) -> int:
        """Number of loop variables."""
        return len(self.carry)

    @functools.cached_property
    def differentiated(self) -> tuple[int, ...]:
        """Loop variables that a derivative with step times as constants may start from: those that a replay changes."""
        f = self.fixed
        given = {v: source for v, source in zip(f.invars, f.sources, strict=True)}
        moved = lambda i: isinstance(v := f.jaxpr.outvars[i], Literal) or given.get(v) != i  # noqa: E731
        return tuple(i for i in sorted(self.covered) if moved(i))

    @functools.cached_property
    def passive(self) -> frozenset[int]:
        """Covered loop variables that a replay leaves as they are: what they hold it computes again."""
        return self.covered - set(self.differentiated)

    @property
    def emitted(self) -> int:
        """Number of values that a step emits for its outputs."""
        return sum(o.emit.stop - o.emit.start for o in self.outputs)

    @property
    def segment(self) -> int:
        """Rows that a record holds, and steps between two checkpoints of a longer solve."""
        return ROWS if self.max_steps is None else max(1, min(self.max_steps, max(ROWS, math.isqrt(self.max_steps))))

    @property
    def checkpoints(self) -> int:
        """Checkpoints that a reverse sweep of the longest solve needs."""
        return 0 if self.max_steps is None else -(-self.max_steps // self.segment)


def reached_carry(solve: Solve, operands: Sequence[int], carry: Sequence[int] = ()) -> frozenset[int]:
    """The loop variables that a derivative with respect to these operands and loop variables reaches."""
    among = frozenset(i for i, a in enumerate(solve.carry) if inexact(a)) - solve.passive
    return reached_in_loop((solve.advance, solve.fixed), among, carry, operands)


@dataclass(frozen=True)
class At:
    """What a derivative is taken with respect to: positions of arguments and of operands."""

    arguments: tuple[int, ...]
    operands: tuple[int, ...]

    def inputs(self, function: LaneFunction) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Inputs of a lane function that are such, and which one each is, operands counted after arguments."""
        roots = [*self.arguments, *(~o for o in self.operands)]
        found = [(i, roots.index(s)) for i, s in enumerate(function.sources) if s in roots]
        return tuple(i for i, _ in found), tuple(r for _, r in found)


@dataclass(frozen=True)
class Call:
    """One application of a primitive: the solve, the vmapped axes, what is differentiated.

    `axes[level][input]` says whether an input has the axis of a level (outermost first). `carry` and `operands` are
    the loop variables and operands that are perturbed. `keep[level][output]` of a linear map says whether the output
    has the level's axis or is the sum over it. `record` asks a forward pass for the rows that a reverse sweep needs.
    `scalar`: the lanes of the forward pass and of its record are scalar programs. `memory`: bytes that the record of
    one lane may have, for a backend that can choose.
    """

    solve: Solve
    kernels: Any
    route: Any
    sizes: tuple[int, ...] = ()
    axes: tuple[tuple[bool, ...], ...] = ()
    record: bool = False
    scalar: bool = False
    memory: int | None = None
    carry: tuple[int, ...] = ()
    operands: tuple[int, ...] = ()
    keep: tuple[tuple[bool, ...], ...] = ()

    def replace(self, **changes: Any) -> "Call":
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @functools.cached_property
    def recorded(self) -> list[tuple[Any, int | None]]:
        """The arrays of the record of this call: each as an abstract value, and how many axes precede its levels."""
        return self.kernels.record(self) if self.record else []

    @functools.cached_property
    def reached(self) -> tuple[int, ...]:
        """Loop variables that the derivative reaches, in order."""
        return tuple(sorted(reached_carry(self.solve, self.operands, self.carry)))

    @property
    def moving(self) -> bool:
        """Whether the derivative reaches step times or controller state."""
        return not set(self.reached) <= self.solve.covered

    @functools.cached_property
    def dense(self) -> tuple[int, ...]:
        """Dense values that can carry a derivative; none are needed where no output samples a step."""
        if all(o.sample is None for o in self.solve.outputs):
            return ()
        first = self.solve.size
        return tuple(j for j in range(self.solve.dense) if inexact(self.solve.fixed.outputs[first + j]))

    @functools.cached_property
    def replay(self) -> LaneFunction:
        """The differentiable accepted step for this call: reached loop variables, `dense`, inexact emitted values."""
        s = self.solve
        first = s.size + s.dense
        emitted = [first + j for j in range(s.emitted) if inexact(s.fixed.outputs[first + j])]
        outputs = [*self.reached, *(s.size + j for j in self.dense), *emitted]
        return (s.moving if self.moving else s.fixed).keep(outputs)

    @functools.cached_property
    def samples(self) -> tuple[LaneFunction | None, ...]:
        """For each output, the part of its sample that can carry a derivative."""
        keep = lambda o: [j for j, a in enumerate(o.leaves) if inexact(a)]  # noqa: E731
        return tuple(None if o.sample is None else o.sample.keep(keep(o)) for o in self.solve.outputs)

    @functools.cached_property
    def emits(self) -> tuple[slice, ...]:
        """For each output, where its emitted values lie among the outputs of `replay`."""
        out, position = [], len(self.reached) + len(self.dense)
        for o in self.solve.outputs:
            count = len(self.saved(o)) if o.every else 0
            out.append(slice(position, position + count))
            position += count
        return tuple(out)

    def saved(self, output: Output) -> tuple[Any, ...]:
        """The leaves of an output that can carry a derivative."""
        return tuple(a for a in output.leaves if inexact(a))

    @functools.cached_property
    def at(self) -> At:
        """What the derivative of `replay` is taken with respect to."""
        return At(self.reached, self.operands)

    @functools.cached_property
    def sample_at(self) -> At:
        """What the derivative of a sample is taken with respect to: loop variables, dense values, operands."""
        size = self.solve.size
        return At((*(1 + i for i in self.reached), *(1 + size + j for j in self.dense)), self.operands)

    @functools.cached_property
    def row(self) -> tuple[int, ...]:
        """Loop variables that a row holds: those that a replay of the step reads."""
        size = self.solve.size
        used = {a for a in self.replay.arguments if a < size}
        for o, sample in zip(self.solve.outputs, self.samples, strict=True):
            if sample is not None and o.due is not None:
                used |= {a - 1 for f in (sample, o.due) for a in f.arguments if 0 < a <= size}
        return tuple(sorted(used))
