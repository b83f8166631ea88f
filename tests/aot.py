"""Machine code of the kernels of `pallas` for NVIDIA GPUs, made and looked at on a machine without one.

From JAX to Triton's language by JAX, from there to machine code by the `triton` wheel and the tools that it brings, or
by all of XLA, where the plug-in `jax-cuda12-plugin` is installed.

    python tests/aot.py          prints the table of docs/gpu.md, for all kernels and GPUs (minutes)
    python tests/aot.py write    puts it into the file, row by row

Rows of kernels that have not changed are taken from build/aot.json, so that a run that was stopped goes on. Remove it
after a change of what is counted.
"""

import bisect
import contextlib
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib import triton as dialects
from jax.experimental import topologies
from jaxlib.mlir import ir

from gradsolve_backend import GradSolveAdjoint, Rosenbrock23

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # nothing runs on a GPU here

GPUS = (80, 89, 90, 100)
LANES = 1024
ROOT = Path(__file__).parent.parent
DOCUMENT, MADE = ROOT / "docs" / "gpu.md", ROOT / "build" / "aot.json"

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


def robertson(t: Any, y: Any, k: Any) -> Any:
    slow, square, cross = k[0] * y[0], k[1] * y[1] * y[1], k[2] * y[1] * y[2]
    return jnp.stack([cross - slow, slow - square - cross, square])


def _ones(*shape: int) -> Callable[[Any], Any]:
    return lambda dtype: jnp.ones((LANES, *shape), dtype)


@dataclass(frozen=True)
class Problem:
    """A field, its dimension, the parameters of each lane, and how it is solved."""

    field: Callable
    dimension: int
    parameters: Callable[[Any], Any] = _ones()
    solver: diffrax.AbstractSolver = diffrax.Tsit5()  # noqa: RUF009


PROBLEMS = {
    "Lorenz": Problem(lorenz, 3),
    "Van der Pol": Problem(van_der_pol, 2),
    "PK with a table": Problem(infusion, 2, lambda dtype: (_ones(12)(dtype), _ones(3)(dtype))),
    "Lorenz-96, 4": Problem(lorenz96, 4),
    "Lorenz-96, 8": Problem(lorenz96, 8),
    "Robertson, Rosenbrock23": Problem(robertson, 3, _ones(3), Rosenbrock23()),
    "Lorenz-96, 16": Problem(lorenz96, 16),
}


def solves(name: str, dtype: Any) -> Iterator[tuple[Callable, tuple[Any, ...]]]:
    """Functions of one kernel each, but for the second: forward; record, again and cotangent; tangent."""
    problem = PROBLEMS[name]
    y0s, args = jnp.ones((LANES, problem.dimension), dtype), problem.parameters(dtype)
    controller = diffrax.PIDController(rtol=1e-6, atol=1e-6)

    def end(y0: Any, args: Any) -> Any:
        return diffrax.diffeqsolve(
            diffrax.ODETerm(problem.field), problem.solver, 0.0, 1.0, 0.01, y0, args, stepsize_controller=controller,
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
    """Machine code: registers of a thread, accesses of spilled values, instructions of each loop over steps."""

    registers: int
    spills: int
    loops: tuple[int, ...]
    arithmetic: tuple[int, ...]  # those that add, multiply or do both, in the precision that is counted


def _tool(name: str) -> str:
    import triton  # an optional dependency

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


@contextlib.contextmanager
def _without_coalescing(passes: Any) -> Iterator[None]:
    """Leaves out the pass that takes nearly all of the time, and has no choice where a lane is a thread."""
    before, passes.add_coalesce = passes.add_coalesce, lambda manager: None
    try:
        yield
    finally:
        passes.add_coalesce = before


def compiled(kernel: Kernel, gpu: int = GPUS[0], coalesce: bool = False) -> str:
    """PTX of a kernel, which later GPUs understand as well."""
    import triton  # an optional dependency
    from triton._C.libtriton import passes  # type: ignore[attr-defined]
    from triton.backends.compiler import GPUTarget

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ttir"
        path.write_text(kernel.text)
        options = {"num_warps": kernel.warps, "num_stages": 1}
        with contextlib.nullcontext() if coalesce else _without_coalescing(passes.ttgpuir):
            return triton.compile(str(path), target=GPUTarget("cuda", gpu, 32), options=options).asm["ptx"]


def listed(ptx: str, gpu: int, most: int | None = None) -> tuple[int, str]:
    """Registers and listing of what `ptxas` makes of PTX, by itself or with at most so many registers."""
    if most is not None:
        ptx, count = re.subn(r"(?m)^(\.reqntid .*)$", rf"\1\n.maxnreg {most}", re.sub(r"\.maxnreg \d+", "", ptx))
        assert count == 1
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        _run(_tool("ptxas-blackwell" if gpu >= 90 else "ptxas"), f"-arch=sm_{gpu}", "-o", str(target), str(source))
        usage = _run(_tool("cuobjdump"), "-res-usage", str(target))
        listing = _run(_tool("nvdisasm"), "-c", str(target))
    return int(re.search(r"REG:(\d+)", usage).group(1)), listing  # type: ignore[union-attr]


def assembled(ptx: str, gpu: int, double: bool, most: int | None = None) -> Code:
    """What there is to say about it."""
    registers, listing = listed(ptx, gpu, most)
    instructions, loops = disassembled(listing)
    spills = sum(name in ("STL", "LDL") for _, name in instructions)
    kind = ("DADD", "DMUL", "DFMA") if double else ("FADD", "FMUL", "FFMA")
    bodies = [[name for address, name in instructions if first <= address <= last] for first, last in loops]
    bodies = [body for body in bodies if any(x in kind for x in body)]
    return Code(registers, spills, tuple(map(len, bodies)), tuple(sum(x in kind for x in body) for body in bodies))


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


def least(ptx: str, gpu: int, double: bool) -> int | None:
    """The least number of registers of `BUDGETS` that suffices without spills; None: not even the last."""
    fits = lambda most: not assembled(ptx, gpu, double, most).spills  # noqa: E731
    return BUDGETS[bisect.bisect_left(BUDGETS, True, key=fits)] if fits(BUDGETS[-1]) else None


# ---- all of XLA --------------------------------------------------------------------------------------------

TARGET = """
gpu_device_info {{
  name: "{name}" device_vendor: "NVIDIA Corporation" cuda_compute_capability {{ major: {major} minor: {minor} }}
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 100 fpus_per_core: 64
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 101376 shared_memory_per_core: 102400
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 device_address_bits: 64
  memory_bandwidth: 1000000000000 l2_cache_size: 40000000 clock_rate_ghz: 1.5 device_memory_size: 40000000000
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{name}"
"""


def compiled_by_xla(function: Callable, *args: Any, gpu: int = GPUS[0]) -> Any:
    """A function compiled by XLA, as on a machine with such a GPU, and `jax.errors.JaxRuntimeError` if it spills."""
    text = TARGET.format(name=f"sm_{gpu}", major=gpu // 10, minor=gpu % 10)
    topology = topologies.get_topology_desc("", platform="cuda", topology="1x1x1", target_config=text)
    there = jax.sharding.SingleDeviceSharding(topology.devices[0])
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), args)
    with on_a_gpu():
        lowered = jax.jit(function).lower(*args)
    return lowered.compile(compiler_options={"xla_gpu_fail_ptx_compilation_on_register_spilling": True})


