"""Machine code of LLVM IR texts, kept in memory, and in files where a folder is given.

A text defines `void kernel(ptr buffers, ptr params, i64 task, i64 worker)`. Nothing optimises it before code is
generated: it is straight-line code in SSA form already.

A file holds machine code that will be executed. Whoever may write to the folder may run code as its user: the folder
must be trusted. It is created for its owner only.
"""

import functools
import hashlib
import os
import tempfile
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from gradsolve_backend.config import cache_folder

#: Part of every key: to be raised when what is made of a text changes.
FORMAT = 1
#: Level of LLVM's code generator. Level 2 adds a second scheduler, which made straight-line code of 2,000 to 19,000
#: instructions no faster and took 1.4 times as long to compile. Passes over the text before gained nothing either.
LEVEL = 1
#: How many texts keep their machine code although nothing else refers to it.
KEPT = 64

_MAGIC = b"gradsolve_backend machine code\n"
_BOUND: dict[str, int] = {}


class Code:
    """Machine code of one text, executable as long as this object lives.

    Attributes:
        address: where the function `kernel` begins.
        key: 64 bits of the hash of the text and of all that decides what is made of it.
        symbols: functions of other libraries that it calls.
        image: owns the memory. Who holds it keeps the code executable, too.
    """

    __slots__ = ("__weakref__", "address", "image", "key", "symbols")

    def __init__(self, key: int, symbols: tuple[str, ...], image: Any) -> None:
        self.address: int = image["kernel"]
        self.key = key
        self.symbols = symbols
        self.image = image


@dataclass(frozen=True)
class Host:
    """The installed LLVM and the processor that it generates code for."""

    binding: Any
    version: str
    triple: str
    cpu: str
    features: str

    def machine(self) -> Any:
        """In the small code model a constant is an operand in memory, not an address that is loaded before each use."""
        target = self.binding.Target.from_triple(self.triple)
        return target.create_target_machine(self.cpu, self.features, LEVEL, reloc="pic", codemodel="small")

    def digest(self, text: str) -> bytes:
        """The hash of a text and of all that decides what is made of it."""
        decisive = (str(FORMAT), str(LEVEL), self.version, self.triple, self.cpu, self.features, text)
        return hashlib.sha256("\0".join(decisive).encode()).digest()


@functools.cache
def host() -> Host:
    """This machine.

    Raises:
        ImportError: if llvmlite is not installed.
    """
    import llvmlite
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    # The linker reads ELF objects on Windows, too.
    triple = binding.get_process_triple() + ("-elf" if os.name == "nt" else "")
    features = binding.get_host_cpu_features().flatten()
    return Host(binding, llvmlite.__version__, triple, binding.get_host_cpu_name(), features)


def bind(symbols: Mapping[str, int]) -> None:
    """Gives addresses to functions that texts declare."""
    _BOUND.update(symbols)


# ---- text to object to code --------------------------------------------------------------------------


