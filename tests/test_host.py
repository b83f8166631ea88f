"""The host without kernels: problems, requests, routes, plugins."""

import dataclasses
import importlib.metadata
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pluggy
import pytest
from fakes import PROBLEM, STOCK, Fake, named

import gradsolve_backend
from gradsolve_backend.config import requested_backend, requested_memory
from gradsolve_backend.plugins import backends, collect, load, plugin_manager
from gradsolve_backend.route import route

SLOW, FAST = Fake("slow", rank=10), Fake("fast", rank=20)
CANNOT = Fake("cannot", rank=30, reasons=("primitive `sort` has no scalar form",))
GPU_ONLY = Fake("gpu_only", rank=40, platforms=frozenset({"cuda"}))


class TestProblem:
    def test_equal_problems_are_one_key(self):
        assert len({PROBLEM, dataclasses.replace(PROBLEM)}) == 1
        assert PROBLEM != dataclasses.replace(PROBLEM, dimension=4)

    def test_platform_must_say_whose_gpu(self):
        with pytest.raises(ValueError, match='"cuda" or "rocm"'):
            dataclasses.replace(PROBLEM, platform="gpu")

    @pytest.mark.parametrize("equations, reason", [(None, ""), (100, "there is a sort")])
    def test_scalar_form_or_reason(self, equations, reason):
        with pytest.raises(ValueError, match="scalar form"):
            dataclasses.replace(PROBLEM, equations=equations, no_scalar_form=reason)


class TestRequest:
    @pytest.mark.parametrize(
        "argument, variable, wanted",
        [
            (None, None, (None, "automatic")),
            (None, "", (None, "automatic")),
            (None, "  ", (None, "automatic")),
            (None, "stock", ("stock", "GRADSOLVE_BACKEND")),
            (None, " stock ", ("stock", "GRADSOLVE_BACKEND")),
            ("xla", None, ("xla", "argument")),
            ("xla", "stock", ("xla", "argument")),
            ("", "stock", ("", "argument")),
        ],
    )
    def test_argument_before_variable_before_automatic(self, argument, variable, wanted, monkeypatch):
        monkeypatch.delenv("GRADSOLVE_BACKEND", raising=False)
        if variable is not None:
            monkeypatch.setenv("GRADSOLVE_BACKEND", variable)
        assert requested_backend(argument) == wanted


class TestMemory:
    @pytest.mark.parametrize(
        "argument, variable, wanted",
        [(None, None, None), (None, " ", None), (None, "4096", 4096), (8192, None, 8192), (8192, "4096", 8192)],
    )
    def test_argument_before_variable_before_none(self, argument, variable, wanted, monkeypatch):
        monkeypatch.delenv("GRADSOLVE_MEMORY", raising=False)
        if variable is not None:
            monkeypatch.setenv("GRADSOLVE_MEMORY", variable)
        assert requested_memory(argument) == wanted

    @pytest.mark.parametrize("asked", ["0", "-1", "1e6", "10 MB"])
    def test_anything_but_a_number_of_bytes_is_refused(self, asked, monkeypatch):
        monkeypatch.setenv("GRADSOLVE_MEMORY", asked)
        with pytest.raises(ValueError, match=f"GRADSOLVE_MEMORY={asked}: a whole, positive number of bytes"):
            requested_memory(None)

    @pytest.mark.parametrize("asked", [0, -1, 1.5])
    def test_an_argument_that_is_no_number_of_bytes_is_refused(self, asked):
        with pytest.raises(ValueError, match=re.escape(f"GradSolveAdjoint(memory={asked})")):
            requested_memory(asked)


# Rows of the decision table in the docstring of `route`: asked for, backends, backend taken.
TABLE = [
    (None, named(STOCK, SLOW, FAST), "fast"),
    (None, named(STOCK, SLOW, FAST, CANNOT, GPU_ONLY), "fast"),
    (None, named(STOCK, Fake("b"), Fake("a")), "a"),
    (None, named(STOCK, CANNOT), "stock"),
    ("unheard", named(STOCK, SLOW), ValueError),
    ("", named(STOCK, SLOW), ValueError),
    ("slow", named(STOCK, SLOW, FAST), "slow"),
    ("stock", named(STOCK, SLOW, FAST), "stock"),
    ("cannot", named(STOCK, SLOW, FAST, CANNOT), "fast"),
    ("gpu_only", named(STOCK, SLOW, FAST, GPU_ONLY), "fast"),
    ("cannot", named(STOCK, CANNOT), "stock"),
    (None, named(CANNOT), ValueError),
    ("cannot", named(CANNOT, GPU_ONLY), ValueError),
]


