"""Machine code called from XLA: values, threads, life of code, what is refused. The kernels double numbers."""

import ctypes
import faulthandler
import gc
import json
import multiprocessing
import os
import stat
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradsolve_backend.kernels import llvm_call, llvm_code
from gradsolve_backend.kernels.llvm_call import call, table, unavailable

if unavailable():
    pytest.skip(unavailable(), allow_module_level=True)

PROCESSORS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
needs_two_processors = pytest.mark.skipif(PROCESSORS < 2, reason="needs two processors")
HEAD = """
define void @kernel(ptr %buffers, ptr %params, i64 %task, i64 %worker) {
  %in = load ptr, ptr %buffers
  %out.at = getelementptr ptr, ptr %buffers, i64 1
  %out = load ptr, ptr %out.at
  %from = getelementptr double, ptr %in, i64 %task
  %to = getelementptr double, ptr %out, i64 %task
  %x = load double, ptr %from
"""
TAIL = "  store double %y, ptr %to\n  ret void\n}\n"


def times(factor: float) -> str:
    return f"{HEAD}  %y = fmul double %x, {factor:.1f}\n{TAIL}"


DOUBLE = times(2.0)
# Result: the worker, if two tasks have met, else -1. Each waits for the other, but not for ever.
MEET = f"""
@arrived = global i64 0
{HEAD}
  %old = atomicrmw add ptr @arrived, i64 1 seq_cst
  br label %wait
wait:
  %i = phi i64 [ 0, %0 ], [ %j, %wait ]
  %j = add i64 %i, 1
  %n = load atomic i64, ptr @arrived seq_cst, align 8
  %both = icmp sge i64 %n, 2
  %late = icmp sgt i64 %j, 20000000000
  %end = or i1 %both, %late
  br i1 %end, label %go, label %wait
go:
  %number = select i1 %both, i64 %worker, i64 -1
  %y = sitofp i64 %number to double
{TAIL}"""
# Result: 1 if another task had the same worker number at the same time, else 0.
EXCLUSIVE = f"""
@busy = global [8 x i64] zeroinitializer
{HEAD}
  %flag = getelementptr i64, ptr @busy, i64 %worker
  %before = atomicrmw xchg ptr %flag, i64 1 seq_cst
  br label %spend
spend:
  %i = phi i64 [ 0, %0 ], [ %j, %spend ]
  %j = add i64 %i, 1
  %again = load volatile double, ptr %from
  %more = icmp slt i64 %j, 2000
  br i1 %more, label %spend, label %go
go:
  store atomic i64 0, ptr %flag seq_cst, align 8
  %y = sitofp i64 %before to double
{TAIL}"""


class MallInfo(ctypes.Structure):
    """What glibc's `mallinfo2` returns."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


C = ctypes.CDLL(None) if os.name == "posix" else None
if hasattr(C, "mallinfo2"):
    C.mallinfo2.restype = MallInfo


def like(x: jax.Array) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype)]


def run(text: str, x: jax.Array, workers: int = 2, threads: int = 1) -> jax.Array:
    return call(text, like(x), [x.size, workers, threads], x)[0]


def double(x: jax.Array) -> jax.Array:
    return run(DOUBLE, x)


def numbers(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=count)


def holders() -> list[int]:
    return [slot.holders for slot in table().slots if slot.holders]


def forget() -> None:
    """Drops every reference to compiled kernels that is not an executable's."""
    llvm_code.MEMORY.recent.clear()
    gc.collect()


@pytest.fixture
def clean() -> Iterator[None]:
    jax.clear_caches()
    forget()
    assert holders() == []
    yield


