"""Solves on a mesh of two devices, which `conftest.py` makes out of the host."""

from collections.abc import Callable

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, decay, final
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

KS = jnp.array([0.2, 0.7, 1.5, 3.0])
SLOPES = -np.exp(-np.asarray(KS))
AXIS = PartitionSpec("members")


@pytest.fixture
def mesh() -> Mesh:
    assert jax.device_count() >= 2
    return Mesh(np.array(jax.devices()[:2]), ("members",))


@pytest.fixture
def batched_slope(adjoint: diffrax.AbstractAdjoint) -> Callable[[Array], Array]:
    return jax.vmap(jax.grad(lambda k: final(decay, jnp.array(1.0), k, max_steps=64, adjoint=adjoint)))


@pytest.mark.stock_fails(raises=ValueError)
def test_gradient_inside_shard_map(batched_slope, mesh):
    """Two members on each device, without the check of varying axes (diffrax#735, #765)."""
    sharded = jax.shard_map(batched_slope, mesh=mesh, in_specs=AXIS, out_specs=AXIS, check_vma=False)
    assert_close(jax.jit(sharded)(KS), SLOPES, rtol=1e-7)


@pytest.mark.stock_fails(raises=TypeError)
def test_gradient_inside_checked_shard_map(adjoint, mesh):
    """The same with the check; `throw=False`, since Equinox's error check, outside the adjoint, does not pass it."""
    slope = jax.grad(lambda k: final(decay, jnp.array(1.0), k, max_steps=64, adjoint=adjoint, throw=False))
    sharded = jax.shard_map(jax.vmap(slope), mesh=mesh, in_specs=AXIS, out_specs=AXIS)
    assert_close(jax.jit(sharded)(KS), SLOPES, rtol=1e-7)


@pytest.mark.stock_fails(raises=ValueError)
def test_gradient_inside_pmap(batched_slope):
    """The older way to use several devices (diffrax#247, #407)."""
    slopes = jax.pmap(batched_slope, devices=jax.devices()[:2])(KS.reshape(2, 2))
    assert_close(slopes.reshape(4), SLOPES, rtol=1e-7)


def test_gradient_of_a_sharded_batch(batched_slope, mesh):
    """`jit` of a batch that lies on two devices."""
    placed = jax.device_put(KS, NamedSharding(mesh, AXIS))
    assert_close(jax.jit(batched_slope)(placed), SLOPES, rtol=1e-7)
