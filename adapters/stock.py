"""The backend `stock`: Diffrax's own loop, which runs everything."""

from collections.abc import Sequence
from typing import final

from gradsolve_backend.backend import AbstractBackend
from gradsolve_backend.hookspecs import hookimpl
from gradsolve_backend.problem import Problem


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
