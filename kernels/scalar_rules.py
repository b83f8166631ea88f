"""Rules of the scalariser for elementwise, structural, reducing and contracting primitives."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradsolve_backend.kernels.scalar_graph import Atom, Graph, Value, atoms, fold, is_inexact, is_known, pack

# ---- elementwise -----------------------------------------------------------------------------------

_ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz cos cosh digamma
div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac integer_pow is_finite le lgamma log
log1p log2 logistic lt max min mul ne neg nextafter not or polygamma population_count pow
random_gamma_grad reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left
shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor zeta
""".split()

_IDENTITIES = """
copy copy_p device_put layout_constraint name nonbatchable nondifferentiable_backward nontraceable
optimization_barrier pvary sharding_constraint stop_gradient
""".split()


def _map(function: Callable[..., Atom], equation: Any, values: Sequence[Value]) -> list[Value]:
    """Apply a function of atoms to every element; rank-0 operands broadcast."""
    aval = equation.outvars[0].aval
    columns = [np.broadcast_to(atoms(value), aval.shape).reshape(-1).tolist() for value in values]
    return [pack([function(*row) for row in zip(*columns, strict=True)], aval.shape, aval.dtype)]


def _elementwise(graph: Graph, equation: Any, *values: Value) -> list[Value]:
    aval, op = equation.outvars[0].aval, graph.op(equation.primitive, equation.params)
    if all(map(is_known, values)):
        known = fold(op, values, aval.dtype)
        if known is not None:
            return [np.broadcast_to(known, aval.shape)]
    return _map(lambda *operands: graph.apply(op, operands, aval.dtype), equation, values)


def _convert(graph: Graph, equation: Any, value: Value) -> list[Value]:
    return _map(lambda atom: graph.convert(atom, equation.params["new_dtype"]), equation, [value])


def _bitcast(graph: Graph, equation: Any, value: Value) -> list[Value] | None:
    return None if equation.outvars[0].aval.shape != value.shape else _elementwise(graph, equation, value)


def _one_minus_square(graph: Graph, equation: Any, value: Value) -> list[Value]:
    def apply(x: Atom) -> Atom:
        one = x.dtype.type(1)
        return graph.call("mul", graph.call("add", one, x), graph.call("sub", one, x))

    return _map(apply, equation, [value])


def _polynomial(graph: Graph, equation: Any, *values: Value) -> list[Value]:
    def horner(x: Atom, *coefficients: Atom) -> Atom:
        return functools.reduce(
            lambda total, c: graph.call("add", graph.call("mul", total, x), c), reversed(coefficients)
        )

    return _map(horner, equation, values)


def _select_if_vmap(graph: Graph, equation: Any, *values: Value) -> list[Value]:
    # lanes are vmapped, so the predicate does select
    return _map(lambda p, x, y: graph.call("select_n", p, y, x), equation, values)


# The total order on floats differs from the usual one only in NaN (largest) and the signs of zero and NaN; jax uses it
# where it has made those signs equal (`searchsorted`), so NaN is all that is left to treat.


def _nan(graph: Graph, x: Atom) -> Atom:
    return graph.call("ne", x, x) if is_inexact(x.dtype) else np.bool_(False)


def _less_total(graph: Graph, equation: Any, *values: Value) -> list[Value]:
    def less(a: Atom, b: Atom) -> Atom:
        last = graph.call("and", _nan(graph, b), graph.call("not", _nan(graph, a)))
        return graph.call("or", graph.call("lt", a, b), last)

    return _map(less, equation, values)


def _less_equal_total(graph: Graph, equation: Any, *values: Value) -> list[Value]:
    return _map(lambda a, b: graph.call("or", graph.call("le", a, b), _nan(graph, b)), equation, values)


def _equal_total(graph: Graph, equation: Any, *values: Value) -> list[Value]:
    def equal(a: Atom, b: Atom) -> Atom:
        return graph.call("or", graph.call("eq", a, b), graph.call("and", _nan(graph, a), _nan(graph, b)))

    return _map(equal, equation, values)


# ---- structural: atoms move, nothing is computed ---------------------------------------------------


