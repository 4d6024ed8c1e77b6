"""`sample.py`: complete, fill in, translate or classify with a trained model, depending on its task."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, TypeVar

from jaxformer.cli import machine
from jaxformer.cli.arguments import run_named
from jaxformer.cli.command import as_command, command
from jaxformer.cli.explanation import explained_rows, explanation_table
from jaxformer.cli.load import RunOptions, model_of, open_run, run_folder, with_run
from jaxformer.cli.options import HIDDEN, MERGED, CommandLine, CommandOptions, with_flags
from jaxformer.contract import Task, contract_of
from jaxformer.decode import Sampling, StopStrings, Throughput
from jaxformer.decode.batches import MIN_ROWS_PER_DEVICE
from jaxformer.decode.completion import Completer, Completion, CompletionOptions
from jaxformer.decode.prompts import Encoded, Prompt, Row, encode_prompts, read_prompts
from jaxformer.decode.text import OF_TEXTS, SETTINGS, default_settings
from jaxformer.decode.weights import lay_out, restored
from jaxformer.errors import UserError
from jaxformer.terminal import echo, echo_error
from jaxformer.train.signals import ReceivedSignal, record_signals

if TYPE_CHECKING:
    import numpy as np

    from jaxformer.decode.classify import Ranking
    from jaxformer.runs.run import Run

warn = logging.getLogger(__name__).warning
T = TypeVar("T")
Prompts = Sequence[Prompt | UserError]
"""Prompts, with an error in place of each invalid line of a file."""

DESCRIPTION = """Generate completions of prompts with a trained model.

The completion of a prompt depends only on the prompt, the options and the seed, and not on the other prompts of its
batch, except for rounding, which depends on the batch size and the number of devices and can decide between two
tokens that are about equally likely. Generation stops at the end-of-text token, at a stop token or stop string, which
are not shown, or after --max-new-tokens.

A masked language model fills masks instead, one token each: --prompt "The [MASK] of the people". A
sequence-to-sequence model translates or summarises each prompt: greedily, sampled with --temperature or a filter, or
by beam search with --num-beams. A text classifier prints the most likely labels of each prompt, a token classifier the
most likely label of each of its tokens, and a sentence encoder the cosines of all pairs of prompts, or with --jsonl
their vectors. An image classifier classifies the images of --images, and an image encoder prints their cosines or
vectors. A model of images and texts ranks the texts of --prompt for each image, or with --by-text the images for each
text."""


@dataclass(frozen=True)
class SamplingOptions(Sampling):
    """Options for sampling a token; options with a run's tokens are given as text, in `CompletionOptions`."""

    temperature: float = OF_TEXTS["temperature"]
    """Divisor of the logits: below 1 sharpens the distribution, above 1 flattens it; 0 is greedy, without filters. This
    and the filters have the defaults that a model was published with; in chats without them, temperature 0.2 and top-p
    0.9."""
    min_p: float | None = OF_TEXTS["min_p"]
    """Minimum probability of a token, as a fraction of the most likely token's; 0 keeps all. Combined with the other
    filters."""
    logit_bias: Annotated[tuple[tuple[int, float], ...], HIDDEN] = ()
    bad_words: Annotated[tuple[tuple[int, ...], ...], HIDDEN] = ()
    stop_tokens: tuple[int, ...] = ()
    """Ids of tokens that end a text, in addition to end-of-text."""
    n_tokens: Annotated[int | None, HIDDEN] = None


@dataclass(frozen=True)
class Arguments(CommandOptions):
    """Options of sample.py."""

    opening: Annotated[RunOptions, MERGED] = field(default_factory=RunOptions)
    prompt: tuple[str, ...] = ("The",)
    """Text to continue; several texts are continued as a batch."""
    images: tuple[str, ...] = ()
    """Image files, for a model that reads images; animated ones if its inputs are videos."""
    by_text: bool = False
    """For a model of images and texts: rank the images for each text, instead of the texts for each image."""
    prompts_file: str | None = None
    """File with one prompt per line; a .jsonl file has objects with "prompt", and optionally "seed" and "id"."""
    explain: bool = False
    """Explanation of each token: its probability, the most likely other tokens, the entropy of the distribution, and
    the positions with the most attention, averaged over all heads."""
    interactive: bool = False
    """Interactive session for prompts. Ctrl-C stops a text, Ctrl-D exits."""
    jsonl: bool = False
    """Output of one line of JSON per text as soon as its batch is done: its prompt's line, its tokens, their
    log-probabilities under the model, the reason it ended, and the seconds from the start of its batch to its first and
    its last token; for a translation, its prompt's line and its tokens."""
    completion: Annotated[CompletionOptions, MERGED] = field(default_factory=CompletionOptions)
    sampling: Annotated[SamplingOptions, MERGED] = field(default_factory=SamplingOptions)


