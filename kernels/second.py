"""Derivatives of the linear maps themselves, for second and higher derivatives of a solve.

`derivative` differentiates the loops in forward mode, which costs as much as they do. `plain` is one solve as a scan
over `max_steps` steps that JAX can differentiate in any mode, any number of times; it stands behind reverse mode over
a linear map, and costs what `max_steps` costs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gradsolve_backend.kernels.evaluate import AbstractLanes, ArrayLanes
from gradsolve_backend.kernels.lanes import Flags, column, over, total, widened
from gradsolve_backend.kernels.loops import (
    Progress,
    Values,
    forward,
    going,
    move,
    outcome,
    save,
    start,
    wanted,
)
from gradsolve_backend.kernels.solve import Call, Output
from gradsolve_backend.kernels.trace import inexact
from gradsolve_backend.kernels.xla import KERNELS as XLA


def record_axes(call: Call, levels: Flags) -> Flags:
    """For each level, the flags of the record's arrays: those of trajectories, for arrays that have axes of levels."""
    first = call.solve.size + len(call.solve.operands)
    return tuple(tuple(offset is not None and any(level[:first]) for _, offset in call.recorded) for level in levels)


def recorded(call: Call, inputs: Sequence[Any], axes: Flags) -> tuple[list[Any], Call]:
    """The record of a solve, and `call` with the flags of its arrays between those of primal and linear inputs."""
    first = len(inputs)
    own = [i for i, level in enumerate(axes) if any(level[:first])]
    ahead = call.replace(keep=(), sizes=tuple(call.sizes[i] for i in own), axes=tuple(axes[i][:first] for i in own))
    full = tuple((*a[:first], *m, *a[first:]) for a, m in zip(axes, record_axes(ahead, axes), strict=True))
    return forward(ahead, *inputs)[len(outcome(ahead)) :], call.replace(axes=full)


def fast(call: Call, kind: str, axes: Flags) -> Callable[..., list[Any]]:
    """A linear map as a function of loop variables, operands and its linear inputs: loops, forward mode only.

    On array lanes: the rules that users gave their functions hold there.
    """
    call = call.replace(kernels=XLA, record=True, scalar=False)

    def function(*inputs: Any) -> list[Any]:
        first = call.solve.size + len(call.solve.operands)
        record, full = recorded(call, inputs[:first], axes)
        return getattr(XLA, kind)(full, *inputs[:first], *record, *inputs[first:])

    return function


def _slots(o: Output, before: tuple[Any, Any], after: tuple[Any, Any]) -> tuple[Any, Any]:
    """For each requested time: the step in which it lies, and its slot."""
    k = jnp.arange(o.slots, dtype=jnp.int32)
    step = jnp.sum(after[0][:, None] <= k[None, :], axis=0, dtype=jnp.int32)
    held = step < after[0].shape[0]
    step = jnp.minimum(step, after[0].shape[0] - 1)
    return step, jnp.where(held, before[1][step] + k - before[0][step], o.slots)


def _filled(lanes: AbstractLanes, number: int, steps: Any) -> list[Any]:
    """One output's buffer from the steps of a scan."""
    o = lanes.solve.outputs[number]
    before, after, step = steps
    buffer = [jnp.zeros((o.slots, *a.shape), a.dtype) for a in o.leaves]
    if o.sample is not None:
        sample = o.sample
        index, slot = _slots(o, before.cursors[number], after.cursors[number])
        k = jnp.arange(o.slots, dtype=jnp.int32)
        args = [x[index] for x in (*before.carry, *step.dense)]
        values = jax.vmap(lambda k, *x: lanes.evaluate(sample, [k, *x]))(k, *args)
        buffer = [b.at[slot].set(v, mode="drop") for b, v in zip(buffer, values, strict=True)]
    if o.every:
        hit = wanted(o, step.kept, step.accepted)
        slot = jnp.where(hit, after.cursors[number][1] - 1, o.slots)
        buffer = [b.at[slot].set(v, mode="drop") for b, v in zip(buffer, step.emitted[o.emit], strict=True)]
    return buffer


