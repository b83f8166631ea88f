"""Where the places of a call lie in memory: in the frame of the worker that runs a block of lanes, or in a row.

A slot holds the elements of a value one after the other, each as one vector over lanes. The frame begins with the state
of the loop over steps, so that a checkpoint is a copy of its first bytes. What each column of tangents or cotangents
has for itself is in an area of its own, behind the frame.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from gradsolve_backend.kernels.routines import Pieces, Place

WORD, LINE = 8, 64
OF_COLUMNS = frozenset({"d", "ct", "sum", "before"})  # first words of the kinds of places that each column has


@dataclass(frozen=True, slots=True)
class Slot:
    """Byte offset of a value, dtype and number of its elements."""

    offset: int
    dtype: np.dtype
    elements: int


def rounded(size: int, unit: int = WORD) -> int:
    """The next multiple of `unit`."""
    return -(-size // unit) * unit


def _sizes(pieces: Pieces, places: Iterable[Place]) -> list[tuple[Place, np.dtype, int]]:
    """Places with dtype and number of elements; wide elements first, so that each is aligned."""
    found = [(p, np.dtype(pieces.aval(p).dtype), int(np.prod(pieces.aval(p).shape, dtype=int))) for p in places]
    return sorted(found, key=lambda item: -item[1].itemsize)


def lane_bytes(pieces: Pieces, places: Iterable[Place]) -> int:
    """Bytes that these places take per lane of a block of one lane; a larger block may need less."""
    return rounded(_bytes(pieces, places))


def _bytes(pieces: Pieces, places: Iterable[Place]) -> int:
    return sum(dtype.itemsize * count for _, dtype, count in _sizes(pieces, places))


@dataclass(eq=False)
class Layout:
    """Slots of one kernel; the frame grows as places are asked for.

    `replicated`: all lanes run the same trajectory, of which rows and checkpoints hold one.
    """

    pieces: Pieces
    width: int
    replicated: bool = False
    slots: dict[Place, Slot] = field(default_factory=dict)
    frame_bytes: int = 0
    column_bytes: int = 0

    def __post_init__(self) -> None:
        self.frame_bytes = self._place(self.pieces.state, self.width)
        self.state_bytes = lane_bytes(self.pieces, self.pieces.state) * self.row_width
        self.frame_bytes = max(self.frame_bytes, self.state_bytes)
        self._place(self.pieces.row, self.row_width)
        # Vectors of all rows are aligned as those of the first.
        lanes = self.row_width
        self.row_bytes = rounded(_bytes(self.pieces, self.pieces.row) * lanes, min(LINE, WORD * lanes))

    def kept_state(self) -> Iterator[tuple[Slot, int]]:
        """The slots of the state, and where each is in a checkpoint."""
        offset = 0
        for place, dtype, count in _sizes(self.pieces, self.pieces.state):
            yield self.slots[place], offset
            offset += dtype.itemsize * count * self.row_width

    @property
    def row_width(self) -> int:
        """Lanes of a row and of a checkpoint."""
        return 1 if self.replicated else self.width

    def _place(self, places: Iterable[Place], width: int) -> int:
        offset = 0
        for place, dtype, count in _sizes(self.pieces, places):
            self.slots[place] = Slot(offset, dtype, count)
            offset += dtype.itemsize * count * width
        return offset

    def base(self, place: Place) -> str:
        """The pointer behind which a place lies."""
        kind = place[0].split()[0]
        return "%row" if kind == "row" else "%column" if kind in OF_COLUMNS else "%frame"

    def reserve(self, size: int) -> int:
        """The offset of that many further bytes of the frame."""
        offset = rounded(self.frame_bytes, LINE)
        self.frame_bytes = offset + size
        return offset

    def vectors(self, dtype: np.dtype, count: int, column: bool = False) -> Slot:
        """A slot that is no place, of the frame or of each column: room for `count` vectors."""
        size = count * self.width * dtype.itemsize
        if not column:
            return Slot(self.reserve(size), dtype, count)
        offset = self.column_bytes
        self.column_bytes = rounded(offset + size, LINE)
        return Slot(offset, dtype, count)

    def strip(self, count: int) -> list[int]:
        """Offsets of that many further vectors, of any dtype, side by side."""
        start, size = self.reserve(count * self.width * WORD), self.width * WORD
        return [start + i * size for i in range(count)]

    def slot(self, place: Place) -> Slot:
        """The slot of a place; one that is not in the row is made when it is first asked for."""
        found = self.slots.get(place)
        if found is None:
            assert place[0] != "row", f"{place} is not part of the row"
            [(_, dtype, count)] = _sizes(self.pieces, [place])
            found = self.slots[place] = self.vectors(dtype, count, self.base(place) == "%column")
        return found