@pytest.mark.smoke
class TestRoute:
    @pytest.mark.parametrize("requested, offered, wanted", TABLE)
    @pytest.mark.parametrize("origin", ["argument", "GRADSOLVE_BACKEND"])
    def test_decision_table(self, requested, offered, wanted, origin):
        origin = "automatic" if requested is None else origin
        if isinstance(wanted, str):
            assert route(PROBLEM, requested, origin, offered).backend == wanted
        else:
            with pytest.raises(wanted):
                route(PROBLEM, requested, origin, offered)

    @pytest.mark.parametrize("requested", [None, "slow", "cannot"])
    def test_order_of_installation_does_not_matter(self, requested):
        offered = named(STOCK, SLOW, Fake("slow_too"), CANNOT, GPU_ONLY)
        orders = map(dict, itertools.permutations(offered.items()))
        assert len({route(PROBLEM, requested, "argument", order) for order in orders}) == 1

    def test_every_other_backend_has_a_reason(self):
        taken = route(PROBLEM, None, "automatic", named(STOCK, SLOW, FAST, CANNOT, GPU_ONLY))
        reasons = dict(taken.others)
        assert reasons.keys() == {"stock", "slow", "cannot", "gpu_only"}
        assert reasons["cannot"] == "primitive `sort` has no scalar form"
        assert reasons["gpu_only"] == "it runs on cuda, and this solve is on cpu"
        assert "rank 10" in reasons["slow"] and "fast has 20" in reasons["slow"]

    @pytest.mark.parametrize(
        "origin, written", [("argument", 'GradSolveAdjoint(backend="unheard")'), ("GRADSOLVE_BACKEND", "=unheard")]
    )
    def test_unknown_name_lists_those_that_exist(self, origin, written):
        with pytest.raises(ValueError, match="There are: slow, stock") as caught:
            route(PROBLEM, "unheard", origin, named(STOCK, SLOW))
        assert written in str(caught.value) and (origin == "argument" or origin in str(caught.value))

    def test_a_request_that_fails_is_not_silent(self):
        taken = route(PROBLEM, "cannot", "GRADSOLVE_BACKEND", named(STOCK, CANNOT, FAST))
        assert taken.backend == "fast"
        assert "GRADSOLVE_BACKEND=cannot" in taken.why and "primitive `sort` has no scalar form" in taken.why
        assert dict(taken.others)["stock"] == "it could run this solve, but has rank 0, and fast has 20"

    def test_automatic_stock_says_why_not_more(self):
        assert "primitive `sort`" in route(PROBLEM, None, "automatic", named(STOCK, CANNOT)).why

    def test_obstacles_stop_kernels_only(self):
        hard = dataclasses.replace(PROBLEM, obstacles=("its Brownian path is unsafe",))
        own = Fake("own", rank=50, own_loop=True)
        assert route(hard, None, "automatic", named(STOCK, FAST, own)).backend == "own"
        taken = route(hard, "fast", "argument", named(STOCK, FAST))
        assert taken.backend == "stock" and "its Brownian path is unsafe" in taken.why

    def test_same_reason_is_said_once(self):
        hard = dataclasses.replace(PROBLEM, obstacles=CANNOT.reasons)
        taken = route(hard, None, "automatic", named(STOCK, CANNOT))
        assert dict(taken.others)["cannot"] == CANNOT.reasons[0]

    def test_bytes_are_measured_once_and_when_asked_for(self):
        asked = []
        measure = lambda call: asked.append(call) or (24, 1000)
        taken = route(PROBLEM, None, "automatic", named(FAST)).holding(128, 500, measure)
        assert (taken.record_rows, taken.record_bytes) == (128, 500)
        assert (taken.lanes, taken.bytes_forward, taken.bytes_gradient) == (None, None, None)
        found = dataclasses.replace(taken, call="call")
        assert found == taken and not asked
        assert (found.bytes_forward, found.bytes_gradient) == (24, 1000) and asked == ["call"]

    def test_a_derivative_by_another_backend_says_so(self):
        offered = named(STOCK, SLOW, FAST, CANNOT)
        chosen = route(PROBLEM, None, "automatic", offered).holding(24, 1000, None)
        taken = chosen.derivative("slow", "primitive `sort` has no transpose")
        assert taken.backend == "slow"
        assert taken.why == "fast runs this solve, but not its derivative: primitive `sort` has no transpose"
        reasons = dict(taken.others)
        assert reasons.keys() == offered.keys() - {"slow"} and reasons["fast"] == taken.why
        assert reasons["cannot"] == "primitive `sort` has no scalar form"
        assert (taken.record_rows, taken.record_bytes) == (24, 1000)


GOOD = """
from gradsolve_backend import AbstractBackend, hookimpl

class Backend(AbstractBackend):
    name = "{name}"
    platforms = frozenset({{"cpu"}})
    rank = 5
    kernels = None

    def supports(self, problem):
        return ()

@hookimpl
def gradsolve_backends():
    return [Backend()]
"""
HOOK = "from gradsolve_backend import hookimpl\n@hookimpl\ndef gradsolve_backends():\n    "

