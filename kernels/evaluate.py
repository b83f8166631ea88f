"""How lane functions are evaluated on all lanes: as array programs, or as scalar programs.

Array lanes: `jax.vmap` of the function. Scalar lanes: each element of an array is a value of its own, an array over
lanes, and the function is its scalar program; what XLA makes of it is one fused loop over lanes. A loop handles a value
as a tree of arrays and does not know which of the two it is.

A value that is the same for all lanes, as times are where steps are constant, may be without their axes: it is shared.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gradsolve_backend.kernels import cuts
from gradsolve_backend.kernels.forms import scalar_program
from gradsolve_backend.kernels.lanes import Flags, over, spread, total
from gradsolve_backend.kernels.products import arranged
from gradsolve_backend.kernels.scalar import ScalarProgram
from gradsolve_backend.kernels.shared import differing_outputs
from gradsolve_backend.kernels.solve import At, Solve
from gradsolve_backend.kernels.trace import LaneFunction

Shape = tuple[int, ...]


def shaped(scalar: bool, lead: Shape, aval: Any) -> Any:
    """The arrays that hold a value with these leading axes."""
    if not scalar or aval.shape == ():
        return jax.ShapeDtypeStruct(lead + aval.shape, aval.dtype)
    return (jax.ShapeDtypeStruct(lead, aval.dtype),) * aval.size


def explode(x: Any, own: int) -> Any:
    """An array as the tuple of its elements over the last `own` axes; one without such axes as it is."""
    if own == 0:
        return x
    flat = flattened(x, own)
    return tuple(flat[..., i] for i in range(flat.shape[-1]))


def flattened(x: Any, own: int) -> Any:
    """An array with its last `own` axes as one; there may be no lanes at all, which a `reshape` to -1 does not take."""
    lead, shape = x.shape[: x.ndim - own], x.shape[x.ndim - own :]
    return x.reshape((*lead, math.prod(shape)))


def implode(value: Any, aval: Any, lead: Shape) -> Any:
    """The array of a tuple of elements."""
    if not isinstance(value, tuple):
        return value
    if not value:
        return jnp.zeros(lead + aval.shape, aval.dtype)
    return jnp.stack(value, axis=-1).reshape(lead + aval.shape)


@dataclass(frozen=True)
class AbstractLanes(abc.ABC):
    """The lanes of a call: sizes of its levels, which operands have their axes, the operands.

    The `columns` of linear values are further axes in front of those of the lanes.
    """

    solve: Solve
    sizes: Shape
    flags: Flags  # per level, per operand
    operands: list[Any]

    scalar = False

    def enter(self, x: Any, aval: Any) -> Any:
        """An array with leading axes as a value."""
        return explode(x, len(aval.shape)) if self.scalar else x

    def leave(self, value: Any, aval: Any, lead: Shape) -> Any:
        """The array of a value."""
        return implode(value, aval, lead) if self.scalar else value

    def zeros(self, lead: Shape, aval: Any) -> Any:
        """A value that is zero."""
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shaped(self.scalar, lead, aval))

    def shares(self, value: Any, aval: Any) -> bool:
        """Whether a value has no axes of lanes; one that nothing reads is None."""
        own = 0 if self.scalar else len(aval.shape)
        leaves = jax.tree.leaves(value)
        return bool(leaves) and leaves[0].ndim == own

    def full(self, value: Any, aval: Any) -> Any:
        """A value with the axes of lanes, also if all lanes share it."""
        if not self.shares(value, aval):
            return value
        return jax.tree.map(lambda x: jnp.broadcast_to(x, self.sizes + x.shape), value)

    def differs(self, function: LaneFunction, arguments: Sequence[Any]) -> list[bool]:
        """Which outputs of a lane function may differ from lane to lane."""
        return differing_outputs(function, [any(levels) for levels in self.sources(function, arguments)])

    def levels(self, columns: Sequence[Sequence[bool]]) -> Flags:
        """Flags by level from those by input."""
        return tuple(tuple(c[i] for c in columns) for i in range(len(self.sizes)))

    def sources(self, function: LaneFunction, arguments: Sequence[Any]) -> list[tuple[bool, ...]]:
        """For each input of a lane function, the levels that it has."""
        own = lambda s, v: (not self.shares(arguments[s], v.aval),) * len(self.sizes)  # noqa: E731
        pairs = zip(function.sources, function.invars, strict=True)
        return [own(s, v) if s >= 0 else self.operand_flags(~s) for s, v in pairs]

    def shelter(self, kept: Any) -> "AbstractLanes":
        """The lanes, with derivatives taken at the values of those that kept their step only."""
        return self

    def operand_flags(self, index: int) -> tuple[bool, ...]:
        """The levels that an operand has."""
        return tuple(level[index] for level in self.flags)

    @abc.abstractmethod
    def evaluate(self, function: LaneFunction, arguments: Sequence[Any], shared: Container[int] = ()) -> list[Any]:
        """A lane function on all lanes. Its outputs have the axes of lanes, but for those that are to be `shared`."""

    @abc.abstractmethod
    def push(self, function: LaneFunction, arguments: Sequence[Any], at: At, columns: int) -> Callable:
        """Tangents of the function's outputs from those of what `at` names: `(arguments, operands) -> outputs`."""

    @abc.abstractmethod
    def pull(
        self, function: LaneFunction, arguments: Sequence[Any], at: At, columns: int
    ) -> tuple[list[Any], Callable]:
        """The outputs, and the map from their cotangents: `outputs -> (arguments, operands)`."""

    @abc.abstractmethod
    def operand_zeros(self, lead: Shape, index: int) -> Any:
        """Zero cotangents of an operand, as `pull` gives them."""

    @abc.abstractmethod
    def operand_leave(self, value: Any, lead: Shape, index: int) -> Any:
        """The array of such a cotangent, with the levels of the operand itself."""


