"""`sample.py`: complete, fill in, translate or classify with a trained model, depending on its task."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import log2
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from jaxformer.cli import machine
from jaxformer.cli.arguments import run_named
from jaxformer.cli.command import as_command
from jaxformer.cli.explanation import explained_rows, explanation_table
from jaxformer.cli.load import RunOptions, model_of, open_run, run_folder, with_run
from jaxformer.cli.options import HIDDEN, MERGED, CommandLine, CommandOptions
from jaxformer.contract import Task, contract_of
from jaxformer.decode import Sampling, StopStrings, Throughput
from jaxformer.decode.completion import (
    Completer,
    Completion,
    CompletionOptions,
    encode_bad_words,
    encode_logit_bias,
    fitting_memory,
)
from jaxformer.decode.generation import MIN_ROWS_PER_DEVICE
from jaxformer.decode.prompts import Prompt, encode_prompts, read_prompts
from jaxformer.decode.weights import lay_out, restored
from jaxformer.errors import UserError, command
from jaxformer.terminal import echo, echo_error
from jaxformer.train.signals import ReceivedSignal, record_signals

if TYPE_CHECKING:
    from jaxformer.runs.run import Run

T = TypeVar("T")
Prompts = Sequence[Prompt | UserError]
"""Prompts, with an error in place of each invalid line of a file."""

DESCRIPTION = """Generate completions of prompts with a trained model.

The completion of a prompt depends only on the prompt, the options and the seed, and not on the other prompts of its
batch, except for rounding, which depends on the batch size and the number of devices and can decide between two
tokens that are about equally likely. Generation stops at the end-of-text token, at a stop token or stop string, which
are not shown, or after --max-new-tokens.

