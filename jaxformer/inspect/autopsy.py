"""Where the first number that is not finite came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.inspect.names import dotted
from jaxformer.models.objective import Params, next_token_nll


def first_non_finite(model: nn.Module, params: Params, batch_BT: jax.Array) -> str | None:
    """Name the first thing that is not finite when a loss is computed and differentiated.

    Parameters are looked at first, then the output of every module in the order of the calls, the loss, and
    the gradient with respect to each parameter.

    Returns:
      A phrase such as "the output of blocks.1.mlp (largest value until then 3.1e+35)", or None if all is
      finite.
    """
    for name, leaf in _named(params):
        if not jnp.isfinite(leaf).all():
            return f"the parameter {name}"

    @jax.jit
    def outputs(params: Params, batch_BT: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        def one(tokens_T: jax.Array) -> tuple[dict[str, Any], jax.Array]:
            seen: dict[str, Any] = {}

            def listen(call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
                out = call(*args, **kwargs)
                if context.method_name == "__call__":
                    first = jax.tree.leaves(out)[0]
                    name = dotted(context.module.path) or "the model (logits)"
                    # The sequence number keeps the order of calls through the sorting of a dict's keys.
                    finite = jnp.isfinite(first)
                    size = jnp.max(jnp.abs(jnp.where(finite, first, 0.0)))
                    seen[f"{len(seen):05d} {name}"] = (finite.all(), size)
                return out

            with nn.intercept_methods(listen):
                loss = jnp.mean(next_token_nll(model, params, tokens_T))
            return seen, loss

        seen, losses = jax.vmap(one)(batch_BT)
        return {name: (jnp.all(ok), jnp.max(size)) for name, (ok, size) in seen.items()}, jnp.mean(losses)

    seen, loss = outputs(params, jnp.asarray(batch_BT))
    largest = 0.0
    for name, (ok, size) in seen.items():
        if not ok:
            return f"the output of {name.split(' ', 1)[1]} (largest value until then {largest:.3g})"
        largest = max(largest, float(size))
    if not jnp.isfinite(loss):
        return f"the loss (largest value until then {largest:.3g})"
    mean_loss = lambda p: jnp.mean(jax.vmap(lambda t: next_token_nll(model, p, t))(jnp.asarray(batch_BT)))  # noqa: E731
    for name, leaf in _named(jax.jit(jax.grad(mean_loss))(params)):
        if not jnp.isfinite(leaf).all():
            return f"the gradient of {name}"
    return None


def _named(tree: Params) -> list[tuple[str, jax.Array]]:
    return [(dotted(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
