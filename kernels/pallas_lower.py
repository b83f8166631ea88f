"""From a call and its arrays to a kernel of the backend `pallas`, and from its results back.

All levels of trajectories become one lane axis, the last of every array, and all levels of tangents or cotangents one
column axis. A program of the grid is a block of lanes and a column.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gradsolve_backend.kernels import pallas_kernels as kernels
from gradsolve_backend.kernels.lanes import column, spread
from gradsolve_backend.kernels.levels import Layout
from gradsolve_backend.kernels.loops import outcome
from gradsolve_backend.kernels.pallas_launch import Apart, Array, Get, Launch
from gradsolve_backend.kernels.pallas_layout import INT, WAITING, Memory, Packing, elements, record_avals
from gradsolve_backend.kernels.pallas_loops import Block, Held, Refs
from gradsolve_backend.kernels.pallas_tuning import Tuning, forward_tuning, tangent_tuning
from gradsolve_backend.kernels.routines import Pieces, Routine
from gradsolve_backend.kernels.solve import Call


def _lanes_last(x: Any, lead: int, lanes: int) -> Any:
    """An array of which the axes after `lead` are those of lanes, then its own, as `(*lead, elements, lanes)`."""
    own = math.prod(x.shape[lead:]) // lanes
    return jnp.swapaxes(x.reshape((*x.shape[:lead], lanes, own)), -1, -2)


def _lanes_first(x: Any, shape: Sequence[int], lead: int = 0) -> Any:
    """The reverse of it: `(*lead, *shape of lanes and elements)`."""
    return jnp.swapaxes(x, -1, -2).reshape((*x.shape[:lead], *shape))


def _tables(launch: Launch, routines: Sequence[Routine]) -> dict[Any, Array | None]:
    """The constant tables of programs."""
    found: dict[Any, Array | None] = {}
    for r in routines:
        for c in r.program.jaxpr.consts:
            if jnp.ndim(c) and id(c) not in found:
                found[id(c)] = launch.take(jnp.asarray(c).reshape((1, -1)), lanes=False)
    return found


def _held(get: Get, arrays: Iterable[Array | Apart | None]) -> list[Held | None]:
    def held(array: Array | Apart) -> Held:
        if isinstance(array, Apart):
            return Held([get(a) for a in array.elements], True)
        return Held(get(array), array.lanes)

    return [None if a is None else held(a) for a in arrays]


def _saved(get: Get, arrays: Mapping[tuple[int, int], Array | None]) -> dict[tuple[int, int], Held]:
    """The values of outputs that there are, or what belongs to them."""
    held = zip(arrays, _held(get, arrays.values()), strict=True)
    return {key: x for key, x in held if x is not None}


def _referred(get: Get, arrays: dict[Any, Array | None]) -> dict[Any, Any]:
    return {key: get(a) for key, a in arrays.items() if a is not None}


def _memory(launch: Launch, packing: Packing, count: int, columns: bool = False) -> dict[Any, Array | None]:
    """Results that hold places at `count` indices."""
    own = packing.arrays.items() if count else ()
    return {key: launch.give((count, *shape), dtype, columns) for key, (dtype, shape) in own}


# ---- forward --------------------------------------------------------------------------------------------


def forward(call: Call, *inputs: Any) -> list[Any]:
    """As `gradsolve_backend.kernels.loops.forward`, with a record of this backend."""
    solve, sizes = call.solve, call.sizes
    lanes = math.prod(sizes)
    routines = kernels.forward_routines(call)
    name = "gradsolve_record" if call.record else "gradsolve_forward"
    launch = Launch(name, lanes, 1, forward_tuning(call, lanes))
    if not lanes:
        return [jnp.zeros(a.shape, a.dtype) for a in (*outcome(call), *(a for a, _ in call.recorded))]
    given = [_entered(launch, x, column(call.axes, i), sizes) for i, x in enumerate(inputs)]
    constants = _tables(launch, routines)
    ended = [*solve.carry, *[jax.ShapeDtypeStruct((), INT)] * (2 * len(solve.outputs))]
    results = [launch.apart(elements(a), a.dtype) for a in ended]
    saved = {
        (o, j): launch.give((x.slots, elements(a)), a.dtype)
        for o, x in enumerate(solve.outputs)
        for j, a in enumerate(x.leaves)
    }
    steps, rows, checkpoints = None, {}, {}
    if call.record:
        memory, steps = Memory(Pieces(call)), launch.give((), INT)
        rows = _memory(launch, memory.row, memory.rows)
        checkpoints = _memory(launch, memory.state, memory.checkpoints)

    def kernel(stored: bool, get: Get) -> None:
        refs = Refs(
            carry=_held(get, given[: solve.size]),
            operands=_held(get, given[solve.size :]),
            constants=_referred(get, constants),
            saved=_saved(get, saved),
            results=_held(get, results),
            steps=None if steps is None else get(steps),
            rows=_referred(get, rows),
            checkpoints=_referred(get, checkpoints),
        )
        kernels.forward(Block(call, refs, launch.tuning.block, lanes, stored))

    found = launch(kernel)
    out = [_left(found(a), sizes, x) for a, x in zip(results, ended, strict=True)]
    for (o, j), a in saved.items():
        aval = solve.outputs[o].leaves[j]
        out.append(_left_slots(found(a), sizes, (solve.outputs[o].slots, *aval.shape), aval.dtype))
    recorded = [*((steps,) if call.record else ()), *rows.values(), *checkpoints.values()]
    shapes = [a.shape for a, _ in record_avals(call)] if call.record else []
    return [*out, *(found(a).reshape(s) for a, s in zip(recorded, shapes, strict=True))]


def _entered(launch: Launch, x: Any, has: Sequence[bool], sizes: Sequence[int]) -> Array | None:
    """An input that has the axes of some levels in front."""
    if not any(h and s > 1 for h, s in zip(has, sizes, strict=True)):
        return launch.take(x.reshape((1, -1)), lanes=False)
    return launch.take(_lanes_last(spread(x, has, sizes), 0, math.prod(sizes)))


def _left(x: Any, sizes: Sequence[int], aval: Any) -> Any:
    """A result `(elements, lanes)` with the levels in front."""
    shape = (*sizes, *aval.shape)
    return jnp.zeros(shape, aval.dtype) if x is None else _lanes_first(x, shape).astype(aval.dtype)


def _left_slots(x: Any, sizes: Sequence[int], shape: Sequence[int], dtype: Any, lead: int = 0) -> Any:
    """A result `(*lead, slots, elements, lanes)` with levels in front of the slots."""
    if x is None:
        return jnp.zeros((*sizes, *shape), dtype)
    x = x.reshape((*x.shape[:lead], -1, x.shape[-1]))
    return _lanes_first(x, (*sizes[lead:], *shape), lead).astype(dtype)


# ---- linear maps ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Linear:
    """A linear map of a call: its levels, arrays, and how its results leave."""

    name: str
    call: Call
    inputs: Sequence[Any]
    routines: Sequence[Routine]
    tuning: Tuning = Tuning()

    def __post_init__(self) -> None:
        self.layout = Layout.of(self.call)
        self.lane_sizes, self.column_sizes = self.layout.lane_sizes, self.layout.column_sizes
        self.lanes, self.columns = math.prod(self.lane_sizes), math.prod(self.column_sizes)
        self.launch = Launch(self.name, self.lanes, self.columns, self.tuning)
        self.memory = Memory(Pieces(self.call)) if self.call.record else None

    def primal(self) -> dict[str, Any]:
        """The arrays of the primal inputs."""
        size, count = self.call.solve.size, len(self.call.solve.operands)
        has = lambda i: [self.call.axes[level][i] for level in self.layout.own]  # noqa: E731
        given = [_entered(self.launch, self.inputs[i], has(i), self.lane_sizes) for i in range(size + count)]
        return {"carry": given[:size], "operands": given[size:], "constants": _tables(self.launch, self.routines)}

    def record(self) -> dict[str, Any]:
        """The arrays of the record."""
        memory = self.memory
        if memory is None:
            return {}
        number = self.call.solve.size + len(self.call.solve.operands)
        steps = self.launch.take(self._recorded(number, 0))
        found: dict[str, Any] = {"steps": steps, "rows": {}, "checkpoints": {}}
        for name, packing, count in (
            ("rows", memory.row, memory.rows),
            ("checkpoints", memory.state, memory.checkpoints),
        ):
            for key, (_, shape) in packing.arrays.items() if count else ():
                number += 1
                found[name][key] = self.launch.take(self._recorded(number, 1 + len(shape)))
        return found

    def _recorded(self, i: int, offset: int) -> Any:
        x = self.layout.recorded(self.inputs[i], i, offset)
        return x.reshape((*x.shape[:offset], self.lanes))

    def linear(self, i: int, slots: bool = False) -> Array | None:
        """A linear input, with slots in front of its elements if it belongs to an output."""
        x, columns, own = self.layout.entered(self.inputs[i], i)
        sizes, lane_sizes = self.column_sizes, self.lane_sizes
        has_columns = any(h and s > 1 for h, s in zip(columns, sizes, strict=True))
        has_lanes = any(h and s > 1 for h, s in zip(own, lane_sizes, strict=True))
        wanted = [*([True] * len(columns) if has_columns else columns), *([True] * len(own) if has_lanes else own)]
        levels = [s for s, w in zip((*sizes, *lane_sizes), wanted, strict=True) if w]
        x = spread(x, [h for h, w in zip((*columns, *own), wanted, strict=True) if w], levels)
        shape = x.shape[len(levels) :]
        lead = (self.columns,) if has_columns else ()
        split = (shape[0], math.prod(shape[1:])) if slots else (math.prod(shape),)
        count = self.lanes if has_lanes else 1
        x = jnp.moveaxis(x.reshape((*lead, count, *split)), len(lead), -1)
        if not has_lanes and not slots:
            x = jnp.moveaxis(x, -1, len(lead))
        return self.launch.take(x, lanes=has_lanes, columns=has_columns)

    def refs(self, get: Get, primal: dict[str, Any], record: dict[str, Any], **more: Any) -> Refs:
        """The references of a kernel."""
        return Refs(
            carry=_held(get, primal["carry"]),
            operands=_held(get, primal["operands"]),
            constants=_referred(get, primal["constants"]),
            steps=get(record["steps"]) if record else None,
            rows=_referred(get, record.get("rows", {})),
            checkpoints=_referred(get, record.get("checkpoints", {})),
            **more,
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Columns, then levels of lanes."""
        return (self.columns, *self.lane_sizes)

    def left(self, x: Any, own: bool, position: int) -> Any:
        """A result `(columns, *lanes, ...)`, or one without lanes, as the call wants it."""
        return self.layout.result(x.reshape((*self.column_sizes, *x.shape[1:])), own, position)