# What a plugin does wrong: its source, the error, what the message says.
BROKEN = [
    ("import no_such_module_anywhere", ModuleNotFoundError, "no_such_module_anywhere"),
    ("raise KeyError('first')", KeyError, "first"),
    ("x = 1", ValueError, "implements no hook"),
    (GOOD.replace("@hookimpl", ""), ValueError, "implements no hook"),
    (GOOD.replace("gradsolve_backends", "gradsolve_backend"), pluggy.PluginValidationError, "unknown hook"),
    (GOOD.replace("backends()", "backends(config)"), pluggy.PluginValidationError, "config"),
    (HOOK + "raise OSError('no compiler')", OSError, "no compiler"),
    (HOOK + "return ['xla']", TypeError, "AbstractBackend"),
    (GOOD.replace("rank = 5", ""), AttributeError, "rank"),
    (GOOD.replace("rank = 5", "rank = 'high'"), TypeError, "Backend.rank is 'high', but must be a int"),
    (GOOD.replace('frozenset({{"cpu"}})', '"cpu"'), TypeError, "frozenset"),
    (GOOD.replace("def supports", "def support"), TypeError, "supports"),
]

Install = Callable[[str, str], importlib.metadata.EntryPoint]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Writes a distribution with one plugin, named `plugin`, and returns its entry point."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(distribution: str, source: str) -> importlib.metadata.EntryPoint:
        module = f"plugin_of_{distribution}"
        sys.modules.pop(module, None)
        (tmp_path / f"{module}.py").write_text(source)
        information = tmp_path / f"{distribution}-2.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 2.0\n")
        (information / "entry_points.txt").write_text(f"[gradsolve_backend]\nplugin = {module}\n")
        (entry,) = importlib.metadata.Distribution.at(information).entry_points
        return entry

    return write


class TestPlugins:
    def test_built_in_backends_are_plugins_like_any_other(self):
        entries = importlib.metadata.entry_points(group="gradsolve_backend")
        found = {entry.name: entry.value for entry in entries}
        assert found["stock"] == "gradsolve_backend.adapters.stock"
        assert found["xla"] == "gradsolve_backend.kernels.xla"
        assert found["llvm"] == "gradsolve_backend.kernels.llvm"
        ranks = {name: backend.rank for name, backend in backends().items()}
        assert {"stock": 0, "xla": 10, "llvm": 20}.items() <= ranks.items()
        assert len(plugin_manager().get_plugins()) == len(entries)

    def test_backends_are_made_once(self):
        assert backends()["stock"] is backends()["stock"]

    def test_stock_runs_everything(self):
        hard = dataclasses.replace(PROBLEM, platform="tpu", obstacles=("anything",), equations=None, no_scalar_form="x")
        assert backends()["stock"].kernels is None
        assert route(hard, None, "automatic", {"stock": STOCK}).backend == "stock"

    @pytest.mark.parametrize("source, kind, message", BROKEN)
    def test_broken_plugin_keeps_its_error_and_is_named(self, install, source, kind, message):
        entry = install("faulty", source.format(name="faulty"))
        with pytest.raises(kind, match=message) as caught:
            collect(load([entry]))
        assert "plugin = plugin_of_faulty of faulty 2.0" in "".join(caught.value.__notes__)

    def test_two_plugins_with_one_backend_name(self, install):
        entries = [install(name, GOOD.format(name="same")) for name in ("first", "second")]
        with pytest.raises(ValueError, match='"same"') as caught:
            collect(load(entries))
        assert "of first 2.0" in str(caught.value) and "of second 2.0" in str(caught.value)

    def test_two_distributions_may_share_the_name_of_an_entry_point(self, install):
        entries = [install(name, GOOD.format(name=name)) for name in ("first", "second")]
        assert collect(load(entries)).keys() == {"first", "second"}

    @pytest.mark.parametrize("nothing", ["None", "[]", "()"])
    def test_plugin_without_backends_is_no_error(self, install, nothing):
        entries = [install("absent", HOOK + f"return {nothing}"), install("present", GOOD.format(name="present"))]
        assert collect(load(entries)).keys() == {"present"}

    def test_no_backend_at_all_says_how_to_install(self):
        with pytest.raises(RuntimeError, match="pip install"):
            collect(load([]))


def test_public_names():
    assert set(gradsolve_backend.__all__) <= set(dir(gradsolve_backend))
    assert gradsolve_backend.__version__ == importlib.metadata.version("gradsolve_backend")
    # Not the modules of the same names.
    assert callable(gradsolve_backend.explain)
