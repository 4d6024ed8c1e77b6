"""Make texts of other texts with any sequence-to-sequence model.

A model offers three methods (see `models.encoder_decoder.EncoderDecoder`), each on one example: `start(source_S,
valid_S, n_slots, dtype)`, the source read, and `extend` and `unembed` as `decode.generate` has them for the target,
which begins with the end-of-text token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.data.tokenizer import Tokenizer
from jaxformer.decode.beam import search
from jaxformer.decode.generate import left_aligned, placement, prompt_bucket
from jaxformer.decode.programs import call
from jaxformer.decode.streaming import batches
from jaxformer.errors import UserError
from jaxformer.models.objective import Params
from jaxformer.ops.masks import EMPTY


def translate(
    model: nn.Module, params: Params, tokenizer: Tokenizer, texts: Sequence[str], *, context_length: int, **how: Any
) -> list[str]:
    """What a model makes of each text.

    Args:
      how: see `translate_tokens`.

    Raises:
      UserError: a text is empty or has more than `context_length` tokens, or see `translate_tokens`.
    """
    sources = tokenizer.encode_batch(texts)
    for number, source in enumerate(sources, start=1):
        which = f"text {number}" if len(sources) > 1 else "the text"
        if not 1 <= len(source) <= context_length:
            raise UserError(
                f"{which} has {len(source)} tokens; it must have at least 1 and at most the context's {context_length}."
            )
    end = tokenizer.end_of_text
    targets = translate_tokens(model, params, sources, end_of_text=end, context_length=context_length, **how)
    return [tokenizer.decode(target) for target in targets]


def translate_tokens(
    model: nn.Module,
    params: Params,
    sources: Sequence[Sequence[int]],
    *,
    end_of_text: int,
    context_length: int,
    max_new_tokens: int | None = None,
    n_beams: int = 1,
    length_penalty: float = 1.0,
    batch_size: int = 64,
    cache_dtype: Any = jnp.float32,
) -> list[list[int]]:
    """The target that a model makes of each source, without its end.

    Args:
      sources: tokens of each, 1 to `context_length` of them.
      end_of_text: what a target begins and ends with.
      max_new_tokens: where a target ends at the latest, its end counted; without it, with the context.
      n_beams: 1 takes the likeliest token at each step; more keep so many beginnings, and give the best target.
      length_penalty: of several beams, see `decode.beam`.
      batch_size: sources at once; it changes the speed, and the targets but for rounding not.
      cache_dtype: what is kept of sources and targets in.

    Raises:
      UserError: a number is out of range.
    """
    most = context_length if max_new_tokens is None else max_new_tokens
    for name, value, limit in (
        ("max_new_tokens", most, context_length), ("n_beams", n_beams, None), ("batch_size", batch_size, None)
    ):  # fmt: skip
        if value < 1 or (limit is not None and value > limit):
            at_most = "" if limit is None else f" and at most the context's {limit}"
            raise UserError(f"{name} is {value}; it must be at least 1{at_most}.")
    if not np.isfinite(length_penalty):
        raise UserError(f"length_penalty is {length_penalty}; it must be finite: 1 takes the mean a token.")
    decode = partial(
        _greedy if n_beams == 1 else partial(_beam, length_penalty=np.float32(length_penalty), n_beams=n_beams),
        model, params, end=end_of_text, most=most, dtype=jnp.dtype(cache_dtype),
    )  # fmt: skip
    found: dict[int, list[int]] = {}
    size, place = min(batch_size, len(sources)), placement(params)
    for batch in batches([len(source) for source in sources], batch_size):
        # The last batch is filled up, so that no program is compiled for it alone.
        rows = [list(sources[i]) for i in np.resize(batch, size)]
        lengths_B = np.array([len(row) for row in rows])
        S = min(prompt_bucket(int(lengths_B.max())), context_length)
        targets_BT = decode(place(left_aligned(rows, S)), place(np.arange(S) < lengths_B[:, None]))
        for i, target_T in zip(batch, np.asarray(targets_BT), strict=False):
            ended = np.isin(target_T, (end_of_text, EMPTY))
            found[i] = target_T[: ended.argmax() if ended.any() else most].tolist()
    return [found[i] for i in range(len(sources))]


@partial(jax.jit, static_argnames=("model", "end", "most", "dtype"))
def _greedy(
    model: nn.Module, params: Params, source_BS: jax.Array, valid_BS: jax.Array, *, end: int, most: int, dtype: Any
) -> jax.Array:
    """The likeliest token at each step, `(B, most)`, `EMPTY` after the end."""
    advance, cache = _begin(model, params, source_BS, valid_BS, most, dtype)
    B = len(source_BS)

    def more(carry: tuple) -> jax.Array:
        i, _, done_B, *_ = carry
        return (i < most) & ~done_B.all()

    def step(carry: tuple) -> tuple:
        i, last_B, done_B, target_BT, cache = carry
        logits_BV, cache = advance(i, last_B, cache)
        token_B = jnp.where(done_B, EMPTY, logits_BV.argmax(axis=-1).astype(jnp.int32))
        target_BT = jax.lax.dynamic_update_index_in_dim(target_BT, token_B, i, axis=1)
        return i + 1, token_B, done_B | (token_B == end), target_BT, cache

    nothing_BT = jnp.full((B, most), EMPTY, jnp.int32)
    begun = jnp.int32(0), jnp.full(B, end, jnp.int32), jnp.zeros(B, bool), nothing_BT, cache
    return jax.lax.while_loop(more, step, begun)[3]


@partial(jax.jit, static_argnames=("model", "n_beams", "end", "most", "dtype"))
def _beam(
    model: nn.Module, params: Params, source_BS: jax.Array, valid_BS: jax.Array, *, length_penalty: jax.Array,
    n_beams: int, end: int, most: int, dtype: Any,
) -> jax.Array:  # fmt: skip
    """The best target that a search finds, `(B, most)`, `EMPTY` after the end."""
    advance, cache = _begin(model, params, source_BS, valid_BS, most, dtype)
    logits_BV, cache = advance(jnp.int32(0), jnp.full(len(source_BS), end, jnp.int32), cache)
    found = search(
        lambda i, tokens_R, cache: advance(i + 1, tokens_R, cache), cache, logits_BV, length_penalty, n_beams=n_beams,
        max_new_tokens=most, stop_tokens=(end,),
    )  # fmt: skip
    return found.tokens_PNT[:, 0]


def _begin(
    model: nn.Module, params: Params, source_BS: jax.Array, valid_BS: jax.Array, n_slots: int, dtype: Any
) -> tuple[Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any]], Any]:
    """A step, from the i-th token of each target to the logits `(B, V)` of the next and the longer cache; and the cache
    of the sources."""

    def advance(i: jax.Array, token_B: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        def one(token: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
            x_1D, cache = call(model, params, "extend", token[None], i[None], cache, i)
            return call(model, params, "unembed", x_1D[0]), cache

        return jax.vmap(one)(token_B, cache)

    def start(source_S: jax.Array, valid_S: jax.Array) -> Any:
        return call(model, params, "start", source_S, valid_S, n_slots, dtype)

    return advance, jax.vmap(start)(source_BS, valid_BS)
