"""`doctor` and `bench`: what they say, and their exit codes."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gradsolve_backend import bench, bench_command, commands, config, plugins
from gradsolve_backend.__main__ import COMMANDS
from gradsolve_backend.adapters import doctor
from gradsolve_backend.plugins import backends
from gradsolve_backend.table import Measurements, Row, Spread


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """No settings but those of the test."""
    monkeypatch.chdir(tmp_path)
    for kind in config.KINDS.values():
        monkeypatch.delenv(kind.variable, raising=False)
    yield
    config.use_file(None)


def told() -> tuple[int, str]:
    said: list[str] = []
    return doctor.run(said.append), "\n".join(said)


class TestDoctor:
    def test_a_machine_in_order(self):
        code, text = told()
        assert code == 0 and text.endswith("The default works here: llvm.")
        for section in ("Versions", "Devices", "Settings", "Plugins", "Backends"):
            assert f"{section}\n  " in text
        lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
        assert "gradsolve_backends" in text and "lanes in float64" in text
        for name in ("llvm", "xla", "stock"):
            assert lines[name].endswith("works")
        assert "only if it is asked for" in text.partition("Backends\n")[2].partition("pallas")[2].partition("\n")[0]

    def test_settings_and_where_they_come_from(self, tmp_path, monkeypatch):
        (tmp_path / "pyproject.toml").write_text("[tool.gradsolve_backend]\nmemory = 1000000\nlog = 'off'\n")
        monkeypatch.setenv("GRADSOLVE_BACKEND", "xla")
        monkeypatch.setenv("GRADSOLVE_MEMROY", "1")
        code, text = told()
        assert code == 0 and text.endswith("The default works here: xla.")
        assert "xla        from: GRADSOLVE_BACKEND" in text
        assert f"1000000    from: {tmp_path / 'pyproject.toml'}" in text
        assert "GRADSOLVE_MEMROY is set, and is no variable of this package. There are: GRADSOLVE_BACKEND" in text

    @pytest.mark.parametrize(
        "variable, value, message",
        [
            ("GRADSOLVE_BACKEND", "unheard", "no plugin offers a backend of this name"),
            ("GRADSOLVE_MEMORY", "3 MB", "a whole, positive number of bytes"),
            ("GRADSOLVE_LOG", "everything", '"routes" is wanted'),
        ],
    )
    def test_a_wrong_setting(self, variable, value, message, monkeypatch):
        monkeypatch.setenv(variable, value)
        code, text = told()
        assert code == 1 and "The default does not work here." in text and f"{variable}={value}" in text
        assert message in text

    def test_a_default_that_does_not_work(self, monkeypatch):
        def broken(*_: Any) -> None:
            raise OSError("no such instruction")

        monkeypatch.setattr(type(backends()["llvm"].kernels), "forward", broken)
        monkeypatch.setattr(doctor, "RATE", 1.25)  # what was compiled before would still run
        code, text = told()
        assert code == 1 and "The default does not work here. OSError: no such instruction" in text
        assert "llvm    rank 20  not usable: OSError: no such instruction" in text
        assert "xla     rank 10  works" in text

    def test_a_wrong_number_is_found(self, monkeypatch):
        monkeypatch.setattr(doctor, "TOLERANCE", 1e-13)
        code, text = told()
        assert code == 1 and "for exp(-1.5) and its slope, which are" in text

    def test_a_backend_that_is_not_there(self, monkeypatch):
        monkeypatch.setattr(type(backends()["llvm"]), "supports", lambda self, problem: ("llvmlite is not installed",))
        code, text = told()
        assert code == 0 and "not usable: llvmlite is not installed" in text
        assert text.endswith("The default works here: xla.")

    def test_a_broken_plugin_is_named(self, monkeypatch):
        def broken() -> None:
            with plugins.blaming("broken = broken of broken 1.0"):
                raise ImportError("no such module")

        monkeypatch.setattr(doctor, "plugin_manager", broken)
        code, text = told()
        assert code == 1 and "ImportError: no such module" in text and "broken = broken of broken 1.0" in text


def measured(difference: float) -> Measurements:
    spread = Spread(0.002, 0.001, 0.003, 7)
    rows = (Row("stock", 2.0, spread, spread, 1000, 2000, 0.0), Row("llvm", 1.0, spread, spread, 10, 20, difference))
    return Measurements(rows, (), "cpu")


class TestBench:
    def run(self, *words: str) -> tuple[int, str]:
        printed = io.StringIO()
        arguments = commands.parser(COMMANDS).parse_args(["bench", *words])
        return bench_command.run(arguments, Console(file=printed, width=80)), printed.getvalue()

    def test_one_problem(self, tmp_path: Path):
        code, text = self.run("--only", "Lorenz x 1", "--seconds", "0.01", "--json", "o.json", "--plot", "o.png")
        assert code == 0 and "Lorenz x 1" in text and "Lorenz x 64" not in text and "gradient / forward" in text
        (found,) = json.loads((tmp_path / "o.json").read_text())
        assert (found["problem"], found["lanes"]) == ("Lorenz", 1)
        assert {row["backend"] for row in found["rows"]} == {"stock", "xla", "llvm"}
        assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize("difference, code", [(1e-12, 0), (1e-3, 1), (float("nan"), 1)])
    def test_gradients_that_differ_fail(self, difference, code, monkeypatch):
        monkeypatch.setattr(bench_command, "measured", lambda *_: measured(difference))
        found, text = self.run("--only", "Lorenz x 1")
        assert found == code and ("FAILED" in text) == bool(code)

    def test_the_long_form_has_more(self):
        short, long = ([str(case) for case in bench.cases(long)] for long in (False, True))
        assert long[: len(short)] == short and len(long) > len(short) and len(set(long)) == len(long)
