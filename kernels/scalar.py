"""Scalar programs: a function on arrays rewritten so that every variable is one value, to be kept in a register."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, Primitive  # pyright: ignore[reportPrivateImportUsage]
from jax.interpreters import partial_eval

from gradsolve_backend.kernels import scalar_dense, scalar_index, scalar_lapack, scalar_rules
from gradsolve_backend.kernels.scalar_emit import emitted, live, size_of
from gradsolve_backend.kernels.scalar_graph import (
    LOOP,
    RESULT,
    Atom,
    Cell,
    Graph,
    NoScalarForm,
    Value,
    atoms,
    is_known,
    pack,
    settled,
)

__all__ = ["NoScalarForm", "ScalarProgram", "scalarise"]

LINEAR = scalar_dense.EQUATIONS | scalar_lapack.EQUATIONS  # estimates for what solves linear systems
UNROLL_LIMIT = 64  # iterations of a loop
_MOVES = frozenset(
    """broadcast_in_dim reshape squeeze slice transpose concatenate rev pad copy stop_gradient iota split expand_dims
    convert_element_type""".split()
)
SHARED = "gradsolve_shared"  # name of functions that are worth one copy, however often they are called
SPARSE = "gradsolve_sparse"  # name of functions whose zeros, if known while building, are zeros times anything, NaN too
SHARED_EQUATIONS = 300  # a shorter one is written out at each call
_DEAD_SHARE = 8  # equations made while building, per equation allowed in the end


@dataclass(frozen=True, eq=False)
class ScalarProgram:
    """A jaxpr of rank-0 equations that computes what an array jaxpr computes.

    `implode(eval_jaxpr(jaxpr, explode(*arrays)))` are the original outputs. Besides elementwise primitives the jaxpr
    holds one more kind of equation, the look-up: `dynamic_slice` of one element of a rank-1 table (an input or a
    constant of the jaxpr) at a rank-0 index, which clamps to the table, and the `squeeze` of its result. A loop whose
    number of iterations is not known is an equation `while` over such jaxprs.

    **Fields:**

    - `jaxpr`: no calls, no other control flow; all inputs and outputs rank 0, but for tables.
    - `tables`: per original input, whether it is passed whole as a rank-1 array (or else element by element).
    - `equations`: how many equations `jaxpr` has, and the programs that it calls, each counted once.
    - `calls`: programs that it calls, by an equation `gradsolve_shared` with the parameter `program` each time.
    - `in_avals`, `out_avals`: shapes and dtypes of the original inputs and outputs.
    """

    jaxpr: ClosedJaxpr
    tables: tuple[bool, ...]
    equations: int
    calls: tuple["ScalarProgram", ...]
    in_avals: tuple[jax.ShapeDtypeStruct, ...]
    out_avals: tuple[jax.ShapeDtypeStruct, ...]

    def explode(self, *arrays: Any) -> list[Any]:
        """The scalar inputs of the original inputs, row-major; a table stays one rank-1 array."""
        scalars = []
        for array, whole in zip(arrays, self.tables, strict=True):
            flat = jnp.reshape(array, (-1,))
            scalars += [flat] if whole else [flat[k] for k in range(flat.size)]
        return scalars

    def implode(self, scalars: Iterable[Any]) -> list[Any]:
        """The original outputs of the scalar outputs."""
        source = iter(scalars)
        return [_assemble([next(source) for _ in range(size_of(aval))], aval) for aval in self.out_avals]


def _assemble(scalars: Sequence[Any], aval: jax.ShapeDtypeStruct) -> jax.Array:
    flat = [jnp.asarray(scalar, aval.dtype) for scalar in scalars]
    return jnp.stack(flat).reshape(aval.shape) if flat else jnp.zeros(aval.shape, aval.dtype)


def scalarise(
    closed: ClosedJaxpr, *, limit: int = 20000, table_inputs: Sequence[bool] | None = None, calls: bool = True
) -> ScalarProgram:
    """Rewrite a jaxpr on arrays as a scalar program.

    **Arguments:**

    - `closed`: what `jax.make_jaxpr` gives for the function; derivatives are taken before, on arrays.
    - `limit`: the largest number of scalar equations.
    - `table_inputs`: which inputs may be kept whole in memory, to be read at an index known only at run time.
      Others are exploded, and such an index selects among at most 64 elements. By default all may.
    - `calls`: whether it may call other programs.

    **Returns:** the program. Sums and contractions run left to right, so it agrees with the original to round-off.
    Two liberties are taken: x + 0 is x, whatever the sign of a zero x; and a zero of a matrix that is a constant of
    `closed` leaves its term out, where 0 * NaN would be NaN.

    **Raises:** `NoScalarForm`, whose text names the primitive or size that stands in the way.
    """
    about = scalar_equations(closed.jaxpr)
    if about > 1.2 * limit:
        raise NoScalarForm(f"the scalar program would have about {about} equations and the limit is {limit}")
    avals: list[Any] = [variable.aval for variable in closed.jaxpr.invars]
    for aval in avals:
        _check_dtype(aval.dtype)
    may_be_table = [True] * len(avals) if table_inputs is None else list(table_inputs)
    graph = Graph([size_of(aval) for aval in avals], may_be_table, _DEAD_SHARE * limit, calls)
    inputs = [_cells(k, aval) for k, aval in enumerate(avals)]
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    outputs = _evaluate(graph, jaxpr, closed.consts, inputs)
    results = [atom for value in outputs for atom in atoms(value).reshape(-1).tolist()]
    if sum(node.op.name != RESULT for node in live(results)) > limit:  # before they are traced, which takes longer
        raise NoScalarForm(f"the scalar program has more than {limit} equations, which is the limit")
    program, tables = emitted(graph, results, avals)
    called = tuple({e.params["program"]: None for e in program.jaxpr.eqns if e.primitive is shared_p})
    equations = _written(program.jaxpr) + sum(inner.equations for inner in called)
    if equations > limit:
        raise NoScalarForm(f"the scalar program has {equations} equations and the limit is {limit}")
    structs = [tuple(_struct(v.aval) for v in vs) for vs in (closed.jaxpr.invars, closed.jaxpr.outvars)]
    return ScalarProgram(program, tables, equations, called, *structs)


def _written(jaxpr: Any) -> int:
    """Equations of a scalar program, those of loops included."""
    inner = [
        e.params[key].jaxpr for e in jaxpr.eqns if e.primitive.name == LOOP for key in ("cond_jaxpr", "body_jaxpr")
    ]
    return len(jaxpr.eqns) + sum(map(_written, inner))


shared_p = Primitive(SHARED)
shared_p.multiple_results = True
shared_p.def_abstract_eval(lambda *_, program: [v.aval for v in program.jaxpr.jaxpr.outvars])


def scalar_equations(jaxpr: Any, seen: set[Any] | None = None) -> int:
    """About how many scalar equations a jaxpr on arrays is, without writing them; what is shared counts once."""
    seen = set() if seen is None else seen
    return sum(_equations(equation, seen) for equation in jaxpr.eqns)


def _equations(equation: Any, seen: set[Any]) -> int:
    name, params = equation.primitive.name, dict(equation.params)
    if name == "custom_linear_solve":
        params = {"solve": params["jaxprs"].solve}
    inner = [getattr(j, "jaxpr", j) for j in jax.tree.leaves(params) if hasattr(j, "eqns")]
    if inner:
        if SHARED in str(equation.params.get("name", "")):
            inner = [j for j in inner if j not in seen]
            seen.update(inner)
        count = equation.params.get("length", 1) * sum(scalar_equations(j, seen) for j in inner)
        return count // 10 if SPARSE in str(equation.params.get("name", "")) else count  # most of a Jacobian is zero
    if name in LINEAR:
        return LINEAR[name](equation)
    size = sum(size_of(v.aval) for v in equation.outvars)
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return 3 * size * int(np.prod([equation.invars[0].aval.shape[i] for i in contracted], dtype=int))
    if name.startswith("reduce_"):
        return size_of(equation.invars[0].aval)
    return 0 if name in _MOVES else size


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _check_dtype(dtype: Any) -> None:
    if jnp.issubdtype(dtype, np.complexfloating):
        raise NoScalarForm("complex values have no scalar form")
    if not isinstance(dtype, np.dtype) or dtype == jax.dtypes.float0:
        raise NoScalarForm(f"values of dtype {dtype} have no scalar form")


def _cells(source: int, aval: Any) -> Value:
    cells = [Cell(source, k, aval.dtype) for k in range(size_of(aval))]
    return pack(cells, aval.shape, aval.dtype)


# ---- interpretation: arrays of atoms instead of arrays ---------------------------------------------


def _evaluate(graph: Graph, jaxpr: Any, consts: Sequence[Any], values: Sequence[Value]) -> list[Value]:
    environment: dict[Any, Value] = dict(zip(jaxpr.invars, values, strict=True))
    for variable, const in zip(jaxpr.constvars, consts, strict=True):
        _check_dtype(variable.aval.dtype)
        environment[variable] = np.asarray(const, variable.aval.dtype)

    def read(atom: Any) -> Value:
        if not isinstance(atom, Literal):
            return environment[atom]
        aval: Any = atom.aval
        return np.asarray(atom.val, aval.dtype)

    for equation in jaxpr.eqns:
        results = _apply(graph, equation, [read(atom) for atom in equation.invars])
        environment.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _apply(graph: Graph, equation: Any, values: Sequence[Value]) -> list[Value]:
    name = equation.primitive.name
    rule = _RULES.get(name)
    if any(jnp.issubdtype(variable.aval.dtype, np.complexfloating) for variable in equation.outvars):
        raise NoScalarForm("complex values have no scalar form")
    results = None if rule is None else rule(graph, equation, *values)
    if results is None:
        raise NoScalarForm(f"primitive `{name}` has no scalar form")
    return [settled(value, out.aval.dtype) for value, out in zip(results, equation.outvars, strict=True)]


def _evaluate_inner(graph: Graph, inner: Any, values: Sequence[Value]) -> list[Value]:
    if isinstance(inner, ClosedJaxpr):  # older versions of jax have open ones too
        return _evaluate(graph, inner.jaxpr, inner.consts, values)
    return _evaluate(graph, inner, (), values)


def _call(graph: Graph, equation: Any, *values: Value) -> list[Value]:
    params = equation.params
    inner = next(params[key] for key in ("call_jaxpr", "jaxpr", "fun_jaxpr", "call") if key in params)
    name = str(params.get("name", ""))
    if SPARSE in name and not graph.sparse:
        graph.sparse = True
        results = _evaluate_inner(graph, inner, values)
        graph.sparse = False
        return results
    program = _shared(graph, inner) if SHARED in name and graph.calls and not graph.sparse else None
    if program is None:
        return _evaluate_inner(graph, inner, values)
    operands = [atom for value in values for atom in atoms(value).reshape(-1).tolist()]
    avals: list[Any] = [v.aval for v in program.jaxpr.jaxpr.outvars]
    dtypes = [aval.dtype for aval in avals]
    results = iter(graph.several(SHARED, {"program": program}, operands, dtypes, shared_p))
    return [pack([next(results) for _ in range(size_of(aval))], aval.shape, aval.dtype) for aval in program.out_avals]


def _shared(graph: Graph, inner: Any) -> ScalarProgram | None:
    """The program of a function that is called; None if it is short, or reads tables, which are not handed on."""
    if inner not in graph.programs:
        program = scalarise(inner, limit=graph.limit)
        long = program.equations >= SHARED_EQUATIONS
        graph.programs[inner] = program if long and not any(program.tables) else None
    return graph.programs[inner]


def _linear_solve(graph: Graph, equation: Any, *values: Value) -> list[Value]:
    """A linear system with its own way to solve it."""
    lengths, jaxprs = equation.params["const_lengths"], equation.params["jaxprs"]
    before, right = lengths.matvec + lengths.vecmat, sum(lengths)
    return _evaluate_inner(graph, jaxprs.solve, [*values[before : before + lengths.solve], *values[right:]])


def _expand(graph: Graph, equation: Any, *values: Value) -> list[Value]:
    """A primitive that carries its own definition, as `searchsorted` does in newer versions of jax."""
    primitive = equation.params["_prim"]
    expand = lambda *arrays: primitive.expand(*jax.tree.unflatten(primitive.in_tree, arrays))  # noqa: E731
    return _traced(graph, expand, equation, values)


def _traced(graph: Graph, function: Callable, equation: Any, values: Sequence[Value]) -> list[Value]:
    """A function of arrays like the inputs of an equation."""
    return _evaluate_inner(graph, jax.make_jaxpr(function)(*(_struct(atom.aval) for atom in equation.invars)), values)


def _implementation(graph: Graph, equation: Any, *values: Value) -> list[Value]:
    """A primitive that Equinox made of a function.

    A linear solve inside a derivative would raise an error where it fails; here the result is then not finite.
    """
    params = dict(equation.params)
    if equation.primitive.name == "linear_solve" and params["static"][-1] is True:
        params["static"] = [*params["static"][:-1], False]
    return _traced(graph, functools.partial(equation.primitive.impl, **params), equation, values)


def _cond(graph: Graph, equation: Any, index: Value, *values: Value) -> list[Value]:
    """A known index takes its branch; else all branches are evaluated, and what was not asked for is dropped."""
    branches = equation.params["branches"]
    if is_known(index):
        return _evaluate_inner(graph, branches[min(max(int(index), 0), len(branches) - 1)], values)
    outs = zip(*(_branch(graph, branch, index.item(), k, values) for k, branch in enumerate(branches)), strict=True)
    return [_select_case(graph, index.item(), cases, v.aval) for cases, v in zip(outs, equation.outvars, strict=True)]


def _branch(graph: Graph, branch: Any, index: Atom, k: int, values: Sequence[Value]) -> list[Value]:
    """A branch, whose loops do not begin unless it is taken: on other values they might never end."""
    outer, taken = graph.condition, graph.call("eq", index, index.dtype.type(k))
    graph.condition = taken if outer is None else graph.call("and", outer, taken)
    results = _evaluate_inner(graph, branch, values)
    graph.condition = outer
    return results


def _select_case(graph: Graph, index: Atom, cases: Sequence[Value], aval: Any) -> Value:
    columns = np.stack([atoms(case) for case in cases]).reshape(len(cases), size_of(aval))
    return pack([scalar_index.select_tree(graph, column, [index]) for column in columns.T], aval.shape, aval.dtype)


def _scan(graph: Graph, equation: Any, *values: Value) -> list[Value]:
    params, length = equation.params, equation.params["length"]
    if length > UNROLL_LIMIT:
        raise NoScalarForm(f"a scan of {length} iterations has no scalar form: at most {UNROLL_LIMIT} are unrolled")
    if "num_consts" in params:
        consts, carried = params["num_consts"], params["num_carry"]
    else:
        consts, carried, _ = map(len, params["ft_in"].unpack())
    carry = list(values[consts : consts + carried])
    rows = {}
    for k in reversed(range(length)) if params["reverse"] else range(length):
        row = [column[k, ...] for column in values[consts + carried :]]
        out = _evaluate_inner(graph, params["jaxpr"], [*values[:consts], *carry, *row])
        carry, rows[k] = out[:carried], out[carried:]
    avals: list[Any] = [variable.aval for variable in equation.outvars[carried:]]
    return carry + [_stack_rows([rows[k][j] for k in range(length)], aval) for j, aval in enumerate(avals)]


def _stack_rows(rows: Sequence[Value], aval: Any) -> Value:
    flat = [atom for row in rows for atom in atoms(row).reshape(-1).tolist()]
    return pack(flat, aval.shape, aval.dtype)


def _while(graph: Graph, equation: Any, *values: Value) -> list[Value]:
    """Written out as long as it is known to go on; from where that depends on values, or takes long, a loop."""
    params = equation.params
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    cond, body, carry = list(values[:first]), list(values[first:second]), list(values[second:])
    start, avals = carry, [v.aval for v in equation.outvars]
    for _ in range(UNROLL_LIMIT + 1):
        (going,) = _evaluate_inner(graph, params["cond_jaxpr"], [*cond, *carry])
        if not is_known(going):
            return _loop(graph, (params["cond_jaxpr"], cond), (params["body_jaxpr"], body), carry, avals)
        if not going:
            return carry
        carry = _evaluate_inner(graph, params["body_jaxpr"], [*body, *carry])
    return _loop(graph, (params["cond_jaxpr"], cond), (params["body_jaxpr"], body), start, avals)


def _loop(graph: Graph, cond: tuple[Any, list], body: tuple[Any, list], carry: list[Value], avals: list[Any]) -> list:
    """A loop over scalar programs, which find their arrays of constants and inputs as tables.

    Its first operand says whether it may begin.
    """
    programs, sources = [], []
    operands: list[Any] = [np.bool_(True) if graph.condition is None else graph.condition]
    for inner, consts in (cond, body):
        tables = [scalar_index.whole_table(graph, value) for value in consts]
        may = [source is not None for source in tables]
        program = scalarise(inner, limit=graph.limit, table_inputs=[*may, *[False] * len(carry)], calls=False)
        programs.append(program)
        used = list(zip(tables, program.tables, consts, strict=False))
        sources.append(tuple(source if whole else None for source, whole, _ in used))
        operands += [a for _, whole, value in used if not whole for a in atoms(value).reshape(-1).tolist()]
    operands += [a for value in carry for a in atoms(value).reshape(-1).tolist()]
    dtypes = [np.dtype(aval.dtype) for aval in avals for _ in range(size_of(aval))]
    results = iter(graph.several(LOOP, {"programs": tuple(programs), "sources": tuple(sources)}, operands, dtypes))
    return [pack([next(results) for _ in range(size_of(aval))], aval.shape, aval.dtype) for aval in avals]


_CALLS = """
pjit jit closed_call core_call call remat remat2 checkpoint custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr
custom_vmap_call composite
""".split()

_RULES: dict[str, Callable[..., list[Value] | None]] = {
    **scalar_rules.RULES,
    **scalar_index.RULES,
    **scalar_dense.RULES,
    **scalar_lapack.RULES,
    **dict.fromkeys(_CALLS, _call),
    "call_hi_primitive": _expand,
    "linear_solve": _implementation,
    "maybe_set": _implementation,
    "custom_linear_solve": _linear_solve,
    "cond": _cond,
    "scan": _scan,
    "while": _while,
}