def _aligned(*values: Value) -> list[Value]:
    return list(values) if all(map(is_known, values)) else [atoms(value) for value in values]


def _broadcast_in_dim(graph: Graph, equation: Any, value: Value, *_: Value) -> list[Value]:
    shape = equation.outvars[0].aval.shape
    inner = [1] * len(shape)
    for axis, size in zip(equation.params["broadcast_dimensions"], value.shape, strict=True):
        inner[axis] = size
    return [np.broadcast_to(value.reshape(inner), shape)]


def _reshape(graph: Graph, equation: Any, value: Value, *_: Value) -> list[Value]:
    order = equation.params["dimensions"]
    value = value if order is None else value.transpose(order)
    return [value.reshape(equation.outvars[0].aval.shape)]


def _squeeze(graph: Graph, equation: Any, value: Value) -> list[Value]:
    return [value.reshape(equation.outvars[0].aval.shape)]


def _slice(graph: Graph, equation: Any, value: Value) -> list[Value]:
    params = equation.params
    strides = params["strides"] or (1,) * value.ndim
    return [value[tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]]


def _pad(graph: Graph, equation: Any, value: Value, filling: Value) -> list[Value]:
    value, filling = _aligned(value, filling)
    return [_padded(value, filling, equation.params["padding_config"], equation.outvars[0].aval.shape)]


def _padded(value: Value, filling: Value, config: Sequence[tuple[int, int, int]], shape: Sequence[int]) -> Value:
    """As `lax.pad`; `config` has (low, high, interior) per axis."""
    if not config:
        return value
    out = np.empty(shape, value.dtype)
    out.reshape(-1)[:] = filling
    places = []
    for (low, _, interior), size, total in zip(config, value.shape, shape, strict=True):
        place = low + np.arange(size) * (interior + 1)
        kept = (place >= 0) & (place < total)
        places.append((place[kept], np.arange(size)[kept]))
    out[np.ix_(*(to for to, _ in places))] = value[np.ix_(*(start for _, start in places))]
    return out


def _iota(graph: Graph, equation: Any, *_: Value) -> list[Value]:
    shape, axis = equation.outvars[0].aval.shape, equation.params["dimension"]
    column = np.arange(shape[axis]).astype(equation.params["dtype"])
    return [np.broadcast_to(column.reshape([-1 if k == axis else 1 for k in range(len(shape))]), shape)]


def _zeros(graph: Graph, equation: Any) -> list[Value]:
    aval = equation.outvars[0].aval
    return [np.zeros(aval.shape, aval.dtype)]


def _platform_index(graph: Graph, equation: Any) -> list[Value] | None:
    """Of several ways to compute one thing, the one for all platforms."""
    platforms = equation.params["platforms"]
    return [np.asarray(platforms.index(None), np.int32)] if None in platforms else None


def _split(graph: Graph, equation: Any, value: Value) -> list[Value]:
    cuts = np.cumsum(equation.params["sizes"])[:-1]
    return np.split(value, cuts, axis=equation.params["axis"])


def _unstack(graph: Graph, equation: Any, value: Value) -> list[Value]:
    value = np.moveaxis(value, equation.params["axis"], 0)
    return [value[k, ...] for k in range(value.shape[0])]


def _identity(graph: Graph, equation: Any, *values: Value) -> list[Value]:
    return list(values)


# ---- reductions, left to right ---------------------------------------------------------------------


def _empty(name: str, dtype: np.dtype) -> Any:
    """What a reduction over nothing gives."""
    if name not in ("max", "min") or dtype.kind == "b":
        return dtype.type(name in ("mul", "and", "min"))
    ends = (-np.inf, np.inf) if is_inexact(dtype) else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return dtype.type(ends[name == "min"])


def _rows(value: Value, axes: Sequence[int]) -> tuple[list[list[Atom]], tuple[int, ...]]:
    """The elements along `axes`, one list per remaining element, and the shape that remains."""
    kept = [axis for axis in range(value.ndim) if axis not in axes]
    shape = tuple(value.shape[axis] for axis in kept)
    length = int(np.prod([value.shape[axis] for axis in axes], dtype=int))
    grid = atoms(value).transpose([*kept, *axes]).reshape(int(np.prod(shape, dtype=int)), length)
    return grid.tolist(), shape


