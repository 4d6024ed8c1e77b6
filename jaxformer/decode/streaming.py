"""From tokens to text: detecting the end of each row, by a stop token, a stop string or its length; streaming the text;
and measuring throughput."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxformer.data.tokenizer import StreamDecoder, Tokenizer
from jaxformer.decode.beam import Beams
from jaxformer.decode.generation import Generation
from jaxformer.decode.samplers import Samples
from jaxformer.decode.speculative import Speculation
from jaxformer.errors import UserError
from jaxformer.ops.masks import EMPTY

MIN_COMPILE_SECONDS = 0.05
"""Smallest compile time that is reported, in seconds."""
MIN_SECONDS = 1e-9
"""Smallest compute time, in seconds: the difference of two clocks may be negative."""


class CompileClock:
    """Seconds that JAX spends tracing, lowering and compiling while the context is entered."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return sum(end - start for start, end in self._spans)

    def __enter__(self) -> CompileClock:
        jax.monitoring.register_event_time_span_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_time_span_listener(self._listen)

    def _listen(self, event: str, start_time: float, end_time: float, **_: str | int) -> None:
        """Record a span and drop those nested within it, which end first."""
        if event.startswith("/jax/core/compile/"):
            while self._spans and self._spans[-1][0] >= start_time:
                self._spans.pop()
            self._spans.append((start_time, end_time))


class StopStrings:
    """A filter for one text, which ends it before the first stop string.

    The first stop string is the one completed first, and among those the longest, so the result does not depend on how
    the text is split into pieces. Text that may be the beginning of a stop string is withheld.

    Attributes:
      met: True after a stop string, after which no text is returned.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        """Raise `UserError` for an empty string."""
        if not all(strings):
            raise UserError("a stop string is empty; omit it.")
        self._strings = tuple(strings)
        self._withheld = ""
        self.met = False

    def feed(self, text: str) -> str:
        """Return the text that is safe to show after one more piece."""
        if self.met:
            return ""
        n_withheld, text = len(self._withheld), self._withheld + text
        for end in range(n_withheld + 1, len(text) + 1):
            starts = [end - len(string) for string in self._strings if text.endswith(string, 0, end)]
            if starts:
                self.met, self._withheld = True, ""
                return text[: min(starts)]
        longest = max(map(len, self._strings), default=0)
        starts_in = range(max(0, len(text) - longest + 1), len(text))
        cut = next((i for i in starts_in if any(s.startswith(text[i:]) for s in self._strings)), len(text))
        self._withheld = text[cut:]
        return text[:cut]

    def end(self) -> str:
        """Return the withheld part of a text that ended without a stop string."""
        withheld, self._withheld = self._withheld, ""
        return withheld


class GeneratedText:
    """The completion of a prompt, as generated so far.

    Attributes:
      tokens: all generated tokens, including the stop token.
      logprobs: log-probability of each token.
      top_logprobs: per token, the most likely tokens with their log-probabilities.
      text: the text without the stop token or stop string.
      finish_reason: "stop token", "stop string", "length" or "interrupted"; empty while generation continues.
      first_token_seconds: seconds from the start of the batch to the first token.
      seconds: seconds from the start of the batch to the last token.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[tuple[int, float]]] = []
        self.text = self.finish_reason = ""
        self.first_token_seconds = self.seconds = 0.0
        self._decoder, self._stop = StreamDecoder(tokenizer), StopStrings(stop)

    def append(self, samples: Samples, row: int, stop_tokens: Sequence[int]) -> str:
        """Append one row of samples `(B, N)`, up to the token that ends the text; return the text to show next."""
        new, n = "", 0
        for token in samples.tokens[row].tolist():
            if token == EMPTY:
                break
            n += 1
            if token in stop_tokens:
                new += self._withheld()
                self.finish_reason = "stop token"
                break
            new += self._stop.feed(self._decoder.feed([token]))
            if self._stop.met:
                self.finish_reason = "stop string"
                break
        self.tokens += samples.tokens[row, :n].tolist()
        self.logprobs += samples.logprobs[row, :n].tolist()
        for tokens, logprobs in zip(samples.top_tokens[row, :n], samples.top_logprobs[row, :n], strict=True):
            self.top_logprobs.append(list(zip(tokens.tolist(), logprobs.tolist(), strict=True)))
        self.text += new
        return new

    def finish(self, reason: str) -> str:
        """End the text; return its withheld part."""
        rest = self._withheld()
        self.text += rest
        self.finish_reason = reason
        return rest

    def _withheld(self) -> str:
        return self._stop.feed(self._decoder.end()) + self._stop.end()


