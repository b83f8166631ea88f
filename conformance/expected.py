"""The xfail file of an adopter: which cases are known to fail, one id a line, with the reason behind a `#`."""

from collections.abc import Iterable, Mapping
from pathlib import Path


def parse(text: str) -> dict[str, str]:
    """Ids with their reasons (empty where none is given); blank lines and lines of comment are skipped.

    Raises:
        ValueError: if a line holds more than an id, or an id comes twice.
    """
    expected: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        case, _, reason = (part.strip() for part in line.partition("#"))
        if not case:
            continue
        if len(case.split()) > 1:
            raise ValueError(f"line {number}: {case!r} is not one case id; write a reason behind a #")
        if case in expected:
            raise ValueError(f"line {number}: {case} is listed already; remove one of the two")
        expected[case] = reason
    return expected


def read(path: str) -> dict[str, str]:
    """As `parse`, of a file. The message of the ValueError then begins with the path."""
    try:
        return parse(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}, {error}") from None


def stale(expected: Mapping[str, str], known: Iterable[str]) -> list[str]:
    """Ids that name no case of any grid: renamed or removed cases, or a slip of the pen."""
    known = set(known)
    return [case for case in expected if case not in known]
