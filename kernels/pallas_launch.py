"""The launch of a Pallas kernel: its arrays, how they are cut into blocks, the interpreter where there is no GPU."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import mlir

from gradsolve_backend.kernels.compat import ShapedArray
from gradsolve_backend.kernels.pallas_layout import BOOL, stored_dtype
from gradsolve_backend.kernels.pallas_tuning import Tuning


@dataclass(frozen=True)
class Array:
    """An array of a kernel: its number, and which axes it has."""

    number: int
    lanes: bool = True


@dataclass(frozen=True)
class Apart:
    """A result with lanes whose elements are arrays of their own, so that a thread needs one offset for all of them."""

    elements: tuple[Array, ...]


Get = Callable[[Array], Any]  # from an array to its reference


@dataclass(eq=False)
class Launch:
    """The arrays of one kernel, and its launch."""

    name: str
    lanes: int
    columns: int
    tuning: Tuning
    inputs: list[Any] = field(default_factory=list)
    specs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    kernel: Callable[[bool, Get], None] | None = None

    @property
    def blocks(self) -> int:
        """Blocks of lanes."""
        return -(-self.lanes // self.tuning.block)

    def _spec(self, shape: Sequence[int], lanes: bool, columns: bool) -> pl.BlockSpec:
        own = list(shape[1:] if columns else shape)
        if lanes:
            own[-1] = self.tuning.block
        lead = (None,) if columns else ()
        zeros = (0,) * (len(own) - 1)

        def index(i: Any, c: Any) -> tuple[Any, ...]:
            return (*((c,) if columns else ()), *zeros, i if lanes else 0)

        return pl.BlockSpec((*lead, *own), index)

    def take(self, x: Any, lanes: bool = True, columns: bool = False) -> Array | None:
        """A further input; with columns their axis comes first, with lanes theirs comes last. None if it is empty."""
        if x.size == 0:
            return None
        x = x.astype(stored_dtype(x.dtype)) if x.dtype == BOOL else x
        self.inputs.append(x)
        self.specs.append(self._spec(x.shape, lanes, columns))
        return Array(len(self.inputs) - 1, lanes)

    def give(self, shape: tuple[int, ...], dtype: Any, columns: bool = False) -> Array | None:
        """A further result, whose last axis is that of lanes. None if it is empty."""
        shape = (*((self.columns,) if columns else ()), *shape, self.lanes)
        if 0 in shape:
            return None
        self.outputs.append((jax.ShapeDtypeStruct(shape, stored_dtype(dtype)), self._spec(shape, True, columns)))
        return Array(~(len(self.outputs) - 1))

    def apart(self, size: int, dtype: Any, columns: bool = False) -> Apart | None:
        """A further result with lanes, of so many elements. None if it is empty."""
        given = [self.give((), dtype, columns) for _ in range(size)]
        arrays = tuple(a for a in given if a is not None)
        return Apart(arrays) if arrays else None

    def sums(self, size: int, dtype: Any) -> Array | None:
        """A further result: for each column and block one sum per element."""
        if size == 0:
            return None
        aval = jax.ShapeDtypeStruct((self.columns, self.blocks, 1, size), dtype)
        self.outputs.append((aval, pl.BlockSpec((None, None, 1, size), lambda i, c: (c, i, 0, 0))))
        return Array(~(len(self.outputs) - 1), lanes=False)

    def run(self, interpret: bool, *inputs: Any) -> list[Any]:
        """The results of the kernel; `inputs` are those that were taken."""
        kernel, count = self.kernel, len(inputs)
        assert kernel is not None
        return pl.pallas_call(
            lambda *refs: kernel(interpret, lambda a: refs[a.number if a.number >= 0 else count + ~a.number]),
            out_shape=[aval for aval, _ in self.outputs],
            grid=(self.blocks, self.columns),
            in_specs=self.specs,
            out_specs=[spec for _, spec in self.outputs],
            compiler_params=plt.CompilerParams(num_warps=self.tuning.warps, num_stages=1),
            interpret=interpret,
            name=self.name,
        )(*inputs)

    def __call__(self, kernel: Callable[[bool, Get], None]) -> Callable[[Array | Apart | None], Any]:
        """Launch `kernel(interpreted, references)`; a function from arrays to results."""
        self.kernel = kernel
        found = kernel_p.bind(*self.inputs, launch=self) if self.outputs else []

        def result(array: Array | Apart | None) -> Any:
            if isinstance(array, Apart):
                return jnp.stack([found[~a.number] for a in array.elements], axis=-2)
            return None if array is None else found[~array.number]

        return result


# A primitive, since each platform then has a lowering: of `jax.lax.platform_dependent`, all branches that one program
# for several platforms needs are lowered for all of them, and Pallas's kernels for GPUs have no form on a CPU.
kernel_p = Primitive("gradsolve_kernel")
kernel_p.multiple_results = True
kernel_p.def_abstract_eval(lambda *_, launch: [ShapedArray(aval.shape, aval.dtype) for aval, _ in launch.outputs])


def _lowering(interpret: bool) -> Callable:
    return mlir.lower_fun(lambda *x, launch: launch.run(interpret, *x), multiple_results=True)


def _keep_within(kernel: Any, registers: int) -> None:
    """Tell Triton how many registers a thread of a kernel may have: its module can say so, and Pallas cannot."""
    from jaxlib.triton import dialect  # an optional dependency: not on all platforms

    config = {entry.name: entry.attr for entry in kernel.attributes["mhlo.backend_config"]}
    code = io.BytesIO()
    with ir.Context() as own:
        dialect.register_dialect(own)
        module = ir.Module.parse(config["ir"].value_bytes)
        limit = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), registers)
        module.operation.attributes["ttg.maxnreg"] = limit
        module.operation.write_bytecode(code)
    with kernel.context:
        config["ir"] = ir.StringAttr.get(code.getvalue())
        kernel.attributes["mhlo.backend_config"] = ir.DictAttr.get(config)


def _on_gpu(context: Any, *inputs: Any, launch: Launch) -> Any:
    found = _lowering(interpret=False)(context, *inputs, launch=launch)
    if launch.tuning.registers is not None:
        _keep_within(found[0].owner, launch.tuning.registers)
    return found


mlir.register_lowering(kernel_p, _lowering(interpret=True))
mlir.register_lowering(kernel_p, _on_gpu, platform="cuda")
