"""What `measure` found: as data, as a table, as JSON, and what it advises."""

import dataclasses
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Gradients that differ by more are not the same up to round-off.
ALIKE = 1e-6
# Lines of the table; each backend is a column.
LINES = (
    "first gradient, s",
    "forward, ms",
    "  quartiles",
    "value and gradient, ms",
    "  quartiles",
    "gradient / forward",
    "bytes, forward",
    "bytes, gradient",
    "difference from stock",
)


@dataclasses.dataclass(frozen=True)
class Spread:
    """Seconds of a call: the median, the quartiles, and of how many calls."""

    median: float
    low: float
    high: float
    calls: int

    @property
    def cells(self) -> tuple[str, str]:
        """Median and quartiles in milliseconds."""
        return f"{1e3 * self.median:.3g}", f"{1e3 * self.low:.3g}-{1e3 * self.high:.3g}"


@dataclasses.dataclass(frozen=True)
class Row:
    """What one backend takes."""

    #: Its name.
    backend: str
    #: Seconds to the first gradient, which it traces and compiles.
    first: float
    #: Seconds of a forward solve, and of value and gradient, once compiled.
    forward: Spread
    gradient: Spread
    #: What XLA reserves for each; None where it does not tell.
    bytes_forward: int | None
    bytes_gradient: int | None
    #: The largest one from stock's gradient, relative to its largest entry; None without stock.
    difference: float | None

    @property
    def ratio(self) -> float:
        """What a gradient costs in forward solves."""
        return self.gradient.median / self.forward.median

    @property
    def cells(self) -> tuple[str, ...]:
        """A column of the table."""
        difference = "?" if self.difference is None else f"{self.difference:.1e}"
        counts = ("?" if count is None else f"{count:,}" for count in (self.bytes_forward, self.bytes_gradient))
        return f"{self.first:.2f}", *self.forward.cells, *self.gradient.cells, f"{self.ratio:.2f}", *counts, difference


@dataclasses.dataclass(frozen=True)
class Measurements:
    """What `measure` found; `print` shows it as a table."""

    #: One for each backend, stock first.
    rows: tuple[Row, ...]
    #: Backends that do not take part, and why.
    left_out: tuple[tuple[str, str], ...]
    #: Where the solves run, "cpu" or "cuda".
    platform: str

    @property
    def advice(self) -> str:
        """What to do, in a sentence."""
        if not self.rows:
            return "No backend can run this function: the reasons are above."
        best = min(self.rows, key=lambda row: row.gradient.median)
        stock = next((row for row in self.rows if row.backend == "stock"), None)
        if stock is None:
            return f"Take {best.backend}: Diffrax's own loop has no gradient here."
        if best is stock:
            return "Stay with Diffrax's own adjoint: no other backend computes this gradient faster."
        times = stock.gradient.median / best.gradient.median
        gain = f"its gradient takes {_time(best)} where stock takes {_time(stock)}, {times:.1f} times less"
        if best.difference is not None and not best.difference <= ALIKE:
            return (
                f"Look at the gradients first: that of {best.backend} differs from stock's by {best.difference:.1e}, "
                f"which is more than round-off; {gain}."
            )
        return f"Take {best.backend}: {gain}, and it is the same up to {best.difference:.0e}."

    @property
    def table(self) -> list[tuple[str, ...]]:
        """Lines of the table as text; first the names of the backends."""
        return list(zip(("", *LINES), *((row.backend, *row.cells) for row in self.rows), strict=True))

    def __str__(self) -> str:
        cells = self.table if self.rows else []
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join((name.ljust(widths[0]), *map(str.rjust, rest, widths[1:]))) for name, *rest in cells]
        lines += [f"not {name}: {reason}" for name, reason in self.left_out]
        return "\n".join([*lines, self.advice])

    def as_data(self) -> dict[str, Any]:
        """Everything as dictionaries, lists, numbers and text."""
        packages = {name: version(name) for name in ("gradsolve_backend", "jax", "diffrax")}
        rows = [dataclasses.asdict(row) | {"ratio": row.ratio} for row in self.rows]
        return {
            "platform": self.platform,
            "packages": packages,
            "rows": rows,
            "left_out": dict(self.left_out),
            "advice": self.advice,
        }

    def write_json(self, path: str | Path) -> None:
        """Write `as_data` to a file."""
        Path(path).write_text(json.dumps(self.as_data(), indent=1) + "\n", encoding="utf-8")


def _time(row: Row) -> str:
    return f"{1e3 * row.gradient.median:.3g} ms"
