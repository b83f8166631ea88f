"""Exact record-and-replay gradients for Diffrax solves, in forward and in reverse mode."""

from gradsolve_backend.adapters.adjoint import GradSolveAdjoint
from gradsolve_backend.adapters.install import install, uninstall
from gradsolve_backend.adapters.mesh import Record
from gradsolve_backend.adapters.record import record
from gradsolve_backend.adapters.rosenbrock import Rodas4, Rodas5P, Rosenbrock23
from gradsolve_backend.adapters.verner import Vern7
from gradsolve_backend.backend import AbstractBackend
from gradsolve_backend.config import configure
from gradsolve_backend.explain import explain
from gradsolve_backend.hookspecs import hookimpl
from gradsolve_backend.measure import measure
from gradsolve_backend.problem import Problem
from gradsolve_backend.route import Route

__version__ = "0.1.0"

__all__ = [
    "AbstractBackend",
    "GradSolveAdjoint",
    "Problem",
    "Record",
    "Rodas4",
    "Rodas5P",
    "Rosenbrock23",
    "Route",
    "Vern7",
    "configure",
    "explain",
    "hookimpl",
    "install",
    "measure",
    "record",
    "uninstall",
]
