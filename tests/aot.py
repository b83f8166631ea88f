"""Machine code of the kernels of `pallas` for NVIDIA GPUs, made and looked at on a machine without one.

From JAX to Triton's language by JAX, from there to machine code by the `triton` wheel and the tools that it brings.

    python tests/aot.py          prints the table of docs/gpu.md, for all kernels and GPUs (minutes)
    python tests/aot.py write    puts it into the file
"""

import bisect
import contextlib
import functools
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib import triton as dialects
from jaxlib.mlir import ir

from gradsolve_backend import GradSolveAdjoint

GPUS = (80, 89, 90, 100)
LANES = 1024
DOCUMENT = Path(__file__).parent.parent / "docs" / "gpu.md"

# ---- problems ----------------------------------------------------------------------------------------------


def lorenz(t: Any, y: Any, rho: Any) -> Any:
    return jnp.stack([10.0 * (y[1] - y[0]), y[0] * (rho - y[2]) - y[1], y[0] * y[1] - (8.0 / 3.0) * y[2]])


def lorenz96(t: Any, y: Any, force: Any) -> Any:
    return (jnp.roll(y, -1) - jnp.roll(y, 2)) * jnp.roll(y, 1) - y + force


def van_der_pol(t: Any, y: Any, mu: Any) -> Any:
    return jnp.stack([y[1], mu * (1.0 - y[0] ** 2) * y[1] - y[0]])


def infusion(t: Any, y: Any, args: Any) -> Any:
    """Two compartments with elimination, fed at a tabulated rate."""
    rates, constants = args
    rate = jnp.interp(t, jnp.linspace(0.0, 1.0, 12, dtype=t.dtype), rates)
    out, there, back = constants
    return jnp.stack([rate - (out + there) * y[0] + back * y[1], there * y[0] - back * y[1]])


def _ones(*shape: int) -> Callable[[Any], Any]:
    return lambda dtype: jnp.ones((LANES, *shape), dtype)


#: Field, dimension, parameters of each lane.
PROBLEMS: dict[str, tuple[Callable, int, Callable]] = {
    "Lorenz": (lorenz, 3, _ones()),
    "Van der Pol": (van_der_pol, 2, _ones()),
    "PK with a table": (infusion, 2, lambda dtype: (_ones(12)(dtype), _ones(3)(dtype))),
    "Lorenz-96, 4": (lorenz96, 4, _ones()),
    "Lorenz-96, 8": (lorenz96, 8, _ones()),
    "Lorenz-96, 16": (lorenz96, 16, _ones()),
}


def solves(name: str, dtype: Any) -> Iterator[tuple[Callable, tuple[Any, ...]]]:
    """Functions that have one kernel each: forward, then record and cotangent, then tangent."""
    field, dimension, parameters = PROBLEMS[name]
    y0s, args = jnp.ones((LANES, dimension), dtype), parameters(dtype)
    controller = diffrax.PIDController(rtol=1e-6, atol=1e-6)

    def end(y0: Any, args: Any) -> Any:
        return diffrax.diffeqsolve(
            diffrax.ODETerm(field), diffrax.Tsit5(), 0.0, 1.0, 0.01, y0, args, stepsize_controller=controller,
            adjoint=GradSolveAdjoint(backend="pallas"), throw=False,
        ).ys[0]  # type: ignore[index]  # fmt: skip

    batch = jax.vmap(end)
    yield batch, (y0s, args)
    yield lambda *x: jax.vjp(batch, *x)[1](y0s), (y0s, args)
    yield lambda *x: jax.jvp(batch, x, x)[1], (y0s, args)


# ---- from JAX to Triton's language -------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """A kernel in Triton's language."""

    name: str
    text: str
    warps: int


def on_a_gpu() -> Any:
    """A context in which JAX lowers for a GPU that is not there; older versions need none."""
    try:
        from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh  # newer versions only

        device = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
        return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
    except (ImportError, TypeError):
        return contextlib.nullcontext()


def lowered(function: Callable, *args: Any, platforms: Sequence[str] = ("cuda",)) -> Any:
    """A jitted function, lowered for these platforms."""
    with on_a_gpu():
        return jax.jit(function).trace(*args).lower(lowering_platforms=tuple(platforms))


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from _operations(inner.operation)


def kernels(function: Callable, *args: Any) -> list[Kernel]:
    """The kernels of a function, in order."""
    found = []
    for operation in _operations(lowered(function, *args).compiler_ir("stablehlo").operation):
        if operation.name == "stablehlo.custom_call" and "triton" in str(operation.attributes["call_target_name"]):
            config = operation.attributes["mhlo.backend_config"]
            name, code = (ir.StringAttr(config[key]) for key in ("name", "ir"))
            found.append(Kernel(name.value, _text(code.value_bytes), ir.IntegerAttr(config["num_warps"]).value))
    return found


def _text(code: bytes) -> str:
    context = ir.Context()
    dialects.dialect.register_dialect(context)
    with context:
        return str(ir.Module.parse(code))


# ---- from there to machine code ----------------------------------------------------------------------------

LINE = re.compile(r"^\s+/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)(.*);")
BUDGETS = (40, 48, 56, 64, 72, 80, 96, 112, 128, 160, 192, 224, 255)


@dataclass(frozen=True)
class Code:
    """Machine code: registers of a thread, accesses of spilled values, instructions of the loop over steps."""

    registers: int
    spills: int
    loop: int
    arithmetic: int  # those of the loop that add, multiply or do both, in the precision that is counted


