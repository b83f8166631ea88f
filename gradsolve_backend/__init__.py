"""Exact record-and-replay gradients for Diffrax solves, in forward and in reverse mode."""

from gradsolve_backend.adapters.adjoint import GradSolveAdjoint
from gradsolve_backend.backend import AbstractBackend
from gradsolve_backend.explain import explain
from gradsolve_backend.hookspecs import hookimpl
from gradsolve_backend.problem import Problem
from gradsolve_backend.route import Route

__version__ = "0.1.0"

__all__ = ["AbstractBackend", "GradSolveAdjoint", "Problem", "Route", "explain", "hookimpl"]
