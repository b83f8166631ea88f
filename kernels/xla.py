"""The `xla` backend: the loops as plain JAX, on any platform."""

from typing import Any

from gradsolve_backend.backend import AbstractBackend
from gradsolve_backend.hookspecs import hookimpl
from gradsolve_backend.kernels import loops, replay
from gradsolve_backend.problem import Problem


class XlaKernels:
    """Forward, tangent and cotangent sweeps as `jax.lax.while_loop`s over all lanes."""

    def against(self, call: Any) -> str:
        """What a derivative of a solve needs and this backend lacks: nothing."""
        return ""

    def records(self, solve: Any) -> bool:
        """Whether it can keep a record: the number of steps must be known beforehand."""
        return solve.max_steps is not None

    def record(self, call: Any) -> list[tuple[Any, int | None]]:
        """See `gradsolve_backend.kernels.loops.record_outcome`."""
        return loops.record_outcome(call)

    def record_room(self, solve: Any, memory: int | None) -> tuple[int, int]:
        """See `gradsolve_backend.kernels.loops.record_room`."""
        return loops.record_room(solve)

    def forward(self, call: Any, *arrays: Any) -> list[Any]:
        """See `gradsolve_backend.kernels.loops.forward`."""
        return loops.forward(call, *arrays)

    def tangent(self, call: Any, *arrays: Any) -> list[Any]:
        """See `gradsolve_backend.kernels.replay.tangent`."""
        return replay.tangent(call, *arrays)

    def cotangent(self, call: Any, *arrays: Any) -> list[Any]:
        """See `gradsolve_backend.kernels.replay.cotangent`."""
        return replay.cotangent(call, *arrays)


KERNELS = XlaKernels()


class XlaBackend(AbstractBackend):
    """Runs every solve that the adapters can describe."""

    name = "xla"
    platforms = frozenset({"*"})
    rank = 10

    def supports(self, problem: Problem) -> tuple[str, ...]:
        return ()

    @property
    def kernels(self) -> XlaKernels:
        return KERNELS


@hookimpl
def gradsolve_backends() -> list[AbstractBackend]:
    """Offers the `xla` backend."""
    return [XlaBackend()]
