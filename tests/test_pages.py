"""The pages of the documentation and the README: their programs run and print what they say, their commands exist."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import blocks, final, logistic

import gradsolve_backend
from gradsolve_backend import GradSolveAdjoint, commands, config
from gradsolve_backend.__main__ import COMMANDS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
README = (ROOT / "README.md").read_text(encoding="utf-8")
EVERYWHERE = {"README": README, "examples": (ROOT / "examples" / "README.md").read_text(encoding="utf-8"), **PAGES}
# What these programs do is looked at more closely in test_docs, test_switching, test_package and test_hooks.
ELSEWHERE = {"fits", "llvm", "stiff", "switching", "plugins"}
SHOWN = re.compile(r"^```python\n(.*?)^```$(?:\n+^```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def as_users_have_it(monkeypatch):
    for kind in config.KINDS.values():
        monkeypatch.delenv(kind.variable, raising=False)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("page", [name for name in PAGES if SHOWN.search(PAGES[name]) and name not in ELSEWHERE])
def test_programs_print_what_the_page_says(page, capsys):
    """A block of text that follows a program is what it prints."""
    names: dict[str, Any] = {"__name__": "docs"}
    for program, printed in SHOWN.findall(PAGES[page]):
        exec(compile(program, f"docs/{page}.md", "exec"), names)
        assert capsys.readouterr().out == printed


def given() -> dict[str, Any]:
    """The names that the programs of the README leave to the reader."""
    terms, y0 = diffrax.ODETerm(logistic), jnp.array(0.1)
    loss = lambda rate: final(logistic, y0, rate, adjoint=GradSolveAdjoint())
    names = {"terms": terms, "y0": y0, "args": 1.5, "solver": diffrax.Tsit5(), "t0": 0.0, "t1": 1.0, "dt0": None}
    return {**names, "jax": jax, "loss": loss, "parameters": 1.5}


def test_programs_of_the_readme_run(capsys):
    names = given()
    for program in blocks("python", README):
        exec(compile(program, "README.md", "exec"), names)
    assert "llvm" in capsys.readouterr().out


@pytest.mark.parametrize("sign", ["-", "+"])
def test_what_the_readme_changes_changes_no_value(sign):
    """The program before the change (-) and after it (+)."""
    (change,) = blocks("diff", README)
    lines = [line[1:] for line in change.splitlines() if line[:1] in (" ", sign)]
    names = given()
    exec(compile("\n".join(lines), "README.md", "exec"), names)
    np.testing.assert_allclose(names["solution"].ys, 1 / (1 + 9 * np.exp(-1.5)), rtol=1e-5)


RUNS = re.compile(r"python3? ((?:-m )?)([\w./]+)((?: [^\n`]*)?)")


def is_there(module: str, target: str, rest: str) -> bool:
    """Whether a command that a page shows exists; files without a folder are the reader's own."""
    if not module:
        return "/" not in target or (ROOT / target).is_file()
    if target == "gradsolve_backend":
        words = rest.partition(" && ")[0].split()
        return words == ["run"] or words == [] or bool(commands.parser(COMMANDS).parse_args(words))
    # What extras install need not be here.
    return not target.startswith("gradsolve_backend") or importlib.util.find_spec(target) is not None


@pytest.mark.parametrize("page", EVERYWHERE)
def test_commands_exist(page):
    missing = [found[0] for found in RUNS.finditer(EVERYWHERE[page]) if not is_there(*found.groups())]
    assert not missing


def test_commands_are_looked_at():
    assert not is_there("", "benchmarks/nothing.py", "")
    assert not is_there("-m ", "gradsolve_backend.nothing", "")
    with pytest.raises(SystemExit):
        is_there("-m ", "gradsolve_backend", " nothing")


@pytest.mark.parametrize("page", EVERYWHERE)
def test_environment_variables_exist(page):
    named = set(re.findall(r"\bGRADSOLVE_[A-Z_]+", EVERYWHERE[page]))
    assert named <= {kind.variable for kind in config.KINDS.values()}


def test_every_page_is_in_the_contents():
    listed = [line for tree in blocks("{toctree}", PAGES["index"]) for line in tree.splitlines() if line[:1].isalpha()]
    assert sorted([*listed, "index"]) == list(PAGES)


@pytest.mark.parametrize("page", [name for name in PAGES if "{include}" in PAGES[name]])
def test_what_is_included_is_there(page):
    """Between two headings of the README, in this order."""
    for include in blocks(r"\{include\} \.\./README\.md", PAGES[page]):
        start, end = re.findall(r':(?:start-after|end-before): "(.*)"', include)
        assert f"{start}\n" in README and f"\n{end}\n" in README.partition(start)[2]


@pytest.mark.parametrize("name", gradsolve_backend.__all__)
def test_everything_public_is_on_the_page_of_the_api(name):
    assert re.search(rf"^\.\. (auto\w+|py:data):: {name}(\(.*\))?$", PAGES["api"], re.MULTILINE)


def test_the_readme_has_two_commands_to_set_up():
    assert len(re.findall(r"^python3 -m venv", README, re.MULTILINE)) == 2
