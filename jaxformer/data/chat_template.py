"""Chat templates: Jinja templates, published with tokenizers, that format a conversation as one text.

They are rendered in Jinja's sandbox, with the names that published templates expect: `messages`, `tools`,
`add_generation_prompt`, the special tokens (`bos_token`, `eos_token`, …), `raise_exception`, `strftime_now`, the filter
`tojson`, and `{% generation %}` blocks around the assistant's text.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

from jaxformer.data.text import locate
from jaxformer.data.tokenizer import Tokenizer, named_templates
from jaxformer.errors import UserError, foreign, import_extra, parse_json

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.nodes import Node
    from jinja2.parser import Parser

ASSISTANT = "assistant"
"""Role whose text the model is trained on."""
ROLES = ("assistant", "developer", "environment", "function", "ipython", "observation", "system", "tool", "user")
"""Roles from whose names a template may form special tokens, such as `<|user|>`."""
MARK = "\ufdd0"
"""Around each special token that the template itself writes, and around `BEGIN` and `END` in a rendered text; Unicode
reserves this code point for such internal use, and no message may contain it."""
BEGIN, END = "{% generation %}", "{% endgeneration %}"
"""Names of the marks around a generation block."""
FOR_TOOLS = "tool_use"
"""Name of the chat template for conversations with tools, if a tokenizer has several."""
DATE = "2024-07-26"
"""Date that templates get as today's, the default of Llama 3.1's template: the tokens must not depend on the day."""

Message = Mapping[str, object]
"""A message of a conversation, with its `role`, its `content` and what else a template reads."""


class Rendered(NamedTuple):
    """A conversation as one text."""

    text: str
    spans: list[tuple[int, int]]
    """Character ranges `[start, stop)` that the assistant writes."""
    special: Counter[str]
    """Special tokens that the template has written, rather than a message, and how often."""
    ends: tuple[str, ...] = ()
    """Special token that ends each answer; "" for an answer without one."""


class ChatTemplate:
    """A chat template for a tokenizer."""

    def __init__(self, source: str, tokenizer: Tokenizer, name: str, for_tools: str | None = None) -> None:
        """Compile a template; error messages call it `name`, such as its path. `for_tools` is another one for
        conversations with tools, None for the same. Raises `UserError` if it is not a template, or Jinja is not
        installed."""
        self.source, self.tokenizer, self.name = source, tokenizer, name
        longest_first = sorted(tokenizer.special_texts.values(), key=len, reverse=True)
        self._special = f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})"
        self._stops = [tokenizer.special_texts.get(token) for token in tokenizer.ends_of_text]
        self._names: dict[str, object] = {k: self._mark(text) for k, text in tokenizer.special_tokens.items()}
        self._compiled, self._unmarked = self._compile(self._mark), self._compile(lambda text: text)
        self._for_tools = None if for_tools is None else ChatTemplate(for_tools, tokenizer, f"{name} for tools")

    @property
    def published(self) -> str | list[dict[str, str]]:
        """Value in a `tokenizer_config.json`: its source, or that of both templates by name."""
        if self._for_tools is None:
            return self.source
        sources = {"default": self.source, FOR_TOOLS: self._for_tools.source}
        return [{"name": name, "template": source} for name, source in sources.items()]

    @classmethod
    def of_tokenizer(cls, tokenizer: Tokenizer) -> ChatTemplate:
        """Return the template that a tokenizer was published with. Raises `UserError` if it has none."""
        if "default" not in (templates := tokenizer.chat_templates):
            others = f" but {', '.join(sorted(templates))}, which only tools or documents have" if templates else ""
            remedy = "name a file with one in training, with `data.template`"
            raise UserError(f"the tokenizer has no chat template{others}; {remedy}.")
        return cls(templates["default"], tokenizer, "the tokenizer's chat template", templates.get(FOR_TOOLS))

    @classmethod
    def read(cls, path: str, tokenizer: Tokenizer) -> ChatTemplate:
        """Return the template in a file, a `tokenizer_config.json` or Jinja. Raises `UserError` if it cannot be read or
        holds no template."""
        file = locate(path, "a chat template")
        try:
            text = file.read_text(encoding="utf-8")
            templates = named_templates(parse_json(text)) if file.suffix == ".json" else {"default": text}
            if "default" not in templates:
                raise ValueError("its chat_template is not text")
        except (OSError, ValueError, AttributeError) as error:
            problem = f"`data.template` {path} is no chat template ({type(error).__name__}: {error})"
            raise UserError(f"{problem}; give a file with a Jinja template, or a tokenizer_config.json.") from error
        return cls(templates["default"], tokenizer, path, templates.get(FOR_TOOLS))

    def render(
        self, messages: Sequence[Message], tools: object = None, add_generation_prompt: bool = False
    ) -> Rendered:
        """Return the text of messages, and the spans of its generation blocks. `tools` have the form that the template
        expects, None for none. With `add_generation_prompt`, the text ends with the start of an answer, such as the
        name of its role. Raises `ValueError` if the template raises an error, or takes a special token apart or
        compares it with a text."""
        if tools is not None and self._for_tools is not None:  # as in transformers
            return self._for_tools.render(messages, tools, add_generation_prompt)
        rendered = self._render(messages, tools, add_generation_prompt)
        if len(re.findall(self._special, rendered.text)) == rendered.special.total():
            return rendered
        # Some are formed from pieces. Those of a role's name, such as <|user|>, are the template's own.
        try:
            plain = self._render(self._plain(messages), self._plain(tools), add_generation_prompt)
        except ValueError:  # the template rejects the replaced texts
            return rendered
        formed = Counter(re.findall(self._special, plain.text)) - plain.special
        return rendered._replace(special=rendered.special + formed)

    def render_conversation(self, messages: Sequence[Message], tools: object = None) -> Rendered:
        """Return the text of a conversation and the spans of the assistant: the generation blocks. A template without
        them is rendered up to each assistant message, with a generation prompt, and again including the message; the
        difference is the assistant's. An answer includes the special token that ends it, even if that begins the next
        turn; after the last answer, it is added. Raises `ValueError` as `render` does, or if the text before a message
        depends on later messages, so that its span is unknown."""
        if tools is not None and self._for_tools is not None:
            return self._for_tools.render_conversation(messages, tools)
        text, spans, special, _ = self.render(messages, tools)
        if not re.search(r"\{%[-+]?\s*generation\b", self.source):
            spans = self._find_answers(messages, tools, text)
        if spans and not text[spans[-1][1] :].strip() and not self._find_end(text, *spans[-1])[1]:
            text += self._next_turn
            special.update(re.findall(self._special, self._next_turn))
        n_answers = sum(message["role"] == ASSISTANT for message in messages)
        first = 0 if len(spans) <= n_answers else len(spans) - 1  # blocks may be parts of one answer
        found = [self._find_end(text, *span) for span in spans[first:]]
        spans[first:] = [(start, stop) for (start, _), (stop, _) in zip(spans[first:], found, strict=True)]
        return Rendered(text, spans, special, tuple(end for _, end in found))

    def _render(self, messages: object, tools: object, add_generation_prompt: bool = False) -> Rendered:
        """Return what `render` does, with the special tokens that the template writes whole."""
        names = {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            marked = self._compiled.render(self._names | names)
            unmarked = self._unmarked.render(self.tokenizer.special_tokens | names)
        except Exception as error:  # its expressions can raise anything
            problem = f"raises {type(error).__name__}: {foreign(error)}".replace(MARK, "")
            raise ValueError(f"{self.name} {problem}") from error
        text, spans, special, start = "", list[tuple[int, int]](), Counter[str](), 0
        for number, part in enumerate(re.split(f"{MARK}([^{MARK}]*){MARK}", marked)):
            if number % 2 == 0:
                text += part
            elif part == BEGIN:
                start = len(text)
            elif part == END:
                spans += [(start, len(text))] if len(text) > start else []
            else:
                text += part
                special[part] += 1
        is_whole = MARK not in text and special.keys() <= {*self.tokenizer.special_texts.values()}
        if not is_whole or text != re.sub(f"{MARK}({BEGIN}|{END}){MARK}", "", unmarked):
            problem = "takes a special token apart, or compares it with a text"
            raise ValueError(f"{self.name} {problem}; write special tokens whole, and only write them")
        return Rendered(text, spans, special)

    def _plain(self, value: object) -> object:
        """Return a JSON value with each text in it replaced by "x", except known roles and the names of fields that the
        template reads."""
        if isinstance(value, dict):
            return {
                key if key in self._fields else "x": v if key == "role" and v in ROLES else self._plain(v)
                for key, v in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._plain(part) for part in value]
        return "x" if isinstance(value, str) and value else value

    def _find_answers(self, messages: Sequence[Message], tools: object, text: str) -> list[tuple[int, int]]:
        """Return the span of each assistant message in the text of a conversation."""
        spans, special = [], tuple(self.tokenizer.special_texts.values())
        for i, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self._render(messages[:i], tools, add_generation_prompt=True).text
            through = self._render(messages[: i + 1], tools).text
            if not (through.startswith(before) and text.startswith(through)):
                when = "after a generation prompt or if other messages follow"
                problem = f"{self.name} renders message {i + 1} differently {when}"
                remedy = "set `data.template` to one with {% generation %} blocks"
                raise ValueError(f"{problem}, so that the assistant's part is unknown; {remedy}")
            # The model does not generate white space after a special token.
            end = through.rstrip()
            spans.append((len(before), len(end if end.endswith(special) else through)))
        return spans

    def _find_end(self, text: str, start: int, stop: int) -> tuple[int, str]:
        """Return where an answer ends, and the special token that ends it: its own last one or, unless sampling stops
        at that, the next one, which begins the next turn; "" if there is neither."""
        own = re.search(rf"{self._special}\s*\Z", text[start:stop])
        after = re.compile(rf"\s*{self._special}").match(text, stop)
        if own and (own[1] in self._stops or not (after and after[1] in self._stops)):
            return stop, own[1]
        return (after.end(), after[1]) if after else (stop, "")

    @cached_property
    def _next_turn(self) -> str:
        """Text with which the turn after an answer begins, up to its special token; "" if it begins with none."""
        turns = [{"role": role, "content": "x"} for role in ("user", ASSISTANT, "user")]
        try:
            answered, continued = (self._render(turns[:n], None).text for n in (2, 3))
        except ValueError:  # the template expects other messages
            return ""
        after = re.compile(rf"\s*{self._special}").match(continued, len(answered))
        return after[0] if after and continued.startswith(answered) else ""

    def _mark(self, text: str) -> str:
        """Return a text with marks around its special tokens."""
        return re.sub(self._special, rf"{MARK}\1{MARK}", text)

    def _compile(self, mark: Callable[[str], str]) -> Template:
        """Return the compiled Jinja template, with its texts changed by `mark`."""
        jinja2 = import_extra("jinja2", "a chat template")
        sandbox = import_extra("jinja2.sandbox", "a chat template")
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_extension()]
        )
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # Jinja's own escapes HTML
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = date.fromisoformat(DATE).strftime
        try:
            parsed = environment.parse(self.source)
            self._fields = {node.attr for node in parsed.find_all(jinja2.nodes.Getattr)}
            self._fields |= {node.value for node in parsed.find_all(jinja2.nodes.Const)}
            for constant in parsed.find_all(jinja2.nodes.TemplateData):
                constant.data = mark(constant.data)
            for constant in parsed.find_all(jinja2.nodes.Const):
                if isinstance(constant.value, str):
                    constant.value = mark(constant.value)
            return environment.from_string(parsed)
        except jinja2.TemplateSyntaxError as error:
            problem = f"{self.name}, line {error.lineno}, is not a valid Jinja template: {error.message}"
            raise UserError(f"{problem}; fix it.") from error


def _raise(message: str) -> None:
    """Raise a template's own error."""
    raise import_extra("jinja2", "a chat template").TemplateError(message)


