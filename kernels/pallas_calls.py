"""The functions of the backend `pallas` that run a solve."""

import functools
from typing import Any

from gradsolve_backend.kernels import pallas_lower, replay
from gradsolve_backend.kernels.pallas_forms import SUMS, without_form
from gradsolve_backend.kernels.pallas_layout import Memory, elements, record_avals
from gradsolve_backend.kernels.routines import Pieces
from gradsolve_backend.kernels.solve import Call, Solve
from gradsolve_backend.kernels.trace import inexact


def _with_samples(call: Call, first: Any, each: Any) -> list[Any]:
    """What makes the routine of a step, and those of its samples."""
    outputs = [o for o, x in enumerate(call.solve.outputs) if x.sample is not None]
    return [first, *(functools.partial(each, o) for o in outputs)]


class PallasKernels:
    """Forward, tangent and cotangent sweeps as one kernel each; where there is no GPU, in Pallas's interpret mode."""

    def against(self, call: Any) -> str:
        pieces = Pieces(call)
        if any(v.aval.mat.varying for v in call.replay.invars):
            return "its pieces do not follow the mesh axes of `jax.shard_map`; pass `check_vma=False` to it"
        count = sum(elements(call.solve.operands[i]) for i in call.operands)
        if count > SUMS:
            return f"its kernel sums cotangents in registers, at most {SUMS} of operands, and here there are {count}"
        return without_form(*_with_samples(call, pieces.back, pieces.sample_back))

    def records(self, solve: Any) -> bool:
        """The number of steps must be known beforehand."""
        return solve.max_steps is not None

    def record(self, call: Any) -> list[tuple[Any, int | None]]:
        """See `gradsolve_backend.kernels.pallas_layout.record_avals`."""
        return list(record_avals(call))

    def record_room(self, solve: Solve, memory: int | None) -> tuple[int, int]:
        """Rows and bytes of a lane's record for whatever has no part in step times."""
        if solve.max_steps is None:
            return 0, 0
        operands = tuple(i for i, a in enumerate(solve.operands) if inexact(a))
        linear = Call(solve, None, None, record=True, memory=memory, carry=solve.differentiated, operands=operands)
        record = Memory(Pieces(linear))
        return record.rows, record.bytes

    def forward(self, call: Any, *arrays: Any) -> list[Any]:
        return pallas_lower.forward(call, *arrays)

    def tangent(self, call: Any, *arrays: Any) -> list[Any]:
        """The sweep of `xla` does not read the record, and serves where this one has no kernel."""
        pieces = Pieces(call)
        if without_form(*_with_samples(call, pieces.push, pieces.sample_push)):
            return replay.tangent(call, *arrays)
        return pallas_lower.tangent(call, *arrays)

    def cotangent(self, call: Any, *arrays: Any) -> list[Any]:
        return pallas_lower.cotangent(call, *arrays)


KERNELS = PallasKernels()
