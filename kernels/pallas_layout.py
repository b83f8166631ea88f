"""What a kernel of the backend `pallas` holds in memory: rows, checkpoints, arrays whose last axis is that of lanes.

Elements of one dtype are one array, in which neighbouring lanes are neighbours. Marks are the bits of an integer. All
that belongs to a lane lies in its own column, so that a record whose lanes were reordered is still one.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradsolve_backend.kernels.routines import Pieces, Place
from gradsolve_backend.kernels.solve import Call
from gradsolve_backend.kernels.trace import inexact

ROWS = 128  # of a record, where no memory was asked for
FEWEST = 8
CHECKPOINTS = 32  # of a record, at most
AGAIN = 64  # rows for steps that are run again
WAITING = 2  # places for what a reverse sweep has so far
WORD = 31  # marks of one integer

Frame: TypeAlias = dict[Place, list[Any]]  # the elements of each place, on all lanes of a block
INT, BOOL = np.dtype(np.int32), np.dtype(bool)


def elements(aval: Any) -> int:
    """Number of elements of an array."""
    return int(np.prod(aval.shape, dtype=int))


def stored_dtype(dtype: Any) -> np.dtype:
    """As what values of a dtype are held in memory."""
    return INT if np.dtype(dtype) == BOOL else np.dtype(dtype)


def loaded(x: Any, dtype: Any) -> Any:
    """A value from memory."""
    return lax.ne(x, lax.full_like(x, 0)) if np.dtype(dtype) == BOOL else x


@dataclass(frozen=True, eq=False)
class Packing:
    """How the elements of some places lie in memory: in one array per dtype, or `apart`, each in one of its own.

    A thread that writes arrays apart needs one offset for all of them, and not one in registers for each.
    """

    pieces: Pieces
    places: tuple[Place, ...]
    apart: bool = False

    @functools.cached_property
    def listed(self) -> dict[np.dtype, list[tuple[Place, int]]]:
        """Place and number of the elements of each dtype, in the order in which they lie."""
        found: dict[np.dtype, list[tuple[Place, int]]] = {}
        for place in self.places:
            aval = self.pieces.aval(place)
            found.setdefault(np.dtype(aval.dtype), []).extend((place, k) for k in range(elements(aval)))
        return found

    @functools.cached_property
    def sizes(self) -> dict[np.dtype, int]:
        """Elements of each array."""
        words = -(-len(self.listed.get(BOOL, [])) // WORD)
        sizes = {dtype: len(listed) for dtype, listed in self.listed.items() if dtype != BOOL and listed}
        if words:
            sizes[INT] = sizes.get(INT, 0) + words
        return dict(sorted(sizes.items(), key=lambda item: (-item[0].itemsize, str(item[0]))))

    @property
    def arrays(self) -> dict[Any, tuple[np.dtype, tuple[int, ...]]]:
        """Key, dtype and own shape of each array."""
        if self.apart:
            return {(dtype, k): (dtype, ()) for dtype, size in self.sizes.items() for k in range(size)}
        return {dtype: (dtype, (size,)) for dtype, size in self.sizes.items()}

    def at(self, refs: Mapping[Any, Any], dtype: np.dtype, k: int, index: Any, lanes: Any) -> Any:
        """The reference to an element at an index: of each lane, or if `lanes` is a slice of all."""
        if self.apart:
            return refs[dtype, k].at[index, lanes]
        return refs[dtype].at[index, k if isinstance(lanes, slice) else lax.full_like(index, k), lanes]

    @property
    def bytes(self) -> int:
        """Bytes of one lane."""
        return sum(dtype.itemsize * count for dtype, count in self.sizes.items())

    def packed(self, frame: Mapping[Place, Sequence[Any]]) -> dict[np.dtype, list[Any]]:
        """The elements of each array."""
        found = {d: [frame[p][k] for p, k in listed] for d, listed in self.listed.items() if d != BOOL and listed}
        marks = [frame[p][k] for p, k in self.listed.get(BOOL, [])]
        for start in range(0, len(marks), WORD):
            bits = [m.astype(INT) * jnp.int32(1 << i) for i, m in enumerate(marks[start : start + WORD])]
            found.setdefault(INT, []).append(functools.reduce(lax.bitwise_or, bits))
        return found

    def unpacked(self, read: Callable[[np.dtype, int], Any]) -> Frame:
        """The places, from the elements of the arrays."""
        frame: Frame = {place: [] for place in self.places}
        for dtype, listed in self.listed.items():
            first = self.sizes[INT] - -(-len(listed) // WORD) if dtype == BOOL else 0
            words: dict[int, Any] = {}
            for i, (place, _) in enumerate(listed):
                if dtype != BOOL:
                    frame[place].append(read(dtype, i))
                    continue
                word = first + i // WORD
                words[word] = words[word] if word in words else read(INT, word)
                bit = lax.bitwise_and(words[word], lax.full_like(words[word], 1 << i % WORD))
                frame[place].append(loaded(bit, BOOL))
        return frame


@dataclass(frozen=True, eq=False)
class Memory:
    """The record of a call, and what a reverse sweep needs besides it."""

    pieces: Pieces

    @functools.cached_property
    def row(self) -> Packing:
        """One step."""
        return Packing(self.pieces, self.pieces.row, apart=True)

    @functools.cached_property
    def state(self) -> Packing:
        """One checkpoint."""
        return Packing(self.pieces, self.pieces.state)

    @functools.cached_property
    def waiting(self) -> Packing:
        """What a reverse sweep has so far, cotangents and sums."""
        call = self.pieces.call
        return Packing(self.pieces, (*(("ct", i) for i in call.reached), *(("sum", i) for i in call.operands)))

    @property
    def waiting_bytes(self) -> int:
        """Bytes of a lane for what waits, the same for all derivatives of a solve."""
        solve = self.pieces.call.solve
        return WAITING * sum(elements(a) * a.dtype.itemsize for a in (*solve.carry, *solve.operands) if inexact(a))

    @property
    def max_steps(self) -> int:
        """Bound on the number of steps; there is no record without one."""
        assert self.pieces.call.solve.max_steps is not None
        return self.pieces.call.solve.max_steps

    @functools.cached_property
    def _rows(self) -> tuple[int, int]:
        """Rows of the record, and those for steps that are run again."""
        memory, most = self.pieces.call.memory, max(1, self.max_steps)
        if memory is None:
            return min(ROWS, most), AGAIN if most > ROWS else 0
        if memory >= INT.itemsize + most * self.row.bytes:
            return most, 0
        fixed = INT.itemsize + CHECKPOINTS * self.state.bytes + self.waiting_bytes
        count = (memory - fixed) // self.row.bytes
        if count < FEWEST:
            raise ValueError(
                f"A record of {memory} bytes per lane was asked for, by `GradSolveAdjoint(memory=)` or "
                f"GRADSOLVE_MEMORY. This solve needs at least {fixed + FEWEST * self.row.bytes}, and {self.row.bytes} "
                "for each further step that is not run again."
            )
        again = min(AGAIN, count // 2)
        return count - again, again

    @property
    def rows(self) -> int:
        """Rows of a record: those of the memory that was asked for, beside what steps beyond them need.

        Raises:
            ValueError: if it has not room for a few.
        """
        return self._rows[0]

    @property
    def again(self) -> int:
        """Rows for steps that are run again; none where no solve has more steps than there are rows."""
        return self._rows[1]

    @functools.cached_property
    def distance(self) -> int:
        """Steps from one checkpoint to the next."""
        left = max(1, self.max_steps - self.rows)
        return max(-(-left // CHECKPOINTS), 2 * self.again, 1)

    @property
    def parts(self) -> int:
        """Times that steps are run again between two checkpoints."""
        return -(-self.distance // self.again)

    @property
    def checkpoints(self) -> int:
        """Checkpoints of the longest solve."""
        return -(-(self.max_steps - self.rows) // self.distance) if self.again else 0

    @property
    def bytes(self) -> int:
        """Bytes per lane of the record, and of what its reverse sweep holds beside it."""
        rows = (self.rows + self.again) * self.row.bytes
        waiting = self.waiting_bytes if self.again else 0
        return INT.itemsize + rows + self.checkpoints * self.state.bytes + waiting


def record_avals(call: Call) -> list[tuple[jax.ShapeDtypeStruct, int]]:
    """The arrays of a record with the levels of a call, and how many axes precede these: steps, rows, checkpoints."""
    memory = Memory(Pieces(call))
    found = [(jax.ShapeDtypeStruct(call.sizes, INT), 0)]
    for count, packing in ((memory.rows, memory.row), (memory.checkpoints, memory.state)):
        own = packing.arrays.values() if count else ()
        found += [(jax.ShapeDtypeStruct((count, *s, *call.sizes), dtype), 1 + len(s)) for dtype, s in own]
    return found


def loaded_places(places: Iterable[Place], frame: Frame) -> list[Any]:
    """The elements of some places, one after the other."""
    return [x for place in places for x in frame[place]]
