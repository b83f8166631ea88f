"""The host without kernels: requests, routes, plugins, the marker, and what `explain` finds."""

import dataclasses
import importlib.metadata
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pluggy
import pytest
from jax import Array
from jax.extend.core import Primitive
from jax.sharding import Mesh, PartitionSpec

import gradsolve_backend
from gradsolve_backend import AbstractBackend, GradSolveAdjoint, Problem, Route, explain
from gradsolve_backend.adapters.stock import StockBackend
from gradsolve_backend.config import requested_backend
from gradsolve_backend.marker import gradsolve_route_p, mark
from gradsolve_backend.plugins import backends, collect, load, plugin_manager
from gradsolve_backend.route import route

PROBLEM = Problem(
    platform="cpu",
    solver="Tsit5",
    controller="PIDController",
    saving=("t1",),
    dimension=3,
    dtypes=("float64",),
    equations=100,
    no_scalar_form="",
    obstacles=(),
    max_steps=4096,
    bytes_forward=24,
    bytes_gradient=1000,
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
    ("cannot", named(STOCK, SLOW, FAST, CANNOT), "stock"),
    ("gpu_only", named(STOCK, SLOW, FAST, GPU_ONLY), "stock"),
    (None, named(CANNOT), ValueError),
    ("cannot", named(CANNOT, SLOW), ValueError),
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
        assert taken.backend == "stock"
        assert "GRADSOLVE_BACKEND=cannot" in taken.why and "primitive `sort` has no scalar form" in taken.why

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

    def test_bytes_are_per_lane_times_lanes(self):
        taken = route(PROBLEM, None, "automatic", named(FAST))
        assert (taken.lanes, taken.bytes_forward, taken.bytes_gradient) == (None, None, None)
        batch = dataclasses.replace(taken, lanes=64)
        assert (batch.bytes_forward, batch.bytes_gradient) == (64 * 24, 64 * 1000)


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
        assert {"stock", "xla"} <= backends().keys()
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


ROUTE = route(PROBLEM, "stock", "argument", named(STOCK))
LANES_P = Primitive("solve_on_lanes")
LANES_P.def_abstract_eval(lambda x, *, route, lanes: x)


def marked(x: Array) -> Array:
    return jnp.sin(mark(x, ROUTE))


def on_two_devices(x: Array) -> Array:
    mesh = Mesh(np.array(jax.devices()[:2]), ("batch",))
    spec = PartitionSpec("batch")
    return jax.shard_map(marked, mesh=mesh, in_specs=spec, out_specs=spec)(x)


@jax.custom_vjp
def with_own_rule(x: Array) -> Array:
    return marked(x)


with_own_rule.defvjp(lambda x: (marked(x), None), lambda _, ct: (ct,))

# Programs around a marked value, and how many marks each holds.
PROGRAMS = {
    "plain": (marked, 1),
    "none": (jnp.sin, 0),
    "twice": (lambda x: marked(marked(x)), 2),
    "jit": (jax.jit(marked), 1),
    "jit of jit": (jax.jit(lambda x: jax.jit(marked)(x)), 1),
    "vmap": (jax.vmap(marked), 1),
    "vmap of vmap": (lambda x: jax.vmap(jax.vmap(marked))(x[None, :]), 1),
    "grad": (jax.grad(lambda x: jnp.sum(marked(x))), 1),
    "grad of jit": (jax.grad(lambda x: jnp.sum(jax.jit(marked)(x))), 1),
    "jvp": (lambda x: jax.jvp(marked, (x,), (x,)), 1),
    "jacfwd": (jax.jacfwd(marked), 1),
    "hessian": (jax.hessian(lambda x: jnp.sum(marked(x))), 1),
    "vmap of grad": (jax.vmap(jax.grad(marked)), 1),
    "scan": (lambda x: jax.lax.scan(lambda c, _: (marked(c), None), x, length=3), 1),
    "while_loop": (lambda x: jax.lax.while_loop(lambda c: c[0] < 0, marked, x), 1),
    "condition": (lambda x: jax.lax.while_loop(lambda c: marked(c)[0] < 0, jnp.sin, x), 1),
    "cond": (lambda x: jax.lax.cond(x[0] > 0, marked, jnp.sin, x), 1),
    "both branches": (lambda x: jax.lax.switch(1, [marked, marked], x), 2),
    "map": (lambda x: jax.lax.map(marked, x), 1),
    "custom_vjp": (with_own_rule, 1),
    "grad of custom_vjp": (jax.grad(lambda x: jnp.sum(with_own_rule(x))), 1),
    "remat": (jax.checkpoint(marked), 1),
    "shard_map": (on_two_devices, 1),
}


class TestExplain:
    @pytest.mark.parametrize("name", PROGRAMS)
    def test_finds_each_solve_once(self, name):
        program, count = PROGRAMS[name]
        assert explain(program, jnp.linspace(0.1, 0.9, 4)) == (ROUTE,) * count

    @pytest.mark.parametrize("lanes, number", [((), 1), ((64,), 64), ((4, 16, 2), 128)])
    def test_lanes_and_bytes(self, lanes, number):
        (found,) = explain(jax.jit(lambda x: LANES_P.bind(x, route=ROUTE, lanes=lanes)), jnp.ones(3))
        assert found == dataclasses.replace(ROUTE, lanes=number)
        assert found.bytes_gradient == number * PROBLEM.bytes_gradient

    def test_runs_nothing(self):
        ran = []

        def program(x: Array) -> Array:
            jax.debug.callback(lambda: ran.append(1))
            return marked(x)

        assert len(explain(program, jnp.ones(2))) == 1
        jax.effects_barrier()
        assert not ran

    def test_arguments_may_be_shapes_and_things_that_are_no_arrays(self):
        def program(how: str, x: Array, *, times: int) -> Any:
            return {"how": how, "value": [marked(x) for _ in range(times)]}

        assert len(explain(program, "so", jax.ShapeDtypeStruct((3,), "float32"), times=2)) == 2

    def test_table(self):
        on_lanes = dataclasses.replace(ROUTE, lanes=64, others=(("fast", "it runs on cuda, and this solve is on cpu"),))
        text = str(explain(lambda x: LANES_P.bind(mark(x, ROUTE), route=on_lanes, lanes=(64,)), jnp.ones(2)))
        header, first, second, *reasons = text.splitlines()
        assert first.split()[-3:] == ["?", "?", "?"]
        assert second.split()[-3:] == ["64", "1,536", "64,000"]
        assert header.index("solver") == first.index("Tsit5") == second.index("Tsit5")
        assert 'asked for by GradSolveAdjoint(backend="stock")' in reasons[1]
        assert reasons[-1].strip() == "not fast: it runs on cuda, and this solve is on cpu"

    def test_no_solve(self):
        assert str(explain(jnp.sin, 1.0)) == "No solve with GradSolveAdjoint was found."


def end(rate: Array, backend: str | None = None) -> Array:
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, rate: -rate * y),
        diffrax.Tsit5(),
        t0=0.0,
        t1=1.0,
        dt0=0.1,
        y0=jnp.ones(2),
        args=rate,
        adjoint=GradSolveAdjoint(backend),
    )
    assert solution.ys is not None
    return jnp.sum(solution.ys)