def _reduce(name: str, graph: Graph, equation: Any, value: Value) -> list[Value]:
    dtype = equation.outvars[0].aval.dtype
    rows, shape = _rows(value, equation.params["axes"])
    join = functools.partial(graph.call, name)
    return [pack([functools.reduce(join, row) if row else _empty(name, dtype) for row in rows], shape, dtype)]


def _reduce_all(name: str, graph: Graph, equation: Any, value: Value) -> list[Value]:
    flat = atoms(value).reshape(-1).tolist()
    dtype = equation.outvars[0].aval.dtype
    out = functools.reduce(functools.partial(graph.call, name), flat) if flat else _empty(name, dtype)
    return [pack([out], (), dtype)]


def _cumulate(name: str, graph: Graph, equation: Any, value: Value) -> list[Value]:
    axis, step = equation.params["axis"], -1 if equation.params["reverse"] else 1
    out = np.moveaxis(atoms(value).copy(), axis, 0)[::step]
    for k in range(1, out.shape[0]):
        for place in np.ndindex(*out.shape[1:]):
            out[(k, *place)] = graph.call(name, out[(k - 1, *place)], out[(k, *place)])
    out = np.moveaxis(out[::step], 0, axis)
    return [pack(out.reshape(-1).tolist(), out.shape, equation.outvars[0].aval.dtype)]


def _arg_extreme(name: str, graph: Graph, equation: Any, value: Value) -> list[Value]:
    dtype = np.dtype(equation.params["index_dtype"])
    rows, shape = _rows(value, equation.params["axes"])

    def place(row: Sequence[Atom]) -> Atom:
        best, at = row[0], dtype.type(0)
        for k, x in enumerate(row[1:], 1):
            first_nan = graph.call("and", _nan(graph, x), graph.call("not", _nan(graph, best)))
            better = graph.call("or", graph.call(name, x, best), first_nan)
            best = graph.call("select_n", better, best, x)
            at = graph.call("select_n", better, at, dtype.type(k))
        return at

    return [pack([place(row) for row in rows], shape, dtype)]


# ---- contraction -----------------------------------------------------------------------------------


def _dot_general(graph: Graph, equation: Any, left: Value, right: Value) -> list[Value]:
    """Unrolled, summed left to right.

    Zeros of a matrix that is known while building (a tableau, a stoichiometry) are left out of the sums, as in
    the sums one writes by hand: 0 * NaN counts as 0 there. A matrix that is an operand keeps all its terms.
    """
    aval = equation.outvars[0].aval
    (over_left, over_right), (batch_left, batch_right) = equation.params["dimension_numbers"]
    lefts, rights = _stacked(left, over_left, batch_left), _stacked(right, over_right, batch_right)
    skips = (is_known(left), is_known(right))
    elements = [
        _inner(graph, row, column, skips, aval.dtype)
        for rows, columns in zip(lefts, rights, strict=True)
        for row in rows
        for column in columns
    ]
    return [pack(elements, aval.shape, aval.dtype)]


def _stacked(value: Value, over: Sequence[int], batch: Sequence[int]) -> list[list[list[Atom]]]:
    free = [axis for axis in range(value.ndim) if axis not in {*over, *batch}]
    sizes = [int(np.prod([value.shape[axis] for axis in axes], dtype=int)) for axes in (batch, free, over)]
    return atoms(value).transpose([*batch, *free, *over]).reshape(sizes).tolist()


def _inner(graph: Graph, row: list[Atom], column: list[Atom], skips: tuple[bool, bool], dtype: np.dtype) -> Atom:
    total: Atom = dtype.type(0)
    for a, b in zip(row, column, strict=True):
        if not (skips[0] and a == 0 or skips[1] and b == 0):
            total = graph.call("add", total, graph.call("mul", graph.convert(a, dtype), graph.convert(b, dtype)))
    return total


