"""Explanations of completions: per token, its probability, the most likely others, and the most attended positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxformer.contract import contract_of
from jaxformer.decode.completion import Completion, json_float
from jaxformer.decode.prompts import Row
from jaxformer.decode.weights import restored
from jaxformer.terminal import align

if TYPE_CHECKING:
    from jaxformer.runs.run import Run


def explained_rows(run: Run, prompt: list[int], completion: list[int]) -> list[Row]:
    """Return JSON rows given the tokens of a prompt and its completion, one per new token that the model has a position
    for."""
    from jaxformer.inspect.explanations import explain  # a tenth of a second that only --explain needs

    config, tokenizer = run.text_model()
    tokens = prompt + completion
    tokens = tokens if contract_of(run.model).extrapolates else tokens[: config.n_positions]
    # A published model may have more tokens than its tokenizer.
    name = lambda token: tokenizer.decode_part([token]) if token < tokenizer.vocab_size else f"[{token}]"  # noqa: E731
    return [
        {
            "token": name(row.token),
            "probability": json_float(row.probability),
            "entropy": json_float(row.entropy),
            "alternatives": [(name(token), json_float(p)) for token, p in row.alternatives],
            "attended": [(position, name(tokens[position]), json_float(w)) for position, w in row.attended],
        }
        for row in explain(run.model, restored(run.params), tokens, len(prompt))
    ]


def explanation_table(completion: Completion) -> str:
    """Return the explanation of a completion as a table in text; empty without an explanation."""
    explained = completion.explained
    if explained is None:
        return ""
    pairs = lambda row: ", ".join(f"{text!r} {p:.2f}" for *_, text, p in row)  # noqa: E731
    rows = [("token", "probability", "entropy", "alternatives", "attended")]
    for row in explained:
        numbers = f"{row['probability']:.3f}", f"{row['entropy']:.2f}"
        rows.append((repr(row["token"]), *numbers, pairs(row["alternatives"]), pairs(row["attended"])))
    left_out = len(completion.text.tokens) - len(explained)
    note = f"  {left_out} more, past the context, are not explained\n" if left_out else ""
    return "".join(f"  {line.rstrip()}\n" for line in align(rows, "<>><<")) + note