BATCH = jnp.linspace(0.5, 1.5, 6)
# Programs around real solves, and the lanes of each solve.
SOLVES = {
    "one": (lambda rates: end(rates[0]), [1]),
    "grad": (lambda rates: jax.grad(end)(rates[0]), [1]),
    "jvp": (lambda rates: jax.jvp(end, (rates[0],), (rates[0],)), [1]),
    "vmap": (jax.vmap(end), [6]),
    "jit of vmap of grad": (jax.jit(jax.vmap(jax.grad(end))), [6]),
    "grad of vmap": (jax.grad(lambda rates: jnp.sum(jax.vmap(end)(rates))), [6]),
    "vmap of vmap": (lambda rates: jax.vmap(jax.vmap(end))(rates.reshape(2, 3)), [6]),
    "vmap of hessian": (jax.vmap(jax.hessian(end)), [6]),
    "scan": (lambda rates: jax.lax.map(end, rates), [1]),
    "two": (lambda rates: end(rates[0]) + jnp.sum(jax.vmap(end)(rates[1:])), [1, 5]),
    "stock": (jax.vmap(lambda rate: end(rate, "stock")), [None]),
    "grad of stock": (jax.grad(lambda rates: end(rates[0], "stock")), [None]),
}


class TestSolves:
    """Real solves, traced and not run."""

    @pytest.mark.parametrize("name", SOLVES)
    def test_each_solve_once_with_its_lanes(self, name, monkeypatch):
        monkeypatch.delenv("GRADSOLVE_BACKEND", raising=False)
        program, lanes = SOLVES[name]
        found = explain(program, BATCH)
        assert [each.lanes for each in found] == lanes
        assert {each.backend for each in found} == {"stock" if None in lanes else backends_by_rank()[0]}
        assert all(each.problem.solver == "Tsit5" and each.problem.dimension == 2 for each in found)

    def test_bytes_grow_with_lanes(self):
        (one,), (six,) = explain(end, BATCH[0], "xla"), explain(jax.vmap(lambda rate: end(rate, "xla")), BATCH)
        assert one.bytes_gradient and six.bytes_gradient == 6 * one.bytes_gradient

    def test_environment_is_read_at_each_trace(self, monkeypatch):
        for name in ("stock", "xla", "stock"):
            monkeypatch.setenv("GRADSOLVE_BACKEND", name)
            (found,) = explain(lambda rate: end(rate), BATCH[0])
            assert found.backend == name and f"GRADSOLVE_BACKEND={name}" in found.why

    def test_argument_comes_before_the_environment(self, monkeypatch):
        monkeypatch.setenv("GRADSOLVE_BACKEND", "stock")
        (found,) = explain(end, BATCH[0], "xla")
        assert found.backend == "xla"

    def test_unknown_name(self):
        with pytest.raises(ValueError, match="There are: .*stock.*xla"):
            explain(end, BATCH[0], "unheard")