NOT_WITH_BEAMS = [
    *(f"--{f.name.replace('_', '-')}" for f in dataclasses.fields(Sampling) if f.name != "stop_tokens"),
    *("--seed", "--stop", "--prefill-chunk", "--draft"),
]
"""Options that do not apply to beam search."""
TEXTS, IMAGES = {"--prompt", "--prompts-file"}, {"--images"}
COMMON = {"--run", "--checkpoint", "--weights", "--jsonl"}
FILL_OPTIONS = COMMON | TEXTS | {"--top-logprobs"}
TRANSLATE_OPTIONS = COMMON | TEXTS | {"--mesh", "--max-new-tokens", "--batch-size"}
TRANSLATE_OPTIONS |= {"--num-beams", "--length-penalty", "--cache-dtype"}
TRANSLATE_OPTIONS |= {"--repetition-penalty", "--presence-penalty", "--frequency-penalty"}
TRANSLATE_OPTIONS |= {"--min-new-tokens", "--stop-tokens"}
TRANSLATE_SAMPLING = {"--temperature", "--top-k", "--top-p", "--min-p", "--typical-p"}
"""Options of sampled translations; without any, they are greedy."""
N_CANDIDATES = 5
"""Candidates per mask without --top-logprobs, and classes per image in text output; JSON has all classes."""


@as_command()
def main(line: CommandLine) -> int:
    """Sample; return the exit status: 0 done, 2 wrong input, even if only some prompts are invalid, 130 interrupted."""
    options = line.parse(Arguments(), command("sample"), DESCRIPTION)
    _check(options)
    prompts = _prompts(options)
    n_rows = options.completion.rows_per_batch(len(prompts) or 1)
    machine.set_up(n_rows, options.opening.mesh, rows_per_device=MIN_ROWS_PER_DEVICE)
    options = dataclasses.replace(options, opening=with_run(options.opening))
    task = contract_of(model_of(options.opening)).task
    if task is Task.MASKED_LM:
        return _fill_masks(options, prompts)
    if task in (Task.IMAGE_CLASSIFICATION, Task.VIDEO_CLASSIFICATION, Task.CONTRASTIVE):
        return _classify(options, prompts)
    if task is Task.SEQUENCE_TO_SEQUENCE:
        return _translate(options, prompts)
    if task is Task.TEXT_CLASSIFICATION:
        return _label(options, prompts)
    if task is Task.TOKEN_CLASSIFICATION:
        return _label_tokens(options, prompts)
    if task is Task.TEXT_EMBEDDING:
        return _embed(options, prompts)
    if task is Task.IMAGE_EMBEDDING:
        return _embed_images(options)
    _check_task(options, options.given - IMAGES, "text generation")
    completer = make_completer(options, prompts)
    if options.interactive:
        return _converse(completer, options)
    fitting = _encode(options, prompts, completer.encode)
    completer.keep_programs = len(fitting) > 1
    if fitting:
        with record_signals(signal.SIGINT) as pressed:
            show_completions(completer, fitting, options, pressed)
        echo(str(completer.throughput), sys.stderr)
        if pressed.is_set():
            raise KeyboardInterrupt
    return 2 if len(fitting) < len(prompts) else 0


