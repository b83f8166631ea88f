"""`measure`: what it takes part, what it refuses, what it says; and its command."""

import io
import json
from pathlib import Path
from typing import Any

import diffrax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from gradsolve_backend import GradSolveAdjoint, commands, measure, measure_command
from gradsolve_backend.__main__ import COMMANDS, main
from gradsolve_backend.plugins import backends
from gradsolve_backend.table import Measurements, Row, Spread

NAMED = (diffrax.RecursiveCheckpointAdjoint,)


def loss(rate: Any, y0: Any = 1.0, how: str = "default") -> Any:
    """The square of `exp(-rate)`, by Diffrax alone, or with an adjoint."""
    adjoints = {"named": diffrax.RecursiveCheckpointAdjoint(), "xla": GradSolveAdjoint(backend="xla")}
    given = {"adjoint": adjoints[how]} if how in adjoints else {}
    terms = diffrax.ODETerm(lambda t, y, rate: -rate * y)
    control = diffrax.PIDController(rtol=1e-5, atol=1e-5)
    start = jnp.broadcast_to(jnp.asarray(y0), (2,))
    ys = diffrax.diffeqsolve(terms, diffrax.Heun(), 0, 1, None, start, rate, stepsize_controller=control, **given).ys
    return jnp.sum(ys**2) / 2


@pytest.fixture(scope="module")
def found() -> Measurements:
    said = []
    out = measure(loss, 1.5, seconds=0.01, progress=lambda what, share: said.append((what, share)))
    shares = [share for _, share in said]
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert [what for what, _ in said[:3]] == ["compile for stock", "compile for xla", "compile for llvm"]
    return out


class TestMeasure:
    def test_stock_and_each_backend_that_is_taken_here(self, found):
        assert [row.backend for row in found.rows] == ["stock", "xla", "llvm"] and found.platform == "cpu"
        for row in found.rows:
            assert 0 < row.forward.low <= row.forward.median <= row.forward.high and row.forward.calls >= 5
            assert row.first > row.gradient.median > 0 and row.bytes_gradient > row.bytes_forward > 0
            assert row.ratio == row.gradient.median / row.forward.median
            assert row.difference is not None and row.difference < 1e-12
        assert found.rows[0].difference == 0

    def test_a_backend_that_cannot_take_part_says_why(self):
        found = measure(loss, 1.5, 1.0, "xla", backends=("llvm",), seconds=0.01)
        assert not found.rows
        assert found.left_out[1] == (
            "llvm",
            'it could run this solve, but GradSolveAdjoint(backend="xla") asks for another',
        )
        assert "No backend" in found.advice and "not llvm: it could run" in str(found)

    def test_an_error_of_one_backend_leaves_the_others(self, monkeypatch):
        def broken(*_: Any) -> None:
            raise NotImplementedError("no such instruction")

        monkeypatch.setattr(type(backends()["llvm"].kernels), "forward", broken)
        found = measure(lambda rate: 2 * loss(rate), 1.5, backends=("llvm",), seconds=0.01)
        assert [row.backend for row in found.rows] == ["stock"]
        assert found.left_out[0][0] == "llvm" and "no such instruction" in found.left_out[0][1]

    def test_a_solve_that_fails_says_what_it_says(self):
        found = measure(lambda rate: loss(1e9 * rate), 1.5, backends=(), seconds=0.01)
        assert found.left_out == (
            ("stock", "The maximum number of solver steps was reached. Try increasing `max_steps`."),
        )

    def test_an_adjoint_that_the_function_names(self):
        with pytest.raises(ValueError, match="no solve that takes `GradSolveAdjoint`"):
            measure(loss, 1.5, 1.0, "named")
        found = measure(loss, 1.5, 1.0, "named", replace=NAMED, backends=("llvm",), seconds=0.01)
        assert [row.backend for row in found.rows] == ["stock", "llvm"]

    @pytest.mark.parametrize("result", [lambda x: jnp.ones(2) * x, lambda x: 1, lambda x: {"a": x}, lambda x: 1j * x])
    def test_a_result_that_is_no_real_number(self, result):
        with pytest.raises(ValueError, match="a real number is wanted"):
            measure(result, 1.5)

    def test_nothing_to_differentiate_by(self):
        with pytest.raises(ValueError, match="no real or complex number in the arguments"):
            measure(lambda n: loss(1.5), 3)

    def test_a_backend_that_does_not_exist(self):
        with pytest.raises(ValueError, match="no plugin offers unheard. There are: llvm"):
            measure(loss, 1.5, backends=("unheard",))


