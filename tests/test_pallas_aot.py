"""Machine code for NVIDIA GPUs, on a machine without one; needs the `triton` wheel."""

import importlib.util
import os
import re
import subprocess
import sys

import diffrax
import jax
import jax.numpy as jnp
import pytest

from gradsolve_backend import GradSolveAdjoint
from gradsolve_backend.kernels import pallas_forms, pallas_layout, pallas_lower
from gradsolve_backend.kernels.pallas_tuning import MANY, Tuning

if importlib.util.find_spec("jax._src.lib.triton") is None:
    pytest.skip("this version of JAX does not lower to Triton", allow_module_level=True)

import aot

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as XLA compiles kernels
DOCUMENT = aot.DOCUMENT.read_text(encoding="utf-8") if aot.DOCUMENT.exists() else ""


@pytest.mark.skipif(not DOCUMENT, reason="the documents are not installed")
@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("has room for {} rows", pallas_layout.ROWS),
        ("at most {} checkpoints", pallas_layout.CHECKPOINTS),
        ("{} rows for the steps that", pallas_layout.AGAIN),
        ("a block of {} lanes", Tuning().block),
        ("with a record of {} lanes or more", MANY),
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


def test_a_limit_of_registers_is_in_the_module(monkeypatch):
    """Of forward passes with a record of many lanes, where the values of a step are known to need so few."""
    limits = []
    for lanes in (MANY - 1, MANY):
        monkeypatch.setattr(aot, "LANES", lanes)
        _, (gradient, args), _ = aot.solves("Van der Pol", "float64")
        texts = [kernel.text.splitlines()[0] for kernel in aot.kernels(gradient, *args)]
        limits.append(["ttg.maxnreg = 64" in text for text in texts])
    assert limits == [[False, False, False], [True, False, False]]
    assert "gpu.triton" in aot.lowered(gradient, *args, platforms=("cpu", "cuda")).as_text()


DTYPES = ["float64", pytest.param("float32", marks=pytest.mark.long)]
SMALL = [name for name, problem in aot.PROBLEMS.items() if problem.dimension <= 8]


@needs_triton
@pytest.mark.aot
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SMALL)
def test_no_register_is_spilled(name, dtype):
    """Every kernel up to dimension 8, on four generations of GPUs."""
    found = aot.of_problem(name, dtype)
    assert [k.name.removeprefix("gradsolve_") for k in found] == ["forward", "record", "again", "cotangent", "tangent"]
    for kernel in found:
        ptx = aot.compiled(kernel)
        for gpu in aot.GPUS:
            code = aot.assembled(ptx, gpu, dtype == "float64")
            assert code.spills == 0, (kernel.name, gpu, code)


@needs_triton
@pytest.mark.aot
def test_lorenz_keeps_within_its_budget():
    """Registers that the assembler takes, and instructions of a step."""
    forward, record, again, cotangent, _ = (aot.compiled(k) for k in aot.of_problem("Lorenz", "float64"))
    for gpu in aot.GPUS:
        assert max(aot.assembled(ptx, gpu, True).registers for ptx in (again, cotangent)) <= 128
    for ptx in (forward, record):
        assert aot.assembled(ptx, 90, True, 72).spills == 0
        code = aot.assembled(ptx, 90, True)
        assert max(code.arithmetic) <= 250 and max(code.loops) <= 600, code


@needs_triton
@pytest.mark.aot
@pytest.mark.parametrize(("name", "registers"), [("Lorenz", 72), ("Lorenz-96, 4", 88)])
def test_many_lanes_are_told_to_take_few_registers(monkeypatch, name, registers):
    """Which suffice without spills, and cost a few instructions."""
    free = aot.assembled(aot.compiled(aot.of_problem(name, "float64")[1]), 90, True)
    monkeypatch.setattr(aot, "LANES", MANY)
    _, (gradient, args), _ = aot.solves(name, "float64")
    record, *others = aot.kernels(gradient, *args)
    assert all("ttg.maxnreg" not in kernel.text for kernel in others)
    ptx = aot.compiled(record)
    for gpu in aot.GPUS:
        code = aot.assembled(ptx, gpu, True)
        assert code.registers <= registers and code.spills == 0, (gpu, code)
    assert max(aot.assembled(ptx, 90, True).loops) <= 1.1 * max(free.loops)


@needs_triton
@pytest.mark.aot
def test_coalescing_changes_nothing(monkeypatch, tmp_path):
    """The pass that `aot.compiled` leaves out; comments and what debuggers read name the file."""
    cotangent, found = aot.of_problem("Van der Pol", "float64")[3], []
    for coalesce in (False, True):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / str(coalesce)))
        text = aot.compiled(cotangent, coalesce=coalesce).partition(".section")[0]
        found.append(re.sub(r"(?m)^\s*(//|\.loc|\.file).*$", "", text))
    assert found[0] == found[1] and len(list(tmp_path.iterdir())) == 2


@pytest.mark.aot
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda12_plugin") is None, reason="`jax-cuda12-plugin` is missing")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gpu", [90, *(pytest.param(gpu, marks=pytest.mark.long) for gpu in aot.GPUS if gpu != 90)])
@pytest.mark.parametrize("name", SMALL)
def test_xla_spills_no_register_either(name, dtype, gpu):
    """With its own copies of Triton and of the assembler."""
    with aot.wide(dtype):
        for function, args in aot.solves(name, dtype):
            aot.compiled_by_xla(function, *args, gpu=gpu)


@pytest.mark.aot
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda12_plugin") is None, reason="`jax-cuda12-plugin` is missing")
def test_xla_heeds_the_limit(monkeypatch):
    """Of registers of a kernel: with too few it spills, and says so."""
    monkeypatch.setattr(aot, "LANES", MANY)
    monkeypatch.setattr(pallas_lower, "forward_tuning", lambda call, lanes: Tuning(registers=40))
    _, (gradient, args), _ = aot.solves("Lorenz", "float64")
    with pytest.raises(jax.errors.JaxRuntimeError, match="register spilling"):
        aot.compiled_by_xla(gradient, *args, gpu=90)


@needs_triton
@pytest.mark.aot
def test_the_script_prints_a_table(tmp_path):
    """For one problem; a second time without making anything."""
    only = "import aot, pathlib; aot.PROBLEMS = {k: aot.PROBLEMS[k] for k in ['Van der Pol']}; aot.GPUS = (90,); "
    only += f"aot.MADE = pathlib.Path({str(tmp_path / 'made.json')!r}); "
    again = "aot.row = None; "
    tables = []
    for program in (only + "aot.main(False)", only + again + "aot.main(False)"):
        command, where = [sys.executable, "-c", program], aot.__file__.rpartition("/")[0]
        done = subprocess.run(command, cwd=where, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        tables.append(done.stdout)
    assert tables[0].count("| Van der Pol |") == 10 and tables[0] == tables[1]
