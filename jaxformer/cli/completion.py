"""A text that was made of a prompt, for people and as a line of JSON."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any

from jaxformer.cli.prompts import Prompt
from jaxformer.decode import Text


@dataclass
class Answer:
    """A text, and what it is one of."""

    prompt: Prompt
    sample: int
    seed: int
    text: Text
    score: float | None = None
    """Of a beam search."""
    explained: list[dict[str, Any]] | None = None
    """A row for each token that the model has a position for, where that was asked for."""

    def as_row(self) -> dict[str, Any]:
        """For a line of JSON."""
        text, score = self.text, self.score
        return {
            "line": self.prompt.line, "id": self.prompt.id, "prompt": self.prompt.text, "sample": self.sample,
            "seed": self.seed, "text": text.shown, "ended": text.ended, "tokens": text.tokens,
            **({"logprobs": [rounded(x) for x in text.logprobs]} if score is None else {"score": rounded(score)}),
            **({"top_logprobs": [[(t, rounded(x)) for t, x in likeliest] for likeliest in text.top_logprobs]}
               if any(text.top_logprobs) else {}),
            **({} if self.explained is None else {"explained": self.explained}),
            "first_token_s": round(text.first_token_s, 6), "seconds": round(text.seconds, 6),
        }  # fmt: skip


def rounded(value: float) -> float | None:
    """In the digits that a float32 has; JSON knows neither infinity nor NaN."""
    return float(f"{value:.7g}") if isfinite(value) else None


def explanation(answer: Answer) -> str:
    """What was explained of a text, for people; nothing where that was not asked for."""
    explained = answer.explained
    if explained is None:
        return ""
    pairs = lambda found: ", ".join(f"{text!r} {p:.2f}" for *_, text, p in found)  # noqa: E731
    rows = [
        (repr(row["token"]), f"{row['probability']:.3f}", f"{row['entropy']:.2f}", pairs(row["rivals"]),
         pairs(row["looked_at"])) for row in explained
    ]  # fmt: skip
    rows.insert(0, ("token", "chance", "entropy", "instead of", "looked at"))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    left_out = len(answer.text.tokens) - len(explained)
    note = f"  {left_out} more, past the context, are not explained\n" if left_out else ""
    lines = (f"  {a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d:<{widths[3]}}  {e}" for a, b, c, d, e in rows)
    return "".join(f"{line.rstrip()}\n" for line in lines) + note
