"""Lanes: nested `jax.vmap`s of one lane's functions, with every axis kept apart.

An input has the axis of a level or does not; those it has lead its shape, outermost level first. Levels at which only
tangents or cotangents have an axis (columns of a Jacobian) come before the levels of the trajectories, and share their
primal values.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Flags = tuple[tuple[bool, ...], ...]


def column(flags: Flags, index: int) -> tuple[bool, ...]:
    """The flags of one input over the levels."""
    return tuple(level[index] for level in flags)


def over(function: Callable, flags: Flags, out: Any = 0) -> Callable:
    """`function` of positional arrays, vmapped over each level at which one of its inputs has an axis."""
    for level in reversed(flags):
        if any(level):
            function = jax.vmap(function, in_axes=tuple(0 if f else None for f in level), out_axes=out)
    return function


def spread(x: Any, has: Sequence[bool], sizes: Sequence[int], offset: int = 0) -> Any:
    """`x` with the axis of every level: missing ones are broadcast."""
    missing = tuple(offset + i for i, h in enumerate(has) if not h)
    if not missing:
        return x
    shape = x.shape[:offset] + tuple(sizes) + x.shape[offset + sum(has) :]
    return jnp.broadcast_to(jnp.expand_dims(x, missing), shape)


def widened(x: Any, has: Sequence[bool], wanted: Sequence[bool], sizes: Sequence[int]) -> Any:
    """`x` with the axes of the wanted levels, of which it has some and of no others."""
    part = [h for h, w in zip(has, wanted, strict=True) if w]
    return spread(x, part, [s for s, w in zip(sizes, wanted, strict=True) if w])


def reorder(x: Any, order: Sequence[int]) -> Any:
    """`x` with its leading axes in this order."""
    return jnp.transpose(x, (*order, *range(len(order), x.ndim)))


def total(x: Any, has: Sequence[bool], wanted: Sequence[bool]) -> Any:
    """`x`, summed over the levels whose axis it has and should not have."""
    axes, position = [], 0
    for h, w in zip(has, wanted, strict=True):
        if h and not w:
            axes.append(position)
        position += h
    return jnp.sum(x, axis=tuple(axes)) if axes else x


def select(mask: Any, new: Any, old: Any, columns: int = 0) -> Any:
    """`where(mask, new, old)` for trees of arrays; `mask` has the axes of the lanes, the arrays `columns` in front."""

    def one(a: Any, b: Any) -> Any:
        own = (1,) * (a.ndim - columns - mask.ndim)
        return jnp.where(mask.reshape((1,) * columns + mask.shape + own), a, b)

    return jax.tree.map(one, new, old)


def put(buffer: Any, slot: Any, value: Any, columns: int = 0) -> Any:
    """Writes `value` at each lane's own `slot`; a slot beyond the end writes nothing."""
    function = lambda b, s, v: b.at[s].set(v, mode="drop")  # noqa: E731
    for _ in range(slot.ndim):
        function = jax.vmap(function)
    for _ in range(columns):
        function = jax.vmap(function, in_axes=(0, None, 0))
    return jax.tree.map(lambda b, v: function(b, slot, v), buffer, value)


def take(buffer: Any, slot: Any, columns: int = 0) -> Any:
    """Each lane's row at its own `slot`; a slot beyond the end reads zeros."""
    function = lambda b, s: b.at[s].get(mode="fill", fill_value=0)  # noqa: E731
    for _ in range(slot.ndim):
        function = jax.vmap(function)
    for _ in range(columns):
        function = jax.vmap(function, in_axes=(0, None))
    return jax.tree.map(lambda b: function(b, slot), buffer)


def varying(arrays: Sequence[Any]) -> list[Any]:
    """Arrays that all vary over each mesh axis over which one of them does, inside `jax.shard_map`."""
    axes = [jax.typeof(x).mat.varying for x in arrays]
    union = frozenset().union(*axes)
    cast = lambda x, own: jax.lax.pcast(x, tuple(union - own), to="varying") if union - own else x  # noqa: E731
    return [cast(x, own) for x, own in zip(arrays, axes, strict=True)]
