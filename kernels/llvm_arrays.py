"""What a kernel of the `llvm` backend is told of the arrays of its call."""

from dataclasses import dataclass

import numpy as np

__all__ = ["Array", "Arrays"]


@dataclass(frozen=True)
class Array:
    """An array of a call, as rows of elements: its buffer, and which row belongs to a lane.

    Rows are counted by lane, by column, or by column and lane, or the buffer `index` holds the row of each.
    """

    buffer: int
    elements: int
    dtype: np.dtype
    lanes: bool = False
    columns: bool = False
    index: int | None = None

    @property
    def shared(self) -> bool:
        """Whether all lanes have the same row."""
        return not self.lanes and not self.columns and self.index is None


@dataclass(frozen=True)
class Arrays:
    """The arrays of one kernel. `carry` and `operands` are those of the solve, in order."""

    carry: tuple[Array, ...]
    operands: tuple[Array, ...]
    linear: tuple[Array, ...] = ()  # tangents or cotangents
    saved: tuple[tuple[Array, ...], ...] = ()  # cotangents of the outputs' values
    results: tuple[Array, ...] = ()
    record: tuple[int, ...] | None = None  # buffers of marks, rows and checkpoints
    frames: int = 0
    columns: int = 1  # of tangents or cotangents
    replicated: bool = False  # lanes are columns of a single trajectory, whose record this is
    lanes: int = 1
