"""The hooks about a single solve, by the plugins that the documentation shows."""

import importlib.metadata
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optimistix
import pytest
from fakes import PROBLEM, STOCK, named

from gradsolve_backend import GradSolveAdjoint, configure, explain, hooks
from gradsolve_backend.plugins import backends, load, plugin_manager
from gradsolve_backend.route import route

TEXT = (Path(__file__).parents[1] / "docs" / "plugins.md").read_text(encoding="utf-8")
Install = Callable[[str, str], ModuleType]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a plugin of one module where Python finds it, and returns the module."""
    backends()
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, source: str) -> ModuleType:
        (tmp_path / f"{name}.py").write_text(source)
        information = tmp_path / f"{name}-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (information / "entry_points.txt").write_text(f"[gradsolve_backend]\n{name} = {name}\n")
        monkeypatch.delitem(sys.modules, name, raising=False)
        manager = load(importlib.metadata.entry_points(group="gradsolve_backend"))
        monkeypatch.setattr(hooks, "plugin_manager", lambda: manager)
        # What was traced before was traced without the plugin.
        jax.clear_caches()
        return sys.modules[name]

    yield write
    jax.clear_caches()


def shown(name: str) -> str:
    """The source of a plugin that the documentation shows in full."""
    (found,) = re.findall(rf"^A complete plugin, `{name}\.py`.*?^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    return found


def end(rate: Any, solver: Any = None, backend: str | None = None, size: int = 2) -> Any:
    solver = diffrax.Tsit5() if solver is None else solver
    field = diffrax.ODETerm(lambda t, y, rate: -rate * y + jnp.sin(t))
    how = {"adjoint": GradSolveAdjoint(backend), "max_steps": 16}
    return diffrax.diffeqsolve(field, solver, 0.0, 1.0, 0.125, jnp.linspace(1, 2, size), rate, **how).ys[0, 0]


class TestSolverStep:
    def test_a_step_with_a_loop_runs_as_straight_line_code(self, install):
        solver = install("substeps", shown("substeps")).SubsteppedEuler()
        (found,) = explain(jax.grad(end), 0.7, solver)
        assert found.backend == "llvm"
        assert found.problem.solver == "SubsteppedEuler, stepped by the plugin substeps = substeps of substeps 1.0"

    def test_it_is_the_solvers_own_step(self, install):
        """Values are those of `solver.step`, gradients those of the same substeps taken as steps."""
        solver = install("substeps", shown("substeps")).SubsteppedEuler(substeps=3)
        stock = end(0.7, solver, "stock")
        slope = jax.jacfwd(lambda rate: _fine(rate, solver.substeps))(0.7)
        for backend in ("xla", "llvm"):
            np.testing.assert_allclose(end(0.7, solver, backend), stock, rtol=1e-14)
            for mode in (jax.grad, jax.jacfwd):
                np.testing.assert_allclose(mode(end)(0.7, solver, backend), slope, rtol=1e-12)

    def test_without_the_plugin_it_has_no_derivative_in_reverse(self, install):
        solver = install("substeps", _silent()).SubsteppedEuler()
        assert explain(end, 0.7, solver)[0].problem.solver == "SubsteppedEuler"
        with pytest.raises(ValueError, match="Reverse-mode differentiation does not work for lax.while_loop"):
            explain(jax.grad(end), 0.7, solver)

    def test_a_subclass_is_not_meant(self, install):
        module = install("substeps", shown("substeps"))

        class Own(module.SubsteppedEuler):
            pass

        assert explain(end, 0.7, Own())[0].problem.solver == "Own"

    def test_anything_but_a_function_is_refused(self, install):
        install("broken", _returning("gradsolve_solver_step(solver)", "3"))
        with pytest.raises(TypeError, match="a function or None is wanted"):
            explain(end, 0.7)


def _silent() -> str:
    """The documented solver with a hook that has no opinion."""
    return shown("substeps").replace("type(solver) is not SubsteppedEuler", "True")


def _fine(rate: Any, substeps: int) -> Any:
    y, size = jnp.linspace(1, 2, 2)[0], 0.125 / substeps
    for i in range(8 * substeps):
        y = y + size * (-rate * y + jnp.sin(i * size))
    return y


def _returning(signature: str, value: str) -> str:
    return f"from gradsolve_backend import hookimpl\n@hookimpl\ndef {signature}:\n    return {value}\n"


class TestChoose:
    def test_the_policy_of_the_documentation(self, install):
        install("policy", shown("policy"))
        (small,), (large,) = explain(end, 0.7), explain(lambda rate: end(rate, size=4), 0.7)
        assert (small.backend, large.backend) == ("llvm", "xla")
        assert large.why == 'asked for by gradsolve_choose() -> "xla" of the plugin policy = policy of policy 1.0'
        assert "asks for another" in dict(large.others)["llvm"]

    @pytest.mark.parametrize("asked", ["argument", "configure", "environment"])
    def test_who_asks_for_a_backend_gets_it(self, asked, install, monkeypatch):
        install("policy", _returning("gradsolve_choose(problem)", "'xla'"))
        monkeypatch.setenv("GRADSOLVE_BACKEND", "llvm" if asked == "environment" else "")
        with configure(backend="llvm" if asked == "configure" else None):
            assert explain(end, 0.7, None, "llvm" if asked == "argument" else None)[0].backend == "llvm"

    def test_the_first_name_counts(self, install):
        install("first", _returning("gradsolve_choose()", "'stock'"))
        assert explain(end, 0.7)[0].backend == "stock"

    def test_a_backend_that_cannot_is_not_taken_silently(self, install):
        install("policy", _returning("gradsolve_choose(problem)", "'llvm'"))
        finder = diffrax.VeryChord(1e-3, 1e-3, optimistix.max_norm, linear_solver=lx.QR())
        (found,) = explain(end, 0.7, diffrax.Kvaerno3(root_finder=finder))
        assert found.backend == "xla" and "in place of gradsolve_choose()" in found.why

    def test_a_name_that_does_not_exist(self, install):
        install("policy", _returning("gradsolve_choose(problem)", "'unheard'"))
        with pytest.raises(ValueError, match='gradsolve_choose.. -> "unheard" of the plugin policy .*There are: '):
            explain(end, 0.7)

    @pytest.mark.parametrize("value, kind", [("3", TypeError), ("1 / 0", ZeroDivisionError)])
    def test_errors_name_the_plugin(self, value, kind, install):
        install("policy", _returning("gradsolve_choose(problem)", value))
        with pytest.raises(kind) as caught:
            explain(end, 0.7)
        assert "policy = policy of policy 1.0" in f"{caught.value} {getattr(caught.value, '__notes__', '')}"


class TestRouted:
    def test_the_counter_of_the_documentation(self, install):
        module = install("counts", shown("counts"))
        explain(jax.vmap(jax.grad(end)), jnp.ones(3))
        explain(end, 0.7, None, "stock")
        assert module.TRACED == {"llvm": 1, "stock": 1}
        assert [solver for solver, _ in module.SLOWER] == ["Tsit5"]

    def test_a_compiled_solve_is_told_once(self, install):
        module, function = install("counts", shown("counts")), jax.jit(end)
        for rate in (0.3, 0.4):
            function(rate)
        assert module.TRACED == {"llvm": 1}

    def test_a_derivative_that_takes_another_way_is_told(self, install, monkeypatch):
        module = install("counts", shown("counts"))
        monkeypatch.setattr(type(backends()["llvm"].kernels), "against", lambda self, call: "it must not be")
        explain(jax.grad(end), 0.7)
        assert module.TRACED["llvm"] == 1 and module.TRACED["xla"] >= 1
        assert module.SLOWER[0][1] == "llvm runs this solve, but not its derivative: it must not be"

    def test_an_answer_is_refused(self, install):
        install("wrong", _returning("gradsolve_routed(route)", "route.backend"))
        with pytest.raises(TypeError, match="'llvm'; nothing or None is wanted"):
            explain(end, 0.7)


class TestLog:
    LINE = route(PROBLEM, None, "automatic", named(STOCK)).line

    def test_line(self):
        assert self.LINE == (
            "stock (Tsit5, PIDController, saves t1, 3 x float64, on cpu): "
            "the highest rank, 0, of all that can run this solve."
        )

    def test_one_record_for_each_traced_solve(self, caplog, monkeypatch):
        monkeypatch.setenv("GRADSOLVE_LOG", "routes")
        jax.clear_caches()
        function = jax.jit(end, static_argnames=("backend",))
        for name in ("stock", "xla", "llvm", "llvm"):
            function(0.7, backend=name)
        records = [r for r in caplog.records if r.name == "gradsolve_backend.routes"]
        assert [r.levelno for r in records] == [logging.INFO] * 3
        for name, record in zip(("stock", "xla", "llvm"), records, strict=True):
            assert re.match(rf".*test_hooks\.py:\d+: {name} \(Tsit5, ", record.getMessage())

    def test_nothing_is_logged_unless_asked_for(self, caplog):
        with configure(log="off"):
            explain(end, 0.7)
        assert not caplog.records


def test_installed_plugins_have_no_say_of_a_single_solve():
    """The built-in ones offer backends only."""
    for name in ("gradsolve_choose", "gradsolve_solver_step", "gradsolve_routed"):
        assert not getattr(plugin_manager().hook, name).get_hookimpls()
