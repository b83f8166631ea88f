"""Values of the process that are part of the key under which JAX keeps what it compiled."""

import threading
from typing import Any, Generic, TypeVar

import jax

T = TypeVar("T")


class Keyed(Generic[T]):
    """A hashable value. Once it changes, every compiled function is traced again at its next call.

    JAX learns of it when it is first changed, so that a process that changes nothing is left as it was.
    """

    def __init__(self, default: T) -> None:
        self._default = default
        self._context: Any = None
        self._lock = threading.Lock()

    def _made(self) -> Any:
        with self._lock:
            if self._context is None:
                self._context = jax.make_user_context(self._default)
        return self._context

    @property
    def value(self) -> T:
        """The value in this thread: that of the innermost `within`, else the process's."""
        return self._default if self._context is None else self._context.value

    @property
    def everywhere(self) -> T:
        """The value in threads that are not in `within`."""
        return self._default if self._context is None else self._context.get_global()

    def set(self, value: T) -> None:
        """Change the process's value."""
        if value != self.everywhere:
            self._made().set_global(value)

    def within(self, value: T) -> Any:
        """A context manager in which this thread has another value."""
        return self._made()(value)
