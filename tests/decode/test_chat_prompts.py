"""Prompts that are messages, written by a chat template."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxformer.cli.sample import main
from jaxformer.decode import Sampling
from jaxformer.decode.completion import Completer, CompletionOptions
from jaxformer.decode.prompts import Prompt
from jaxformer.errors import UserError
from jaxformer.runs.run import load_run
from tests.runs.random_runs import saved_run

pytest.importorskip("jinja2")
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return saved_run(tmp_path_factory.mktemp("runs") / "small", ["Hi you. Hi me."])


def completer(run: Path, template: str, n: int = 4, **options: Any) -> Completer:
    loaded = load_run(run)
    chatty = replace(loaded, tokenizer=loaded.tokenizer.with_chat_template(template))
    return Completer(chatty, CompletionOptions(chat=True, max_new_tokens=n, **options), Sampling(0))


def test_a_message_is_encoded_with_special_tokens_up_to_the_beginning_of_the_answer(run):
    tokenizer = load_run(run).tokenizer
    expected = [*tokenizer.encode("u:Hi"), tokenizer.end_of_text, *tokenizer.encode("a:")]
    assert completer(run, TEMPLATE).encode(Prompt("Hi", "the prompt")) == expected


@pytest.mark.parametrize(
    ("template", "text", "said"),
    [
        (
            TEMPLATE,
            "a<|endoftext|>",
            r"the conversation, holds text that becomes the special token '<\|endoftext\|>' in the chat template",
        ),
        (
            TEMPLATE.replace("m.content", "m.content | lower"),
            "<|ENDOFTEXT|>",
            r"the conversation, holds text that becomes the special token '<\|endoftext\|>' in the chat template",
        ),
        ("{{ raise_exception('no') }}", "Hi", "chat template raises TemplateError: no; omit `chat`"),
        (TEMPLATE, "Hi you me " * 9, "the prompt has .* tokens; it may have at most the context's 16"),
    ],
)
def test_a_message_that_cannot_be_written_is_refused(run, template, text, said):
    with pytest.raises(UserError, match=said):
        completer(run, template).encode(Prompt(text, "the prompt"))


def turn(text: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


@pytest.mark.parametrize(
    ("system", "turns", "texts"),
    [("me", [], ["s:me", "u:Hi"]), (None, [turn("Hi", "you")], ["u:Hi", "a:you", "u:Hi"])],
)
def test_a_conversation_has_the_system_message_and_earlier_turns(run, system, turns, texts):
    tokenizer, chat = load_run(run).tokenizer, completer(run, TEMPLATE, n=1, system=system)
    chat.turns = turns
    expected = [token for text in texts for token in (*tokenizer.encode(text), tokenizer.end_of_text)]
    assert chat.encode(Prompt("Hi", "the prompt")) == [*expected, *tokenizer.encode("a:")]


def test_the_oldest_turns_are_forgotten_at_the_end_of_the_context(run, caplog):
    chat, alone = completer(run, TEMPLATE, n=2), completer(run, TEMPLATE, n=2)
    chat.turns = [turn("you", "Hi"), turn("Hi", "me"), turn("Hi", "")]
    alone.turns = [turn("Hi", "")]
    prompt = Prompt("Hi", "the prompt")
    assert len(alone.encode(prompt)) == 13 and chat.encode(prompt) == alone.encode(prompt)
    assert chat.turns == alone.turns
    assert [record.getMessage() for record in caplog.records] == [
        "the conversation reaches the end of the context: its oldest turns are forgotten, 2."
    ]
    with pytest.raises(UserError, match="it may have at most the context's 16"):
        chat.encode(Prompt("Hi you me " * 9, "the prompt"))
    assert chat.turns == alone.turns


def test_answers_of_a_conversation_equal_those_from_scratch(run):
    chat = completer(run, TEMPLATE, n=2)
    chat.turns = []
    for text in ("Hi", "me", "you"):
        prompt, scratch = Prompt(text, "the prompt"), completer(run, TEMPLATE, n=2)
        scratch.turns = list(chat.turns)
        answers = []
        for each in (chat, scratch):
            ((_, [completion]),) = each.complete([(prompt, each.encode(prompt))], lambda: False)
            answers.append(completion.text.tokens)
        assert answers[0] == answers[1]
        chat.remember(completion)
    assert chat.turns[-1] == turn("you", completion.text.text)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "takes no system message"),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}", "no; omit `system`"),
    ],
)
def test_a_system_message_that_the_template_does_not_take_is_refused(run, template, said):
    with pytest.raises(UserError, match=said):
        completer(run, template, system="me").encode(Prompt("Hi", "the prompt"))


def test_an_interactive_chat_remembers_until_it_is_cleared(run, monkeypatch, capsys):
    loaded = load_run(run)
    chatty = replace(loaded, tokenizer=loaded.tokenizer.with_chat_template(TEMPLATE))
    monkeypatch.setattr("jaxformer.cli.sample._open_laid_out", lambda options, meanwhile: chatty)
    asked, encode = [], Completer.encode

    def record(self: Completer, prompt: Prompt) -> list[int]:
        asked.append(len(self.turns))
        return encode(self, prompt)

    monkeypatch.setattr(Completer, "encode", record)
    lines = iter(["Hi", "Hi", "/clear", "Hi"])
    monkeypatch.setattr("builtins.input", lambda *_: next(lines, None) or (_ for _ in ()).throw(EOFError))
    assert main(["--run", str(run), "--chat", "--interactive", "--max-new-tokens", "1", "--temperature", "0"]) == 0
    assert asked == [0, 1, 0] and capsys.readouterr().out.count("Hi\n") == 3


def test_a_run_without_a_template_says_so(run, capsys):
    assert main(["--run", str(run), "--chat", "--prompt", "Hi"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == (
        "error: the tokenizer has no chat template; name a file with one in training, with --data.template."
    )
