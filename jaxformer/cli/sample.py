"""`sample.py`: continue texts with a trained model."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log2
from typing import Annotated, Literal

from jaxformer.cli import machine, translate
from jaxformer.cli.arguments import options_given, parse, run_command
from jaxformer.cli.classify import tell_images
from jaxformer.cli.fill_mask import fill_prompts
from jaxformer.cli.load import RunOptions, model_of, run_folder, with_run
from jaxformer.cli.options import HIDDEN, MERGED
from jaxformer.cli.prompts import MOST_SEED, Prompt, prepared, read_prompts
from jaxformer.cli.sampler import Sampler
from jaxformer.contract import Task, contract_of
from jaxformer.decode import Sampling, Speed, StopStrings
from jaxformer.decode.speculative import MOST_PROPOSED
from jaxformer.errors import UserError
from jaxformer.signals import record_signals
from jaxformer.terminal import echo, echo_error

DESCRIPTION = """Continue texts with a trained model.

What follows a prompt depends on the prompt, the options and the seed alone, and not on what else is continued beside
it, but for rounding: that can decide between two tokens that are as good as equally likely. A text ends with the
document (the end-of-text token), at a stop token or stop string, which are not shown, or after
--max-new-tokens.

A masked language model fills gaps instead, one token each: --prompt "The [MASK] of the people". A model that makes
one text of another, such as a translation, does so with each prompt, greedily or with --num-beams. A model of images
tells what those of --images show, and one of images and texts which of the texts of --prompt fits each of them."""


@dataclass(frozen=True)
class SamplingOptions(Sampling):
    """Every field of `Sampling` is an option; those that hold a run's tokens are given as text, in `Arguments`."""

    temperature: float = 0.8
    """Below 1 sharper, above 1 flatter, 0 always the likeliest token; then nothing narrows the choice."""
    min_p: float | None = 0.05
    """Draw among tokens at least this probable, as a share of the likeliest one's probability; 0 keeps all. Applied
    beside the other filters."""
    logit_bias: Annotated[tuple[tuple[int, float], ...], HIDDEN] = ()
    bad_words: Annotated[tuple[tuple[int, ...], ...], HIDDEN] = ()
    stop_tokens: tuple[int, ...] = ()
    """Numbers of tokens that end a text, as end-of-text always does."""

    def __post_init__(self) -> None:
        self.completed(0)

    def completed(
        self,
        end_of_text: int,
        logit_bias: tuple[tuple[int, float], ...] = (),
        bad_words: tuple[tuple[int, ...], ...] = (),
    ) -> Sampling:
        """With the tokens that only a run knows.

        Raises:
          UserError: see `Sampling`.
        """
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(Sampling)}
        stop = tuple(dict.fromkeys((end_of_text, *self.stop_tokens)))
        return Sampling(**plain | {"stop_tokens": stop, "logit_bias": logit_bias, "bad_words": bad_words})


NOT_WITH_BEAMS = {f.name for f in dataclasses.fields(Sampling)} - {"stop_tokens"} | {"seed", "stop", "prefill_chunk"}
"""Options that beam search knows nothing of."""
MOST = 2**31 - 1
"""Of what the device counts."""
MOST_EXPONENT = 100
"""Of 2, that lengths and scores of beams may reach; a float32 holds 126, and a summed log-probability needs some."""


