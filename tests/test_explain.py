"""What `explain` finds, and the marker by which it finds solves that take Diffrax's own loop."""

import dataclasses
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import PROBLEM, STOCK, named
from jax import Array
from jax.extend.core import Primitive
from jax.sharding import Mesh, PartitionSpec

from gradsolve_backend import GradSolveAdjoint, explain
from gradsolve_backend.marker import gradsolve_route_p, mark
from gradsolve_backend.plugins import backends
from gradsolve_backend.route import route

ROUTE = route(PROBLEM, "stock", "argument", named(STOCK)).holding(24, 1000, None)
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
    def test_lanes(self, lanes, number):
        (found,) = explain(jax.jit(lambda x: LANES_P.bind(x, route=ROUTE, lanes=lanes)), jnp.ones(3))
        assert found == dataclasses.replace(ROUTE, lanes=number)

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
        assert first.split()[-4:] == ["?", "?", "?", "?"]
        assert second.split()[-4:] == ["64", "24", "?", "?"]
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

    def test_table_of_a_solve(self):
        found = explain(jax.vmap(lambda rate: end(rate, "llvm")), BATCH)
        _, row, *_ = str(found).splitlines()
        (route,) = found
        counts = ["6", "128", f"{route.bytes_forward:,}", f"{route.bytes_gradient:,}"]
        assert row.split() == ["1", "llvm", "cpu", "Tsit5", "ConstantStepSize", "t1", "2", "x", "float64", *counts]

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
