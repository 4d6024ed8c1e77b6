"""Execution of a model's blocks: activation checkpointing, scanning over blocks and gathering of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.nn.capture import is_capturing, lifted, rooted_at
from jaxformer.ops.attention import attention
from jaxformer.ops.blockwise import SAVED
from jaxformer.ops.kernels import is_cudnn_forward

Remat = Literal["none", "dots", "block"]
"""Activations saved for the backward pass: all; the outputs of matmuls with weights; or each block's input. The output
and log-sums of blockwise or fused attention are always saved: they need little memory and are expensive to
recompute."""

SAVE_ATTENTION = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.save_only_these_names(SAVED), is_cudnn_forward
)
SAVE_DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
POLICIES = {"dots": jax.checkpoint_policies.save_from_both_policies(SAVE_DOTS, SAVE_ATTENTION), "block": SAVE_ATTENTION}


ROUTER = "router"
"""Collection into which mixtures of experts sow their router statistics; see `nn.experts`."""


def no_gather(name: str, params: Any) -> Any:
    """Return the parameters unchanged."""
    return params


@dataclass(frozen=True)
class Execution:
    """Settings that trade time for memory. They change no shape or parameter name and, except for rounding, no result.

    Attributes:
      attention: implementation of attention, with the signature of `ops.attention.attention`.
      remat: activation checkpointing (Chen et al. 2016).
      scan: compile one block and scan over it, for deep models. Parameters keep their names and are stacked before the
        scan.
      gather: function of a block's name and its parameters that gathers their shards when the block begins and, with
        remat, again in the backward pass.
      expert_shards: devices that experts are split over; see `nn.experts.Experts`.
    """

    attention: Callable[..., jax.Array] = attention
    remat: Remat = "none"
    scan: bool = False
    gather: Callable[[str, Any], Any] = no_gather
    expert_shards: int = 1


PLAIN = Execution()
"""Execution on one device with `ops.attention.attention` and every activation saved."""


def call_block(
    block: nn.Module, execution: Execution, x_TD: jax.Array, inputs: Any, key: jax.Array | None, in_scan: bool = False
) -> jax.Array:
    """Return the residual stream `(T, D)` after a bound block, with gather and remat; see `run_blocks`."""

    def run(block: nn.Module, x_TD: jax.Array, key: jax.Array | None) -> jax.Array:
        return block(x_TD, inputs, key=key)[0]

    if not block.is_initializing():
        if execution.gather is not no_gather:
            gather = lambda variables: {"params": execution.gather(str(block.name), variables["params"])}  # noqa: E731
            run = nn.map_variables(run, "params", trans_in_fn=gather)
        if execution.remat != "none":
            # A scan already prevents the compiler from merging the recomputation with the first computation.
            remat = partial(nn.checkpoint, policy=POLICIES[execution.remat], prevent_cse=not in_scan)
            run = lifted(remat, run)
    with rooted_at(block):
        return run(block, x_TD, key)


def scan_blocks(
    blocks: Sequence[nn.Module], execution: Execution, x_TD: jax.Array, inputs: Any, keys: jax.Array | None
) -> jax.Array:
    """Return the residual stream `(T, D)` after all blocks from a scan over their stacked parameters; see `run_blocks`.

    Raises:
      ValueError: the blocks differ in shape.
    """
    # JAX transformations cannot handle bound modules: extract the parameters, and apply the first block with each.
    params = [block.variables["params"] for block in blocks]
    shapes = [jax.tree.map(jnp.shape, p) for p in params]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError("the blocks differ in shape and cannot be scanned")
    unbound = blocks[0].clone(parent=None, name=blocks[0].name)
    mutable = [ROUTER] if blocks[0].is_mutable_collection(ROUTER) else []

    def run(block: nn.Module, x_TD: jax.Array, key: jax.Array | None) -> jax.Array:
        return call_block(block, execution, x_TD, inputs, key, in_scan=True)

    def body(x_TD: jax.Array, of_block: tuple[Any, jax.Array | None]) -> tuple[jax.Array, Any]:
        params, key = of_block
        rngs = None if key is None else {"dropout": key}
        out: Any = unbound.apply({"params": params}, x_TD, key, rngs=rngs, mutable=mutable, method=run)
        return out[0], out[1].get(ROUTER, {})

    x_TD, sown_L = jax.lax.scan(body, x_TD, (jax.tree.map(lambda *leaves: jnp.stack(leaves), *params), keys))
    for i, block in enumerate(blocks):
        for name, value in sown_L.items():
            block.put_variable(ROUTER, name, jax.tree.map(lambda leaf, i=i: leaf[i], value))
    return x_TD


def traced_once(blocks: Sequence[nn.Module]) -> Iterator[Callable[..., Any]]:
    """Yield the call of each bound block, such that blocks with equal attributes share one trace: JAX otherwise traces
    and lowers every block of a deep model anew. The compiler inlines the calls, so its program is that of a loop; with
    a scan, each decode step would copy all parameters out of their stack.

    While activations are captured, each block is called itself.
    """
    shared: list[tuple[Any, Callable[..., Any]]] = []
    for block in blocks:
        if is_capturing():
            yield block
            continue
        recipe = _recipe(block)
        call = next((call for known, call in shared if known == recipe), None)
        if call is None:
            call = jax.jit(block.clone(parent=None).apply)
            shared.append((recipe, call))
        yield partial(call, block.variables)


def _recipe(value: Any) -> Any:
    """Return what a module is made from, apart from its name: equal for modules that compute the same function of their
    parameters and inputs."""
    if isinstance(value, nn.Module):
        names = [field.name for field in fields(value) if field.name not in ("parent", "name")]
        return type(value), [(name, _recipe(getattr(value, name))) for name in names]
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    return value