# ---- the table ---------------------------------------------------------------------------------------------


@functools.cache
def of_problem(name: str, dtype: str) -> list[Kernel]:
    """All kernels of a problem: forward, record, again, cotangent, tangent."""
    with wide(dtype):
        forward, both, tangent = (kernels(function, *args) for function, args in solves(name, np.dtype(dtype)))
    return [*forward, *both, tangent[-1]]


@contextlib.contextmanager
def wide(dtype: str) -> Iterator[None]:
    """Times are of the default precision: that of this dtype."""
    before = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    jax.config.update("jax_enable_x64", dtype == "float64")
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def row(kernel: Kernel, double: bool) -> list[str]:
    """The cells of the table for a kernel."""
    ptx = compiled(kernel)
    codes = {gpu: assembled(ptx, gpu, double) for gpu in GPUS}
    registers, spills = ("/".join(str(getattr(c, k)) for c in codes.values()) for k in ("registers", "spills"))
    loops, arithmetic = (" + ".join(map(str, x)) for x in (codes[90].loops, codes[90].arithmetic))
    return [registers, spills, str(least(ptx, 90, double) or "-"), loops, arithmetic]


def _known(kernel: Kernel, double: bool) -> list[str]:
    """The cells, from the file if the kernel and Triton are those of an earlier run."""
    import triton  # an optional dependency

    made = json.loads(MADE.read_text()) if MADE.exists() else {}
    parts = (kernel.text, kernel.warps, triton.__version__, GPUS, BUDGETS, COLUMNS)
    key = hashlib.sha256(repr(parts).encode()).hexdigest()
    if key not in made:
        made[key] = row(kernel, double)
        MADE.parent.mkdir(exist_ok=True)
        MADE.write_text(json.dumps(made, indent=1))
    return made[key]


def rows(name: str, dtype: str) -> Iterator[str]:
    """The rows of the table for a problem."""
    for kernel in of_problem(name, dtype):
        cells = [name, dtype, kernel.name.removeprefix("gradsolve_"), *_known(kernel, dtype == "float64")]
        yield f"| {' | '.join(cells)} |"


COLUMNS = ["problem", "dtype", "kernel", f"registers, sm_{'/'.join(map(str, GPUS))}", "spills", "fits in"]
COLUMNS += ["loops", "of them arithmetic"]
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
MARKS = "<!-- table: python tests/aot.py write -->\n", "\n<!-- end of table -->"


def main(write: bool) -> None:
    """Print the table; write it as far as it is made, with a line for what is missing."""
    lines, left = [HEAD], [(name, dtype) for name in PROBLEMS for dtype in ("float64", "float32")]
    print(HEAD, flush=True)
    while left:
        for line in rows(*left.pop(0)):
            print(line, flush=True)
            lines.append(line)
        if write:
            missing = [f"\nNot made yet: {', '.join(f'{name} in {dtype}' for name, dtype in left)}."] if left else []
            before, _, rest = DOCUMENT.read_text().partition(MARKS[0])
            after = rest.partition(MARKS[1])[2]
            DOCUMENT.write_text(before + MARKS[0] + "\n".join([*lines, *missing]) + MARKS[1] + after)


if __name__ == "__main__":
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as XLA compiles kernels
    main(sys.argv[1:] == ["write"])
