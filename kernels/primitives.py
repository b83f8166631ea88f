"""Four JAX primitives: forward, tangent, cotangent, and their derivative.

`forward` is differentiated into `tangent`, which transposes into `cotangent`; both lower through the backend of the
call. `second` is the derivative of either: its value by forward differentiation of the loops, its transpose through a
scan over `max_steps` steps that JAX differentiates itself. `jax.vmap` adds a level to the call.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from gradsolve_backend.hooks import announce
from gradsolve_backend.kernels.compat import ShapedArray
from gradsolve_backend.kernels.forms import takes_scalar
from gradsolve_backend.kernels.lanes import varying
from gradsolve_backend.kernels.levels import primal_count
from gradsolve_backend.kernels.loops import checkpoint_avals, outcome
from gradsolve_backend.kernels.lowering import local
from gradsolve_backend.kernels.second import aligned, derivative, fast, record_axes, slow
from gradsolve_backend.kernels.solve import Call
from gradsolve_backend.kernels.trace import inexact
from gradsolve_backend.kernels.xla import KERNELS as XLA


def _like(avals: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Abstract values of outputs; inside `jax.shard_map` they vary over the mesh as the inputs do."""
    like = next((x for x in inputs if x.mat.varying), None)
    if like is None:
        return [ShapedArray(a.shape, a.dtype) for a in avals]
    return [like.update(shape=a.shape, dtype=a.dtype, weak_type=False) for a in avals]


def _zero(x: Any) -> Any:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _instantiated(tangents: Sequence[Any]) -> list[Any]:
    return [ad.instantiate_zeros(t) if isinstance(t, ad.Zero) else t for t in tangents]


def _primitive(name: str, implementation: Callable, avals: Callable) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *x, **params: _like(avals(params["call"]), x))
    primitive.def_impl(lambda *x, **params: jax.jit(lambda *y: implementation(params["call"], *y))(*x))
    mlir.register_lowering(primitive, local(lambda *x, **params: implementation(params["call"], *x)))
    return primitive


def _linear_avals(call: Call, own: Sequence[Any]) -> list[Any]:
    """Abstract values of a linear map's outputs: those levels that `call.keep` names, then their own shape."""
    out = []
    for i, a in enumerate(own):
        sizes = tuple(s for s, level in zip(call.sizes, call.keep, strict=True) if level[i])
        out.append(jax.ShapeDtypeStruct(sizes + a.shape, a.dtype))
    return out


def tangent_outputs(call: Call) -> list[Any]:
    """One lane's tangent outputs: reached loop variables, then saved values."""
    solve = call.solve
    saved = [jax.ShapeDtypeStruct((o.slots, *a.shape), a.dtype) for o in solve.outputs for a in call.saved(o)]
    return [*(solve.carry[i] for i in call.reached), *saved]


def cotangent_outputs(call: Call) -> list[Any]:
    """One lane's cotangent outputs: perturbed loop variables, then perturbed operands."""
    return [*(call.solve.carry[i] for i in call.carry), *(call.solve.operands[i] for i in call.operands)]


forward_p = _primitive(
    "gradsolve_forward",
    lambda call, *x: call.kernels.forward(call, *x),
    lambda call: [*outcome(call), *(a for a, _ in call.recorded)],
)
tangent_p = _primitive(
    "gradsolve_tangent",
    lambda call, *x: call.kernels.tangent(call, *x),
    lambda call: _linear_avals(call, tangent_outputs(call)),
)
cotangent_p = _primitive(
    "gradsolve_cotangent",
    lambda call, *x: call.kernels.cotangent(call, *x),
    lambda call: _linear_avals(call, cotangent_outputs(call)),
)


def solve(call: Call, *inputs: Any) -> list[Any]:
    """Runs a solve: final loop variables, cursors, outputs."""
    return forward_p.bind(*varying(inputs), call=call, route=call.route, lanes=call.sizes)


def _perturbs(primal: Any, tangent: Any) -> bool:
    return inexact(primal) and not isinstance(tangent, ad.Zero)


def _linearised(call: Call, perturbed: Sequence[int]) -> Call:
    """The call whose record serves the derivative with respect to these inputs: this one if its own does."""
    size = call.solve.size
    carry = tuple(i for i in perturbed if i < size and i not in call.solve.passive)
    operands = tuple(i - size for i in perturbed if i >= size)
    if call.record and set(carry) <= set(call.carry) and set(operands) <= set(call.operands):
        return call
    linear = call.replace(carry=carry, operands=operands, record=call.kernels.records(call.solve))
    reason = call.kernels.against(linear)
    if reason:
        route = call.route.derivative("xla", reason)
        announce(route)
        linear = linear.replace(kernels=XLA, route=route, record=XLA.records(call.solve))
    return linear.replace(scalar=takes_scalar(linear, "pull")) if linear.record else linear


