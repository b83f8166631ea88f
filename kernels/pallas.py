"""The `pallas` backend: fused loops in one Pallas kernel for NVIDIA GPUs, one thread per lane."""

import importlib.util
from typing import Any

from gradsolve_backend.backend import AbstractBackend
from gradsolve_backend.hookspecs import hookimpl
from gradsolve_backend.problem import Problem


class PallasBackend(AbstractBackend):
    """Runs what has a scalar form, on NVIDIA GPUs; on a CPU only if it is asked for."""

    name = "pallas"
    platforms = frozenset({"cuda", "cpu"})
    on_request = frozenset({"cpu"})
    rank = 20

    def supports(self, problem: Problem) -> tuple[str, ...]:
        missing = "" if importlib.util.find_spec("jax.experimental.pallas") else "this version of JAX has no Pallas"
        return tuple(reason for reason in (missing, problem.no_scalar_form, problem.no_gpu_kernel) if reason)

    @property
    def kernels(self) -> Any:
        # Pallas takes a tenth of a second to import, which who has no GPU need not wait for.
        from gradsolve_backend.kernels.pallas_calls import KERNELS

        return KERNELS


@hookimpl
def gradsolve_backends() -> list[AbstractBackend]:
    """Offers the `pallas` backend."""
    return [PallasBackend()]
