"""Indexing rules of the scalariser: indices known while building only move atoms, others look up or select."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from gradsolve_backend.kernels.scalar_graph import (
    Atom,
    Cell,
    Graph,
    Node,
    NoScalarForm,
    Value,
    atoms,
    is_inexact,
    is_known,
    largest,
    pack,
    same,
)

SELECT_LIMIT = 64  # places among which selects choose one
_CONSTANTS_FROM = 9  # from so many constants on, one look-up beats a select per place
_SINK_FROM = 17  # from here on one look-up per operand beats a select per place
_SINK_DEPTH = 6

_Mode = jax.lax.GatherScatterMode


# ---- one element at a traced index -----------------------------------------------------------------


def choose(graph: Graph, candidates: Value, starts: Sequence[Atom]) -> Atom:
    """The element `candidates[starts]`, every start clamped into its axis.

    **Arguments:** `candidates` is an array of atoms with one axis per entry of `starts`.

    **Raises:** `NoScalarForm` when the index is traced and there are too many places for selects.
    """
    for axis in reversed(range(candidates.ndim)):
        start, size = starts[axis], candidates.shape[axis]
        if isinstance(start, np.generic) or size == 1:
            k = min(max(int(start), 0), size - 1) if isinstance(start, np.generic) else 0
            rest = candidates.shape[:axis] + candidates.shape[axis + 1 :]
            candidates = candidates[(slice(None),) * axis + (slice(k, k + 1),)].reshape(rest)
            starts = [*starts[:axis], *starts[axis + 1 :]]
    if not starts:
        return candidates.item()
    found = _table_look_up(graph, candidates, starts, 0)
    if found is not None:
        return found
    if candidates.size > SELECT_LIMIT:
        raise NoScalarForm(
            f"an index known only at run time into {candidates.size} computed values has no scalar form: "
            f"at most {SELECT_LIMIT} are selected from, or index an input or a constant"
        )
    return select_tree(graph, candidates, starts)


def whole_table(graph: Graph, value: Value) -> int | None:
    """The table that an array of rank one is, from its first element to its last; None if it is none."""
    flat = atoms(value).reshape(-1).tolist()
    if value.ndim != 1 or len(flat) < 2:
        return None
    if all(isinstance(atom, np.generic) for atom in flat):
        return graph.constant_table(np.array(flat, value.dtype))
    first = flat[0]
    if not isinstance(first, Cell) or not graph.may_be_table[first.source]:
        return None
    places = [(cell.source, cell.element) for cell in flat if isinstance(cell, Cell)]
    whole = places == [(first.source, k) for k in range(graph.sizes[first.source])]
    return first.source if whole and len(places) == len(flat) else None


def select_tree(graph: Graph, candidates: Value, starts: Sequence[Atom]) -> Atom:
    """As `choose`, by a balanced tree of selects over the first axis; indices out of range take the nearest."""
    start, top = starts[0], largest(starts[0].dtype)

    def between(low: int, high: int) -> Atom:
        if high - low == 1:
            rest = candidates[low]
            return select_tree(graph, rest, starts[1:]) if len(starts) > 1 else rest
        middle = (low + high) // 2
        if middle > top:
            return between(low, middle)
        left, right = between(low, middle), between(middle, high)
        return graph.call("select_n", graph.call("lt", start, start.dtype.type(middle)), right, left)

    return between(0, candidates.shape[0])


def _table_look_up(graph: Graph, candidates: Value, starts: Sequence[Atom], depth: int) -> Atom | None:
    """One look-up per table, where the candidates are table elements or one operation on table elements."""
    flat = candidates.reshape(-1).tolist()
    first = flat[0]
    if all(same(first, atom) for atom in flat):
        return first
    if isinstance(first, Cell) and graph.may_be_table[first.source]:
        if all(isinstance(atom, Cell) and atom.source == first.source for atom in flat):
            places = np.array([cell.element for cell in flat]).reshape(candidates.shape)
            return _look_up(graph, first.source, places, starts, first.dtype)
    if all(isinstance(atom, np.generic) for atom in flat) and (depth or len(flat) >= _CONSTANTS_FROM):
        source = graph.constant_table(np.array(flat, first.dtype))
        return _look_up(graph, source, np.arange(len(flat)).reshape(candidates.shape), starts, first.dtype)
    if depth < _SINK_DEPTH and len(flat) >= _SINK_FROM and isinstance(first, Node):
        return _sink(graph, candidates, starts, depth)
    return None


def _sink(graph: Graph, candidates: Value, starts: Sequence[Atom], depth: int) -> Atom | None:
    """f(a)[i] as f(a[i]), so that a rescaled table is still a table."""
    first: Node = candidates.flat[0]
    flat = candidates.reshape(-1).tolist()
    if not all(isinstance(atom, Node) and atom.op is first.op for atom in flat):
        return None
    operands = []
    for column in zip(*(atom.operands for atom in flat), strict=True):
        column = atoms(pack(column, candidates.shape, column[0].dtype))
        operand = _table_look_up(graph, column, starts, depth + 1)
        if operand is None:
            return None
        operands.append(operand)
    return graph.apply(first.op, tuple(operands), first.dtype)


def _look_up(graph: Graph, source: int, places: np.ndarray, starts: Sequence[Atom], dtype: np.dtype) -> Atom:
    """Look up `places[starts]` in the table `source`; `places` holds flat element numbers."""
    if len(starts) == 1 and np.array_equal(places, np.arange(_length(graph, source))):
        return graph.look_up(source, starts[0], dtype)  # the look-up itself clamps
    base = int(places.flat[0])
    corner = np.zeros(places.ndim, int)
    strides = [int(places[tuple(corner + unit)]) - base for unit in np.eye(places.ndim, dtype=int)]
    grid = sum(stride * k for stride, k in zip(strides, np.indices(places.shape), strict=True))
    steps = [_clamp(graph, start, size) for start, size in zip(starts, places.shape, strict=True)]
    if not np.array_equal(places, base + grid):
        # not an arithmetic progression: the element number is itself read from a table
        strides = [int(np.prod(places.shape[axis + 1 :])) for axis in range(places.ndim)]
        rows = graph.constant_table(places.reshape(-1).astype(np.int32))
        return graph.look_up(source, graph.look_up(rows, _flat(graph, steps, strides, 0), np.dtype(np.int32)), dtype)
    return graph.look_up(source, _flat(graph, steps, strides, base), dtype)


def _length(graph: Graph, source: int) -> int:
    return graph.sizes[source] if source < graph.inputs else graph.tables[source - graph.inputs].size


def _flat(graph: Graph, steps: Sequence[Atom], strides: Sequence[int], base: int) -> Atom:
    total: Atom = np.int32(base)
    for step, stride in zip(steps, strides, strict=True):
        total = graph.call("add", total, graph.call("mul", step, np.int32(stride)))
    return total


def _clamp(graph: Graph, start: Atom, size: int) -> Atom:
    """The start as int32 within an axis of the given size, compared in its own dtype first."""
    kind = start.dtype.type
    high = kind(min(size - 1, largest(start.dtype)))
    return graph.convert(graph.call("clamp", kind(0), start, high), np.int32)


# ---- windows ---------------------------------------------------------------------------------------


def window(graph: Graph, operand: Value, starts: Sequence[Atom], sizes: Sequence[int]) -> Value:
    """`lax.dynamic_slice`: the block of the given sizes at the given starts, clamped so that it fits."""
    fixed = [isinstance(start, np.generic) for start in starts]
    cut = tuple(
        slice(k := min(max(int(start), 0), dim - size), k + size) if isinstance(start, np.generic) else slice(None)
        for start, dim, size in zip(starts, operand.shape, sizes, strict=True)
    )
    operand = operand[cut]
    if all(fixed) or 0 in sizes:
        return operand[tuple(slice(size) for size in sizes)]
    operand = atoms(operand)
    moving = [start for start, known in zip(starts, fixed, strict=True) if not known]
    spans = [dim - size + 1 for dim, size in zip(operand.shape, sizes, strict=True)]
    elements = []
    for offset in np.ndindex(*sizes):
        place = (k if known else slice(k, k + span) for k, known, span in zip(offset, fixed, spans, strict=True))
        elements.append(choose(graph, operand[tuple(place)], moving))
    return pack(elements, tuple(sizes), elements[0].dtype)


def dynamic_slice(graph: Graph, equation: Any, operand: Value, *starts: Value) -> list[Value]:
    return [window(graph, operand, _scalars(starts), equation.params["slice_sizes"])]


def dynamic_update_slice(graph: Graph, equation: Any, operand: Value, update: Value, *starts: Value) -> list[Value]:
    target = atoms(operand).copy()
    _place(graph, equation.primitive.name, target, _scalars(starts), update, clip=True)
    return [_tidy(target, equation)]


def _scalars(starts: Sequence[Value]) -> list[Atom]:
    return [atoms(start).item() for start in starts]


def _tidy(target: Value, equation: Any) -> Value:
    return pack(target.reshape(-1).tolist(), target.shape, equation.outvars[0].aval.dtype)


def _place(graph: Graph, name: str, target: Value, starts: Sequence[Atom], update: Value, clip: bool) -> None:
    """Combine a window into `target`, in place; one that sticks out moves inside (`clip`) or is dropped."""
    elements: Any = atoms(update)
    spans = [dim - size + 1 for dim, size in zip(target.shape, update.shape, strict=True)]
    if update.size == 0 or min(spans, default=1) < 1:
        return
    places = [_places(start, span, clip) for start, span in zip(starts, spans, strict=True)]
    count = int(np.prod([len(column) for column in places]))
    if count > SELECT_LIMIT:
        raise NoScalarForm(
            f"primitive `{name}` at an index known only at run time has no scalar form for {count} places: "
            f"at most {SELECT_LIMIT}"
        )
    combine = _COMBINE.get(name, lambda graph, old, new: new)
    for place in itertools.product(*places):
        here = _at(graph, starts, place, spans, clip)
        for offset in np.ndindex(*update.shape):
            spot = tuple(p + k for p, k in zip(place, offset, strict=True))
            old: Any = target[spot]
            new = combine(graph, old, elements[offset])
            target[spot] = new if here is None else graph.call("select_n", here, old, new)


def _places(start: Atom, span: int, clip: bool) -> Sequence[int]:
    if not isinstance(start, np.generic):
        return range(min(span, largest(start.dtype) + 1))
    inside = min(max(int(start), 0), span - 1)
    return [inside] if clip or inside == int(start) else []


def _at(graph: Graph, starts: Sequence[Atom], place: Sequence[int], spans: Sequence[int], clip: bool) -> Atom | None:
    """The predicate that the traced starts are at this place; None where every start is known."""
    here = None
    for start, k, span in zip(starts, place, spans, strict=True):
        if isinstance(start, np.generic) or (clip and span == 1):
            continue
        number = start.dtype.type(k)
        ends = {0: "le", span - 1: "ge"} if clip else {}
        hit = graph.call(ends.get(k, "eq"), start, number)
        here = hit if here is None else graph.call("and", here, hit)
    return here


_COMBINE: dict[str, Callable[[Graph, Atom, Atom], Atom]] = {
    "scatter-add": lambda graph, old, new: graph.call("add", old, new),
    "scatter-sub": lambda graph, old, new: graph.call("sub", old, new),
    "scatter-mul": lambda graph, old, new: graph.call("mul", old, new),
    "scatter-min": lambda graph, old, new: graph.call("min", old, new),
    "scatter-max": lambda graph, old, new: graph.call("max", old, new),
}


# ---- gather and scatter ----------------------------------------------------------------------------


def _start(row: Value, batch: Sequence[int], ndim: int, dims: Any) -> list[Atom]:
    """The start in every operand dimension; `dims` is (start map, operand batching dims, index batching dims)."""
    start_map, operand_batching, index_batching = dims
    starts: list[Atom] = [row.dtype.type(0) if is_known(row) else np.int32(0)] * ndim
    for k, axis in enumerate(start_map):
        starts[axis] = row[k]
    for axis, index_axis in zip(operand_batching, index_batching, strict=True):
        starts[axis] = np.int64(batch[index_axis])
    return starts


def gather(graph: Graph, equation: Any, operand: Value, indices: Value) -> list[Value]:
    params, shape = equation.params, equation.outvars[0].aval.shape
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    dims = (numbers.start_index_map, numbers.operand_batching_dims, numbers.start_indices_batching_dims)
    dropped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [size for axis, size in enumerate(sizes) if axis not in dropped]
    batches = indices.shape[:-1]
    elements: list[Atom] = []
    for batch in np.ndindex(*batches):
        starts = _start(indices[batch], batch, operand.ndim, dims)
        block = atoms(window(graph, operand, starts, sizes))
        if params["mode"] == _Mode.FILL_OR_DROP:
            block = _filled_outside(graph, block, _inside(graph, starts, operand.shape, sizes), params["fill_value"])
        elements += block.reshape(-1).tolist()
    dtype = equation.outvars[0].aval.dtype
    out = pack(elements, (*batches, *kept), dtype)
    batch_axes = [axis for axis in range(len(shape)) if axis not in numbers.offset_dims]
    return [out.transpose(np.argsort([*batch_axes, *numbers.offset_dims]))]


def _inside(graph: Graph, starts: Sequence[Atom], shape: Sequence[int], sizes: Sequence[int]) -> Atom:
    inside: Atom = np.bool_(True)
    for start, dim, size in zip(starts, shape, sizes, strict=True):
        kind, top = start.dtype.type, dim - size
        inside = graph.call("and", inside, graph.call("ge", start, kind(0)))
        if top < largest(start.dtype):
            inside = graph.call("and", inside, graph.call("le", start, kind(top)))
    return inside


def _filled_outside(graph: Graph, block: Value, inside: Atom, fill: Any) -> Value:
    out = block.copy()
    for place in np.ndindex(*block.shape):
        old: Any = block[place]
        new = old.dtype.type(_fill(old.dtype) if fill is None else fill)
        out[place] = graph.call("select_n", inside, new, old)
    return out


def _fill(dtype: np.dtype) -> Any:
    if is_inexact(dtype):
        return np.nan
    if dtype.kind == "b":
        return True
    return np.iinfo(dtype).min if dtype.kind == "i" else np.iinfo(dtype).max


def scatter(graph: Graph, equation: Any, operand: Value, indices: Value, updates: Value) -> list[Value]:
    params = equation.params
    numbers = params["dimension_numbers"]
    dims = (
        numbers.scatter_dims_to_operand_dims,
        numbers.operand_batching_dims,
        numbers.scatter_indices_batching_dims,
    )
    inserted = sorted({*numbers.inserted_window_dims, *numbers.operand_batching_dims})
    batch_axes = [axis for axis in range(updates.ndim) if axis not in numbers.update_window_dims]
    updates = updates.transpose([*batch_axes, *numbers.update_window_dims])
    updates = np.expand_dims(updates, tuple(len(batch_axes) + axis for axis in inserted))
    target = atoms(operand).copy()
    for batch in np.ndindex(*indices.shape[:-1]):
        starts = _start(indices[batch], batch, operand.ndim, dims)
        block = updates[(*batch, ...)]  # the ellipsis keeps a rank-0 block an array
        _place(graph, equation.primitive.name, target, starts, block, clip=params["mode"] == _Mode.CLIP)
    return [_tidy(target, equation)]


RULES: dict[str, Callable[..., list[Value]]] = {
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "gather": gather,
    "scatter": scatter,
    **dict.fromkeys(_COMBINE, scatter),
}