def _forward_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call, **_: Any) -> tuple[list, list]:
    linear = _linearised(call, [i for i, (p, t) in enumerate(zip(primals, tangents, strict=True)) if _perturbs(p, t)])
    found = solve(linear, *primals)
    out = found if linear.record == call.record and linear is call else solve(call, *primals) if call.record else found
    count = len(outcome(call))
    inputs = [*linear.carry, *(call.solve.size + i for i in linear.operands)]
    middle = record_axes(linear, call.axes) if linear.record else tuple(() for _ in call.axes)
    axes = tuple((*a, *m, *(a[i] for i in inputs)) for a, m in zip(call.axes, middle, strict=True))
    keep = ((True,) * len(tangent_outputs(linear)),) * len(call.sizes)
    pushed = tangent_p.bind(
        *primals,
        *found[count:],
        *varying(_instantiated([tangents[i] for i in inputs])),
        call=linear.replace(axes=axes, keep=keep),
    )
    out = out[: count + len(call.recorded)]
    result = [_zero(x) for x in out]
    for i, d in zip(_pushed_positions(linear), pushed, strict=True):
        result[i] = d
    return out, result


def _pushed_positions(call: Call) -> list[int]:
    """Where the outputs of a tangent lie among those of its forward call."""
    first = len(checkpoint_avals(call.solve))
    leaves = [a for o in call.solve.outputs for a in o.leaves]
    return [*call.reached, *(first + i for i, a in enumerate(leaves) if inexact(a))]


def _linear_jvp(primitive: Primitive, kind: str) -> Callable:
    """Linear in its last inputs; otherwise the record is a cache, and the derivative runs through what made it."""

    def rule(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call) -> tuple[list, list]:
        out = primitive.bind(*primals, call=call)
        first, count = call.solve.size + len(call.solve.operands), primal_count(call)
        source = [*range(first), *range(count, len(primals))]
        perturbed = [i for i in source if _perturbs(primals[i], tangents[i])]
        if all(i >= count for i in perturbed):
            linear = _instantiated(tangents[count:])
            return out, primitive.bind(*primals[:count], *linear, call=call)
        which = tuple(source.index(i) for i in perturbed)
        axes = tuple((*(a[i] for i in source), *(a[i] for i in perturbed)) for a in call.axes)
        inputs = [*(primals[i] for i in source), *(tangents[i] for i in perturbed)]
        return out, second_p.bind(*inputs, call=call.replace(axes=axes, record=True), kind=kind, which=which)

    return rule


def _second(call: Call, *inputs: Any, kind: str, which: tuple[int, ...], build: Callable = fast) -> list[Any]:
    count = len(inputs) - len(which)
    values, axes = aligned(inputs, call.axes, call.sizes, which, count)
    return derivative(build(call.replace(axes=()), kind, axes), which, count)(*values)


def _linear_outputs(call: Call, kind: str) -> list[Any]:
    return _linear_avals(call, tangent_outputs(call) if kind == "tangent" else cotangent_outputs(call))


second_p = Primitive("gradsolve_second")
second_p.multiple_results = True
second_p.def_abstract_eval(lambda *x, call, kind, which: _like(_linear_outputs(call, kind), x))
second_p.def_impl(lambda *x, call, **params: jax.jit(lambda *y: _second(call, *y, **params))(*x))
mlir.register_lowering(second_p, local(lambda *x, call, **params: _second(call, *x, **params)))


def _second_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call, **params: Any) -> tuple[list, list]:
    function = lambda *x: _second(call, *x, build=slow, **params)  # noqa: E731
    out = second_p.bind(*primals, call=call, **params)
    return out, jax.jvp(function, tuple(primals), tuple(_instantiated(tangents)))[1]


def _second_transpose(cts: Sequence[Any], *inputs: Any, call: Call, which: tuple[int, ...], kind: str) -> list[Any]:
    count = len(inputs) - len(which)
    values, tangents = inputs[:count], inputs[count:]
    asked = [i for i, t in enumerate(tangents) if ad.is_undefined_primal(t)]

    def function(*xs: Any) -> list[Any]:
        full = [t if not ad.is_undefined_primal(t) else None for t in tangents]
        for i, x in zip(asked, xs, strict=True):
            full[i] = x
        return _second(call, *values, *full, kind=kind, which=which, build=slow)

    zeros = [jnp.zeros(tangents[i].aval.shape, tangents[i].aval.dtype) for i in asked]
    _, pull = jax.vjp(function, *zeros)
    found = dict(zip(asked, pull(_instantiated(cts)), strict=True))
    return [None] * count + [found.get(i) for i in range(len(which))]


