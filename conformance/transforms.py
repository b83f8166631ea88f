"""The transform axis: what is done to a solve, with `jax.vmap` for its lanes or with a plain loop over them."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

#: Value; gradient over (y0, args); gradient over all times of the call; jvp; both Jacobians; value and gradient of
#: many; gradient of a sum over many y0 with shared args; vmap of vmap of the gradient; jvp of the gradient.
TRANSFORMS = (
    "value",
    "grad",
    "gradtime",
    "jvp",
    "jacfwd",
    "jacrev",
    "vmapvalue",
    "vmapgrad",
    "gradvmap",
    "nested",
    "jvpgrad",
)
#: What of stock can differentiate so: reverse mode, forward mode, or both.
FORWARD = ("jvp", "jacfwd")
MIXED = ("jvpgrad",)
LANES = 3


class Run(Protocol):
    """One solve: `(inputs, times, mesh) -> (outputs, aux)`."""

    def __call__(self, inputs: Any, times: Any, mesh: Any) -> tuple[Any, Any]: ...


Batch = Callable[[Callable[..., Any]], Callable[..., Any]]


def loop(fn: Callable[..., Any]) -> Callable[..., Any]:
    """As `jax.vmap(fn)`, one lane after the other: the reference shares no batching with what is tested."""
    return lambda *xs: jax.lax.map(lambda x: fn(*x), xs)


def apply(transform: str, run: Run, batch: Batch, operands: tuple[Any, dict[str, Any], Any]) -> dict[str, Any]:
    """Transform a solve and run it.

    Args:
        transform: one of `TRANSFORMS`.
        run: the solve.
        batch: `jax.vmap` or `loop`.
        operands: `(inputs, times, mesh)`; mesh None, or of all lanes, with one leading axis per `batch`.

    Returns:
        `value`: the outputs; `slope`: the derivatives (absent for values); `aux`: of each lane.
    """
    return _APPLY[transform](run, batch, *operands)


def _weights(x: Any, shift: float) -> Any:
    return jnp.cos(shift + jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)


def _weighted(outputs: Any, shift: float = 0.5) -> Any:
    """A number that every entry of the outputs has a part in."""
    sums = [jnp.sum(_weights(x, shift + i) * x) for i, x in enumerate(jtu.tree_leaves(outputs))]
    return jnp.sum(jnp.stack(sums))


def _direction(inputs: Any) -> Any:
    """Tangents in proportion to what they change."""
    return jtu.tree_map(lambda x: _weights(x, 1.5) * (jnp.abs(x) + 0.1), inputs)


def lanes(tree: Any, count: int, share: float = 0.02) -> Any:
    """`count` copies along a new first axis, each a little larger than the one before."""

    def spread(x: Any) -> Any:
        factors = 1 + share * jnp.arange(count, dtype=x.dtype)
        return factors.reshape((count,) + (1,) * x.ndim) * x[None]

    return jtu.tree_map(spread, tree)


def _loss(run: Run, times: Any, mesh: Any) -> Callable[[Any], tuple[Any, Any]]:
    def loss(inputs: Any) -> tuple[Any, Any]:
        outputs, aux = run(inputs, times, mesh)
        return _weighted(outputs), (outputs, aux)

    return loss


def _result(value: Any, aux: Any, slope: Any = None) -> dict[str, Any]:
    result = {"value": value, "aux": aux}
    return result if slope is None else result | {"slope": slope}


def _value(run: Run, batch: Batch, inputs: Any, times: Any, mesh: Any) -> dict[str, Any]:
    return _result(*run(inputs, times, mesh))


def _grad(run: Run, batch: Batch, inputs: Any, times: Any, mesh: Any) -> dict[str, Any]:
    slope, (value, aux) = jax.grad(_loss(run, times, mesh), has_aux=True)(inputs)
    return _result(value, aux, slope)


def _gradtime(run: Run, batch: Batch, inputs: Any, times: Any, mesh: Any) -> dict[str, Any]:
    def loss(times: Any) -> tuple[Any, Any]:
        return _loss(run, times, mesh)(inputs)

    slope, (value, aux) = jax.grad(loss, has_aux=True)(times)
    return _result(value, aux, slope)


def _jvp(run: Run, batch: Batch, inputs: Any, times: Any, mesh: Any) -> dict[str, Any]:
    value, slope, aux = jax.jvp(lambda x: run(x, times, mesh), (inputs,), (_direction(inputs),), has_aux=True)
    return _result(value, aux, slope)


def _jacobian(jacobian: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    def transformed(run: Run, batch: Batch, inputs: Any, times: Any, mesh: Any) -> dict[str, Any]:
        def summary(inputs: Any) -> tuple[Any, Any]:
            outputs, aux = run(inputs, times, mesh)
            return jnp.stack([_weighted(outputs, shift) for shift in (0.5, 1.1, 2.3)]), (outputs, aux)

        slope, (value, aux) = jacobian(summary, has_aux=True)(inputs)
        return _result(value, aux, slope)

    return transformed


def _vmap_of(transformed: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    def batched(run: Run, batch: Batch, inputs: Any, times: Any, mesh: Any) -> dict[str, Any]:
        one = lambda inputs, mesh: transformed(run, batch, inputs, times, mesh)  # noqa: E731
        return batch(one)(lanes(inputs, LANES), mesh)

    return batched


def _grad_of_vmap(run: Run, batch: Batch, inputs: Any, times: Any, mesh: Any) -> dict[str, Any]:
    def loss(inputs: Any) -> tuple[Any, Any]:
        y0s, args = inputs
        one = lambda y0, mesh: _loss(run, times, mesh)((y0, args))  # noqa: E731
        losses, rest = batch(one)(y0s, mesh)
        return jnp.sum(losses), rest

    y0, args = inputs
    slope, (value, aux) = jax.grad(loss, has_aux=True)((lanes(y0, LANES), args))
    return _result(value, aux, slope)


def _nested(run: Run, batch: Batch, inputs: Any, times: Any, mesh: Any) -> dict[str, Any]:
    y0, args = inputs
    y0s = lanes(y0, 2)

    def row(args: Any, mesh: Any) -> Any:
        return batch(lambda y0, mesh: _grad(run, batch, (y0, args), times, mesh))(y0s, mesh)

    return batch(row)(lanes(args, 2), mesh)


def _jvp_of_grad(run: Run, batch: Batch, inputs: Any, times: Any, mesh: Any) -> dict[str, Any]:
    gradient = jax.grad(_loss(run, times, mesh), has_aux=True)
    first, second, (value, aux) = jax.jvp(gradient, (inputs,), (_direction(inputs),), has_aux=True)
    return _result(value, aux, (first, second))


_APPLY: dict[str, Callable[..., dict[str, Any]]] = {
    "value": _value,
    "grad": _grad,
    "gradtime": _gradtime,
    "jvp": _jvp,
    "jacfwd": _jacobian(jax.jacfwd),
    "jacrev": _jacobian(jax.jacrev),
    "vmapvalue": _vmap_of(_value),
    "vmapgrad": _vmap_of(_grad),
    "gradvmap": _grad_of_vmap,
    "nested": _nested,
    "jvpgrad": _jvp_of_grad,
}
