"""No kernel of `pallas` reads or writes beyond its arrays, nor uses what nobody wrote.

The kernels run as Python here, operation by operation, on arrays that check each index. What no kernel has written yet
is NaN, or a number that would be seen.
"""

from collections.abc import Callable, Iterator
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from gradsolve_backend import GradSolveAdjoint
from gradsolve_backend.kernels.pallas_launch import Launch

POISON = -(2**20)


class Checked:
    """An array in place of a reference, that knows which of its lanes are there."""

    def __init__(self, array: np.ndarray, lanes: int | None, readonly: bool) -> None:
        self.array, self.lanes, self.readonly = array, lanes, readonly
        self.shape, self.dtype = array.shape, array.dtype

    @property
    def at(self) -> "Checked":
        return self

    def __getitem__(self, index: Any) -> Any:
        return (
            Place(self, index) if isinstance(index, tuple) and _many(index) else jnp.asarray(self.array[_whole(index)])
        )

    def __setitem__(self, index: Any, value: Any) -> None:
        assert not self.readonly
        self.array[_whole(index)] = np.asarray(value)


class Place:
    """Some elements of a checked array."""

    def __init__(self, held: Checked, index: tuple[Any, ...]) -> None:
        self.held, self.index = held, index

    def __getitem__(self, _: Any) -> Any:
        return load(self)

    def inside(self, mask: Any) -> tuple[Any, ...]:
        """The index where the mask holds, which must be within the array; that of padding may not matter."""
        columns = np.broadcast_arrays(*(np.asarray(i) for i in self.index))
        mask = np.ones(columns[0].shape, bool) if mask is None else np.asarray(mask)
        for column, size in zip(columns, self.held.shape, strict=True):
            assert np.all((column[mask] >= 0) & (column[mask] < size)), "out of bounds"
        return tuple(np.where(mask, c, 0) for c in columns)


def _many(index: tuple[Any, ...]) -> bool:
    return any(np.ndim(i) == 1 for i in index if not isinstance(i, slice))


def _whole(index: Any) -> Any:
    whole = index if isinstance(index, tuple) else (index,)
    return tuple(i if isinstance(i, slice) or i is Ellipsis else int(i) for i in whole)


def load(place: Any, mask: Any = None, other: Any = None) -> Any:
    if not isinstance(place, Place):
        return jnp.asarray(place)
    found = place.held.array[place.inside(mask)]
    return jnp.asarray(found if mask is None else np.where(mask, found, POISON if other is None else np.asarray(other)))


def store(place: Place, value: Any, mask: Any = None) -> None:
    assert not place.held.readonly
    index, kept = place.inside(mask), np.ones(np.shape(value), bool) if mask is None else np.asarray(mask)
    place.held.array[tuple(i[kept] for i in index)] = np.asarray(value)[kept]


def padded(x: np.ndarray, spec: Any, lanes: bool, size: int) -> np.ndarray:
    """An array with its lanes filled up to whole blocks by what must not be used."""
    if not lanes:
        return np.array(x)
    more = -x.shape[-1] % size
    filling = np.full((*x.shape[:-1], more), np.nan if x.dtype.kind == "f" else POISON, x.dtype)
    return np.concatenate([x, filling], axis=-1)


