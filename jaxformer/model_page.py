"""Page of a trained model: attention, residual stream, head ablation, gradients, and the log of its training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.contract import Task, contract_of
from jaxformer.data.dataset import Batch
from jaxformer.decode import translate_tokens
from jaxformer.decode.fill_mask import MASK, encode_masked
from jaxformer.decode.prompts import Prompt
from jaxformer.decode.translation import encode_source
from jaxformer.errors import UserError
from jaxformer.inspect import capture_shapes, model_sections
from jaxformer.inspect.live import live_section
from jaxformer.inspect.page import Section, write_page
from jaxformer.inspect.training_sections import training_sections
from jaxformer.models.objective import is_causal_lm
from jaxformer.runs import Run, count_parameters, load_data
from jaxformer.train.log import read_metrics, read_samples

MAX_ATTENTION_WEIGHTS = 600_000
"""Attention weights on a page, in 4 bytes per 3, so that it stays below 1 MB."""
MAX_HELD_OUT_TOKENS = 128
"""Tokens of a held-out text on a page."""
N_LIVE_TOKENS = 24
"""Tokens of a held-out text that the section with the model begins with."""
END = "∅"
"""Symbol of the end-of-text token."""
SYMBOLS = str.maketrans({"\n": "⏎", "\r": "␍", "\t": "⇥"})
DEFAULT_TARGETS, MAX_DEFAULT_EXAMPLES = 1000, 256
"""Targets, and most examples, that heads are measured on by default."""


def write_model_page(
    run: Run, path: Path, prompt: str | None = None, n_examples: int | None = None, max_live_parameters: int = 0
) -> None:
    """Write the page of a run with a checkpoint to an HTML file, with a prompt in place of a held-out text, and heads
    and gradients measured on `n_examples` held-out examples. A causal decoder of at most `max_live_parameters`
    parameters runs in the page; 0 for no such section. Raises `UserError` if the prompt does not suit the model or the
    page, or there is neither data nor a prompt."""
    batch, reason = _held_out(run, n_examples)
    example = _example(run, prompt, batch)
    facts = [f"{type(run.model).__name__} of {count_parameters(run.params):,} parameters, at step {run.step:,}."]
    sections: list[Section] = []
    token_text = lambda token: _token_text(run, token)  # noqa: E731
    if example is not None:
        if max_live_parameters and is_causal_lm(run.model):
            text_T = example[0] if prompt else example[0][:N_LIVE_TOKENS]
            try:
                tokenizer = run.text_model()[1]
                sections.append(live_section(run.model, run.params, tokenizer, text_T, max_live_parameters))
            except UserError as error:
                facts.append(f"The model does not run in this page: {error}")
        mask = run.text_model()[0].vocab_size - 1 if contract_of(run.model).task is Task.MASKED_LM else None
        sections.append(model_sections.attention_section(run.model, run.params, example, token_text, mask))
        sections += model_sections.residual_stream_sections(run.model, run.params, example, token_text)
    if batch is None and example is not None:
        batch = _as_batch(run, example)
    if batch is not None:
        measured = model_sections.head_sections(run.model, run.params, batch)
        measured += model_sections.saturation_sections(run.model, run.params, batch)
        names = token_text if run.tokenizer else None
        measured += model_sections.gradient_sections(run.model, run.params, batch, names)
        if measured:
            data = "the prompt alone" if reason else f"held-out data: {len(batch.inputs[0]):,} examples"
            facts.append(f"Heads and gradients are measured on {data}.")
        sections += measured
    if reason:
        facts.append(f"The data of the run cannot be read: {reason}")
    sections += training_sections(read_metrics(run.path), read_samples(run.path))
    write_page(path.resolve(), f"{run.path.resolve().name}: inside", facts, sections)


def _token_text(run: Run, token: int) -> str:
    """Return a token's text; of one that the tokenizer lacks, the mask as in prompts, or its number."""
    tokenizer = run.text_model()[1]
    if token >= tokenizer.vocab_size:
        return MASK if contract_of(run.model).task is Task.MASKED_LM else f"[{token}]"
    if token == tokenizer.end_of_text:
        return END
    return tokenizer.decode([token]).translate(SYMBOLS)


