"""The graph a scalar program is built in: one node per equation, constants folded, equal equations shared."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives


class NoScalarForm(Exception):
    """A program cannot be written with one value per lane; the text is a sentence that says why."""


@dataclass(frozen=True, eq=False, slots=True)
class Op:
    """A primitive with its parameters.

    `primitive` is None for a look-up in the table `params["source"]`, and for result `params["index"]` of a call.
    """

    name: str
    primitive: Any
    params: dict[str, Any]


@dataclass(frozen=True, eq=False, slots=True)
class Cell:
    """One element, in row-major order, of the program input number `source`."""

    source: int
    element: int
    dtype: np.dtype


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """One scalar equation; `order` counts creation, so operands come before their users."""

    op: Op
    operands: "tuple[Atom, ...]"
    dtype: np.dtype
    order: int


Atom: TypeAlias = Node | Cell | np.generic
# All values of one array: numeric dtype when every element is known, dtype object (of atoms) otherwise.
Value: TypeAlias = np.ndarray


def is_known(value: Value | Atom) -> bool:
    """Is every element known while the program is being built?"""
    return isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.dtype != object)


def atoms(value: Value) -> Value:
    """The same array with dtype object, whose known elements are numpy scalars of their own dtype."""
    if value.dtype == object:
        return value
    return _filled(value.reshape(-1), value.shape)


def pack(elements: Sequence[Atom], shape: tuple[int, ...], dtype: np.dtype) -> Value:
    """An array of the given elements in row-major order, of numeric dtype if all of them are known."""
    if all(isinstance(element, np.generic) for element in elements):
        return np.array(elements, dtype).reshape(shape)
    return _filled(elements, shape)


def settled(value: Value, dtype: np.dtype) -> Value:
    """The same array, of numeric dtype if all of its elements turn out to be known."""
    if value.dtype == object and all(isinstance(element, np.generic) for element in value.flat):
        return pack(value.reshape(-1).tolist(), value.shape, dtype)
    return value


def _filled(elements: Iterable[Any], shape: tuple[int, ...]) -> Value:
    out = np.empty(shape, object)
    flat = out.reshape(-1)
    for k, element in enumerate(elements):
        flat[k] = element
    return out


def same(a: Atom, b: Atom) -> bool:
    """Are the two atoms one value (bit by bit, when known)?"""
    return a is b or (isinstance(a, np.generic) and isinstance(b, np.generic) and _key(a) == _key(b))


def _key(atom: Atom) -> Any:
    return (type(atom), atom.tobytes()) if isinstance(atom, np.generic) else atom


def is_inexact(dtype: Any) -> bool:
    """Is this a floating dtype, bfloat16 and its kin included?"""
    return jnp.issubdtype(dtype, np.inexact)


def largest(dtype: Any) -> int:
    """The largest number of an integer dtype."""
    return int(np.iinfo(dtype).max)


# ---- values known while building -------------------------------------------------------------------
# Only operations that numpy rounds exactly as XLA does are here; the rest (exp, sin, ...) stay equations.


def _int_safe(divide: Callable[..., Any]) -> Callable[..., Any]:
    def apply(a: Any, b: Any, **_: Any) -> Any:
        # numpy and XLA disagree on integer division by zero: leave it to run time
        return None if not is_inexact(a.dtype) and np.any(b == 0) else divide(a, b)

    return apply


def _divide(a: Any, b: Any) -> Any:
    return a / b if is_inexact(a.dtype) else (a - np.fmod(a, b)) // b  # towards zero


def _convert(x: Any, new_dtype: Any, **_: Any) -> Any:
    if is_inexact(x.dtype) and jnp.issubdtype(new_dtype, np.integer):
        info = np.iinfo(new_dtype)
        if not np.all((x > float(info.min)) & (x < float(info.max))):
            return None  # outside the range numpy wraps and XLA saturates
    return x.astype(new_dtype)


def _bitcast(x: Any, new_dtype: Any, **_: Any) -> Any:
    return x.view(new_dtype) if np.dtype(new_dtype).itemsize == x.dtype.itemsize else None


def _integer_pow(x: Any, y: int, **_: Any) -> Any:
    return None if is_inexact(x.dtype) or y < 0 else functools.reduce(np.multiply, [x] * y, x.dtype.type(1))


def _shift_right_logical(x: Any, by: Any, **_: Any) -> Any:
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    return np.right_shift(x.view(unsigned), by.view(unsigned)).view(x.dtype)


def _select_n(which: Any, *cases: Any, **_: Any) -> Any:
    return np.choose(np.asarray(which).astype(np.intp), [np.asarray(case) for case in cases])


_NUMPY = dict(
    add=np.add,
    add_any=np.add,
    sub=np.subtract,
    mul=np.multiply,
    neg=np.negative,
    abs=np.abs,
    sign=np.sign,
    square=np.square,
    sqrt=np.sqrt,
    floor=np.floor,
    ceil=np.ceil,
    max=np.maximum,
    min=np.minimum,
    eq=np.equal,
    ne=np.not_equal,
    lt=np.less,
    le=np.less_equal,
    gt=np.greater,
    ge=np.greater_equal,
    xor=np.bitwise_xor,
    nextafter=np.nextafter,
    is_finite=np.isfinite,
    population_count=np.bitwise_count,
    shift_left=np.left_shift,
    shift_right_arithmetic=np.right_shift,
)
_NUMPY |= {"and": np.bitwise_and, "or": np.bitwise_or, "not": np.invert}


def _without_params(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands, **_: function(*operands)


FOLD: dict[str, Callable[..., Any]] = {name: _without_params(function) for name, function in _NUMPY.items()} | {
    "div": _int_safe(_divide),
    "rem": _int_safe(np.fmod),
    "convert_element_type": _convert,
    "bitcast_convert_type": _bitcast,
    "integer_pow": _integer_pow,
    "shift_right_logical": _shift_right_logical,
    "select_n": _select_n,
    "clamp": lambda low, x, high, **_: np.minimum(np.maximum(x, low), high),
}


def fold(op: Op, operands: Sequence[Any], dtype: np.dtype) -> Any:
    """The result of `op` on known operands (arrays or numpy scalars), or None where it stays an equation."""
    rule = FOLD.get(op.name)
    with np.errstate(all="ignore"):
        out = None if rule is None else rule(*operands, **op.params)
    return None if out is None else np.asarray(out, dtype)


# ---- equations that need not be made ---------------------------------------------------------------


def _is(atom: Atom, number: int) -> bool:
    return isinstance(atom, np.generic) and bool(atom == number)


def _add(graph: "Graph", a: Atom, b: Atom) -> Atom | None:
    # exact but for the sign of a zero: x + 0.0 is 0.0 where x is -0.0
    return b if _is(a, 0) else a if _is(b, 0) else None


def _multiply(graph: "Graph", a: Atom, b: Atom) -> Atom | None:
    if _is(a, 1) or _is(b, 1):
        return b if _is(a, 1) else a
    if (graph.sparse or not is_inexact(a.dtype)) and (_is(a, 0) or _is(b, 0)):  # elsewhere x may be NaN: x * 0 stays
        return a.dtype.type(0)
    return None


def _logical(neutral: bool) -> Callable[..., Atom | None]:
    def simplify(graph: "Graph", a: Atom, b: Atom) -> Atom | None:
        if same(a, b):
            return a
        if a.dtype != bool or not (is_known(a) or is_known(b)):
            return None
        known, other = (a, b) if is_known(a) else (b, a)
        return other if bool(known) is neutral else known

    return simplify


def _less(graph: "Graph", a: Atom, b: Atom) -> Atom | None:
    # an index made of a predicate, as `lax.cond` does: (int(p) < 1) is (not p)
    if _is(b, 1) and isinstance(a, Node) and a.op.name == "convert_element_type" and a.operands[0].dtype == bool:
        return graph.call("not", a.operands[0])
    return None


def _select(graph: "Graph", which: Atom, *cases: Atom) -> Atom | None:
    if isinstance(which, np.generic):
        return cases[int(which)]
    if all(same(cases[0], case) for case in cases[1:]):
        return cases[0]
    if not isinstance(which, Node) or len(cases) != 2:
        return None
    if which.op.name == "not":
        return graph.call("select_n", which.operands[0], cases[1], cases[0])
    return cases[0] if _changes_nothing(which, *cases) else None


def _changes_nothing(which: Node, x: Atom, replaced: Atom) -> bool:
    """Is this "NaN where x is NaN", or "zero where x is zero" (which may change the sign of a zero)?"""
    if not (isinstance(replaced, np.generic) and is_inexact(replaced.dtype)) or which.operands[0] is not x:
        return False
    if which.op.name == "ne":
        return which.operands[1] is x and bool(np.isnan(replaced))
    return which.op.name == "eq" and _is(which.operands[1], 0) and _is(replaced, 0)


SIMPLIFY: dict[str, Callable[..., Atom | None]] = {
    "add": _add,
    "add_any": _add,
    "sub": lambda graph, a, b: a if _is(b, 0) else None,
    "mul": _multiply,
    "div": lambda graph, a, b: a if _is(b, 1) or (graph.sparse and _is(a, 0)) else None,
    "and": _logical(True),
    "or": _logical(False),
    "max": lambda graph, a, b: a if same(a, b) else None,
    "min": lambda graph, a, b: a if same(a, b) else None,
    "lt": _less,
    "select_n": _select,
}


# ---- the graph -------------------------------------------------------------------------------------

LOOK_UP, LOOP, RESULT = "look_up", "while", "result"
_TEMPLATES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "add": (jax.lax.add, (np.float32, np.float32)),
    "sub": (jax.lax.sub, (np.float32, np.float32)),
    "mul": (jax.lax.mul, (np.float32, np.float32)),
    "div": (jax.lax.div, (np.float32, np.float32)),
    "abs": (jax.lax.abs, (np.float32,)),
    "max": (jax.lax.max, (np.float32, np.float32)),
    "min": (jax.lax.min, (np.float32, np.float32)),
    "and": (jax.lax.bitwise_and, (np.bool_, np.bool_)),
    "or": (jax.lax.bitwise_or, (np.bool_, np.bool_)),
    "xor": (jax.lax.bitwise_xor, (np.bool_, np.bool_)),
    "not": (jax.lax.bitwise_not, (np.bool_,)),
    "eq": (jax.lax.eq, (np.float32, np.float32)),
    "ne": (jax.lax.ne, (np.float32, np.float32)),
    "lt": (jax.lax.lt, (np.float32, np.float32)),
    "le": (jax.lax.le, (np.float32, np.float32)),
    "gt": (jax.lax.gt, (np.float32, np.float32)),
    "ge": (jax.lax.ge, (np.float32, np.float32)),
    "clamp": (jax.lax.clamp, (np.float32, np.float32, np.float32)),
    "select_n": (jax.lax.select_n, (np.bool_, np.float32, np.float32)),
}
_PREDICATES = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})


@functools.cache
def _template(name: str) -> tuple[Any, dict[str, Any]]:
    # parameters differ between versions of jax, so they are read off an equation
    function, dtypes = _TEMPLATES[name]
    (equation,) = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct((), dtype) for dtype in dtypes)).jaxpr.eqns
    return equation.primitive, equation.params


@functools.cache
def _conversion(dtype: np.dtype) -> dict[str, Any]:
    source = np.float32 if dtype != np.float32 else np.int32
    closed = jax.make_jaxpr(lambda x: jax.lax.convert_element_type(x, dtype))(jax.ShapeDtypeStruct((), source))
    return closed.jaxpr.eqns[0].params


@dataclass(eq=False)
class Graph:
    """Scalar equations, each made once.

    **Arguments:** `sizes` counts the elements of each program input; `may_be_table` says which may be kept whole;
    `limit` is the largest number of equations, dead ones included, before building is given up; `calls`: may some call.
    """

    sizes: Sequence[int]
    may_be_table: Sequence[bool]
    limit: int
    calls: bool = True
    tables: list[np.ndarray] = field(default_factory=list)
    programs: dict[Any, Any] = field(default_factory=dict)  # of functions that are called, by their jaxpr
    condition: "Atom | None" = None  # under which what is being built is used, inside the branch of a conditional
    sparse: bool = False  # whether zeros that are known while building are zeros whatever they are multiplied by
    _ops: dict[Any, Op] = field(default_factory=dict)
    _nodes: dict[Any, Node] = field(default_factory=dict)

    @property
    def inputs(self) -> int:
        """The number of program inputs."""
        return len(self.sizes)

    def op(self, primitive: Any, params: dict[str, Any]) -> Op:
        """The one `Op` of this primitive and these parameters."""
        return self._shared_op(primitive.name, primitive, params)

    def _shared_op(self, name: str, primitive: Any, params: dict[str, Any]) -> Op:
        key = (name, tuple(params.items()))
        return self._ops.setdefault(key, Op(name, primitive, params))

    def apply(self, op: Op, operands: tuple[Atom, ...], dtype: np.dtype) -> Atom:
        """The atom `op(*operands)`: a constant, an existing atom or a new node."""
        if all(isinstance(operand, np.generic) for operand in operands):
            known = fold(op, operands, dtype)
            if known is not None:
                return known[()]
        rule = SIMPLIFY.get(op.name)
        simpler = None if rule is None else rule(self, *operands)
        return self._node(op, operands, dtype) if simpler is None else simpler

    def _node(self, op: Op, operands: tuple[Atom, ...], dtype: np.dtype) -> Node:
        key = (op, *map(_key, operands))
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Node(op, operands, dtype, len(self._nodes))
            if len(self._nodes) > self.limit:
                raise NoScalarForm(f"the scalar program grew beyond {self.limit} equations while it was being built")
        return node

    def call(self, name: str, *operands: Atom) -> Atom:
        """Apply one of the everyday operations by name; operands have one dtype, as `jax.lax` wants it."""
        primitive, params = _template(name)
        dtype = np.dtype(bool) if name in _PREDICATES else operands[-1].dtype
        return self.apply(self._shared_op(name, primitive, params), operands, dtype)

    def convert(self, atom: Atom, dtype: Any) -> Atom:
        """The atom in another dtype."""
        dtype = np.dtype(dtype)
        if atom.dtype == dtype:
            return atom
        op = self._shared_op("convert_element_type", primitives.convert_element_type_p, _conversion(dtype))
        return self.apply(op, (atom,), dtype)

    def look_up(self, source: int, index: Atom, dtype: np.dtype) -> Atom:
        """The element of a table at a traced index; `source` is an input, or `constant_table`."""
        return self._node(self._shared_op(LOOK_UP, None, {"source": source}), (index,), dtype)

    def several(
        self, name: str, params: dict[str, Any], operands: Sequence[Atom], dtypes: Sequence[Any], primitive: Any = None
    ) -> list[Atom]:
        """The results, of these dtypes, of an operation whose own equations are no part of this graph."""
        made = self._node(self._shared_op(name, primitive, params), tuple(operands), np.dtype(bool))
        ops = [self._shared_op(RESULT, None, {"index": k}) for k in range(len(dtypes))]
        return [self._node(op, (made,), np.dtype(dtype)) for op, dtype in zip(ops, dtypes, strict=True)]

    def constant_table(self, flat: np.ndarray) -> int:
        """Register a rank-1 constant as a table and return its source number."""
        for k, table in enumerate(self.tables):
            if table.dtype == flat.dtype and table.tobytes() == flat.tobytes():
                return self.inputs + k
        self.tables.append(flat)
        return self.inputs + len(self.tables) - 1
