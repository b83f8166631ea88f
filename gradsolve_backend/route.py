"""Which backend runs a solve, and why."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from gradsolve_backend.backend import AbstractBackend
from gradsolve_backend.config import as_written
from gradsolve_backend.problem import Problem


@dataclasses.dataclass(frozen=True)
class Route:
    """Which backend runs a solve, why, and why not the others."""

    #: Name of the backend.
    backend: str
    #: Why this one, a sentence.
    why: str
    #: Name of every other backend and why it is not taken.
    others: tuple[tuple[str, str], ...]
    problem: Problem
    #: Number of solves that run at once under `jax.vmap`; None where Diffrax's own loop runs them, which does not tell.
    lanes: int | None = None
    #: Steps that the record of a lane has room for; what is beyond is run again when the solve is differentiated.
    record_rows: int = 0
    #: Bytes reserved to differentiate one lane in reverse: its record, and checkpoints.
    record_bytes: int = 0
    #: Measures what is held, from a static description of the solve and its lanes.
    measure: Callable[[Any], tuple[int | None, int | None]] | None = dataclasses.field(
        default=None, compare=False, repr=False
    )
    #: That description; None unless `gradsolve_backend.explain` found the solve in a program.
    call: Any = dataclasses.field(default=None, compare=False, repr=False)

    def holding(
        self, rows: int, record: int, measure: Callable[[Any], tuple[int | None, int | None]] | None
    ) -> "Route":
        """The route with what its backend reserves, and how to measure what it holds."""
        return dataclasses.replace(self, record_rows=rows, record_bytes=record, measure=measure)

    def derivative(self, backend: str, reason: str) -> "Route":
        """The route of a solve that is differentiated, which this one's backend cannot do."""
        why = f"{self.backend} runs this solve, but not its derivative: {reason}"
        others = ((self.backend, why), *(pair for pair in self.others if pair[0] != backend))
        return dataclasses.replace(self, backend=backend, why=why, others=others)

    @property
    def line(self) -> str:
        """The route in one line."""
        p = self.problem
        others = "".join(f" Not {name}: {reason}." for name, reason in self.others)
        solve = f"{p.solver}, {p.controller}, saves {', '.join(p.saving)}, {p.dimension} x {'/'.join(p.dtypes)}"
        return f"{self.backend} ({solve}, on {p.platform}): {self.why.removesuffix('.')}.{others}"

    @functools.cached_property
    def _held(self) -> tuple[int | None, int | None]:
        return (None, None) if self.measure is None or self.call is None else self.measure(self.call)

    @property
    def bytes_forward(self) -> int | None:
        """Bytes that all lanes hold, undifferentiated, as XLA reserves them; None where Diffrax's own loop runs them.

        The solve is compiled for it, but not run. Arrays that Diffrax itself makes before and after the loop, some of
        the size of the state, are not in it.
        """
        return self._held[0]

    @property
    def bytes_gradient(self) -> int | None:
        """The same of a gradient in reverse mode; None also where there is none."""
        return self._held[1]


def route(problem: Problem, requested: str | None, origin: str, backends: Mapping[str, AbstractBackend]) -> Route:
    """Choose the backend of a solve.

    | a backend is asked for | it exists | it can run the problem | taken                                   |
    |------------------------|-----------|------------------------|-----------------------------------------|
    | no                     |           |                        | the highest rank that can, then by name |
    | yes                    | no        |                        | none: ValueError                        |
    | yes                    | yes       | yes                    | that one                                |
    | yes                    | yes       | no                     | the highest rank that can, then by name |

    A backend can run a problem if it runs on the platform (is asked for, where it runs on request only), has no
    reason against the problem, and, should it have kernels of its own, the problem has no obstacle for kernels in
    general.

    Args:
        problem: what is asked.
        requested: name of the backend asked for; None: choose.
        origin: where the request came from, as `gradsolve_backend.config.requested_backend` says it.
        backends: all backends by name.

    Raises:
        ValueError: if no backend has the requested name, or none can run the problem.
    """
    if requested is not None and requested not in backends:
        raise ValueError(
            f"{as_written(requested, origin)}: no plugin offers a backend of this name. "
            f"There are: {', '.join(sorted(backends))}."
        )
    ranked = sorted(backends.values(), key=lambda backend: (-backend.rank, backend.name))
    against = {backend.name: _reasons_against(backend, problem, requested) for backend in ranked}
    able = [backend for backend in ranked if not against[backend.name]]
    refused = requested is not None and bool(against[requested])
    if requested is not None and not refused:
        able = [backends[requested]]
    if not able:
        raise ValueError(f"No backend can run this solve. {_listed(against)}")
    taken = able[0]
    return Route(
        backend=taken.name,
        why=_why(taken, requested, origin, against),
        others=tuple(
            (name, "; ".join(reasons) or _passed_over(backends[name], taken, None if refused else requested, origin))
            for name, reasons in against.items()
            if name != taken.name
        ),
        problem=problem,
    )


def _reasons_against(backend: AbstractBackend, problem: Problem, requested: str | None) -> tuple[str, ...]:
    if not backend.platforms & {"*", problem.platform}:
        return (f"it runs on {', '.join(sorted(backend.platforms))}, and this solve is on {problem.platform}",)
    if problem.platform in backend.on_request and requested != backend.name:
        return (f"on {problem.platform} it runs only if it is asked for",)
    obstacles = () if backend.kernels is None else problem.obstacles
    return tuple(dict.fromkeys((*obstacles, *backend.supports(problem))))


def _why(taken: AbstractBackend, requested: str | None, origin: str, against: Mapping[str, tuple[str, ...]]) -> str:
    if requested is None:
        refused = {name: reasons for name, reasons in against.items() if reasons}
        rank = f"the highest rank, {taken.rank}, of all that can run this solve"
        return rank if taken.kernels is not None or not refused else f"{rank}. {_listed(refused)}"
    asked = as_written(requested, origin)
    if taken.name == requested:
        return f"asked for by {asked}"
    return f"the highest rank that can run this solve, in place of {asked}. {_listed({requested: against[requested]})}"


def _passed_over(other: AbstractBackend, taken: AbstractBackend, requested: str | None, origin: str) -> str:
    if requested is None:
        return f"it could run this solve, but has rank {other.rank}, and {taken.name} has {taken.rank}"
    return f"it could run this solve, but {as_written(requested, origin)} asks for another"


def _listed(against: Mapping[str, tuple[str, ...]]) -> str:
    return " ".join(f"Not {name}: {'; '.join(reasons)}." for name, reasons in against.items())