def _held_out(run: Run, n: int | None) -> tuple[Batch | None, str]:
    """Return held-out examples of the run's data and "", or None and the reason why it cannot be read."""
    try:
        data = load_data(run.path, run.config)
    except UserError as error:
        return None, str(error)
    if n is None:
        n_targets = np.size(next(data.held_out(1, 1)).targets)
        n = min(MAX_DEFAULT_EXAMPLES, -(-DEFAULT_TARGETS // n_targets))
    batch = next(data.held_out(n, n))
    if batch.weights is None:
        return batch, ""
    has_targets = np.flatnonzero(batch.weights.reshape(len(batch.weights), -1).any(axis=1))  # the others fill it up
    return jax.tree.map(lambda x: x[has_targets], batch), ""


def _example(run: Run, prompt: str | None, batch: Batch | None) -> tuple[Any, ...] | None:
    """Return the inputs of the prompt or of a held-out example, without padding; None for a model without texts, or of
    full windows; `UserError` if the prompt does not suit the run's model, or the page."""
    if prompt is not None:
        run.text_model()  # raises for a model of images
    if run.tokenizer is None or contract_of(run.model).task is Task.CONTRASTIVE:
        return None
    if contract_of(run.model).fixed_length:
        if prompt is None:
            return None
        raise UserError("the run's model reads full windows only, of which a page shows nothing; leave --prompt out.")
    if prompt is not None:
        example = _encode(run, Prompt(prompt, "--prompt"))
    elif batch is not None:
        example = _first_unpadded(batch, MAX_HELD_OUT_TOKENS)
    else:
        raise UserError("the run's data is not here to take a text from; give one with --prompt.")
    maps = capture_shapes(run.model, run.params, *example, names=model_sections.MAPS, missing_ok=True)
    n_weights = sum(x.size for x in maps.values())
    if n_weights <= MAX_ATTENTION_WEIGHTS:
        return example
    n_tokens = max(len(x) for x in example if jnp.ndim(x))
    max_tokens = int(n_tokens * (MAX_ATTENTION_WEIGHTS / n_weights) ** 0.5)
    if prompt is None:
        assert batch is not None
        return _first_unpadded(batch, max_tokens)
    remedy = f"a page holds at most {MAX_ATTENTION_WEIGHTS:,}: shorten it to about {max_tokens} tokens"
    raise UserError(f"--prompt has {n_tokens} tokens, and so the model {n_weights:,} attention weights; {remedy}.")


def _encode(run: Run, prompt: Prompt) -> tuple[Any, ...]:
    """Return a prompt as the model's inputs; for a sequence-to-sequence model, with its translation."""
    config, tokenizer = run.text_model()
    contract = contract_of(run.model)
    if contract.task is Task.MASKED_LM:
        tokens = encode_masked(prompt, run)
        return jnp.array(tokens), jnp.ones(len(tokens), bool)
    if contract.task is Task.SEQUENCE_TO_SEQUENCE:
        source, end, limit = encode_source(prompt, run), tokenizer.end_of_text, config.context_length
        [target] = translate_tokens(run.model, run.params, [source], end_of_text=end, context_length=limit)
        return jnp.array(source), jnp.ones(len(source), bool), jnp.array([end, *target][:limit])
    tokens = tokenizer.encode_prompt(prompt.text)
    prompt.check_length(len(tokens), config.context_length, f"the context's {config.context_length}")
    # The first half of the text is the prefix, from which the other half is predicted.
    prefix = (jnp.int32(len(tokens) // 2),) if contract.has_prefix else ()
    return jnp.array(tokens), *prefix


def _first_unpadded(batch: Batch, max_tokens: int) -> tuple[Any, ...]:
    """Return the inputs of a batch's first example without padding, of at most `max_tokens` tokens each."""
    example = jax.tree.map(lambda x: jnp.asarray(x[0]), batch)
    first, *rest = example.inputs
    if rest and rest[0] is None:  # the first of the packed documents
        return (first[rest[1] == 1][:max_tokens],)
    if rest and rest[0].dtype == bool:
        first, rest[0] = first[rest[0]], rest[0][rest[0]]
    if len(rest) == 2:  # the target of a sequence-to-sequence model
        rest[1] = rest[1][example.weights > 0]
    return tuple(x[:max_tokens] if x.ndim else jnp.minimum(x, max_tokens // 2) for x in (first, *rest))


def _as_batch(run: Run, example: tuple[Any, ...]) -> Batch | None:
    """Return a prompt as a batch of one example; None for another task than a causal language model's."""
    if not is_causal_lm(run.model) or len(example) > 1 or len(example[0]) < 2:
        return None
    tokens_T = example[0]
    return Batch((tokens_T[None, :-1],), tokens_T[None, 1:])
