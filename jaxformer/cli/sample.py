"""`sample.py`: continue texts with a trained model."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, takewhile
from math import isfinite, log2
from typing import TYPE_CHECKING, Annotated, Any, Literal

import jax
import tyro

from jaxformer.cli import machine, translating
from jaxformer.cli.arguments import options_given, parse, run_command
from jaxformer.cli.filling import fill_prompts
from jaxformer.cli.opening import RunOptions, model_of, open_run, run_folder
from jaxformer.cli.prompts import MOST_SEED, Prompt, prepared, read_prompts, seeds
from jaxformer.cli.seeing import tell_images
from jaxformer.decode import (
    Generation,
    LookUp,
    ModelDraft,
    Sampling,
    Speculation,
    Speed,
    StopStrings,
    Text,
    beam_search,
    follow,
    generate,
    speculate,
)  # fmt: skip
from jaxformer.decode.speculative import MOST_PROPOSED
from jaxformer.decode.texts import Search, batches
from jaxformer.decode.weights import restored
from jaxformer.errors import UserError
from jaxformer.inspect.explain import explain
from jaxformer.models.objective import can_continue
from jaxformer.sharding import make_mesh

if TYPE_CHECKING:
    from jaxformer.data.tokenizer import Tokenizer
    from jaxformer.decode.speculative import Draft
    from jaxformer.models.objective import Params
    from jaxformer.runs import Run

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
    logit_bias: tyro.conf.Suppress[tuple[tuple[int, float], ...]] = ()
    bad_words: tyro.conf.Suppress[tuple[tuple[int, ...], ...]] = ()
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

    opening: Annotated[RunOptions, tyro.conf.arg(name="")] = field(default_factory=RunOptions)
    prompt: tuple[str, ...] = ("The ",)
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
    token and its last."""
    max_new_tokens: int = 200
    """Tokens to make; a text may end earlier."""
    num_samples: int = 1
    """Texts for each prompt; text k is what --seed k more gives, or the k-th best of the beams."""
    seed: int = 0
    """The same seed gives the same text."""
    batch_size: int = 16
    """Texts to make at once; those of one prompt stay together."""
    sampling: Annotated[SamplingOptions, tyro.conf.arg(name="")] = field(default_factory=SamplingOptions)
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
    asked = parse(Arguments, arguments, Arguments(), "sample.py", DESCRIPTION)
    given = options_given(arguments)
    _check(asked, given)
    prompts = _prompts(asked)
    machine.set_up(mesh=asked.opening.mesh)
    from jaxformer.models.clip import CLIP
    from jaxformer.models.encoder import MaskedLanguageModel
    from jaxformer.models.vit import ViT

    model = model_of(asked.opening)
    if isinstance(model, MaskedLanguageModel):
        return fill_prompts(asked.opening, prompts, given, asked.sampling.top_logprobs, asked.jsonl)
    if isinstance(model, ViT | CLIP):
        return tell_images(asked.opening, asked.images, prompts, given, asked.jsonl)
    if asked.images:
        raise UserError(
            f"{run_folder(asked.opening)} holds a {type(model).__name__}, which sees no images; leave out --images."
        )
    if hasattr(model, "start"):
        return translating.main(asked, given, prompts)
    sampler = Sampler(asked, given)
    if asked.interactive:
        return _converse(sampler)
    encode = lambda prompt: (prompt, sampler.encode(prompt))  # noqa: E731
    fitting: list[tuple[Prompt, list[int]]] = prepared(prompts, encode, asked.prompts_file is not None)
    if fitting:
        with _noticing_ctrl_c() as pressed:
            sampler.show(fitting, pressed)
        print(sampler.speed, file=sys.stderr)
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
            **({"logprobs": [_rounded(x) for x in text.logprobs]} if score is None else {"score": _rounded(score)}),
            **({"top_logprobs": [[(t, _rounded(x)) for t, x in likeliest] for likeliest in text.top_logprobs]}
               if any(text.top_logprobs) else {}),
            **({} if self.explained is None else {"explained": self.explained}),
            "first_token_s": round(text.first_token_s, 6), "seconds": round(text.seconds, 6),
        }  # fmt: skip


def _rounded(value: float) -> float | None:
    """In the digits that a float32 has; JSON knows neither infinity nor NaN."""
    return float(f"{value:.7g}") if isfinite(value) else None


