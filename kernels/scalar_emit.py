"""Emission of scalar programs: the live part of a graph of scalar equations, traced."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun, primitives  # pyright: ignore[reportPrivateImportUsage]

from gradsolve_backend.kernels.scalar_graph import LOOK_UP, LOOP, RESULT, Atom, Cell, Graph, Node

__all__ = ["emitted", "live", "size_of"]


def size_of(aval: Any) -> int:
    """The number of elements."""
    return int(np.prod(aval.shape, dtype=int))


def live(results: Sequence[Atom]) -> list[Node]:
    """The nodes that the results need, in the order they were made."""
    seen: set[Node] = set()
    waiting = [atom for atom in results if isinstance(atom, Node)]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += [operand for operand in node.operands if isinstance(operand, Node)]
    return sorted(seen, key=lambda node: node.order)


def emitted(graph: Graph, results: Sequence[Atom], avals: Sequence[Any]) -> tuple[ClosedJaxpr, tuple[bool, ...]]:
    """The program of these results, and which inputs it takes whole."""
    nodes = live(results)
    used = {node.op.params["source"] for node in nodes if node.op.name == LOOK_UP}
    used |= {s for node in nodes if node.op.name == LOOP for part in node.op.params["sources"] for s in part}
    tables = tuple(k in used for k in range(len(avals)))
    structs = []
    for aval, whole in zip(avals, tables, strict=True):
        structs += [jax.ShapeDtypeStruct((size_of(aval),) if whole else (), aval.dtype)] * (
            1 if whole else size_of(aval)
        )
    trace = functools.partial(_trace, graph, nodes, results, tables)
    return jax.make_jaxpr(trace)(*structs), tables


def _trace(graph: Graph, nodes: Sequence[Node], results: Sequence[Atom], tables: Sequence[bool], *inputs: Any) -> Any:
    source = iter(inputs)
    parts = zip(tables, graph.sizes, strict=True)
    given = [next(source) if whole else [next(source) for _ in range(size)] for whole, size in parts]
    given += graph.tables
    values: dict[Atom, Any] = {}

    def read(atom: Atom) -> Any:
        if isinstance(atom, np.generic):
            return atom
        if atom not in values and isinstance(atom, Cell):
            whole = given[atom.source]
            values[atom] = _look_up(whole, np.int32(atom.element)) if tables[atom.source] else whole[atom.element]
        return values[atom]

    for node in nodes:
        operands = [read(operand) for operand in node.operands]
        if node.op.name == RESULT:
            values[node] = operands[0][node.op.params["index"]]
        elif node.op.name == LOOP:
            values[node] = _run_loop(given, node.op.params, operands)
        elif node.op.primitive is None:
            values[node] = _look_up(given[node.op.params["source"]], *operands)
        else:
            values[node] = node.op.primitive.bind(*operands, **node.op.params)
    return [read(atom) for atom in results]


def _run_loop(given: Sequence[Any], params: dict[str, Any], operands: Sequence[Any]) -> Any:
    """The loop of a node, as an equation `while`."""
    begins, *others = operands
    rest = iter(others)
    functions = []
    for program, sources in zip(params["programs"], params["sources"], strict=True):
        avals = program.in_avals[: len(sources)]
        consts = [
            x
            for source, aval in zip(sources, avals, strict=True)
            for x in ([next(rest) for _ in range(size_of(aval))] if source is None else [given[source]])
        ]
        functions.append(functools.partial(jaxpr_as_fun(program.jaxpr), *consts))
    (test, step), carry = functions, tuple(rest)
    structs = [v.aval.dtype for v in params["programs"][1].jaxpr.jaxpr.outvars]
    carry = tuple(jnp.asarray(x, dtype) for x, dtype in zip(carry, structs, strict=True))
    going = lambda c: test(*c)[0] if begins is np.True_ else begins & test(*c)[0]  # noqa: E731
    return jax.lax.while_loop(going, lambda c: tuple(step(*c)), carry)


def _look_up(table: Any, index: Any) -> Any:
    row = primitives.dynamic_slice_p.bind(table, index, slice_sizes=(1,))
    return primitives.squeeze_p.bind(row, dimensions=(0,))
