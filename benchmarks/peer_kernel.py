"""Machine code of the CUDA kernel of gradsolve, for comparison with that of `python tests/aot.py`; no GPU is needed.

    pip install gradsolve "nvidia-cuda-nvrtc==13.0.*" triton
    python benchmarks/peer_kernel.py

Prints registers of a thread and instructions of a step of Lorenz's system with Tsit5 in double precision, on sm_90: of
the loop over steps, and of the power that it calls.
"""

import ctypes
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nvidia  # pyright: ignore[reportMissingImports]
from gradsolve.cuda._codegen import emit_cu  # pyright: ignore[reportMissingImports]

sys.path.append(str(Path(__file__).parent.parent / "tests"))
import aot  # noqa: E402

GPU = 90
ARITHMETIC = ("DADD", "DMUL", "DFMA")


def ptx(source: str) -> str:
    """What NVIDIA's runtime compiler makes of a CUDA program; the mathematical functions are built into it."""
    libraries = sorted(p for root in nvidia.__path__ for p in Path(root).rglob("libnvrtc*.so.*") if "alt" not in p.name)
    *_, nvrtc = [ctypes.CDLL(str(p)) for p in libraries]  # first the one that the other opens by its name
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    text = lambda *strings: (ctypes.c_char_p * len(strings))(*(s.encode() for s in strings))  # noqa: E731
    options = text(f"--gpu-architecture=compute_{GPU}", "--std=c++17")

    def run(name: str, *arguments: Any) -> None:
        if getattr(nvrtc, name)(*arguments):
            log = ctypes.create_string_buffer(10_000)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"{name}: {log.value.decode()}")

    run("nvrtcCreateProgram", ctypes.byref(program), source.encode(), None, 1, text(""), text("math.h"))
    run("nvrtcCompileProgram", program, len(options), options)
    run("nvrtcGetPTXSize", program, ctypes.byref(size))
    found = ctypes.create_string_buffer(size.value)
    run("nvrtcGetPTX", program, found)
    return found.value.decode()


def called(listing: str) -> Iterator[tuple[str, list[str]]]:
    """Name and instructions of each function that the kernel calls."""
    parts = re.split(r"(?m)^\s*(\$\S+):", listing)
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        instructions = [name for _, name in aot.disassembled(body)[0]]
        last = max((n for n, x in enumerate(instructions) if x == "RET"), default=len(instructions) - 1)
        yield name.rpartition("$")[2], instructions[: last + 1]


def main() -> None:
    """Print the counts."""
    text = ptx(emit_cu("lorenz", 3))
    code, listing = aot.assembled(text, GPU, double=True), aot.listed(text, GPU)[1]
    print(f"registers {code.registers}, spills {code.spills}")
    print(f"loop over steps: {max(code.loops)} instructions, of them {max(code.arithmetic)} arithmetic")
    for name, instructions in called(listing):
        print(
            f"{name}: {len(instructions)} instructions, of them {sum(x in ARITHMETIC for x in instructions)} arithmetic"
        )


if __name__ == "__main__":
    main()
