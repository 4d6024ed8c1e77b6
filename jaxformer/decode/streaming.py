"""From tokens to texts: where a row ends, what can be shown of it as it is made, and how fast that was."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from jaxformer.data.tokenizer import StreamDecoder, Tokenizer
from jaxformer.decode.beam import Beams
from jaxformer.decode.generate import Generation, Piece
from jaxformer.decode.speculative import Speculation
from jaxformer.decode.stopping import StopStrings
from jaxformer.ops.masks import EMPTY

LEAST_COMPILE_S = 0.05
"""Seconds of compiling below which none are reported."""
LEAST_S = 1e-9
"""Seconds that computing takes at least, for clocks may differ."""


class CompileClock:
    """Measures the seconds that jax spends tracing, lowering and compiling while it is entered."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []

    @property
    def seconds(self) -> float:
        """So far."""
        return sum(end - start for start, end in self._spans)

    def __enter__(self) -> CompileClock:
        jax.monitoring.register_event_time_span_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_time_span_listener(self._listen)

    def _listen(self, event: str, start_time: float, end_time: float, **_: str | int) -> None:
        """Note a span in place of those within it: of a function that calls another, the inner one ends first."""
        if event.startswith("/jax/core/compile/"):
            while self._spans and self._spans[-1][0] >= start_time:
                self._spans.pop()
            self._spans.append((start_time, end_time))


class Text:
    """What follows a prompt, as far as it is made."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.tokens: list[int] = []
        """All that were drawn, those that end the text among them."""
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[tuple[int, float]]] = []
        self.shown = ""
        """The text without what ended it."""
        self.ended = ""
        """Why: "stop token", "stop string", "length" or "interrupted"; empty while it goes on."""
        self.first_token_s = self.seconds = 0.0
        """From the start of its batch to the piece with its first token, and to that with its last."""
        self._decoder, self._stop = StreamDecoder(tokenizer), StopStrings(stop)

    def take(self, piece: Piece, row: int, stop_tokens: Sequence[int]) -> str:
        """Add the tokens of one row of a piece, up to the one that ends the text; what can now be shown."""
        new = ""
        n = 0
        for token in piece.tokens_BN[row].tolist():
            if token == EMPTY:
                break
            n += 1
            if token in stop_tokens:
                new += self._held_back()
                self.ended = "stop token"
                break
            new += self._stop.feed(self._decoder.feed([token]))
            if self._stop.met:
                self.ended = "stop string"
                break
        self.tokens += piece.tokens_BN[row, :n].tolist()
        self.logprobs += piece.logprobs_BN[row, :n].tolist()
        for tokens, logprobs in zip(piece.top_tokens_BNn[row, :n], piece.top_logprobs_BNn[row, :n], strict=True):
            self.top_logprobs.append(list(zip(tokens.tolist(), logprobs.tolist(), strict=True)))
        self.shown += new
        return new

    def end(self, why: str) -> str:
        """End the text where it stands; what was held back of it."""
        rest = self._held_back()
        self.shown += rest
        self.ended = why
        return rest

    def _held_back(self) -> str:
        return self._stop.feed(self._decoder.end()) + self._stop.end()


@dataclass
class Speed:
    """How fast texts were made."""

    first_token_s: list[float] = field(default_factory=list)
    """Of each batch whose tokens did not come all at once."""
    tokens: int = 0
    """All; without the first of each text where these came alone, as they take longer."""
    seconds: float = 0.0
    """That these took."""
    passes: int = 0
    """Of the model over what a draft proposed."""
    checked: int = 0
    """Tokens that came of them."""
    compile_s: float = 0.0
    """Seconds of compiling, which the others leave out."""

    def __str__(self) -> str:
        n = len(self.first_token_s)
        of = f" (the mean of {n} batches)" if n > 1 else ""
        told = [f"time to first token {sum(self.first_token_s) / n:.3f} s{of}"] if n else []
        if self.tokens:
            told.append(f"{self.tokens / self.seconds:,.0f} tokens/s ({self.tokens:,} in {self.seconds:.2f} s)")
        if self.passes:
            told.append(f"{self.checked / self.passes:.2f} tokens per pass")
        if self.compile_s >= LEAST_COMPILE_S:
            told.append(f"{self.compile_s:.1f} s of compiling not counted")
        return "; ".join(told)


class Search:
    """A beam search as a generation: one piece, with the n best texts of each prompt."""

    def __init__(self, call: Callable[[], Beams], n: int) -> None:
        self._call, self._n = call, n
        self.scores: list[float] = []
        """Of each row, once it is made."""

    def __iter__(self) -> Iterator[Piece]:
        tokens_PNT, scores_PN = (np.asarray(x)[:, : self._n] for x in self._call())
        self.scores = scores_PN.reshape(-1).tolist()
        tokens_BT = tokens_PNT.reshape(-1, tokens_PNT.shape[-1])
        nothing = np.zeros((len(tokens_BT), 0))
        yield Piece(tokens_BT, nothing, nothing[..., None], nothing[..., None])

    def end(self, row: int) -> None:
        """Nothing more comes anyway."""


def batches(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Which prompts go together: those of neighbouring lengths, so that few programs are compiled."""
    in_order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    return [in_order[start : start + size] for start in range(0, len(in_order), size)]


def follow(
    generation: Generation | Search | Speculation, texts: Sequence[Text], stop_tokens: Sequence[int],
    max_new_tokens: int, speed: Speed, interrupted: Callable[[], bool],
) -> Iterator[str]:  # fmt: skip
    """Fill in texts, one a row, as they are made; what of the first one can be shown after each piece.

    A text that nothing else ends has its length with `max_new_tokens`, and is interrupted with fewer. The rows beyond
    the texts are let go before they begin.
    """
    began, first, n_alone, last = time.perf_counter(), 0.0, 0, 0.0
    going, clock = dict(enumerate(texts)), CompileClock()
    pieces = iter(generation)
    while True:
        with clock:
            piece = next(pieces, None)
        if piece is None:
            break
        now = time.perf_counter() - began
        computed = max(now - clock.seconds, LEAST_S)
        shown = ""
        for row, text in list(going.items()):
            n_before = len(text.tokens)
            new = text.take(piece, row, stop_tokens)
            if len(text.tokens) > n_before:
                text.seconds, last = now, computed
                text.first_token_s = text.first_token_s or now
            shown = new if row == 0 else shown
            if text.ended:
                generation.end(row)
                del going[row]
        if not first:
            first = computed
            n_alone = sum(len(text.tokens) for text in texts) if piece.tokens_BN.shape[1] == 1 else 0
        yield shown
        if interrupted():
            break
    speed.compile_s += clock.seconds
    speed.tokens += sum(len(text.tokens) for text in texts) - n_alone
    speed.seconds += last - (first if n_alone else 0.0)
    speed.first_token_s += [first] if n_alone or first < last else []
    for row, text in going.items():
        rest = text.end("length" if len(text.tokens) >= max_new_tokens else "interrupted")
        if row == 0:
            yield rest