@pytest.fixture
def no_deadlock() -> Iterator[None]:
    """A deadlock ends the process, with the stacks of all threads, rather than never."""
    faulthandler.dump_traceback_later(60, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


class TestValues:
    @pytest.mark.parametrize("threads", [0, 1])
    @pytest.mark.parametrize("workers", [1, 2, 7])
    @pytest.mark.parametrize("count", [0, 1, 2, 1000])
    def test_every_task_runs_once(self, count, workers, threads):
        x = numbers(count)
        np.testing.assert_array_equal(run(DOUBLE, jnp.asarray(x), workers, threads), 2 * x)

    def test_in_transforms_that_do_not_differentiate(self):
        x = numbers(5)
        np.testing.assert_array_equal(jax.jit(lambda x: double(double(x)) + x)(x), 5 * x)
        scanned, _ = jax.lax.scan(lambda c, _: (double(c), None), jnp.asarray(x), length=4)
        np.testing.assert_array_equal(scanned, 16 * x)
        looped = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, double(c[1])), (0, jnp.asarray(x)))
        np.testing.assert_array_equal(looped[1], 8 * x)
        np.testing.assert_array_equal(jax.lax.cond(True, double, lambda x: x, jnp.asarray(x)), 2 * x)

    def test_outside_of_jit(self):
        x = numbers(5)
        np.testing.assert_array_equal(double(jnp.asarray(x)), 2 * x)
        with jax.disable_jit():
            np.testing.assert_array_equal(double(jnp.asarray(x)), 2 * x)

    def test_donated_argument(self):
        x = numbers(1000)
        np.testing.assert_array_equal(jax.jit(double, donate_argnums=0)(jnp.asarray(x)), 2 * x)

    def test_several_arrays_of_several_dtypes_arrive_row_major(self):
        text = """
            define void @kernel(ptr %buffers, ptr %params, i64 %task, i64 %worker) {
              %a = load ptr, ptr %buffers
              %b.at = getelementptr ptr, ptr %buffers, i64 1
              %b = load ptr, ptr %b.at
              %c.at = getelementptr ptr, ptr %buffers, i64 2
              %c = load ptr, ptr %c.at
              %d.at = getelementptr ptr, ptr %buffers, i64 3
              %d = load ptr, ptr %d.at
              %fourth = getelementptr i64, ptr %params, i64 3
              %offset = load i64, ptr %fourth
              %a.i = getelementptr float, ptr %a, i64 %task
              %x = load float, ptr %a.i
              %b.i = getelementptr i8, ptr %b, i64 %task
              %n = load i8, ptr %b.i
              %m = sitofp i8 %n to float
              %y = fadd float %x, %m
              %c.i = getelementptr float, ptr %c, i64 %task
              store float %y, ptr %c.i
              %k = add i64 %task, %offset
              %d.i = getelementptr i64, ptr %d, i64 %task
              store i64 %k, ptr %d.i
              ret void
            }"""
        a, b = numbers(6).reshape(2, 3).astype(np.float32), np.array([[1, -2], [3, 4], [5, -6]], np.int8)
        outputs = [jax.ShapeDtypeStruct((3, 2), jnp.float32), jax.ShapeDtypeStruct((6,), jnp.int64)]
        # The transposes make XLA choose layouts that are not row-major, were it free to.
        c, d = jax.jit(lambda a, b: call(text, outputs, [6, 1, 0, 40], a.T.T, b.T.reshape(3, 2)))(a, b)
        np.testing.assert_array_equal(c, (a.reshape(-1) + b.T.reshape(-1)).reshape(3, 2))
        np.testing.assert_array_equal(d, np.arange(6) + 40)

    @pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
    def test_result_that_is_not_written_costs_no_memory(self):
        resident = lambda: int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
        size = 1 << 30
        text = times(3.0)
        outputs = [jax.ShapeDtypeStruct((size // 8,), jnp.float64)]
        function = jax.jit(lambda x: call(text, outputs, [1, 1, 0], x))
        jax.block_until_ready(function(jnp.ones(1)))
        before = resident()
        (out,) = jax.block_until_ready(function(jnp.ones(1)))
        assert float(out[0]) == 3.0 and resident() - before < size // 8


class TestThreads:
    @needs_two_processors
    def test_threads_of_the_pool_help(self, no_deadlock):
        assert sorted(np.asarray(run(f"{MEET}; threads", jnp.zeros(2)))) == [0.0, 1.0]

    @needs_two_processors
    def test_two_programs_are_inside_the_kernel_at_once(self, no_deadlock):
        """Python threads do not wait for one another, as they would if one held the GIL. XLA itself queues the
        executions of one program."""
        text = f"{MEET}; programs"
        programs = [jax.jit(lambda x, k=k: run(text, x, threads=0) + k).lower(jnp.zeros(1)).compile() for k in (10, 20)]
        with ThreadPoolExecutor(2) as pool:
            met = [float(out[0]) for out in pool.map(lambda program: program(jnp.zeros(1)), programs)]
        assert met == [10.0, 20.0]

    def test_no_thread_helps_where_that_is_forbidden(self):
        text = EXCLUSIVE.replace("%before to", "%worker to")
        assert not np.asarray(run(text, jnp.zeros(200), workers=8, threads=0)).any()
        assert not np.asarray(run(text, jnp.zeros(200), workers=1, threads=1)).any()

    def test_workers_that_run_at_once_differ(self):
        function = jax.jit(lambda x: run(EXCLUSIVE, x, workers=8))
        for _ in range(20):
            assert not np.asarray(function(jnp.zeros(300))).any()

    def test_independent_calls_in_one_program(self, no_deadlock):
        x = numbers(64)
        function = jax.jit(lambda x: [run(times(float(k)), x + k, workers=4) for k in range(6)])
        for _ in range(2000):
            out = function(x)
        for k, found in enumerate(out):
            np.testing.assert_array_equal(found, k * (x + k))

    @pytest.mark.skipif(not hasattr(C, "mallinfo2"), reason="asks glibc how much is allocated")
    def test_calls_leave_no_memory_behind(self):
        function = jax.jit(double).lower(jnp.zeros(100)).compile()
        allocated = []
        for _ in range(2):
            for _ in range(2000):
                function(jnp.zeros(100)).block_until_ready()
            gc.collect()
            allocated.append(C.mallinfo2().uordblks)
        # The heap holds some 80 bytes during a call.
        assert allocated[1] - allocated[0] < 2000 * 20

    def test_many_python_threads_at_once(self, no_deadlock):
        function = jax.jit(lambda x: run(DOUBLE, x, workers=4))

        def work(seed: int) -> bool:
            x = numbers(50, seed)
            return all(np.array_equal(function(x), 2 * x) for _ in range(100))

        with ThreadPoolExecutor(16) as pool:
            assert all(pool.map(work, range(32)))

    def test_two_threads_that_ask_for_one_text_compile_it_once(self, monkeypatch):
        calls, emitted = [], llvm_code.emitted
        monkeypatch.setattr(llvm_code, "emitted", lambda text: calls.append(text) or emitted(text))
        start = threading.Barrier(8)

        def work(_: int) -> llvm_code.Code:
            start.wait()
            return llvm_code.compiled(times(77.0))

        with ThreadPoolExecutor(8) as pool:
            found = set(pool.map(work, range(8)))
        assert len(found) == 1 and len(calls) == 1


class TestLife:
    def test_code_lives_as_long_as_a_program_that_calls_it(self, clean):
        function = jax.jit(double)
        x = numbers(3)
        function(x)
        forget()
        assert len(holders()) == 1
        np.testing.assert_array_equal(function(x), 2 * x)

    def test_code_and_entry_go_with_the_last_program(self, clean):
        jax.jit(double)(numbers(3))
        code = weakref.ref(llvm_code.compiled(DOUBLE))
        image = weakref.ref(code().image)
        forget()
        assert code() is not None
        jax.clear_caches()
        gc.collect()
        assert code() is None and holders() == []
        table().sweep()
        assert image() is None

    def test_program_keeps_its_code_when_python_has_dropped_all(self, clean):
        """Of a running program XLA alone knows: it runs on although Python's caches are cleared."""
        code = llvm_code.compiled(DOUBLE)
        executable = jax.jit(double).lower(jnp.zeros(3)).compile().runtime_executable()
        image = weakref.ref(code.image)
        del code
        jax.clear_caches()
        forget()
        table().sweep()
        assert holders() == [1] and image() is not None
        del executable
        gc.collect()
        table().sweep()
        assert holders() == [] and image() is None

    def test_code_that_memory_evicts_keeps_running(self, monkeypatch, clean):
        monkeypatch.setattr(llvm_code, "MEMORY", llvm_code.Memory(2))
        functions = [jax.jit(lambda x, k=k: run(times(float(k)), x)) for k in range(6)]
        x = numbers(4)
        for _ in range(2):
            for k, function in enumerate(functions):
                np.testing.assert_array_equal(function(x), k * x)
        assert len(llvm_code.MEMORY.recent) == 2 and len(llvm_code.MEMORY.alive) == 6

    def test_same_text_is_same_code_and_another_is_not(self):
        first, again, other = (llvm_code.compiled(text) for text in (DOUBLE, DOUBLE, times(2.5)))
        assert first is again and first.key != other.key

    def test_lowered_program_is_compiled_later(self, clean):
        lowered = jax.jit(double).lower(jnp.zeros(3))
        forget()
        np.testing.assert_array_equal(lowered.compile()(jnp.ones(3)), 2 * np.ones(3))

    def test_text_of_a_program_holds_no_address(self):
        text = jax.jit(double).lower(jnp.zeros(3)).as_text()
        code = llvm_code.compiled(DOUBLE)
        assert str(code.key) in text and str(code.address) not in text and f"{code.address:x}" not in text


@pytest.fixture
def one_page_and_then_far_below() -> Iterator[None]:
    """Leaves one free page where the system puts small mappings, and the next 8 GB below, as in a full process."""
    assert C is not None
    mmap = ctypes.CFUNCTYPE(ctypes.c_size_t, *[ctypes.c_size_t] * 6)(ctypes.cast(C.mmap, ctypes.c_void_p).value)
    munmap = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_size_t] * 2)(ctypes.cast(C.munmap, ctypes.c_void_p).value)
    reserve = lambda size: mmap(0, size, 0, 0x4022, 2**64 - 1, 0)  # private, anonymous, no memory behind it
    size = 8 << 30
    far = reserve(size)
    taken = [(far, size - 4096)]
    for bits in range(33, 11, -1):
        while (address := reserve(1 << bits)) > far:
            taken.append((address, 1 << bits))
        munmap(address, 1 << bits)
    munmap(far + size - 4096, 4096)
    yield
    for address, size in taken:
        munmap(address, size)


@pytest.mark.skipif(sys.platform != "linux", reason="fills the address space of Linux")
def test_code_reaches_its_constants_in_a_full_process(one_page_and_then_far_below):
    """Constants are addressed relative to code, 2 GB away at most."""
    x = numbers(9)
    np.testing.assert_array_equal(run(times(3.5), jnp.asarray(x)), 3.5 * x)


class TestRefused:
    def test_kernel_that_is_not_loaded(self):
        absent = jax.ffi.ffi_call(llvm_call.TARGET, jax.ShapeDtypeStruct((3,), jnp.float64))
        with pytest.raises(Exception, match="not loaded in this process"):
            jax.jit(lambda x: absent(x, key=np.int64(1), params=np.array([1, 1, 0])))(jnp.zeros(3))

    @pytest.mark.parametrize("params", [{"params": np.array([1, 1])}, {}, {"params": np.array([1.0, 1.0, 0.0])}])
    def test_attributes_that_are_not_ours(self, params):
        wrong = jax.ffi.ffi_call(llvm_call.TARGET, jax.ShapeDtypeStruct((3,), jnp.float64))
        code = llvm_code.compiled(DOUBLE)
        table().enter(code)
        with pytest.raises(Exception, match="takes the attributes"):
            jax.block_until_ready(jax.jit(lambda x: wrong(x, key=np.int64(code.key), **params))(jnp.zeros(3)))

    def test_too_few_params(self):
        with pytest.raises(ValueError, match="at least 3 params"):
            call(DOUBLE, like(jnp.zeros(3)), [3, 1], jnp.zeros(3))

    def test_export(self):
        with pytest.raises(ValueError, match=r'cannot be exported: use `GradSolveAdjoint\(backend="xla"\)`'):
            jax.export.export(jax.jit(double))(jnp.zeros(3))

    def test_text_that_is_no_ir(self):
        with pytest.raises(RuntimeError, match="expected"):
            llvm_code.compiled("nonsense")

    def test_function_without_address(self):
        text = f"declare double @nowhere(double)\n{HEAD}  %y = call double @nowhere(double %x)\n{TAIL}"
        with pytest.raises(ValueError, match="nowhere"):
            llvm_code.compiled(text)

    def test_more_kernels_than_slots(self, monkeypatch, clean):
        monkeypatch.setattr(table(), "slots", [])
        with pytest.raises(RuntimeError, match="jax.clear_caches"):
            table().enter(llvm_code.compiled(times(88.0)))


class TestUnavailable:
    @pytest.fixture
    def header(self, tmp_path, monkeypatch):
        file = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
        file.parent.mkdir(parents=True)
        monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
        return file

    def test_here_it_is_available(self):
        assert unavailable() == ""

    @pytest.mark.parametrize("major, minor", llvm_call.KNOWN)
    def test_known_version(self, header, major, minor):
        header.write_text(f"#define XLA_FFI_API_MAJOR {major}\n\n#define XLA_FFI_API_MINOR {minor}\n")
        assert unavailable() == ""

    @pytest.mark.parametrize("major, minor", [(0, 2), (0, 6), (0, 33), (1, 3)])
    def test_unknown_version(self, header, major, minor):
        header.write_text(f"#define XLA_FFI_API_MAJOR {major}\n\n#define XLA_FFI_API_MINOR {minor}\n")
        assert f"version {major}.{minor} of XLA's FFI; supported are 0.3, 0.4, 0.5" in unavailable()

    @pytest.mark.parametrize("text", [None, "", "#define XLA_FFI_API_MAJOR 0\n"])
    def test_no_version(self, header, text):
        if text is not None:
            header.write_text(text)
        assert "does not tell" in unavailable()

    def test_no_llvmlite(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "llvmlite", None)
        assert unavailable() == "llvmlite is not installed"

    def test_other_machines(self, monkeypatch):
        monkeypatch.setattr(sys, "byteorder", "big")
        assert "little-endian" in unavailable()


class TestFiles:
    @pytest.fixture(autouse=True)
    def emissions(self, monkeypatch) -> list[str]:
        """Texts that LLVM generates code for; memory, which would hide files, keeps none of before."""
        calls, emitted = [], llvm_code.emitted
        monkeypatch.setattr(llvm_code, "emitted", lambda text: calls.append(text) or emitted(text))
        monkeypatch.delenv("GRADSOLVE_CACHE_DIR", raising=False)
        self.restart(monkeypatch)
        return calls

    @pytest.fixture
    def folder(self, tmp_path, monkeypatch) -> Path:
        monkeypatch.setenv("GRADSOLVE_CACHE_DIR", str(tmp_path / "code"))
        return tmp_path / "code"

    @staticmethod
    def restart(monkeypatch) -> None:
        """Memory as in a new process."""
        monkeypatch.setattr(llvm_code, "MEMORY", llvm_code.Memory(4))

    def test_file_spares_the_compiler(self, folder, emissions, monkeypatch):
        llvm_code.bind({"the_exp": ctypes.cast(C.exp, ctypes.c_void_p).value})
        text = f"declare double @the_exp(double)\n{HEAD}  %y = call double @the_exp(double %x)\n{TAIL}"
        written = llvm_code.compiled(text)
        self.restart(monkeypatch)
        read = llvm_code.compiled(text)
        assert read is not written and emissions == [text]
        assert read.key == written.key and read.symbols == written.symbols == ("the_exp",)
        x = numbers(5)
        np.testing.assert_allclose(run(text, x), np.exp(x), rtol=1e-15)

    def test_file_is_its_owners_alone_and_no_other_is_left(self, folder):
        llvm_code.compiled(DOUBLE)
        (file,) = folder.iterdir()
        if os.name == "posix":
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert stat.S_IMODE(file.stat().st_mode) == 0o600

    @pytest.mark.parametrize(
        "damage",
        [
            pytest.param(lambda good, other: b"", id="empty"),
            pytest.param(lambda good, other: good[:60], id="only a head"),
            pytest.param(lambda good, other: good[:-1], id="truncated"),
            pytest.param(lambda good, other: good + b"x", id="too long"),
            pytest.param(lambda good, other: good[:-40] + bytes([good[-40] ^ 1]) + good[-39:], id="one bit"),
            pytest.param(lambda good, other: b"nothing of ours", id="foreign"),
            pytest.param(lambda good, other: other, id="of another text"),
        ],
    )
    def test_damaged_file_is_ignored_and_replaced(self, folder, emissions, monkeypatch, damage):
        llvm_code.compiled(DOUBLE)
        (file,) = folder.iterdir()
        llvm_code.compiled(times(3.0))
        (other,) = set(folder.iterdir()) - {file}
        good = file.read_bytes()
        file.write_bytes(damage(good, other.read_bytes()))
        self.restart(monkeypatch)
        x = numbers(5)
        np.testing.assert_array_equal(jax.jit(lambda x: double(x))(x), 2 * x)
        assert emissions.count(DOUBLE) == 2 and file.read_bytes() == good

    def test_folder_that_cannot_be_written_warns_once(self, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("GRADSOLVE_CACHE_DIR", str(tmp_path / "file" / "code"))
        with pytest.warns(UserWarning, match="cannot be kept in .*file.*anew") as caught:
            codes = [llvm_code.compiled(times(k)) for k in (5.0, 6.0, 7.0)]
        assert len(caught) == 1 and all(code.address for code in codes)

    @pytest.fixture
    def shared(self, tmp_path) -> Iterator[Path]:
        """A folder for JAX's own cache."""
        names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")
        before = [getattr(jax.config, name) for name in names]
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        yield tmp_path
        for name, value in zip(names, before, strict=True):
            jax.config.update(name, value)

    def test_files_go_along_with_the_cache_of_jax(self, shared):
        llvm_code.compiled(DOUBLE)
        assert len(list((shared / "gradsolve_backend").iterdir())) == 1

    def test_no_files_where_the_cache_of_jax_is_off(self, shared):
        jax.config.update("jax_enable_compilation_cache", False)
        llvm_code.compiled(DOUBLE)
        assert not list(shared.iterdir())

    def test_no_files_in_a_bucket(self, shared, emissions, monkeypatch):
        monkeypatch.chdir(shared)
        jax.config.update("jax_compilation_cache_dir", "gs://bucket/folder")
        llvm_code.compiled(DOUBLE)
        assert emissions == [DOUBLE] and not list(shared.iterdir())


# Command line: on how many processors.
PROGRAM = f"""
import gc, json, os, sys
import numpy as np

os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[1])])
import jax

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
from gradsolve_backend.kernels import llvm_code
from gradsolve_backend.kernels.llvm_call import call

emitted, calls, hits = llvm_code.emitted, [], []
llvm_code.emitted = lambda text: calls.append(text) or emitted(text)
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("/cache_hits") else None)
double = jax.jit(lambda x: call({DOUBLE!r}, [jax.ShapeDtypeStruct(x.shape, x.dtype)], [x.size, 4, 1], x)[0])
x = np.arange(1000.0)
right = bool((np.asarray(double(x)) == 2 * x).all())
if os.fork() == 0:
    # What a fork of a process with threads may do: clean up and go.
    del double
    jax.clear_caches()
    gc.collect()
    os._exit(0)
json.dump({{"right": right, "child": os.wait()[1], "emitted": len(calls), "hits": len(hits)}}, sys.stdout)
"""


def start(processors: int, folder: Path) -> subprocess.Popen:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(processors)]
    environment = {"GRADSOLVE_CACHE_DIR": str(folder / "code"), "JAX_COMPILATION_CACHE_DIR": str(folder / "jax")}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment)


def report(process: subprocess.Popen) -> dict[str, int]:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads(out)


class TestProcesses:
    @pytest.mark.skipif(sys.platform != "linux", reason="sets processors, forks")
    def test_two_at_once_and_one_after(self, tmp_path):
        """The first two, on one processor and on two, fill both caches; the third finds all in them."""
        for process in [start(1, tmp_path), start(2, tmp_path)]:
            found = report(process)
            assert found["right"] and found["child"] == 0
        assert report(start(2, tmp_path)) == {"right": True, "child": 0, "emitted": 0, "hits": 1}

    def test_spawned_after_use(self, monkeypatch):
        monkeypatch.setenv("JAX_ENABLE_X64", "1")
        x = numbers(50)
        np.testing.assert_array_equal(double(jnp.asarray(x)), 2 * x)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            (found,) = pool.submit(call, DOUBLE, like(jnp.asarray(x)), [50, 2, 1], x).result(timeout=120)
        np.testing.assert_array_equal(found, 2 * x)
