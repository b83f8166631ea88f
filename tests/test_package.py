"""What is built, what may import what, and the example plugin: installed, selected, documented."""

import ast
import inspect
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pluggy
import pytest

from gradsolve_backend import AbstractBackend, hookspecs
from gradsolve_backend.backend import Kernels

ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "tests" / "plugin"
# Root folder, and its name inside the package.
FOLDERS = {"gradsolve_backend": "", "adapters": "adapters/", "conformance": "conformance/", "kernels": "kernels/"}
COMPAT = {ROOT / "kernels" / "compat.py", ROOT / "adapters" / "compat.py"}
FOREIGN = {"jax", "jaxlib", "diffrax", "equinox", "lineax", "optimistix", "jaxtyping", "llvmlite", "numpy", "pluggy"}
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
OFFLINE = ("--no-deps", "--no-build-isolation", "--no-index")


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


ALL_SOURCES = [path for folder in FOLDERS for path in sources(folder)]
# Without the public names, among them the adjoint, which is an adapter.
HOST = [path for path in sources("gradsolve_backend") if path.name != "__init__.py"]


def run(*command: str, cwd: Path | None = None, **environment: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy to build from, because setuptools writes beside the sources and reads what it wrote before."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in (*FOLDERS, "tests", "docs"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    target = tmp_path_factory.mktemp("wheel")
    run(*PIP, "wheel", *OFFLINE, "--wheel-dir", str(target), str(checkout))
    (built,) = target.glob("*.whl")
    return zipfile.Path(built)


def test_source_distribution_holds_sources_tests_and_docs(checkout, tmp_path):
    build = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, str(tmp_path), cwd=checkout)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as built:
        names = {name.partition("/")[2] for name in built.getnames()}
    wanted = [*ALL_SOURCES, *sources("tests"), *ROOT.glob("docs/*.md"), *ROOT.glob("kernels/*.ll")]
    wanted += [PLUGIN / "pyproject.toml", ROOT / "LICENSE"]
    assert not {path.relative_to(ROOT).as_posix() for path in wanted} - names


class TestWheel:
    def test_holds_every_source_and_no_other(self, wheel):
        wanted = {
            f"gradsolve_backend/{inside}{path.relative_to(ROOT / folder).as_posix()}"
            for folder, inside in FOLDERS.items()
            for path in sources(folder)
        }
        assert {name for name in wheel.root.namelist() if name.endswith(".py")} == wanted

    def test_holds_types_and_data(self, wheel):
        data = {f"gradsolve_backend/data/{path.name}" for path in (ROOT / "gradsolve_backend" / "data").iterdir()}
        texts = {f"gradsolve_backend/kernels/{path.name}" for path in (ROOT / "kernels").glob("*.ll")}
        assert any(name.endswith(".csv") for name in data) and texts
        assert data | texts | {"gradsolve_backend/py.typed"} <= set(wheel.root.namelist())

    def test_holds_the_licence(self, wheel):
        (licence,) = (name for name in wheel.root.namelist() if name.endswith("/LICENSE"))
        text = wheel.root.read(licence).decode()
        assert "Apache License" in text and "Version 2.0, January 2004" in text and len(text) > 11_000


