"""Asks the backends which solves they run, and why not the others: `python docs/supported.py` prints the tables.

Nothing is run: each row is a small solve, whose gradient is traced once.
"""

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import optimistix as optx

import gradsolve_backend
from gradsolve_backend import GradSolveAdjoint, Route, explain
from gradsolve_backend.config import AUTOMATIC
from gradsolve_backend.plugins import backends
from gradsolve_backend.route import route

CPU, GPU = "llvm", "pallas"
PID = diffrax.PIDController(rtol=1e-6, atol=1e-6)
Field = Callable[[Any, Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """What is asked for, the backend it takes on a CPU and on an NVIDIA GPU, and why not a fused one."""

    name: str
    taken: tuple[str, ...]
    reasons: tuple[str, ...]

    @property
    def line(self) -> str:
        """A line of a table in Markdown."""
        reasons = "; ".join(dict.fromkeys(reason for reason in self.reasons if reason))
        return f"| {' | '.join((self.name, *self.taken, reasons.replace('<', '&lt;')))} |"


@dataclasses.dataclass(frozen=True)
class Ask:
    """A solve of `field(t, y, p)` with keywords of `diffrax.diffeqsolve`; terms and saving may be functions of p."""

    name: str
    field: Field = lambda t, y, p: -p * y
    transform: Callable[[Callable], Callable] = jax.grad
    how: dict[str, Any] = dataclasses.field(default_factory=dict)

    def loss(self, p: Any) -> Any:
        """A real function of a number, which is the sum of all that is saved."""
        how: dict[str, Any] = {
            "terms": lambda p: diffrax.ODETerm(self.field),
            "solver": diffrax.Tsit5(),
            "t0": 0.0,
            "t1": 1.0,
            "dt0": 0.1,
            "y0": jnp.array([1.0, 0.5]),
            "stepsize_controller": PID,
            "adjoint": GradSolveAdjoint(backend="automatic"),
        } | self.how
        made = {name: how[name](p) for name in ("terms", "saveat") if callable(how.get(name))}
        solution = diffrax.diffeqsolve(**how | made, args=p)
        values = solution.evaluate(0.5) if solution.interpolation is not None else solution.ys
        return sum(jnp.sum(jnp.real(x)) for x in jax.tree.leaves(values))

    def row(self) -> Row:
        """What is taken by itself on either platform. The kernels for a GPU are asked about the call made for a CPU."""
        (here,) = explain(self.transform(self.loss), jnp.asarray(0.5))
        there = route(dataclasses.replace(here.problem, platform="cuda"), None, AUTOMATIC, backends())
        taken, reason = f"`{there.backend}`", _reason(there, GPU)
        if there.backend == GPU and (kernels := backends()[GPU].kernels) is not None:
            if not kernels.records(here.call.solve):
                taken, reason = "ValueError", f"`{GPU}` has no reverse mode without `max_steps`"
            elif against := kernels.against(here.call):
                there = there.derivative("xla", against)
                taken, reason = f"`{there.backend}`", _reason(there, GPU)
        return Row(self.name, (f"`{here.backend}`", taken), (_reason(here, CPU), reason))


def _reason(way: Route, name: str) -> str:
    """Why a solve does not take this backend; of its derivative, if only that is the reason."""
    reason = dict(way.others).get(name, "")
    derivative = reason.removeprefix(f"{name} runs this solve, but not its derivative: ")
    return reason if derivative == reason else f"of the derivative: {derivative}"


# ---- solvers ------------------------------------------------------------------------------------------


def solvers() -> Iterator[type[diffrax.AbstractSolver]]:
    """Every solver that Diffrax and this package export, by name."""
    found = [*vars(diffrax).values(), *(getattr(gradsolve_backend, name) for name in gradsolve_backend.__all__)]
    kinds = {kind for kind in found if inspect.isclass(kind) and issubclass(kind, diffrax.AbstractSolver)}
    named = (kind for kind in kinds if not inspect.isabstract(kind) and not kind.__name__.startswith("Abstract"))
    return iter(sorted(named, key=lambda kind: kind.__name__))


def _brownian(kind: type[diffrax.AbstractSolver], shape: tuple[int, ...]) -> diffrax.VirtualBrownianTree:
    # The solvers of Diffrax know several kinds of Levy area; each takes the one it needs.
    area: Any = getattr(kind(), "minimal_levy_area", diffrax.BrownianIncrement)
    concrete = {
        diffrax.AbstractSpaceTimeLevyArea: diffrax.SpaceTimeLevyArea,
        diffrax.AbstractSpaceTimeTimeLevyArea: diffrax.SpaceTimeTimeLevyArea,
    }.get(area, diffrax.BrownianIncrement)
    struct = jax.ShapeDtypeStruct(shape, jnp.float64)
    return diffrax.VirtualBrownianTree(0.0, 1.0, tol=1e-2, shape=struct, key=jax.random.key(0), levy_area=concrete)


def _noisy(kind: type[diffrax.AbstractSolver]) -> dict[str, Any]:
    def terms(p: Any) -> Any:
        noise = diffrax.ControlTerm(lambda t, y, p: jnp.full(2, 0.1), _brownian(kind, ()))
        return diffrax.MultiTerm(diffrax.ODETerm(lambda t, y, p: -p * y), noise)

    return {"terms": terms, "stepsize_controller": diffrax.ConstantStepSize()}


def _langevin(kind: type[diffrax.AbstractSolver]) -> dict[str, Any]:
    def terms(p: Any) -> Any:
        drift = diffrax.UnderdampedLangevinDriftTerm(p, p, lambda x, args: x)
        return diffrax.MultiTerm(drift, diffrax.UnderdampedLangevinDiffusionTerm(p, p, _brownian(kind, (1,))))

    y0 = (jnp.ones(1), jnp.ones(1))
    return {"terms": terms, "y0": y0, "stepsize_controller": diffrax.ConstantStepSize()}


def _split(kind: type[diffrax.AbstractSolver]) -> dict[str, Any]:
    one = diffrax.ODETerm(lambda t, y, p: -p * y)
    return {"terms": lambda p: diffrax.MultiTerm(one, one)}


def _pair(kind: type[diffrax.AbstractSolver]) -> dict[str, Any]:
    terms = diffrax.ODETerm(lambda t, y, p: y), diffrax.ODETerm(lambda t, y, p: -p * y)
    y0 = (jnp.ones(1), jnp.ones(1))
    return {"terms": terms, "y0": y0, "stepsize_controller": diffrax.ConstantStepSize()}


def _plain(kind: type[diffrax.AbstractSolver]) -> dict[str, Any]:
    adaptive = issubclass(kind, diffrax.AbstractAdaptiveSolver)
    return {} if adaptive else {"stepsize_controller": diffrax.ConstantStepSize()}


SDE = (diffrax.AbstractSRK, diffrax.EulerHeun, diffrax.ItoMilstein, diffrax.StratonovichMilstein)


def _how(kind: type[diffrax.AbstractSolver]) -> dict[str, Any]:
    """The keywords of a solve that suits the solver."""
    if issubclass(kind, diffrax.AbstractFosterLangevinSRK):
        return _langevin(kind)
    if issubclass(kind, SDE):
        return _noisy(kind)
    if issubclass(kind, diffrax.SemiImplicitEuler):
        return _pair(kind)
    if issubclass(kind, diffrax.AbstractRungeKutta) and not issubclass(
        kind, diffrax.AbstractERK | diffrax.AbstractDIRK
    ):
        return _split(kind)
    return _plain(kind)


def by_solver() -> list[Row]:
    """One row for each solver."""
    asks = (
        Ask(f"`{kind.__name__}`", how={"solver": diffrax.HalfSolver(diffrax.Euler())})
        if kind is diffrax.HalfSolver
        else Ask(f"`{kind.__name__}`", how={"solver": kind()} | _how(kind))
        for kind in solvers()
    )
    return [ask.row() for ask in asks]


# ---- everything else ----------------------------------------------------------------------------------


def _loop(length: int) -> Field:
    def field(t: Any, y: Any, p: Any) -> Any:
        return jax.lax.scan(lambda x, _: (x - p * x / length, None), -p * y, length=length)[0]

    return field


def _searched(t: Any, y: Any, p: Any) -> Any:
    return -p * jax.lax.while_loop(lambda x: jnp.sum(x) > 9.0, lambda x: x / 2, jax.lax.stop_gradient(y))


def _matrix(size: int) -> Ask:
    how = {"y0": jnp.ones(size)}
    return Ask(f"full matrix, {size} unknowns", lambda t, y, p: jnp.cos(jnp.ones((size, size))) @ y * -p, how=how)


def _lorenz96(size: int) -> Ask:
    def field(t: Any, y: Any, p: Any) -> Any:
        return (jnp.roll(y, -1) - jnp.roll(y, 2)) * jnp.roll(y, 1) - y + p

    return Ask(f"Lorenz-96, {size} unknowns", field, how={"y0": jnp.ones(size)})


def _saved(name: str, saveat: diffrax.SaveAt | Callable) -> Ask:
    return Ask(name, how={"saveat": saveat})


def _controlled(name: str, controller: Any, **more: Any) -> Ask:
    return Ask(name, how={"stepsize_controller": controller, **more})


def _event(name: str, condition: Callable, root_finder: Any = None) -> Ask:
    return Ask(name, how={"event": diffrax.Event(condition, root_finder)})


def _many_times(count: int) -> Ask:
    times = jnp.linspace(0.1, 0.9, count)
    return _saved(f"derivative by {count} times of `SaveAt(ts=)`", lambda p: diffrax.SaveAt(ts=p * times))


def _looked_up(t: Any, y: Any, p: Any) -> Any:
    return -p * y * jnp.interp(t, jnp.linspace(0.0, 1.0, 20), jnp.arange(20.0))


def asks() -> list[Ask]:
    """Controllers, saving, events, vector fields, states, derivatives."""
    grid = jnp.linspace(0.0, 1.0, 6)
    return [
        _controlled("`ConstantStepSize`", diffrax.ConstantStepSize()),
        _controlled("`StepTo`", diffrax.StepTo(ts=grid), dt0=None),
        _controlled("`PIDController`, every coefficient, `dtmin`, `dtmax`", _full_pid()),
        _controlled("`ClipStepSizeController`, `jump_ts`", diffrax.ClipStepSizeController(PID, jump_ts=grid[1:-1])),
        _saved("`SaveAt(ts=)`, 100 times", diffrax.SaveAt(ts=jnp.linspace(0.0, 1.0, 100))),
        _many_times(64),
        _many_times(65),
        _saved("`SaveAt(steps=True)`", diffrax.SaveAt(steps=True)),
        _saved("`SaveAt(dense=True)`", diffrax.SaveAt(dense=True)),
        _event("event, boolean", lambda t, y, args, **_: y[0] < 0.1),
        _event("event, real, with root finder", lambda t, y, args, **_: y[0] - 0.1, optx.Newton(1e-6, 1e-6)),
        _lorenz96(40),
        _lorenz96(400),
        _matrix(16),
        _matrix(64),
        Ask("state and times in float32", lambda t, y, p: -p.astype(y.dtype) * y, how=_single()),
        Ask("complex state", lambda t, y, p: 1j * p * y, how={"y0": jnp.ones(2, complex)}),
        Ask("lookup in a table, `jnp.interp`", _looked_up),
        Ask("`lax.cond`", lambda t, y, p: jax.lax.cond(t < 0.5, lambda: -p * y, lambda: p * y)),
        Ask("`lax.scan`, 64 iterations", _loop(64)),
        Ask("`lax.scan`, 65 iterations", _loop(65)),
        Ask("`lax.while_loop`", _searched),
        Ask("`jax.scipy.special.erf`", lambda t, y, p: jax.scipy.special.erf(-p * y)),
        Ask("`jax.scipy.special.i0`", lambda t, y, p: -p * jax.scipy.special.i0(y)),
        Ask("random numbers", lambda t, y, p: -p * y + jax.random.normal(jax.random.key(0), (2,))),
        Ask("`max_steps=None`", how={"max_steps": None}),
        Ask("progress meter", how={"progress_meter": diffrax.TextProgressMeter()}),
        Ask("forward mode, `jax.jacfwd`", transform=jax.jacfwd),
    ]


def _single() -> dict[str, Any]:
    # Times as well: Diffrax promotes the state to their dtype.
    return {"y0": jnp.ones(2, jnp.float32), **{k: jnp.float32(t) for k, t in (("t0", 0), ("t1", 1), ("dt0", 0.1))}}


def _full_pid() -> diffrax.PIDController:
    return diffrax.PIDController(
        1e-6, 1e-6, pcoeff=0.2, icoeff=0.4, dcoeff=0.05, dtmin=1e-6, dtmax=0.5, factormin=0.3, factormax=4.0
    )


# ---- backends -----------------------------------------------------------------------------------------


def by_rank() -> list[str]:
    """One line for each backend that is installed, in Markdown."""
    known = sorted(backends().values(), key=lambda each: (-each.rank, each.name))
    lines = []
    for backend in known:
        on = ", ".join(sorted(backend.platforms - backend.on_request)).replace("*", "anywhere")
        asked = ", ".join(sorted(backend.on_request)) or "-"
        lines.append(f"| `{backend.name}` | {backend.rank} | {on} | {asked} |")
    return lines


TABLES: dict[str, Callable[[], list[str]]] = {
    "solvers": lambda: [_HEADER.format("solver"), *(row.line for row in by_solver())],
    "features": lambda: [_HEADER.format("what, with `Tsit5`"), *(ask.row().line for ask in asks())],
    "backends": lambda: ["| backend | rank | taken by itself on | on request on |\n|---|---|---|---|", *by_rank()],
}
_HEADER = "| {} | on a CPU | on an NVIDIA GPU | why not the fused backend |\n|---|---|---|---|"


def table(name: str) -> str:
    """One of `TABLES`, in Markdown."""
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Complex dtype support")
        return "\n".join(TABLES[name]())


if __name__ == "__main__":
    for name in TABLES:
        print(table(name), end="\n\n")
