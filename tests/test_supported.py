"""The tables of what is supported, which the documentation asks the code for: they say what a solve then does."""

import dataclasses
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradsolve_backend
from gradsolve_backend import GradSolveAdjoint, explain
from gradsolve_backend.plugins import backends

FILE = Path(__file__).parents[1] / "docs" / "supported.py"


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("supported", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["supported"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


supported = loaded()
ASKS = {ask.name: ask for ask in supported.asks()}


def of_solver(kind):
    return supported.Ask(kind.__name__, how={"solver": kind()} | supported._how(kind))


# One solver of each kind of terms, and the reason if it is not fused.
SOLVERS = {
    diffrax.Tsit5: "",
    diffrax.SemiImplicitEuler: "",
    gradsolve_backend.Rodas4: "",
    diffrax.ShARK: "values of dtype key<fry> have no scalar form",
    diffrax.ALIGN: "values of dtype key<fry> have no scalar form",
}


@pytest.mark.parametrize("kind", SOLVERS)
def test_solvers_of_each_kind(kind):
    row = of_solver(kind).row()
    fused = ("`llvm`", "`pallas`") if not SOLVERS[kind] else ("`xla`", "`xla`")
    assert (row.taken, set(row.reasons)) == (fused, {SOLVERS[kind]})


def test_every_solver_is_listed():
    names = [kind.__name__ for kind in supported.solvers()]
    assert names == sorted(set(names)) and {"Tsit5", "Vern7", "Rodas5P", "HalfSolver", "QUICSORT"} <= set(names)
    assert not [name for name in names if name.startswith("Abstract")]


@pytest.mark.parametrize("name", ["`jax.scipy.special.erf`", "full matrix, 16 unknowns", "`StepTo`"])
def test_kernels_for_a_gpu_answer_as_when_they_are_traced(name):
    """The table asks them about a call that was made for a CPU."""
    ask = ASKS[name]
    row = ask.row()
    asked = dataclasses.replace(ask, how=ask.how | {"adjoint": GradSolveAdjoint(backend="pallas")})
    (route,) = explain(asked.transform(asked.loss), jnp.asarray(0.5))
    assert (row.taken[1] == "`pallas`") == (route.backend == "pallas")
    assert row.reasons[1] == supported._reason(route, "pallas")


def test_the_derivative_is_asked_for():
    few, many = (ASKS[f"derivative by {count} times of `SaveAt(ts=)`"].row() for count in (64, 65))
    assert few.taken == ("`llvm`", "`pallas`") and few.reasons == ("", "")
    assert many.taken == ("`xla`", "`xla`") and many.reasons[0].startswith("of the derivative: ")


def test_what_is_refused():
    row = ASKS["`max_steps=None`"].row()
    assert row.taken == ("`llvm`", "ValueError") and "max_steps" in row.line


@pytest.mark.parametrize("name", ["state and times in float32", "`lax.while_loop`"])
def test_a_solve_takes_the_way_that_is_listed(name):
    ask = ASKS[name]
    gradient = jax.grad(ask.loss)
    (route,) = explain(gradient, jnp.asarray(0.5))
    assert ask.row().taken[0] == f"`{route.backend}`" and np.isfinite(gradient(jnp.asarray(0.5)))


def test_names_are_unlike_and_lines_are_rows_of_a_table():
    assert len(ASKS) == len(supported.asks())
    assert all("|" not in name for name in ASKS)
    line = supported.Row("name", ("`xla`", "`xla`"), ("dtype key<fry>", "dtype key<fry>")).line
    assert line == "| name | `xla` | `xla` | dtype key&lt;fry> |"


def test_backends_are_those_that_are_installed():
    table = supported.table("backends")
    assert re.findall(r"^\| `(\w+)` ", table, re.MULTILINE) == [
        name for name, _ in sorted(backends().items(), key=lambda pair: (-pair[1].rank, pair[0]))
    ]
