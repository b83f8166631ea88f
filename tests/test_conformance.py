"""The conformance suite's own parts: its problems are right, its grid is complete, its oracles find what is wrong."""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
import scipy.integrate
import scipy.linalg
import scipy.special
from jax.flatten_util import ravel_pytree

from gradsolve_backend import GradSolveAdjoint
from gradsolve_backend.conformance import __main__ as command
from gradsolve_backend.conformance import expected, grid, oracle, plugin
from gradsolve_backend.conformance.axes import RecordedMesh
from gradsolve_backend.conformance.grid import Case
from gradsolve_backend.conformance.problem import Problem, by_name, ode
from gradsolve_backend.conformance.problems import PROBLEMS

# Problems -----------------------------------------------------------------------------------------------------------


def end_of(problem: Problem) -> np.ndarray:
    """State at the end, by a solver of another library."""
    y0, args = problem.inputs(jnp.float64)
    start, unravel = ravel_pytree(y0)
    field = problem.terms(problem, jnp.float64).vf
    flat = jax.jit(lambda t, y: ravel_pytree(field(t, unravel(y), args))[0])
    method = "LSODA" if problem.stiff else "DOP853"
    span = (problem.t0, problem.t1)
    found = scipy.integrate.solve_ivp(lambda t, y: flat(t, y), span, start, method=method, rtol=1e-12, atol=1e-14)
    return found.y[:, -1]


@pytest.mark.parametrize("name", [name for name, problem in PROBLEMS.items() if problem.end])
def test_problem_ends_where_it_was_published_to_end(name: str) -> None:
    problem = PROBLEMS[name]
    np.testing.assert_allclose(end_of(problem), problem.end, rtol=problem.end_rtol, atol=1e-13)


def _rod(size: int) -> np.ndarray:
    return scipy.linalg.expm(20 * (np.eye(size, k=1) - 2 * np.eye(size) + np.eye(size, k=-1)))[:, 0]


def _kepler(eccentricity: float) -> np.ndarray:
    anomaly = 20.0
    for _ in range(60):
        anomaly -= (anomaly - eccentricity * math.sin(anomaly) - 20) / (1 - eccentricity * math.cos(anomaly))
    cos, sin, minor = math.cos(anomaly), math.sin(anomaly), math.sqrt(1 - eccentricity**2)
    speed = 1 / (1 - eccentricity * cos)
    return np.array([cos - eccentricity, minor * sin, -speed * sin, speed * minor * cos])


def _bessel() -> np.ndarray:
    order, at = 0.5, 21.0
    return np.array([scipy.special.jv(order, at), scipy.special.jvp(order, at)])


def _fall() -> np.ndarray:
    rate = math.sqrt(0.032 * 0.4)
    return np.array([30 + math.log(math.cosh(20 * rate)) / 0.4, math.sqrt(0.032 / 0.4) * math.tanh(20 * rate)])


def _pursuit() -> np.ndarray:
    return np.array([(25 * math.log(5) - (20 - 200 / 25)) / 2, (5 - 1 / 5) / 2])


_DECAY = math.exp(-20)
CLOSED_FORMS: dict[str, Callable[[], Any]] = {
    "a1": lambda: [_DECAY],
    "a2": lambda: [1 / math.sqrt(21)],
    "a3": lambda: [math.exp(math.sin(20))],
    "a4": lambda: [20 / (1 + 19 * math.exp(-5))],
    "b2": lambda: scipy.linalg.expm(20 * np.array([[-1, 1, 0], [1, -2, 1], [0, 1, -1]])) @ [2, 0, 1],
    "b5": lambda: scipy.special.ellipj(20, 0.51)[:3],
    "c1": lambda: [*(_DECAY * 20**i / math.factorial(i) for i in range(9)), scipy.special.gammainc(9, 20)],
    "c2": lambda: [*(_DECAY * (1 - _DECAY) ** i for i in range(9)), (1 - _DECAY) ** 9],
    "c3": lambda: _rod(10),
    "c4": lambda: _rod(51),
    **{f"d{i + 1}": lambda i=i: _kepler(0.1 + 0.2 * i) for i in range(5)},
    "e1": _bessel,
    "e4": _fall,
    "e5": _pursuit,
}


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_problem_ends_where_its_closed_form_ends(name: str) -> None:
    np.testing.assert_allclose(end_of(PROBLEMS[name]), CLOSED_FORMS[name](), rtol=1e-8, atol=1e-11)