def _generation_extension() -> type:
    """Return the Jinja extension that marks the text of `{% generation %}` … `{% endgeneration %}` blocks."""
    nodes, extensions = (import_extra(f"jinja2.{name}", "a chat template") for name in ("nodes", "ext"))

    class Generation(extensions.Extension):  # type: ignore[name-defined]
        """Jinja extension for generation blocks."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> Node:
            """Return a call to `mark` with the block's content."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller: Callable[[], str]) -> str:
            """Return the block's text between markers."""
            return f"{MARK}{BEGIN}{MARK}{caller()}{MARK}{END}{MARK}"

    return Generation


def encode_rendered(
    rendered: Sequence[Rendered], labels: Sequence[str], tokenizer: Tokenizer
) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Return the tokens of each text and their character ranges. Raises `UserError`, with the text's label, if a text
    has more special tokens than the template has written, so that a message would control the conversation."""
    encoded, special = tokenizer.encode_with_special([text for text, *_ in rendered]), tokenizer.special_texts
    for written, label, (ids, _) in zip(rendered, labels, encoded, strict=True):
        if formed := Counter(special[token] for token in ids if token in special) - written.special:
            problem = f"{label} holds text that becomes the special token {next(iter(formed))!r} in the chat template"
            raise UserError(f"{problem}; rephrase it, or remove the line.")
    return encoded
