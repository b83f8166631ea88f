"""`install` and `uninstall`: which calls change, what is put back, and that compiled calls are not confused."""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from diffrax import diffeqsolve  # imported before anything is installed
from helpers import decay
from jax import Array

from gradsolve_backend import GradSolveAdjoint, explain, install, uninstall

STOCK = diffrax.RecursiveCheckpointAdjoint
FUNCTION = inspect.unwrap(diffrax.diffeqsolve)
BEFORE = (diffrax.diffeqsolve, FUNCTION.__kwdefaults__, FUNCTION.__kwdefaults__["adjoint"], vars(STOCK)["loop"])


def objects() -> tuple[Any, ...]:
    return diffrax.diffeqsolve, FUNCTION.__kwdefaults__, FUNCTION.__kwdefaults__["adjoint"], vars(STOCK)["loop"]


def untouched() -> bool:
    return all(now is before for now, before in zip(objects(), BEFORE, strict=True))


@pytest.fixture(autouse=True)
def nothing_installed() -> Iterator[None]:
    assert untouched()
    yield
    uninstall()
    assert untouched()


def end(rate: Any, solve: Callable = diffeqsolve, **how: Any) -> Array:
    return solve(diffrax.ODETerm(decay), diffrax.Tsit5(), 0.0, 1.0, 0.1, jnp.ones(2), rate, **how).ys[0, 0]


def ways(**how: Any) -> list[str]:
    """Backends of the solves by our adjoint."""
    return [route.backend for route in explain(partial(end, **how), 0.7)]


class TestDefault:
    def test_calls_without_an_adjoint_are_taken(self):
        assert ways() == []
        install()
        assert len(ways()) == 1
        uninstall()
        assert ways() == []

    def test_every_name_of_the_function_is_covered(self):
        outer = eqx.filter_jit(diffeqsolve)
        install()
        for solve in (diffeqsolve, diffrax.diffeqsolve, outer, partial(diffeqsolve, throw=True)):
            assert len(ways(solve=solve)) == 1
        assert isinstance(inspect.signature(diffrax.diffeqsolve).parameters["adjoint"].default, GradSolveAdjoint)

    def test_calls_that_name_an_adjoint_keep_it(self):
        install()
        assert ways(adjoint=STOCK()) == ways(adjoint=diffrax.DirectAdjoint()) == []

    def test_forward_and_reverse_mode(self):
        install()
        np.testing.assert_allclose(jax.jacfwd(end)(0.7), -np.exp(-0.7), rtol=1e-5)
        np.testing.assert_allclose(jax.grad(end)(0.7), jax.jacfwd(end)(0.7), rtol=1e-12)
        uninstall()
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jacfwd(end)(0.7)

    def test_twice_is_once(self):
        install()
        first = objects()
        install()
        assert all(x is y for x, y in zip(objects(), first, strict=True))
        uninstall()
        assert untouched()
        uninstall()


class TestReplace:
    def test_the_classes_named_are_replaced_and_no_other(self):
        class Own(STOCK):
            pass

        install(replace=(STOCK,))
        assert len(ways()) == len(ways(adjoint=STOCK())) == len(ways(adjoint=STOCK(checkpoints=7))) == 1
        assert ways(adjoint=Own()) == ways(adjoint=diffrax.DirectAdjoint()) == []
        np.testing.assert_allclose(end(0.7, adjoint=Own()), end(0.7, adjoint=STOCK()), rtol=1e-14)
        install(replace=(STOCK, diffrax.DirectAdjoint))
        assert len(ways(adjoint=diffrax.DirectAdjoint())) == 1
        install()
        assert ways(adjoint=STOCK()) == []

    def test_the_backend_stock_is_still_stock(self, monkeypatch):
        value, slope = jax.value_and_grad(end)(0.7)
        install(replace=(STOCK,))
        monkeypatch.setenv("GRADSOLVE_BACKEND", "stock")
        assert ways(adjoint=STOCK()) == ["stock"]
        found = jax.value_and_grad(partial(end, adjoint=STOCK()))(0.7)
        np.testing.assert_array_equal(found, (value, slope))

    @pytest.mark.parametrize("wrong", [STOCK(), int, "RecursiveCheckpointAdjoint", GradSolveAdjoint])
    def test_anything_but_a_class_of_adjoints_is_refused(self, wrong):
        with pytest.raises(ValueError, match="a class of Diffrax's adjoints is wanted"):
            install(replace=(wrong,))

    def test_a_class_without_a_loop_of_its_own_is_refused(self):
        class Own(STOCK):
            pass

        with pytest.raises(ValueError, match=r"replace=\(Own,\).*takes `loop` from another"):
            install(replace=(Own,))


class TestContext:
    def test_ends_with_the_block(self):
        with install() as context:
            assert repr(context) == "install(replace=())"
            assert len(ways()) == 1
        assert untouched()

    def test_ends_with_an_error(self):
        with pytest.raises(KeyError), install(replace=(STOCK,)):
            raise KeyError
        assert untouched()

    def test_an_inner_one_leaves_the_outer_one(self):
        with install():
            with install(replace=(STOCK,)):
                assert len(ways(adjoint=STOCK())) == 1
            assert len(ways()) == 1 and ways(adjoint=STOCK()) == []
            with install():
                pass
            assert len(ways()) == 1
        assert untouched()


@pytest.mark.parametrize("inside", [False, True], ids=["diffrax's own jit", "in a user's jit"])
def test_compiled_calls_are_not_confused(inside, monkeypatch):
    """A call compiled before must not serve after, and the other way round."""
    taken = []
    own, stock = GradSolveAdjoint.loop, STOCK.loop
    monkeypatch.setattr(GradSolveAdjoint, "loop", lambda self, **given: taken.append("ours") or own(self, **given))
    monkeypatch.setattr(STOCK, "loop", lambda self, **given: taken.append("stock") or stock(self, **given))
    field = lambda t, y, rate: -rate * y  # no other test has compiled this one

    def function(rate: Array) -> Any:
        return diffeqsolve(diffrax.ODETerm(field), diffrax.Tsit5(), 0.0, 1.0, 0.1, jnp.ones(2), rate).ys

    called, rate = jax.jit(function) if inside else function, jnp.asarray(0.3)
    for _ in range(2):
        called(rate)
    with install():
        for _ in range(2):
            called(rate)
    assert taken == ["stock", "ours"]
    called(rate)
    assert taken[2:] in ([], ["stock"])  # once again, if the process has a further key since
    with install():
        called(rate)
    assert "ours" not in taken[2:]
    monkeypatch.undo()


def test_a_function_that_is_not_diffraxs_is_refused(monkeypatch):
    monkeypatch.setattr(diffrax, "diffeqsolve", lambda *args, **kwargs: None)
    with pytest.raises(RuntimeError, match="no keyword default for `adjoint`"):
        install()