@dataclass(frozen=True)
class Arguments:
    """Options of sample.py."""

    opening: Annotated[RunOptions, MERGED] = field(default_factory=RunOptions)
    prompt: tuple[str, ...] = ("The",)
    """The text to continue; several are continued together."""
    images: tuple[str, ...] = ()
    """Files of pictures, for a model that sees; of animated ones, where it takes videos."""
    prompts_file: str | None = None
    """A file with a prompt a line; a .jsonl file has objects with "prompt", and "seed" and "id" if one likes."""
    explain: bool = False
    """Tell of each token the chance it had, the likeliest others, the entropy of all, and which tokens were looked at
    most, the mean over all heads."""
    interactive: bool = False
    """Ask for prompts. Ctrl-C stops a text, Ctrl-D leaves."""
    jsonl: bool = False
    """Write a line of JSON for each text as soon as its batch is done: with its prompt's line, its tokens, their
    log-probabilities as the model gave them, why it ended, and the seconds from the start of its batch to its first
    token and its last. Of a translation, with its prompt's line and its tokens."""
    max_new_tokens: int = 200
    """Tokens to make; a text may end earlier."""
    num_samples: int = 1
    """Texts for each prompt; text k is what --seed k more gives, or the k-th best of the beams."""
    seed: int = 0
    """The same seed gives the same text."""
    batch_size: int = 16
    """Texts to make at once; those of one prompt stay together."""
    sampling: Annotated[SamplingOptions, MERGED] = field(default_factory=SamplingOptions)
    bad_words: tuple[str, ...] = ()
    """Texts never to make, also not after a space, as the run's tokenizer writes them."""
    logit_bias: tuple[str, ...] = ()
    """TEXT=BIAS, where the text is one token; the bias is added to its logit."""
    stop: tuple[str, ...] = ()
    """Texts that end a text; not shown."""
    num_beams: int = 1
    """More than 1 searches for the likeliest text instead of drawing, keeping so many at each step. Ctrl-C waits until
    the search is done."""
    length_penalty: float = 1.0
    """Of --num-beams: above 0 favours long texts, below 0 short ones."""
    draft: str | None = None
    """A smaller run with the same tokenizer, or 'lookup' for the text itself: it proposes tokens, of which the model
    checks several in one pass. The text is distributed as without it, and greedily is the same. One at a time."""
    draft_tokens: int = 4
    """How many --draft proposes at a time."""
    cache_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """What keys and values are kept in, of the model; those of a draft run stay in float32."""
    prefill_chunk: int = 512
    """Prompts are read so many tokens at a time."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Sample; the exit status: 0 done, 2 wrong input, also if it was only some of the prompts, 130 interrupted."""
    return run_command(_main, arguments)


def _main(arguments: list[str]) -> int:
    asked = parse(arguments, Arguments(), "sample.py", DESCRIPTION)
    given = options_given(arguments)
    _check(asked, given)
    prompts = _prompts(asked)
    machine.set_up(mesh=asked.opening.mesh)
    asked = dataclasses.replace(asked, opening=with_run(asked.opening))

    model = model_of(asked.opening)
    task = contract_of(model).task
    if task is Task.MASKED_LM:
        return fill_prompts(asked.opening, prompts, given, asked.sampling.top_logprobs, asked.jsonl)
    if task in (Task.IMAGE_CLASSIFICATION, Task.VIDEO_CLASSIFICATION, Task.CONTRASTIVE):
        return tell_images(asked.opening, asked.images, prompts, given, asked.jsonl)
    if asked.images:
        raise UserError(
            f"{run_folder(asked.opening)} holds a {type(model).__name__}, which sees no images; leave out --images."
        )
    if task is Task.SEQUENCE_TO_SEQUENCE:
        return translate.main(asked, given, prompts)
    sampler = Sampler(asked, given)
    if asked.interactive:
        return _converse(sampler)
    encode = lambda prompt: (prompt, sampler.encode(prompt))  # noqa: E731
    fitting: list[tuple[Prompt, list[int]]] = prepared(prompts, encode, asked.prompts_file is not None)
    if fitting:
        with record_signals(signal.SIGINT) as pressed:
            sampler.show(fitting, pressed)
        echo(str(sampler.speed), sys.stderr)
        if pressed.is_set():
            raise KeyboardInterrupt
    return 2 if len(fitting) < len(prompts) else 0