def imported(path: Path) -> Iterator[str]:
    """Full dotted names that a file imports; of `from a import b` it is `a.b`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def private_attributes(path: Path) -> Iterator[str]:
    """Attributes such as `diffrax._integrate`, written on an imported module."""
    tree = ast.parse(path.read_text())
    modules = {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.split(".")[0] in FOREIGN
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            written = ast.unparse(node)
            if written.split(".")[0] in modules:
                yield written


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


class TestImports:
    @pytest.mark.parametrize("path", HOST, ids=lambda path: path.name)
    def test_host_imports_no_kernel_and_no_adapter(self, path):
        inner = ("gradsolve_backend.kernels", "gradsolve_backend.adapters", "gradsolve_backend.conformance")
        assert not [name for name in imported(path) if name.startswith(inner)]

    @pytest.mark.parametrize("path", sources("kernels"), ids=lambda path: path.name)
    def test_kernels_import_no_adapter(self, path):
        assert not [name for name in imported(path) if name.startswith("gradsolve_backend.adapters")]

    @pytest.mark.parametrize("path", ALL_SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
    def test_private_names_of_others_are_imported_in_one_place(self, path):
        names = [name for name in imported(path) if name.split(".")[0] in FOREIGN]
        private = [name for name in names if any(map(is_private, name.split(".")))] + [*private_attributes(path)]
        assert path in COMPAT or not private

    def test_the_checks_see_what_they_look_for(self, tmp_path):
        file = tmp_path / "file.py"
        file.write_text(
            "import jax\nimport diffrax._misc\nfrom diffrax import _root\nfrom equinox._x import y\nz = jax.core._w.v\n"
        )
        assert [*imported(file)] == ["jax", "diffrax._misc", "diffrax._root", "equinox._x.y"]
        assert [*private_attributes(file)] == ["jax.core._w"]


def hooks() -> list[str]:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return [name for name in vars(manager.hook) if not name.startswith("_")]


def methods(kind: type) -> list[str]:
    return [name for name, value in vars(kind).items() if inspect.isfunction(value) and not name.startswith("_")]


class TestDocs:
    TEXT = (ROOT / "docs" / "plugins.md").read_text()

    @pytest.mark.parametrize("hook", hooks())
    def test_each_hook_has_a_section(self, hook):
        assert f"\n## The hook `{hook}`\n" in self.TEXT

    @pytest.mark.parametrize("hook", hooks())
    def test_each_hook_says_when_it_fires_and_what_none_means(self, hook):
        first = (inspect.getdoc(getattr(hookspecs, hook)) or "").splitlines()[0]
        assert first.startswith("Called ") and "None means" in first

    @pytest.mark.parametrize("method", [*methods(AbstractBackend), *methods(Kernels)])
    def test_each_method_has_a_row(self, method):
        assert f"\n| `{method}(" in self.TEXT

    @pytest.mark.parametrize("field", [*AbstractBackend.__annotations__, "kernels"])
    def test_each_field_has_a_row(self, field):
        assert f"\n| `{field}` " in self.TEXT

    @pytest.mark.parametrize("file", ["pyproject.toml", "src/gradsolve_example_plugin.py"])
    def test_the_plugin_shown_is_the_plugin_tested(self, file):
        language = "toml" if file.endswith("toml") else "python"
        assert f"`{file}`:\n\n```{language}\n{(PLUGIN / file).read_text()}```\n" in self.TEXT


PROGRAM = """
import json, sys
import diffrax, jax, jax.numpy as jnp
import gradsolve_backend

jax.config.update("jax_enable_x64", True)

def end(rate):
    return diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, rate: -rate * y), diffrax.Tsit5(), 0.0, 1.0, None, jnp.array(1.0), rate,
        stepsize_controller=diffrax.PIDController(rtol=1e-9, atol=1e-9),
        adjoint=gradsolve_backend.GradSolveAdjoint(),
    ).ys[0]

rate = jnp.array(1.5)
(route,) = gradsolve_backend.explain(jax.grad(end), rate)
json.dump({"backend": route.backend, "value": float(end(rate)), "slope": float(jax.grad(end)(rate))}, sys.stdout)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example plugin installed; built from a copy, as the wheel is."""
    copy, target = tmp_path_factory.mktemp("plugin") / "copy", tmp_path_factory.mktemp("site")
    shutil.copytree(PLUGIN, copy, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    run(*PIP, "install", *OFFLINE, "--target", str(target), str(copy))
    return target


@pytest.mark.smoke
@pytest.mark.parametrize(
    "backend, scale",
    [("stock", 1.0), ("xla", 1.0), ("llvm", 1.0), ("example", 1.0), pytest.param("wrong", 1.001, id="wrong by 0.1 %")],
)
def test_one_program_runs_with_each_backend(site, backend, scale):
    """The program is the same; the environment selects. The solution is exp(-rate)."""
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    found = json.loads(run(sys.executable, "-c", PROGRAM, PYTHONPATH=path, GRADSOLVE_BACKEND=backend))
    assert found["backend"] == backend
    np.testing.assert_allclose(found["value"], np.exp(-1.5), rtol=1e-7)
    np.testing.assert_allclose(found["slope"], -scale * np.exp(-1.5), rtol=1e-7)