def tangent(call: Call, *inputs: Any) -> list[Any]:
    """As `gradsolve_backend.kernels.replay.tangent`."""
    solve, rows = call.solve, call.replace(record=True)
    routines = [*kernels.forward_routines(rows, values=False), *kernels.tangent_routines(rows)]
    linear = Linear("gradsolve_tangent", call, inputs, routines, tangent_tuning(rows))
    launch, primal, record = linear.launch, linear.primal(), linear.record()
    given = [linear.linear(i) for i in range(linear.layout.primal, len(inputs))]
    reached = [solve.carry[i] for i in call.reached]
    results = [launch.apart(elements(a), a.dtype, columns=True) for a in reached]
    leaves = [(o, j) for o in range(len(solve.outputs)) for j in Pieces(call).leaves(o)]
    leaf = lambda o, j: solve.outputs[o].leaves[j]  # noqa: E731
    saved = {
        (o, j): launch.give((solve.outputs[o].slots, elements(leaf(o, j))), leaf(o, j).dtype, columns=True)
        for o, j in leaves
    }

    def kernel(stored: bool, get: Get) -> None:
        more = {"linear": _held(get, given), "results": _held(get, results), "saved": _saved(get, saved)}
        refs = linear.refs(get, primal, record, **more)
        kernels.Tangent(Block(rows, refs, launch.tuning.block, linear.lanes, stored), linear.memory).run()

    found = launch(kernel)
    out = []
    for a, aval in zip(results, reached, strict=True):
        out.append(_left_slots(found(a), linear.sizes, aval.shape, aval.dtype, 1))
    for (o, j), a in saved.items():
        shape = (solve.outputs[o].slots, *leaf(o, j).shape)
        out.append(_left_slots(found(a), linear.sizes, shape, leaf(o, j).dtype, 1))
    return [linear.left(x, True, i) for i, x in enumerate(out)]