def test_the_hamiltonian_problem_keeps_its_energy() -> None:
    problem = PROBLEMS["henonheiles"]
    (place, momentum), strength = problem.inputs(jnp.float64)

    def energy(place: Any) -> Any:
        x, y = place[0], place[1]
        return jnp.sum(place**2) / 2 + strength * (x**2 * y - y**3 / 3)

    velocity, force = (term.vf for term in problem.terms(problem, jnp.float64))
    assert velocity(0.0, momentum, strength) == pytest.approx(momentum)
    assert force(0.0, place, strength) == pytest.approx(-jax.grad(energy)(place))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "pde"}, "none of ode, split"),
        ({"t1": -1.0}, "is not before"),
        ({"jumps": (0.5, 30.0)}, "not all inside"),
        ({"end": (1.0, 2.0)}, "unlike the state"),
    ],
)
def test_a_problem_checks_itself(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PROBLEMS["a1"], **change)


def test_two_problems_of_one_name_are_refused() -> None:
    problem = Problem("twice", ode(lambda t, y, args: y), np.ones(1), np.ones(1), 1.0, "none")
    with pytest.raises(ValueError, match="named 'twice'"):
        by_name((problem,), (problem,))


# Grid ---------------------------------------------------------------------------------------------------------------


def test_ids_are_unique_and_the_long_grid_begins_with_the_short_one() -> None:
    short, long = grid.cases("short"), grid.cases("long")
    assert len(set(map(str, long))) == len(long)
    assert long[: len(short)] == short
    assert str(short[0]).count("-") == len(grid.AXES) - 1


def possible(axes: dict[str, tuple[str, ...]]) -> np.ndarray:
    """Which points of the full product make sense, one dimension per axis: by tables, unlike the search in the grid."""
    sense = np.ones([len(values) for values in axes.values()], bool)
    for looked_at, demand in grid.RULES:
        order = sorted(looked_at, key=list(axes).index)
        named = [dict(zip(order, point, strict=True)) for point in product(axes, order)]
        table = [demand(*(point[axis] for axis in looked_at)) for point in named]
        shape = [len(values) if axis in order else 1 for axis, values in axes.items()]
        sense &= np.reshape(table, shape)
    return sense


def product(axes: dict[str, tuple[str, ...]], names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    return itertools.product(*(axes[name] for name in names))


@pytest.mark.parametrize("name", ["short", "long"])
def test_every_pair_that_makes_sense_is_met(name: str) -> None:
    heavy = {problem for problem in PROBLEMS if PROBLEMS[problem].heavy and name == "short"}
    axes = dict(grid.AXES) | {"problem": tuple(x for x in PROBLEMS if x not in heavy)}
    sense, order = possible(axes), list(axes)
    cases = [dataclasses.asdict(case) for case in grid.cases(name)]
    assert all(sense[tuple(axes[axis].index(case[axis]) for axis in axes)] for case in cases)
    met = set().union(*(grid.pairs(case, grid.wanted_pairs(name)) for case in cases))
    for kind in grid.wanted_pairs(name):
        pair = [{"family": "solver"}.get(axis, axis) for axis in kind]
        kept = sorted({order.index(axis) for axis in pair})
        left = sense.any(axis=tuple(set(range(len(order))) - set(kept)))
        for where in np.argwhere(left):
            point = {order[axis]: axes[order[axis]][i] for axis, i in zip(kept, where, strict=True)}
            assert grid.pairs(point, [kind]) <= met


def test_the_grids_meet_every_value_of_every_axis() -> None:
    for axis, values in grid.AXES.items():
        assert {getattr(case, axis) for case in grid.cases("long")} == set(values)
    assert {case.solver for case in grid.cases("short")} == set(grid.AXES["solver"])
    assert {case.oracle for case in grid.cases("short")} == {"mesh", "plain"}


def test_another_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="there are short and long"):
        grid.cases("tiny")


# Oracles ------------------------------------------------------------------------------------------------------------


class Slightly(diffrax.AbstractAdjoint):
    """Stock, but wrong by 0.1 per cent where `change` says."""

    change: str = eqx.field(static=True)

    def loop(self, **given: Any) -> Any:
        state = given["init_state"]
        if self.change == "cotangent":
            given["init_state"] = eqx.tree_at(lambda s: s.y, state, _pull_more(state.y))
        if self.change == "time":
            given["t1"] = _pull_more(given["t1"])
        if self.change == "value":
            given["init_state"] = eqx.tree_at(lambda s: s.y, state, 1.001 * state.y)
        final, stats = diffrax.RecursiveCheckpointAdjoint().loop(**given)
        if self.change == "steps":
            return eqx.tree_at(lambda s: s.num_rejected_steps, final, final.num_rejected_steps + 1), stats
        return final, stats