def row(backend: str, gradient: float, difference: float | None) -> Row:
    spread = lambda seconds: Spread(seconds, 0.9 * seconds, 1.1 * seconds, 7)
    return Row(backend, 2.0, spread(gradient / 4), spread(gradient), 1000, 20_000, difference)


class TestAdvice:
    @pytest.mark.parametrize(
        "rows, said",
        [
            (
                [row("stock", 0.01, 0.0), row("llvm", 0.002, 1e-14)],
                "Take llvm: its gradient takes 2 ms where stock takes",
            ),
            ([row("stock", 0.01, 0.0), row("llvm", 0.02, 1e-14)], "Stay with Diffrax's own adjoint"),
            ([row("stock", 0.01, 0.0), row("llvm", 0.002, 1e-3)], "Look at the gradients first"),
            ([row("stock", 0.01, 0.0), row("llvm", 0.002, np.nan)], "Look at the gradients first"),
            ([row("llvm", 0.002, None)], "Take llvm: Diffrax's own loop has no gradient here"),
            ([], "No backend can run this function"),
        ],
    )
    def test_advice(self, rows, said):
        assert Measurements(tuple(rows), (), "cpu").advice.startswith(said)

    def test_table(self):
        text = str(Measurements((row("stock", 0.01, 0.0), row("llvm", 0.002, 1e-14)), (("pallas", "no GPU"),), "cpu"))
        lines = [line.split("  ") for line in text.splitlines()]
        assert lines[0][-1].strip() == "llvm"
        assert [cell.strip() for cell in lines[4] if cell][:3] == ["value and gradient, ms", "10", "2"]
        assert "5.0 times less" in text and "not pallas: no GPU" in text


SCRIPT = """
import diffrax, jax.numpy as jnp
import beside

def loss(rate):
    control = diffrax.PIDController(rtol=1e-5, atol=1e-5)
    return jnp.sum(diffrax.diffeqsolve(diffrax.ODETerm(lambda t, y, rate: -rate * y), diffrax.Heun(), 0, 1, None,
                   jnp.ones(2), rate, stepsize_controller=control).ys)

arguments = (1.5,)
def others(): return 2.5
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("")
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    return tmp_path / "script.py"


class TestCommand:
    def test_table_json_and_picture(self, script, tmp_path):
        files = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
        words = ["measure", f"{script}:loss", "--backends", "llvm", "--seconds", "0.01", *files]
        printed = io.StringIO()
        assert measure_command.run(commands.parser(COMMANDS).parse_args(words), Console(file=printed, width=80)) == 0
        text = printed.getvalue()
        assert "value and gradient, ms" in text and "llvm" in text and "script.py:loss" in text
        data = json.loads((tmp_path / "out.json").read_text())
        assert [r["backend"] for r in data["rows"]] == ["stock", "llvm"] and data["rows"][1]["difference"] < 1e-6
        assert data["advice"] in " ".join(text.split()) and data["packages"]["diffrax"]
        assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize(
        "target, words, message",
        [
            ("{}", [], "script.py:function or package.module:function is wanted"),
            ("{}:unheard", [], "has no function unheard"),
            ("{}:loss", ["--arguments", "unheard"], r"Name them in .* as a tuple `unheard = \(...\)`"),
            ("{}:loss", ["--backends", "unheard"], "no plugin offers unheard"),
            ("{}:loss", ["--replace", "unheard"], "Diffrax has no adjoint of this name"),
            ("no.py:loss", [], "no.py: no such file"),
        ],
    )
    def test_what_it_cannot_find(self, target, words, message, script):
        with pytest.raises(SystemExit, match=message):
            main(["measure", target.format(script), *words])


def test_the_loss_of_the_demo():
    """The example that the documentation names."""
    from gradsolve_backend import demo_loss

    (starts,) = demo_loss.arguments()
    found = measure(demo_loss.loss, starts[:2], backends=("llvm",), seconds=0.01)
    assert [row.backend for row in found.rows] == ["stock", "llvm"] and found.rows[1].difference < 1e-9
