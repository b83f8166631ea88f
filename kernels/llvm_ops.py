"""Straight-line vector code of scalar programs: one instruction per equation, of LLVM IR without fast-math flags.

What is contracted to a fused multiply-add is decided here and not by LLVM, so that a program has the same bits wherever
it is inlined and at every width. Nothing is re-associated.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradsolve_backend.kernels.compat import Literal
from gradsolve_backend.kernels.llvm_ir import BOOL, Body, Table, Value, has_type
from gradsolve_backend.kernels.llvm_rules import RULES
from gradsolve_backend.kernels.scalar import SHARED
from gradsolve_backend.kernels.scalar_graph import LOOP

__all__ = ["Instruction", "constant", "evaluate", "instructions", "unsupported"]


@dataclass(frozen=True, eq=False, slots=True)
class Instruction:
    """One equation of a scalar program, or two that are contracted.

    - `name`: of the primitive, `while` among them, or `look_up`, or one of the three ways to add to a product.
    - `inputs`: variables and literals of the program.
    - `outputs`: the variables that are defined: one, but for loops and for the call of a program, which the author of
      functions writes.
    - `params`: of the primitive.
    """

    name: str
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    params: dict[str, Any]

    @property
    def output(self) -> Any:
        """The variable that is defined."""
        (output,) = self.outputs
        return output

    def emit(self, body: Body, operands: Sequence[Any], lanes: Value | None = None) -> list[Value]:
        """Write the instruction; `operands` are a `Value`, or for a table a `Table`, per input.

        `lanes`: those in which a loop may begin, if not in all.
        """
        if self.name == LOOP:
            return _loop(body, self.params, operands, lanes)
        return [RULES[self.name](body, self.params, *operands)]


def unsupported(closed: Any) -> str:
    """Why a scalar program cannot be written in LLVM IR; empty if it can."""
    for equation in closed.jaxpr.eqns:
        name = equation.primitive.name
        reason = next(filter(None, map(unsupported, _inner(equation))), "")
        if name not in RULES and name not in ("dynamic_slice", "squeeze", LOOP, SHARED):
            reason = f"primitive `{name}` has no LLVM form"
        if reason:
            return reason
    atoms = [*closed.jaxpr.invars, *closed.jaxpr.constvars, *closed.jaxpr.outvars]
    atoms += [atom for equation in closed.jaxpr.eqns for atom in (*equation.invars, *equation.outvars)]
    for dtype in dict.fromkeys(atom.aval.dtype for atom in atoms):
        if not has_type(dtype):
            return f"values of dtype {dtype} have no LLVM form"
    return ""


def _inner(equation: Any) -> list[Any]:
    """The scalar programs inside an equation."""
    if equation.primitive.name == SHARED:
        return [equation.params["program"].jaxpr]
    return [equation.params[key] for key in ("cond_jaxpr", "body_jaxpr") if key in equation.params]


def instructions(closed: Any, fma: bool) -> list[Instruction]:
    """The equations of a scalar program in their order.

    With `fma`, a sum or difference of floats with an operand that is a product, and that nothing else uses, becomes one
    fused multiply-add; of two such operands the first is taken.
    """
    uses = _uses(closed.jaxpr) if fma else {}
    products: dict[Any, tuple[Any, ...]] = {}
    listed: dict[Any, Instruction] = {}
    for equation in closed.jaxpr.eqns:
        output = equation.outvars[0]
        instruction = _plain(equation, listed)
        if instruction.name in (LOOP, SHARED):
            listed[output] = instruction
            continue
        factors = _factors(instruction)
        if factors and uses.get(output) == 1:
            products[output] = factors
        contracted = _contracted(instruction, products)
        if contracted is not None:
            instruction, product = contracted
            del listed[product]
        listed[output] = instruction
    return [instruction for instruction in listed.values() if instruction.name != "dynamic_slice"]


def _uses(jaxpr: Any) -> Counter[Any]:
    uses: Counter[Any] = Counter(atom for atom in jaxpr.outvars if not isinstance(atom, Literal))
    for equation in jaxpr.eqns:
        uses.update(atom for atom in equation.invars if not isinstance(atom, Literal))
    return uses


def _plain(equation: Any, listed: dict[Any, Instruction]) -> Instruction:
    """One equation; the two equations of a look-up make one at the second."""
    outputs, inputs, name = tuple(equation.outvars), tuple(equation.invars), equation.primitive.name
    if name == "squeeze":
        return Instruction("look_up", listed[inputs[0]].inputs, outputs, {})
    return Instruction(name, inputs, outputs, equation.params)


def _factors(instruction: Instruction) -> tuple[Any, ...]:
    """Two factors, if this is a product of floats."""
    if instruction.output.aval.dtype.kind != "f":
        return ()
    if instruction.name == "mul":
        return instruction.inputs
    is_square = instruction.name == "square" or instruction.name == "integer_pow" and instruction.params["y"] == 2
    return instruction.inputs * 2 if is_square else ()


# What a sum becomes, if its first or its second operand is the product.
_CONTRACTIONS = {
    "add": ("product_plus", "product_plus"),
    "add_any": ("product_plus", "product_plus"),
    "sub": ("product_minus", "minus_product"),
}


def _contracted(instruction: Instruction, products: dict[Any, tuple[Any, ...]]) -> tuple[Instruction, Any] | None:
    """A sum contracted with a product among its operands, and the variable that is gone."""
    for k, name in enumerate(_CONTRACTIONS.get(instruction.name, ())):
        operand = instruction.inputs[k]
        if not isinstance(operand, Literal) and operand in products:
            inputs = (*products[operand], instruction.inputs[1 - k])
            return Instruction(name, inputs, instruction.outputs, {}), operand
    return None


def constant(body: Body, value: Any) -> Value | Table:
    """A constant of a program: a scalar in all lanes, or a table that all lanes share."""
    array = np.asarray(value)
    if array.ndim == 0:
        return body.splat(array, array.dtype)
    return Table(f"splat (ptr {body.module.constant(array)})", array.size, array.dtype)


def evaluate(body: Body, closed: Any, inputs: Sequence[Value | Table], lanes: Value | None = None) -> list[Value]:
    """Write a whole program; returns its outputs. Its loops run in some `lanes` only, or in all."""
    jaxpr = closed.jaxpr
    values: dict[Any, Any] = dict(zip(jaxpr.invars, inputs, strict=True))
    values |= {v: constant(body, c) for v, c in zip(jaxpr.constvars, closed.consts, strict=True)}

    def read(atom: Any) -> Any:
        if not isinstance(atom, Literal):
            return values[atom]
        aval: Any = atom.aval
        return body.splat(atom.val, aval.dtype)

    for instruction in instructions(closed, body.target.fma):
        made = instruction.emit(body, [read(atom) for atom in instruction.inputs], lanes)
        values.update(zip(instruction.outputs, made, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _loop(body: Body, params: dict[str, Any], operands: Sequence[Any], lanes: Value | None) -> list[Value]:
    """Runs until no lane goes on; a lane that has ended keeps its values, and begins no loop inside this one."""
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    head, inside, end = (body.fresh_label(stem) for stem in ("head", "inside", "end"))
    before = body.block
    body.branch(head)
    body.label(head)
    phi = lambda name, dtype: Value(body.phi(body.type(dtype), name, before), dtype)  # noqa: E731
    carry = [phi(x.name, x.dtype) for x in operands[second:]]
    before_test = phi("splat (i1 true)" if lanes is None else lanes.name, BOOL)
    (wanted,) = evaluate(body, params["cond_jaxpr"], [*operands[:first], *carry], before_test)
    going = Value(body.emit(f"and {body.type(BOOL)} {wanted.name}, {before_test.name}"), BOOL)
    body.branch_if(body.any_lane(going), inside, end)
    body.label(inside)
    after = evaluate(body, params["body_jaxpr"], [*operands[first:second], *carry], going)
    for old, new in zip([*carry, before_test], [*after, going], strict=True):
        kind = body.type(old.dtype)
        chosen = f"select {body.type(BOOL)} {going.name}, {kind} {new.name}, {kind} {old.name}"
        body.incoming(old.name, new.name if new is going else body.emit(chosen), body.block)
    body.branch(head)
    body.label(end)
    return carry
