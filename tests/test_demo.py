"""The main job: its residual and errors against stock Diffrax and finite differences, and its command line."""

import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import STOCK
from rich.console import Console

from gradsolve_backend import demo, demo_model, demo_plot
from gradsolve_backend.__main__ import main
from gradsolve_backend.fits import covariance, same_optimum

# The same model and data in the Stan case study on Lotka-Volterra, whose priors move the rates by little.
PUBLISHED_RATES = np.array([0.55, 0.028, 0.80, 0.024])
NEAR_BEST = np.log([0.54, 0.027, 0.80, 0.0237, 34.6, 5.8])


@pytest.fixture(scope="module")
def census() -> demo_model.Census:
    return demo_model.load_census()


def test_data_are_the_published_ones(census: demo_model.Census) -> None:
    np.testing.assert_array_equal(census.years, np.arange(1900, 1921))
    assert census.pelts.shape == (21, 2)
    np.testing.assert_array_equal(census.pelts[[0, 3, -1]], [[30, 4], [77.4, 35.2], [24.7, 8.6]])


def test_starts_depend_on_the_seed_alone() -> None:
    first = demo_model.random_starts(8, seed=3)
    np.testing.assert_array_equal(first, demo_model.random_starts(8, seed=3))
    assert not np.any(first == demo_model.random_starts(8, seed=4))
    many = demo_model.random_starts(4000, seed=0)
    np.testing.assert_allclose(np.exp(np.median(many, axis=0)), demo_model.MEDIANS, rtol=0.05)


def test_residual_in_equilibrium(census: demo_model.Census, adjoint: diffrax.AbstractAdjoint) -> None:
    """At `growth / predation` lynx and `death / conversion` hares nothing changes."""
    theta = jnp.log(jnp.array([0.5, 0.025, 0.9, 0.03, 30.0, 20.0]))
    found = demo_model.residual(theta, census, adjoint)
    np.testing.assert_allclose(found, np.log([30.0, 20.0]) - np.log(census.pelts), atol=1e-12)


@pytest.mark.stock_fails(reason="NaN in reverse mode")
def test_failed_solve_gives_large_finite_residuals(census: demo_model.Census, adjoint: diffrax.AbstractAdjoint) -> None:
    """A rate of 1e6 a year exhausts the steps of the solver long before the end."""
    theta = jnp.log(jnp.array([1e6, 0.05, 1e6, 0.05, 30.0, 5.0]))
    value, slope = jax.jit(jax.value_and_grad(lambda x: demo_model.half_squares(x, census, adjoint)))(theta)
    assert value >= 0.5 * demo_model.UNREACHED**2 * (census.pelts.size - 2)
    assert np.isfinite(value)
    # Stock's reverse sweep of the failed part gives NaN, and Levenberg-Marquardt rejects such a trial by its value.
    assert np.all(np.isfinite(slope))


def test_gradients_equal_stock(census: demo_model.Census, adjoint: diffrax.AbstractAdjoint) -> None:
    """Wild starts, whose step sizes amplify rounding: stock differs from itself by 1e-11 with and without vmap."""
    starts = jnp.asarray(demo_model.random_starts(64, seed=0))
    ours, stock = (
        np.asarray(jax.jit(lambda thetas, a=a: demo_model.gradients(thetas, census, a))(starts))
        for a in (adjoint, STOCK)
    )
    assert demo_model.largest_difference(ours, stock) < 0.1 * demo.LARGEST_ALLOWED


def test_largest_difference_is_relative_to_each_member() -> None:
    stock = np.array([[1e6, 1.0], [1e-6, 1e-8]])
    assert demo_model.largest_difference(stock, stock) == 0
    ours = stock + np.array([[0.0, 1.0], [0.0, 1e-8]])
    assert demo_model.largest_difference(ours, stock) == pytest.approx(1e-2)
    assert np.isnan(demo_model.largest_difference(stock * np.nan, stock))


