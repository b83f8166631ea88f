"""What a solve saves, as outputs of the loop, and back into Diffrax's state."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from gradsolve_backend.adapters.trial import Asked, Carry
from gradsolve_backend.kernels.compat import SaveState


def _is_save_state(x: Any) -> bool:
    return isinstance(x, SaveState)


def _is_sub(x: Any) -> bool:
    return isinstance(x, diffrax.SubSaveAt)


@dataclass(frozen=True)
class Saved:
    """One output: where it starts in Diffrax's buffers, its buffers, how it is filled.

    `sample(k, carry, dense)` is the value at the k-th requested time, `emit(carry, dense)` that of a step that ended
    at `carry`; either may be None. `every` says after how many accepted steps the latter is saved.
    """

    first: int
    buffers: list[Any]
    count: int
    due: Callable | None
    sample: Callable | None
    emit: Callable | None
    every: int

    @property
    def slots(self) -> int:
        """Number of values that the loop may write."""
        return self.buffers[0].shape[0] - self.first

    def merged(self, written: Sequence[Any], slot: Any) -> list[Any]:
        """The buffers after the loop wrote `slot` values."""
        out = []
        for old, new in zip(self.buffers, written, strict=True):
            mask = (jnp.arange(self.slots) < slot).reshape((-1,) + (1,) * (new.ndim - 1))
            out.append(jnp.concatenate([old[: self.first], jnp.where(mask, new, old[self.first :])]))
        return out


def _sub(asked: Asked, sub: Any, state: SaveState) -> Saved:
    value = lambda t, y: [t, *jtu.tree_leaves(sub.fn(t, y, asked.args))]  # noqa: E731
    due: Callable | None = None
    sample: Callable | None = None
    emit: Callable | None = None
    if sub.ts is not None:
        ts = sub.ts

        def within(k: Any, carry: Carry) -> Any:
            return (k < len(ts)) & (ts[k] <= carry.tnext)

        def interpolated(k: Any, carry: Carry, dense: Any) -> list[Any]:
            interpolation = asked.solver.interpolation_cls(t0=carry.tprev, t1=carry.tnext, **dense)
            return value(ts[k], interpolation.evaluate(ts[k]))

        due, sample = within, interpolated
    if sub.steps:
        emit = lambda carry, dense: value(carry.tprev, carry.y)  # noqa: E731
    first = 1 if sub.t0 else 0
    count = 0 if sub.ts is None else len(sub.ts)
    return Saved(first, [state.ts, *jtu.tree_leaves(state.ys)], count, due, sample, emit, sub.steps)


def _dense(state: Any) -> list[Saved]:
    """Dense output: the ends of the steps, and their dense values."""
    if state.dense_ts is None:
        return []
    emit_time = lambda carry, dense: [carry.tprev]  # noqa: E731
    emit_info = lambda carry, dense: jtu.tree_leaves(dense)  # noqa: E731
    times = Saved(1, [state.dense_ts], 0, None, None, emit_time, 1)
    infos = jtu.tree_leaves(state.dense_infos)
    return [times, *([Saved(0, infos, 0, None, None, emit_info, 1)] if infos else [])]


def outputs(asked: Asked, state: Any) -> list[Saved]:
    """The outputs of a solve that the loop fills: those of each `SubSaveAt` with times or steps, dense output."""
    subs = jtu.tree_leaves(asked.saveat.subs, is_leaf=_is_sub)
    states = jtu.tree_leaves(state.save_state, is_leaf=_is_save_state)
    filled = [_sub(asked, sub, s) for sub, s in zip(subs, states, strict=True) if sub.ts is not None or sub.steps]
    return [*filled, *_dense(state)]


def hides_stages(asked: Asked) -> bool:
    """Whether nothing outside the loop sees the solver state or the stages of a step."""
    saveat = asked.saveat
    subs = jtu.tree_leaves(saveat.subs, is_leaf=_is_sub)
    return asked.event is None and not (saveat.dense or saveat.solver_state or any(s.ts is not None for s in subs))


def finished(asked: Asked, state: Any, saved: Sequence[Saved], cursors: Sequence[Any], written: Any) -> dict[str, Any]:
    """The fields of Diffrax's state that hold what was saved."""
    subs = jtu.tree_leaves(asked.saveat.subs, is_leaf=_is_sub)
    states, structure = jtu.tree_flatten(state.save_state, is_leaf=_is_save_state)
    rest = iter(zip(saved, cursors, written, strict=True))
    done = []
    for sub, old in zip(subs, states, strict=True):
        if sub.ts is None and not sub.steps:
            done.append(old)
            continue
        output, (k, slot), buffers = next(rest)
        ts, *ys = output.merged(buffers, slot)
        done.append(SaveState(k, ts, jtu.tree_unflatten(jtu.tree_structure(old.ys), ys), slot + output.first))
    fields: dict[str, Any] = {"save_state": structure.unflatten(done)}
    for output, (_, slot), buffers in rest:
        merged, target = output.merged(buffers, slot), "dense_ts" if output.first else "dense_infos"
        treedef = jtu.tree_structure(getattr(state, target))
        fields[target] = jtu.tree_unflatten(treedef, merged)
        fields["dense_save_index"] = slot
    return fields


def leaves_of(saved: Saved) -> tuple[jax.ShapeDtypeStruct, ...]:
    """One slot of an output."""
    return tuple(jax.ShapeDtypeStruct(b.shape[1:], b.dtype) for b in saved.buffers)