def _cotangents(linear: Linear) -> tuple[list[Array | None], dict[tuple[int, int], Array | None]]:
    """The cotangents of the reached loop variables, and those of the values of the outputs."""
    call, count = linear.call, len(linear.call.reached)
    cts = [linear.linear(linear.layout.primal + n) for n in range(count)]
    leaves = [(o, j) for o in range(len(call.solve.outputs)) for j in Pieces(call).leaves(o)]
    return cts, {key: linear.linear(linear.layout.primal + n, slots=True) for n, key in enumerate(leaves, count)}


def _again(call: Call, inputs: Sequence[Any]) -> dict[Any, Any]:
    """What the reverse sweep has once it comes to the rows, from the steps that have none; empty if all have one."""
    memory = Memory(Pieces(call))
    if not memory.again:
        return {}
    routines = [*kernels.forward_routines(call, values=False), *kernels.cotangent_routines(call)]
    linear = Linear("gradsolve_again", call, inputs, routines)
    primal, record, (cts, saved) = linear.primal(), linear.record(), _cotangents(linear)
    again = _memory(linear.launch, memory.row, memory.again, columns=True)
    waiting = _memory(linear.launch, memory.waiting, WAITING, columns=True)

    def kernel(stored: bool, get: Get) -> None:
        scratch = {"again": _referred(get, again), "waiting": _referred(get, waiting)}
        refs = linear.refs(get, primal, record, linear=_held(get, cts), saved=_saved(get, saved), **scratch)
        kernels.Cotangent(Block(call, refs, linear.launch.tuning.block, linear.lanes, stored)).beyond()

    found = linear.launch(kernel)
    return {key: found(a) for key, a in waiting.items()}


