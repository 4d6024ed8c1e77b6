"""How a model is computed, apart from what it computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


ROUTER = "router"
"""The collection into which mixtures of experts sow what their routers did; see `nn.experts`."""


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
      expert_shards: over how many devices experts are split; see `nn.experts.Experts`.
    """

    attention: Callable[..., jax.Array] = attention
    remat: Remat = "none"
    scan: bool = False
    gather: Callable[[str, Any], Any] = unchanged
    expert_shards: int = 1

    @property
    def is_plain(self) -> bool:
        """Whether blocks are simply called one after the other."""
        return self.remat == "none" and not self.scan and self.gather is unchanged


PLAIN = Execution()


def dropped_first(module: nn.Module, dropout: nn.Module, x: jax.Array, n: int) -> tuple[jax.Array, jax.Array | None]:
    """What blocks begin with, after dropout, and a dropout key for each of `n` blocks; the same and None where `module`
    has been given none."""
    if not module.has_rng("dropout"):
        return x, None
    keys = jax.random.split(module.make_rng("dropout"), n + 1)
    return dropout(x, rng=keys[0]), keys[1:]


def run_blocks(
    blocks: Sequence[nn.Module], execution: Execution, x_TD: jax.Array, *inputs: Any, keys: jax.Array | None = None
) -> jax.Array:
    """The residual stream `(T, D)` after all blocks; each is called as `block(x_TD, *inputs, key=…)`.

    What a block sows into the collection `ROUTER`, if that is mutable, stands in it as if blocks were simply called.

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
    mutable = [ROUTER] if blocks[0].is_mutable_collection(ROUTER) else []

    def function(block: nn.Module) -> Callable[[jax.Array, Any, jax.Array | None], tuple[jax.Array, Any]]:
        unbound = block.clone(parent=None, name=None)

        def run(x_TD: jax.Array, params: Any, key: jax.Array | None) -> tuple[jax.Array, Any]:
            gathered = execution.gather(str(block.name), params)
            rngs = None if key is None else {"dropout": key}
            out: Any = unbound.apply({"params": gathered}, x_TD, *inputs, key=key, rngs=rngs, mutable=mutable)
            (x_TD, _), sown = out
            return x_TD, sown.get(ROUTER, {})

        if execution.remat == "none":
            return run
        # A loop already keeps the compiler from merging the second computation with the first.
        return jax.checkpoint(run, policy=POLICIES[execution.remat], prevent_cse=not execution.scan)

    if not execution.scan:
        for i, block in enumerate(blocks):
            x_TD, sown = function(block)(x_TD, params[i], None if keys is None else keys[i])
            _sow(block, sown)
        return x_TD
    shapes = [jax.tree.map(jnp.shape, p) for p in params]
    if any(shape != shapes[0] for shape in shapes):
        raise UserError("the blocks differ in shape and cannot be scanned; set compute.scan_blocks to false.")
    run = function(blocks[0])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
    x_TD, sown_L = jax.lax.scan(lambda x_TD, xs: run(x_TD, *xs), x_TD, (stacked, keys))
    for i, block in enumerate(blocks):
        _sow(block, jax.tree.map(lambda leaf, i=i: leaf[i], sown_L))
    return x_TD


def _sow(block: nn.Module, sown: Mapping[str, Any]) -> None:
    """Put what a block sowed where it was applied as a function into the block."""
    for name, value in sown.items():
        block.put_variable(ROUTER, name, value)