@jax.custom_vjp
def _pull_more(x: Any) -> Any:
    return x


_pull_more.defvjp(lambda x: (x, None), lambda _, ct: (1.001 * ct,))

PLAIN = Case("a4", "tsit5", "pid", "ts", "grad", "f64")
MESH = Case("lorenz", "bosh3", "pid", "steps3", "vmapgrad", "f64")


@pytest.mark.parametrize("case", [PLAIN, MESH, dataclasses.replace(MESH, dtype="f32")], ids=str)
def test_a_wrong_cotangent_is_found(case: Case) -> None:
    assert case.oracle == ("plain" if case.problem == PLAIN.problem else "mesh")
    found = oracle.check(case, Slightly("cotangent"))
    assert found and all(line.startswith("slope") for line in found)


@pytest.mark.parametrize("case", [PLAIN, dataclasses.replace(MESH, dtype="f32")], ids=str)
def test_stock_conforms_to_itself(case: Case) -> None:
    assert oracle.check(case, diffrax.RecursiveCheckpointAdjoint()) == []


def test_a_wrong_slope_of_a_time_is_found() -> None:
    case = dataclasses.replace(PLAIN, transform="gradtime")
    (line,) = oracle.check(case, Slightly("time"))
    assert case.noisy
    assert line.startswith("slope['t1']")


def test_a_wrong_value_is_found() -> None:
    assert any(line.startswith("value") for line in oracle.check(PLAIN, Slightly("value")))


def test_a_wrong_count_of_steps_is_found() -> None:
    (line,) = oracle.check(PLAIN, Slightly("steps"))
    assert line.startswith("steps")


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"x": jnp.ones(2), "y": jnp.ones(2)}, "value is"),
        ({"x": jnp.ones(3)}, r"value\['x'\] is float64\(3,\)"),
        ({"x": jnp.ones(2, jnp.float32)}, r"is float32\(2,\), stock's float64"),
        ({"x": jnp.array([1.0, jnp.nan])}, "finite in 1 places, stock's in 2"),
        ({"x": jnp.array([1.0, 1 + 3e-10])}, "off by 3.00e-10"),
        ({"x": jnp.array([1.0, 1 + 3e-11])}, None),
    ],
)
def test_differences_are_told(found: Any, message: str | None) -> None:
    results = ({"value": value, "aux": {"steps": 0, "unused": ()}} for value in (found, {"x": jnp.ones(2)}))
    lines = oracle.differences(PLAIN, *results)
    assert len(lines) == (message is not None)
    assert re.search(message or "", "".join(lines))


def test_what_rounding_changes_in_stock_is_allowed_in_a_slope() -> None:
    result = {"value": jnp.ones(2), "aux": {"steps": 0, "unused": ()}}
    found, expected, nudged = ({**result, "slope": {"dt0": jnp.asarray(x)}} for x in (1 + 1e-7, 1.0, 1 + 1e-8))
    assert len(oracle.differences(PLAIN, found, expected)) == 1
    assert oracle.differences(PLAIN, found, expected, nudged) == []
    assert len(oracle.differences(PLAIN, found, expected, {**nudged, "slope": {"dt0": jnp.asarray(1 + 1e-9)}})) == 1


def test_a_recorded_mesh_steps_as_step_to_does() -> None:
    ts = jnp.array([0.0, 0.1, 0.35, 0.8, 1.0])

    def end(controller: Any) -> Any:
        terms = diffrax.ODETerm(lambda t, y, args: -y * jnp.sin(t))
        sol = diffrax.diffeqsolve(terms, diffrax.Tsit5(), 0.0, 1.0, None, jnp.ones(2), stepsize_controller=controller)
        return sol.ys, sol.stats["num_steps"]

    padded = jnp.concatenate([ts, jnp.ones(3)])
    jtu.tree_map(np.testing.assert_array_equal, end(RecordedMesh(padded)), end(diffrax.StepTo(ts)))


# Plugin and command -------------------------------------------------------------------------------------------------


