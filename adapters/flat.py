"""Trees of loop variables as flat lists of arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu


def strong(x: Any) -> jax.Array:
    """As an array without a weak type."""
    x = jnp.asarray(x)
    return jax.lax.convert_element_type(x, x.dtype)


@dataclass(frozen=True)
class Flat:
    """The structure of a tree whose arrays are handled as a list; what is not an array stays in the structure."""

    structure: Any
    static: tuple[Any, ...]

    @staticmethod
    def of(tree: Any) -> tuple[list[jax.Array], "Flat"]:
        """The arrays of a tree, numbers among them, and its structure."""
        leaves, structure = jtu.tree_flatten(tree)
        arrays = [strong(x) for x in leaves if eqx.is_array_like(x)]
        return arrays, Flat(structure, tuple(None if eqx.is_array_like(x) else x for x in leaves))

    @staticmethod
    def shapes(tree: Any) -> tuple[list[Any], "Flat"]:
        """The same for a tree of shapes."""
        leaves, structure = jtu.tree_flatten(tree)
        return leaves, Flat(structure, (None,) * len(leaves))

    def pack(self, tree: Any) -> list[Any]:
        """The arrays of another tree of this structure."""
        leaves = self.structure.flatten_up_to(tree)
        return [x for x, s in zip(leaves, self.static, strict=True) if s is None]

    def unpack(self, arrays: Sequence[Any]) -> Any:
        """The tree with these arrays."""
        rest = iter(arrays)
        return self.structure.unflatten([next(rest) if s is None else s for s in self.static])
