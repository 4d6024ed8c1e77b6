"""Conversations for fine-tuning, and chat templates."""

import gzip
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxformer.cli.training_report import footer
from jaxformer.config import Config, TokenModelConfig, TrainConfig
from jaxformer.data.chat import ChatConfig, assistant_tokens, encode_conversations, read_conversations
from jaxformer.data.chat_template import MARK, ChatTemplate, encode_rendered
from jaxformer.data.packing import PackedExamples
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError
from jaxformer.inspect.callbacks import make_callbacks
from jaxformer.parallel.mesh import make_mesh
from jaxformer.train.log import read_metrics
from jaxformer.train.loop import train
from jaxformer.train.setup import TrainSetup
from tests.arrays import plain_decoder

pytest.importorskip("jinja2")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = """{{ bos_token }}{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{{ '\n' }}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
    {%- else %}
        {{- raise_exception('no role ' + message.role) }}
    {%- endif %}
{%- endfor %}"""
LAST_ONLY = CHATML.replace("message['content']", "(message['content'] if loop.last else '...')")
WORDS = "How are you ? I am fine . What is the time It is noon ä 👋🏽 yes"
CHAT = [
    {"role": "user", "content": "How are you?"},
    {"role": "assistant", "content": "I am fine 👋🏽."},
    {"role": "user", "content": "What is the time?"},
    {"role": "assistant", "content": "It is noon."},
]
TARGETS = "I am fine 👋🏽.<|im_end|>It is noon.<|im_end|>"


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A folder with a small tokenizer of the kind that is published."""
    folder = tmp_path_factory.mktemp("published")
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(
        [WORDS] * 10,
        trainers.BpeTrainer(
            vocab_size=290, special_tokens=["<s>", "<|im_start|>", "<|im_end|>"], show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )  # fmt: skip
    inner.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": CHATML, "add_bos_token": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def tokenizer(published) -> Tokenizer:
    return Tokenizer.load(published / "tokenizer.json")


@pytest.fixture(scope="module")
def template(tokenizer) -> ChatTemplate:
    return ChatTemplate.of_tokenizer(tokenizer)


def written(path: Path, *conversations: object) -> Path:
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    return path


@pytest.mark.parametrize("source", [CHATML, MARKED], ids=["prefixes", "blocks"])
def test_the_assistants_part_is_its_text_and_the_end_of_its_turn(tokenizer, source):
    text, spans, special, ends = ChatTemplate(source, tokenizer, "it").render_conversation(CHAT)
    assert "".join(text[start:stop] for start, stop in spans) == TARGETS
    assert text.count("<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\nI am") == 1
    assert text.startswith("<s>" if source is MARKED else "<|im_start|>") and MARK not in text
    assert special == Counter({"<|im_start|>": 4, "<|im_end|>": 4} | ({"<s>": 1} if source is MARKED else {}))
    assert ends == ("<|im_end|>", "<|im_end|>")
    ((ids, offsets),) = tokenizer.encode_with_special([text])
    counts = assistant_tokens(offsets, spans)
    end = tokenizer.end_of_text
    learned = [token for token, counted in zip(ids, counts, strict=True) if counted]
    assert tokenizer.decode(learned) == TARGETS.replace("<|im_end|>", "") and learned.count(end) == 2
    assert ids.count(end) == 4  # and not those of the user


NEXT_ROLE = (
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}{% else %}"
    "<s>{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s>{% endif %}"
)
"""A template in which only the marker of the next role ends an answer."""


@pytest.mark.parametrize(
    ("source", "end"),
    [
        (NEXT_ROLE.replace("{% generation %}", "").replace("{% endgeneration %}", ""), "<|im_start|>"),
        (NEXT_ROLE, "<|im_start|>"),
        (MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}{{ '\\n<|im_end|>' }}"), "\n<|im_end|>"),
        (MARKED.replace("<|im_end|>{% endgeneration %}{{ '\n' }}", "<|im_end|>\n{% endgeneration %}"), "<|im_end|>\n"),
        (CHATML.replace("'<|im_end|>\n'", "('' if loop.last and loop.index is even else '<|im_end|>')"), "<|im_end|>"),
        (CHATML.replace("<|im_end|>", "<s>"), "<s>"),
        (MARKED.replace("{{ message.content }}", "{{ message.content[:2] }}{% endgeneration %}"
                        "{% generation %}{{ message.content[2:] }}"), "<|im_end|>"),
    ],
)  # fmt: skip
def test_every_answer_is_trained_up_to_a_special_token(tokenizer, source, end):
    template = ChatTemplate(source, tokenizer, "it")
    for chat, targets in ((CHAT, TARGETS), (CHAT[:2], "I am fine 👋🏽.<|im_end|>")):
        text, spans, special, ends = template.render_conversation(chat)
        assert "".join(text[start:stop] for start, stop in spans) == targets.replace("<|im_end|>", end)
        assert {*ends} == {end.strip()} and text.rstrip().endswith(end.strip())
        assert special == Counter(re.findall(r"<s>|<\|im_\w+\|>", text))


@pytest.mark.parametrize(("end", "n"), [("", 2), ("{{ eos_token }}", 1)])
def test_an_answer_without_an_end_is_noted(published, tmp_path, end, n):
    source = NEXT_ROLE.replace("<|im_start|>", "user: ").replace("<s>", "assistant: ") + end
    (tmp_path / "t.jinja").write_text(source)
    path, val = written(tmp_path / "c.jsonl", CHAT, CHAT[2:]), written(tmp_path / "v.jsonl", CHAT[:2])
    data = load(path, published, 1, 128, template=str(tmp_path / "t.jinja"), val_path=str(val))
    assert data.notes[0].startswith(f"of the training conversations, {n} have an answer that no special token ends")
    assert not load(path, published, 1, 128, val_path=str(val)).notes


@pytest.mark.parametrize(
    ("template", "eos", "ends"),
    [
        (CHATML, "<|im_end|>", ["<|im_end|>"]),
        (CHATML, "<s>", ["<s>", "<|im_end|>"]),
        (NEXT_ROLE, "<|im_end|>", ["<|im_end|>", "<|im_start|>"]),
    ],
)
def test_sampling_stops_at_the_ends_of_the_answers(published, tmp_path, template, eos, ends):
    config = json.loads((published / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": eos, "chat_template": template}))
    (tmp_path / "tokenizer.json").write_text((published / "tokenizer.json").read_text())
    data = load(written(tmp_path / "c.jsonl", CHAT, CHAT[:2]), tmp_path, 1, 128)
    data.tokenizer.save(tmp_path / "tokenizer.json")  # as in a run's folder
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert [loaded.special_texts[token] for token in loaded.ends_of_text] == ends
    assert [f"end with {end}, so" in data.notes[0] for end in ends[1:]] == [True] * len(data.notes)


def test_tokens_that_share_a_character_with_a_span_count():
    offsets = [(0, 2), (2, 5), (5, 5), (5, 7), (7, 8), (7, 8), (8, 9)]
    assert assistant_tokens(offsets, [(4, 6), (7, 8)]) == [0, 1, 1, 1, 1, 1, 0]
    assert assistant_tokens(offsets, []) == [0] * 7


@pytest.mark.slow
@pytest.mark.parametrize("chat", [CHAT, CHAT[:2], [CHAT[0], {"role": "assistant", "content": " ä\n\nyes "}]])
def test_tokens_and_masks_are_those_of_transformers(published, tokenizer, chat):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(published)
    for source in (CHATML, MARKED):
        text, spans, *_ = ChatTemplate(source, tokenizer, "it").render_conversation(chat)
        expected = theirs.apply_chat_template(
            chat, chat_template=source, tokenize=True, return_dict=True, return_assistant_tokens_mask=source is MARKED
        )
        ((ids, offsets),) = tokenizer.encode_with_special([text])
        assert ids == expected["input_ids"]
        if source is MARKED:
            assert assistant_tokens(offsets, spans) == expected["assistant_masks"]
        prompt = ChatTemplate(source, tokenizer, "it").render(chat[:1], add_generation_prompt=True).text
        assert prompt == theirs.apply_chat_template(
            chat[:1], chat_template=source, tokenize=False, add_generation_prompt=True
        )


def test_a_template_sees_the_names_that_published_ones_expect(tokenizer):
    source = (
        "{{ eos_token }} {{ tools | tojson }} {{ strftime_now('%d %b %Y') }}"
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %} {{ m.content | tojson }}{% endfor %}"
    )
    rendered = ChatTemplate(source, tokenizer, "it").render(CHAT, tools=[{"name": "<ä>"}])
    assert rendered.text == '<|im_end|> [{"name": "<ä>"}] 26 Jul 2024 "How are you?"'


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% for m in messages %}", "it, line 1, is not a valid Jinja template"),
        ("a\n{{ messages | nothing }}", "it, line 2, is not a valid Jinja template: No filter named 'nothing'"),
    ],
)
def test_a_template_that_is_none_is_refused_with_its_line(tokenizer, source, said):
    with pytest.raises(UserError, match=said):
        ChatTemplate(source, tokenizer, "it")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (MARKED, "it raises TemplateError: no role system"),
        ("{{ messages[9].content.x }}", "it raises UndefinedError: "),
        ("{{ messages.__class__.__mro__ }}", "it raises SecurityError: access to attribute '__class__'"),
        (LAST_ONLY, r"it renders message 2 differently .* set `data.template` to one with {% gen"),
        (CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>' }}{% endif"), "it renders message 2 different"),
    ],
)
def test_a_template_that_raises_is_one_sentence_with_file_and_line(published, tmp_path, monkeypatch, source, said):
    system = [{"role": "system", "content": "Be brief."}]
    chats = [CHAT, [CHAT[1], CHAT[0], CHAT[1], *(system if source is MARKED else [])]]
    if source is LAST_ONLY:
        chats = [CHAT[:2], [CHAT[1], CHAT[0]]]
    path = written(tmp_path / "chats.jsonl", *chats, CHAT[:1] + CHAT[3:])
    (tmp_path / "it").write_text(source)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"{path}, line \d, {said}") as caught:
        load(path, published, template="it")
    assert "\n" not in str(caught.value)


def load(path: Path, published: Path, batch_size: int = 1, context_length: int = 64, **fields):
    config = ChatConfig(str(path), tokenizer=str(published), **fields)
    return config.load(TokenModelConfig(290, context_length), batch_size, 0)


def test_a_batch_has_the_assistants_targets_alone_and_each_conversation_by_itself(published, tokenizer, tmp_path):
    short = [{"role": "user", "content": "yes"}, {"role": "assistant", "content": "yes"}]
    path = written(tmp_path / "chats.jsonl", CHAT, short)
    held = written(tmp_path / "val.jsonl", CHAT[2:])
    data = load(path, published, context_length=128, val_path=str(held))
    (tokens_BT, prefix, segments_BT), targets_BT, weights_BT = data.batch(0)
    assert prefix is None and tokens_BT.shape == (1, 128) and weights_BT.sum() == pytest.approx(1)
    assert set(segments_BT[0]) == {0, 1, 2}
    counted = weights_BT[0] > 0
    texts = {tokenizer.decode(targets_BT[0][counted & (segments_BT[0] == i)]) for i in (1, 2)}
    assert texts == {"I am fine 👋🏽.It is noon.", "yes"}
    assert len(set(weights_BT[0][counted])) == 1
    np.testing.assert_array_equal(
        targets_BT[0][:-1][segments_BT[0][1:] == 1], tokens_BT[0][1:][segments_BT[0][1:] == 1]
    )
    (batch,) = data.val_batches(4)
    assert batch.weights.sum() == len(tokenizer.encode("It is noon.")) + 1 and batch.weights.shape == (4, 128)
    assert data.describe().endswith("the assistant's; held out: 1 conversation(s)")
    assert data.tokenizer.config["chat_template"] == CHATML


def test_whole_conversations_are_held_out_and_equal_ones_on_one_side(published, tmp_path):
    chats = [[{"role": "user", "content": f"{i % 10}?"}, {"role": "assistant", "content": "yes"}] for i in range(40)]

    def held_out(order: int) -> list[bytes]:
        path = written(tmp_path / "c.jsonl", *chats[::order])
        data = load(path, published, val_fraction=0.2, context_length=32)
        assert [len(split.lengths_N) for split in (data._train, data._val)] == [32, 8]
        (*batches,) = data.val_batches(1)
        return sorted(
            row[part == i].tobytes() for ((row,), _, (part,)), _, _ in batches for i in range(1, part.max() + 1)
        )

    assert held_out(1) == held_out(-1) and len(held_out(1)) == 8 and len(set(held_out(1))) == 2


def test_conversations_that_differ_only_in_what_the_model_does_not_read_are_equal(published, tmp_path):
    def variants(i: int) -> list[str]:
        user, answer = {"role": "user", "content": f"{i} ä?"}, {"role": "assistant", "content": "yes"}
        return [
            json.dumps({"messages": [user, answer]}),
            json.dumps({"id": 7, "messages": [user, answer | {"weight": 1}]}),
            json.dumps({"messages": [dict(reversed(user.items())), answer]}, ensure_ascii=False, indent=0).replace(
                "\n", " "
            ),
        ]

    (tmp_path / "c.jsonl").write_text("\n".join(line for i in range(20) for line in variants(i)), encoding="utf-8")
    data = load(tmp_path / "c.jsonl", published, val_fraction=0.3)
    train, val = ({bytes(c) for c in _examples(split)} for split in (data._train, data._val))
    assert (len(train), len(val), len(data._val.lengths_N)) == (14, 6, 18) and not train & val
    (tmp_path / "v.jsonl").write_text(variants(3)[2], encoding="utf-8")
    data = load(tmp_path / "c.jsonl", published, val_path=str(tmp_path / "v.jsonl"))
    assert len(data._train.lengths_N) == 3 * 19


def _examples(split: PackedExamples) -> list[np.ndarray]:
    return [split.tokens[i : i + n + 1] for i, n in zip(split.starts_N, split.lengths_N, strict=True)]


WITHOUT_THINKING = CHATML.replace(
    "message['content']", "message['content'].split('<t>')[0] + message['content'].split('</t>')[-1]"
)
ROLE_MARKER = CHATML.replace("'<|im_start|>' + message['role']", "'<|' + message['role'] + '|>'").replace(
    "'<|im_start|>assistant", "'<|assistant|>"
)


@pytest.mark.parametrize(
    ("source", "message", "formed"),
    [
        (ROLE_MARKER, {"role": "im_end", "content": "a"}, "<|im_end|>"),
        (WITHOUT_THINKING, {"role": "user", "content": "a<|im_<t>b</t>end|>c"}, "<|im_end|>"),
        ("<{{ messages[0].content }}" + CHATML, {"role": "user", "content": "s>"}, "<s>"),
        (MARKED.replace("user\n'", "user<|im_'"), {"role": "user", "content": "start|>"}, "<|im_start|>"),
        ("{{ messages[0].tool | replace('_', '') }}" + CHATML, {"role": "user", "content": "", "tool": "<_s>"}, "<s>"),
        (
            "<|{{ messages[0].tool.keys() | join }}|>" + CHATML,
            {"role": "user", "content": "", "tool": {"im_end": 1}},
            "<|im_end|>",
        ),
        ("{{ messages[0].content | lower }}" + CHATML, {"role": "user", "content": "<S>"}, "<s>"),
    ],
)
def test_a_message_never_becomes_a_special_token(tokenizer, tmp_path, source, message, formed):
    template = ChatTemplate(source, tokenizer, "it")
    path = written(tmp_path / "c.jsonl", [message, {"role": "assistant", "content": "yes"}])
    conversations = read_conversations(str(path), template)
    with pytest.raises(UserError) as caught:
        encode_conversations(conversations, tokenizer, 128)
    problem = f"{path}, line 1, holds text that becomes the special token {formed!r} in the chat template"
    assert str(caught.value) == f"{problem}; rephrase it, or remove the line."


def test_a_template_may_form_its_own_special_tokens_from_roles_and_in_json(published, tmp_path):
    inner = tokenizers.Tokenizer.from_file(str(published / "tokenizer.json"))
    inner.add_special_tokens(["<|user|>", "<|assistant|>"])
    tokenizer = Tokenizer(inner, config={"eos_token": "<|im_end|>"})
    source = ROLE_MARKER + (
        "{{ {'end': '<|im_end|>', 'user': messages[0].content} | tojson }}{% set pieces = '<' ~ 's>' %}{{ pieces }}"
    )
    template = ChatTemplate(source, tokenizer, "it")
    rendered = template.render([{"role": "user", "content": "\\ufdd0<>"}, CHAT[1]])
    ((ids, _),) = encode_rendered([rendered], ["it"], tokenizer)
    assert '{"end": "<|im_end|>", "user": "\\\\ufdd0<>"}<s>' in rendered.text
    texts = [tokenizer.special_texts[token] for token in ids if token in tokenizer.special_texts]
    assert texts == ["<|user|>", "<|im_end|>", "<|assistant|>", "<|im_end|>", "<|im_end|>", "<s>"]


@pytest.mark.parametrize(
    "source",
    [
        "{{ '<|im_end|>'[:4] }}", "{{ eos_token | length }}",
        "{% for m in messages %}{{ m.content.split('<|im_end|>')[0] }}{% endfor %}",
    ],
)  # fmt: skip
def test_a_template_that_does_more_than_to_write_special_tokens_is_refused(tokenizer, source):
    chat = [{"role": "assistant", "content": "a<|im_end|>b"}]
    with pytest.raises(ValueError, match=r"it takes a special token apart, or compares it .*; write special tokens wh"):
        ChatTemplate(source, tokenizer, "it").render(chat)


def test_long_conversations_are_truncated_and_those_without_a_target_skipped(published, tmp_path):
    late = [{"role": "user", "content": "yes " * 60}, {"role": "assistant", "content": "yes"}]
    path, val = written(tmp_path / "c.jsonl", CHAT, late), written(tmp_path / "v.jsonl", CHAT[:2])
    data = load(path, published, context_length=64, val_path=str(val))
    assert data.notes == (
        "of the training conversations, 2 are longer than the context and truncated, 1 are cut within an answer, so "
        "that its end is not learned, 1 are skipped, without a token of the assistant in the context",
    )
    assert len(data._train.lengths_N) == 1 and data._train.lengths_N[0] == 64
    with pytest.raises(UserError, match=r"no training conversation has a token of the assistant among its first 9; ra"):
        load(path, published, context_length=8, val_path=str(val))


def test_conversations_without_an_answer_are_skipped_with_a_note(published, tmp_path):
    (tmp_path / "t.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    silent = [{"role": "user", "content": "yes"}, {"role": "assistant", "content": ""}]
    path, val = written(tmp_path / "c.jsonl", CHAT, silent), written(tmp_path / "v.jsonl", CHAT[:2])
    data = load(path, published, template=str(tmp_path / "t.jinja"), val_path=str(val))
    assert data.notes[0].startswith("of the training conversations, 1 are skipped") and len(data._train.lengths_N) == 1


def test_a_single_conversation_cannot_be_held_out(published, tmp_path):
    with pytest.raises(UserError, match=r"there are 1 different conversation\(s\), so none can be held out; give"):
        load(written(tmp_path / "c.jsonl", CHAT, CHAT), published)
    path = str(written(tmp_path / "d.jsonl", CHAT))
    with pytest.raises(UserError, match=r"every conversation of .* is held out"):
        load(Path(path), published, val_path=path)


def test_special_tokens_are_named_as_text_or_as_objects(published, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((published / name).read_text())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = {"eos_token": {"content": "<|im_end|>"}, "pad_token": None, "add_eos_token": True, "x_token": 5}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | named))
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.special_tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    assert set(loaded.special_texts.values()) == {"<s>", "<|im_start|>", "<|im_end|>"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2, is not JSON (Expecting property name"),
        ("[1]", 'line 2, is no object with a list of "messages"; give one such as {"messages"'),
        ('{"messages": "a"}', 'line 2, is no object with a list of "messages"'),
        ('{"messages": [{"role": "user"}]}', 'line 2, message 1, has no "role" or "content" of text'),
        (
            '{"messages": [{"role": "assistant", "content": null, "tool_calls": [{"name": "f"}]}]}',
            'message 1, has "tool_calls" and no "content"; give it the text beside the tool calls, or "content": ""',
        ),
        ('{"messages": [{"role": "user", "content": ""}]}', 'line 2, has no message with the role "assistant"'),
        (
            '{"messages": [{"role": "assistant", "content": "a<|im_end|>b"}]}',
            "line 2, holds text that becomes the special token '<|im_end|>' in the chat template; rephrase it",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "a\\ufdd0b"}]}',
            "message 1, holds a lone surrogate or U+FDD0",
        ),
        ('{"messages": [{"role": "assistant", "content": "a\\ud800"}]}', "message 1, holds a lone surrogate"),
    ],
)
def test_a_line_that_is_no_conversation_is_named(template, tmp_path, line, said):
    file = written(tmp_path / "chats.jsonl", CHAT)
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(UserError) as caught:
        encode_conversations(read_conversations(str(file), template), template.tokenizer, 64)
    assert said in str(caught.value) and str(file) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("", "the path of the data is ''; give a .jsonl file, a folder or a glob"),
        ("nowhere.jsonl", "there are no conversations at nowhere.jsonl"),
        ("latin.jsonl", "latin.jsonl, line 1, is not UTF-8 (invalid continuation byte)"),
    ],
)
def test_files_without_conversations_are_refused(template, tmp_path, monkeypatch, path, said):
    monkeypatch.chdir(tmp_path)
    Path("latin.jsonl").write_bytes('{"messages": "ä"}'.encode("latin-1"))
    with pytest.raises(UserError) as caught:
        read_conversations(path, template)
    assert said in str(caught.value)


def test_a_folder_and_a_glob_are_all_their_files(template, tmp_path, monkeypatch):
    written(tmp_path / "a.jsonl", CHAT)
    written(tmp_path / "b.jsonl", CHAT[:2], CHAT[2:])
    monkeypatch.chdir(tmp_path)
    for path in (str(tmp_path), str(tmp_path / "*.jsonl"), "[ab].jsonl"):
        assert len(read_conversations(path, template)) == 3
    (tmp_path / "more").mkdir()
    packed = tmp_path / "more/c.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "b.jsonl").read_bytes()))
    digests = [{c.digest for c in read_conversations(file, template)} for file in (str(packed), "b.jsonl")]
    assert digests[0] == digests[1]
    assert len(read_conversations(".", template)) == 5


def test_files_that_are_left_out_of_a_folder_are_noted(published, tmp_path):
    written(tmp_path / "a.jsonl", CHAT, CHAT[:2])
    written(tmp_path / "._a.jsonl", CHAT)
    (tmp_path / "README.md").write_text("about them")
    note = f"1 file(s) of {tmp_path} are read (left out: 1 .md)"
    assert note in load(tmp_path, published, val_fraction=0.5).notes


def test_a_tokenizer_without_template_and_data_without_tokenizer_are_refused(tmp_path):
    path = written(tmp_path / "c.jsonl", CHAT, CHAT[:2])
    with pytest.raises(UserError, match=r"need a tokenizer; start from a model with `init_from`, or .* `data\.tok"):
        ChatConfig(str(path)).load(TokenModelConfig(), 1, 0)
    trained = Tokenizer.train([WORDS], 270)
    with pytest.raises(UserError, match=r"the tokenizer has no chat template; name a file with one in training, with"):
        ChatConfig(str(path)).load(TokenModelConfig(270), 1, 0, trained)
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content + eos_token }}{% endfor %}")
    config = ChatConfig(str(path), template=str(tmp_path / "t.jinja"))
    data = config.load(TokenModelConfig(270, 128), 1, 0, trained)
    data.tokenizer.save(tmp_path / "tokenizer.json")  # as in a run's folder
    again = ChatConfig(str(path)).load(TokenModelConfig(270, 128), 1, 0, Tokenizer.load(tmp_path / "tokenizer.json"))
    assert again.fingerprint == data.fingerprint


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.jinja", None, "No such file"),
        ("t.json", b"{", "JSONDecodeError"),
        ("t.json", b'{"chat_template": 3}', "its chat_template is not text"),
        ("t.jinja", b"\xff", "'utf-8' codec"),
    ],
)
def test_a_template_file_that_holds_none_is_refused(tokenizer, tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"`data\.template` .* is no chat template \(.*{said}"):
        ChatTemplate.read(str(tmp_path / name), tokenizer)


def test_a_template_beside_the_tokenizer_has_precedence(published, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((published / name).read_text())
    (tmp_path / "chat_template.jinja").write_text(MARKED)
    assert ChatTemplate.of_tokenizer(Tokenizer.load(tmp_path / "tokenizer.json")).source == MARKED
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "chat_template.jinja").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"chat_template\.jinja is not a readable chat template \(.*; restore it"):
        Tokenizer.load(tmp_path / "tokenizer.json")
    (tmp_path / "chat_template.jinja").unlink()
    named = [
        {"name": "tool_use", "template": "{{ tools | length }}{{ x_token }}"},
        {"name": "default", "template": CHATML},
    ]
    more = {"chat_template": named, "extra_special_tokens": {"x_token": "<|x|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | more))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    template = ChatTemplate.of_tokenizer(tokenizer)
    assert template.source == CHATML
    assert template.render(CHAT, [{}, {}]).text == "2<|x|>" != template.render(CHAT).text
    assert {each["name"]: each["template"] for each in template.published} == tokenizer.chat_templates
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("other")
    with pytest.raises(UserError, match=r"has no chat template but tool_use, which only tools or documents have; name"):
        ChatTemplate.of_tokenizer(Tokenizer.load(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(MARKED)
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.chat_templates == {"default": MARKED, "tool_use": "other"}


@pytest.mark.slow
def test_training_on_conversations_samples_an_answer_and_says_how_to_chat(published, tmp_path):
    words = ["am", "is", "are", "yes"]
    chats = [
        [{"role": "user", "content": f"How {a} {b}?"}, {"role": "assistant", "content": f"It is {b}."}]
        for a in words for b in words
    ]  # fmt: skip
    data_config = ChatConfig(str(written(tmp_path / "c.jsonl", *chats)), tokenizer=str(published), val_fraction=0.2)
    model, options = plain_decoder(290, 64, 16, n_heads=2, d_ff=(32,)), TrainConfig(batch_size=4, eval_every=2)
    config = Config("test", model, data_config, steps=2, train=replace(options, report_every=2, checkpoint_every=0))
    data, setup = data_config.load(model, 4, 0), TrainSetup(config, make_mesh("", jax.devices()[:1]))
    outcome = train(setup, data, tmp_path, make_callbacks(setup, data, tmp_path))
    evaluated = [row for row in read_metrics(tmp_path) if "val_loss" in row]
    assert 18 <= evaluated[-1]["val_targets"] <= 21  # of 3 answers of 5 or 6 tokens, and the ends of their turns
    # Samples answer the first held-out question, in the template.
    sample = r"\[step 2, temperature 0\] user\nHow \w+ \w+\?\nassistant\n"  # without special tokens
    assert re.search(sample, (tmp_path / "samples.txt").read_text())
    assert footer(setup, data, tmp_path, outcome, [])[-1].endswith(f"sample --run {tmp_path} --chat")
