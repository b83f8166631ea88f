"""The command `python -m gradsolve_backend doctor`: what is there, what works, and what is set where."""

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import diffrax
import jax
import jax.numpy as jnp
import numpy as np

from gradsolve_backend.adapters.adjoint import GradSolveAdjoint
from gradsolve_backend.config import KINDS, configure, nearest_file, read_file, setting, use_file
from gradsolve_backend.explain import explain
from gradsolve_backend.kernels.llvm_call import unavailable
from gradsolve_backend.kernels.llvm_ir import host_features
from gradsolve_backend.plugins import backends, plugin_manager

PACKAGES = ("gradsolve_backend", "jax", "jaxlib", "diffrax", "equinox", "optimistix", "lineax", "llvmlite", "numpy")
RATE = 1.5
TOLERANCE = 1e-4  # of a solve in float32
Lines = Iterator[str]


class Health(NamedTuple):
    """Whether a backend works here: `taken` is the one that ran; `trouble` is empty, or says what is wrong."""

    taken: str
    trouble: str


def run(say: Callable[[str], Any] = print) -> int:
    """Say all; 1 if solves that leave the choice to this machine and its settings do not work, else 0."""
    for title, section in (("Versions", _versions), ("Devices", _devices), ("Settings", _settings)):
        _say(say, title, section())
    try:
        _say(say, "Plugins", _plugins())
        _say(say, "Backends", _backends())
        default = probe(None)
    except Exception as error:  # Of a plugin or a setting: this command is there to report it.
        default = Health("", _told(error))
    if default.trouble:
        say(f"\nThe default does not work here. {default.trouble}")
        return 1
    say(f"\nThe default works here: {default.taken}.")
    return 0


def _told(error: Exception) -> str:
    """An error and what this package noted of it."""
    notes = [note for note in getattr(error, "__notes__", ()) if "gradsolve_backend" in note]
    return "\n  ".join([f"{type(error).__name__}: {error}", *notes])


def _say(say: Callable[[str], Any], title: str, lines: Lines) -> None:
    say(f"{title}\n" + "\n".join(f"  {line}" for line in lines) + "\n")


def _table(rows: Sequence[tuple[str, ...]]) -> Lines:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    yield from ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _versions() -> Lines:
    def of(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    yield from _table([("python", platform.python_version()), *((name, of(name)) for name in PACKAGES)])


def _devices() -> Lines:
    yield f"{jax.default_backend()}: {', '.join(str(device) for device in jax.devices())}"
    yield f"{platform.machine()}, {os.cpu_count()} cores"
    if reason := unavailable():
        yield f"vector width not known: {reason}"
    else:
        fma, bits, vector_math = host_features()
        known = (("fused multiply-add", fma), ("vector functions of libmvec", vector_math))
        more = [name for name, there in known if there]
        yield f"vectors of {bits} bits: {bits // 64} lanes in float64, {bits // 32} in float32{_listed(more)}"


def _listed(words: Sequence[str]) -> str:
    return f"; {', '.join(words)}" if words else ""


def _settings() -> Lines:
    """Values that are in force, and where they come from."""
    try:
        file = nearest_file(Path.cwd())
        use_file(None if file is None else read_file(file))
    except ValueError as error:
        yield f"wrong: {error}"
    rows = []
    for name in KINDS:
        try:
            found = setting(name)
            rows.append((name, "automatic" if found.value is None else str(found.value), f"from: {found.origin}"))
        except ValueError as error:
            rows.append((name, "wrong", str(error)))
    yield from _table(rows)
    known = {kind.variable for kind in KINDS.values()}
    for name in sorted(name for name in os.environ if name.startswith("GRADSOLVE_") and name not in known):
        yield f"{name} is set, and is no variable of this package. There are: {', '.join(sorted(known))}."


def _plugins() -> Lines:
    manager = plugin_manager()
    for name, plugin in manager.list_name_plugin():
        hooks = [caller.name for caller in manager.get_hookcallers(plugin) or ()]
        yield f"{name}: {', '.join(sorted(hooks))}"


def _backends() -> Lines:
    ranked = sorted(backends().values(), key=lambda backend: (-backend.rank, backend.name))
    here = explain(_loss, jnp.asarray(RATE))[0].problem.platform if ranked else ""
    rows = []
    for backend in ranked:
        if here in backend.on_request:
            state = "not tried: here it runs only if it is asked for by name"
        else:
            found = probe(backend.name)
            state = f"not usable: {found.trouble}" if found.trouble else "works"
        rows.append((backend.name, f"rank {backend.rank}", state))
    yield from _table(rows)


def _loss(rate: Any) -> Any:
    """`exp(-rate)`."""
    terms = diffrax.ODETerm(lambda t, y, rate: -rate * y)
    control = diffrax.PIDController(rtol=1e-5, atol=1e-7)
    adjoint = GradSolveAdjoint()
    start = jnp.ones((), rate.dtype)
    solution = diffrax.diffeqsolve(
        terms, diffrax.Tsit5(), 0, 1, None, start, rate, stepsize_controller=control, adjoint=adjoint
    )
    assert solution.ys is not None
    return solution.ys[0]


def probe(backend: str | None) -> Health:
    """Solve a problem with a known solution, and differentiate it; None: on the backend that is taken by default."""
    rate, wanted = jnp.asarray(RATE), np.array([np.exp(-RATE), -np.exp(-RATE)])
    with configure(backend=backend):
        (route,) = explain(jax.value_and_grad(_loss), rate)
        if backend is not None and route.backend != backend:
            return Health(route.backend, dict(route.others)[backend])
        try:
            found = np.stack(jax.value_and_grad(_loss)(rate))
        except Exception as error:  # Of a compiler or a device: this command is there to report it.
            return Health(route.backend, _told(error))
    if not np.allclose(found, wanted, rtol=TOLERANCE):
        return Health(route.backend, f"it gives {found} for exp(-{RATE}) and its slope, which are {wanted}")
    return Health(route.backend, "")