def _refuse_unbounded(call: Call) -> None:
    if not call.record:
        raise ValueError(
            "Reverse-mode differentiation of a solve with `max_steps=None` was asked for. `GradSolveAdjoint` keeps a "
            "record of the steps, whose size must be known beforehand: pass `diffeqsolve(..., max_steps=...)`. "
            "Forward mode (`jax.jvp`, `jax.jacfwd`) needs no bound."
        )


def _transpose(primitive: Primitive) -> Callable:
    """The transpose of one linear map is the other: inputs and outputs keep their axes."""

    def rule(cts: Sequence[Any], *inputs: Any, call: Call) -> list[Any]:
        _refuse_unbounded(call)
        count = primal_count(call)
        axes = tuple((*a[:count], *k) for a, k in zip(call.axes, call.keep, strict=True))
        keep = tuple(tuple(a[count:]) for a in call.axes)
        out = primitive.bind(*inputs[:count], *_instantiated(cts), call=call.replace(axes=axes, keep=keep))
        asked = [ad.is_undefined_primal(x) for x in inputs[count:]]
        return [None] * count + [o if a else None for o, a in zip(out, asked, strict=True)]

    return rule


def _fold(
    inputs: Sequence[Any], dims: Sequence[Any], offsets: Sequence[int]
) -> tuple[int, list[Any], tuple[bool, ...]]:
    """Inputs with a new, outermost level: its size, the inputs with its axis first, and which have it."""
    size = next(x.shape[d] for x, d in zip(inputs, dims, strict=True) if d is not None)
    out = []
    for x, d, offset in zip(inputs, dims, offsets, strict=True):
        if d is not None:
            x = jnp.max(x, axis=d) if offset < 0 else jnp.moveaxis(x, d, offset)
        out.append(x)
    return size, out, tuple(d is not None and o >= 0 for d, o in zip(dims, offsets, strict=True))


def _record_offsets(call: Call) -> list[int]:
    """Where the axes of levels are in a record's arrays; -1: the number of steps has none."""
    return [-1 if offset is None else offset for _, offset in call.recorded]


def _forward_batch(inputs: Sequence[Any], dims: Sequence[Any], *, call: Call, **_: Any) -> tuple[list, list]:
    size, inputs, flags = _fold(inputs, dims, [0] * len(inputs))
    call = call.replace(sizes=(size, *call.sizes), axes=(flags, *call.axes))
    return solve(call, *inputs), [*[0] * len(outcome(call)), *[o if o >= 0 else None for o in _record_offsets(call)]]


def _linear_batch(primitive: Primitive) -> Callable:
    def rule(inputs: Sequence[Any], dims: Sequence[Any], *, call: Call) -> tuple[list, list]:
        first = call.solve.size + len(call.solve.operands)
        offsets = [0] * first + _record_offsets(call)
        size, inputs, flags = _fold(inputs, dims, offsets + [0] * (len(inputs) - len(offsets)))
        count = len(tangent_outputs(call) if primitive is tangent_p else cotangent_outputs(call))
        call = call.replace(sizes=(size, *call.sizes), axes=(flags, *call.axes), keep=((True,) * count, *call.keep))
        return primitive.bind(*inputs, call=call), [0] * count

    return rule


def _second_batch(inputs: Sequence[Any], dims: Sequence[Any], *, call: Call, **params: Any) -> tuple[list, list]:
    size, inputs, flags = _fold(inputs, dims, [0] * len(inputs))
    count = len(_linear_outputs(call, params["kind"]))
    call = call.replace(sizes=(size, *call.sizes), axes=(flags, *call.axes), keep=((True,) * count, *call.keep))
    return second_p.bind(*inputs, call=call, **params), [0] * count


ad.primitive_jvps[forward_p] = _forward_jvp
ad.primitive_jvps[tangent_p] = _linear_jvp(tangent_p, "tangent")
ad.primitive_jvps[cotangent_p] = _linear_jvp(cotangent_p, "cotangent")
ad.primitive_jvps[second_p] = _second_jvp
ad.primitive_transposes[tangent_p] = _transpose(cotangent_p)
ad.primitive_transposes[cotangent_p] = _transpose(tangent_p)
ad.primitive_transposes[second_p] = _second_transpose
batching.primitive_batchers[forward_p] = _forward_batch
batching.primitive_batchers[tangent_p] = _linear_batch(tangent_p)
batching.primitive_batchers[cotangent_p] = _linear_batch(cotangent_p)
batching.primitive_batchers[second_p] = _second_batch
