"""Conversations for fine-tuning causal language models, with the loss on the assistant's tokens only."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxformer.config import DataConfig, ModelConfig, TokenModelConfig
from jaxformer.config.fields import ValFraction
from jaxformer.data.chat_template import ASSISTANT, MARK, ChatTemplate, Rendered, encode_rendered, read_template
from jaxformer.data.dataset import Batch, Dataset, task_error
from jaxformer.data.infer_config import describe_changes, fit_vocab_size
from jaxformer.data.listing import Listing, list_files
from jaxformer.data.packing import PackedExamples
from jaxformer.data.text import locate, read_json_lines, suffix_of
from jaxformer.data.tokenizer import Tokenizer, find_tokenizer
from jaxformer.errors import UserError, abbreviate, lone_surrogate

FORMAT = 1
"""Version of the tokens; increase it when the same conversations and template yield other tokens."""
ENCODED_AT_ONCE = 1000
"""Number of conversations that are tokenized together, in parallel."""
EXAMPLE = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}'


@dataclass(frozen=True)
class ChatConfig(DataConfig):
    """Conversations, packed into rows, in which each assistant token is predicted from all tokens before it in its
    conversation."""

    path: str = ""
    """Conversations: a .jsonl file, a folder (every .jsonl below it) or a glob. Each line is an object with "messages",
    a list of objects with "role" and "content", and optionally "tools". A .jsonl.gz is decompressed."""
    val_path: str | None = None
    """Validation conversations, in the same forms as path; by default, some of path are held out."""
    val_fraction: ValFraction = 0.05
    """Fraction of the conversations to hold out if there is no val_path."""
    template: str | None = None
    """Chat template: a Jinja file or a tokenizer_config.json; by default, the one published with the tokenizer."""
    tokenizer: str | None = None
    """Published tokenizer, a tokenizer.json or its folder; with --init-from, the model's own is used."""

    @property
    def has_segments(self) -> bool:
        return True

    def load(
        self, model: ModelConfig, batch_size: int, seed: int, tokenizer: Tokenizer | None = None,
        fixed: Container[str] | None = None,
    ) -> ChatDataset:  # fmt: skip
        if not isinstance(model, TokenModelConfig):
            raise task_error(model, "conversations", "a model of tokens")
        inferred, notes = model, find_conversations(self.path, "data.path").notes(self.path)
        if self.val_path is not None:
            notes += find_conversations(self.val_path, "data.val_path").notes(self.val_path)
        if tokenizer is None:
            if self.tokenizer is None:
                remedy = "start from a model with --init-from, or name a tokenizer with --data.tokenizer"
                raise UserError(f"conversations need a tokenizer; {remedy}.")
            tokenizer = Tokenizer.load(find_tokenizer(self.tokenizer))
            inferred = fit_vocab_size(model, tokenizer, 0, fixed)
            notes += describe_changes(model, inferred, f"{self.tokenizer} has {tokenizer.vocab_size:,} tokens")
        if self.template is None:
            template = ChatTemplate.of_tokenizer(tokenizer)
        else:
            template = read_template(self.template, tokenizer)
            tokenizer = tokenizer.with_chat_template(template.source)
        train = read_conversations(self.path, "data.path", template)
        if self.val_path is not None:
            val = read_conversations(self.val_path, "data.val_path", template)
            held_out = {conversation.digest for conversation in val}
            train = [conversation for conversation in train if conversation.digest not in held_out]
        else:
            train, val = hold_out(train, self.val_fraction)
        if not train:
            raise UserError(f"every conversation of {self.path} is held out; give other ones to train on.")
        splits = [encode_conversations(split, tokenizer, model.context_length) for split in (train, val)]
        ends = {conversation.rendered.ends[-1] for conversation in train if conversation.rendered.ends} - {""}
        stops = {tokenizer.special_texts.get(token) for token in tokenizer.ends_of_text}
        if ends and not ends & stops:
            tokenizer = tokenizer.with_ends(ends)
            notes += (f"answers end with {' or '.join(sorted(ends))}, so sampling will stop there, too",)
        return ChatDataset(self.path, inferred, tokenizer, splits[0], splits[1], batch_size, seed, notes)


class Conversation(NamedTuple):
    """A line of a file: the conversation as the model reads it, a label with file and line, for error messages, and
    the SHA-256 of its text."""

    rendered: Rendered
    label: str
    digest: bytes


def find_conversations(path: str, option: str) -> Listing:
    """Return the files of a path: a file, a folder, of which .jsonl files are read, or a glob. Raises `UserError` if
    there are none."""
    if not path.strip():
        raise UserError(f"{option} is {path!r}; give a .jsonl file, a folder or a glob.")
    location = locate(path)
    if location.exists() and not location.is_dir():  # may be a pipe, since it is read only once
        return Listing([location])
    listing = list_files(location, lambda file: suffix_of(file) == ".jsonl")
    if not listing.files:
        problem = f"there are no conversations at {option} {path}{listing.omission}"
        raise UserError(f"{problem}; give a .jsonl file, a folder or a glob.")
    return listing


