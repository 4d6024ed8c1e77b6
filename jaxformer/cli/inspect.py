"""`python -m jaxformer inspect`: one page that shows a trained model from within."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.cli import machine
from jaxformer.cli.arguments import parse, run_command
from jaxformer.cli.load import RunOptions, open_run, with_run
from jaxformer.cli.options import POSITIONAL
from jaxformer.contract import Task, contract_of
from jaxformer.data.dataset import Batch
from jaxformer.decode import translate_tokens
from jaxformer.decode.fill_mask import MASK, encode_masked
from jaxformer.decode.prompts import Prompt
from jaxformer.decode.translate import encode_source
from jaxformer.errors import UserError
from jaxformer.fields import at_least
from jaxformer.inspect import capture_shapes, model_sections
from jaxformer.inspect.page import Section, write_page
from jaxformer.inspect.training_sections import training_sections
from jaxformer.models.objective import is_causal_lm
from jaxformer.terminal import echo

if TYPE_CHECKING:
    from jaxformer.runs import Run

MOST_WEIGHTS = 3_000_000
"""Attention weights that a page holds, 4 bytes for 3; with Plotly's 5 MB it stays below 10 MB."""
MOST_TOKENS = 128
"""Of a held-out text, as many are shown."""
END = "∅"
"""What stands for the end of a text."""
SIGNS = str.maketrans({"\n": "⏎", "\r": "␍", "\t": "⇥"})
TARGETS, EXAMPLES = 1000, 256
"""What heads are measured on, where nothing else is asked for."""
DESCRIPTION = """Look inside a trained model: write one HTML page that opens from disk and needs no network. It has the
text's tokens, to be pointed at, and where each head looks from them; the chance that each token had; what the stream
would say after each block (logit lens), and which head or MLP spoke for the token that follows; what each head does,
and what the loss would be without it; what becomes of gradients as attention becomes one-hot, and what gradient each
example asks for; and the training: losses, entropy, update ratios, samples. A model shows what it has of these."""


@dataclass(frozen=True)
class Arguments:
    """Options of inspect."""

    run: Annotated[str | None, POSITIONAL] = None
    """The run's folder; without it, the newest below runs/ that has a checkpoint."""
    prompt: str | None = None
    """The text to look at; without it, a held-out one. Of a masked language model with [MASK] where gaps are; of one
    that translates, the source."""
    out: str | None = None
    """The page; without it, inspect.html in the run's folder."""
    checkpoint: str = "last"
    """'last', 'best', or a step."""
    examples: int | None = None
    """Held-out examples that heads are measured on; without it, as many as have some 1,000 targets, or 256. Where the
    run's data is not here, heads are measured on the prompt alone."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; the exit status."""
    return run_command(_main, arguments)


def _main(arguments: list[str]) -> int:
    asked = parse(arguments, Arguments(), "python -m jaxformer inspect", DESCRIPTION)
    at_least(asked, 1, *["examples"] if asked.examples is not None else [])
    machine.set_up()
    run = open_run(with_run(RunOptions(run=asked.run, checkpoint=asked.checkpoint)), None)
    place = run.path / "inspect.html" if asked.out is None else Path(asked.out)
    if not place.parent.is_dir() or (place.exists() and not place.is_file()):
        raise UserError(f"--out is {place}; it must be a file in a folder that exists.")

    from jaxformer.runs import count_parameters
    from jaxformer.train.log import read_metrics, read_samples

    probe, lacking = _probe(run, asked.examples)
    example = _example(run, asked.prompt, probe)
    facts = [f"{type(run.model).__name__} of {count_parameters(run.params):,} parameters, at step {run.step:,}."]
    sections: list[Section] = []
    words = lambda token: _word(run, token)  # noqa: E731
    if example is not None:
        mask = run.text_model()[0].vocab_size - 1 if contract_of(run.model).task is Task.MASKED_LM else None
        sections += [model_sections.attention_section(run.model, run.params, example, words, mask)]
        sections += model_sections.residual_stream_sections(run.model, run.params, example, words)
        if probe is None:
            probe = _alone(run, example)
    if probe is not None:
        measured = model_sections.head_sections(run.model, run.params, probe)
        measured += model_sections.saturation_sections(run.model, run.params, probe)
        measured += model_sections.gradient_sections(run.model, run.params, probe, words if run.tokenizer else None)
        sections += measured
    if probe is not None and measured:
        on = "the prompt alone" if lacking else f"held-out data: {len(probe.inputs[0]):,} examples"
        facts.append(f"Heads and gradients are measured on {on}.")
    if lacking:
        facts.append(f"The data of the run cannot be read: {lacking}")
    sections += training_sections(read_metrics(run.path), read_samples(run.path))
    write_page(place.resolve(), f"{run.path.resolve().name}: inside", facts, sections)
    echo(f"{place}: {place.stat().st_size / 1e6:.1f} MB; open it in a browser")
    return 0