def _check(options: Arguments) -> None:
    """Raise `UserError` for options that are invalid for any run."""
    completion, given = options.completion, options.given
    sources = {
        "--prompt": "--prompt" in given,
        "--prompts-file": options.prompts_file is not None,
        "--interactive": options.interactive,
    }
    used = [flag for flag, is_used in sources.items() if is_used]
    if len(used) > 1:
        raise UserError(f"{' and '.join(used)} exclude each other; give one of them.")
    if options.opening.weights == "int8" and options.opening.mesh:
        raise UserError("int8 weights cannot be sharded with --mesh; omit it, or use bfloat16.")
    has_draft, n_beams = completion.draft is not None, completion.num_beams
    without_effect = [
        ("--system", not completion.chat, "without a chat; omit it, or give --chat"),
        ("--draft-tokens", not has_draft, "without a draft; omit it, or give --draft"),
        ("--prefill-chunk", has_draft, "on a draft; omit --prefill-chunk, or --draft"),
        ("--length-penalty", n_beams == 1, "without beam search; omit it, or give --num-beams"),
        *((flag, n_beams > 1, "on beam search; omit it, or --num-beams") for flag in NOT_WITH_BEAMS),
    ]
    for flag, is_met, problem in without_effect:
        if is_met and flag in given:
            raise UserError(f"{flag} has no effect {problem}.")
    if 1 < n_beams < completion.num_samples:
        raise UserError(f"--num-samples is {completion.num_samples}; it must be at most --num-beams, {n_beams}.")
    StopStrings(completion.stop)


def _prompts(options: Arguments) -> Prompts:
    """Return the prompts, with an error in place of each invalid line of a file."""
    if options.interactive:
        return []
    if options.prompts_file is not None:
        return read_prompts(options.prompts_file)
    texts = options.prompt or ("",)  # which `Prompt` refuses
    return [Prompt(text, f"prompt {i}" if len(texts) > 1 else "the prompt", line=i) for i, text in enumerate(texts, 1)]


def _encode(options: Arguments, prompts: Prompts, encode: Callable[[Prompt], T]) -> list[tuple[Prompt, T]]:
    """Return each valid prompt with its encoding. Errors in a file's prompts are printed, and the rest continue."""
    return encode_prompts(prompts, encode, _print_error if options.prompts_file is not None else None)


def _print_error(error: UserError) -> None:
    echo_error(f"error: {with_flags(str(error))}")


def _check_task(options: Arguments, known: Set[str], task: str, *needed: Set[str]) -> None:
    """Raise `UserError` if an option that does not apply to the task was given, or none of a set of needed ones."""
    if foreign := sorted(options.given - known):
        folder = run_folder(options.opening)
        raise UserError(f"{foreign[0]} does not apply to {task}, the task of {folder}; omit it.")
    for flags in needed:
        if not options.given & flags:
            raise UserError(f"there is nothing for {task}; give {' or '.join(sorted(flags))}.")


def _open_restored(options: Arguments) -> Run:
    """Open the run with float32 parameters, for one pass per example, where a smaller format saves no time."""
    run = open_run(options.opening)
    return dataclasses.replace(run, params=restored(run.params))


def _open_laid_out(options: RunOptions, meanwhile: Callable[[Run], None] | None = None) -> Run:
    """Open the run with its parameters laid out for decode steps; see `load_run` for `meanwhile`."""
    import jax  # takes most of a second, which --help need not wait for

    if options.weights == "bfloat16" and jax.default_backend() == "cpu":
        warn("on a CPU, bfloat16 weights are held in float32, where they are faster; int8 is faster and smaller.")
    run = open_run(options, convert=lay_out, meanwhile=meanwhile)
    jax.block_until_ready(run.params)  # until then, the arrays that they are converted from are not freed
    machine.release_freed_memory()
    return run


def _answer(
    options: Arguments,
    prompts: Prompts,
    encode: Callable[[Prompt], T],
    answers: Callable[[list[tuple[Prompt, T]]], Iterator[tuple[Row, str]]],
) -> int:
    """Print the answer to each valid prompt, as a row of JSON or as text; return the exit status."""
    fitting = _encode(options, prompts, encode)
    for row, text in answers(fitting):
        echo(json.dumps(row) if options.jsonl else text)
    return 2 if len(fitting) < len(prompts) else 0


