"""The suite itself: one test, over the whole grid. The plugin next to it brings the cases and the adjoint."""

import diffrax

from gradsolve_backend.conformance.grid import Case
from gradsolve_backend.conformance.oracle import check


def test_conforms(case: Case, adjoint: diffrax.AbstractAdjoint) -> None:
    differences = check(case, adjoint)
    assert not differences, "\n".join((f"{case} differs from stock Diffrax (oracle: {case.oracle}):", *differences))
