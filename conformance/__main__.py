"""`python -m gradsolve_backend.conformance --backend NAME`: does a backend give what stock Diffrax gives?"""

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gradsolve_backend.conformance",
        description=__doc__,
        epilog="Anything else is passed on to pytest. Exit code 0: cases ran on the backend, and all of them conform.",
    )
    parser.add_argument("--backend", required=True, metavar="NAME", help="as in GradSolveAdjoint(backend=NAME)")
    parser.add_argument("--grid", choices=("short", "long"), default="short", help="about 100 cases, or about 400")
    parser.add_argument("--xfail", metavar="FILE", help="cases known to fail: one id a line, a reason behind a #")
    parser.add_argument("-n", metavar="N", help="number of processes (needs pytest-xdist)")
    parser.add_argument("-k", metavar="EXPR", help="only cases whose id matches, as in pytest")
    return parser


def arguments(command: Sequence[str]) -> list[str]:
    """The arguments of pytest for a command line of the suite."""
    options, rest = _parser().parse_known_args(command)
    here = Path(__file__).parent
    # Neither the configuration nor a conftest of the folder one happens to be in may change what is tested.
    found = ["-p", "gradsolve_backend.conformance.plugin", "-p", "no:cacheprovider", "-c", os.devnull]
    found += ["--rootdir", str(here), "--confcutdir", str(here), "--import-mode=importlib"]
    found += ["--backend", options.backend, "--grid", options.grid]
    for name, value in (("--expected-failures", options.xfail), ("-n", options.n), ("-k", options.k)):
        found += [name, value] if value else []
    return [*found, *rest, str(here / "test_grid.py")]


def main(command: Sequence[str]) -> int:
    """Run the suite; the exit code is pytest's, and 5 also where no case ran on the backend."""
    needed = arguments(command)
    if importlib.util.find_spec("pytest") is None:
        print("The conformance suite runs on pytest: pip install 'gradsolve_backend[test]'", file=sys.stderr)
        return 2
    import pytest  # an optional dependency

    return int(pytest.main(needed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
