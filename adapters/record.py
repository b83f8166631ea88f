"""`record`: the mesh of a solve, to be replayed."""

from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from gradsolve_backend.adapters.adjoint import GradSolveAdjoint
from gradsolve_backend.adapters.mesh import Described, Record, adaptive_of


def record(terms: Any, solver: Any, t0: Any, t1: Any, dt0: Any, y0: Any, args: Any = None, **options: Any) -> Record:
    """The steps that `diffrax.diffeqsolve` accepts, for `GradSolveAdjoint(record=...)`.

    Arguments:
        terms, solver: as for `diffrax.diffeqsolve`.
        t0, t1, dt0: times, of shape (); `dt0` may be None.
        y0: the initial state, a PyTree of arrays of any shape.
        args: passed on to the vector field.
        options: keywords of `diffrax.diffeqsolve`. `saveat` does not matter, and `event` is refused.

    Returns:
        The record, which takes the memory of `max_steps + 1` times. It has no derivative: a replay takes the mesh as
        given.

    Raises:
        ValueError: if the step size controller chooses no steps by a tolerance, or there is an event, or
            `max_steps=None`.
    """
    if options.get("event") is not None or options.get("max_steps", 4096) is None:
        raise ValueError(
            "A record was asked for of a solve with an event, or with `max_steps=None`. A record holds the times of at "
            "most `max_steps` steps up to `t1`: leave the event out, and pass `max_steps`."
        )
    adaptive_of(options.get("stepsize_controller", diffrax.ConstantStepSize()))
    options = {"adjoint": GradSolveAdjoint(), **options}
    mesh = diffrax.SubSaveAt(t0=True, steps=True, fn=lambda t, y, args: None)
    options["saveat"] = diffrax.SaveAt(subs={"mesh": mesh, "end": diffrax.SubSaveAt(t1=True)})
    terms, t0, t1, dt0, y0, args = jtu.tree_map(_constant, (terms, t0, t1, dt0, y0, args))
    found: Any = diffrax.diffeqsolve(terms, solver, t0, t1, dt0, y0, args, **options)
    ts = found.ts["mesh"]
    forwards = jnp.where(jnp.isfinite(ts) & (t0 > t1), -ts, ts)
    complete = found.result == diffrax.RESULTS.successful
    end = jtu.tree_map(lambda y: y[0], found.ys["end"])  # as the solve has it, which may convert `y0`
    made = Record(forwards, found.stats["num_accepted_steps"], complete, Described.of(solver, end))
    return jtu.tree_map(jax.lax.stop_gradient, made)


def _constant(x: Any) -> Any:
    return jax.lax.stop_gradient(x) if eqx.is_array(x) else x