@pytest.mark.stock_fails(reason="no forward mode")
def test_covariance_from_finite_differences(census: demo_model.Census, adjoint: diffrax.AbstractAdjoint) -> None:
    function = jax.jit(lambda theta: demo_model.residual(theta, census, adjoint))
    step = 1e-4
    centre = np.asarray(function(jnp.asarray(NEAR_BEST)))
    shifted = [[function(jnp.asarray(NEAR_BEST + s * step * e)) for s in (1, -1)] for e in np.eye(6)]
    slopes = np.stack([np.asarray(up - down) / (2 * step) for up, down in shifted], axis=-1)
    jacobian = np.asarray(jax.jit(jax.jacfwd(function))(jnp.asarray(NEAR_BEST)))
    ours = np.sqrt(np.diag(covariance(jacobian, centre)))
    # The mesh moves with the parameters, so that differences are good to about the tolerance over the step.
    np.testing.assert_allclose(ours, np.sqrt(np.diag(covariance(slopes, centre))), rtol=1e-2)


@pytest.mark.stock_fails(reason="no forward mode")
def test_fit_finds_the_published_rates(census: demo_model.Census, adjoint: diffrax.AbstractAdjoint) -> None:
    starts = jnp.asarray(NEAR_BEST + 0.1 * np.random.default_rng(0).standard_normal((3, 6)))
    fits = jax.jit(lambda thetas: demo_model.fit(thetas, census, adjoint))(starts)
    assert np.all(fits.converged)
    assert np.all(same_optimum(fits.loss))
    np.testing.assert_allclose(np.exp(fits.theta[:, :4]), np.tile(PUBLISHED_RATES, (3, 1)), rtol=0.05)
    slopes = jax.jit(lambda thetas: demo_model.gradients(thetas, census, STOCK))(fits.theta)
    assert np.max(np.abs(slopes)) < 1e-4


def test_x64_is_left_as_it_was_and_a_difference_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A gradient that is off by 1e-8 must not pass; the run itself is replaced by what it would have measured."""
    fits = demo_model.Fits(jnp.asarray(NEAR_BEST)[None], jnp.array([2.0]), jnp.array([True]))
    good = demo.Measured(1.0, 1.0, 1.0, 1.0, fits, np.ones((1, 6)))
    years, flat = np.linspace(1900, 1920, 3), np.ones((3, 2))
    drawn = demo_plot.Curves(years, flat[None], flat, np.zeros((21, 2)), np.eye(6))
    monkeypatch.setattr(demo, "curves", lambda census, fits: drawn)
    monkeypatch.setattr(demo, "backends", lambda census, starts: "none")
    options = demo.Options(starts=1, output=str(tmp_path / "one.png"))
    for factor, code in ((1.0, 0), (1 + 1e-8, 1), (np.nan, 1)):
        bad = good._replace(gradients=factor * good.gradients)
        monkeypatch.setattr(demo, "measure", lambda *_, bad=bad: (bad, good))
        printed = io.StringIO()
        with jax.enable_x64(False):
            assert demo.run(options, Console(file=printed)) == code
            assert jnp.zeros(1).dtype == jnp.float32
        assert ("FAILED" in printed.getvalue()) == bool(code)


@pytest.fixture
def stock_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """JAX does not trace again what it has traced, whatever the environment says by then."""
    monkeypatch.setenv("GRADSOLVE_BACKEND", "stock")
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.usefixtures("stock_backend")
def test_backend_without_forward_mode_is_refused(tmp_path: Path) -> None:
    printed = io.StringIO()
    assert demo.run(demo.Options(starts=1, output=str(tmp_path / "no.png")), Console(file=printed)) == 1
    assert "stock, which has no forward mode" in printed.getvalue()
    assert not (tmp_path / "no.png").exists()


def check_run(arguments: list[str], output: Path, printed: Callable[[], str]) -> None:
    assert main(["demo", "--output", str(output), *arguments]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")
    text = printed()
    for expected in ("hare growth", "standard error", "compile the fit, s", "largest relative difference"):
        assert expected in text


@pytest.mark.long
def test_command_line_in_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_run([], tmp_path / "full.png", lambda: capsys.readouterr().out)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_run(["--starts", "4"], tmp_path / "small.png", lambda: capsys.readouterr().out)


@pytest.mark.parametrize("arguments", [[], ["demo", "--starts", "0"], ["demo", "--starts", "many"], ["unknown"]])
def test_wrong_command_line_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2


def test_missing_extra_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gradsolve_backend.demo")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(SystemExit, match=r"needs rich.*pip install 'gradsolve_backend\[demo\]'"):
        main(["demo"])