def cotangent(call: Call, *inputs: Any) -> list[Any]:
    """As `gradsolve_backend.kernels.replay.cotangent`."""
    solve, before = call.solve, _again(call, inputs)
    linear = Linear("gradsolve_cotangent", call, inputs, kernels.cotangent_routines(call))
    launch, primal, record, (cts, saved) = linear.launch, linear.primal(), linear.record(), _cotangents(linear)
    waiting = {key: launch.take(x, columns=True) for key, x in before.items()}
    avals = [*(solve.carry[i] for i in call.carry), *(solve.operands[i] for i in call.operands)]
    own = [j < len(call.carry) or linear.layout.apart(j) for j in range(len(avals))]
    results = [
        launch.apart(elements(a), a.dtype, columns=True) if lanes else launch.sums(elements(a), a.dtype)
        for a, lanes in zip(avals, own, strict=True)
    ]

    def kernel(stored: bool, get: Get) -> None:
        more = {"linear": _held(get, cts), "results": _held(get, results), "saved": _saved(get, saved)}
        refs = linear.refs(get, primal, record, waiting=_referred(get, waiting), **more)
        kernels.Cotangent(Block(call, refs, launch.tuning.block, linear.lanes, stored)).rows()

    found = launch(kernel)
    out = []
    for j, (a, aval, lanes) in enumerate(zip(results, avals, own, strict=True)):
        if lanes:
            x = _left_slots(found(a), linear.sizes, aval.shape, aval.dtype, 1)
        else:
            sums = jnp.zeros((linear.columns, 1, *aval.shape), aval.dtype) if a is None else found(a)
            x = jnp.sum(sums, axis=1).reshape((linear.columns, *aval.shape))
        out.append(linear.left(x, lanes, j))
    return out
