"""Values that were chosen by looking at the machine code of kernels: sizes of blocks, and how many registers."""

from dataclasses import dataclass

from gradsolve_backend.kernels.pallas_order import pressure
from gradsolve_backend.kernels.routines import Pieces
from gradsolve_backend.kernels.solve import Call

MANY = 2**16  # lanes, of which not all are on a GPU at once: the fewer registers, the more are
FREE = 64  # registers of a thread that never keep a lane out: there are at most 32 blocks on each processor
MOST = 128  # registers that are worth stating
CHOICES = 1 / 7  # of equations, at most, for the number of registers to be known
ALL = 255  # that a thread can have


@dataclass(frozen=True)
class Tuning:
    """Lanes of a block, a power of two, and warps of 32 threads that run it; registers of a thread, at most."""

    block: int = 32
    warps: int = 1
    registers: int | None = None


def forward_tuning(call: Call, lanes: int) -> Tuning:
    """How a forward pass is launched.

    An assembler that is free to spends registers on working ahead. With a record and many lanes it is told not to: the
    number is what the values of a step take, less what it saves by an order of its own. Where much is chosen and not
    computed, as in look-ups and linear systems, it saves nothing.
    """
    step = Pieces(call).step().program.jaxpr.jaxpr
    choices = sum(e.primitive.name == "select_n" for e in step.eqns)
    if not call.record or lanes < MANY or choices > CHOICES * len(step.eqns):
        return Tuning()
    registers = max(FREE, (pressure(step) - 8) // 8 * 8)
    return Tuning(registers=registers if registers <= MOST else None)


def tangent_tuning(call: Call) -> Tuning:
    """How a sweep of tangents is launched.

    An assembler that is free to may spill a few values, where it takes that for faster than fewer lanes at once. Told
    that it may take all registers, it does not.
    """
    return Tuning(registers=ALL if pressure(Pieces(call).step().program.jaxpr.jaxpr) > FREE else None)
