"""The examples, in their short form: they run, write a figure, and find what is known."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
PNG = b"\x89PNG\r\n\x1a\n"
# Name of a number in the output, and how far it may be from the one known, relative to that.
KNOWN = {
    "hare_lynx": {"hare growth, 1/year": 0.05, "lynx death, 1/year": 0.05, "smallest sum of squares": 1e-6},
    "sir_flu": {"transmission rate, 1/day": 0.03, "recovery rate, 1/day": 0.1},
    "pk_population": {"mean of log clearance, L/h/kg": 0.03, "mean of log elimination rate, 1/h": 0.05},
    "stiff_kinetics": {"k1": 0.05, "k2": 0.05, "k3": 0.05, "B at time 40": 1e-3, "C at time 40": 1e-3},
    "bayes": {"hare growth, 1/year": 0.1, "lynx death, 1/year": 0.1},
    "neural_ode": {},
    "free_final_time": {"final time t1": 1e-3, "derivative of the Lagrangian by t1, at the start": 1e-4},
    "switch_backend": {"value with xla": 1e-4, "value with llvm": 1e-4},
}
# Here the number known is a bound.
BOUNDS = {
    "pk_population": ["error of the solver against the closed form"],
    "bayes": ["difference of the gradients from stock's"],
    "neural_ode": ["difference of the gradient from stock's", "largest error of the whole path"],
    "free_final_time": ["difference of the gradient from stock's", "distance to the goal"],
    "switch_backend": ["difference of the gradient with xla", "difference of the gradient with llvm"],
}


def numbers(output: str, name: str) -> tuple[float, float]:
    """The number found and the one known in the line of this name; standard errors are left out."""
    line = next(line for line in output.splitlines() if line.startswith(f"{name}  "))
    found, known = re.findall(r"(\S+)(?: ± \S+)?", line.removeprefix(name))
    return float(found), float(known)


def test_every_example_is_listed() -> None:
    scripts = {path.stem for path in FOLDER.glob("*.py")} - {"common", "plain_lorenz"}
    assert scripts == set(KNOWN)
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert scripts <= set(re.findall(r"\]\((\w+)\.py\)", readme))


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_example(name: str, tmp_path: Path) -> None:
    if name == "bayes" and importlib.util.find_spec("numpyro") is None:
        pytest.skip("needs NumPyro")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("GRADSOLVE_", "XLA_FLAGS"))}
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--short", "--out", "figure.png"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "figure.png").read_bytes().startswith(PNG)
    assert re.search(r"^to run, ms|later calls, ms", done.stdout, re.MULTILINE)
    for what, tolerance in KNOWN[name].items():
        found, known = numbers(done.stdout, what)
        assert found == pytest.approx(known, rel=tolerance), what
    for what in BOUNDS.get(name, []):
        found, known = numbers(done.stdout, what)
        assert 0.0 <= found < known, what


def test_bayes_without_numpyro_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "numpyro.py").write_text("raise ModuleNotFoundError('no numpyro', name='numpyro')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(FOLDER / "bayes.py"), "--short"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "pip install 'gradsolve_backend[examples]'" in done.stderr
