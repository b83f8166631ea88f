"""Runs solves of the backend `llvm` with every buffer of a kernel between pages that may not be touched.

Run as a program: a kernel that reads or writes beyond a buffer, or writes to an input, ends the process.
"""

import ctypes
import itertools
import mmap
import sys
from collections.abc import Callable, Iterator
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np

from gradsolve_backend import GradSolveAdjoint
from gradsolve_backend.kernels import llvm_lower
from gradsolve_backend.kernels.llvm_code import compiled

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)
NONE, READ = 0, 1
calls = itertools.count()


class Guarded:
    """Memory for `size` bytes that ends, or begins, where a protected page begins, or ends."""

    def __init__(self, size: int, at_end: bool) -> None:
        self.pages = max(1, -(-size // PAGE))
        self.map = mmap.mmap(-1, (self.pages + 2) * PAGE)
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.address = self.start + PAGE + (self.pages * PAGE - size if at_end else 0)
        self.size = size
        ctypes.memset(self.address, 0xFF, size)  # a float that is read before it is written is NaN
        self.protect(0, 1, NONE)
        self.protect(self.pages + 1, 1, NONE)

    def protect(self, first: int, count: int, how: int) -> None:
        """Allow only this of some pages."""
        if LIBC.mprotect(ctypes.c_void_p(self.start + first * PAGE), count * PAGE, how):
            raise OSError(ctypes.get_errno(), "mprotect")

    def fill(self, array: np.ndarray) -> None:
        """Hold the bytes of an array, which cannot be changed after that."""
        ctypes.memmove(self.address, np.ascontiguousarray(array).ctypes.data, self.size)
        self.protect(1, self.pages, READ)

    def array(self, aval: Any) -> np.ndarray:
        """A copy as an array."""
        return np.frombuffer(ctypes.string_at(self.address, self.size), aval.dtype).reshape(aval.shape)


def guarded(text: str, outputs: Any, params: Any, *arrays: Any) -> Any:
    """In place of `llvm_call.call`."""
    kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)

    def host(*inputs: Any) -> list[np.ndarray]:
        next(calls)
        code = compiled(text)
        found: list[np.ndarray] = []
        for at_end in (True, False):
            held = [Guarded(np.asarray(x).nbytes, at_end) for x in inputs]
            for memory, x in zip(held, inputs, strict=True):
                memory.fill(np.asarray(x))
            results = [Guarded(o.size * o.dtype.itemsize, at_end) for o in outputs]
            buffers = (ctypes.c_void_p * (len(held) + len(results)))(*(m.address for m in [*held, *results]))
            numbers = (ctypes.c_int64 * len(params))(*params)
            for task in range(params[0]):
                kernel(code.address)(ctypes.addressof(buffers), ctypes.addressof(numbers), task, task % params[1])
            found = [m.array(o) for m, o in zip(results, outputs, strict=True)]
        return found

    return jax.pure_callback(host, list(outputs), *arrays)


def loss(adjoint: Any, saveat: Any, lanes: int, t1: float, many: bool) -> Callable[..., Any]:
    field = diffrax.ODETerm(lambda t, y, p: jnp.stack([y[1], -p[0] * y[0] + jnp.interp(t, TIMES, p[1:])]))
    controller = diffrax.PIDController(rtol=1e-6, atol=1e-8)
    how = {"stepsize_controller": controller, "saveat": saveat, "adjoint": adjoint, "max_steps": 4096}

    def total(y0: Any, p: Any) -> Any:
        one = lambda y, p: diffrax.diffeqsolve(field, diffrax.Tsit5(), 0.0, t1, 0.01, y, p, **how).ys
        ys = jax.vmap(one, in_axes=(0, 0 if many else None))(y0, p)
        leaves = [jnp.where(jnp.isfinite(x), x, 0.0) for x in jax.tree.leaves(ys)]
        return sum((jnp.sum(x**2) for x in leaves), jnp.zeros(()))

    return total


TIMES = np.linspace(0.0, 1.0, 5)


def cases() -> Iterator[tuple[str, Any, int, float, bool]]:
    ts = diffrax.SaveAt(ts=jnp.linspace(0.0, 1.0, 7))
    both = diffrax.SaveAt(subs=[diffrax.SubSaveAt(ts=jnp.array([0.2, 0.9]), steps=True), diffrax.SubSaveAt(steps=3)])
    yield "saved times", ts, 3, 1.0, False
    yield "two blocks and one lane", diffrax.SaveAt(t1=True), 9, 1.0, True
    yield "steps and subs", both, 5, 1.0, True
    yield "beyond the rows", diffrax.SaveAt(t1=True), 1, 120.0, False


def columns(ours: Callable[..., Any], wanted: Any, y0: Any, p: Any, count: int = 19) -> None:
    """Many tangents and many cotangents at once."""
    scales = jnp.linspace(-1.0, 1.0, count)
    pushed = jax.vmap(lambda s: jax.jvp(ours, (y0, p), (s * y0, s * p))[1])(scales)
    dot = sum(float(jnp.sum(a * b)) for a, b in zip(wanted, (y0, p), strict=True))
    np.testing.assert_allclose(pushed, scales * dot, rtol=1e-4, atol=1e-12)
    pulled = jax.vmap(jax.vjp(ours, y0, p)[1])(scales)
    for a, b in zip(pulled, wanted, strict=True):
        both = np.multiply.outer(scales, b)
        np.testing.assert_allclose(a, both, rtol=1e-4, atol=1e-4 * float(jnp.max(jnp.abs(b))))


def main() -> None:
    """Compare gradients and tangents with stock Diffrax, whose steps rounding may change at the kinks of the table."""
    jax.config.update("jax_enable_x64", True)
    llvm_lower.call_kernel = guarded
    for name, saveat, lanes, t1, many in cases():
        y0 = jnp.stack([jnp.linspace(0.5, 2.0, lanes), jnp.zeros(lanes)], 1)
        p = jnp.array([2.0, 0.1, 0.3, -0.2, 0.0, 0.1])
        p = jnp.tile(p, (lanes, 1)) * jnp.linspace(0.9, 1.1, lanes)[:, None] if many else p
        ours, stock = (
            loss(adjoint, saveat, lanes, t1, many)
            for adjoint in (GradSolveAdjoint(backend="llvm"), diffrax.RecursiveCheckpointAdjoint())
        )
        wanted = jax.grad(stock, argnums=(0, 1))(y0, p)
        before = next(calls)
        found = jax.grad(ours, argnums=(0, 1))(y0, p)
        _, pushed = jax.jvp(ours, (y0, p), (y0, p))
        columns(ours, wanted, y0, p)
        assert next(calls) > before + 3, "no kernel ran"
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(jnp.max(jnp.abs(b))))
        dot = sum(float(jnp.sum(a * b)) for a, b in zip(wanted, (y0, p), strict=True))
        np.testing.assert_allclose(pushed, dot, rtol=1e-4)
        print(name, flush=True)
    print("within bounds")


if __name__ == "__main__":
    sys.exit(main())
