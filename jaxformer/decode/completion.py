"""Completion of prompts by a run of a causal language model: sampling, beam search or speculative decoding."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any, Literal

import jax

from jaxformer.config.fields import Positive, Range, Seed, Size, check_fields
from jaxformer.contract import contract_of
from jaxformer.data.chat import check_texts
from jaxformer.data.chat_template import ChatTemplate, encode_rendered
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.decode.beam import beam_search
from jaxformer.decode.generation import Generation, generate, spread_rows
from jaxformer.decode.prompts import Prompt, sample_seeds
from jaxformer.decode.samplers import Sampling
from jaxformer.decode.speculative import MAX_DRAFT_TOKENS, Draft, DraftModel, PromptLookup, Speculation, speculate
from jaxformer.decode.streaming import BeamGeneration, GeneratedText, Throughput, batch_by_length, stream_texts
from jaxformer.errors import UserError, lone_surrogate
from jaxformer.models.objective import Params, is_causal_lm

if TYPE_CHECKING:
    from jaxformer.runs.run import Run

Explain = Callable[[list[int], list[int]], list[dict[str, Any]]]
"""Function from the tokens of a prompt and of its completion to one row per token that can be explained."""


@dataclass(frozen=True)
class CompletionOptions:
    """Number, length and search of completions; `Sampling` has the options for a single token."""

    max_new_tokens: Positive = 200
    """Maximum new tokens per completion."""
    chat: bool = False
    """Chat mode: each prompt is a user message, formatted with the chat template of the run's tokenizer."""
    num_samples: Positive = 1
    """Completions per prompt; completion k, from 0, uses the seed --seed + k, or is the k-th best beam."""
    seed: Seed = 0
    """Random seed for sampling; equal seeds give equal texts."""
    batch_size: Size = 16
    """Completions per batch; those of one prompt stay together."""
    bad_words: tuple[str, ...] = ()
    """Texts never to generate, as the run's tokenizer encodes them with and without a leading space."""
    logit_bias: tuple[str, ...] = ()
    """TEXT=BIAS, where the text is one token; the bias is added to its logit."""
    stop: tuple[str, ...] = ()
    """Stop strings, which end a text and are not shown."""
    num_beams: Positive = 1
    """Beams of a beam search for the most likely text; 1 samples instead. Ctrl-C takes effect when the search is
    done."""
    length_penalty: float = 1.0
    """Exponent of the length in the beam-search score: above 0 favours long texts, below 0 short ones."""
    draft: str | None = None
    """Draft for speculative decoding: a smaller run with the same tokenizer, or 'lookup' for prompt lookup. It proposes
    several tokens, which the model verifies in one pass. The distribution of the text does not change; greedy decoding
    gives the same text. Decodes one text at a time."""
    draft_tokens: Annotated[int, Range(least=1, most=MAX_DRAFT_TOKENS)] = 4
    """Tokens that --draft proposes at a time."""
    cache_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Dtype of the model's KV cache; a draft's is float32."""
    prefill_chunk: Positive = 512
    """Prompt tokens per prefill pass."""

    def __post_init__(self) -> None:
        check_fields(self)

    def prompts_per_batch(self, n_prompts: int) -> int:
        """Return the number of prompts per batch, of n in all."""
        return max(1, min(n_prompts, self.batch_size // max(self.num_samples, self.num_beams)))

    def rows_per_batch(self, n_prompts: int) -> int:
        """Return the number of rows that are decoded together for n prompts; 1 with beam search or a draft, which
        decode in other ways."""
        if self.num_beams > 1 or self.draft is not None:
            return 1
        return self.prompts_per_batch(n_prompts) * self.num_samples


@dataclass
class Completion:
    """A generated text, with its prompt."""

    prompt: Prompt
    sample: int
    """Index among the prompt's samples."""
    seed: int
    text: GeneratedText
    score: float | None = None
    """Beam-search score; None without a beam search."""
    explained: list[dict[str, Any]] | None = None
    """One row per token that can be explained; None without explanations."""

    def as_row(self) -> dict[str, Any]:
        """Return the completion as a JSON object."""
        text, score = self.text, self.score
        return {
            "line": self.prompt.line, "id": self.prompt.id, "prompt": self.prompt.text, "sample": self.sample,
            "seed": self.seed, "text": text.text, "ended": text.finish_reason, "tokens": text.tokens,
            **({"logprobs": [json_float(x) for x in text.logprobs]} if score is None else {"score": json_float(score)}),
            **({"top_logprobs": [[(t, json_float(x)) for t, x in likeliest] for likeliest in text.top_logprobs]}
               if any(text.top_logprobs) else {}),
            **({} if self.explained is None else {"explained": self.explained}),
            "first_token_s": round(text.first_token_seconds, 6), "seconds": round(text.seconds, 6),
        }  # fmt: skip


def json_float(value: float) -> float | None:
    """Return a float32 value rounded to seven digits; None for infinity and NaN, which JSON lacks."""
    return float(f"{value:.7g}") if isfinite(value) else None