def backends_by_rank() -> list[str]:
    return sorted(backends(), key=lambda name: -backends()[name].rank)


class TestMarker:
    """The marker changes no value."""

    @pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.vmap, jax.jacfwd, jax.jacrev, jax.hessian])
    def test_transforms(self, transform):
        x = jnp.linspace(0.1, 0.9, 4)
        np.testing.assert_array_equal(transform(marked)(x), transform(jnp.sin)(x))

    def test_sharded(self):
        np.testing.assert_array_equal(on_two_devices(jnp.ones(4)), jnp.sin(jnp.ones(4)))

    def test_transpose(self):
        x = jnp.array([1.0, 2.0])
        (back,) = jax.linear_transpose(lambda x: 3.0 * mark(x, ROUTE), x)(x)
        np.testing.assert_array_equal(back, 3.0 * x)

    @pytest.mark.parametrize("value", [jnp.array(True), jnp.arange(3), jnp.array(1j), jnp.zeros((0, 2))])
    def test_any_array(self, value):
        np.testing.assert_array_equal(jax.jit(lambda x: mark(x, ROUTE))(value), value)

    def test_equal_routes_compile_once(self):
        traced = []

        @jax.jit
        def program(x: Array) -> Array:
            traced.append(1)
            return marked(x)

        program(jnp.ones(2)), program(jnp.zeros(2))
        assert len(traced) == 1 and gradsolve_route_p.name in str(jax.make_jaxpr(program)(jnp.ones(2)))


def test_public_names():
    assert set(gradsolve_backend.__all__) <= set(dir(gradsolve_backend))
    assert gradsolve_backend.__version__ == importlib.metadata.version("gradsolve_backend")
    assert gradsolve_backend.explain is explain and gradsolve_backend.Route is Route