def _tool(name: str) -> str:
    import triton  # an optional dependency

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def compiled(kernel: Kernel, gpu: int = GPUS[0]) -> str:
    """PTX of a kernel, which later GPUs understand as well."""
    import triton  # an optional dependency
    from triton.backends.compiler import GPUTarget

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ttir"
        path.write_text(kernel.text)
        options = {"num_warps": kernel.warps, "num_stages": 1}
        return triton.compile(str(path), target=GPUTarget("cuda", gpu, 32), options=options).asm["ptx"]


def assembled(ptx: str, gpu: int, double: bool, most: int | None = None) -> Code:
    """What `ptxas` makes of PTX, by itself or with at most so many registers."""
    if most is not None:
        ptx, count = re.subn(r"(?m)^(\.reqntid .*)$", rf"\1\n.maxnreg {most}", ptx)
        assert count == 1
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        _run(_tool("ptxas-blackwell" if gpu >= 90 else "ptxas"), f"-arch=sm_{gpu}", "-o", str(target), str(source))
        usage = _run(_tool("cuobjdump"), "-res-usage", str(target))
        listing = _run(_tool("nvdisasm"), "-c", str(target))
    registers = int(re.search(r"REG:(\d+)", usage).group(1))  # type: ignore[union-attr]
    instructions, loops = disassembled(listing)
    body = _body(instructions, loops, "cotangent" in ptx)
    spills = sum(name in ("STL", "LDL") for _, name in instructions)
    kind = ("DADD", "DMUL", "DFMA") if double else ("FADD", "FMUL", "FFMA")
    return Code(registers, spills, sum(body.values()), sum(body[name] for name in kind))


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def disassembled(listing: str) -> tuple[list[tuple[int, str]], list[tuple[int, int]]]:
    """Address and name of each instruction; first and last address of each loop, those inside others only."""
    found, labels, waiting, jumps = [], {}, [], []
    for line in listing.splitlines():
        label, match = re.match(r"^(\.L_\S+):", line), LINE.match(line)
        waiting += [label.group(1)] if label else []
        if match:
            address = int(match.group(1), 16)
            labels.update(dict.fromkeys(waiting, address))
            waiting, name = [], match.group(2).split(".")[0]
            found.append((address, name))
            target = re.search(r"`\((\.L_\S+)\)", match.group(3))
            jumps += [(target.group(1), address)] if name == "BRA" and target else []
    loops = [(labels[name], end) for name, end in jumps if labels.get(name, end) < end - 16]
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return found, sorted(inner)


def _body(instructions: list[tuple[int, str]], loops: list[tuple[int, int]], backwards: bool) -> Counter[str]:
    """The instructions of the loop over steps: the longest, or in a reverse sweep the last, which is over rows."""
    counts = [Counter(name for address, name in instructions if first <= address <= last) for first, last in loops]
    long = [c for c in counts if sum(c.values()) > 60]
    return (long[-1] if backwards else max(long, key=lambda c: sum(c.values()))) if long else Counter()


def least(ptx: str, gpu: int, double: bool) -> int | None:
    """The least number of registers of `BUDGETS` that suffices without spills; None: not even the last."""
    fits = lambda most: not assembled(ptx, gpu, double, most).spills  # noqa: E731
    return BUDGETS[bisect.bisect_left(BUDGETS, True, key=fits)] if fits(BUDGETS[-1]) else None


# ---- the table ---------------------------------------------------------------------------------------------


@functools.cache
def of_problem(name: str, dtype: str) -> list[Kernel]:
    """All kernels of a problem: forward, record, cotangent, tangent."""
    before = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    jax.config.update("jax_enable_x64", dtype == "float64")  # times are of the default precision
    try:
        forward, both, tangent = (kernels(function, *args) for function, args in solves(name, np.dtype(dtype)))
    finally:
        jax.config.update("jax_enable_x64", before)
    return [*forward, *both, tangent[-1]]


def rows(name: str, dtype: str) -> Iterator[str]:
    """The rows of the table for a problem."""
    double = dtype == "float64"
    for kernel in of_problem(name, dtype):
        ptx = compiled(kernel)
        codes = {gpu: assembled(ptx, gpu, double) for gpu in GPUS}
        fits = least(ptx, 90, double)
        registers, spills = ("/".join(str(getattr(c, k)) for c in codes.values()) for k in ("registers", "spills"))
        kind = kernel.name.removeprefix("gradsolve_")
        cells = (name, dtype, kind, registers, spills, fits or "-", codes[90].loop, codes[90].arithmetic)
        yield f"| {' | '.join(map(str, cells))} |"


COLUMNS = [
    "problem",
    "dtype",
    "kernel",
    f"registers, sm_{'/'.join(map(str, GPUS))}",
    "spills",
    "fits in",
    "loop",
    "of it arithmetic",
]
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
MARKS = "<!-- table: python tests/aot.py write -->\n", "\n<!-- end of table -->"


def main(write: bool) -> None:
    """Print the table, or write it."""
    lines = [HEAD]
    print(HEAD, flush=True)
    for name in PROBLEMS:
        for dtype in ("float64", "float32"):
            for row in rows(name, dtype):
                lines.append(row)
                print(row, flush=True)
    if write:
        before, _, rest = DOCUMENT.read_text().partition(MARKS[0])
        DOCUMENT.write_text(before + MARKS[0] + "\n".join(lines) + MARKS[1] + rest.partition(MARKS[1])[2])


if __name__ == "__main__":
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as XLA compiles kernels
    main(sys.argv[1:] == ["write"])