A masked language model fills masks instead, one token each: --prompt "The [MASK] of the people". A
sequence-to-sequence model translates each prompt, greedily or by beam search with --num-beams. A text classifier prints
the most likely labels of each prompt. An image classifier classifies the images of --images, and a model of images and
texts ranks the texts of --prompt for each image."""


@dataclass(frozen=True)
class SamplingOptions(Sampling):
    """Options for sampling a token; options with a run's tokens are given as text, in `CompletionOptions`."""

    temperature: float = 0.8
    """Divisor of the logits: below 1 sharpens the distribution, above 1 flattens it; 0 is greedy, without filters."""
    min_p: float | None = 0.05
    """Minimum probability of a token, as a fraction of the most likely token's; 0 keeps all. Combined with the other
    filters."""
    logit_bias: Annotated[tuple[tuple[int, float], ...], HIDDEN] = ()
    bad_words: Annotated[tuple[tuple[int, ...], ...], HIDDEN] = ()
    stop_tokens: tuple[int, ...] = ()
    """Ids of tokens that end a text, in addition to end-of-text."""
    n_tokens: Annotated[int | None, HIDDEN] = None

    def __post_init__(self) -> None:
        self.with_tokens((0,))

    def with_tokens(self, ends_of_text: Sequence[int], **encoded: Any) -> Sampling:
        """Return the sampling options with the tokens of a run. Raises `UserError` as `Sampling` does."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(Sampling)}
        stop = tuple(dict.fromkeys((*ends_of_text, *self.stop_tokens)))
        return Sampling(**values | {"stop_tokens": stop} | encoded)


@dataclass(frozen=True)
class Arguments(CommandOptions):
    """Options of sample.py."""

    opening: Annotated[RunOptions, MERGED] = field(default_factory=RunOptions)
    prompt: tuple[str, ...] = ("The",)
    """Text to continue; several texts are continued as a batch."""
    images: tuple[str, ...] = ()
    """Image files, for a model that classifies images; animated ones if its inputs are videos."""
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


NOT_WITH_BEAMS = {f.name for f in dataclasses.fields(Sampling)} - {"stop_tokens"} | {"seed", "stop", "prefill_chunk"}
"""Options that do not apply to beam search."""
MAX_EXPONENT = 100
"""Largest power of 2 that beam lengths and scores may reach: float32's 126, less the range of log-probabilities."""
TEXTS = {"--prompt", "--prompts-file"}
COMMON = {"--run", "--checkpoint", "--weights", "--jsonl"}
FILL_OPTIONS = COMMON | TEXTS | {"--top-logprobs"}
TRANSLATE_OPTIONS = COMMON | TEXTS | {
    "--mesh", "--max-new-tokens", "--batch-size", "--num-beams", "--length-penalty", "--cache-dtype"
}  # fmt: skip
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
    model = model_of(options.opening)
    task = contract_of(model).task
    if task is Task.MASKED_LM:
        return _fill_masks(options, prompts)
    if task in (Task.IMAGE_CLASSIFICATION, Task.VIDEO_CLASSIFICATION, Task.CONTRASTIVE):
        return _classify(options, prompts)
    if options.images:
        kind = type(model).__name__
        raise UserError(f"{run_folder(options.opening)} holds a {kind}, which has no image input; omit --images.")
    if task is Task.SEQUENCE_TO_SEQUENCE:
        return _translate(options, prompts)
    if task is Task.TEXT_CLASSIFICATION:
        return _label(options, prompts)
    completer = make_completer(options)
    if options.interactive:
        return _converse(completer, options)
    fitting = _encode(options, prompts, completer.encode)
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
        "--prompt": "--prompt" in given, "--prompts-file": options.prompts_file is not None,
        "--interactive": options.interactive,
    }  # fmt: skip
    if len(used := [flag for flag, is_used in sources.items() if is_used]) > 1:
        raise UserError(f"{' and '.join(used)} exclude each other; give one of them.")
    StopStrings(completion.stop)
    if completion.draft is None and "--draft-tokens" in given:
        raise UserError("--draft-tokens has no effect without a draft; omit it, or give --draft.")
    if completion.draft is not None and "--prefill-chunk" in given:
        raise UserError("--prefill-chunk has no effect on a draft; omit --prefill-chunk, or --draft.")
    if options.opening.weights == "int8" and options.opening.mesh:
        raise UserError("int8 weights cannot be sharded with --mesh; omit it, or use bfloat16.")
    n_beams, n_tokens = completion.num_beams, completion.max_new_tokens
    if n_beams == 1:
        if "--length-penalty" in given:
            raise UserError("--length-penalty has no effect without beam search; omit it, or give --num-beams.")
    elif not abs(exponent := completion.length_penalty) <= (steepest := MAX_EXPONENT / max(1.0, log2(n_tokens))):
        problem = f"--length-penalty is {exponent}, and {n_tokens} tokens to that power exceed float32"
        raise UserError(f"{problem}; it must be from {-steepest:.1f} to {steepest:.1f}.")
    elif clash := sorted(given & {f"--{name.replace('_', '-')}" for name in NOT_WITH_BEAMS}):
        raise UserError(f"{clash[0]} has no effect on beam search; omit it, or --num-beams.")
    elif completion.draft is not None:
        raise UserError("--draft and --num-beams exclude each other; omit one of them.")
    elif completion.num_samples > n_beams:
        raise UserError(f"--num-samples is {completion.num_samples}; it must be at most --num-beams, {n_beams}.")


def _prompts(options: Arguments) -> Prompts:
    """Return the prompts, with an error in place of each invalid line of a file."""
    if options.interactive:
        return []
    if options.prompts_file is not None:
        return read_prompts(options.prompts_file)
    if not options.prompt:
        raise UserError("the prompt is empty; give it at least one character.")
    name = (lambda i: f"prompt {i}") if len(options.prompt) > 1 else (lambda i: "the prompt")
    return [Prompt(text, name(i), line=i) for i, text in enumerate(options.prompt, 1)]