class Completer:
    """Prompt completion by a run of a causal language model; `throughput` has the time to the first token and the
    tokens per second so far."""

    def __init__(
        self, run: Run, options: CompletionOptions, sampling: Sampling, draft: Run | None = None,
        explain: Explain | None = None,
    ) -> None:  # fmt: skip
        """Check the options against the run. `draft` is the run that `options.draft` names, None for 'lookup'.

        Raises:
          UserError: the run's model is not a causal language model, an option does not fit the run, or the draft has
            another tokenizer or no cache.
        """
        self._run, self._options, self._explain = run, options, explain
        self._params, self._spread_for = run.params, 1
        self._config, self._tokenizer = run.text_model()
        if not is_causal_lm(run.model):
            remedy = "name a run that does"
            raise UserError(f"{run.path} holds a {type(run.model).__name__}, which does not generate text; {remedy}.")
        n_tokens = self._tokenizer.vocab_size
        sampling.check_vocabulary(n_tokens)
        self._sampling = sampling if n_tokens >= self._config.vocab_size else replace(sampling, n_tokens=n_tokens)
        check_stop_strings(options.stop, self._tokenizer, options.max_new_tokens)
        self._draft: tuple[Draft, Params] | None = None
        if options.draft == "lookup":
            self._draft = PromptLookup(self._config.vocab_size), None
        elif draft is not None:
            self._draft = self._check_draft(draft), draft.params
        limited = [run, *([draft] if draft else [])] if options.num_beams > 1 or options.draft is not None else []
        ends = (r.text_model()[0].n_positions for r in limited if not contract_of(r.model).extrapolates)
        self._context_ends = list(ends)
        self.throughput = Throughput()

    def _check_draft(self, draft: Run) -> Draft:
        config, tokenizer = draft.text_model()
        if tokenizer.as_json() != self._tokenizer.as_json():
            remedy = "use one trained on its text"
            raise UserError(f"the draft {draft.path} has a different tokenizer than {self._run.path}; {remedy}.")
        if not contract_of(draft.model).has_cache:
            raise UserError(f"the draft {draft.path} has a model without a cache; use another, or 'lookup'.")
        return DraftModel(draft.model, config.n_positions)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt. Raises `UserError` if there are too many, or the prompt has a seed for a beam
        search."""
        if self._options.num_beams > 1:
            prompt.check_no_seed("beam search does not sample")
        limit = self._config.n_positions
        name = f"the context's {limit}"
        for end in self._context_ends:
            room = max(0, end - (self._options.max_new_tokens - 1))  # the last one is never fed back
            if room < limit:
                method = "a draft" if self._draft else "beam search"
                limit, name = room, f"{room}, as {method} cannot exceed the context's {end}; lower --max-new-tokens"
        tokens = (self._encode_message if self._options.chat else self._tokenizer.encode_prompt)(prompt.text)
        prompt.check_length(len(tokens), limit, name)
        return tokens

    def _encode_message(self, text: str) -> list[int]:
        """Return the tokens of a one-message conversation, up to the start of the answer."""
        messages = [{"role": "user", "content": text}]
        label = "the conversation,"
        check_texts(messages, label, self._tokenizer.special_texts.values())
        template = self._template
        try:
            rendered = template.render(messages, add_generation_prompt=True)
        except UserError as error:
            raise UserError(f"{error}; omit --chat, or train with another template.") from error
        ((tokens, _),) = encode_rendered([rendered], [label], self._tokenizer)
        return tokens

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate.of_tokenizer(self._tokenizer)

    def complete(
        self, prompts: Sequence[tuple[Prompt, list[int]]], interrupted: Callable[[], bool],
        show: Callable[[str], None] = lambda new: None,
    ) -> Iterator[tuple[int, list[Completion]]]:  # fmt: skip
        """Yield each prompt's index and its completions, batch by batch; stop after the current batch if interrupted.

        Args:
          prompts: each with its tokens.
          show: called with each new piece of a batch's first text.

        Raises:
          UserError: a batch does not fit into memory.
        """
        n, size = self._options.num_samples, self._options.prompts_per_batch(len(prompts))
        n_rows = self._options.rows_per_batch(len(prompts))
        if n_rows != self._spread_for:
            with fitting_memory(n_rows):
                self._params, self._spread_for = spread_rows(self._run.params, n_rows), n_rows
        for batch in batch_by_length([len(tokens) for _, tokens in prompts], size):
            with fitting_memory(len(batch) * n):
                completions = self._complete_batch([prompts[i] for i in batch], size, interrupted, show)
            for number, i in enumerate(batch):
                yield i, completions[number * n : (number + 1) * n]
            if interrupted():
                break

    def _complete_batch(
        self, prompts: list[tuple[Prompt, list[int]]], n_prompts: int, interrupted: Callable[[], bool],
        show: Callable[[str], None],
    ) -> list[Completion]:  # fmt: skip
        """Complete a batch, padded to `n_prompts` with its last prompt so that a smaller batch compiles no program."""
        options, n_samples = self._options, self._options.num_samples
        padded = prompts + prompts[-1:] * (n_prompts - len(prompts))
        completions = [
            Completion(prompt, sample, seed, GeneratedText(self._tokenizer, options.stop))
            for prompt, _ in padded
            for sample, seed in enumerate(sample_seeds(options.seed if prompt.seed is None else prompt.seed, n_samples))
        ]
        generation = self._begin([tokens for _, tokens in padded], [completion.seed for completion in completions])
        for row in range(len(prompts) * n_samples, len(completions)):
            generation.end(row)
        del completions[len(prompts) * n_samples :]
        texts, stop_tokens = [completion.text for completion in completions], self._sampling.stop_tokens
        for new in stream_texts(generation, texts, stop_tokens, options.max_new_tokens, self.throughput, interrupted):
            show(new)
        if isinstance(generation, Speculation):
            self.throughput.verify_passes += generation.n_passes
            self.throughput.verified_tokens += generation.n_tokens
        if isinstance(generation, BeamGeneration):
            for completion, score in zip(completions, generation.scores, strict=False):
                completion.score = score
        if self._explain:
            for row, completion in enumerate(completions):
                completion.explained = self._explain(prompts[row // n_samples][1], completion.text.tokens)
        return completions

    def _begin(self, tokens: list[list[int]], seeds: list[int]) -> Generation | BeamGeneration | Speculation:
        options = self._options
        model_and_prompts = self._run.model, self._params, tokens
        common: dict[str, Any] = {
            "max_new_tokens": options.max_new_tokens, "context_length": self._config.n_positions,
            "cache_dtype": options.cache_dtype,
        }  # fmt: skip
        if options.num_beams > 1:
            search = partial(
                beam_search, *model_and_prompts, n_beams=options.num_beams, length_penalty=options.length_penalty,
                stop_tokens=self._sampling.stop_tokens, n_tokens=self._sampling.n_tokens, **common,
            )  # fmt: skip
            return BeamGeneration(search, options.num_samples)
        common["n_samples"] = options.num_samples
        if self._draft:
            return speculate(
                self._run.model, self._params, *self._draft, tokens, self._sampling, seeds,
                n_proposed=options.draft_tokens, **common,
            )  # fmt: skip
        return generate(
            *model_and_prompts, self._sampling, seeds, prefill_chunk=options.prefill_chunk,
            fill_token=self._tokenizer.end_of_text, **common,
        )  # fmt: skip


@contextlib.contextmanager
def fitting_memory(n_texts: int) -> Iterator[None]:
    """Raise `UserError` if device or host memory is too small for `n_texts` texts at once."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            remedy = "lower --batch-size, --num-samples, --num-beams or --max-new-tokens"
            raise UserError(f"{n_texts} texts at once do not fit into the memory; {remedy}.") from error
        raise


