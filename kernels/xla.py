"""The `xla` backend: the loops as plain JAX, on any platform."""

from typing import Any

from gradsolve_backend.backend import AbstractBackend
from gradsolve_backend.hookspecs import hookimpl
from gradsolve_backend.kernels import loops, replay
from gradsolve_backend.problem import Problem


class XlaKernels:
    """Forward, tangent and cotangent sweeps as `jax.lax.while_loop`s over all lanes."""

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