def emitted(text: str) -> tuple[tuple[str, ...], bytes]:
    """The symbols that a text needs, and its object file."""
    machine = host().machine()
    module = host().binding.parse_assembly(text)
    module.triple, module.data_layout = host().triple, str(machine.target_data)
    declared = [f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")]
    return tuple(declared), machine.emit_object(module)


def linked(symbols: Sequence[str], data: bytes, exported: Sequence[str]) -> Any:
    """An object file as code in memory, for as long as the result lives, which maps what is exported to addresses.

    Raises:
        ValueError: if the object calls a function that nobody has bound.
    """
    if absent := [name for name in symbols if name not in _BOUND]:
        raise ValueError(f"A kernel calls functions that have no address here: {', '.join(absent)}.")
    library = host().binding.JITLibraryBuilder().add_object_img(data)
    library.add_current_process()  # has what LLVM calls of its own accord, such as memcpy
    for name in symbols:
        library.import_symbol(name, _BOUND[name])
    for name in exported:
        library.export_symbol(name)
    # JITLink puts all sections side by side. MCJIT may put them far apart, and the small code model reaches 2 GB only.
    jit = host().binding.create_lljit_compiler(host().machine(), use_jit_link=True, suppress_errors=True)
    image = library.link(jit, "kernel")
    image.jit = jit  # to be freed after the code
    return image


# ---- files -------------------------------------------------------------------------------------------


def _folder() -> Path | None:
    """Where machine code is kept between processes: as the environment says, else with JAX's own cache, if any."""
    named = cache_folder()
    if named is not None:
        return Path(named)
    shared = jax.config.jax_compilation_cache_dir
    if not shared or "://" in shared or not jax.config.jax_enable_compilation_cache:
        return None
    return Path(shared) / "gradsolve_backend"


def _sealed(digest: bytes, symbols: tuple[str, ...], data: bytes) -> bytes:
    content = "\n".join(symbols).encode() + b"\0" + data
    return _MAGIC + digest + hashlib.sha256(digest + content).digest() + content


def _opened(digest: bytes, sealed: bytes) -> tuple[tuple[str, ...], bytes] | None:
    """What was sealed under this digest; None for anything else."""
    content = sealed[len(_MAGIC) + 64 :]
    names, found, data = content.partition(b"\0")
    if not found or sealed != _MAGIC + digest + hashlib.sha256(digest + content).digest() + content:
        return None
    return tuple(names.decode().split("\n")) if names else (), data


@functools.cache
def _warn(folder: Path, reason: str) -> None:
    warnings.warn(f"Machine code cannot be kept in {folder}: {reason}. It will be generated anew.", stacklevel=2)


def _read(folder: Path, digest: bytes) -> tuple[tuple[str, ...], bytes] | None:
    try:
        return _opened(digest, (folder / digest.hex()).read_bytes())
    except OSError:
        return None


def _write(folder: Path, digest: bytes, sealed: bytes) -> None:
    """Others see the whole file or none: it gets its name when it is complete."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix=".")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(sealed)
            os.replace(name, folder / digest.hex())
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        _warn(folder, error.strerror or str(error))


def stored(text: str) -> tuple[tuple[str, ...], bytes]:
    """The symbols that a text needs, and its object file: read, or else emitted and written."""
    folder, digest = _folder(), host().digest(text)
    found = None if folder is None else _read(folder, digest)
    if found is None:
        found = emitted(text)
        if folder is not None:
            _write(folder, digest, _sealed(digest, *found))
    return found


# ---- memory ------------------------------------------------------------------------------------------


class Memory:
    """Machine code by the digest of its text: all that is alive, of which the last used are kept so."""

    def __init__(self, kept: int) -> None:
        self.kept = kept
        # Held while code is made, so that two that ask for it at once get the same. LLVM serves one at a time anyway.
        self.lock = threading.Lock()
        self.recent: OrderedDict[bytes, Code] = OrderedDict()
        self.alive: weakref.WeakValueDictionary[bytes, Code] = weakref.WeakValueDictionary()

    def get(self, digest: bytes, make: Callable[[], Code]) -> Code:
        with self.lock:
            code = self.alive.get(digest)
            if code is None:
                self.alive[digest] = code = make()
            self.recent[digest] = code
            self.recent.move_to_end(digest)
            if len(self.recent) > self.kept:
                self.recent.popitem(last=False)
            return code


MEMORY = Memory(KEPT)


def compiled(text: str) -> Code:
    """The machine code of a text; two that ask for the same share it.

    Raises:
        RuntimeError: if LLVM cannot read the text.
        ValueError: if it calls a function that has no address (see `bind`).
    """
    digest = host().digest(text)

    def make() -> Code:
        symbols, data = stored(text)
        return Code(int.from_bytes(digest[:8], "little", signed=True), symbols, linked(symbols, data, ["kernel"]))

    return MEMORY.get(digest, make)
