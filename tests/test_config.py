"""Settings: which of five places holds, what is refused and how, and that changed settings reach compiled solves."""

import threading
from pathlib import Path
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import pytest

from gradsolve_backend import GradSolveAdjoint, config, configure, explain
from gradsolve_backend.config import Setting, nearest_file, read_file, setting, use_file

# For each setting: the value in each place, first the one that comes first.
VALUES: dict[str, list[Any]] = {
    "backend": ["argument", "context", "variable", "file"],
    "memory": [1, 2, 3, 4],
    "log": ["routes", "off", "routes", "off"],
    "cache_dir": ["/argument", "/context", "/variable", "/file"],
}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for kind in config.KINDS.values():
        monkeypatch.delenv(kind.variable, raising=False)


@pytest.fixture
def file(tmp_path):
    """Settings of a pyproject.toml, in force."""

    def write(text: str) -> Path:
        path = tmp_path / "pyproject.toml"
        path.write_text(f"[tool.gradsolve_backend]\n{text}\n")
        use_file(read_file(path))
        return path

    yield write
    use_file(None)


class TestPrecedence:
    @pytest.mark.parametrize("name", VALUES)
    @pytest.mark.parametrize("highest", range(5))
    def test_argument_context_environment_file_automatic(self, name, highest, monkeypatch, file):
        values: list[Any] = [v if i >= highest else None for i, v in enumerate(VALUES[name])]
        argument, context, variable, text = values
        path = file(f"{name} = {text!r}" if text is not None else "")
        if variable is not None:
            monkeypatch.setenv(config.KINDS[name].variable, str(variable))
        with configure(**{name: context}):
            found = setting(name, argument)
        origins = ["argument", "configure", config.KINDS[name].variable, str(path), "automatic"]
        assert found == Setting(name, [*values, None][highest], origins[highest])

    def test_automatic_overrides_what_comes_after(self, monkeypatch, file):
        monkeypatch.setenv("GRADSOLVE_BACKEND", "stock")
        with configure(backend="automatic"):
            assert setting("backend") == Setting("backend", None, "configure")
            assert setting("backend", "xla").value == "xla"
        monkeypatch.setenv("GRADSOLVE_BACKEND", "automatic")
        file("backend = 'xla'")
        assert setting("backend").value is None

    def test_an_empty_variable_counts_as_unset(self, monkeypatch):
        monkeypatch.setenv("GRADSOLVE_CACHE_DIR", " ")
        assert setting("cache_dir") == Setting("cache_dir", None, "automatic")


WRONG = [("memory", 0), ("memory", "10 MB"), ("memory", True), ("log", "route"), ("log", 1), ("backend", 3)]


class TestRefusals:
    """A message says where, what, and what is allowed."""

    @pytest.mark.parametrize("name, value", [*WRONG, ("cache_dir", 3)])
    def test_configure(self, name, value):
        with pytest.raises(ValueError) as caught:
            configure(**{name: value})
        shown = f'"{value}"' if isinstance(value, str) else value
        assert str(caught.value) == f"configure({name}={shown}): {config.KINDS[name].allowed}"
        assert setting(name).origin == "automatic"

    @pytest.mark.parametrize("name, value", [("memory", "0"), ("log", "route")])
    def test_variables_when_a_solve_is_traced(self, name, value, monkeypatch):
        variable = config.KINDS[name].variable
        monkeypatch.setenv(variable, value)
        with pytest.raises(ValueError) as caught:
            explain(end, jnp.ones(()))
        assert str(caught.value) == f"{variable}={value}: {config.KINDS[name].allowed}"

    @pytest.mark.parametrize("name, value", WRONG)
    def test_files(self, name, value, file, tmp_path):
        written = {True: "true", "10 MB": '"10 MB"', "route": '"route"'}.get(value, value)
        with pytest.raises(ValueError) as caught:
            file(f"{name} = {written}")
        assert str(tmp_path / "pyproject.toml") in str(caught.value) and config.KINDS[name].allowed in str(caught.value)

    def test_a_setting_that_does_not_exist(self, file):
        with pytest.raises(ValueError, match=r'backends = "xla" in \[tool.gradsolve_backend\] .*There are: backend'):
            file('backends = "xla"')

    @pytest.mark.parametrize("place", ["configure", "file"])
    def test_a_backend_that_does_not_exist(self, place, file):
        if place == "file":
            file('backend = "unheard"')
        with configure(backend="unheard" if place == "configure" else None):
            with pytest.raises(ValueError, match="There are: .*stock") as caught:
                explain(end, jnp.ones(()))
        written = {"configure": 'configure(backend="unheard")', "file": 'backend = "unheard" in [tool.gradsolve_ba'}
        assert written[place] in str(caught.value)