def _fill_masks(options: Arguments, prompts: Prompts) -> int:
    """Print each prompt with its masks filled, and the most likely tokens for each mask."""
    from jaxformer.decode.fill_mask import encode_masked, fill_prompt

    _check_task(options, FILL_OPTIONS, "fill-mask")
    run, n = _open_restored(options), options.sampling.top_logprobs

    def answers(fitting: list[Encoded]) -> Iterator[tuple[Row, str]]:
        for prompt, tokens in fitting:
            row = fill_prompt(run, prompt, tokens, n or N_CANDIDATES)
            masks = ["  " + ", ".join(f"{text!r} {p:.3f}" for text, p in candidates) for candidates in row["masks"]]
            yield row, "\n".join([row["text"], *masks])

    return _answer(options, prompts, partial(encode_masked, run=run), answers)


def _classify(options: Arguments, prompts: Prompts) -> int:
    """Print the most likely classes, or the texts in order of their probability, for each image, or images for each
    text."""
    from jaxformer.decode.classify import check_text, classify_images, rank_matches

    run = _open_restored(options)
    if contract_of(run.model).task is not Task.CONTRASTIVE:
        _check_task(options, COMMON | IMAGES, "image classification", IMAGES)
        prompts, rank = [], lambda _: classify_images(run, options.images)
    else:
        _check_task(options, COMMON | IMAGES | TEXTS | {"--by-text"}, "zero-shot classification", IMAGES, TEXTS)
        rank = lambda texts: rank_matches(run, options.images, texts, options.by_text) if texts else []  # noqa: E731

    def answers(fitting: list[tuple[Prompt, str]]) -> Iterator[tuple[Row, str]]:
        rankings = rank([text for _, text in fitting])
        if options.by_text:
            for (prompt, text), ranking in zip(fitting, rankings, strict=True):
                yield prompt.as_row() | {"images": _rounded(ranking)}, f"{text}: {_likeliest(ranking)}"
            return
        for image, ranking in zip(options.images, rankings, strict=False):
            yield {"image": image, "shows": _rounded(ranking)}, f"{image}: {_likeliest(ranking)}"

    return _answer(options, prompts, partial(check_text, run=run), answers)


def _rounded(ranking: Ranking) -> Ranking:
    return [(name, float(f"{p:.4g}")) for name, p in ranking]


def _likeliest(ranking: Ranking) -> str:
    return ", ".join(f"{name} {p:.3f}" for name, p in ranking[:N_CANDIDATES])


def _label(options: Arguments, prompts: Prompts) -> int:
    """Print the most likely labels of each prompt."""
    from jaxformer.decode.classify import classify_text, encode_labelled

    _check_task(options, COMMON | TEXTS, "text classification", TEXTS)
    run = _open_restored(options)

    def answers(fitting: list[Encoded]) -> Iterator[tuple[Row, str]]:
        for prompt, tokens in fitting:
            ranking = classify_text(run, tokens)
            yield prompt.as_row() | {"labels": _rounded(ranking)}, f"{prompt.text}: {_likeliest(ranking)}"

    return _answer(options, prompts, partial(encode_labelled, run=run), answers)


def _label_tokens(options: Arguments, prompts: Prompts) -> int:
    """Print the most likely label of each token of each prompt."""
    from jaxformer.decode.classify import classify_tokens, encode_labelled

    _check_task(options, COMMON | TEXTS, "token classification", TEXTS)
    run = _open_restored(options)

    def answers(fitting: list[Encoded]) -> Iterator[tuple[Row, str]]:
        for prompt, tokens in fitting:
            labelled = classify_tokens(run, tokens)
            lines = [f"  {text!r} {_likeliest(ranking[:1])}" for text, ranking in labelled]
            row = {"tokens": [[text, _rounded(ranking)] for text, ranking in labelled]}
            yield prompt.as_row() | row, "\n".join([prompt.text, *lines])

    return _answer(options, prompts, partial(encode_labelled, run=run), answers)


