"""Continuations of prompts, as samples of what a model has learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import flax.linen as nn
import numpy as np

from jaxformer.config import TokenModelConfig
from jaxformer.data.dataset import evenly_spaced
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.decode.generation import generate_tokens
from jaxformer.decode.samplers import Sampling
from jaxformer.models.objective import Params
from jaxformer.runs.run import Run

N_PROMPTS, PROMPT_TOKENS = 3, 12


def continuations(
    config: TokenModelConfig,
    model: nn.Module,
    params: Params,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    max_new_tokens: int,
    temperatures: Sequence[float] = (0.5, 0.0),
) -> Iterator[tuple[float, int, list[int], list[int]]]:
    """Yield the continuations of prompts, given as tokens, at each temperature, the last by default greedy:
    temperature, index of the prompt, its tokens, and the new tokens."""
    encoded = [list(prompt[-config.n_positions :]) for prompt in prompts]
    n_tokens = tokenizer.vocab_size if tokenizer.vocab_size < config.vocab_size else None
    for temperature in temperatures:
        batches = generate_tokens(
            model,
            params,
            encoded,
            Sampling(temperature, n_tokens=n_tokens),
            seeds,
            max_new_tokens=max_new_tokens,
            context_length=config.n_positions,
            fill_token=tokenizer.end_of_text,
        )
        new_BN = np.concatenate([samples.tokens for samples in batches], axis=1).tolist()
        for i, (prompt, new) in enumerate(zip(encoded, new_BN, strict=True)):
            yield temperature, i, prompt, new


def validation_prompts(run: Run) -> list[str]:
    """Return prompts of a few words each, from evenly spaced positions of a run's held-out text."""
    (model, tokenizer), config = run.text_model(), run.config
    tokens = config.data.load(model, config.train.batch_size, config.seed, tokenizer).corpus.val.tokens
    starts = evenly_spaced(max(1, len(tokens) - PROMPT_TOKENS), N_PROMPTS)
    parts = (tokens[start : start + PROMPT_TOKENS].tolist() for start in starts.tolist())
    texts = [tokenizer.decode(part).strip("\ufffd") for part in parts]  # bytes of truncated characters
    return [" ".join(text.split()[1:]) or text for text in texts]  # the first word may be truncated