def _check(asked: Arguments, given: set[str]) -> None:
    """Raise `UserError` for what cannot be, as far as no run is needed to know it."""
    counts = ("max_new_tokens", "num_samples", "batch_size", "prefill_chunk", "num_beams")
    limits = {"seed": (0, MOST_SEED), "draft_tokens": (1, MOST_PROPOSED)} | dict.fromkeys(counts, (1, MOST))
    for name, (least, most) in limits.items():
        if not least <= (value := getattr(asked, name)) <= most:
            raise UserError(f"--{name.replace('_', '-')} is {value}; it must be at least {least} and at most {most}.")
    sources = [
        flag
        for flag, there in (
            ("--prompt", "--prompt" in given),
            ("--prompts-file", asked.prompts_file is not None),
            ("--interactive", asked.interactive),
        )
        if there
    ]
    if len(sources) > 1:
        raise UserError(f"{' and '.join(sources)} each say what to continue; give one of them.")
    StopStrings(asked.stop)
    if asked.draft is None and "--draft-tokens" in given:
        raise UserError("--draft-tokens is of use to a draft alone; leave it out, or give --draft.")
    if asked.draft is not None and "--prefill-chunk" in given:
        raise UserError("a draft's prompts are read at once; leave out --prefill-chunk, or --draft.")
    if asked.opening.weights == "int8" and asked.opening.mesh:
        raise UserError("weights of int8 lie on one device; leave out --mesh, or use bfloat16.")
    if asked.num_beams == 1:
        if "--length-penalty" in given:
            raise UserError("--length-penalty is of use to beam search alone; leave it out, or give --num-beams.")
    elif not abs(asked.length_penalty) <= (steepest := MOST_EXPONENT / max(1.0, log2(asked.max_new_tokens))):
        raise UserError(
            f"--length-penalty is {asked.length_penalty}, and a float32 does not hold {asked.max_new_tokens} tokens to "
            f"that power; it must be from {-steepest:.1f} to {steepest:.1f}."
        )
    elif clash := sorted(given & {f"--{name.replace('_', '-')}" for name in NOT_WITH_BEAMS}):
        raise UserError(f"beam search draws nothing and knows no {clash[0]}; leave that out, or --num-beams.")
    elif asked.draft is not None:
        raise UserError("beam search and a draft do not go together; leave out --draft or --num-beams.")
    elif asked.num_samples > asked.num_beams:
        raise UserError(f"--num-samples is {asked.num_samples}; it must be at most --num-beams, {asked.num_beams}.")


def _prompts(asked: Arguments) -> Sequence[Prompt | UserError]:
    """What to continue; of a file's line that holds no prompt, what is wrong with it."""
    if asked.interactive:
        return []
    if asked.prompts_file is not None:
        return read_prompts(asked.prompts_file)
    if not asked.prompt:
        raise UserError("the prompt is empty; give it at least one character.")
    several = len(asked.prompt) > 1
    return [Prompt(text, f"prompt {i}" if several else "the prompt", line=i) for i, text in enumerate(asked.prompt, 1)]


def _converse(sampler: Sampler) -> int:
    """Ask for prompts and continue them until the user leaves; the exit status."""
    with contextlib.suppress(ImportError):
        import readline  # gives `input` a history
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # `Prompt` refuses what is not UTF-8, a line at a time
    typed, n_wrong = sys.stdin.isatty(), 0
    while True:
        line = ""
        try:
            line = _ask()
            if line:
                _answer(sampler, line)
        except UserError as error:
            echo_error(f"error: {error}")
            n_wrong += 1
        except EOFError:
            break
        except KeyboardInterrupt:
            begun = line or ("readline" in sys.modules and readline.get_line_buffer())
            if not begun:
                break
            echo(file=sys.stderr)
    echo(file=sys.stderr)
    return 2 if n_wrong and not typed else 0  # who typed it has seen it, and gone on


def _ask() -> str:
    """A line from the user. What asks for it is no part of the output, if that goes elsewhere than to the terminal."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return input("> ")
    echo("> ", sys.stderr, end="")
    return input()


def _answer(sampler: Sampler, line: str) -> None:
    """Continue a prompt of a conversation."""
    with record_signals(signal.SIGINT) as pressed:
        prompt = Prompt(line, "the prompt")
        sampler.speed = Speed()
        sampler.show([(prompt, sampler.encode(prompt))], pressed)
    echo(str(sampler.speed), sys.stderr)
