"""The backend `stock`: Diffrax's own loop, which runs everything."""

from collections.abc import Sequence
from typing import Any, final

import diffrax

from gradsolve_backend.backend import AbstractBackend
from gradsolve_backend.hookspecs import hookimpl
from gradsolve_backend.problem import Problem

# As it is before `gradsolve_backend.install(replace=)` puts another in its place.
_LOOP = diffrax.RecursiveCheckpointAdjoint.loop


def own_loop(**given: Any) -> Any:
    """`diffrax.AbstractAdjoint.loop` of Diffrax's default adjoint."""
    return _LOOP(diffrax.RecursiveCheckpointAdjoint(), **given)


@final
class StockBackend(AbstractBackend):
    """Leaves stepping and differentiation to Diffrax, as `diffrax.RecursiveCheckpointAdjoint` does them."""

    name = "stock"
    platforms = frozenset({"*"})
    rank = 0

    def supports(self, problem: Problem) -> tuple[str, ...]:
        return ()

    @property
    def kernels(self) -> None:
        return None


@hookimpl
def gradsolve_backends() -> Sequence[AbstractBackend]:
    return (StockBackend(),)
