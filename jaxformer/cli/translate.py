"""What `sample.py` and `eval` do with a model that makes one text of another."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

from jaxformer.cli.load import open_run
from jaxformer.cli.prompts import Prompt, prepared
from jaxformer.cli.sampler import fitting_memory
from jaxformer.data.pairs import PairDataset
from jaxformer.decode import exact_match, scores, translate_tokens
from jaxformer.errors import UserError
from jaxformer.sharding import make_mesh
from jaxformer.terminal import echo, echo_error

if TYPE_CHECKING:
    from jaxformer.cli.sample import Arguments
    from jaxformer.models.objective import Params
    from jaxformer.runs import Run

OPTIONS = {
    "--run", "--checkpoint", "--weights", "--mesh", "--prompt", "--prompts-file", "--jsonl", "--max-new-tokens",
    "--batch-size", "--num-beams", "--length-penalty", "--cache-dtype",
}  # fmt: skip
"""Of sample.py, what matters to such a model."""


def main(asked: Arguments, given: Collection[str], prompts: Sequence[Prompt | UserError]) -> int:
    """Translate each prompt and show a line for each, as soon as its batch is done; the exit status.

    Raises:
      UserError: an option does not apply, or a prompt that is not of a file cannot be translated.
    """
    if foreign := sorted(set(given) - OPTIONS):
        raise UserError(f"the run's model translates, and knows no {foreign[0]}; leave it out.")
    if not {"--prompt", "--prompts-file"} & set(given):
        raise UserError("there is nothing to translate; give it with --prompt or --prompts-file.")
    run = open_run(asked.opening, make_mesh(asked.opening.mesh) if asked.opening.mesh else None)
    model, tokenizer = run.text_model()
    encode = lambda prompt: (prompt, encode_source(prompt, run))  # noqa: E731
    fitting: list[tuple[Prompt, list[int]]] = prepared(prompts, encode, asked.prompts_file is not None)
    translate = partial(
        translate_tokens, run.model, run.params, end_of_text=tokenizer.end_of_text, n_beams=asked.num_beams,
        context_length=model.context_length, length_penalty=asked.length_penalty, cache_dtype=asked.cache_dtype,
        max_new_tokens=asked.max_new_tokens if "--max-new-tokens" in given else None, batch_size=asked.batch_size,
    )  # fmt: skip
    for first in range(0, len(fitting), asked.batch_size):
        batch = fitting[first : first + asked.batch_size]
        with fitting_memory(len(batch)):
            targets = translate([source for _, source in batch])
        for (prompt, _), target in zip(batch, targets, strict=True):
            text = tokenizer.decode(target)
            row = {"line": prompt.line, "id": prompt.id, "prompt": prompt.text, "text": text, "tokens": target}
            echo(json.dumps(row) if asked.jsonl else text)
    return 2 if len(fitting) < len(prompts) else 0


def encode_source(prompt: Prompt, run: Run) -> list[int]:
    """A prompt's tokens."""
    if prompt.seed is not None:
        raise UserError(f"{prompt.where} has a seed, but a translation draws nothing; leave it out.")
    model, tokenizer = run.text_model()
    tokens = tokenizer.encode(prompt.text)
    if len(tokens) > model.context_length:
        raise UserError(
            f"{prompt.where} has {len(tokens)} tokens; it may have at most the context's {model.context_length}."
        )
    return tokens


def quality(run: Run, params: Params, data: PairDataset, batch_size: int) -> dict[str, float]:
    """BLEU, chrF and the share of exact matches of what a run makes, greedily, of the held-out sources; without
    sacrebleu the last alone. A source that is too long is cut."""
    model, tokenizer = run.text_model()
    sources, references = zip(*data.val, strict=True)
    targets = translate_tokens(
        run.model, params, [tokens[: model.context_length] for tokens in tokenizer.encode_batch(sources)],
        end_of_text=tokenizer.end_of_text, context_length=model.context_length, batch_size=batch_size,
    )  # fmt: skip
    made = [tokenizer.decode(target) for target in targets]
    found = {"exact": exact_match(made, references)}
    try:
        return scores(made, references) | found
    except UserError as missing:
        echo_error(f"note: {missing}")
        return found