def _convolve(graph: Graph, equation: Any, left: Value, right: Value) -> list[Value] | None:
    """A convolution as the contraction of its windows with the kernel."""
    params, aval = equation.params, equation.outvars[0].aval
    spec = params["dimension_numbers"]
    if params["batch_group_count"] != 1:
        return None
    left = _dilated(
        left.transpose(spec.lhs_spec), equation.invars[0].aval.dtype, params["lhs_dilation"], params["padding"]
    )
    right, steps = right.transpose(spec.rhs_spec), params["rhs_dilation"]
    outputs, inputs, *kernel = right.shape
    shape = tuple(aval.shape[axis] for axis in spec.out_spec)
    elements = []
    skips = (False, is_known(right))
    left, right = atoms(left), atoms(right)
    for batch, channel, *place in np.ndindex(*shape):
        first = inputs * (channel * params["feature_group_count"] // outputs)
        corner = [k * stride for k, stride in zip(place, params["window_strides"], strict=True)]
        spatial = [slice(c, c + n * s, s) for c, n, s in zip(corner, kernel, steps, strict=True)]
        row = left[(batch, slice(first, first + inputs), *spatial)].reshape(-1).tolist()
        elements.append(_inner(graph, row, right[channel].reshape(-1).tolist(), skips, aval.dtype))
    out = pack(elements, shape, aval.dtype)
    return [out.transpose(np.argsort(spec.out_spec))]


def _dilated(value: Value, dtype: np.dtype, dilation: Sequence[int], padding: Sequence[tuple[int, int]]) -> Value:
    """Zeros between and around the spatial elements."""
    config = [(0, 0, 0), (0, 0, 0), *((low, high, d - 1) for d, (low, high) in zip(dilation, padding, strict=True))]
    sizes = [low + high + n + max(n - 1, 0) * d for (low, high, d), n in zip(config, value.shape, strict=True)]
    value, zero = _aligned(value, np.zeros((), dtype))
    return _padded(value, zero, config, sizes)


def _concatenate(graph: Graph, equation: Any, *values: Value) -> list[Value]:
    return [np.concatenate(_aligned(*values), axis=equation.params["dimension"])]


def _stack(graph: Graph, equation: Any, *values: Value) -> list[Value]:
    return [np.stack(_aligned(*values), axis=equation.params["axis"])]


_NAMES = {"sum": "add", "prod": "mul", "max": "max", "min": "min", "and": "and", "or": "or", "xor": "xor"}

RULES: dict[str, Callable[..., list[Value] | None]] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_IDENTITIES, _identity),
    **{f"reduce_{name}": functools.partial(_reduce, call) for name, call in _NAMES.items()},
    **{f"cum{name}": functools.partial(_cumulate, _NAMES[name]) for name in ("sum", "prod", "max", "min")},
    "argmax": functools.partial(_arg_extreme, "gt"),
    "argmin": functools.partial(_arg_extreme, "lt"),
    # equinox's reductions over lanes: the lane itself is all there is
    "unvmap_any": functools.partial(_reduce_all, "or"),
    "unvmap_all": functools.partial(_reduce_all, "and"),
    "unvmap_max": functools.partial(_reduce_all, "max"),
    "select_if_vmap": _select_if_vmap,
    "one_minus_square": _one_minus_square,
    "polynomial": _polynomial,
    "convert_element_type": _convert,
    "bitcast_convert_type": _bitcast,
    "lt_to": _less_total,
    "le_to": _less_equal_total,
    "eq_to": _equal_total,
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "slice": _slice,
    "pad": _pad,
    "iota": _iota,
    "empty": _zeros,
    "empty2": _zeros,
    "platform_index": _platform_index,
    "split": _split,
    "unstack": _unstack,
    "stack": _stack,
    "concatenate": _concatenate,
    "transpose": lambda graph, equation, value: [value.transpose(equation.params["permutation"])],
    "rev": lambda graph, equation, value: [np.flip(value, equation.params["dimensions"])],
    "tile": lambda graph, equation, value: [np.tile(value, equation.params["reps"])],
    "dot_general": _dot_general,
    "conv_general_dilated": _convolve,
}
