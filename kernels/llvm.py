"""The `llvm` backend: fused loops in machine code on a CPU, one SIMD element per lane."""

import functools
from typing import Any

import jax

from gradsolve_backend.backend import AbstractBackend
from gradsolve_backend.hookspecs import hookimpl
from gradsolve_backend.kernels import llvm_lower, replay
from gradsolve_backend.kernels.llvm_call import unavailable
from gradsolve_backend.kernels.llvm_loops import record_bytes, record_rows
from gradsolve_backend.kernels.llvm_ops import unsupported
from gradsolve_backend.kernels.routines import Pieces, Routine
from gradsolve_backend.kernels.scalar import NoScalarForm
from gradsolve_backend.kernels.solve import Call, Solve
from gradsolve_backend.kernels.trace import inexact
from gradsolve_backend.problem import Problem


def _without_form(*routines: Any) -> str:
    """Why one of these routines has no machine code."""
    try:
        made: list[Routine] = [routine() for routine in routines]
    except NoScalarForm as error:
        return str(error)
    return next((reason for r in made if (reason := unsupported(r.program.jaxpr))), "")


class LlvmKernels:
    """Forward, tangent and cotangent sweeps as one FFI call each."""

    def against(self, call: Any) -> str:
        pieces, outputs = Pieces(call), call.solve.outputs
        if any(v.aval.mat.varying for v in call.replay.invars):
            return "its pieces do not follow the mesh axes of `jax.shard_map`; pass `check_vma=False` to it"
        return _without_form(
            pieces.back,
            *(functools.partial(pieces.sample_back, o) for o, x in enumerate(outputs) if x.sample is not None),
        )

    def records(self, solve: Any) -> bool:
        return True

    def record(self, call: Any) -> list[tuple[Any, int | None]]:
        """The arrays of `llvm_lower.record_avals`, with the levels in front."""
        return [(jax.ShapeDtypeStruct((*call.sizes, *a.shape), a.dtype), 0) for a in llvm_lower.record_avals(call)]

    def record_room(self, solve: Solve, memory: int | None) -> tuple[int, int]:
        """Rows and bytes of a lane's record for whatever has no part in step times."""
        operands = tuple(i for i, a in enumerate(solve.operands) if inexact(a))
        linear = Call(solve, None, None, record=True, memory=memory, carry=solve.differentiated, operands=operands)
        pieces = Pieces(linear)
        return record_rows(pieces), sum(record_bytes(pieces))

    def forward(self, call: Any, *arrays: Any) -> list[Any]:
        return llvm_lower.forward(call, *arrays)

    def tangent(self, call: Any, *arrays: Any) -> list[Any]:
        """The sweep of `xla` does not read the record, and serves where this one has no machine code."""
        pieces = Pieces(call)
        outputs = [o for o, x in enumerate(call.solve.outputs) if x.sample is not None]
        if _without_form(pieces.push, *(functools.partial(pieces.sample_push, o) for o in outputs)):
            return replay.tangent(call, *arrays)
        return llvm_lower.tangent(call, *arrays)

    def cotangent(self, call: Any, *arrays: Any) -> list[Any]:
        return llvm_lower.cotangent(call, *arrays)


KERNELS = LlvmKernels()


class LlvmBackend(AbstractBackend):
    """Runs what has a scalar form, on a CPU."""

    name = "llvm"
    platforms = frozenset({"cpu"})
    rank = 20

    def supports(self, problem: Problem) -> tuple[str, ...]:
        return tuple(reason for reason in (unavailable(), problem.no_scalar_form, problem.no_machine_code) if reason)

    @property
    def kernels(self) -> LlvmKernels:
        return KERNELS


@hookimpl
def gradsolve_backends() -> list[AbstractBackend]:
    """Offers the `llvm` backend."""
    return [LlvmBackend()]
