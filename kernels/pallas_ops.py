"""Scalar programs on blocks of lanes inside a Pallas kernel: an equation is one operation on arrays `(block,)`.

Triton gives some primitives a meaning of its own: the larger of a number and NaN is the number there, the negative of
zero is zero, and so on. Those are written in terms of others, so that a GPU and the interpreter agree.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton as plt

from gradsolve_backend.kernels.compat import Literal
from gradsolve_backend.kernels.pallas_again import Again
from gradsolve_backend.kernels.pallas_divide import quotient, root
from gradsolve_backend.kernels.pallas_order import in_order, read, users
from gradsolve_backend.kernels.pallas_power import power, takes_power
from gradsolve_backend.kernels.scalar import SHARED


@dataclass(frozen=True, eq=False)
class Table:
    """An array in memory that lanes read at an index of their own; `lanes` where each has its own array."""

    ref: Any
    length: int
    lanes: Any = None

    def at(self, index: Any) -> Any:
        """The elements nearest to the indices."""
        last = min(self.length - 1, np.iinfo(index.dtype).max)
        index = lax.min(lax.max(index, lax.full_like(index, 0)), lax.full_like(index, last)).astype(jnp.int32)
        return plt.load(
            self.ref.at[lax.full_like(index, 0), index] if self.lanes is None else self.ref.at[index, self.lanes]
        )


# ---- rules ----------------------------------------------------------------------------------------------


def _like(x: Any, value: Any) -> Any:
    return lax.full_like(x, value)


def is_float(x: Any) -> bool:
    """Whether values are floats."""
    return x.dtype.kind == "f"


def _nan(x: Any) -> Any:
    return lax.ne(x, x)


def _max(x: Any, y: Any) -> Any:
    if not is_float(x):
        return lax.max(x, y)
    return lax.select(lax.bitwise_or(lax.ge(x, y), _nan(x)), x, y)


def _min(x: Any, y: Any) -> Any:
    if not is_float(x):
        return lax.min(x, y)
    return lax.select(lax.bitwise_or(lax.le(x, y), _nan(x)), x, y)


def _neg(x: Any) -> Any:
    return lax.mul(x, _like(x, -1)) if is_float(x) else lax.neg(x)


def _sign(x: Any) -> Any:
    rest = lax.select(lax.lt(x, _like(x, 0)), _like(x, -1), x) if x.dtype.kind != "u" else x
    return lax.select(lax.gt(x, _like(x, 0)), _like(x, 1), rest)


def _logistic(x: Any) -> Any:
    return lax.div(_like(x, 1), lax.add(_like(x, 1), lax.exp(_neg(x))))


def _integer_pow(x: Any, y: int) -> Any:
    """By squaring, one division for a negative power."""
    power, total = abs(y), None
    while power:
        if power & 1:
            total = x if total is None else lax.mul(total, x)
        power >>= 1
        x = lax.mul(x, x) if power else x
    total = _like(x, 1) if total is None else total
    return lax.div(_like(x, 1), total) if y < 0 else total


def _pow(x: Any, y: Any) -> Any:
    return lax.pow(x, y if is_float(y) or y.dtype == np.int32 else y.astype(x.dtype))


def _truncated(x: Any) -> Any:
    return lax.select(lax.lt(x, _like(x, 0)), lax.ceil(x), lax.floor(x))


def _rem(x: Any, y: Any) -> Any:
    """Of floats, as far as the quotient is exact; it has the sign of `x`."""
    if not is_float(x):
        return lax.rem(x, y)
    zero = _like(x, 0)
    rest = lax.sub(x, lax.mul(_truncated(lax.div(x, y)), y))
    step = lax.select(lax.lt(x, zero), _neg(lax.abs(y)), lax.abs(y))
    other_sign = lax.bitwise_and(lax.ne(lax.lt(rest, zero), lax.lt(x, zero)), lax.ne(rest, zero))
    rest = lax.select(other_sign, lax.add(rest, step), rest)
    rest = lax.select(lax.ge(lax.abs(rest), lax.abs(y)), lax.sub(rest, step), rest)
    endless = lax.bitwise_and(lax.eq(lax.abs(y), _like(x, np.inf)), lax.lt(lax.abs(x), _like(x, np.inf)))
    return lax.select(endless, x, rest)


def _round(x: Any, rounding_method: Any) -> Any:
    size = lax.abs(x)
    whole = lax.floor(size)
    left, half = lax.sub(size, whole), _like(x, 0.5)
    up = lax.ge(left, half)
    if int(rounding_method) == 1:  # half to even
        odd = lax.ne(lax.mul(lax.floor(lax.mul(whole, half)), _like(x, 2)), whole)
        up = lax.bitwise_and(up, lax.bitwise_or(odd, lax.ne(left, half)))
    whole = lax.select(up, lax.add(whole, _like(x, 1)), whole)
    whole = lax.select(lax.lt(x, _like(x, 0)), _neg(whole), whole)
    return lax.select(lax.eq(whole, _like(x, 0)), lax.mul(x, _like(x, 0)), whole)


def _shift(operation: Callable, x: Any, by: Any) -> Any:
    """Zero where `by` is not below the number of bits; an arithmetic one by as much as can be."""
    last = 8 * x.dtype.itemsize - 1
    inside = lax.bitwise_and(lax.ge(by, _like(by, 0)), lax.le(by, _like(by, last)))
    if operation is lax.shift_right_arithmetic:
        return operation(x, lax.select(inside, by, _like(by, last)))
    return lax.select(inside, operation(x, lax.select(inside, by, _like(by, 0))), _like(x, 0))


def _select_n(which: Any, *cases: Any) -> Any:
    """The case of a bool or of a number, which counts as the nearest that there is."""
    if which.dtype == np.bool_:
        return lax.select_n(which, *cases)
    chosen = cases[0]
    for k, case in enumerate(cases[1:], 1):
        chosen = lax.select(lax.ge(which, _like(which, k)), case, chosen)
    return chosen


def _convert(x: Any, new_dtype: Any) -> Any:
    """Floats become integers towards zero, within the range, NaN becomes 0."""
    if is_float(x) and np.dtype(new_dtype).kind in "iu":
        x = lax.select(_nan(x), _like(x, 0), x)
    return x.astype(new_dtype)


RULES: dict[str, Callable[..., Any]] = {  # the names are those of `pallas_forms.REWRITTEN`
    "max": _max,
    "min": _min,
    "clamp": lambda low, x, high: _min(_max(x, low), high),
    "neg": _neg,
    "sign": _sign,
    "square": lambda x: lax.mul(x, x),
    "integer_pow": _integer_pow,
    "pow": _pow,
    "logistic": lambda x, accuracy=None: _logistic(x),
    "rem": _rem,
    "round": _round,
    "is_finite": lambda x: lax.lt(lax.abs(x), _like(x, np.inf)),
    "shift_left": lambda x, by: _shift(lax.shift_left, x, by),
    "shift_right_logical": lambda x, by: _shift(lax.shift_right_logical, x, by),
    "shift_right_arithmetic": lambda x, by: _shift(lax.shift_right_arithmetic, x, by),
    "select_n": _select_n,
    "convert_element_type": lambda x, new_dtype, **_: _convert(x, new_dtype),
}


# ---- evaluation -----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Evaluation:
    """A scalar program, evaluated as far as the inputs that are there allow.

    The order of the equations decides how many values are alive at once. Forwards, what a new value completes comes
    right after it: a sum of stages grows as the stages become known, and takes one register instead of one for each of
    its terms. Backwards (`lazy`), a value is made when it is first read: a stage's sum of cotangents is when the sweep
    comes to that stage, and not for all stages before it at once; some are made again.
    """

    jaxpr: Any
    block: int
    native: bool = False
    stored: frozenset[Any] = frozenset()  # variables that XLA is told to keep, in interpret mode
    lazy: bool = False
    again: Again | None = None
    values: dict[Any, Any] = field(default_factory=dict)
    waiting: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = list(self.jaxpr.eqns)
        self.makers = {v: equation for equation in self.waiting for v in equation.outvars}
        self.users = users(self.jaxpr)

    def give(self, values: Mapping[Any, Any]) -> None:
        """Further inputs."""
        self.values.update(values)
        if self.lazy:
            return
        ready = lambda e: e.outvars[0] not in self.values and not self._lacking(e)  # noqa: E731
        for equation in in_order(self.waiting, self.users, ready):
            self._apply(equation)
        self.waiting = [e for e in self.waiting if e.outvars[0] not in self.values]

    def _lacking(self, equation: Any) -> list[Any]:
        return [v for v in read(equation) if v not in self.values]

    def read(self, atom: Any) -> Any:
        """The value of a variable or literal, on all lanes."""
        if not isinstance(atom, Literal) and atom not in self.values:
            self._make(self.makers[atom])
        return self._known(atom)

    def _make(self, equation: Any) -> None:
        stack = [equation]
        while stack:
            lacking = self._lacking(stack[-1])
            if lacking:
                stack.append(self.makers[lacking[0]])
                continue
            one = stack.pop()
            if one.outvars[0] not in self.values:
                self._apply(one)

    def _known(self, atom: Any) -> Any:
        value = atom.val if isinstance(atom, Literal) else self.values[atom]
        if isinstance(value, Table) or jnp.ndim(value) == 1:
            return value
        aval: Any = atom.aval
        return lax.full((self.block,), value, np.dtype(aval.dtype))

    def _apply(self, equation: Any) -> None:
        found = self._found(equation, [self._input(equation, v) for v in equation.invars])
        for v, x in zip(equation.outvars, found, strict=True):
            self.values[v] = lax.optimization_barrier(x) if v in self.stored else x

    def _input(self, equation: Any, atom: Any) -> Any:
        if self.again is not None and (equation, atom) in self.again:
            return self.again.value(atom, self._known)
        return self._known(atom)

    def _found(self, equation: Any, inputs: Sequence[Any]) -> Sequence[Any]:
        name, params = equation.primitive.name, equation.params
        if name == "dynamic_slice":
            return [inputs[0].at(inputs[1])]
        if name == "squeeze":
            return [inputs[0]]
        if name == SHARED:
            program = params["program"].jaxpr
            inner = Evaluation(program.jaxpr, self.block, self.native)
            inner.give(dict(zip(program.jaxpr.invars, inputs, strict=True)))
            return [inner.read(v) for v in program.jaxpr.outvars]
        if self.native and name in ("div", "sqrt") and inputs[0].dtype == np.float64:
            return [_native(equation, inputs)]
        exponent: Any = equation.invars[1].val if name == "pow" and isinstance(equation.invars[1], Literal) else None
        if takes_power(inputs[0], exponent):
            return [power(inputs[0], float(exponent), quotient if self.native else lax.div)]
        rule = RULES.get(name)
        return [rule(*inputs, **params) if rule else equation.primitive.bind(*inputs, **params)]


def _native(equation: Any, inputs: Sequence[Any]) -> Any:
    """A quotient or square root on a GPU; of a division by a constant, the product with its reciprocal."""
    x, last = inputs[0], equation.invars[-1]
    if equation.primitive.name == "sqrt":
        return root(x)
    if isinstance(last, Literal) and last.val != 0:
        return lax.mul(x, lax.full_like(x, 1 / float(last.val)))
    return quotient(*inputs)
