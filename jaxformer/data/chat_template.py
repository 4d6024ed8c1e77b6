"""Chat templates: Jinja templates, published with tokenizers, that format a conversation as one text.

They are rendered in Jinja's sandbox, with the names that published templates expect: `messages`, `tools`,
`add_generation_prompt`, the special tokens (`bos_token`, `eos_token`, …), `raise_exception`, `strftime_now`, the filter
`tojson`, and `{% generation %}` blocks around the assistant's text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import date
from functools import partial
from typing import Any, NamedTuple

from jaxformer.data.sources import locate
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError, abbreviate, os_error_reason, parse_json
from jaxformer.extras import import_extra

ASSISTANT = "assistant"
"""Role whose text the model is trained on."""
BEGIN, END = "\0<", "\0>"
"""Markers of a generation block in a rendered text; no message may contain the character 0."""
DATE = "2024-07-26"
"""Date that templates get as today's, the default of Llama 3.1's template: the tokens must not depend on the day."""

Message = Mapping[str, Any]


class Rendered(NamedTuple):
    """A conversation as one text, and the character ranges `[start, stop)` that the assistant writes."""

    text: str
    spans: list[tuple[int, int]]


class ChatTemplate:
    """A chat template and the special tokens that it writes."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], name: str) -> None:
        """Compile a template with special tokens by name, such as `eos_token`; error messages call it `name`, such as
        its path. Raises `UserError` if it is not a template, or Jinja is not installed."""
        self.source, self.special_tokens, self.name = source, special_tokens, name
        self._compiled = self._compile()

    @classmethod
    def of_tokenizer(cls, tokenizer: Tokenizer) -> ChatTemplate:
        """Return the template that a tokenizer was published with. Raises `UserError` if it has none."""
        source = tokenizer.config.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = {e.get("name"): e.get("template") for e in source if isinstance(e, dict)}.get("default")
        if not isinstance(source, str):
            raise UserError(
                "the tokenizer has no chat template; name a file with one in training, with --data.template."
            )
        return cls(source, tokenizer.special_tokens, "the tokenizer's chat template")

    def render(self, messages: Sequence[Message], tools: Any = None, add_generation_prompt: bool = False) -> Rendered:
        """Return the text of messages, and the spans of its generation blocks. `tools` have the form that the template
        expects, None for none. With `add_generation_prompt`, the text ends with the start of an answer, such as the
        name of its role. Raises `UserError` if the template raises an error; callers complete the message with the
        location in the data."""
        try:
            marked = self._compiled.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )  # fmt: skip
        except UserError:
            raise
        except Exception as error:  # its expressions can raise anything
            raise UserError(f"{self.name} raises {type(error).__name__}: {error}") from error
        text, spans = "", list[tuple[int, int]]()
        for number, part in enumerate(re.split(f"{BEGIN}|{END}", marked)):
            if number % 2 and part:
                spans.append((len(text), len(text) + len(part)))
            text += part
        return Rendered(text, spans)

    def render_conversation(self, messages: Sequence[Message], tools: Any = None) -> Rendered:
        """Return the text of a conversation and the spans of the assistant: the generation blocks. A template without
        them is rendered up to each assistant message, with a generation prompt, and again including the message; the
        difference is the assistant's. Raises `UserError` as `render` does, or if the text before a message depends on
        later messages, so that its span is unknown."""
        text, spans = self.render(messages, tools)
        if self.has_generation_blocks:
            return Rendered(text, spans)
        for i, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self.render(messages[:i], tools, add_generation_prompt=True).text
            through = self.render(messages[: i + 1], tools).text
            if not (through.startswith(before) and text.startswith(through)):
                is_same = through.startswith(self.render(messages[:i], tools).text)
                differs = is_same and not through.startswith(before)
                when = "after a generation prompt" if differs else "if other messages follow"
                problem = f"{self.name} renders message {i + 1} differently {when}"
                remedy = "set data.template to one with {% generation %} blocks"
                raise UserError(f"{problem}, so that the assistant's part is unknown; {remedy}")
            # The model does not generate white space after a special token.
            end = through.rstrip()
            spans.append((len(before), len(end if end.endswith(tuple(self.special_tokens.values())) else through)))
        return Rendered(text, spans)

    @property
    def has_generation_blocks(self) -> bool:
        """True if the template marks the assistant's text."""
        return re.search(r"\{%[-+]?\s*generation\b", self.source) is not None

    def _compile(self) -> Any:
        """Return the compiled Jinja template."""
        jinja2 = import_extra("jinja2", "a chat template")
        sandbox = import_extra("jinja2.sandbox", "a chat template")
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_extension()]
        )
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # Jinja's own escapes HTML
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = date.fromisoformat(DATE).strftime
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            problem = f"{self.name}, line {error.lineno}, is not a valid Jinja template: {error.message}"
            raise UserError(f"{problem}; fix it.") from error
        except (RecursionError, SyntaxError) as error:  # from Python, which Jinja compiles to
            raise UserError(f"{self.name} is nested too deeply ({error}); give another template.") from error


def _generation_extension() -> type:
    """Return the Jinja extension that marks the text of `{% generation %}` … `{% endgeneration %}` blocks."""
    nodes, extensions = (import_extra(f"jinja2.{name}", "a chat template") for name in ("nodes", "ext"))

    class Generation(extensions.Extension):  # type: ignore[name-defined]
        """Jinja extension for generation blocks."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            """Return a call to `mark` with the block's content."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller: Any) -> str:
            """Return the block's text between markers."""
            return f"{BEGIN}{caller()}{END}"

    return Generation


def _raise_exception(message: str) -> None:
    """Raise a template's own error."""
    raise UserError(f"the chat template rejects it: {message}")


def read_template(path: str, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the template in a file, a `tokenizer_config.json` or Jinja. Raises `UserError` if it cannot be read or
    holds no template."""
    file = locate(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"data.template {path} cannot be read ({os_error_reason(error) or 'it is not UTF-8'})"
        raise UserError(f"{problem}; give a file with a Jinja template, or a tokenizer_config.json.") from error
    if file.suffix != ".json":
        return ChatTemplate(text, tokenizer.special_tokens, path)
    try:
        config = parse_json(text.encode())
    except ValueError as error:
        raise UserError(f"data.template {path} is not JSON: {error}; give a tokenizer_config.json.") from error
    source = config.get("chat_template") if isinstance(config, dict) else None
    if not isinstance(source, str):
        raise UserError(f"data.template {path} has a chat_template that is not text, but {abbreviate(source)}.")
    return ChatTemplate(source, tokenizer.special_tokens, path)
