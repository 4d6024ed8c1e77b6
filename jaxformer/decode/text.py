"""Text in, text out: generation in one call, with the sampling settings that a run was published with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, overload

from jaxformer.decode.completion import Completer, CompletionOptions
from jaxformer.decode.prompts import Prompt, encode_prompts
from jaxformer.decode.samplers import Sampling
from jaxformer.errors import UserError

if TYPE_CHECKING:
    from jaxformer.runs.run import Run

SETTINGS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
"""Fields of `Sampling` that depend on the run."""
OF_TEXTS: Mapping[str, float] = {"temperature": 0.8, "min_p": 0.05}
OF_CHATS: Mapping[str, float] = {"temperature": 0.2, "top_p": 0.9}
"""Settings of chats, those that the authors of SmolLM2 recommend: at the temperature of texts, small models lose the
thread."""


def default_settings(run: Run, chat: bool = False) -> tuple[dict[str, Any], str]:
    """Return the value of each of `SETTINGS` by name, and where they come from, in words: the settings that the run was
    published with, or else those of chats or of texts.

    Raises:
      UserError: a setting of the run is unknown or out of range.
    """
    own, source = run.sampling, "published with the model"
    if not own:
        own, source = (OF_CHATS, "the defaults of chats") if chat else (OF_TEXTS, "the defaults of texts")
    settings = {name: getattr(Sampling, name) for name in SETTINGS} | dict(own)
    try:
        if unknown := [name for name in own if name not in SETTINGS]:
            raise UserError(f"{unknown[0]} is unknown; the known ones are {', '.join(SETTINGS)}.")
        if isinstance(own.get("top_k"), float):
            raise UserError(f"top_k is {own['top_k']}; it must be a whole number.")
        Sampling(**settings)
    except UserError as error:
        reason = str(error).replace("`", "")  # no option sets them
        raise UserError(f"the sampling settings of {run.path} cannot be used: {reason}") from error
    return settings, source


@overload
def generate(
    run: Run, prompt: str, *, max_new_tokens: int = ..., chat: bool = ..., seed: int = ..., **options: Any
) -> str: ...
@overload
def generate(
    run: Run, prompt: Sequence[str], *, max_new_tokens: int = ..., chat: bool = ..., seed: int = ..., **options: Any
) -> list[str]: ...
def generate(
    run: Run, prompt: str | Sequence[str], *, max_new_tokens: int = 200, chat: bool = False, seed: int = 0,
    **options: Any,
) -> str | list[str]:  # fmt: skip
    """Return the continuation of a text, without the text itself, or those of several texts, decoded as a batch.

    Sampling settings that are not given are those that the run was published with, or else temperature 0.2 and top-p
    0.9 for chats, temperature 0.8 and min-p 0.05 for texts.

    Args:
      prompt: text to continue; in a chat, the user's message.
      max_new_tokens: maximum new tokens of each text.
      chat: write the prompt with the chat template of the run's tokenizer.
      seed: random seed; equal seeds give equal texts.
      options: other fields of `Sampling`, such as `temperature` (0 for the most likely tokens) and `top_p`, and options
        of sample.py by their names there: `stop=("\\n",)`, `system`, `num_beams`, `num_samples`. With several samples
        or prompts, the result is a list, in which the samples of a prompt stand together.

    Raises:
      TypeError: an option is unknown, a prompt is not a text, or there is no run.
      UserError: the run does not generate text, an option is out of range, or a prompt is empty or too long.
    """
    if not hasattr(run, "text_model"):
        remedy = "generate(load_run(path), text) continues a text"
        raise TypeError(f"expected a run, got a {type(run).__name__}; {remedy}")
    of_completion, of_sampling = ({f.name for f in fields(kind)} for kind in (CompletionOptions, Sampling))
    for name in options:
        if name not in of_completion | of_sampling:
            near = get_close_matches(name, of_completion | of_sampling, 1)
            raise TypeError(f"generate() has no option {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    if options.get("draft") not in (None, "lookup"):
        raise TypeError("a draft is 'lookup' here; for another model, see decode.speculate")
    if options.get("system") is not None and not chat:
        raise UserError("system has no effect without a chat; omit it, or give chat=True.")
    completion = CompletionOptions(
        max_new_tokens, chat, seed=seed, **{name: x for name, x in options.items() if name in of_completion}
    )
    given = {name: x for name, x in options.items() if name not in of_completion}
    completer = Completer(run, completion, Sampling(**default_settings(run, chat)[0] | given))
    texts = [prompt] if isinstance(prompt, str) else list(prompt)
    if others := [text for text in texts if not isinstance(text, str)]:
        raise TypeError(
            f"a prompt must be a text, got {type(others[0]).__name__}; for tokens, see decode.generate_tokens"
        )
    prompts = [Prompt(text, f"prompt {i}" if len(texts) > 1 else "the prompt") for i, text in enumerate(texts, 1)]
    done = dict(completer.complete(encode_prompts(prompts, completer.encode), lambda: False))
    generated = [sample.text.text for i in range(len(texts)) for sample in done[i]]
    return generated[0] if isinstance(prompt, str) and completion.num_samples == 1 else generated
