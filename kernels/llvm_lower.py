"""From a call and its arrays to a kernel of the `llvm` backend, and from its results back.

All levels of trajectories become one lane axis, all levels of tangents or cotangents one column axis.
"""

import ctypes
import functools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradsolve_backend.kernels import llvm_code
from gradsolve_backend.kernels.lanes import column
from gradsolve_backend.kernels.levels import Layout
from gradsolve_backend.kernels.llvm_arrays import Array, Arrays
from gradsolve_backend.kernels.llvm_call import call as call_kernel
from gradsolve_backend.kernels.llvm_forward import HUGE_PAGES, Forward
from gradsolve_backend.kernels.llvm_ir import Target, host_features
from gradsolve_backend.kernels.llvm_loops import MARKS, WIDEST, Kernel, record_bytes
from gradsolve_backend.kernels.llvm_math import symbols
from gradsolve_backend.kernels.llvm_sweeps import Cotangent
from gradsolve_backend.kernels.llvm_tangent import Tangent
from gradsolve_backend.kernels.loops import outcome
from gradsolve_backend.kernels.routines import Pieces
from gradsolve_backend.kernels.solve import Call

TASKS = 64  # at most; a task is the unit that threads share out, and its sums do not depend on their number
WORKERS = 64
SHORT = 500  # equations of a step that runs faster with two registers per vector


def record_avals(call: Call) -> list[jax.ShapeDtypeStruct]:
    """The arrays of a record, for one lane."""
    buffers = [jax.ShapeDtypeStruct((size,), jnp.uint8) for size in record_bytes(Pieces(call))]
    return [jax.ShapeDtypeStruct((MARKS,), jnp.int32), *buffers]


def width(call: Call, lanes: int) -> int:
    """Lanes per vector: as many as a register holds, twice that for a short step; no more than there are lanes.

    Of a short step, a processor that works on several instructions at once has half its units idle.
    """
    _, bits, _ = host_features()
    wide = any(np.dtype(a.dtype).itemsize == 8 for a in call.solve.carry if jnp.issubdtype(a.dtype, jnp.inexact))
    most = bits // (64 if wide else 32)
    if lanes >= 4 * most and Pieces(call).step().program.equations <= SHORT:
        most *= 2
    return min(most, WIDEST, 1 << max(0, lanes - 1).bit_length())


@dataclass(eq=False)
class Packer:
    """Turns the arrays of a call into rows, and collects the buffers of a kernel."""

    sizes: tuple[int, ...]  # of the column levels, then of those of the lanes
    columns: int  # number of column levels
    buffers: list[Any] = field(default_factory=list)

    def add(self, x: Any) -> int:
        """The number of a further buffer."""
        self.buffers.append(x)
        return len(self.buffers) - 1

    def array(self, x: Any, has: Sequence[bool]) -> Array:
        """An array that has the axes of some levels in front."""
        present = [h or s == 1 for h, s in zip(has, self.sizes, strict=True)]
        count = math.prod(s for s, h in zip(self.sizes, has, strict=True) if h)
        own = x.shape[sum(has) :]
        buffer, dtype = self.add(x.reshape((count, math.prod(own)))), np.dtype(x.dtype)
        whole = [self._whole(present[: self.columns], has[: self.columns], self.sizes[: self.columns])]
        whole.append(self._whole(present[self.columns :], has[self.columns :], self.sizes[self.columns :]))
        if None not in whole:
            return Array(buffer, math.prod(own), dtype, lanes=bool(whole[1]), columns=bool(whole[0]))
        return Array(buffer, math.prod(own), dtype, index=self.add(self._index(has, count)))

    def _whole(self, present: Sequence[bool], has: Sequence[bool], sizes: Sequence[int]) -> bool | None:
        """Whether all axes are there, or none; None: some."""
        if not any(h and s > 1 for h, s in zip(has, sizes, strict=True)):
            return False
        return True if all(present) else None

    def _index(self, has: Sequence[bool], count: int) -> Any:
        shape = tuple(s if h else 1 for s, h in zip(self.sizes, has, strict=True))
        rows = jnp.arange(count, dtype=jnp.int32).reshape(shape)
        return jnp.broadcast_to(rows, self.sizes).reshape((-1,))