class Sampler:
    """A run, ready to continue prompts as asked."""

    def __init__(self, asked: Arguments, given: Collection[str] = ()) -> None:
        """Raises UserError where the run cannot be opened, or options do not fit it; some only if they were given."""
        self._mesh = make_mesh(asked.opening.mesh) if asked.opening.mesh else None
        self._asked, self._run = asked, open_run(asked.opening, self._mesh)
        self._config, self._tokenizer = self._run.language()
        if not can_continue(self._run.model):
            kind = type(self._run.model).__name__
            raise UserError(f"{self._run.path} holds a {kind}, which writes no text; name a run that does.")
        tokenizer = self._tokenizer
        self._sampling = asked.sampling.completed(
            tokenizer.end_of_text, biases(asked.logit_bias, tokenizer), words(asked.bad_words, tokenizer)
        )
        self._sampling.check_vocabulary(tokenizer.vocab_size)
        check_stop_strings(asked.stop, tokenizer, asked.max_new_tokens)
        need_cache = [flag for flag in ("--draft", "--cache-dtype", "--prefill-chunk") if flag in given]
        need_cache += ["--num-beams"] if asked.num_beams > 1 else []
        need_cache += ["--explain"] if asked.explain else []  # the others read windows that are filled up before a text
        if need_cache and not hasattr(self._run.model, "extend"):
            raise UserError(f"{self._run.path} has a model without a cache, which {need_cache[0]} needs; leave it out.")
        if "--prefill-chunk" in given and getattr(self._run.model, "prompt_is_prefix", False):
            raise UserError(f"{self._run.path} reads a prompt at once, in both directions; leave out --prefill-chunk.")
        self._ends: list[int] = []
        """Contexts that a text cannot go past."""
        self._draft: tuple[Draft, Params] | None = None
        if asked.num_beams > 1 or asked.draft is not None:
            self._note_end(self._run)
        if asked.draft is not None:
            self._draft = self._open_draft(asked.draft)
        self.speed = Speed()
        """Of what was shown."""

    def _open_draft(self, name: str) -> tuple[Draft, Params]:
        """What proposes, and its parameters."""
        if name == "lookup":
            return LookUp(self._config.vocab_size), None
        draft = open_run(RunOptions(run=name), self._mesh)
        config, tokenizer = draft.language()
        if tokenizer.as_json() != self._tokenizer.as_json():
            raise UserError(
                f"the draft {name} has another tokenizer than {self._run.path}; use one trained on its text."
            )
        if not hasattr(draft.model, "extend"):
            raise UserError(f"the draft {name} has a model without a cache; use another, or 'lookup'.")
        self._note_end(draft)
        return ModelDraft(draft.model, config.context_length), draft.params

    def _note_end(self, run: Run) -> None:
        if getattr(run.model, "reach", None) is None:
            self._ends.append(run.language()[0].context_length)

    def encode(self, prompt: Prompt) -> list[int]:
        """Tokens of a prompt; raises UserError if there are too many, or it has a seed that nothing draws with."""
        if self._asked.num_beams > 1 and prompt.seed is not None:
            raise UserError(f"{prompt.where} has a seed, but beam search draws nothing; leave it out.")
        most = self._config.context_length
        why = f"the context's {most}"
        for end in self._ends:
            room = max(0, end - (self._asked.max_new_tokens - 1))  # nothing reads the last one
            if room < most:
                special = "a draft" if self._draft else "beam search"
                most, why = room, f"{room}, for {special} does not go past the context's {end}; lower --max-new-tokens"
        tokens = self._tokenizer.encode(prompt.text)
        if len(tokens) > most:
            raise UserError(f"{prompt.where} has {len(tokens)} tokens; it may have at most {why}.")
        return tokens

    def show(self, prompts: Sequence[tuple[Prompt, list[int]]], pressed: threading.Event) -> None:
        """Continue prompts and show the texts; not all of them once Ctrl-C is pressed.

        Rows of JSON come as they are made; other texts in the order of the prompts, and at the latest with the end,
        even if that is an error.
        """
        asked = self._asked
        size = max(1, asked.batch_size // max(asked.num_samples, asked.num_beams))
        streams = len(prompts) * asked.num_samples == 1 and not asked.jsonl
        made: dict[int, list[Answer]] = {}
        shown = 0
        try:
            for batch in batches([len(tokens) for _, tokens in prompts], size):
                n_rows = size if len(prompts) > size else len(batch)
                with _fitting_memory(len(batch) * asked.num_samples):
                    answers = self._continue([prompts[i] for i in batch], n_rows, streams, pressed)
                for place, i in enumerate(batch):
                    made[i] = answers[place * asked.num_samples : (place + 1) * asked.num_samples]
                ready = batch if asked.jsonl else list(takewhile(made.__contains__, count(shown)))
                for i in ready:
                    self._write(made.pop(i), streams)
                shown += len(ready)
                if pressed.is_set():
                    break
        finally:
            for i in sorted(made):  # what came before them was never made
                self._write(made[i], streams)

    def _continue(
        self, prompts: list[tuple[Prompt, list[int]]], n_prompts: int, streams: bool, pressed: threading.Event
    ) -> list[Answer]:
        """The texts of one batch. The last one is filled up, so that no program is compiled for it alone."""
        asked, run = self._asked, self._run
        filled = prompts + prompts[-1:] * (n_prompts - len(prompts))
        answers = [
            Answer(prompt, k, seed, Text(self._tokenizer, asked.stop))
            for prompt, _ in filled
            for k, seed in enumerate(seeds(asked.seed if prompt.seed is None else prompt.seed, asked.num_samples))
        ]
        token_lists, drawn_seeds = [tokens for _, tokens in filled], [answer.seed for answer in answers]
        sizes = {"max_new_tokens": asked.max_new_tokens, "context_length": self._config.context_length}
        generation: Generation | Search | Speculation
        if asked.num_beams > 1:
            call = partial(
                beam_search, run.model, run.params, token_lists, n_beams=asked.num_beams,
                length_penalty=asked.length_penalty, stop_tokens=self._sampling.stop_tokens,
                cache_dtype=asked.cache_dtype, **sizes,
            )  # fmt: skip
            generation = Search(call, asked.num_samples)
        elif self._draft:
            generation = speculate(
                run.model, run.params, self._draft[0], self._draft[1], token_lists, self._sampling,
                drawn_seeds, n_samples=asked.num_samples, n_proposed=asked.draft_tokens,
                cache_dtype=asked.cache_dtype, **sizes,
            )  # fmt: skip
        else:
            generation = generate(
                run.model, run.params, token_lists, self._sampling, drawn_seeds,
                n_samples=asked.num_samples, cache_dtype=asked.cache_dtype, prefill_chunk=asked.prefill_chunk,
                fill_token=self._tokenizer.end_of_text, **sizes,
            )  # fmt: skip
        n_wanted = len(prompts) * asked.num_samples
        for row in range(n_wanted, len(answers)):
            generation.end(row)
        answers = answers[:n_wanted]
        unsaid = prompts[0][0].text
        texts = [answer.text for answer in answers]
        stop_tokens, most = self._sampling.stop_tokens, asked.max_new_tokens
        for new in follow(generation, texts, stop_tokens, most, self.speed, pressed.is_set):
            if streams:
                _show(unsaid + new)
                unsaid = ""
        if isinstance(generation, Speculation):
            self.speed.passes += generation.passes
            self.speed.checked += generation.made
        if isinstance(generation, Search):
            for answer, score in zip(answers, generation.scores, strict=False):
                answer.score = score
        if asked.explain:
            for answer, (_, tokens) in zip(
                answers, [p for p in prompts for _ in range(asked.num_samples)], strict=True
            ):
                answer.explained = self._explain(tokens, answer.text.tokens)
        return answers

    def _explain(self, prompt: list[int], made: list[int]) -> list[dict[str, Any]]:
        """What `explain` says, with tokens as text; of those that the model has positions for."""
        goes_on = getattr(self._run.model, "reach", None) is not None
        room = len(prompt) + len(made) if goes_on else self._config.context_length
        tokens, name = (prompt + made)[:room], lambda token: self._tokenizer.decode([token])
        return [
            {
                "token": name(row.token), "probability": _rounded(row.probability), "entropy": _rounded(row.entropy),
                "rivals": [(name(token), _rounded(p)) for token, p in row.rivals],
                "looked_at": [(place, name(tokens[place]), _rounded(w)) for place, w in row.looked_at],
            }
            for row in explain(self._run.model, restored(self._run.params), tokens, len(prompt))
        ]  # fmt: skip

    def _write(self, answers: list[Answer], streamed: bool) -> None:
        """Show the texts of a prompt."""
        if streamed:
            _show("\n")
            for answer in answers:
                _show(_table(answer))
            return
        for answer in answers:
            if self._asked.jsonl:
                _show(json.dumps(answer.as_row(), allow_nan=False) + "\n")
            else:
                sample = f".{answer.sample + 1}" if len(answers) > 1 else ""
                _show(f"[{answer.prompt.line}{sample}] {answer.prompt.text}{answer.text.shown}\n")
                _show(f"{_table(answer)}\n")


def _table(answer: Answer) -> str:
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
            print(f"error: {error}", file=sys.stderr)
            n_wrong += 1
        except EOFError:
            break
        except KeyboardInterrupt:
            begun = line or ("readline" in sys.modules and readline.get_line_buffer())
            if not begun:
                break
            print(file=sys.stderr)
    print(file=sys.stderr)
    return 2 if n_wrong and not typed else 0  # who typed it has seen it, and gone on


def _ask() -> str:
    """A line from the user. What asks for it is no part of the output, if that goes elsewhere than to the terminal."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return input("> ")
    print("> ", end="", file=sys.stderr, flush=True)
    return input()


def _answer(sampler: Sampler, line: str) -> None:
    """Continue a prompt of a conversation."""
    with _noticing_ctrl_c() as pressed:
        prompt = Prompt(line, "the prompt")
        sampler.speed = Speed()
        sampler.show([(prompt, sampler.encode(prompt))], pressed)
    print(sampler.speed, file=sys.stderr)


@contextlib.contextmanager
def _noticing_ctrl_c() -> Iterator[threading.Event]:
    """Note the first Ctrl-C instead of dying of it; a second one acts as it always does."""
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed  # only the main thread may set handlers
        return
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, _: object) -> None:
        pressed.set()
        signal.signal(number, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _fitting_memory(n_texts: int) -> Iterator[None]:
    """Raise `UserError` where the device or the host has not memory enough for so many texts at once."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise UserError(
                f"{n_texts} texts at once do not fit into the memory; lower --batch-size, --num-samples, --num-beams "
                "or --max-new-tokens."
            ) from error
        raise