def _embed(options: Arguments, prompts: Prompts) -> int:
    """Print the cosine of each pair of prompts as a table, or the vector of each prompt as JSON."""
    from jaxformer.data.labelled import tokenize_text
    from jaxformer.decode.embed import cosines, embed

    _check_task(options, COMMON | TEXTS | {"--batch-size"}, "text embedding", TEXTS)
    run = _open_restored(options)
    model, tokenizer = run.text_model()
    n_truncated = 0

    def encode(prompt: Prompt) -> list[int]:
        nonlocal n_truncated
        prompt.check_no_seed("a sentence encoder does not sample")
        tokens = tokenize_text(prompt.text, tokenizer)
        if len(tokens) <= model.context_length:
            return tokens
        n_truncated += 1
        return tokenize_text(prompt.text, tokenizer, model.context_length)

    def answers(fitting: list[Encoded]) -> Iterator[tuple[Row, str]]:
        if n_truncated:
            warn(f"{n_truncated} of {len(fitting)} texts are truncated to the {model.context_length} tokens that fit.")
        vectors_ND = embed(run.model, run.params, [tokens for _, tokens in fitting], options.completion.batch_size)
        for (prompt, _), vector_D, cosines_N in zip(fitting, vectors_ND, cosines(vectors_ND), strict=True):
            yield prompt.as_row() | {"vector": _shortest(vector_D)}, _in_columns(cosines_N) + prompt.text

    return _answer(options, prompts, encode, answers)


def _embed_images(options: Arguments) -> int:
    """Print the cosine of each pair of images as a table, or the vector of each image as JSON."""
    from jaxformer.decode.classify import embed_images
    from jaxformer.decode.embed import cosines

    _check_task(options, COMMON | IMAGES, "image embedding", IMAGES)
    vectors_NF = embed_images(_open_restored(options), options.images)
    for image, vector_F, cosines_N in zip(options.images, vectors_NF, cosines(vectors_NF), strict=True):
        row = {"image": image, "vector": _shortest(vector_F)}
        echo(json.dumps(row) if options.jsonl else _in_columns(cosines_N) + image)
    return 0


def _shortest(vector: np.ndarray) -> list[float]:
    """Return numbers with as few digits as float32 has."""
    return [float(str(x)) for x in vector]


def _in_columns(numbers: np.ndarray) -> str:
    return "".join(f"{x:6.3f} " for x in numbers)


def _translate(options: Arguments, prompts: Prompts) -> int:
    """Translate each prompt, and print each batch as soon as it is done."""
    from jaxformer.decode.translation import encode_source, translate_prompts

    _check_task(options, TRANSLATE_OPTIONS | TRANSLATE_SAMPLING | {"--seed"}, "translation", TEXTS)
    run, completion, samples = _open_laid_out(options.opening), options.completion, options.given & TRANSLATE_SAMPLING
    if "--seed" in options.given and not samples:
        raise UserError("--seed has no effect on greedy translations; omit it, or give --temperature.")
    sampling = options.sampling if samples else dataclasses.replace(options.sampling, temperature=0)
    limit = completion.max_new_tokens if "--max-new-tokens" in options.given else None

    def answers(fitting: list[Encoded]) -> Iterator[tuple[Row, str]]:
        for prompt, target in translate_prompts(run, fitting, completion, limit, sampling):
            text = run.text_model()[1].decode(target)
            yield prompt.as_row() | {"text": text, "tokens": target}, text

    return _answer(options, prompts, partial(encode_source, run=run, samples=bool(samples)), answers)


def make_completer(options: Arguments, prompts: Prompts = ()) -> Completer:
    """Open the run, and its draft if there is one, and meanwhile compile what the first token of a single prompt needs.
    Raises `UserError` if a run cannot be opened, or as `Completer`."""

    def compile_meanwhile(run: Run) -> None:
        if len(prompts) == 1 and isinstance(prompt := prompts[0], Prompt):
            with contextlib.suppress(UserError):  # raised again once the run is open
                completer = Completer(run, options.completion, with_defaults(options, run)[0])
                completer.compile((prompt, completer.encode(prompt)))

    run, name, draft = _open_laid_out(options.opening, compile_meanwhile), options.completion.draft, None
    if name not in (None, "lookup"):
        draft = _open_laid_out(RunOptions(run=str(run_named("--draft", name)), mesh=options.opening.mesh))
    explain = partial(explained_rows, run) if options.explain else None
    sampling, about = with_defaults(options, run)
    if about and options.completion.num_beams == 1:
        echo(about, sys.stderr)
    return Completer(run, options.completion, sampling, draft, explain)