def _encode(options: Arguments, prompts: Prompts, encode: Callable[[Prompt], T]) -> list[tuple[Prompt, T]]:
    """Return each valid prompt with its encoding. Errors in a file's prompts are printed, and the rest continue."""
    return encode_prompts(prompts, encode, _print_error if options.prompts_file is not None else None)


def _print_error(error: UserError) -> None:
    echo_error(f"error: {error}")


def _check_task(options: Arguments, known: set[str], task: str) -> None:
    if foreign := sorted(options.given - known):
        folder = run_folder(options.opening)
        raise UserError(f"{foreign[0]} does not apply to {task}, the task of {folder}; omit it.")


def _open_restored(options: Arguments) -> Run:
    """Open the run with float32 parameters, for one pass per example, where a smaller format saves no time."""
    run = open_run(options.opening)
    return dataclasses.replace(run, params=restored(run.params))


def _open_laid_out(options: RunOptions) -> Run:
    """Open the run with its parameters laid out for decode steps."""
    run = open_run(options)
    return dataclasses.replace(run, params=lay_out(run.params, run.model))


def _fill_masks(options: Arguments, prompts: Prompts) -> int:
    from jaxformer.decode.fill_mask import encode_masked, fill_prompt

    _check_task(options, FILL_OPTIONS, "fill-mask")
    run, n = _open_restored(options), options.sampling.top_logprobs
    if n >= (size := run.text_model()[0].vocab_size):
        raise UserError(f"--top-logprobs is {n}; it must be at most {size - 1}, all tokens of the run.")
    fitting = _encode(options, prompts, lambda prompt: encode_masked(prompt, run))
    for prompt, tokens in fitting:
        row = fill_prompt(run, prompt, tokens, n or N_CANDIDATES)
        if options.jsonl:
            echo(json.dumps(row))
            continue
        masks = ["  " + ", ".join(f"{text!r} {p:.3f}" for text, p in candidates) for candidates in row["masks"]]
        echo("\n".join([row["text"], *masks]))
    return 2 if len(fitting) < len(prompts) else 0


def _classify(options: Arguments, prompts: Prompts) -> int:
    from jaxformer.decode.classify import check_text, classify_images, classify_images_by_texts

    run = _open_restored(options)
    zero_shot = contract_of(run.model).task is Task.CONTRASTIVE
    known = COMMON | {"--images"} | (TEXTS if zero_shot else set())
    _check_task(options, known, "zero-shot classification" if zero_shot else "image classification")
    if not options.images:
        raise UserError("there is no image to classify; give --images, such as --images photo.png.")
    if zero_shot and not options.given & TEXTS:
        raise UserError("there is no text to rank for an image; give texts with --prompt or --prompts-file.")
    n_valid = len(prompts)
    if zero_shot:
        fitting = _encode(options, prompts, lambda prompt: check_text(prompt, run))
        n_valid, texts = len(fitting), [text for _, text in fitting]
        rankings = classify_images_by_texts(run, options.images, texts) if texts else []
    else:
        rankings = classify_images(run, options.images)
    for image, ranking in zip(options.images, rankings, strict=False):
        if options.jsonl:
            echo(json.dumps({"image": image, "shows": [(name, float(f"{p:.4g}")) for name, p in ranking]}))
        else:
            echo(f"{image}: " + ", ".join(f"{name} {p:.3f}" for name, p in ranking[:N_CANDIDATES]))
    return 2 if n_valid < len(prompts) else 0


def _label(options: Arguments, prompts: Prompts) -> int:
    """Print the most likely labels of each prompt."""
    from jaxformer.decode.classify import classify_text, encode_labelled

    _check_task(options, COMMON | TEXTS, "text classification")
    if not options.given & TEXTS:
        raise UserError("there is no text to classify; give it with --prompt or --prompts-file.")
    run = _open_restored(options)
    fitting = _encode(options, prompts, lambda prompt: encode_labelled(prompt, run))
    for prompt, tokens in fitting:
        ranking = classify_text(run, tokens)
        if options.jsonl:
            labels = [(name, float(f"{p:.4g}")) for name, p in ranking]
            echo(json.dumps({"line": prompt.line, "id": prompt.id, "prompt": prompt.text, "labels": labels}))
        else:
            echo(f"{prompt.text}: " + ", ".join(f"{name} {p:.3f}" for name, p in ranking[:N_CANDIDATES]))
    return 2 if len(fitting) < len(prompts) else 0