class TestConfigure:
    def test_holds_for_the_process_until_something_else_is_set(self):
        context = configure(backend="xla")
        try:
            assert setting("backend") == Setting("backend", "xla", "configure")
            configure(memory=4096)
            assert setting("backend").value == "xla" and setting("memory").value == 4096
        finally:
            config._CONFIGURED.set(())
        assert repr(context) == "configure(backend='xla')"

    def test_a_context_ends_also_with_an_error_and_inner_ones_first(self):
        with configure(backend="xla", memory=1):
            with pytest.raises(KeyError), configure(backend="stock"):
                assert (setting("backend").value, setting("memory").value) == ("stock", 1)
                raise KeyError
            assert setting("backend").value == "xla"
        assert setting("backend").value is None

    def test_a_context_is_of_its_thread(self):
        seen = []
        with configure(backend="xla"):
            thread = threading.Thread(target=lambda: seen.append(setting("backend").value))
            thread.start()
            thread.join()
        assert seen == [None]


class TestFiles:
    def test_the_nearest_file_counts_whether_or_not_it_has_the_table(self, tmp_path):
        inner = tmp_path / "a" / "b"
        inner.mkdir(parents=True)
        (tmp_path / "pyproject.toml").write_text("[tool.gradsolve_backend]\nmemory = 4096\n")
        assert nearest_file(inner) == tmp_path / "pyproject.toml"
        (tmp_path / "a" / "pyproject.toml").write_text("[project]\nname = 'a'\n")
        found = nearest_file(inner)
        assert found == tmp_path / "a" / "pyproject.toml" and read_file(found).given == ()


def end(rate: Any, adjoint: diffrax.AbstractAdjoint | None = None, field: Any = lambda t, y, k: -k * y) -> Any:
    how = {"adjoint": GradSolveAdjoint() if adjoint is None else adjoint}
    return diffrax.diffeqsolve(diffrax.ODETerm(field), diffrax.Tsit5(), 0.0, 1.0, 0.1, jnp.ones(2), rate, **how).ys


class Traced:
    """Calls a function of a new field, and tells the backends of solves that were traced for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wrap: Any) -> None:
        self.taken: list[str] = []
        loop = GradSolveAdjoint.loop

        def noting(adjoint: Any, **given: Any) -> Any:
            self.taken.append(config.requested_backend(adjoint.backend)[0] or "automatic")
            return loop(adjoint, **given)

        monkeypatch.setattr(GradSolveAdjoint, "loop", noting)
        field, adjoint = lambda t, y, k: -k * y, GradSolveAdjoint()
        self.function = wrap(lambda rate: end(rate, adjoint, field))

    def __call__(self) -> list[str]:
        self.taken.clear()
        self.function(jnp.asarray(0.3))
        return [*self.taken]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["diffrax's own jit", "in a user's jit"])
class TestCompiledSolves:
    """What was compiled under other settings does not serve."""

    def test_configure(self, wrap, monkeypatch):
        traced = Traced(monkeypatch, wrap)
        with configure(backend="stock"):
            assert traced() == ["stock"] and traced() == []
        assert traced() == ["automatic"] and traced() == []
        with configure(backend="xla"):
            assert traced() == ["xla"] and traced() == []
        with configure(backend="stock"):
            assert traced() == []  # compiled before

    def test_environment(self, wrap, monkeypatch):
        traced = Traced(monkeypatch, wrap)
        assert traced() == ["automatic"]
        for name in ("stock", "xla"):
            monkeypatch.setenv("GRADSOLVE_BACKEND", name)
            if wrap is jax.jit:
                # Nothing tells a compiled function of the user's, until this package is next asked something.
                assert traced() == []
                explain(lambda x: x, 0.0)
            assert traced() == [name] and traced() == []

    def test_file(self, wrap, monkeypatch, file):
        traced = Traced(monkeypatch, wrap)
        file("memory = 1000000")
        assert traced() == ["automatic"]
        file('backend = "xla"')
        assert traced() == ["xla"]