def with_defaults(options: Arguments, run: Run) -> tuple[Sampling, str]:
    """Return the sampling options, with the settings of a run or of chats where none was given; and a line that says
    which are used, unless they are those of texts. Raises as `default_settings` does."""
    settings, source = default_settings(run, options.completion.chat)
    given = [name for name in SETTINGS if f"--{name.replace('_', '-')}" in options.given]
    sampling = dataclasses.replace(options.sampling, **{n: x for n, x in settings.items() if n not in given})
    if not run.sampling and not options.completion.chat:
        return sampling, ""
    values = {name: getattr(sampling, name) for name in SETTINGS}
    used = {name: x for name, x in values.items() if name == "temperature" or x != getattr(Sampling, name)}
    described = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in used.items())
    return sampling, f"sampling: {described} ({'where not given, ' if given else ''}{source})"


def show_completions(completer: Completer, prompts: list[Encoded], options: Arguments, pressed: ReceivedSignal) -> None:
    """Complete prompts and print the texts; Ctrl-C stops after the current batch. A single text is streamed, and JSON
    rows are printed batch by batch; other texts are printed in the order of the prompts, at the latest at the end, even
    after an error."""
    streams = len(prompts) * options.completion.num_samples == 1 and not options.jsonl
    separator = "\n" if options.completion.chat else ""
    unprinted = prompts[0][0].text + separator

    def stream(new: str) -> None:
        nonlocal unprinted
        echo(unprinted + new, end="")
        unprinted = ""

    done: dict[int, list[Completion]] = {}
    n_printed = 0
    try:
        for i, completions in completer.complete(prompts, pressed.is_set, *[stream] * streams):
            done[i] = completions
            completer.remember(completions[0])
            while (ready := i if options.jsonl else n_printed) in done:
                _print_completions(done.pop(ready), options.jsonl, streams, separator)
                n_printed += 1
    finally:
        for i in sorted(done):  # completed, but waiting for an earlier prompt that was not
            _print_completions(done[i], options.jsonl, streams, separator)


def _print_completions(completions: list[Completion], jsonl: bool, streamed: bool, separator: str) -> None:
    """Print the completions of one prompt; for a streamed one, the remaining output."""
    for completion in completions:
        if jsonl:
            echo(json.dumps(completion.as_row(), allow_nan=False))
        elif streamed:
            echo()
            echo(explanation_table(completion), end="")
        else:
            sample = f".{completion.sample + 1}" if len(completions) > 1 else ""
            echo(f"[{completion.prompt.line}{sample}] {completion.prompt.text}{separator}{completion.text.text}")
            echo(explanation_table(completion))


def _converse(completer: Completer, options: Arguments) -> int:
    """Read prompts and complete them until the user exits; return the exit status."""
    with contextlib.suppress(ImportError):
        import readline  # gives `input` a history
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # `Prompt` then refuses single lines that are not UTF-8
    typed, n_errors = sys.stdin.isatty(), 0
    completer.turns = [] if options.completion.chat else None
    while True:
        line = ""
        try:
            line = _ask()
            if line == "/clear" and completer.turns is not None:
                completer.turns.clear()
            elif line:
                with record_signals(signal.SIGINT) as pressed:
                    prompt, completer.throughput = Prompt(line, "the prompt"), Throughput()
                    show_completions(completer, [(prompt, completer.encode(prompt))], options, pressed)
                echo(str(completer.throughput), sys.stderr)
                machine.release_freed_memory()  # of the compiler, for instance, while the user reads and types
        except UserError as error:
            _print_error(error)
            n_errors += 1
        except EOFError:
            break
        except KeyboardInterrupt:
            begun = line or ("readline" in sys.modules and readline.get_line_buffer())
            if not begun:
                break
            echo(file=sys.stderr)
    echo(file=sys.stderr)
    return 2 if n_errors and not typed else 0  # a user at a terminal has read the errors


def _ask() -> str:
    """Return a line from the user; the input prompt goes to stdout only if that is a terminal."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return input("> ")
    echo("> ", sys.stderr, end="")
    return input()
