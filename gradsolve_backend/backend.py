"""What the author of a backend implements."""

import abc
from typing import Any, Protocol

from gradsolve_backend.problem import Problem


class Kernels(Protocol):
    """Three traceable JAX functions that run a solve on lanes, and what must be known of them beforehand.

    In each, `call` is the static description of the solve that `gradsolve_backend.kernels` made,
    and `arrays` are the operands in the order that `call` states. Each returns the list of arrays
    that `call` states. They must agree with the built-in `xla` backend to round-off.
    """

    def against(self, call: Any) -> str:
        """Why a differentiated call cannot run here, a sentence; empty: it can. Else `xla` runs it, record and all."""
        ...

    def records(self, solve: Any) -> bool:
        """Whether a record of this solve can be kept, so that it can be differentiated in reverse mode."""
        ...

    def record(self, call: Any) -> list[tuple[Any, int | None]]:
        """The arrays of the record of a call: for each its abstract value, and how many axes precede its levels.

        None: the array has no axis for a level.
        """
        ...

    def record_room(self, solve: Any, memory: int | None) -> tuple[int, int]:
        """What is reserved to differentiate one lane in reverse: rows of its record, and bytes of all that it takes.

        `memory`: what the user asked for as the latter, which a backend may heed.
        """
        ...

    def forward(self, call: Any, *arrays: Any) -> list[Any]:
        """Run the adaptive loop; keep the record of the accepted steps where `call` asks for it."""
        ...

    def tangent(self, call: Any, *arrays: Any) -> list[Any]:
        """Push tangents of the operands through the recorded steps, first to last."""
        ...

    def cotangent(self, call: Any, *arrays: Any) -> list[Any]:
        """Pull cotangents of the outputs back through the recorded steps, last to first."""
        ...


class AbstractBackend(abc.ABC):
    """A way to run a solve. Subclass it, and offer an instance from the hook `gradsolve_backends`.

    Fields:
        name: what users write in `GradSolveAdjoint(backend=...)` and `GRADSOLVE_BACKEND`.
        platforms: where it runs, for example `frozenset({"cpu"})`; `frozenset({"*"})` is anywhere.
        rank: among the backends that can run a solve the one with the highest rank is taken.
            Built in: `stock` 0, `xla` 10, `llvm` 20, `pallas` 20.
        on_request: those of the platforms on which it is taken only if it is asked for by name.
    """

    name: str
    platforms: frozenset[str]
    rank: int
    on_request: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return f"<backend {self.name}>"

    @abc.abstractmethod
    def supports(self, problem: Problem) -> tuple[str, ...]:
        """Say what in this problem the backend cannot run.

        Called while a solve is traced, once for each solve, so it must be quick and must not
        compile anything. It must depend on `problem` alone: equal problems are answered equally.
        The host has already compared `platforms`, and for a backend with kernels it adds
        `problem.obstacles`; neither needs repeating.

        Args:
            problem: what is asked.

        Returns:
            Reasons against, a sentence each, which the user reads in the route; empty: it can run it.
        """

    @property
    @abc.abstractmethod
    def kernels(self) -> Kernels | None:
        """The functions that run the solve, or None: Diffrax's own loop runs it, stepping and differentiation alike.

        Read while a solve is traced, after the backend was chosen, so that it may import a compiler.
        """
