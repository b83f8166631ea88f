"""What `docs/llvm.md` shows is what the code does."""

import re
from pathlib import Path

import pytest

from gradsolve_backend.kernels import forms, llvm_code, llvm_loops, llvm_lower, llvm_routine, scalar

TEXT = (Path(__file__).parents[1] / "docs" / "llvm.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
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
        ("up to {} tasks", llvm_lower.TASKS),
        ("at most {} instructions", llvm_routine.CHUNK),
        ("{} texts", llvm_code.KEPT),
        ("more than {} equations", forms.EQUATIONS),
        ("or {} with its derivative", forms.DERIVATIVE_EQUATIONS),
        ("loops of more than {} iterations", scalar.UNROLL_LIMIT),
        ("vector field of {} equations", scalar.SHARED_EQUATIONS),
    ],
)
def test_numbers_are_those_of_the_code(words, number):
    assert words.format(f"{number:,}") in " ".join(TEXT.split())