@dataclass
class Throughput:
    """Time to the first token, and tokens per second."""

    first_token_seconds: list[float] = field(default_factory=list)
    """Seconds to the first token of each batch whose tokens did not all arrive at once."""
    tokens: int = 0
    """Total tokens; excludes each text's first token if it arrived alone, since the prefill makes it slower."""
    seconds: float = 0.0
    """Seconds for these tokens."""
    verify_passes: int = 0
    """Model passes over a draft's proposals."""
    verified_tokens: int = 0
    """Tokens from these passes."""
    compile_seconds: float = 0.0
    """Seconds of compilation, which the other times exclude."""

    def __str__(self) -> str:
        n = len(self.first_token_seconds)
        of_batches = f" (the mean of {n} batches)" if n > 1 else ""
        parts = [f"time to first token {sum(self.first_token_seconds) / n:.3f} s{of_batches}"] if n else []
        if self.tokens:
            parts.append(f"{self.tokens / self.seconds:,.0f} tokens/s ({self.tokens:,} in {self.seconds:.2f} s)")
        if self.verify_passes:
            parts.append(f"{self.verified_tokens / self.verify_passes:.2f} tokens per pass")
        if self.compile_seconds >= MIN_COMPILE_SECONDS:
            parts.append(f"{self.compile_seconds:.1f} s of compilation excluded")
        return "; ".join(parts)


class BeamGeneration:
    """A beam search as a generation that yields once, the n best texts of each prompt. After the search, `scores` has
    each row's score."""

    def __init__(self, search: Callable[[], Beams], n: int) -> None:
        self._search, self._n = search, n
        self.scores: list[float] = []

    def __iter__(self) -> Iterator[Samples]:
        tokens_PNT, scores_PN = (np.asarray(x)[:, : self._n] for x in self._search())
        self.scores = scores_PN.reshape(-1).tolist()
        tokens_BT: Any = tokens_PNT.reshape(-1, tokens_PNT.shape[-1])
        none_B0: Any = np.zeros((len(tokens_BT), 0))
        yield Samples(tokens_BT, none_B0, none_B0[..., None], none_B0[..., None])

    def end(self, row: int) -> None:
        """Do nothing, as all tokens come at once."""


def stream_texts(
    generation: Generation | BeamGeneration | Speculation, texts: Sequence[GeneratedText], stop_tokens: Sequence[int],
    max_new_tokens: int, throughput: Throughput, interrupted: Callable[[], bool],
) -> Iterator[str]:  # fmt: skip
    """Append the rows of a generation to texts; yield the new part of the first text after each call.

    A text without a stop finishes as "length" if it has `max_new_tokens`, else as "interrupted". Rows beyond the texts
    are ignored.
    """
    start, first, n_alone, last = time.perf_counter(), 0.0, 0, 0.0
    unfinished, clock = dict(enumerate(texts)), CompileClock()
    batches = iter(generation)
    while True:
        with clock:
            samples = next(batches, None)
        if samples is None:
            break
        now = time.perf_counter() - start
        computed = max(now - clock.seconds, MIN_SECONDS)
        shown = ""
        for row, text in list(unfinished.items()):
            n_before = len(text.tokens)
            new = text.append(samples, row, stop_tokens)
            if len(text.tokens) > n_before:
                text.seconds, last = now, computed
                text.first_token_seconds = text.first_token_seconds or now
            shown = new if row == 0 else shown
            if text.finish_reason:
                generation.end(row)
                del unfinished[row]
        if not first:
            first = computed
            n_alone = sum(len(text.tokens) for text in texts) if samples.tokens.shape[1] == 1 else 0
        yield shown
        if interrupted():
            break
    throughput.compile_seconds += clock.seconds
    throughput.tokens += sum(len(text.tokens) for text in texts) - n_alone
    throughput.seconds += last - (first if n_alone else 0.0)
    throughput.first_token_seconds += [first] if n_alone or first < last else []
    for row, text in unfinished.items():
        rest = text.finish("length" if len(text.tokens) >= max_new_tokens else "interrupted")
        if row == 0:
            yield rest
