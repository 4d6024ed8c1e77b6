"""Completion of prompts by a run of a causal language model: sampling, beam search or speculative decoding."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Literal

import jax

from jaxformer.config.fields import Positive, Range, Seed, Size, check_fields
from jaxformer.contract import contract_of
from jaxformer.data.chat import check_texts
from jaxformer.data.chat_template import ASSISTANT, ChatTemplate, Message, encode_rendered
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.decode.batches import batch_by_length, spread_rows
from jaxformer.decode.beam import beam_search
from jaxformer.decode.generation import Generation, generate_tokens
from jaxformer.decode.prompts import Encoded, Prompt, Row, sample_seeds
from jaxformer.decode.samplers import Sampling
from jaxformer.decode.speculative import Draft, DraftModel, PromptLookup, Speculation, speculate
from jaxformer.decode.streaming import BeamGeneration, GeneratedText, Throughput, stream_texts
from jaxformer.errors import UserError
from jaxformer.models.objective import Params, is_causal_lm

if TYPE_CHECKING:
    from jaxformer.runs.run import Run

warn = logging.getLogger(__name__).warning
Explain = Callable[[list[int], list[int]], list[Row]]
"""Function from the tokens of a prompt and of its completion to one row per token that can be explained."""


@dataclass(frozen=True)
class CompletionOptions:
    """Number, length and search of completions; `Sampling` has the options for a single token."""

    max_new_tokens: Positive = 200
    """Maximum new tokens per completion."""
    chat: bool = False
    """Chat mode: each prompt is a user message, formatted with the chat template of the run's tokenizer. An interactive
    session is one conversation; its oldest turns are forgotten at the context's end, and /clear begins another."""
    system: str | None = None
    """System message, the first of each conversation; with `chat`."""
    num_samples: Positive = 1
    """Completions per prompt; completion k, from 0, uses the seed `seed` + k, or is the k-th best beam."""
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
    length_penalty: Annotated[float, Range(least=-10, most=10)] = 1.0
    """Exponent of the length in the beam-search score: above 0 favours long texts, below 0 short ones."""
    draft: str | None = None
    """Draft for speculative decoding: a smaller run with the same tokenizer, or 'lookup' for prompt lookup. It proposes
    several tokens, which the model verifies in one pass. The distribution of the text does not change; greedy decoding
    gives the same text. Decodes one text at a time."""
    draft_tokens: Annotated[int, Range(least=1, most=64)] = 4
    """Tokens that `draft` proposes at a time."""
    cache_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Dtype of the model's KV cache; a draft's is float32."""
    prefill_chunk: Positive = 512
    """Prompt tokens per prefill pass."""

    def __post_init__(self) -> None:
        check_fields(self, "")

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
    explained: list[Row] | None = None
    """One row per token that can be explained; None without explanations."""

    def as_row(self) -> Row:
        """Return the completion as a JSON object."""
        text, row = self.text, {**self.prompt.as_row(), "sample": self.sample, "seed": self.seed}
        row |= {"text": text.text, "ended": text.finish_reason, "tokens": text.tokens}
        if self.score is None:
            row["logprobs"] = [json_float(x) for x in text.logprobs]
        else:
            row["score"] = json_float(self.score)
        if any(text.top_logprobs):
            row["top_logprobs"] = [[(t, json_float(x)) for t, x in likeliest] for likeliest in text.top_logprobs]
        if self.explained is not None:
            row["explained"] = self.explained
        return row | {"first_token_s": round(text.first_token_seconds, 6), "seconds": round(text.seconds, 6)}


def json_float(value: float) -> float | None:
    """Return a float32 value rounded to seven digits; None for infinity and NaN, which JSON lacks."""
    return float(f"{value:.7g}") if isfinite(value) else None


class Completer:
    """Prompt completion by a run of a causal language model; `throughput` has the time to the first token and the
    tokens per second so far."""

    def __init__(
        self,
        run: Run,
        options: CompletionOptions,
        sampling: Sampling,
        draft: Run | None = None,
        explain: Explain | None = None,
    ) -> None:
        """Check the options against the run.

        Args:
          sampling: options to which the run's end-of-text tokens and the texts of `options` are added.
          draft: the run that `options.draft` names; None for 'lookup'.

        Raises:
          UserError: an option does not fit the run, or the draft has another vocabulary.
          ValueError: the run's model is not a causal language model.
        """
        self._run, self._options, self._explain = run, options, explain
        self._params, self._spread_for = run.params, 1
        self._config, self._tokenizer = run.text_model()
        if not is_causal_lm(run.model):
            raise ValueError(f"a {type(run.model).__name__} is no causal language model")
        self._check_cache()
        n_tokens = self._tokenizer.vocab_size
        self._sampling = replace(
            sampling,
            stop_tokens=tuple(dict.fromkeys((*self._tokenizer.ends_of_text, *sampling.stop_tokens))),
            logit_bias=encode_logit_bias(options.logit_bias, self._tokenizer),
            bad_words=encode_bad_words(options.bad_words, self._tokenizer),
            n_tokens=n_tokens if n_tokens < self._config.vocab_size else None,
        )
        self._sampling.check_vocabulary(n_tokens)
        self._draft: tuple[Draft, Params] | None = None
        if options.draft == "lookup":
            self._draft = PromptLookup(self._config.vocab_size), None
        elif draft is not None:
            self._draft = self._check_draft(draft), draft.params
        limited = [run, *([draft] if draft else [])] if options.num_beams > 1 or options.draft is not None else []
        ends = (r.text_model()[0].n_positions for r in limited if not contract_of(r.model).extrapolates)
        self._context_ends = list(ends)
        self.throughput = Throughput()
        self.turns: list[list[Message]] | None = None
        """Earlier turns of the conversation, each a user message and its answer; None for prompts on their own."""
        self._last: Generation | None = None
        """Generation of the last answer in a conversation, whose KV cache the next one takes over."""
        self.keep_programs = True
        """Keep compiled programs for other prompts; one needs each of them for a while, and each takes 0.1 GB of memory
        for SmolLM2-135M."""

    def _check_cache(self) -> None:
        """Raise `UserError` for an option that needs a cache, or a prefill in chunks, which the model lacks."""
        options, contract = self._options, contract_of(self._run.model)
        names = ("draft", "cache_dtype", "prefill_chunk", "num_beams")
        used = [name for name in names if getattr(options, name) != getattr(CompletionOptions, name)]
        used += ["explain"] if self._explain else []  # other models read left-padded windows
        if used and not contract.has_cache:
            name = used[0]
            raise UserError(f"{self._run.path} has a model without a KV cache, which `{name}` needs; omit `{name}`.")
        if contract.has_prefix and (excluded := {"draft", "prefill_chunk"}.intersection(used)):
            problem = f"{self._run.path} reads a prompt with bidirectional attention, in one pass"
            raise UserError(f"{problem}; omit `{min(excluded)}`.")

    def _check_draft(self, draft: Run) -> Draft:
        config, tokenizer = draft.text_model()
        theirs, ours = (tokenizer.as_json(), config.vocab_size), (self._tokenizer.as_json(), self._config.vocab_size)
        if theirs != ours:
            remedy = "use one trained on its text"
            raise UserError(f"the draft {draft.path} has another vocabulary than {self._run.path}; {remedy}.")
        return DraftModel(draft.model, config.n_positions)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt. Raises `UserError` if there are too many, or the prompt has a seed for a beam
        search."""
        if self._options.num_beams > 1:
            prompt.check_no_seed("beam search does not sample")
        limit = self._config.n_positions
        name = f"the context's {limit}"
        for end in self._context_ends:
            capacity = max(0, end - (self._options.max_new_tokens - 1))  # the last one is never fed back
            if capacity < limit:
                method = "a draft" if self._draft else "beam search"
                limit = capacity
                name = f"{capacity}, as {method} cannot exceed the context's {end}; lower `max_new_tokens`"
        turns = self.turns or []
        if not self._options.chat:
            tokens = self._tokenizer.encode_prompt(prompt.text)
        else:
            tokens = self._encode_message(turns, prompt.text)
            while turns and len(tokens) + min(self._options.max_new_tokens, limit // 2) > limit:
                turns = turns[1:]
                tokens = self._encode_message(turns, prompt.text)
        prompt.check_length(len(tokens), limit, name)
        if self.turns and (n := len(self.turns) - len(turns)):
            warn(f"the conversation reaches the end of the context: its oldest turns are forgotten, {n}.")
            self.turns = turns
        return tokens

    def _encode_message(self, turns: list[list[Message]], text: str) -> list[int]:
        """Return the tokens of earlier turns and a user message, up to the start of the answer."""
        system = self._options.system
        conversation: list[Message] = [*chain.from_iterable(turns), {"role": "user", "content": text}]
        messages = conversation if system is None else [{"role": "system", "content": system}, *conversation]
        label = "the conversation,"
        check_texts(messages, label)
        template = self._template
        try:
            rendered = template.render(messages, add_generation_prompt=True)
        except ValueError as error:
            remedy = "omit `chat`" if system is None else "omit `system`"
            raise UserError(f"{error}; {remedy}, or train with another template.") from error
        if system is not None and system.strip() not in rendered.text:
            raise UserError(f"the chat template of {self._run.path} takes no system message; omit `system`.")
        ((tokens, _),) = encode_rendered([rendered], [label], self._tokenizer)
        return tokens

    def remember(self, completion: Completion) -> None:
        """Add a message and its answer to the conversation, if there is one."""
        if self.turns is not None:
            answer = {"role": ASSISTANT, "content": completion.text.text}
            self.turns.append([{"role": "user", "content": completion.prompt.text}, answer])

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate.of_tokenizer(self._tokenizer)

    def compile(self, prompt: Encoded) -> None:
        """Compile the programs for the first token of one prompt, sampled once and without a draft, of a run whose
        parameters may be shapes only."""
        if self._options.draft is None and self._options.num_beams == self._options.num_samples == 1:
            generation = self._begin([prompt[1]], [self._options.seed])
            assert isinstance(generation, Generation)
            generation.compile()

    def complete(
        self, prompts: list[Encoded], interrupted: Callable[[], bool], show: Callable[[str], None] = lambda new: None
    ) -> Iterator[tuple[int, list[Completion]]]:
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
        self, prompts: list[Encoded], n_prompts: int, interrupted: Callable[[], bool], show: Callable[[str], None]
    ) -> list[Completion]:
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
        if isinstance(generation, Generation) and self.turns is not None:
            self._last = generation
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
        model, params, options, sampling = self._run.model, self._params, self._options, self._sampling
        length, dtype, n = self._config.n_positions, options.cache_dtype, options.max_new_tokens
        if options.num_beams > 1:
            search = partial(
                beam_search, model, params, tokens, n_beams=options.num_beams, max_new_tokens=n, context_length=length,
                length_penalty=options.length_penalty, stop_tokens=sampling.stop_tokens, n_tokens=sampling.n_tokens,
                cache_dtype=dtype,
            )  # fmt: skip
            return BeamGeneration(search, options.num_samples)
        if self._draft:
            return speculate(
                model, params, *self._draft, tokens, sampling, seeds, max_new_tokens=n, context_length=length,
                n_samples=options.num_samples, n_proposed=options.draft_tokens, cache_dtype=dtype,
            )  # fmt: skip
        after, self._last = self._last, None  # not kept if this one fails
        return generate_tokens(
            model, params, tokens, sampling, seeds, max_new_tokens=n, context_length=length,
            n_samples=options.num_samples, cache_dtype=dtype, prefill_chunk=options.prefill_chunk,
            fill_token=self._tokenizer.end_of_text, after=after, keep_programs=self.keep_programs,
        )  # fmt: skip


@contextlib.contextmanager
def fitting_memory(n_texts: int) -> Iterator[None]:
    """Raise `UserError` if device or host memory is too small for `n_texts` texts at once."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            remedy = "lower `batch_size`, `num_samples`, `num_beams` or `max_new_tokens`"
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
            raise UserError(f"`logit_bias` {option!r} is not of the form TEXT=BIAS, such as ' the=-2.5'.")
        tokens = tokenizer.encode(text)
        if len(tokens) != 1:
            pieces = ", ".join(repr(tokenizer.decode_part([token])) for token in tokens)
            raise UserError(f"`logit_bias` {text!r} is {len(tokens)} tokens of this run, {pieces}; give one of them.")
        biases.append((tokens[0], value))
    return tuple(biases)


def encode_bad_words(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of texts with and without a leading space."""
    spaced = [variant for text in texts for variant in (text, *([] if text[:1].isspace() else [f" {text}"]))]
    return tuple(dict.fromkeys(tuple(tokenizer.encode(text)) for text in spaced))
