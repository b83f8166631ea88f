"""Floating-point operations of the machine code of a solve, and how many of them the machine can do at best."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, jaxprs_in_params

from gradsolve_backend.kernels.llvm_call import call
from gradsolve_backend.kernels.llvm_ir import host_features
from gradsolve_backend.kernels.llvm_lower import width
from gradsolve_backend.kernels.llvm_ops import instructions
from gradsolve_backend.kernels.routines import Pieces, Routine
from gradsolve_backend.kernels.solve import Call

# Operations of an instruction; comparisons, selections and moves are none, and a power, a call of many, is one.
OPERATIONS = dict.fromkeys(("add", "add_any", "sub", "mul", "div", "sqrt", "pow"), 1)
OPERATIONS |= dict.fromkeys(("product_plus", "product_minus", "minus_product"), 2)
CHAINS = 12  # sums that do not wait for each other: two units that take four cycles need eight
TURNS = 1_000_000
TASKS = 8  # per core


def operations(routine: Routine) -> int:
    """Floating-point operations of one run of a routine on one lane; a fused multiply-add is two."""
    fma, _, _ = host_features()
    found = [one for one in instructions(routine.program.jaxpr, fma) if one.output.aval.dtype.kind == "f"]
    return sum(OPERATIONS.get(one.name, 0) for one in found)


def calls(jaxpr: Jaxpr) -> Iterator[Call]:
    """The solves in a program, and their derivatives."""
    for equation in jaxpr.eqns:
        if isinstance(equation.params.get("call"), Call):
            yield equation.params["call"]
        for inner in jaxprs_in_params(equation.params):
            yield from calls(inner)


def step_operations(function: Callable[..., Any], *arguments: Any) -> tuple[int, int]:
    """Operations per lane of a trial step, and of the way back through a step, of a differentiated solve."""
    pieces = Pieces(list(calls(jax.make_jaxpr(function)(*arguments).jaxpr))[-1])
    return operations(pieces.step()), operations(pieces.back())


def vector_width(function: Callable[..., Any], *arguments: Any) -> int:
    """Lanes that step together in a solve."""
    found = next(calls(jax.make_jaxpr(function)(*arguments).jaxpr))
    return width(found, math.prod(found.sizes))


# Sums of products in registers, stored at the end of a task; `{v}` is a vector of `{w}` numbers.
KERNEL = """
declare {v} @llvm.fma.v{w}f64({v}, {v}, {v})
define void @kernel(ptr %buffers, ptr %params, i64 %task, i64 %worker) {{
entry:
  %at = getelementptr i64, ptr %params, i64 3
  %turns = load i64, ptr %at
  %sums = load ptr, ptr %buffers
  br label %turn
turn:
  %i = phi i64 [ 0, %entry ], [ %next, %turn ]
{phis}
{products}
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %turns
  br i1 %more, label %turn, label %end
end:
{stores}
  ret void
}}
"""
PHI = "  %x{n} = phi {v} [ splat (double {n}.0), %entry ], [ %y{n}, %turn ]"
PRODUCT = "  %y{n} = call {v} @llvm.fma.v{w}f64({v} %x{n}, {v} splat (double 0.5), {v} splat (double 1.0))"
STORE = """  %p{n} = getelementptr [{chains} x {v}], ptr %sums, i64 %task, i64 {n}
  store {v} %y{n}, ptr %p{n}, align 8"""


def peak(cores: int) -> tuple[Callable[[], Any], int]:
    """A call that does nothing but multiply and add in float64 on all cores, and the number of its operations."""
    lanes, tasks = register_lanes(), TASKS * cores
    names = {"v": f"<{lanes} x double>", "w": lanes, "chains": CHAINS}
    lines = {
        part: "\n".join(line.format(n=n, **names) for n in range(CHAINS))
        for part, line in (("phis", PHI), ("products", PRODUCT), ("stores", STORE))
    }
    text = KERNEL.format(**names, **lines)
    shape = jax.ShapeDtypeStruct((tasks, CHAINS, lanes), jnp.float64)
    run = jax.jit(lambda: call(text, [shape], [tasks, cores + 1, 1, TURNS]))
    return run, 2 * tasks * CHAINS * lanes * TURNS


def register_lanes() -> int:
    """Float64 numbers in a vector register."""
    return host_features()[1] // 64
