"""The cost of context: generation with and without a KV cache, and attention with and without stored scores."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.attention import with_jax
from benchmarks.decoding import prompts
from benchmarks.harness import Figures
from jaxformer.cli import machine
from jaxformer.decode.generation import generate_tokens
from jaxformer.decode.samplers import Sampling
from jaxformer.models.decoder import Decoder, DecoderConfig
from jaxformer.ops.masks import Causal
from jaxformer.train.kernels import Name, make_attention

ROWS = 32
"""Rows by which the padded text grows without a cache: a program is compiled for each length, and computes up to this
many rows more than the text has."""

FIELDS: dict[str, Any] = {"activation": "relu", "bias": True}
"""Fields in which the model differs from the default."""


def drawn(shape: dict[str, Any]) -> tuple[Decoder, Any]:
    """Return a decoder with RMSNorm and RoPE, and its parameters at initialisation."""
    shape |= {"d_ff": tuple(shape["d_ff"])}
    config = DecoderConfig(**shape, **FIELDS)
    model = config.build()
    return model, jax.jit(model.init)(jax.random.key(0), *config.example())["params"]


def with_cache(folder: Path, shape: dict[str, Any], prompt: int, new: int) -> tuple[Any, Figures]:
    """Continue a prompt as `sample.py` does; a step generates the whole text."""
    machine.set_up()
    model, params = drawn(shape)
    prompt_P = prompts(1, prompt, model.config.vocab_size)[0].tolist()

    def run() -> list[int]:
        pieces = generate_tokens(
            model, params, [prompt_P], Sampling(temperature=0), [0], max_new_tokens=new,
            context_length=model.config.context_length,
        )  # fmt: skip
        return [token for piece in pieces for token in piece.tokens[0].tolist()]

    return lambda _: run()[-1], {"_tokens": run()}


def without_cache(folder: Path, shape: dict[str, Any], prompt: int, new: int) -> tuple[Any, Figures]:
    """Continue the prompt with one full pass over the text so far per token."""
    machine.set_up()
    model, params = drawn(shape)

    @jax.jit
    def complete(params: Any, tokens_T: jax.Array, first: int, end: int) -> jax.Array:
        def add_token(t: int, tokens_T: jax.Array) -> jax.Array:
            x_TD = model.apply({"params": params}, tokens_T, method="features")  # causal: later tokens have no effect
            logits_V: Any = model.apply({"params": params}, x_TD[t - 1], method="unembed")
            return tokens_T.at[t].set(logits_V.argmax())

        return jax.lax.fori_loop(first, end, add_token, tokens_T)

    def run() -> jax.Array:
        tokens_T = jnp.asarray(prompts(1, prompt, model.config.vocab_size)[0])
        for first in range(prompt, prompt + new, ROWS):
            end = min(first + ROWS, prompt + new)
            tokens_T = complete(params, jnp.pad(tokens_T, (0, end - first)), first, end)
        return tokens_T

    return lambda _: run()[-1], {"_tokens": np.asarray(run())[prompt:].tolist()}


def attend(folder: Path, implementation: Name, B: int, H: int, T: int, K: int) -> tuple[Any, Figures]:
    """Attend causally, forward and backward, with an implementation of `train.kernels`."""
    machine.set_up(B)
    q_HTK = jax.ShapeDtypeStruct((H, T, K), jnp.float32)
    attention, _ = make_attention(implementation, jax.default_backend(), q_HTK, q_HTK, Causal())
    attend_BHTK = jax.vmap(partial(attention, mask=Causal(), scale=K**-0.5))
    step, values, n_bytes = with_jax(attend_BHTK, jnp.float32, B, H, T, K)
    return step, {"values": values, "memory_bytes": n_bytes}
