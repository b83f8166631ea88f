"""Two backends that hand all work to the built-in `xla`: one as it is, one with gradients that are wrong by 0.1 %."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from gradsolve_backend import AbstractBackend, Problem, hookimpl
from gradsolve_backend.plugins import backends


def xla() -> AbstractBackend:
    """The built-in backend. It is looked up when used: at import the host has not yet asked for backends."""
    return backends()["xla"]


@dataclasses.dataclass(frozen=True)
class ScaledKernels:
    """Other kernels, with the cotangents multiplied by `scale`."""

    inner: Any
    scale: float

    def against(self, call: Any) -> str:
        return self.inner.against(call)

    def records(self, solve: Any) -> bool:
        return self.inner.records(solve)

    def record(self, call: Any) -> list[tuple[Any, int | None]]:
        return self.inner.record(call)

    def record_room(self, solve: Any, memory: int | None) -> tuple[int, int]:
        return self.inner.record_room(solve, memory)

    def forward(self, call: Any, *arrays: Any) -> list[Any]:
        return self.inner.forward(call, *arrays)

    def tangent(self, call: Any, *arrays: Any) -> list[Any]:
        return self.inner.tangent(call, *arrays)

    def cotangent(self, call: Any, *arrays: Any) -> list[Any]:
        cotangents = self.inner.cotangent(call, *arrays)
        return [self.scale * ct if jnp.issubdtype(ct.dtype, jnp.inexact) else ct for ct in cotangents]


@dataclasses.dataclass(frozen=True)
class ExampleBackend(AbstractBackend):
    """Runs what `xla` runs, where `xla` runs."""

    name: str
    scale: float
    platforms: frozenset[str] = frozenset({"*"})
    rank: int = -1  # Below `stock`: taken only when asked for.

    def supports(self, problem: Problem) -> tuple[str, ...]:
        return xla().supports(problem)

    @property
    def kernels(self) -> ScaledKernels:
        return ScaledKernels(xla().kernels, self.scale)


@hookimpl
def gradsolve_backends() -> Sequence[AbstractBackend]:
    return (ExampleBackend("example", scale=1.0), ExampleBackend("wrong", scale=1.001))