def test_an_xfail_file_is_read() -> None:
    text = "# known\na-b  # too slow\n\nc-d\n"
    assert expected.parse(text) == {"a-b": "too slow", "c-d": ""}
    assert expected.stale(expected.parse(text), ["c-d"]) == ["a-b"]


@pytest.mark.parametrize(("text", "message"), [("a b", "not one case id"), ("a\na # again", "line 2: a is listed")])
def test_a_broken_xfail_file_is_refused(text: str, message: str, tmp_path: Any) -> None:
    path = tmp_path / "xfail.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"xfail.txt, .*{message}"):
        expected.read(str(path))


def _route(backend: str, **others: str) -> Any:
    return SimpleNamespace(backend=backend, why="its own reason", others=tuple(others.items()))


@pytest.mark.parametrize(
    ("routes", "reason"),
    [
        ([], "no solve of this case reached xla"),
        ([_route("xla")], ""),
        ([_route("xla"), _route("stock", xla="no lanes here")], "no lanes here"),
        ([_route("stock")], "its own reason"),
    ],
)
def test_a_case_is_skipped_for_the_reason_in_its_route(routes: Any, reason: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(plugin, "explain", lambda fn, *args: routes)
    assert plugin.declined(PLAIN, "xla", GradSolveAdjoint(backend="xla")) == reason


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Callable[..., tuple[int, str]]:
    """Run the command on one case, against an adjoint in the place of the backend's; returns exit code and text."""

    def run_on(adjoint: diffrax.AbstractAdjoint, *words: str, declined: str = "") -> tuple[int, str]:
        monkeypatch.setattr(plugin, "GradSolveAdjoint", lambda backend: adjoint)
        monkeypatch.setattr(plugin, "declined", lambda *_: declined)
        monkeypatch.setattr(plugin, "cases", lambda name: (PLAIN,))
        code = command.main(["--backend", "xla", *words])
        return code, "".join(capfd.readouterr())

    return run_on


STOCK = diffrax.RecursiveCheckpointAdjoint()


def test_a_run_that_conforms(run: Any) -> None:
    code, text = run(STOCK)
    assert code == 0
    assert "1 cases ran on xla, 0 skipped\n" in text


def test_a_run_on_a_wrong_backend_fails(run: Any) -> None:
    code, text = run(Slightly("cotangent"))
    assert code == 1
    assert f"{PLAIN} differs from stock Diffrax (oracle: plain)" in text
    assert "1 cases ran on xla" in text


def test_a_run_of_nothing_is_no_pass(run: Any) -> None:
    code, text = run(STOCK, declined="it is Tuesday")
    assert code == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "skipped 1: it is Tuesday" in text
    assert "0 cases ran on xla, 1 skipped: nothing was tested" in text


def test_an_expected_failure_passes_and_an_unexpected_pass_fails(run: Any, tmp_path: Any) -> None:
    path = tmp_path / "xfail.txt"
    path.write_text(f"{PLAIN} # known\nlorenz-no-such-case\n")
    code, text = run(Slightly("cotangent"), "--xfail", str(path))
    assert code == 0
    assert "1 xfailed" in text
    assert "1 cases ran on xla" in text
    assert "warning: the xfail file names lorenz-no-such-case" in text
    code, text = run(STOCK, "--xfail", str(path))
    assert code == 1
    assert "XPASS(strict)" in text


def test_a_backend_that_nobody_offers_is_refused(capfd: Any) -> None:
    assert command.main(["--backend", "nobody"]) == pytest.ExitCode.USAGE_ERROR
    assert "no plugin offers a backend 'nobody'; there are:" in capfd.readouterr().err


def test_without_pytest_the_command_says_what_to_install(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert command.main(["--backend", "xla"]) == 2
    assert "pip install 'gradsolve_backend[test]'" in capsys.readouterr().err


ROWS = [
    PLAIN,
    Case("a3", "dopri5", "fullpid", "dense", "jvp", "f64"),
    Case("d1", "bosh3", "pid", "state", "grad", "f64"),
    Case("b5", "tsit5", "clip", "ts", "gradtime", "f64"),
    Case("lorenz", "tsit5", "pid", "subs", "gradvmap", "f32"),
    Case("robertson", "kvaerno5", "pid", "t1", "jacfwd", "f64"),
]


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_the_xla_backend_conforms(case: Case) -> None:
    adjoint = GradSolveAdjoint(backend="xla")
    assert plugin.declined(case, "xla", adjoint) == ""
    assert oracle.check(case, adjoint) == []