def run_checked(launch: Launch, kernel: Callable, inputs: Any) -> list[np.ndarray]:
    """The results of a kernel, block by block."""
    size = launch.tuning.block
    has_lanes = lambda spec: spec.block_shape[-1] == size and spec.index_map(1, 0)[-1] == 1  # noqa: E731
    arrays = [padded(np.asarray(x), s, has_lanes(s), size) for x, s in zip(inputs, launch.specs, strict=True)]
    empty = [np.full(a.shape, np.nan if a.dtype.kind == "f" else POISON, a.dtype) for a, _ in launch.outputs]
    specs = [*launch.specs, *(s for _, s in launch.outputs)]
    arrays += [padded(x, s, has_lanes(s), size) for x, (_, s) in zip(empty, launch.outputs, strict=True)]
    for block in range(launch.blocks):
        for column in range(launch.columns):
            refs = []
            for n, (array, spec) in enumerate(zip(arrays, specs, strict=True)):
                at = spec.index_map(block, column)
                cut = tuple(
                    i if b is None else slice(i * b, (i + 1) * b) for i, b in zip(at, spec.block_shape, strict=True)
                )
                refs.append(Checked(array[cut], size if has_lanes(spec) else None, n < len(inputs)))
            with pytest.MonkeyPatch.context() as patch, jax.disable_jit():
                patch.setattr(pl, "program_id", lambda axis, at=(block, column): at[axis])
                kernel(True, lambda a, refs=refs: refs[a.number if a.number >= 0 else len(inputs) + ~a.number])
    return [
        x[tuple(slice(n) for n in a.shape)] for x, (a, _) in zip(arrays[len(inputs) :], launch.outputs, strict=True)
    ]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Runs every kernel checked; the names of those that ran."""
    ran: list[str] = []

    def run(self: Launch, interpret: bool, *inputs: Any) -> list[Any]:
        kernel = self.kernel
        assert kernel is not None

        def host(*arrays: Any) -> list[np.ndarray]:
            ran.append(self.name)
            return run_checked(self, kernel, arrays)

        return jax.pure_callback(host, [aval for aval, _ in self.outputs], *inputs)

    monkeypatch.setattr(plt, "load", load)
    monkeypatch.setattr(plt, "store", store)
    monkeypatch.setattr(Launch, "run", run)
    yield ran


TIMES = np.linspace(0.0, 1.0, 5)


def loss(adjoint: Any, saveat: diffrax.SaveAt, many: bool, most: int) -> Callable[..., Any]:
    field = diffrax.ODETerm(lambda t, y, p: jnp.stack([y[1], -p[0] * y[0] + jnp.interp(t, TIMES, p[1:])]))
    how = {"saveat": saveat, "adjoint": adjoint, "max_steps": most, "throw": False}

    def total(y0: Any, p: Any, dts: Any) -> Any:
        one = lambda y, p, dt: diffrax.diffeqsolve(field, diffrax.Euler(), 0.0, 1.0, dt, y, p, **how).ys
        ys = jax.vmap(one, in_axes=(0, 0 if many else None, 0))(y0, p, dts)
        leaves = [jnp.where(jnp.isfinite(x), x, 0.0) for x in jax.tree.leaves(ys)]
        return sum((jnp.sum(x**2) for x in leaves), jnp.zeros(()))

    return total


BOTH = diffrax.SaveAt(subs=[diffrax.SubSaveAt(ts=jnp.array([0.2, 0.9]), steps=True), diffrax.SubSaveAt(steps=3)])
CASES = {
    "two blocks, saved times": (diffrax.SaveAt(ts=jnp.linspace(0.0, 1.0, 3)), 33, False, 4, None),
    "own table, steps and subs": (BOTH, 3, True, 5, None),
    "beyond the rows": (diffrax.SaveAt(t1=True), 2, True, 40, "least"),
}


@pytest.mark.parametrize("case", CASES)
def test_kernels_stay_within_their_arrays(checked, case):
    """And give what stock Diffrax gives, in both modes."""
    saveat, lanes, many, steps, memory = CASES[case]
    most = 64 if memory is None else 512
    y0 = jnp.stack([jnp.linspace(0.5, 2.0, lanes), jnp.zeros(lanes)], 1)
    p = jnp.array([2.0, 0.1, 0.3, -0.2, 0.0, 0.1])
    p = jnp.tile(p, (lanes, 1)) * jnp.linspace(0.9, 1.1, lanes)[:, None] if many else p
    dts = 1 / jnp.linspace(steps / 2, steps, lanes).round()
    if memory == "least":
        with pytest.raises(ValueError, match="at least [0-9]+") as told:
            jax.grad(loss(GradSolveAdjoint("pallas", 1), saveat, many, most))(y0, p, dts)
        memory = int(str(told.value).partition("at least ")[2].partition(",")[0])
    ours = loss(GradSolveAdjoint(backend="pallas", memory=memory), saveat, many, most)
    stock = loss(diffrax.RecursiveCheckpointAdjoint(), saveat, many, most)
    wanted = jax.jit(jax.grad(stock, argnums=(0, 1)))(y0, p, dts)
    assert_close(jax.jit(jax.grad(ours, argnums=(0, 1)))(y0, p, dts), wanted, rtol=1e-9, atol=1e-11)
    pushed = jax.jit(lambda y0, p: jax.jvp(lambda *x: ours(*x, dts), (y0, p), (y0, p))[1])(y0, p)
    np.testing.assert_allclose(pushed, sum(jnp.sum(a * b) for a, b in zip(wanted, (y0, p), strict=True)), rtol=1e-9)
    names = {"gradsolve_record", "gradsolve_cotangent", "gradsolve_tangent"}
    assert set(checked) == names | ({"gradsolve_again"} if memory else set())


def test_the_check_sees_what_it_should():
    place = Checked(np.zeros((2, 3)), None, False)[np.array([0, 2]), np.array([1, 1])]
    with pytest.raises(AssertionError, match="out of bounds"):
        load(place)
    assert load(place, np.array([True, False]))[0] == 0