def biases(options: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    """Tokens and what is added to their logits, from TEXT=BIAS.

    Raises:
      UserError: not of that form, or a text that is not one token.
    """
    found = []
    for option in options:
        text, _, bias = option.rpartition("=")
        try:
            value = float(bias)
        except ValueError:
            value = None
        if not text or value is None:
            raise UserError(f"--logit-bias {option!r} is not of the form TEXT=BIAS, such as ' the=-2.5'.")
        tokens = _encoded(text, "--logit-bias", tokenizer)
        if len(tokens) != 1:
            pieces = ", ".join(repr(tokenizer.decode([token])) for token in tokens)
            raise UserError(f"--logit-bias {text!r} is {len(tokens)} tokens of this run, {pieces}; give one of them.")
        found.append((tokens[0], value))
    return tuple(found)


def words(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences of texts, and of the same after a space.

    Raises:
      UserError: one is empty, or no Unicode.
    """
    if "" in texts:
        raise UserError("a text of --bad-words is empty; give it at least one character.")
    spaced = [variant for text in texts for variant in (text, *([] if text[0].isspace() else [f" {text}"]))]
    return tuple(dict.fromkeys(tuple(_encoded(text, "--bad-words", tokenizer)) for text in spaced))


def check_stop_strings(strings: Sequence[str], tokenizer: Tokenizer, max_new_tokens: int) -> None:
    """Raise `UserError` for a string that is longer than any text of so many tokens."""
    most = max_new_tokens * max(map(len, tokenizer.token_bytes))
    for string in strings:
        if (n := len(string.encode())) > most:
            raise UserError(
                f"stop string {string!r} can never occur: it has {n} bytes, and {max_new_tokens} tokens of this run at "
                f"most {most}; leave it out, or raise --max-new-tokens."
            )


def _encoded(text: str, flag: str, tokenizer: Tokenizer) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{flag} {text!r} holds bytes that are not UTF-8, at character {error.start}.") from error
    return tokenizer.encode(text)


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
