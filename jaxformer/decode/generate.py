"""Prefill once, then decode with the cache, on the device, a few tokens at a time.

A model offers the cache protocol with two methods: `init_cache(n_slots)` gives an empty cache for one
sequence, and `extend(tokens, positions, cache, slot)` gives logits and the longer cache; see
`models.decoder.Decoder`. A model without it is run on a sliding window of its context instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.decode.samplers import Sampling, begin, sample
from jaxformer.errors import UserError
from jaxformer.models.objective import Params
from jaxformer.ops.masks import EMPTY

CHUNK = 16
"""Tokens decoded in one call of the compiled loop; text streams in such portions."""


def generate(
    model: nn.Module,
    params: Params,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    context_length: int,
    fill_token: int,
    seed: int = 0,
) -> Iterator[np.ndarray]:
    """Continue prompts of any lengths, one row each, as one batch.

    A row draws from its own stream of randomness, made of `seed` and the row's number, and depends on nothing
    else in the batch. Where a row outgrows the context, it goes on from the last half of it (with a cache) or from
    the last `context_length` tokens (without).

    Args:
      prompts: tokens of each prompt, 1 to `context_length` of them.
      max_new_tokens: how many to make for each.
      context_length: longest sequence the model takes.
      fill_token: what stands where a window has no token yet; nothing looks at it where there is a cache.

    Returns:
      An iterator over the next tokens of every row, `(B, n)` int32, n from 1 to `CHUNK`.

    Raises:
      UserError: a prompt is empty or too long, or `max_new_tokens` is below 1.
    """
    if max_new_tokens < 1:
        raise UserError(f"max-new-tokens is {max_new_tokens}; it must be at least 1.")
    for number, prompt in enumerate(prompts, start=1):
        if not 1 <= len(prompt) <= context_length:
            which = f"prompt {number}" if len(prompts) > 1 else "the prompt"
            raise UserError(
                f"{which} has {len(prompt)} tokens; it must have at least 1 and at most the context's {context_length}."
            )
    return _generate(model, params, prompts, max_new_tokens, sampling, context_length, fill_token, seed)


def _generate(
    model: nn.Module, params: Params, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling,
    context_length: int, fill_token: int, seed: int,
) -> Iterator[np.ndarray]:  # fmt: skip
    keys_B = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(seed), jnp.arange(len(prompts)))
    rows = [list(prompt) for prompt in prompts]
    made = 0
    engine = _with_cache if hasattr(model, "extend") else _with_window
    while made < max_new_tokens:
        for tokens_BT in engine(
            model, params, rows, keys_B, made, max_new_tokens, sampling, context_length, fill_token
        ):
            tokens_BT = tokens_BT[:, : max_new_tokens - made]
            made += tokens_BT.shape[1]
            for row, tokens in zip(rows, tokens_BT.tolist(), strict=True):
                row.extend(tokens)
            yield tokens_BT
            if made == max_new_tokens:
                return


def _with_cache(
    model: Any, params: Params, rows: list[list[int]], keys_B: jax.Array, made: int, max_new_tokens: int,
    sampling: Sampling, context_length: int, fill_token: int,
) -> Iterator[np.ndarray]:  # fmt: skip
    """Tokens until the longest row has filled the context, or enough are made.

    Prompts lie in slots 0, 1, …, padded on the right; what is generated goes to one slot shared by all rows.
    """
    # Rows that have outgrown the context are cut; the others are not, so that no row feels its neighbours.
    half = max(1, context_length // 2)
    rows[:] = [row if len(row) <= context_length else row[-half:] for row in rows]
    longest = max(map(len, rows))
    room = context_length - longest  # tokens that can still be fed; one more can be drawn
    steps = min(room, max_new_tokens - made - 1)
    T = min(_bucket(longest), context_length)
    n_slots = T + -(-steps // CHUNK) * CHUNK
    tokens_BT = np.full((len(rows), T), fill_token, np.int32)
    positions_BT = np.full((len(rows), T), EMPTY, np.int32)
    for i, row in enumerate(rows):
        tokens_BT[i, : len(row)] = row
        positions_BT[i, : len(row)] = np.arange(len(row))
    lengths_B = np.array([len(row) for row in rows], np.int32)
    token_B, cache = _prefill(model, sampling, n_slots, params, tokens_BT, positions_BT, lengths_B, keys_B, made)
    yield np.asarray(token_B)[:, None]
    for done in range(0, steps, CHUNK):
        tokens_BC, cache = _decode(
            model, sampling, params, cache, token_B, lengths_B + done, T + done, keys_B, made + 1 + done
        )
        token_B = tokens_BC[:, -1]
        yield np.asarray(tokens_BC)[:, : steps - done]


@partial(jax.jit, static_argnums=(0, 1, 2))
def _prefill(
    model: Any, sampling: Sampling, n_slots: int, params: Params, tokens_BT: jax.Array, positions_BT: jax.Array,
    lengths_B: jax.Array, keys_B: jax.Array, made: int,
) -> tuple[jax.Array, Any]:  # fmt: skip
    """Read the prompts in one pass; the first new token of each, `(B,)`, and the cache."""

    def one(tokens_T: jax.Array, positions_T: jax.Array, length: jax.Array, key: jax.Array) -> tuple[jax.Array, Any]:
        logits_TV, cache = _extend(model, params, tokens_T, positions_T, model.init_cache(n_slots), 0)
        return _draw(logits_TV[length - 1], jax.random.fold_in(key, made), sampling), cache

    return jax.vmap(one)(tokens_BT, positions_BT, lengths_B, keys_B)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _decode(
    model: Any, sampling: Sampling, params: Params, cache: Any, token_B: jax.Array, position_B: jax.Array,
    slot: jax.Array, keys_B: jax.Array, made: jax.Array,
) -> tuple[jax.Array, Any]:  # fmt: skip
    """`CHUNK` decode steps; the new tokens `(B, CHUNK)` and the cache. Slot and step are shared by all rows."""

    def step(carry: tuple, i: jax.Array) -> tuple[tuple, jax.Array]:
        def one(token: jax.Array, position: jax.Array, cache: Any, key: jax.Array) -> tuple[jax.Array, Any]:
            logits_TV, cache = _extend(model, params, token[None], position[None], cache, slot + i)
            return _draw(logits_TV[0], jax.random.fold_in(key, made + i), sampling), cache

        token_B, cache = carry
        token_B, cache = jax.vmap(one)(token_B, position_B + i, cache, keys_B)
        return (token_B, cache), token_B

    (_, cache), tokens_CB = jax.lax.scan(step, (token_B, cache), jnp.arange(CHUNK))
    return tokens_CB.T, cache


def _extend(model: Any, params: Params, *args: Any) -> tuple[jax.Array, Any]:
    return model.apply({"params": params}, *args, method="extend")


def _with_window(
    model: Any, params: Params, rows: list[list[int]], keys_B: jax.Array, made: int, max_new_tokens: int,
    sampling: Sampling, context_length: int, fill_token: int,
) -> Iterator[np.ndarray]:  # fmt: skip
    """`CHUNK` tokens by full passes over the last `context_length` tokens, filled up on the left."""
    window_BT = np.full((len(rows), context_length), fill_token, np.int32)
    for i, row in enumerate(rows):
        last = row[-context_length:]
        window_BT[i, -len(last) :] = last
    yield np.asarray(_decode_window(model, sampling, params, window_BT, keys_B, made))


@partial(jax.jit, static_argnums=(0, 1))
def _decode_window(
    model: Any, sampling: Sampling, params: Params, window_BT: jax.Array, keys_B: jax.Array, made: jax.Array
) -> jax.Array:
    """`CHUNK` new tokens of each row, `(B, CHUNK)`."""

    def one(window_T: jax.Array, key: jax.Array) -> jax.Array:
        def step(window_T: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits_V = model.apply({"params": params}, window_T)[-1]
            token = _draw(logits_V, jax.random.fold_in(key, made + i), sampling)
            return jnp.append(window_T[1:], token), token

        return jax.lax.scan(step, window_T, jnp.arange(CHUNK))[1]

    return jax.vmap(one)(window_BT, keys_B)


def _draw(logits_V: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """A token, by samplers that need no history."""
    return sample(logits_V, begin(sampling, logits_V.shape[-1], jnp.zeros(1, jnp.int32), 0), key, sampling).token


def _bucket(n: int) -> int:
    """The power of two from n up, so that few programs are compiled."""
    return 1 << (n - 1).bit_length()