def _word(run: Run, token: int) -> str:
    """A token's text; that of the mask, which the tokenizer does not know, is what a prompt has for it."""
    tokenizer = run.text_model()[1]
    if token >= tokenizer.vocab_size:
        return MASK
    if token == tokenizer.end_of_text:
        return END
    return tokenizer.decode([token]).translate(SIGNS)


def _probe(run: Run, n: int | None) -> tuple[Batch | None, str]:
    """Held-out examples of the run's data; or why there are none."""
    from jaxformer.runs import load_data

    try:
        data = load_data(run.path, run.config)
    except UserError as error:
        return None, str(error)
    if n is None:
        targets = np.size(next(data.held_out(1, 1)).targets)
        n = min(EXAMPLES, -(-TARGETS // targets))
    batch = next(data.held_out(n, n))
    if batch.weights is None:
        return batch, ""
    real = np.flatnonzero(batch.weights.reshape(len(batch.weights), -1).any(axis=1))  # the others fill it up
    return jax.tree.map(lambda x: x[real], batch), ""


def _example(run: Run, prompt: str | None, probe: Batch | None) -> tuple[Any, ...] | None:
    """One example's inputs without padding: the prompt, or a held-out one; None where the model reads no text, or none
    of such a length.

    Raises:
      UserError: the prompt does not suit the run's model, or the page.
    """
    if prompt is not None:
        run.text_model()  # a model of images has no prompt
    if run.tokenizer is None or contract_of(run.model).task is Task.CONTRASTIVE:
        return None
    if contract_of(run.model).fixed_length:
        if prompt is not None:
            raise UserError(
                "the run's model reads full windows alone, of which a page shows nothing; leave --prompt out."
            )
        return None
    if prompt is not None:
        example = _read(run, Prompt(prompt, "--prompt"))
    elif probe is not None:
        example = _unpadded(jax.tree.map(lambda x: jnp.asarray(x[0]), probe), MOST_TOKENS)
    else:
        raise UserError("the run's data is not here to take a text from; give one with --prompt.")
    n = sum(
        x.size
        for x in capture_shapes(run.model, run.params, *example, names=model_sections.MAPS, missing_ok=True).values()
    )
    if n <= MOST_WEIGHTS:
        return example
    longest = max(len(x) for x in example if jnp.ndim(x))
    fitting = int(longest * (MOST_WEIGHTS / n) ** 0.5)
    if prompt is not None:
        raise UserError(
            f"--prompt has {longest} tokens, and so the model {n:,} attention weights; a page holds at most "
            f"{MOST_WEIGHTS:,}: shorten it to about {fitting} tokens."
        )
    return _unpadded(jax.tree.map(lambda x: jnp.asarray(x[0]), probe), fitting)


def _read(run: Run, prompt: Prompt) -> tuple[Any, ...]:
    """A prompt as the model's inputs; of one that translates, with what it makes of it."""
    config, tokenizer = run.text_model()
    if contract_of(run.model).task is Task.MASKED_LM:
        tokens = encode_masked(prompt, run)
        return jnp.array(tokens), jnp.ones(len(tokens), bool)
    if contract_of(run.model).task is Task.SEQUENCE_TO_SEQUENCE:
        source, end = encode_source(prompt, run), tokenizer.end_of_text
        [target] = translate_tokens(
            run.model, run.params, [source], end_of_text=end, context_length=config.context_length
        )
        return jnp.array(source), jnp.ones(len(source), bool), jnp.array([end, *target][: config.context_length])
    tokens = tokenizer.encode(prompt.text)
    if len(tokens) > config.context_length:
        raise UserError(
            f"--prompt has {len(tokens)} tokens; it may have at most the context's {config.context_length}."
        )
    # A prefix is read in both directions: half of the text, for the other half to be predicted.
    prefix = (jnp.int32(len(tokens) // 2),) if contract_of(run.model).has_prefix else ()
    return jnp.array(tokens), *prefix


def _unpadded(example: Batch, most: int) -> tuple[Any, ...]:
    """The inputs of a held-out example, as long as its texts are, and of at most so many tokens."""
    first, *rest = example.inputs
    if rest and rest[0].dtype == bool:
        first, rest[0] = first[rest[0]], rest[0][rest[0]]
    if len(rest) == 2:  # a target, which counts where it stands
        rest[1] = rest[1][example.weights > 0]
    return tuple(x[:most] if x.ndim else jnp.minimum(x, most // 2) for x in (first, *rest))


def _alone(run: Run, example: tuple[Any, ...]) -> Batch | None:
    """The prompt as a batch, where it is its own target; None for models of which more has to be known."""
    if not is_causal_lm(run.model) or len(example) > 1 or len(example[0]) < 2:
        return None
    tokens_T = example[0]
    return Batch((tokens_T[None, :-1],), tokens_T[None, 1:])