def plain(call: Call) -> Callable[..., list[Any]]:
    """One lane's solve as a scan: reached loop variables after it and saved values, of loop variables and operands."""
    solve = call.solve
    replay = solve.moving if call.moving else solve.fixed

    def body(lanes: AbstractLanes, p: Progress) -> Any:
        stopped = p._replace(carry=[jax.lax.stop_gradient(x) for x in p.carry])
        after, step = move(lanes, stopped, solve.advance)
        out = lanes.evaluate(replay, [*p.carry, step.kept, step.t_after])
        carry = list(after.carry)
        for i in call.reached:
            carry[i] = out[i]
        dense, emitted = out[solve.size : solve.size + solve.dense], out[solve.size + solve.dense :]
        step = step._replace(dense=dense, emitted=emitted)
        cursors, _ = save(Values(lanes, stopped, step), None)
        return after._replace(carry=carry, cursors=cursors), step

    def function(*inputs: Any) -> list[Any]:
        lanes = ArrayLanes(solve, (), (), list(inputs[solve.size :]))
        p = start(lanes, inputs[: solve.size])
        step = jax.eval_shape(lambda p: body(lanes, p)[1], p)
        ended = lambda p: (p, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), step))  # noqa: E731

        def scanned(p: Progress, _: Any) -> Any:
            after, step = jax.lax.cond(going(solve, p), lambda p: body(lanes, p), ended, p)
            return after, (p, after, step)

        p, steps = jax.lax.scan(scanned, p, None, length=solve.max_steps)
        saved = [_filled(lanes, i, steps) for i in range(len(solve.outputs))]
        rest = [x for buffer in saved for x in buffer if inexact(x)]
        return [*(p.carry[i] for i in call.reached), *rest]

    return function


def slow(call: Call, kind: str, axes: Flags) -> Callable[..., list[Any]]:
    """The same map as `fast`, through `plain`: any mode, at the cost of `max_steps` steps."""
    solve = call.solve
    first = solve.size + len(solve.operands)
    perturbed = [*call.carry, *(solve.size + i for i in call.operands)]
    function = plain(call)

    def lane(*inputs: Any) -> list[Any]:
        def of(*xs: Any) -> list[Any]:
            values = list(inputs[:first])
            for i, x in zip(perturbed, xs, strict=True):
                values[i] = x
            return function(*values)

        at = tuple(inputs[i] for i in perturbed)
        if kind == "tangent":
            return jax.jvp(of, at, tuple(inputs[first:]))[1]
        return list(jax.vjp(of, *at)[1](list(inputs[first:])))

    def mapped(*inputs: Any) -> list[Any]:
        out = over(lane, axes)(*inputs)
        every = [any(level) for level in axes]
        return [total(x, every, column(call.keep, i)) for i, x in enumerate(out)]

    return mapped


def derivative(function: Callable, which: Sequence[int], count: int) -> Callable[..., list[Any]]:
    """`function`'s tangent outputs, from its `count` inputs and the tangents of the inputs `which`."""

    def pushed(*inputs: Any) -> list[Any]:
        values, tangents = inputs[:count], inputs[count:]

        def of(*xs: Any) -> list[Any]:
            full = list(values)
            for i, x in zip(which, xs, strict=True):
                full[i] = x
            return function(*full)

        return jax.jvp(of, tuple(values[i] for i in which), tuple(tangents))[1]

    return pushed


def aligned(inputs: Sequence[Any], axes: Flags, sizes: Sequence[int], which: Sequence[int], count: int) -> Any:
    """Inputs and tangents with equal axes in each pair, and the flags of the first `count` inputs."""
    values, flags = list(inputs), [list(column(axes, i)) for i in range(len(inputs))]
    for j, i in enumerate(which):
        union = [a or b for a, b in zip(flags[i], flags[count + j], strict=True)]
        for k in (i, count + j):
            values[k] = widened(values[k], flags[k], union, sizes)
        flags[i] = union
    return values, tuple(tuple(f[level] for f in flags[:count]) for level in range(len(sizes)))