def encode_logit_bias(options: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    """Return pairs of a token and its logit bias from options TEXT=BIAS. Raises `UserError` if an option is not of that
    form, or its text is not one token."""
    biases = []
    for option in options:
        text, _, bias = option.rpartition("=")
        try:
            value = float(bias)
        except ValueError:
            value = None
        if not text or value is None:
            raise UserError(f"--logit-bias {option!r} is not of the form TEXT=BIAS, such as ' the=-2.5'.")
        tokens = _encode(text, "--logit-bias", tokenizer)
        if len(tokens) != 1:
            pieces = ", ".join(repr(tokenizer.decode([token])) for token in tokens)
            raise UserError(f"--logit-bias {text!r} is {len(tokens)} tokens of this run, {pieces}; give one of them.")
        biases.append((tokens[0], value))
    return tuple(biases)


def encode_bad_words(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of texts with and without a leading space. Raises `UserError` if a text is empty or
    not UTF-8."""
    if "" in texts:
        raise UserError("a text of --bad-words is empty; give it at least one character.")
    spaced = [variant for text in texts for variant in (text, *([] if text[0].isspace() else [f" {text}"]))]
    return tuple(dict.fromkeys(tuple(_encode(text, "--bad-words", tokenizer)) for text in spaced))


def check_stop_strings(strings: Sequence[str], tokenizer: Tokenizer, max_new_tokens: int) -> None:
    """Raise `UserError` if a string has more bytes than `max_new_tokens` tokens can have."""
    limit = max_new_tokens * max(map(len, tokenizer.token_bytes))
    for string in strings:
        if (n := len(string.encode())) > limit:
            reason = f"it has {n} bytes, and {max_new_tokens} tokens of this run at most {limit}"
            problem = f"stop string {string!r} can never occur: {reason}"
            raise UserError(f"{problem}; omit it, or raise --max-new-tokens.")


def _encode(text: str, flag: str, tokenizer: Tokenizer) -> list[int]:
    if (start := lone_surrogate(text)) is not None:
        raise UserError(f"{flag} {text!r} contains bytes that are not UTF-8, at character {start}.")
    return tokenizer.encode(text)