def read_conversations(path: str, option: str, template: ChatTemplate) -> list[Conversation]:
    """Return the conversations of a file, a folder or a glob, without empty lines. Raises `UserError` if there are
    none, a file cannot be read, or, with file and line, if a line is not a conversation with the assistant, or the
    template raises an error or leaves unclear where an answer begins."""
    files = find_conversations(path, option).files
    conversations = []
    for label, row in (line for file in files for line in read_json_lines(file)):
        messages, tools = _parse(row, label)
        check_texts(messages, label, template.tokenizer.special_texts.values(), tools)
        try:
            rendered = template.render_conversation(messages, tools)
        except UserError as error:
            raise UserError(f"{label} {error}.") from error
        digest = hashlib.sha256(rendered.text.encode(errors="surrogatepass")).digest()
        conversations.append(Conversation(rendered, label, digest))
    if not conversations:
        raise UserError(f"{option} {path} holds no conversation; give it one per line, such as {EXAMPLE}.")
    return conversations


def _parse(row: Any, label: str) -> tuple[list[dict[str, Any]], Any]:
    """Return the messages and tools of a line. Raises `UserError` if it is not a conversation."""
    if not isinstance(row, dict) or "messages" not in row:
        names = f"has the fields {', '.join(row)}" if isinstance(row, dict) and row else "is not an object with fields"
        raise UserError(f'{label} {names}, but "messages" is missing; give an object such as {EXAMPLE}.')
    messages = row["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UserError(f'{label} has "messages" that are not a list of objects; give an object such as {EXAMPLE}.')
    for number, message in enumerate(messages, start=1):
        for field in ("role", "content"):
            if not isinstance(value := message.get(field), str):
                raise UserError(f'{label} message {number}, has the "{field}" {abbreviate(value)}; it must be text.')
    if not any(message["role"] == ASSISTANT for message in messages):
        raise UserError(
            f'{label} has no message with the role "{ASSISTANT}", so there is nothing to train on; remove the line.'
        )
    return messages, row.get("tools")


def check_texts(messages: Sequence[Any], label: str, special: Collection[str], tools: Any = None) -> None:
    """Raise `UserError` if a text of the messages or tools contains a special token, which could end a turn."""
    parts = {f"message {number}": message for number, message in enumerate(messages, start=1)} | {"tools": tools}
    for name, part in parts.items():
        strings = list(_strings(part))
        if any(lone_surrogate(text) is not None or MARK in text for text in strings):
            problem = f"{label} {name}, holds a lone surrogate or U+{ord(MARK):X}, which are not characters"
            raise UserError(f"{problem}; remove it.")
        for text in (text for text in special for value in strings if text in value):
            problem = f"{label} {name}, holds {text!r}, which the tokenizer would encode as its special token"
            raise UserError(f"{problem}; rephrase it, or remove the line.")


def _strings(value: Any) -> Iterator[str]:
    """Yield the strings in a JSON value, including field names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from _strings(part)


def hold_out(conversations: Sequence[Conversation], fraction: float) -> tuple[list[Conversation], list[Conversation]]:
    """Split conversations into (training, validation) by the order of their digests; equal ones are in the same split.
    Raises `UserError` if all are equal."""
    digests = sorted({conversation.digest for conversation in conversations})
    if len(digests) < 2:
        raise UserError("there is only one conversation, so none can be held out; give more, or data.val_path.")
    held_out = set(digests[: min(len(digests) - 1, max(1, round(fraction * len(digests))))])
    train = [conversation for conversation in conversations if conversation.digest not in held_out]
    return train, [conversation for conversation in conversations if conversation.digest in held_out]


class EncodedConversations(NamedTuple):
    """Tokenized conversations, concatenated."""

    tokens: np.ndarray
    """`(n,)` int32."""
    weights: np.ndarray
    """Loss weight of each token as a target, `(n,)` float32: 1 for assistant tokens, else 0."""
    lengths_N: np.ndarray
    """Tokens per conversation."""
    counts: Counter[str]
    """Numbers of conversations that are

    - `cut`: longer than the context, and truncated to it;
    - `cut answer`: of those, ending within an answer, so without its end;
    - `cut before`: of those, without a remaining assistant token; they are left out;
    - `empty`: otherwise without an assistant token; they are also left out;
    - `endless`: with an answer that the template does not end with a special token.
    """


def encode_conversations(
    conversations: Sequence[Conversation], tokenizer: Tokenizer, context_length: int
) -> EncodedConversations:
    """Return conversations as tokens, truncated to `context_length` + 1. Raises as `encode_rendered` does."""
    tokens, weights, lengths, counts = array("i"), array("f"), list[int](), Counter[str]()
    for first in range(0, len(conversations), ENCODED_AT_ONCE):
        rendered, labels, _ = zip(*conversations[first : first + ENCODED_AT_ONCE], strict=True)
        encoded = encode_rendered(rendered, labels, tokenizer)
        for (_, spans, _, ends), (ids, offsets) in zip(rendered, encoded, strict=True):
            learned = assistant_tokens(offsets, spans)[: context_length + 1]
            if is_cut := len(ids) > context_length + 1:
                counts["cut"] += 1
                counts["cut answer"] += any(start < offsets[context_length][1] < stop for start, stop in spans)
            if not any(learned[1:]):  # the first token is never a target
                counts["cut before" if is_cut else "empty"] += 1
                continue
            tokens.extend(ids[: context_length + 1])
            weights.extend(learned)
            lengths.append(len(learned))
            counts["endless"] += "" in ends
    arrays = np.array(tokens, np.int32), np.array(weights, np.float32), np.array(lengths, np.int64)
    return EncodedConversations(*arrays, counts)


def assistant_tokens(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return 1 for each token that overlaps a span, else 0. Token offsets and spans are character ranges
    `[start, stop)`, in order."""
    remaining, counts = list(reversed(spans)), []
    for start, stop in offsets:
        while remaining and remaining[-1][1] <= start:
            remaining.pop()
        counts.append(int(bool(remaining) and start < remaining[-1][1] and stop > remaining[-1][0]))
    return counts


class ChatDataset(Dataset):
    """Conversations in batches of packed rows; see `data.packing`."""

    unit = "tokens"
    model: TokenModelConfig
    tokenizer: Tokenizer

    def __init__(
        self, name: str, model: TokenModelConfig, tokenizer: Tokenizer, train: EncodedConversations,
        val: EncodedConversations, batch_size: int, seed: int, notes: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """Pack the conversations. Raises `UserError` if a split has none, or fewer rows than a batch."""
        self.name, self.model, self.tokenizer, self.notes = name, model, tokenizer, notes
        self.token_lengths = tokenizer.token_lengths
        for split, encoded in (("training", train), ("validation", val)):
            counts = encoded.counts
            if not len(encoded.lengths_N) and not counts["cut"]:
                problem = f"the chat template renders no assistant token in any {split} conversation"
                raise UserError(f"{problem}; give another with --data.template, or conversations with answers.")
            if not len(encoded.lengths_N):
                first = f"its first {model.context_length + 1}; raise model.context_length, or give shorter ones"
                raise UserError(f"no {split} conversation has a token of the assistant among {first}.")
            if n := counts["cut"]:
                note = f"{n:,} {split} conversation(s) are longer than {model.context_length + 1:,} tokens"
                note += " and are truncated"
                if n := counts["cut answer"]:
                    note += f", {n:,} of them within an answer, so that its end is not learned"
                if n := counts["cut before"]:
                    note += f", and {n:,} skipped because the assistant's part comes later"
                self.notes = (*self.notes, note)
            if n := counts["empty"]:
                note = (
                    f"{n:,} {split} conversation(s) are skipped: the chat template renders no assistant token in them"
                )
                self.notes = (*self.notes, note)
        if n := train.counts["endless"]:
            note = f"{n:,} training conversation(s) have an answer that no special token ends, so that the model does"
            note += " not learn to stop; end answers with {{ eos_token }} in the chat template"
            self.notes = (*self.notes, note)
        self._train, self._val = (
            PackedExamples(
                split.tokens, np.cumsum(split.lengths_N) - split.lengths_N, split.lengths_N - 1, model.context_length,
                n, seed, split.weights,
            )
            for split, n in ((train, batch_size), (val, 1))
        )  # fmt: skip
        self.per_step, self.steps_per_epoch = self._train.per_step, self._train.steps_per_epoch
        digest = hashlib.sha256(f"chat {FORMAT} {model.context_length}".encode())
        for part in (*train[:3], *val[:3]):
            digest.update(part.tobytes())
        self.fingerprint = digest.hexdigest()

    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> Batch:
        return self._train.batch(step, rows)

    def held_out(self, batch_size: int, n: int | None = None) -> Iterator[Batch]:
        return self._val.held_out(batch_size, n)

    def describe(self) -> str:
        n_train, n_val = (len(split.lengths_N) for split in (self._train, self._val))
        assistant = float(self._train.weights.mean()) if self._train.weights is not None else 1.0
        return (
            f"{self.name}: {n_train:,} conversations in {len(self._train.rows):,} rows, {assistant:.0%} of their "
            f"tokens the assistant's; held out: {n_val:,} conversation(s)"
        )
