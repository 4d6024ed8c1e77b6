"""Prompts that are messages, written by a chat template."""

from dataclasses import replace
from pathlib import Path

import pytest

from jaxformer.cli.sample import main
from jaxformer.decode import Sampling
from jaxformer.decode.completion import Completer, CompletionOptions
from jaxformer.decode.prompts import Prompt
from jaxformer.errors import UserError
from jaxformer.runs.run import load_run
from tests.helpers import small_run

pytest.importorskip("jinja2")
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return small_run(tmp_path_factory.mktemp("runs") / "small", ["Hi you. Hi me."])


def completer(run: Path, template: str) -> Completer:
    loaded = load_run(run)
    chatty = replace(loaded, tokenizer=loaded.tokenizer.with_chat_template(template))
    return Completer(chatty, CompletionOptions(chat=True, max_new_tokens=4), Sampling())


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
            r"message 1, holds '<\|endoftext\|>', which the tokenizer would encode as its special",
        ),
        (
            TEMPLATE.replace("m.content", "m.content | lower"),
            "<|ENDOFTEXT|>",
            r"the conversation, holds text that becomes the special token '<\|endoftext\|>' in the chat template",
        ),
        ("{{ raise_exception('no') }}", "Hi", "the chat template rejects it: no; omit --chat"),
        (TEMPLATE, "Hi you me " * 9, "the prompt has .* tokens; it may have at most the context's 16"),
    ],
)
def test_a_message_that_cannot_be_written_is_refused(run, template, text, said):
    with pytest.raises(UserError, match=said):
        completer(run, template).encode(Prompt(text, "the prompt"))


def test_a_run_without_a_template_says_so(run, capsys):
    assert main(["--run", str(run), "--chat", "--prompt", "Hi"]) == 2
    error = capsys.readouterr().err.strip()
    assert error == (
        "error: the tokenizer has no chat template; name a file with one in training, with --data.template."
    )
