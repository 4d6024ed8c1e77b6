"""A run that continues prompts, as `sample.py` is asked to."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any

import jax

from jaxformer.cli.arguments import folder_named
from jaxformer.cli.completion import Answer, explanation, rounded
from jaxformer.cli.load import RunOptions, open_run
from jaxformer.cli.prompts import Prompt, seeds
from jaxformer.contract import contract_of
from jaxformer.decode import (
    Generation,
    LookUp,
    ModelDraft,
    Speculation,
    Speed,
    Text,
    beam_search,
    follow,
    generate,
    speculate,
)
from jaxformer.decode.streaming import Search, batches
from jaxformer.decode.weights import restored
from jaxformer.errors import UserError
from jaxformer.inspect.explain import explain
from jaxformer.models.objective import is_causal_lm
from jaxformer.sharding import make_mesh
from jaxformer.signals import ReceivedSignal
from jaxformer.terminal import echo

if TYPE_CHECKING:
    from jaxformer.cli.sample import Arguments
    from jaxformer.data.tokenizer import Tokenizer
    from jaxformer.decode.speculative import Draft
    from jaxformer.models.objective import Params
    from jaxformer.runs import Run


class Sampler:
    """A run, ready to continue prompts as asked."""

    def __init__(self, asked: Arguments, given: Collection[str] = ()) -> None:
        """Raises UserError where the run cannot be opened, or options do not fit it; some only if they were given."""
        self._mesh = make_mesh(asked.opening.mesh) if asked.opening.mesh else None
        self._asked, self._run = asked, open_run(asked.opening, self._mesh)
        self._config, self._tokenizer = self._run.text_model()
        if not is_causal_lm(self._run.model):
            kind = type(self._run.model).__name__
            raise UserError(f"{self._run.path} holds a {kind}, which writes no text; name a run that does.")
        tokenizer = self._tokenizer
        self._sampling = asked.sampling.completed(
            tokenizer.end_of_text, biases(asked.logit_bias, tokenizer), words(asked.bad_words, tokenizer)
        )
        self._sampling.check_vocabulary(tokenizer.vocab_size)
        check_stop_strings(asked.stop, tokenizer, asked.max_new_tokens)
        need_cache = [flag for flag in ("--draft", "--cache-dtype", "--prefill-chunk") if flag in given]
        need_cache += ["--num-beams"] if asked.num_beams > 1 else []
        need_cache += ["--explain"] if asked.explain else []  # the others read windows that are filled up before a text
        if need_cache and not contract_of(self._run.model).has_cache:
            raise UserError(f"{self._run.path} has a model without a cache, which {need_cache[0]} needs; leave it out.")
        if "--prefill-chunk" in given and contract_of(self._run.model).has_prefix:
            raise UserError(f"{self._run.path} reads a prompt at once, in both directions; leave out --prefill-chunk.")
        self._ends: list[int] = []
        """Contexts that a text cannot go past."""
        self._draft: tuple[Draft, Params] | None = None
        if asked.num_beams > 1 or asked.draft is not None:
            self._note_end(self._run)
        if asked.draft is not None:
            self._draft = self._open_draft(asked.draft)
        self.speed = Speed()
        """Of what was shown."""

    def _open_draft(self, name: str) -> tuple[Draft, Params]:
        """What proposes, and its parameters."""
        if name == "lookup":
            return LookUp(self._config.vocab_size), None
        draft = open_run(RunOptions(run=str(folder_named("--draft", name))), self._mesh)
        config, tokenizer = draft.text_model()
        if tokenizer.as_json() != self._tokenizer.as_json():
            raise UserError(
                f"the draft {name} has another tokenizer than {self._run.path}; use one trained on its text."
            )
        if not contract_of(draft.model).has_cache:
            raise UserError(f"the draft {name} has a model without a cache; use another, or 'lookup'.")
        self._note_end(draft)
        return ModelDraft(draft.model, config.context_length), draft.params

    def _note_end(self, run: Run) -> None:
        if not contract_of(run.model).extrapolates:
            self._ends.append(run.text_model()[0].context_length)

    def encode(self, prompt: Prompt) -> list[int]:
        """Tokens of a prompt; raises UserError if there are too many, or it has a seed that nothing draws with."""
        if self._asked.num_beams > 1 and prompt.seed is not None:
            raise UserError(f"{prompt.where} has a seed, but beam search draws nothing; leave it out.")
        most = self._config.context_length
        why = f"the context's {most}"
        for end in self._ends:
            room = max(0, end - (self._asked.max_new_tokens - 1))  # nothing reads the last one
            if room < most:
                special = "a draft" if self._draft else "beam search"
                most, why = room, f"{room}, for {special} does not go past the context's {end}; lower --max-new-tokens"
        tokens = self._tokenizer.encode(prompt.text)
        if len(tokens) > most:
            raise UserError(f"{prompt.where} has {len(tokens)} tokens; it may have at most {why}.")
        return tokens

    def show(self, prompts: Sequence[tuple[Prompt, list[int]]], pressed: ReceivedSignal) -> None:
        """Continue prompts and show the texts; not all of them once Ctrl-C is pressed.

        Rows of JSON come as they are made; other texts in the order of the prompts, and at the latest with the end,
        even if that is an error.
        """
        asked = self._asked
        size = max(1, asked.batch_size // max(asked.num_samples, asked.num_beams))
        streams = len(prompts) * asked.num_samples == 1 and not asked.jsonl
        made: dict[int, list[Answer]] = {}
        shown = 0
        try:
            for batch in batches([len(tokens) for _, tokens in prompts], size):
                n_rows = size if len(prompts) > size else len(batch)
                with fitting_memory(len(batch) * asked.num_samples):
                    answers = self._continue([prompts[i] for i in batch], n_rows, streams, pressed)
                for place, i in enumerate(batch):
                    made[i] = answers[place * asked.num_samples : (place + 1) * asked.num_samples]
                ready = batch if asked.jsonl else list(takewhile(made.__contains__, count(shown)))
                for i in ready:
                    self._write(made.pop(i), streams)
                shown += len(ready)
                if pressed.is_set():
                    break
        finally:
            for i in sorted(made):  # what came before them was never made
                self._write(made[i], streams)

    def _continue(
        self, prompts: list[tuple[Prompt, list[int]]], n_prompts: int, streams: bool, pressed: ReceivedSignal
    ) -> list[Answer]:
        """The texts of one batch. The last one is filled up, so that no program is compiled for it alone."""
        asked, run = self._asked, self._run
        filled = prompts + prompts[-1:] * (n_prompts - len(prompts))
        answers = [
            Answer(prompt, k, seed, Text(self._tokenizer, asked.stop))
            for prompt, _ in filled
            for k, seed in enumerate(seeds(asked.seed if prompt.seed is None else prompt.seed, asked.num_samples))
        ]
        token_lists, drawn_seeds = [tokens for _, tokens in filled], [answer.seed for answer in answers]
        sizes = {"max_new_tokens": asked.max_new_tokens, "context_length": self._config.context_length}
        generation: Generation | Search | Speculation
        if asked.num_beams > 1:
            call = partial(
                beam_search, run.model, run.params, token_lists, n_beams=asked.num_beams,
                length_penalty=asked.length_penalty, stop_tokens=self._sampling.stop_tokens,
                cache_dtype=asked.cache_dtype, **sizes,
            )  # fmt: skip
            generation = Search(call, asked.num_samples)
        elif self._draft:
            generation = speculate(
                run.model, run.params, self._draft[0], self._draft[1], token_lists, self._sampling,
                drawn_seeds, n_samples=asked.num_samples, n_proposed=asked.draft_tokens,
                cache_dtype=asked.cache_dtype, **sizes,
            )  # fmt: skip
        else:
            generation = generate(
                run.model, run.params, token_lists, self._sampling, drawn_seeds,
                n_samples=asked.num_samples, cache_dtype=asked.cache_dtype, prefill_chunk=asked.prefill_chunk,
                fill_token=self._tokenizer.end_of_text, **sizes,
            )  # fmt: skip
        n_wanted = len(prompts) * asked.num_samples
        for row in range(n_wanted, len(answers)):
            generation.end(row)
        answers = answers[:n_wanted]
        unsaid = prompts[0][0].text
        texts = [answer.text for answer in answers]
        stop_tokens, most = self._sampling.stop_tokens, asked.max_new_tokens
        for new in follow(generation, texts, stop_tokens, most, self.speed, pressed.is_set):
            if streams:
                echo(unsaid + new, end="")
                unsaid = ""
        if isinstance(generation, Speculation):
            self.speed.passes += generation.passes
            self.speed.checked += generation.made
        if isinstance(generation, Search):
            for answer, score in zip(answers, generation.scores, strict=False):
                answer.score = score
        if asked.explain:
            for answer, (_, tokens) in zip(
                answers, [p for p in prompts for _ in range(asked.num_samples)], strict=True
            ):
                answer.explained = self._explain(tokens, answer.text.tokens)
        return answers

    def _explain(self, prompt: list[int], made: list[int]) -> list[dict[str, Any]]:
        """What `explain` says, with tokens as text; of those that the model has positions for."""
        extrapolates = contract_of(self._run.model).extrapolates
        room = len(prompt) + len(made) if extrapolates else self._config.context_length
        tokens, name = (prompt + made)[:room], lambda token: self._tokenizer.decode([token])
        return [
            {
                "token": name(row.token), "probability": rounded(row.probability), "entropy": rounded(row.entropy),
                "rivals": [(name(token), rounded(p)) for token, p in row.rivals],
                "looked_at": [(place, name(tokens[place]), rounded(w)) for place, w in row.looked_at],
            }
            for row in explain(self._run.model, restored(self._run.params), tokens, len(prompt))
        ]  # fmt: skip

    def _write(self, answers: list[Answer], streamed: bool) -> None:
        """Show the texts of a prompt."""
        if streamed:
            echo()
            for answer in answers:
                echo(explanation(answer), end="")
            return
        for answer in answers:
            if self._asked.jsonl:
                echo(json.dumps(answer.as_row(), allow_nan=False))
            else:
                sample = f".{answer.sample + 1}" if len(answers) > 1 else ""
                echo(f"[{answer.prompt.line}{sample}] {answer.prompt.text}{answer.text.shown}")
                echo(explanation(answer))


@contextlib.contextmanager
def fitting_memory(n_texts: int) -> Iterator[None]:
    """Raise `UserError` where the device or the host has not memory enough for so many texts at once."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise UserError(
                f"{n_texts} texts at once do not fit into the memory; lower --batch-size, --num-samples, --num-beams "
                "or --max-new-tokens."
            ) from error
        raise


