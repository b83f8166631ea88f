"""Strict settings and the adjoint under test, shared by all tests."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import diffrax
import jax
import pytest

import gradsolve_backend

# Importlib mode leaves sys.path alone, and test modules share `helpers`.
sys.path.append(str(Path(__file__).parent))

ADJOINTS: dict[str, Callable[[], diffrax.AbstractAdjoint]] = {
    "gradsolve": lambda: gradsolve_backend.GradSolveAdjoint(),
    "stock": diffrax.RecursiveCheckpointAdjoint,
    "direct": diffrax.DirectAdjoint,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--adjoint",
        choices=sorted(ADJOINTS),
        default="gradsolve",
        help="adjoint that the tests run with; 'stock' checks the tests themselves against Diffrax's default",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "stock_fails(**kwargs): Diffrax's default adjoint is known to fail here")
    # Read when JAX first touches a device, hence before any test does.
    devices = "--xla_force_host_platform_device_count=2"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices}".strip()
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With the stock adjoint, what stock cannot do must fail in the way that is known."""
    if config.getoption("adjoint") != "stock":
        return
    for item in items:
        for marker in item.iter_markers("stock_fails"):
            item.add_marker(pytest.mark.xfail(strict=True, **marker.kwargs))


@pytest.fixture(scope="session")
def make_adjoint(request: pytest.FixtureRequest) -> Callable[[], diffrax.AbstractAdjoint]:
    """Builds a fresh adjoint at each call."""
    return ADJOINTS[request.config.getoption("adjoint")]


@pytest.fixture(scope="session")
def adjoint(make_adjoint: Callable[[], diffrax.AbstractAdjoint]) -> diffrax.AbstractAdjoint:
    return make_adjoint()


@pytest.fixture(scope="module", autouse=True)
def fresh_caches() -> Iterator[None]:
    """Compiled functions hold memory mappings, of which a process has 65,530."""
    yield
    jax.clear_caches()
