"""`sample.py` on the run of a masked language model: it fills gaps."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxformer.cli.load import RunOptions, open_run
from jaxformer.cli.prompts import Prompt, prepared
from jaxformer.errors import UserError
from jaxformer.terminal import echo

if TYPE_CHECKING:
    from jaxformer.decode.fill_mask import Gap
    from jaxformer.runs import Run

GAP = "[MASK]"
"""Where one token is left out, in a prompt. A space before it belongs to what is left out, as most tokens begin so."""
APPLY = {"--run", "--checkpoint", "--weights", "--prompt", "--prompts-file", "--jsonl", "--top-logprobs"}
"""The options that filling knows."""
CANDIDATES = 5
"""As many are named if --top-logprobs does not say how many."""


def fill_prompts(
    options: RunOptions, prompts: Sequence[Prompt | UserError], given: set[str], n_candidates: int, jsonl: bool
) -> int:
    """Fill the gaps of each prompt and print it; the exit status.

    Raises:
      UserError: an option was given that is for texts that go on, more candidates are asked for than there are, or a
        prompt that is not of a file cannot be filled.
    """
    from jaxformer.decode.weights import restored

    if others := sorted(given - APPLY):
        raise UserError(f"the run fills gaps in a text, of which {others[0]} says nothing; leave it out.")
    run = open_run(options, None)
    run = dataclasses.replace(run, params=restored(run.params))  # the text is read once, so rounding saves no time
    if n_candidates >= (most := run.text_model()[0].vocab_size):
        raise UserError(f"--top-logprobs is {n_candidates}; it must be at most {most - 1}, all tokens of the run.")
    encode = lambda prompt: (prompt, encode_gaps(prompt, run))  # noqa: E731
    fitting: list[tuple[Prompt, list[int]]] = prepared(prompts, encode, "--prompts-file" in given)
    for prompt, tokens in fitting:
        row = _filled(run, prompt, tokens, n_candidates or CANDIDATES)
        echo(json.dumps(row) if jsonl else _told(row))
    return 2 if len(fitting) < len(prompts) else 0


def encode_gaps(prompt: Prompt, run: Run) -> list[int]:
    """A prompt's tokens, the mask where there is a gap."""
    if prompt.seed is not None:
        raise UserError(f"{prompt.where} has a seed, but what fills a gap is not drawn; leave it out.")
    config, tokenizer = run.text_model()
    before, *after = prompt.text.split(GAP)
    if not after:
        raise UserError(f"{prompt.where} has no {GAP}, and the run fills gaps; write one, as in 'The {GAP} of'.")
    tokens = tokenizer.encode(before.removesuffix(" "))
    for number, part in enumerate(after, start=1):
        last = number == len(after)
        tokens += [config.vocab_size - 1, *tokenizer.encode(part if last else part.removesuffix(" "))]
    if len(tokens) > config.context_length:
        raise UserError(
            f"{prompt.where} has {len(tokens)} tokens; it may have at most the context's {config.context_length}."
        )
    return tokens


def _filled(run: Run, prompt: Prompt, tokens: list[int], n_candidates: int) -> dict[str, Any]:
    """A row of JSON: the text filled, and of each gap the likeliest tokens, as text, with their probabilities."""
    from jaxformer.decode.fill_mask import fill
    from jaxformer.models.encoder import MaskedLanguageModel

    assert isinstance(run.model, MaskedLanguageModel)
    tokenizer, tokens = run.text_model()[1], list(tokens)
    gaps: list[Gap] = fill(run.model, run.params, tokens, n_candidates)
    for gap in gaps:
        tokens[gap.place] = gap.candidates[0][0]
    named = [[(tokenizer.decode([token]), float(f"{p:.4g}")) for token, p in gap.candidates] for gap in gaps]
    return {
        "line": prompt.line, "id": prompt.id, "prompt": prompt.text, "text": tokenizer.decode(tokens), "gaps": named,
    }  # fmt: skip


def _told(row: dict[str, Any]) -> str:
    """A row for people."""
    gaps = ["  " + ", ".join(f"{text!r} {p:.3f}" for text, p in candidates) for candidates in row["gaps"]]
    return "\n".join([row["text"], *gaps])
