"""Kernels of machine code as operations of JAX: an XLA custom call that runs no Python and needs no GIL."""

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import struct
import sys
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources, util
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from gradsolve_backend.kernels import llvm_code
from gradsolve_backend.kernels.compat import ShapedArray
from gradsolve_backend.kernels.llvm_code import Code, compiled

TARGET = "gradsolve_llvm"
#: Versions of XLA's FFI whose header `ffi_entry.ll` was compared with.
KNOWN = ((0, 3), (0, 4), (0, 5))


# ---- whether it can be used --------------------------------------------------------------------------


@functools.cache
def api_version(header: Path) -> tuple[int, ...]:
    """Major and minor number of XLA's FFI, by its C header; empty if that does not tell."""
    text = header.read_text(encoding="utf-8") if header.is_file() else ""
    found = [re.search(rf"^#define XLA_FFI_API_{part} (\d+)$", text, re.MULTILINE) for part in ("MAJOR", "MINOR")]
    return tuple(int(match[1]) for match in found if match) if all(found) else ()


def _installed() -> tuple[int, ...]:
    return api_version(Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h"))


def unavailable() -> str:
    """Why kernels cannot be called here; empty if they can."""
    if util.find_spec("llvmlite") is None:
        return "llvmlite is not installed"
    if sys.byteorder != "little" or struct.calcsize("P") != 8:
        return "machine code is called on little-endian 64-bit machines only"
    version = _installed()
    if not version:
        return "the installed jaxlib does not tell the version of XLA's FFI: it comes without xla/ffi/api/c_api.h"
    if version not in KNOWN:
        known = ", ".join(f"{major}.{minor}" for major, minor in KNOWN)
        return f"the installed jaxlib has version {version[0]}.{version[1]} of XLA's FFI; supported are {known}"
    return ""


# ---- the table of loaded kernels ---------------------------------------------------------------------


class _Slot(ctypes.Structure):
    _fields_ = (("key", ctypes.c_int64), ("address", ctypes.c_uint64), ("holders", ctypes.c_int64))


class _Table:
    """The slots of `ffi_entry.ll`. XLA may hold a slot longer than Python does: its image is then kept as long."""

    def __init__(self, image: Any) -> None:
        # XLA calls into the handlers until the process ends: nothing may free them.
        self.image = image
        self.slots = (_Slot * 4096).from_address(image["gradsolve_slots"])
        self.drop = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(image["gradsolve_drop"])
        self.entered: weakref.WeakSet[Code] = weakref.WeakSet()
        self.left: deque[tuple[_Slot, Any]] = deque()
        self.lock = threading.Lock()

    def enter(self, code: Code) -> None:
        """Makes a kernel callable for as long as its code lives, or a program is loaded that calls it."""
        self.sweep()
        with self.lock:
            if code in self.entered:
                return
            slot = next((slot for slot in self.slots if slot.holders == 0), None)
            if slot is None:
                raise RuntimeError(f"{len(self.slots)} kernels are loaded, and no more can be: `jax.clear_caches()`.")
            slot.key, slot.address, slot.holders = code.key, code.address, 1
            self.entered.add(code)
            weakref.finalize(code, self.leave, slot, code.image).atexit = False

    def leave(self, slot: _Slot, image: Any) -> None:
        """Takes no lock and frees nothing, since the garbage collector calls it in the midst of anything."""
        self.drop(ctypes.addressof(slot))
        self.left.append((slot, image))

    def sweep(self) -> None:
        """Frees machine code that no program calls any more."""
        for _ in range(len(self.left)):
            with contextlib.suppress(IndexError):  # another thread sweeps, too
                slot, image = self.left.popleft()
                if slot.holders > 0:
                    self.left.append((slot, image))


def _runtime() -> dict[str, int]:
    """Addresses of what `ffi_entry.ll` needs of the operating system."""
    if os.name == "nt":
        memory, system, give_way = ctypes.CDLL("ucrtbase"), ctypes.CDLL("kernel32"), "SwitchToThread"
    else:
        memory = system = ctypes.CDLL(None)
        give_way = "sched_yield"
    functions = {"malloc": memory.malloc, "free": memory.free, "yield": system[give_way]}
    return {f"gradsolve_{name}": ctypes.cast(f, ctypes.c_void_p).value or 0 for name, f in functions.items()}


_LOCK = threading.Lock()
_EXPORTED = [f"gradsolve_{name}" for name in "slots version type type_info drop instantiate execute".split()]


def table() -> _Table:
    """The table of this process. At the first use its handlers are compiled and registered with XLA."""
    with _LOCK:
        return _table()


@functools.cache
def _table() -> _Table:
    if reason := unavailable():
        raise RuntimeError(f"Machine code cannot be called: {reason}.")
    llvm_code.bind(_runtime())
    text = resources.files("gradsolve_backend.kernels").joinpath("ffi_entry.ll").read_text(encoding="utf-8")
    image = llvm_code.linked(*llvm_code.stored(text), _EXPORTED)
    _register(image)
    return _Table(image)


def _register(image: Mapping[str, int]) -> None:
    """Makes the handlers known to XLA, which asks them for the version of its API and compares."""
    capsule = lambda name: jax.ffi.pycapsule(ctypes.c_void_p(image[f"gradsolve_{name}"]))  # noqa: E731
    (ctypes.c_int32 * 2).from_address(image["gradsolve_version"])[:] = _installed()
    kind: Any = {"type_id": capsule("type"), "type_info": capsule("type_info")}
    jax.ffi.register_ffi_type(f"{TARGET}_slot", kind, platform="cpu")
    stages = {stage: capsule(stage) for stage in ("instantiate", "execute")}
    jax.ffi.register_ffi_target(TARGET, stages, platform="cpu")


# ---- the operation -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """A text as a parameter of a JAX primitive, which is hashed and compared often."""

    text: str = field(compare=False, repr=False)
    digest: str

    @staticmethod
    def of(text: str) -> "Kernel":
        return Kernel(text, hashlib.sha256(text.encode()).hexdigest())


def _lowering(context: Any, *operands: Any, kernel: Kernel, outputs: Any, params: tuple[int, ...]) -> Any:
    module = context.module_context
    if module.lowering_parameters.for_export:
        raise ValueError(
            "Export of a solve on the backend `llvm` was asked for. Its machine code exists in this process only and "
            'cannot be exported: use `GradSolveAdjoint(backend="xla")`.'
        )
    code = compiled(kernel.text)
    table().enter(code)
    # Until the program is loaded; from then on it holds the slot itself.
    module.add_keepalive(code)
    rule = jax.ffi.ffi_lowering(TARGET)
    return rule(context, *operands, key=np.int64(code.key), params=np.asarray(params, np.int64))


call_p = Primitive("gradsolve_llvm")
call_p.multiple_results = True
call_p.def_abstract_eval(lambda *_, outputs, **__: [ShapedArray(o.shape, o.dtype) for o in outputs])
mlir.register_lowering(call_p, _lowering, platform="cpu")


@functools.partial(jax.jit, static_argnames=("kernel", "outputs", "params"))
def _jitted(*arrays: Any, **static: Any) -> list[Any]:
    return call_p.bind(*arrays, **static)


@call_p.def_impl
def _run(*arrays: Any, **static: Any) -> list[Any]:
    # Where jit is disabled, `_jitted` would come back here.
    with jax.disable_jit(False):
        return _jitted(*arrays, **static)


def call(text: str, outputs: Sequence[jax.ShapeDtypeStruct], params: Sequence[int], *arrays: Any) -> list[jax.Array]:
    """Runs a kernel on arrays.

    Args:
        text: LLVM IR that defines `void kernel(ptr buffers, ptr params, i64 task, i64 worker)`. `buffers` points to the
            data pointers of the arrays, then of the outputs; all are row-major.
        outputs: shapes and dtypes of the results. What the kernel does not write is undefined.
        params: what `params` points to. The first is the number of tasks, which are independent of each other. The
            second bounds the numbers of workers: of two calls that run at once, `worker` differs. The third is 0 if
            only one thread may work.

    Returns:
        The outputs.
    """
    if len(params) < 3:
        raise ValueError(f"A kernel takes at least 3 params (tasks, workers, threads), got {len(params)}.")
    plain = tuple(jax.ShapeDtypeStruct(o.shape, o.dtype) for o in outputs)
    return call_p.bind(*arrays, kernel=Kernel.of(text), outputs=plain, params=tuple(params))
