"""The levels of `jax.vmap` of a linear map: those of its trajectories, and columns, of many tangents at once."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradsolve_backend.kernels.lanes import column, reorder, spread, total, widened
from gradsolve_backend.kernels.solve import Call


def primal_count(call: Call) -> int:
    """Number of primal inputs of the linear maps: loop variables, operands, record."""
    return call.solve.size + len(call.solve.operands) + len(call.recorded)


@dataclass(frozen=True)
class Layout:
    """How the levels of a call divide into those of its trajectories and columns, and what its inputs are."""

    call: Call
    primal: int  # number of primal inputs

    @functools.cached_property
    def own(self) -> tuple[int, ...]:
        """Levels at which some primal input has an axis."""
        return tuple(i for i, level in enumerate(self.call.axes) if any(level[: self.primal]))

    @functools.cached_property
    def columns(self) -> tuple[int, ...]:
        """The other levels."""
        return tuple(i for i in range(len(self.call.sizes)) if i not in self.own)

    @functools.cached_property
    def lane_sizes(self) -> tuple[int, ...]:
        """Sizes of the own levels, which are those of lanes."""
        return self.sizes(self.own)

    @functools.cached_property
    def column_sizes(self) -> tuple[int, ...]:
        """Sizes of the levels of columns."""
        return self.sizes(self.columns)

    @staticmethod
    def of(call: Call) -> "Layout":
        """The layout of a linear map."""
        return Layout(call, primal_count(call))

    def apart(self, position: int) -> bool:
        """Whether the output at a position of a cotangent, that of an operand, is wanted for some lanes apart."""
        call = self.call
        index = call.solve.size + call.operands[position - len(call.carry)]
        wanted, has = column(call.keep, position), column(call.axes, index)
        return any(wanted[i] or has[i] for i in self.own)

    def sizes(self, levels: Sequence[int]) -> tuple[int, ...]:
        """Sizes of some levels."""
        return tuple(self.call.sizes[i] for i in levels)

    def entered(self, x: Any, index: int) -> tuple[Any, list[bool], list[bool]]:
        """A linear input with its column axes in front; which column and own levels it has."""
        has = column(self.call.axes, index)
        present = [i for i, h in enumerate(has) if h]
        order = [present.index(i) for i in (*self.columns, *self.own) if has[i]]
        return reorder(x, order), [has[i] for i in self.columns], [has[i] for i in self.own]

    def full(self, x: Any, index: int) -> Any:
        """A linear input with every axis, columns in front."""
        x, columns, own = self.entered(x, index)
        return spread(x, [*columns, *own], self.sizes((*self.columns, *self.own)))

    def recorded(self, x: Any, index: int, offset: int = 0) -> Any:
        """An array of the record with the axes of all own levels, after `offset` others; none has those of columns."""
        return spread(x, [self.call.axes[i][index] for i in self.own], self.lane_sizes, offset)

    def left(self, x: Any, own: Sequence[bool], wanted: Sequence[bool]) -> Any:
        """An output that has all columns and these own levels, in the order of levels, summed to the wanted ones."""
        present = [*self.columns, *(i for i, h in zip(self.own, own, strict=True) if h)]
        x = reorder(x, sorted(range(len(present)), key=present.__getitem__))
        has = [i in present for i in range(len(wanted))]
        x = total(x, has, wanted)
        return widened(x, has, wanted, self.call.sizes)

    def result(self, x: Any, own: bool, position: int) -> Any:
        """The output at a position, which has all columns and all own levels or none of these, as it is wanted."""
        return self.left(x, [own] * len(self.own), column(self.call.keep, position))
