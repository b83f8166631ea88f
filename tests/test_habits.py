"""Public objects keep the habits of the ecosystem, and an import changes nothing."""

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from fakes import PROBLEM, STOCK, named

import gradsolve_backend
from gradsolve_backend import GradSolveAdjoint, configure, explain, install
from gradsolve_backend.route import route

IMPORT = """
import json, logging, os, signal, sys, threading, warnings
import diffrax, equinox, optimistix, jax, jax.numpy, llvmlite, rich, matplotlib
warnings.simplefilter("error")

def state():
    config = {name: repr(value) for name, value in jax.config.values.items()}
    return {"environment": dict(os.environ), "config": config, "handlers": len(logging.getLogger().handlers),
            "path": list(sys.path), "filters": len(warnings.filters), "hooks": repr(sys.excepthook),
            "threads": threading.active_count(), "signal": repr(signal.getsignal(signal.SIGINT)),
            "plugins": jax.lib is not None, "key": repr(jax.jit(lambda x: x).lower(1.0).as_text())}

before = state()
import gradsolve_backend
after = state()
json.dump([[name, before[name], after[name]] for name in before if before[name] != after[name]], sys.stdout)
"""


def test_import_changes_nothing_and_warns_of_nothing():
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, env=os.environ.copy())
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and json.loads(done.stdout) == []


@pytest.mark.parametrize(
    "shown, text",
    [
        (GradSolveAdjoint(), "GradSolveAdjoint()"),
        (GradSolveAdjoint("xla", memory=4096), "GradSolveAdjoint(backend='xla', memory=4096)"),
        (gradsolve_backend.Problem, "<class 'gradsolve_backend.problem.Problem'>"),
    ],
)
def test_reprs(shown, text):
    assert "".join(repr(shown).split()) == "".join(text.split())


def test_reprs_are_readable_for_every_public_object():
    """None has an address or a hidden field in it."""
    with configure(backend="xla") as settings, install() as installed:
        taken = route(PROBLEM, None, "automatic", named(STOCK))
        for each in (GradSolveAdjoint(), PROBLEM, taken, settings, installed, explain(lambda: 1), STOCK):
            assert " at 0x" not in repr(each) and "environment" not in repr(each)


class TestAdjoint:
    def test_equal_and_hashable(self):
        assert GradSolveAdjoint() == GradSolveAdjoint() != GradSolveAdjoint("xla")
        assert len({GradSolveAdjoint(), GradSolveAdjoint(), GradSolveAdjoint("xla")}) == 2

    def test_a_pytree_without_leaves(self):
        adjoint = GradSolveAdjoint("xla", 4096)
        leaves, structure = jax.tree.flatten(adjoint)
        assert leaves == [] and jax.tree.unflatten(structure, []) == adjoint
        assert jax.tree.map(lambda x: x, {"adjoint": adjoint}) == {"adjoint": adjoint}
        assert hash(structure) == hash(jax.tree.structure(GradSolveAdjoint("xla", 4096)))

    def test_an_argument_of_compiled_functions(self):
        """Part of a model, as an argument of `eqx.filter_jit`, and static for `jax.jit`."""
        traced = []

        def end(adjoint: Any, rate: Any) -> Any:
            traced.append(1)
            terms = diffrax.ODETerm(lambda t, y, rate: -rate * y)
            return diffrax.diffeqsolve(terms, diffrax.Euler(), 0, 1, 0.25, jnp.array(1.0), rate, adjoint=adjoint).ys[0]

        wanted = (1 - 0.25 * 0.5) ** 4
        for compiled in (eqx.filter_jit(end), jax.jit(end, static_argnums=0)):
            traced.clear()
            for _ in range(2):
                assert abs(compiled(GradSolveAdjoint("xla"), jnp.array(0.5)) - wanted) < 1e-12
            assert traced == [1]

    def test_fields_can_be_replaced(self):
        assert dataclasses.replace(GradSolveAdjoint(), backend="xla") == GradSolveAdjoint("xla")


@pytest.mark.filterwarnings("error")
def test_normal_use_prints_and_warns_of_nothing(capfd):
    terms = diffrax.ODETerm(lambda t, y, rate: -rate * y)

    def loss(rate: Any) -> Any:
        return diffrax.diffeqsolve(
            terms, diffrax.Heun(), 0, 1, 0.25, jnp.ones(2), rate, adjoint=GradSolveAdjoint()
        ).ys.sum()  # fmt: skip

    jax.block_until_ready(jax.vmap(jax.grad(loss))(jnp.linspace(0.1, 0.2, 3)))
    assert capfd.readouterr() == ("", "")
