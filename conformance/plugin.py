"""The pytest plugin of the suite: its options, the cases, the expected failures, the closing line and the exit code.

A module named with `-p`, not a conftest: pytest reads the conftest of an installed package after the command line.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import diffrax
import jax
import pytest

from gradsolve_backend import GradSolveAdjoint, explain
from gradsolve_backend.conformance import expected
from gradsolve_backend.conformance.grid import Case, cases
from gradsolve_backend.conformance.oracle import tested
from gradsolve_backend.conformance.transforms import FORWARD, MIXED
from gradsolve_backend.plugins import backends

#: JAX keeps all it compiled; a process that compiles thousands of functions runs out of memory mappings.
_CASES_PER_CACHE = 20
_counter = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gradsolve_backend conformance")
    group.addoption("--backend", metavar="NAME", help="the backend to test, as in GradSolveAdjoint(backend=NAME)")
    group.addoption("--grid", choices=("short", "long"), default="short", help="which grid of cases to run")
    group.addoption("--expected-failures", metavar="FILE", help="ids of cases known to fail, one a line, `id # reason`")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--backend") is None:
        raise pytest.UsageError("the conformance suite needs --backend NAME")
    if config.getoption("--backend") not in backends():
        named = ", ".join(sorted(backends()))
        raise pytest.UsageError(f"no plugin offers a backend {config.getoption('--backend')!r}; there are: {named}")
    config.stash[_counter] = 0
    jax.config.update("jax_enable_x64", True)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", cases(metafunc.config.getoption("--grid")), ids=str)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    known = _expected(config)
    for item in items:
        case = item.name.partition("[")[2].removesuffix("]")
        if case in known:
            item.add_marker(pytest.mark.xfail(reason=known[case] or "in the xfail file", strict=True))


def pytest_runtest_teardown(item: pytest.Item) -> None:
    item.config.stash[_counter] += 1
    if item.config.stash[_counter] % _CASES_PER_CACHE == 0:
        jax.clear_caches()


def _expected(config: pytest.Config) -> dict[str, str]:
    path = config.getoption("--expected-failures")
    try:
        return expected.read(path) if path else {}
    except (OSError, ValueError) as error:
        raise pytest.UsageError(f"xfail file: {error}") from None


@pytest.fixture(scope="session")
def backend(pytestconfig: pytest.Config) -> str:
    """Name of the backend under test."""
    return str(pytestconfig.getoption("--backend"))


@pytest.fixture
def adjoint(case: Case, backend: str) -> diffrax.AbstractAdjoint:
    """The adjoint under test; skips the case where the backend says that it cannot run it."""
    adjoint = GradSolveAdjoint(backend=backend)
    reason = declined(case, backend, adjoint)
    if reason:
        pytest.skip(reason)
    return adjoint


def declined(case: Case, backend: str, adjoint: diffrax.AbstractAdjoint) -> str:
    """Why a case does not run on `backend`; empty if every solve in it does."""
    if backend in backends() and backends()[backend].kernels is None and case.transform in (*FORWARD, *MIXED):
        return "this backend has no kernels, and the default adjoint of Diffrax no forward mode"
    run, operands = tested(case, adjoint)
    routes = tuple(explain(run, *operands))
    if not routes:
        return f"no solve of this case reached {backend}"
    reasons = (dict(route.others).get(backend, route.why) for route in routes if route.backend != backend)
    return next(reasons, "")


def ran(stats: Mapping[str, Iterable[Any]]) -> tuple[int, int]:
    """How many cases ran on the backend, whatever came of it, and how many were skipped."""
    called = [report for name in ("passed", "failed", "xfailed", "xpassed") for report in stats.get(name, ())]
    return sum(report.when == "call" for report in called), len(list(stats.get("skipped", ())))


def closing_line(backend: str, stats: Mapping[str, Iterable[Any]]) -> str:
    """What the run says last: how much of the grid the backend has run at all."""
    count, skipped = ran(stats)
    line = f"{count} cases ran on {backend}, {skipped} skipped"
    return line if count else f"{line}: nothing was tested, and so this is no pass"


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    # The workers of pytest-xdist have no reporter; the process that starts them has.
    if reporter is not None and session.exitstatus == pytest.ExitCode.OK and not ran(reporter.stats)[0]:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    every = map(str, (*cases("short"), *cases("long")))
    for case in expected.stale(_expected(config), every):
        terminalreporter.write_line(f"warning: the xfail file names {case}, and no grid has such a case; remove it")
    for reason, count in _reasons(terminalreporter.stats.get("skipped", ())).items():
        terminalreporter.write_line(f"skipped {count}: {reason}")
    terminalreporter.write_line(closing_line(str(config.getoption("--backend")), terminalreporter.stats))


def _reasons(skipped: Iterable[Any]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for report in skipped:
        reason = report.longrepr[2].removeprefix("Skipped: ")
        counts[reason] = counts.get(reason, 0) + 1
    return counts