@dataclass(eq=False)
class Results:
    """The results of a kernel: what each is as a buffer, and as an array of the call."""

    first: int  # number of the first result among the buffers
    avals: list[jax.ShapeDtypeStruct] = field(default_factory=list)

    def add(self, shape: tuple[int, ...], dtype: Any, elements: int, **axes: bool) -> Array:
        """A further result."""
        self.avals.append(jax.ShapeDtypeStruct(shape, dtype))
        return Array(self.first + len(self.avals) - 1, elements, np.dtype(dtype), **axes)


def _launch(kernel: Kernel, text: str, packer: Packer, results: Results, counts: tuple[int, int, int]) -> list[Any]:
    """Run a kernel over `lanes`, `columns` and `tasks`; the last result is the memory of the workers."""
    lanes, columns, tasks = counts
    blocks = -(-lanes // kernel.target.width)
    _bind_libraries()
    workers = max(1, min(tasks, WORKERS, (os.cpu_count() or 1) + 1))
    avals = [*results.avals[:-1], jax.ShapeDtypeStruct((workers * kernel.frame_bytes,), jnp.uint8)]
    params = [tasks, workers, 1, lanes, columns, -(-blocks // max(1, tasks))]
    return call_kernel(text, avals, params, *packer.buffers)[:-1]


def _tasks(lanes: int, size: int) -> int:
    """Number of tasks; all have the same number of blocks, but for the last."""
    blocks = -(-lanes // size)
    per_task = max(1, -(-blocks // TASKS))
    return -(-blocks // per_task)


@functools.cache
def _bind_libraries() -> None:
    """Give the functions of the system's libraries to machine code."""
    llvm_code.bind(symbols())
    if HUGE_PAGES:
        llvm_code.bind({"madvise": ctypes.cast(ctypes.CDLL(None).madvise, ctypes.c_void_p).value or 0})


def _target(call: Call, lanes: int) -> Target:
    fma, bits, vector_math = host_features()
    return Target(width(call, lanes), fma, vector_math, bits)


def forward(call: Call, *inputs: Any) -> list[Any]:
    """As `gradsolve_backend.kernels.loops.forward`, with a record of this backend."""
    solve, sizes = call.solve, call.sizes
    lanes = math.prod(sizes)
    packer = Packer(sizes, 0)
    arrays = [packer.array(x, column(call.axes, i)) for i, x in enumerate(inputs)]
    results = Results(len(packer.buffers))
    own = [jax.ShapeDtypeStruct(a.shape[len(sizes) :], a.dtype) for a in outcome(call)]
    ended = solve.size + 2 * len(solve.outputs)
    out = []
    for i, a in enumerate(own):
        elements = math.prod(a.shape if i < ended else a.shape[1:])
        out.append(results.add((lanes, *a.shape), a.dtype, elements, lanes=True))
    record = None
    if call.record:
        arrays_of = [results.add((lanes, *a.shape), a.dtype, a.size) for a in record_avals(call)]
        record = tuple(a.buffer for a in arrays_of)
    frames = results.add((0,), jnp.uint8, 0).buffer
    size = solve.size
    described = Arrays(
        tuple(arrays[:size]), tuple(arrays[size:]), results=tuple(out), record=record, frames=frames, lanes=lanes
    )
    kernel = Forward(call, _target(call, lanes), described)
    found = _launch(kernel, kernel.make(), packer, results, (lanes, 1, _tasks(lanes, kernel.target.width)))
    return [x.reshape((*sizes, *x.shape[1:])) for x in found]


@dataclass(eq=False)
class Linear:
    """A linear map of a call: its levels, arrays, and how its results leave."""

    call: Call
    inputs: Sequence[Any]

    def __post_init__(self) -> None:
        self.layout = Layout.of(self.call)
        sizes = self.layout.column_sizes, self.layout.lane_sizes
        self.columns, self.lanes = map(math.prod, sizes)
        # The columns of a single trajectory are run as lanes, for the sake of SIMD and threads.
        self.replicated = self.lanes == 1 < self.columns
        if self.replicated:
            self.lanes, self.columns = self.columns, 1
        self.packer = Packer((*sizes[0], *sizes[1]), 0 if self.replicated else len(sizes[0]))
        self.target = _target(self.call, self.lanes)
        self.tasks = _tasks(self.lanes, self.target.width)

    def array(self, i: int) -> Array:
        """An input."""
        x, columns, own = self.layout.entered(self.inputs[i], i)
        return self.packer.array(x, [*columns, *own])

    @functools.cached_property
    def described(self) -> dict[str, Any]:
        """The primal arrays."""
        size, count = self.call.solve.size, len(self.call.solve.operands)
        record = tuple(self._recorded(size + count + j) for j in range(len(self.call.recorded)))
        return {
            "carry": tuple(self.array(i) for i in range(size)),
            "operands": tuple(self.array(size + i) for i in range(count)),
            "record": record,
            "columns": self.columns,
            "lanes": self.lanes,
            "replicated": self.replicated,
        }

    def _recorded(self, i: int) -> int:
        x = self.layout.recorded(self.inputs[i], i)
        return self.packer.add(x.reshape((-1, x.shape[-1])))

    def shape(self, a: Any) -> tuple[int, ...]:
        """A result that has all columns and lanes."""
        return (self.columns, self.lanes, *a.shape)

    def left(self, x: Any, own: bool, position: int) -> Any:
        """A result as the call wants it."""
        lead = (*self.layout.column_sizes, *(self.layout.lane_sizes if own else ()))
        x = x.reshape((*lead, *x.shape[2 if own else 1 :]))
        return self.layout.result(x, own, position)

    def run(self, kernel: Kernel, results: Results) -> list[Any]:
        """The results of a kernel."""
        counts = (self.lanes, self.columns, self.tasks)
        return _launch(kernel, kernel.make(), self.packer, results, counts)


def tangent(call: Call, *inputs: Any) -> list[Any]:
    """As `gradsolve_backend.kernels.replay.tangent`."""
    solve, linear = call.solve, Linear(call, inputs)
    described = linear.described
    given = tuple(linear.array(i) for i in range(linear.layout.primal, len(inputs)))
    results = Results(len(linear.packer.buffers))
    out = [
        results.add(linear.shape(a), a.dtype, a.size, lanes=True, columns=True)
        for a in (solve.carry[i] for i in call.reached)
    ]
    for o in solve.outputs:
        out += [
            results.add((linear.columns, linear.lanes, o.slots, *a.shape), a.dtype, a.size, lanes=True, columns=True)
            for a in call.saved(o)
        ]
    frames = results.add((0,), jnp.uint8, 0).buffer
    kernel = Tangent(call, linear.target, Arrays(**described, linear=given, results=tuple(out), frames=frames))
    found = linear.run(kernel, results)
    return [linear.left(x, True, i) for i, x in enumerate(found)]


def cotangent(call: Call, *inputs: Any) -> list[Any]:
    """As `gradsolve_backend.kernels.replay.cotangent`."""
    solve, linear = call.solve, Linear(call, inputs)
    described = linear.described
    given = iter([linear.array(i) for i in range(linear.layout.primal, len(inputs))])
    cts = tuple(next(given) for _ in call.reached)
    saved = tuple(tuple(next(given) for _ in call.saved(o)) for o in solve.outputs)
    results = Results(len(linear.packer.buffers))
    out, own = [], []
    for j, i in enumerate((*call.carry, *(solve.size + i for i in call.operands))):
        a = solve.carry[i] if j < len(call.carry) else solve.operands[i - solve.size]
        own.append(j < len(call.carry) or linear.replicated or linear.layout.apart(j))
        shape = linear.shape(a) if own[-1] else (linear.columns, linear.tasks, *a.shape)
        out.append(results.add(shape, a.dtype, a.size, lanes=own[-1], columns=own[-1]))
    frames = results.add((0,), jnp.uint8, 0).buffer
    arrays = Arrays(**described, linear=cts, saved=saved, results=tuple(out), frames=frames)
    found = linear.run(Cotangent(call, linear.target, arrays), results)
    found = [x if lanes else jnp.sum(x, axis=1) for x, lanes in zip(found, own, strict=True)]
    return [linear.left(x, lanes, j) for j, (x, lanes) in enumerate(zip(found, own, strict=True))]
