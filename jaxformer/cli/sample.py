"""`sample.py`: continue a text with a trained model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxformer.cli import machine
from jaxformer.cli.arguments import parse, run_command
from jaxformer.cli.train import RUNS
from jaxformer.decode.samplers import Sampling
from jaxformer.errors import UserError


@dataclass(frozen=True)
class Arguments:
    """Options of sample.py."""

    run: str | None = None
    """The run's folder; without it, the newest below runs/."""
    prompt: tuple[str, ...] = ("The ",)
    """The text to continue; several are continued together, as one batch."""
    max_new_tokens: int = 200
    """Tokens to make; a run may end earlier, with the document."""
    temperature: float = 0.8
    """Below 1 sharper, above 1 flatter, 0 always the likeliest token."""
    top_k: int | None = None
    """Draw among the k likeliest tokens."""
    top_p: float | None = None
    """Draw among the likeliest tokens that make up this share."""
    seed: int = 0
    """The same seed gives the same text."""
    num_samples: int = 1
    """Texts for each prompt."""
    checkpoint: str = "last"
    """'last', 'best', or a step."""
    mesh: str = ""
    """Devices over which the parameters lie, such as 'tensor=2'; without it, the first device."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Sample; the exit status."""
    return run_command(_main, arguments)


def _main(arguments: list[str]) -> int:
    asked = parse(Arguments, arguments, Arguments(), "sample.py", "Continue a text with a trained model.")
    sampling = Sampling(asked.temperature, asked.top_k, asked.top_p)
    for name, limit in (("max_new_tokens", 1), ("num_samples", 1), ("seed", 0)):
        if getattr(asked, name) < limit:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} is {getattr(asked, name)}; it must be at least {limit}.")
    if not asked.prompt or not all(asked.prompt):
        raise UserError("the prompt is empty; give it at least one character.")
    for prompt in asked.prompt:
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"the prompt holds bytes that are not UTF-8, at character {error.start}.") from error
    machine.set_up(mesh=asked.mesh)

    from jaxformer.data.tokenizer import StreamDecoder
    from jaxformer.decode.generate import generate
    from jaxformer.runs import latest_run, load_run
    from jaxformer.sharding import make_mesh

    mesh = make_mesh(asked.mesh) if asked.mesh else None
    run = load_run(Path(asked.run) if asked.run is not None else latest_run(RUNS), asked.checkpoint, mesh)
    prompts = [p for p in asked.prompt for _ in range(asked.num_samples)]
    pieces = generate(
        run.model, run.params, [run.tokenizer.encode(p) for p in asked.prompt], sampling,
        range(asked.seed, asked.seed + len(prompts)), max_new_tokens=asked.max_new_tokens,
        context_length=run.config.model.context_length, n_samples=asked.num_samples,
        fill_token=run.tokenizer.end_of_text,
    )  # fmt: skip
    # One text is shown as it is made; several would run into each other, so each is shown when all are done.
    texts, decoders = list(prompts), [StreamDecoder(run.tokenizer) for _ in prompts]
    open_rows = set(range(len(prompts)))
    stream = len(prompts) == 1
    if stream:
        _show(prompts[0])
    for piece in pieces:
        for row in sorted(open_rows):
            tokens = piece.tokens_BN[row].tolist()
            if run.tokenizer.end_of_text in tokens:
                tokens = tokens[: tokens.index(run.tokenizer.end_of_text)]
                open_rows.remove(row)
            text = decoders[row].feed(tokens)
            texts[row] += text
            if stream:
                _show(text)
        if not open_rows:
            break
    for row, decoder in enumerate(decoders):
        rest = decoder.end()
        texts[row] += rest
        if stream:
            _show(rest + "\n")
    if not stream:
        for number, text in enumerate(texts, start=1):
            _show(f"[{number}] {text}\n\n")
    return 0


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
