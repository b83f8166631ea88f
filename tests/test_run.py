"""`python -m gradsolve_backend run`: unchanged programs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

# Names nothing of ours.
PROGRAM = """
import sys
from diffrax import ODETerm, PIDController, RecursiveCheckpointAdjoint, Tsit5, diffeqsolve
import jax, jax.numpy as jnp
import beside

jax.config.update("jax_enable_x64", True)

def loss(rate, **how):
    control = PIDController(rtol=1e-8, atol=1e-8)
    ys = diffeqsolve(ODETerm(lambda t, y, rate: -rate * y), Tsit5(), 0, 1, None, jnp.ones(2), rate,
                     stepsize_controller=control, **how).ys
    return jnp.sum(ys)

if __name__ == "__main__":
    how = {"adjoint": RecursiveCheckpointAdjoint()} if "--named" in sys.argv else {}
    print(*jax.value_and_grad(lambda rate: loss(rate, **how))(1.5))
    print(sys.argv[1:], beside.NAME, type(sys.modules["__main__"].loss).__name__, "gradsolve_backend" in sys.modules)
    sys.exit(3)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("program")
    (made / "program.py").write_text(PROGRAM)
    (made / "beside.py").write_text("NAME = 'beside'\n")
    return made


def python(*words: str, cwd: Path, code: int = 3, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GRADSOLVE_")}
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, env=variables | environment, capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    return done


RUN = ("-m", "gradsolve_backend", "run")


@pytest.mark.smoke
def test_an_unchanged_script_on_three_backends(folder):
    """Numbers to round-off as without us; the log shows which backend each solve took."""
    alone = python("program.py", "--x", cwd=folder)
    numbers, rest = alone.stdout.splitlines()
    assert rest == "['--x'] beside function False"
    for backend in ("stock", "xla", "llvm"):
        done = python(*RUN, "program.py", "--x", cwd=folder, GRADSOLVE_BACKEND=backend, GRADSOLVE_LOG="routes")
        found, more = done.stdout.splitlines()
        np.testing.assert_allclose(np.fromstring(found, sep=" "), np.fromstring(numbers, sep=" "), rtol=1e-13)
        assert more == "['--x'] beside function True"
        (line,) = done.stderr.splitlines()
        assert re.match(rf"gradsolve_backend\.routes: \S*program\.py:11: {backend} \(Tsit5, ", line)


def test_a_module_and_the_settings_of_the_nearest_file(folder, tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.gradsolve_backend]\nbackend = "xla"\nlog = "routes"\n')
    done = python(*RUN, "-m", "program", "-m", "x", cwd=tmp_path, PYTHONPATH=str(folder))
    assert "['-m', 'x'] beside" in done.stdout
    assert ": xla (" in done.stderr and "pyproject.toml" in done.stderr
    # The file belongs to the folder of a script, not to the current one.
    done = python(*RUN, str(folder / "program.py"), cwd=tmp_path, GRADSOLVE_LOG="routes")
    assert ": llvm (" in done.stderr


def test_adjoints_that_the_program_names(folder):
    for words, routes in (((), 0), (("--replace", "RecursiveCheckpointAdjoint"), 1)):
        done = python(*RUN, *words, "program.py", "--named", cwd=folder, GRADSOLVE_LOG="routes")
        assert done.stderr.count("gradsolve_backend.routes") == routes


@pytest.mark.parametrize(
    "words, message",
    [
        (("no.py",), "No such file or directory: .*no.py"),
        (("--replace", "Adjoint", "program.py"), "Diffrax has no adjoint of this name. There are: .*Recursive"),
    ],
)
def test_what_cannot_be_run(words, message, folder):
    done = python(*RUN, *words, cwd=folder, code=1)
    assert re.search(message, done.stderr) and "Traceback" not in done.stderr


def test_a_wrong_setting_in_the_file(folder, tmp_path):
    (tmp_path / "program.py").write_text("print(1)")
    (tmp_path / "pyproject.toml").write_text("[tool.gradsolve_backend]\nmemory = 0\n")
    done = python(*RUN, "program.py", cwd=tmp_path, code=1)
    assert re.match(r"memory = 0 in \[tool.gradsolve_backend\] of .*: a whole, positive", done.stderr)
