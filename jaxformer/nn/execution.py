"""How a model is computed, apart from what it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.errors import UserError
from jaxformer.ops.attention import attention
from jaxformer.ops.blockwise import SAVED

Remat = Literal["none", "dots", "block"]
"""What the backward pass finds stored: everything; the results of products with weights; the input of each block. What
a kernel for long sequences gave is stored in each case: it costs little memory, and most to compute again."""

ATTENDED = jax.checkpoint_policies.save_only_these_names(SAVED)
DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
POLICIES = {"dots": jax.checkpoint_policies.save_from_both_policies(DOTS, ATTENDED), "block": ATTENDED}


def unchanged(name: str, params: Any) -> Any:
    """The parameters as they are."""
    return params


@dataclass(frozen=True)
class Execution:
    """Choices that cost or save time and memory. No shape, no name and, but for rounding, no number depends on them.

    Attributes:
      attention: what computes attention: any function with the signature of `ops.attention.attention`.
      remat: what the backward pass computes again instead of finding it stored (Chen et al. 2016).
      scan: compile one block and run it in a loop, for deep models. Parameters keep their names and are
        stacked on the way in.
      gather: given a block's name and its parameters where the block begins, and with remat once more in the
        backward pass: what is stored in shards is put together here.
    """

    attention: Callable[..., jax.Array] = attention
    remat: Remat = "none"
    scan: bool = False
    gather: Callable[[str, Any], Any] = unchanged

    @property
    def is_plain(self) -> bool:
        """Whether blocks are simply called one after the other."""
        return self.remat == "none" and not self.scan and self.gather is unchanged


PLAIN = Execution()


def run_blocks(
    blocks: Sequence[nn.Module], execution: Execution, x_TD: jax.Array, *inputs: Any, keys: jax.Array | None = None
) -> jax.Array:
    """The residual stream `(T, D)` after all blocks; each is called as `block(x_TD, *inputs, key=…)`.

    Args:
      blocks: bound modules of one shape, whose calls give `(x_TD, cache)`.
      inputs: what all of them get beside the stream.
      keys: a dropout key a block.

    Raises:
      UserError: the blocks are to be scanned, and differ.
    """
    if execution.is_plain or blocks[0].is_initializing():
        for i, block in enumerate(blocks):
            x_TD, _ = block(x_TD, *inputs, key=None if keys is None else keys[i])
        return x_TD

    # A transformation of JAX must not see bound modules: take their parameters out, and apply them as functions.
    params = [block.variables["params"] for block in blocks]

    def function(block: nn.Module) -> Callable[[jax.Array, Any, jax.Array | None], jax.Array]:
        unbound = block.clone(parent=None, name=None)

        def run(x_TD: jax.Array, params: Any, key: jax.Array | None) -> jax.Array:
            gathered = execution.gather(str(block.name), params)
            out: Any = unbound.apply({"params": gathered}, x_TD, *inputs, key=key)
            return out[0]

        if execution.remat == "none":
            return run
        # A loop already keeps the compiler from merging the second computation with the first.
        return jax.checkpoint(run, policy=POLICIES[execution.remat], prevent_cse=not execution.scan)

    if not execution.scan:
        for i, block in enumerate(blocks):
            x_TD = function(block)(x_TD, params[i], None if keys is None else keys[i])
        return x_TD
    shapes = [jax.tree.map(jnp.shape, p) for p in params]
    if any(shape != shapes[0] for shape in shapes):
        raise UserError("the blocks differ in shape and cannot be scanned; set compute.scan_blocks to false.")
    run = function(blocks[0])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
    return jax.lax.scan(lambda x_TD, xs: (run(x_TD, *xs), None), x_TD, (stacked, keys))[0]
