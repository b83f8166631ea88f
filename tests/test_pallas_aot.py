"""Machine code for NVIDIA GPUs, on a machine without one; needs the `triton` wheel."""

import importlib.util
import subprocess
import sys

import diffrax
import jax
import jax.numpy as jnp
import pytest

from gradsolve_backend import GradSolveAdjoint
from gradsolve_backend.kernels import pallas_forms, pallas_layout
from gradsolve_backend.kernels.pallas_tuning import Tuning

if importlib.util.find_spec("jax._src.lib.triton") is None:
    pytest.skip("this version of JAX does not lower to Triton", allow_module_level=True)

import aot

DOCUMENT = aot.DOCUMENT.read_text(encoding="utf-8") if aot.DOCUMENT.exists() else ""


@pytest.mark.skipif(not DOCUMENT, reason="the documents are not installed")
@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("has room for {} rows", pallas_layout.ROWS),
        ("at most {} checkpoints", pallas_layout.CHECKPOINTS),
        ("and {} rows for the steps that", pallas_layout.AGAIN),
        ("a block of {} lanes", Tuning().block),
        ("A step of more than {} equations", pallas_forms.EQUATIONS),
        ("a derivative of more than {},", pallas_forms.DERIVATIVE_EQUATIONS),
        ("more than {} differentiated numbers", pallas_forms.SUMS),
    ],
)
def test_what_the_document_says(words, number):
    assert words.format(f"{number:,}") in " ".join(DOCUMENT.split())


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the `triton` wheel is missing")


def test_one_function_lowers_for_both_platforms():
    """The kernel for a GPU and the interpreter for a CPU, in one program."""
    lowered = aot.lowered(*_slope(), platforms=("cpu", "cuda")).as_text()
    assert lowered.count("gpu.triton") >= 2 and "stablehlo.case" in lowered


def test_what_lowers_runs_on_this_machine():
    """The same function, compiled for the CPU that is there."""
    function, *inputs = _slope()
    slopes = jax.jit(function)(*inputs)
    assert jnp.all(jnp.isfinite(slopes))


def _slope():
    y0s = jnp.ones((3, 2))

    def end(y0, mu):
        sol = diffrax.diffeqsolve(
            diffrax.ODETerm(aot.van_der_pol), diffrax.Heun(), 0.0, 1.0, 0.1, y0, mu,
            adjoint=GradSolveAdjoint(backend="pallas"), throw=False, max_steps=16,
        )  # fmt: skip
        return jnp.sum(sol.ys[0])  # type: ignore[index]

    return jax.vmap(jax.grad(end), in_axes=(0, None)), y0s, jnp.array(1.0)


#: Accesses of spilled values that are known, for double precision: of a reverse sweep that holds two values of each
#: stage and component, and of look-ups, whose derivative sums a cotangent for each entry of the table.
SPILLED = {
    ("Lorenz-96, 8", "gradsolve_cotangent"): 130,
    ("PK with a table", "gradsolve_cotangent"): 60,
    ("PK with a table", "gradsolve_tangent"): 10,
}


@needs_triton
@pytest.mark.aot
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", [name for name, (_, dimension, _) in aot.PROBLEMS.items() if dimension <= 8])
def test_no_register_is_spilled(name, dtype):
    """Every kernel up to dimension 8, on three generations of GPUs."""
    for kernel in aot.of_problem(name, dtype):
        ptx = aot.compiled(kernel)
        for gpu in aot.GPUS:
            code = aot.assembled(ptx, gpu, dtype == "float64")
            assert code.spills <= SPILLED.get((name, kernel.name), 0) * (dtype == "float64"), (kernel.name, gpu, code)


@needs_triton
@pytest.mark.aot
def test_lorenz_keeps_within_its_budget():
    """Registers that suffice, and instructions of a step."""
    forward, record, cotangent, _ = aot.of_problem("Lorenz", "float64")
    ptx = [aot.compiled(k) for k in (forward, record, cotangent)]
    for text, budget in zip(ptx, (72, 72, 128), strict=True):
        assert aot.assembled(text, 90, True, budget).spills == 0
    for text in ptx[:2]:
        code = aot.assembled(text, 90, True)
        assert code.arithmetic <= 250 and code.loop <= 600, code


@needs_triton
@pytest.mark.aot
def test_the_script_prints_a_table(tmp_path):
    """For one problem."""
    program = (
        "import aot; aot.PROBLEMS = {k: aot.PROBLEMS[k] for k in ['Van der Pol']}; aot.GPUS = (90,); aot.main(False)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=aot.__file__.rpartition("/")[0], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("| Van der Pol |") == 8
