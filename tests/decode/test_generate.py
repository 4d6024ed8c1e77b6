from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import ModelConfig
from jaxformer.decode import Sampling, generate
from jaxformer.errors import UserError
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.mlp import MLPConfig
from jaxformer.models.objective import Params
from tests.arrays import build

V, CONTEXT = 23, 11
GREEDY, RANDOM = Sampling(0), Sampling(1.5, top_k=13)
DECODER = DecoderConfig(
    V, CONTEXT, d_model=12, n_blocks=2, n_heads=3, n_kv_heads=1, output_projection=True, d_ff=(17,), norm="rmsnorm",
    positions="rope", window=7,
)  # fmt: skip
LEARNED = replace(DECODER, n_blocks=1, positions="learned", window=None)
MLP = MLPConfig(V, CONTEXT, d_model=5, d_ff=(13,), concatenate=True)
PROMPTS = [[3], [5, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3], [2, 7]]
BEYOND = 23
"""New tokens that take every row past the context more than once."""

Model = tuple[nn.Module, Params]


@pytest.fixture(scope="module")
def decoder() -> Model:
    return build(LEARNED)


def begin(model: Model, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling = GREEDY, **kwargs: Any) -> Any:
    """`generate` with seeds 0, 1, …"""
    seeds = range(len(prompts) * kwargs.get("n_samples", 1))
    given = {"seeds": seeds, "max_new_tokens": n, "context_length": CONTEXT, "prefill_chunk": 8} | kwargs
    return generate(*model, prompts, sampling, **given)


def run(model: Model, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling = GREEDY, **kwargs: Any) -> list:
    """All new tokens, a list a row."""
    pieces = begin(model, prompts, n, sampling, **kwargs)
    return np.concatenate([piece.tokens_BN for piece in pieces], axis=1).tolist()


def naive(model: Model, prompt: Sequence[int], n: int) -> list[int]:
    """Full passes, padded on the right to one shape; a row longer than the context goes on from its last half,
    if positions end there."""
    forward = jax.jit(lambda tokens_T: model[0].apply({"params": model[1]}, tokens_T))
    ends = model[0].config.positions == "learned"
    row, made = list(prompt), []
    for _ in range(n):
        if ends and len(row) > CONTEXT:
            row = row[-(CONTEXT // 2) :]
        logits_TV = forward(jnp.array(row + [0] * ((CONTEXT if ends else CONTEXT + BEYOND) - len(row))))
        made.append(int(logits_TV[len(row) - 1].argmax()))
        row.append(made[-1])
    return made


@pytest.mark.parametrize("config", [DECODER, LEARNED], ids=["rope and window", "learned"])
def test_greedy_equals_full_passes_also_past_the_context(config: ModelConfig) -> None:
    model = build(config)
    made = run(model, PROMPTS, BEYOND)
    assert made == [naive(model, prompt, BEYOND) for prompt in PROMPTS]
    assert len({tuple(row) for row in made}) > 1


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_the_first_row_is_the_same_alone_and_in_a_batch(decoder: Model, sampling: Sampling) -> None:
    batch = PROMPTS[1:]
    assert run(decoder, batch, BEYOND, sampling)[0] == run(decoder, batch[:1], BEYOND, sampling)[0]


def test_the_seed_decides_and_rows_draw_apart(decoder: Model) -> None:
    same = [PROMPTS[1]] * 3
    first, again, other = (run(decoder, same, 17, RANDOM, seeds=seeds) for seeds in ([0, 1, 2], [0, 1, 2], [3, 4, 5]))
    assert first == again
    assert first != other
    assert first[0] != first[1] != first[2]


@pytest.mark.parametrize("n", [1, 2, 17, 18])  # one token of the prefill and a chunk of 16
def test_exactly_as_many_tokens_as_asked_for(decoder: Model, n: int) -> None:
    made = run(decoder, PROMPTS[:2], n)
    assert [len(row) for row in made] == [n, n]
    assert all(0 <= token < V for row in made for token in row)


def test_tokens_come_in_portions(decoder: Model) -> None:
    parts = [piece.tokens_BN for piece in begin(decoder, PROMPTS[:1], 30)]
    assert all(part.shape[0] == 1 and 1 <= part.shape[1] <= 16 and part.dtype == np.int32 for part in parts)
    assert parts[0].shape[1] == 1  # the first token does not wait for more


def test_what_fills_the_prompts_up_does_not_matter_with_a_cache(decoder: Model) -> None:
    zero, other = (run(decoder, PROMPTS, 17, RANDOM, fill_token=fill) for fill in (0, 22))
    assert zero == other


@pytest.mark.parametrize("n", [7, BEYOND])
def test_a_model_without_a_cache_slides_a_window_over_its_last_tokens(n: int) -> None:
    model, params = build(MLP)
    forward = jax.jit(lambda tokens_T: model.apply({"params": params}, tokens_T)[-1])
    wanted = []
    for prompt in PROMPTS:
        row = [0] * CONTEXT + list(prompt)
        for _ in range(n):
            row.append(int(forward(jnp.array(row[-CONTEXT:])).argmax()))
        wanted.append(row[-n:])
    assert run((model, params), PROMPTS, n) == wanted


@pytest.mark.parametrize(
    ("prompts", "n", "said"),
    [
        ([[]], 3, "the prompt has 0 tokens"),
        ([[1], [0] * 12], 3, "prompt 2 has 12 tokens.*11"),
        ([[1]], 0, "max_new_tokens is 0"),
        ([[1]], -1, "max_new_tokens is -1"),
    ],
    ids=["empty", "too long", "no tokens", "negative"],
)
def test_what_cannot_be_continued_is_refused(decoder: Model, prompts: list, n: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        run(decoder, prompts, n)