def biases(options: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    """Tokens and what is added to their logits, from TEXT=BIAS.

    Raises:
      UserError: not of that form, or a text that is not one token.
    """
    found = []
    for option in options:
        text, _, bias = option.rpartition("=")
        try:
            value = float(bias)
        except ValueError:
            value = None
        if not text or value is None:
            raise UserError(f"--logit-bias {option!r} is not of the form TEXT=BIAS, such as ' the=-2.5'.")
        tokens = _encoded(text, "--logit-bias", tokenizer)
        if len(tokens) != 1:
            pieces = ", ".join(repr(tokenizer.decode([token])) for token in tokens)
            raise UserError(f"--logit-bias {text!r} is {len(tokens)} tokens of this run, {pieces}; give one of them.")
        found.append((tokens[0], value))
    return tuple(found)


def words(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences of texts, and of the same after a space.

    Raises:
      UserError: one is empty, or no Unicode.
    """
    if "" in texts:
        raise UserError("a text of --bad-words is empty; give it at least one character.")
    spaced = [variant for text in texts for variant in (text, *([] if text[0].isspace() else [f" {text}"]))]
    return tuple(dict.fromkeys(tuple(_encoded(text, "--bad-words", tokenizer)) for text in spaced))


def check_stop_strings(strings: Sequence[str], tokenizer: Tokenizer, max_new_tokens: int) -> None:
    """Raise `UserError` for a string that is longer than any text of so many tokens."""
    most = max_new_tokens * max(map(len, tokenizer.token_bytes))
    for string in strings:
        if (n := len(string.encode())) > most:
            raise UserError(
                f"stop string {string!r} can never occur: it has {n} bytes, and {max_new_tokens} tokens of this run at "
                f"most {most}; leave it out, or raise --max-new-tokens."
            )


def _encoded(text: str, flag: str, tokenizer: Tokenizer) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{flag} {text!r} holds bytes that are not UTF-8, at character {error.start}.") from error
    return tokenizer.encode(text)
