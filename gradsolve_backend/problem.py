"""What one solve asks of a backend."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Problem:
    """What one solve asks, as far as it is known while JAX traces it.

    Pure data: hashable, holds no array and no function of the user's. Backends answer it in
    `AbstractBackend.supports`; `gradsolve_backend.explain` shows it.

    Raises:
        ValueError: if the fields contradict each other.
    """

    #: Where the solve runs: "cpu", "cuda", "rocm", "tpu". Never "gpu", which does not say whose.
    platform: str
    #: Names for messages: of the solver, of the step size controller, of each kind of saved output.
    solver: str
    controller: str
    saving: tuple[str, ...]
    #: Real scalars in the state; a complex number counts as two.
    dimension: int
    #: Names of the dtypes that occur in the state, for example ("float64",).
    dtypes: tuple[str, ...]
    #: Scalar equations of one trial step; None where the step has no scalar form.
    equations: int | None
    #: Why the step has no scalar form, a sentence; empty where it has one.
    no_scalar_form: str
    #: What in the scalar program machine code of this package cannot express, a sentence; empty: nothing.
    no_machine_code: str
    #: What no lane backend can run, a sentence each. Such a solve takes Diffrax's own loop.
    obstacles: tuple[str, ...]
    #: The user's bound on the number of trial steps; None: unbounded.
    max_steps: int | None
    #: What in the scalar program a kernel for GPUs cannot express or has no room for, a sentence; empty: nothing.
    no_gpu_kernel: str = ""

    def __post_init__(self) -> None:
        if self.platform == "gpu":
            raise ValueError('Problem(platform="gpu"): say whose, "cuda" or "rocm".')
        if (self.equations is None) != bool(self.no_scalar_form):
            raise ValueError(
                f"Problem(equations={self.equations}, no_scalar_form={self.no_scalar_form!r}): "
                "exactly one of a number of equations and a reason why there is no scalar form is needed."
            )
