"""What `docs/llvm.md`, `docs/stiff.md` and `docs/fits.md` show is what the code does."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import blocks

from gradsolve_backend.kernels import forms, llvm_code, llvm_loops, llvm_lower, llvm_routine, scalar, scalar_dense

DOCS = Path(__file__).parents[1] / "docs"
TEXT, STIFF, FITS = ((DOCS / name).read_text(encoding="utf-8") for name in ("llvm.md", "stiff.md", "fits.md"))


def block(language: str) -> str:
    (found,) = blocks(language, TEXT)
    return found


def test_the_code_of_a_step_is_what_the_program_prints(capsys):
    exec(compile(block("python"), "docs/llvm.md", "exec"), {"__name__": "docs"})
    assert capsys.readouterr().out == block("llvm")


@pytest.mark.parametrize(
    "words, number",
    [
        ("{} rows and", llvm_loops.ROWS),
        ("and {} checkpoints per lane", llvm_loops.CHECKPOINTS),
        ("checkpoints {} steps apart", llvm_loops.AGAIN),
        ("through its steps once for up to {} of them", llvm_loops.GROUP),
        ("up to {} tasks", llvm_lower.TASKS),
        ("at most {} instructions", llvm_routine.CHUNK),
        ("{} texts", llvm_code.KEPT),
        ("more than {} equations", forms.EQUATIONS),
        ("({} if it solves linear systems)", forms.LINEAR_EQUATIONS),
        ("or {} with its derivative", forms.DERIVATIVE_EQUATIONS),
        ("a `jax.lax.scan` of more than {} iterations", scalar.UNROLL_LIMIT),
        ("vector field of {} equations", scalar.SHARED_EQUATIONS),
    ],
)
def test_numbers_are_those_of_the_code(words, number):
    assert words.format(f"{number:,}") in " ".join(TEXT.split())


def test_the_programs_for_fits_run():
    names: dict = {"__name__": "docs"}
    for program in blocks("python", FITS):
        exec(compile(program, "docs/fits.md", "exec"), names)
    np.testing.assert_allclose(names["rate"], 0.7, rtol=1e-5)
    np.testing.assert_allclose(names["initial"], 2.0, rtol=1e-5)
    t = np.asarray(names["times"])
    slopes = np.exp(-0.7 * t)[:, None] * np.stack([-2.0 * t, np.ones_like(t)], axis=1) / 0.01
    np.testing.assert_allclose(names["errors"], np.sqrt(np.diag(np.linalg.inv(slopes.T @ slopes))), rtol=1e-5)
    np.testing.assert_allclose(names["near"].ys, 2.0 * np.exp(-0.71 * names["times"]), rtol=1e-6)
    assert names["near"].stats["drift"] < 2 < names["far"].stats["drift"]
    assert f"takes up to {llvm_loops.GROUP} of them at a time" in " ".join(FITS.split())


def test_the_programs_for_stiff_systems_run():
    names: dict = {"__name__": "docs"}
    for program in blocks("python", STIFF):
        exec(compile(program, "docs/stiff.md", "exec"), names)
    y, k = jnp.array([0.6, 6e-6, 0.4]), jnp.array([0.04, 3e7, 1e4])
    wanted = jax.jacfwd(names["reactions"], argnums=1)(0.0, y, k)
    np.testing.assert_allclose(names["jacobian"](0.0, y, k), wanted, rtol=1e-12)
    value, gradient = names["loss"](k)
    np.testing.assert_allclose(value, 0.382759, rtol=1e-4)
    assert np.isfinite(gradient).all()


def test_the_limits_for_stiff_systems_are_those_of_the_code():
    unknowns, equations = scalar_dense.DIMENSION, f"{forms.LINEAR_EQUATIONS:,}"
    assert f"up to {unknowns} unknowns, and a step of at most {equations} equations" in STIFF
    assert f"linear systems of more than {scalar_dense.DIMENSION} unknowns" in TEXT
