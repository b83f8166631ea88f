"""A problem and backends that run nothing, shared by the tests of the host."""

import dataclasses
from typing import Any

from gradsolve_backend import AbstractBackend, Problem
from gradsolve_backend.adapters.stock import StockBackend

PROBLEM = Problem(
    platform="cpu",
    solver="Tsit5",
    controller="PIDController",
    saving=("t1",),
    dimension=3,
    dtypes=("float64",),
    equations=100,
    no_scalar_form="",
    no_machine_code="",
    obstacles=(),
    max_steps=4096,
)


@dataclasses.dataclass(frozen=True)
class Fake(AbstractBackend):
    name: str
    rank: int = 10
    platforms: frozenset[str] = frozenset({"*"})
    reasons: tuple[str, ...] = ()
    own_loop: bool = False

    def supports(self, problem: Problem) -> tuple[str, ...]:
        return self.reasons

    @property
    def kernels(self) -> Any:
        return None if self.own_loop else object()


def named(*fakes: AbstractBackend) -> dict[str, AbstractBackend]:
    return {fake.name: fake for fake in fakes}


STOCK = StockBackend()
