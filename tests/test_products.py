"""Products over lanes in a reverse sweep: numbers stay, the narrower factor comes first, others are left alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradsolve_backend.kernels.products import arranged

RANDOM = np.random.default_rng(0)
LANES, INPUTS, WIDTH = 7, 2, 5
VALUES, INWARD, OUTWARD = (jnp.asarray(RANDOM.normal(size=s)) for s in ((LANES, INPUTS), (WIDTH, INPUTS), (3, WIDTH)))


def plain(y, weights):
    inward, outward = weights
    return outward @ (inward @ y)


FIELDS = {"plain": plain, "jit": jax.jit(plain), "transposed": lambda y, w: (y @ w[0].T) @ w[1].T}


def pulled(field):
    """The map from cotangents of all lanes' outputs to those of their states and of the weights that they share."""
    return jax.vjp(jax.vmap(field, in_axes=(0, None)), VALUES, (INWARD, OUTWARD))[1]


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("name", FIELDS)
def test_cotangents_are_products_of_matrices(name, columns):
    """Written out with numpy, also for several cotangents at once."""
    given = RANDOM.normal(size=(columns, LANES, 3))
    pull = jax.vmap(arranged(pulled(FIELDS[name])))
    states, (inward, outward) = pull(jnp.asarray(given))
    middle = np.einsum("cno,oh->cnh", given, OUTWARD)
    np.testing.assert_allclose(states, middle @ INWARD, rtol=1e-12)
    np.testing.assert_allclose(inward, np.einsum("cnh,ni->chi", middle, VALUES), rtol=1e-12)
    np.testing.assert_allclose(outward, np.einsum("cno,nh->coh", given, VALUES @ INWARD.T), rtol=1e-12)


@pytest.mark.parametrize("name", FIELDS)
def test_order_of_factors(name):
    """Of the four products, the two with weights are left alone; in the others the left factor is narrow and turned."""
    program = jax.make_jaxpr(arranged(pulled(FIELDS[name])))(jnp.ones((LANES, 3)))
    dots = [e for e in program.eqns if e.primitive.name == "dot_general"]
    shapes = [[v.aval.shape for v in e.invars] for e in dots]
    sums = [e.params["dimension_numbers"][0] for e in dots]
    over_lanes = [left for (left, _), (summed, _) in zip(shapes, sums, strict=True) if left[summed[0]] == LANES]
    assert len(dots) == 4
    assert sorted(over_lanes) == [(INPUTS, LANES), (3, LANES)]
