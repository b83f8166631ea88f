"""The memory that a solve holds, as XLA reserves it for a compiled program. Nothing is run."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gradsolve_backend.kernels.lanes import column
from gradsolve_backend.kernels.loops import checkpoint_avals, outcome
from gradsolve_backend.kernels.primitives import solve
from gradsolve_backend.kernels.solve import Call
from gradsolve_backend.kernels.trace import inexact
from gradsolve_backend.timing import reserved


def _inputs(call: Call) -> list[jax.ShapeDtypeStruct]:
    """The inputs of a forward call, as abstract values."""
    out = []
    for i, a in enumerate([*call.solve.carry, *call.solve.operands]):
        sizes = tuple(s for s, has in zip(call.sizes, column(call.axes, i), strict=True) if has)
        out.append(jax.ShapeDtypeStruct(sizes + a.shape, a.dtype))
    return out


def _differentiated(call: Call) -> Call:
    """The call, differentiated by what it is, or else by all that has no part in step times."""
    if call.carry or call.operands:
        return call
    solve = call.solve
    operands = tuple(i for i, a in enumerate(solve.operands) if inexact(a))
    return call.replace(carry=tuple(i for i in solve.differentiated if inexact(solve.carry[i])), operands=operands)


def _used(call: Call) -> tuple[list[int], list[int]]:
    """Which outcomes of a call a program is likely to read: what the derivative reaches; saved values."""
    out, position = [], len(checkpoint_avals(call.solve))
    for o in call.solve.outputs:
        count = len(o.leaves)
        # The first one is the time of what was saved.
        out += range(position + min(1, count - 1), position + count)
        position += count
    return list(call.reached), out


def _loss(call: Call, used: Sequence[int], at: Sequence[int], inputs: Sequence[Any], *xs: Any) -> Any:
    """A number from the outcome of a call, whose inputs `at` are replaced by `xs`."""
    full = list(inputs)
    for i, x in zip(at, xs, strict=True):
        full[i] = x
    # The state of the solver is made before the loop, hence no argument of the program; that of the system may be one.
    for i in sorted(call.solve.covered)[1:]:
        full[i] = jnp.negative(full[i]) if inexact(full[i]) else full[i]
    found = solve(call, *full)
    return sum(jnp.sum(jnp.abs(found[i]) ** 2).astype(float) for i in used if inexact(found[i]))


def _bytes(function: Callable[..., Any], inputs: Sequence[Any]) -> int | None:
    return reserved(jax.jit(function).lower(*inputs).compile())


def held(call: Call) -> tuple[int | None, int | None]:
    """Bytes that all lanes of a solve hold: undifferentiated, and for a gradient in reverse mode.

    The latter is by the inputs that `call` is differentiated by, if any, or else by those that have no part in step
    times. None: XLA does not tell, or the solve has no derivative in reverse mode. Both are compiled, which takes as
    long as it does. A solve inside `jax.shard_map` with its check of varying axes is not: it has a meaning there only.
    """
    if any(v.aval.mat.varying for v in call.solve.advance.invars):
        return None, None
    linear = _differentiated(call)
    plain = call.replace(record=False, carry=(), operands=())
    at = [*linear.carry, *(call.solve.size + i for i in linear.operands)]
    inputs, (reached, saved) = _inputs(plain), _used(linear)

    def forward(*inputs: Any) -> Any:
        return _loss(plain, [*reached, *saved], at, inputs, *(inputs[i] for i in at))

    def gradient(*inputs: Any) -> Any:
        loss = functools.partial(_loss, plain, [*reached, *saved], at, inputs)
        return jax.grad(loss, tuple(range(len(at))))(*(inputs[i] for i in at))

    # Diffrax hands on what was saved through the conditional of its error check, which copies it.
    out = outcome(plain)
    handed_on = 2 * sum(out[i].size * out[i].dtype.itemsize for i in saved)
    differentiable = call.kernels.records(call.solve) and at
    alone = _bytes(forward, inputs)
    undifferentiated = None if alone is None else max(alone, handed_on)
    return undifferentiated, _bytes(gradient, inputs) if differentiable else None