@dataclass(frozen=True)
class ArrayLanes(AbstractLanes):
    """Lanes by `jax.vmap`.

    `sheltered` marks lanes whose own values a derivative may be taken at. The others stand in for one of those: a
    linear solver that meets a value which is not finite raises for all lanes, whatever is done with the result.
    """

    sheltered: Any = None

    def _sheltered(self, function: LaneFunction, arguments: Sequence[Any]) -> tuple["ArrayLanes", list[Any]]:
        mask, count = self.sheltered, len(self.sizes)
        lane = jnp.unravel_index(jnp.argmax(mask.reshape(-1)), mask.shape)

        def stand_in(x: Any, has: Sequence[bool]) -> Any:
            if x is None or not any(has):
                return x
            full = spread(x, has, self.sizes)
            own = mask.reshape(mask.shape + (1,) * (full.ndim - count))
            return jnp.where(own, full, jax.lax.stop_gradient(full[lane]))

        own = dict(zip(function.sources, self.sources(function, arguments), strict=True))
        flags = [self.operand_flags(i) for i in range(len(self.operands))]
        operands = [stand_in(x, f) for x, f in zip(self.operands, flags, strict=True)]
        levels = tuple(tuple(any(f) for f in flags) for _ in self.sizes)
        lanes = dataclasses.replace(self, operands=operands, flags=levels, sheltered=None)
        return lanes, [stand_in(x, own.get(i, ())) for i, x in enumerate(arguments)]

    def shelter(self, kept: Any) -> AbstractLanes:
        return dataclasses.replace(self, sheltered=kept)

    def evaluate(self, function: LaneFunction, arguments: Sequence[Any], shared: Container[int] = ()) -> list[Any]:
        flags = self.levels(self.sources(function, arguments))
        axes = [None if i in shared else 0 for i in range(len(function.outputs))]
        out = over(function.run, flags, axes)(*function.inputs(arguments, self.operands))
        has = [any(level) for level in flags]
        return [x if i in shared else spread(x, has, self.sizes) for i, x in enumerate(out)]

    def _of(self, function: LaneFunction, arguments: Sequence[Any], at: At) -> tuple[Callable, tuple[Any, Any]]:
        def of(xs: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
            args, ops = list(arguments), list(self.operands)
            for i, x in zip(at.arguments, xs, strict=True):
                args[i] = x
            for i, x in zip(at.operands, operands, strict=True):
                ops[i] = x
            lanes = dataclasses.replace(self, operands=ops)
            if self.sheltered is not None:
                lanes, args = lanes._sheltered(function, args)
            return lanes.evaluate(function, args)

        return of, ([arguments[i] for i in at.arguments], [self.operands[i] for i in at.operands])

    def push(self, function: LaneFunction, arguments: Sequence[Any], at: At, columns: int) -> Callable:
        of, primals = self._of(function, arguments, at)
        return _columns(lambda *d: jax.jvp(of, primals, d)[1], columns)

    def pull(
        self, function: LaneFunction, arguments: Sequence[Any], at: At, columns: int
    ) -> tuple[list[Any], Callable]:
        of, primals = self._of(function, arguments, at)
        out, pulled = jax.vjp(of, *primals)
        return out, _columns(arranged(pulled), columns)

    def operand_zeros(self, lead: Shape, index: int) -> Any:
        x = self.operands[index]
        return jnp.zeros(lead + x.shape, x.dtype)

    def operand_leave(self, value: Any, lead: Shape, index: int) -> Any:
        return value


def _columns(function: Callable, count: int) -> Callable:
    """A linear function vmapped over columns; what it closes over is shared by them."""
    for _ in range(count):
        function = jax.vmap(function)
    return function


@dataclass(frozen=True)
class ScalarLanes(AbstractLanes):
    """Lanes of scalar programs. Operands are held element by element, and whole for look-ups."""

    elements: list[Any] = dataclasses.field(default_factory=list)
    tables: list[Any] = dataclasses.field(default_factory=list)

    scalar = True

    @staticmethod
    def of(solve: Solve, sizes: Shape, flags: Flags, operands: list[Any]) -> "ScalarLanes":
        """Lanes with these operands."""
        own = [len(a.shape) for a in solve.operands]
        elements = [explode(x, n) for x, n in zip(operands, own, strict=True)]
        tables = [flattened(x, n) for x, n in zip(operands, own, strict=True)]
        return ScalarLanes(solve, sizes, flags, operands, elements, tables)

    def _inputs(self, program: ScalarProgram, function: LaneFunction, arguments: Sequence[Any]) -> tuple[list, list]:
        """Inputs of a scalar program that come from a lane function's own, and the levels that each has."""
        inputs, levels = [], []
        for i, (s, own) in enumerate(zip(function.sources, self.sources(function, arguments), strict=True)):
            value = arguments[s] if s >= 0 else self.tables[~s] if program.tables[i] else self.elements[~s]
            leaves = _leaves(value)
            inputs += leaves
            levels += [own] * len(leaves)
        return inputs, levels

    def _run(
        self, program: ScalarProgram, inputs: Sequence[Any], flags: Flags, shared: Container[int] = ()
    ) -> list[Any]:
        closed = program.jaxpr
        sizes = (*[1] * (len(flags) - len(self.sizes)), *self.sizes)  # a column's axis is never missing
        stored = cuts.cuts(closed.jaxpr)
        axes = [None if i in shared else 0 for i, a in enumerate(program.out_avals) for _ in range(a.size)]
        out = over(lambda *x: cuts.evaluate(closed.jaxpr, closed.consts, x, stored), flags, axes)(*inputs)
        has = [any(level) for level in flags]
        rest = iter(x if axis is None else spread(x, has, sizes) for axis, x in zip(axes, out, strict=True))
        take = lambda a: next(rest) if a.shape == () else tuple(next(rest) for _ in range(a.size))  # noqa: E731
        return [take(a) for a in program.out_avals]

    def evaluate(self, function: LaneFunction, arguments: Sequence[Any], shared: Container[int] = ()) -> list[Any]:
        program = scalar_program(function)
        inputs, levels = self._inputs(program, function, arguments)
        return self._run(program, inputs, self.levels(levels), shared)

    def push(self, function: LaneFunction, arguments: Sequence[Any], at: At, columns: int) -> Callable:
        positions, roots = at.inputs(function)
        program = scalar_program(function, "push", positions)
        inputs, levels = self._inputs(program, function, arguments)
        every = [(True,) * len(self.sizes)] * len(at.arguments)
        own = [*every, *(self.operand_flags(i) for i in at.operands)]

        def pushed(d_arguments: Sequence[Any], d_operands: Sequence[Any]) -> list[Any]:
            tangents = [*d_arguments, *d_operands]
            values = [_leaves(tangents[r]) for r in roots]
            more = [own[r] for r, v in zip(roots, values, strict=True) for _ in v]
            flags = ((*[False] * len(inputs), *[True] * len(more)),) * columns + self.levels([*levels, *more])
            return self._run(program, [*inputs, *(x for v in values for x in v)], flags)

        return pushed

    def pull(
        self, function: LaneFunction, arguments: Sequence[Any], at: At, columns: int
    ) -> tuple[list[Any], Callable]:
        positions, roots = at.inputs(function)
        program = scalar_program(function, "pull", positions)
        inputs, levels = self._inputs(program, function, arguments)
        every = (True,) * len(self.sizes)

        def pulled(cotangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            more = [x for c in cotangents for x in _leaves(c)]
            flags = ((*[False] * len(inputs), *[True] * len(more)),) * columns
            flags += self.levels([*levels, *[every] * len(more)])
            found = self._run(program, [*inputs, *more], flags)
            return self._gathered(found, roots, at)

        return self.evaluate(function, arguments), pulled

    def _gathered(self, found: Sequence[Any], roots: Sequence[int], at: At) -> tuple[list, list]:
        """Cotangents of arguments and operands from those of inputs: added if several, None where there is none."""
        sums: list[Any] = [None] * (len(at.arguments) + len(at.operands))
        for r, x in zip(roots, found, strict=True):
            sums[r] = x if sums[r] is None else jax.tree.map(jnp.add, sums[r], x)
        return sums[: len(at.arguments)], sums[len(at.arguments) :]

    def operand_zeros(self, lead: Shape, index: int) -> Any:
        return self.zeros(lead + self.sizes, self.solve.operands[index])

    def operand_leave(self, value: Any, lead: Shape, index: int) -> Any:
        x = implode(value, self.solve.operands[index], lead + self.sizes)
        columns = [True] * len(lead)
        return total(x, [*columns, *[True] * len(self.sizes)], [*columns, *self.operand_flags(index)])


def _leaves(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
