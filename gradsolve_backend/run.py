"""Runs an unchanged program with `GradSolveAdjoint` as the default adjoint of `diffrax.diffeqsolve`."""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import diffrax

from gradsolve_backend import install
from gradsolve_backend.config import nearest_file, read_file, use_file


def prepare(program: str, arguments: Sequence[str], *, module: bool = False, replace: Sequence[str] = ()) -> None:
    """Set up this process for a program, as `python program arguments...` or `python -m program arguments...` would.

    Settings are taken from the pyproject.toml nearest to the program or, for a module, to the current folder.

    Args:
        program: path of a script, or name of a module.
        arguments: what the program finds in `sys.argv` after its own name.
        module: whether `program` is the name of a module.
        replace: names of Diffrax's adjoints to be replaced where the program names them, for example
            "RecursiveCheckpointAdjoint".

    Raises:
        OSError: if there is no such script.
        ValueError: if the file has a setting that is not allowed, or Diffrax has no such adjoint.
    """
    folder = Path.cwd() if module else Path(program).resolve(strict=True).parent
    file = nearest_file(folder)
    if file is not None:
        use_file(read_file(file))
    # It stays: threads of the program may outlive its last line.
    install(replace=adjoints(replace))
    sys.argv[:] = [program, *arguments]
    if not module and not sys.flags.safe_path:
        sys.path[0] = str(folder)


def execute(program: str, *, module: bool = False) -> None:
    """Run the program in this process.

    Raises:
        BaseException: whatever the program raises.
    """
    if module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


def adjoints(names: Sequence[str]) -> tuple[type[diffrax.AbstractAdjoint], ...]:
    """Diffrax's classes of these names.

    Raises:
        ValueError: if Diffrax has no such adjoint.
    """
    return tuple(map(_adjoint, names))


def _adjoint(name: str) -> type[diffrax.AbstractAdjoint]:
    found = getattr(diffrax, name, None)
    if not (isinstance(found, type) and issubclass(found, diffrax.AbstractAdjoint)):
        kinds = [k for k in vars(diffrax).values() if isinstance(k, type) and issubclass(k, diffrax.AbstractAdjoint)]
        names = sorted(k.__name__ for k in kinds if not k.__name__.startswith("Abstract"))
        raise ValueError(f"run --replace {name}: Diffrax has no adjoint of this name. There are: {', '.join(names)}.")
    return found