def _translate(options: Arguments, prompts: Prompts) -> int:
    """Translate each prompt, and print each batch as soon as it is done."""
    from jaxformer.decode.translation import encode_source, translate_tokens

    _check_task(options, TRANSLATE_OPTIONS, "translation")
    if not options.given & TEXTS:
        raise UserError("there is nothing to translate; give it with --prompt or --prompts-file.")
    run, completion = _open_laid_out(options.opening), options.completion
    model, tokenizer = run.text_model()
    fitting = _encode(options, prompts, lambda prompt: encode_source(prompt, run))
    for first in range(0, len(fitting), completion.batch_size):
        batch = fitting[first : first + completion.batch_size]
        with fitting_memory(len(batch)):
            targets = translate_tokens(
                run.model, run.params, [source for _, source in batch], end_of_text=tokenizer.end_of_text,
                context_length=model.context_length, n_beams=completion.num_beams,
                length_penalty=completion.length_penalty, cache_dtype=completion.cache_dtype,
                max_new_tokens=completion.max_new_tokens if "--max-new-tokens" in options.given else None,
                batch_size=completion.batch_size,
            )  # fmt: skip
        for (prompt, _), target in zip(batch, targets, strict=True):
            text = tokenizer.decode(target)
            row = {"line": prompt.line, "id": prompt.id, "prompt": prompt.text, "text": text, "tokens": target}
            echo(json.dumps(row) if options.jsonl else text)
    return 2 if len(fitting) < len(prompts) else 0


def make_completer(options: Arguments) -> Completer:
    """Open the run, and its draft if there is one. Raises `UserError` if a run cannot be opened, or an option, some
    only if it was given, does not fit it."""
    completion, run = options.completion, _open_laid_out(options.opening)
    needs_cache = [str(flag) for flag in ("--draft", "--cache-dtype", "--prefill-chunk") if flag in options.given]
    needs_cache += ["--num-beams"] if completion.num_beams > 1 else []
    needs_cache += ["--explain"] if options.explain else []  # other models read left-padded windows
    if needs_cache and not contract_of(run.model).has_cache:
        flag = needs_cache[0]
        raise UserError(f"{run.path} has a model without a KV cache, which {flag} needs; omit {flag}.")
    if "--prefill-chunk" in options.given and contract_of(run.model).has_prefix:
        raise UserError(f"{run.path} reads a prompt with bidirectional attention, in one pass; omit --prefill-chunk.")
    _, tokenizer = run.text_model()
    sampling = options.sampling.with_tokens(
        tokenizer.ends_of_text, logit_bias=encode_logit_bias(completion.logit_bias, tokenizer),
        bad_words=encode_bad_words(completion.bad_words, tokenizer),
    )  # fmt: skip
    draft = None
    if completion.draft not in (None, "lookup"):
        folder = str(run_named("--draft", completion.draft))
        draft = _open_laid_out(RunOptions(run=folder, mesh=options.opening.mesh))
    return Completer(run, completion, sampling, draft, partial(explained_rows, run) if options.explain else None)


def show_completions(
    completer: Completer, prompts: Sequence[tuple[Prompt, list[int]]], options: Arguments, pressed: ReceivedSignal
) -> None:
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
    while True:
        line = ""
        try:
            if line := _ask():
                with record_signals(signal.SIGINT) as pressed:
                    prompt, completer.throughput = Prompt(line, "the prompt"), Throughput()
                    show_completions(completer, [(prompt, completer.encode(prompt))], options, pressed)
                echo(str(completer.throughput), sys.stderr)
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
