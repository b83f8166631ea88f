"""The code that `docs/switching.md` shows runs, and what the page says is so."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

from gradsolve_backend import commands, config, uninstall
from gradsolve_backend.__main__ import COMMANDS

TEXT = (Path(__file__).parents[1] / "docs" / "switching.md").read_text(encoding="utf-8")


@pytest.fixture
def clean(monkeypatch):
    for kind in config.KINDS.values():
        monkeypatch.delenv(kind.variable, raising=False)
    # Users have JAX as it comes.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
    uninstall()
    config._CONFIGURED.set(())


def test_the_code_runs(clean, capsys, caplog):
    names: dict = {}
    for block in re.findall(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE):
        exec(compile(block, "docs/switching.md", "exec"), names)
    np.testing.assert_allclose(names["slope"], -6 * np.exp(-1.0), rtol=1e-4)
    route, found = names["route"], names["found"]
    assert (route.backend, route.lanes) == ("llvm", 64) and route.record_rows > 1000  # in a million bytes
    assert [row.backend for row in found.rows] == ["stock", "xla", "llvm"]
    shown = capsys.readouterr().out
    assert "bytes gradient" in shown and found.advice in shown
    [record] = [r for r in caplog.records if r.name == "gradsolve_backend.routes"]
    assert ": xla (Tsit5" in record.getMessage()
    assert config.setting("memory").value == 1_000_000


def test_every_setting_has_a_row():
    for name, kind in config.KINDS.items():
        assert f"\n| {name} | `{kind.variable}` | `{name}` |" in TEXT


def test_every_command_is_shown_and_parses():
    shown = re.findall(r"python -m gradsolve_backend (\w[^\n`]*)", TEXT)
    parser = commands.parser(COMMANDS)
    names = {parser.parse_args(words.split()).command for words in shown if words != "run"}
    assert names >= {COMMANDS[name] for name in ("run", "measure", "bench", "doctor")}
