"""Conversations for fine-tuning causal language models, with the loss on the assistant's tokens only."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxformer.config import DataConfig, Fixed, ModelConfig, TokenModelConfig
from jaxformer.config.fields import ValFraction
from jaxformer.data.chat_template import ASSISTANT, MARK, ChatTemplate, Message, Rendered, encode_rendered
from jaxformer.data.dataset import Batch, Dataset, task_error
from jaxformer.data.infer_config import describe_changes, fit_vocab_size
from jaxformer.data.listing import Listing, list_files
from jaxformer.data.packing import PackedExamples
from jaxformer.data.text import locate, read_json_lines, suffix_of
from jaxformer.data.tokenizer import Tokenizer, find_tokenizer
from jaxformer.errors import UserError, lone_surrogate

FORMAT = 1
"""Version of the tokens; increase it when the same conversations and template yield other tokens."""
NOTES = {
    "truncated": "are longer than the context and truncated",
    "cut": "are cut within an answer, so that its end is not learned",
    "skipped": "are skipped, without a token of the assistant in the context",
    "endless": "have an answer that no special token ends, so that the model does not learn to stop; end answers with "
    "{{ eos_token }} in the chat template",
}
"""Notes about conversations, by property."""
FORMS = "a .jsonl file, a folder or a glob"
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
    """Published tokenizer, a tokenizer.json or its folder; with `init_from`, the model's own is used."""

    @property
    def has_segments(self) -> bool:
        return True

    def load(
        self, model: ModelConfig, batch_size: int, seed: int, tokenizer: Tokenizer | None = None, fixed: Fixed = None
    ) -> ChatDataset:
        if not isinstance(model, TokenModelConfig):
            raise task_error(model, "conversations", "a model of tokens")
        inferred, notes = model, tuple[str, ...]()
        for path in filter(None, (self.path, self.val_path)):
            notes += find_conversations(path).notes(path)
        if tokenizer is None:
            if self.tokenizer is None:
                remedy = "start from a model with `init_from`, or name a tokenizer with `data.tokenizer`"
                raise UserError(f"conversations need a tokenizer; {remedy}.")
            tokenizer = Tokenizer.load(find_tokenizer(self.tokenizer))
            inferred = fit_vocab_size(model, tokenizer, 0, fixed)
            notes += describe_changes(model, inferred, f"{self.tokenizer} has {tokenizer.vocab_size:,} tokens")
        if self.template is None:
            template = ChatTemplate.of_tokenizer(tokenizer)
        else:
            template = ChatTemplate.read(self.template, tokenizer)
            tokenizer = tokenizer.with_chat_template(template.published)
        train = read_conversations(self.path, template)
        if self.val_path is not None:
            val = read_conversations(self.val_path, template)
            val_digests = {conversation.digest for conversation in val}
            train = [conversation for conversation in train if conversation.digest not in val_digests]
        else:
            train, val = hold_out(train, self.val_fraction)
        if not train:
            raise UserError(f"every conversation of {self.path} is held out; give other ones to train on.")
        train_encoded, val_encoded = (encode_conversations(x, tokenizer, model.context_length) for x in (train, val))
        ends = {conversation.rendered.ends[-1] for conversation in train if conversation.rendered.ends} - {""}
        stops = {tokenizer.special_texts.get(token) for token in tokenizer.ends_of_text}
        if ends and not ends & stops:
            tokenizer = tokenizer.with_ends(ends)
            notes += (f"answers end with {' or '.join(sorted(ends))}, so sampling will stop there, too",)
        data = ChatDataset(self.path, inferred, tokenizer, train_encoded, val_encoded, batch_size, seed)
        data.notes = (*notes, *data.notes)
        return data


class Conversation(NamedTuple):
    """A line of a file: the conversation as the model reads it, a label with file and line, for error messages, and
    the SHA-256 of its text."""

    rendered: Rendered
    label: str
    digest: bytes


def find_conversations(path: str) -> Listing:
    """Return the files of a path: a file, a folder, of which .jsonl files are read, or a glob. Raises `UserError` if
    there are none."""
    location = locate(path, FORMS)
    if location.exists() and not location.is_dir():  # may be a pipe, since it is read only once
        return Listing([location])
    listing = list_files(location, lambda file: suffix_of(file) == ".jsonl")
    if not listing.files:
        raise UserError(f"there are no conversations at {path}{listing.omission}; give {FORMS}.")
    return listing


def read_conversations(path: str, template: ChatTemplate) -> list[Conversation]:
    """Return the conversations of a file, a folder or a glob, without empty lines. Raises `UserError` if a file cannot
    be read, or, with file and line, if a line is not a conversation with the assistant, or the template raises an error
    or leaves unclear where an answer begins."""
    conversations = []
    for label, row in (line for file in find_conversations(path).files for line in read_json_lines(file)):
        messages, tools = _parse(row, label)
        check_texts(messages, label, tools)
        try:
            rendered = template.render_conversation(messages, tools)
        except ValueError as error:
            raise UserError(f"{label} {error}.") from error
        digest = hashlib.sha256(rendered.text.encode(errors="surrogatepass")).digest()
        conversations.append(Conversation(rendered, label, digest))
    return conversations


def _parse(row: object, label: str) -> tuple[list[Message], object]:
    """Return the messages and tools of a line. Raises `UserError` if it is not a conversation."""
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(row, dict) or not isinstance(messages, list):
        raise UserError(f'{label} is no object with a list of "messages"; give one such as {EXAMPLE}.')
    for number, message in enumerate(messages, start=1):
        texts = [message.get(field) for field in ("role", "content")] if isinstance(message, dict) else [None]
        if isinstance(message, dict) and message.get("tool_calls") and message.get("content") is None:
            problem = f'{label} message {number}, has "tool_calls" and no "content"'
            raise UserError(f'{problem}; give it the text beside the tool calls, or "content": "" without any.')
        if not all(isinstance(text, str) for text in texts):
            raise UserError(f'{label} message {number}, has no "role" or "content" of text; give them as in {EXAMPLE}.')
    if not any(message["role"] == ASSISTANT for message in messages):
        raise UserError(f'{label} has no message with the role "{ASSISTANT}" to train on; remove the line.')
    return messages, row.get("tools")


def check_texts(messages: Sequence[Message], label: str, tools: object = None) -> None:
    """Raise `UserError` if a text of the messages or tools has code points that are not characters."""
    parts = {f"message {number}": message for number, message in enumerate(messages, start=1)} | {"tools": tools}
    for name, part in parts.items():
        if any(lone_surrogate(text) is not None or MARK in text for text in _strings(part)):
            problem = f"{label} {name}, holds a lone surrogate or U+{ord(MARK):X}, which are not characters"
            raise UserError(f"{problem}; remove it.")


def _strings(value: object) -> Iterator[str]:
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
        n = f"{len(digests)} different conversation(s)"
        raise UserError(f"there are {n}, so none can be held out; give more, one per line as {EXAMPLE}.")
    val_digests = set(digests[: min(len(digests) - 1, max(1, round(fraction * len(digests))))])
    train = [conversation for conversation in conversations if conversation.digest not in val_digests]
    return train, [conversation for conversation in conversations if conversation.digest in val_digests]


class EncodedConversations(NamedTuple):
    """Tokenized conversations, concatenated."""

    tokens: np.ndarray
    """`(n,)` int32."""
    weights: np.ndarray
    """Loss weight of each token as a target, `(n,)` float32: 1 for assistant tokens, else 0."""
    lengths_N: np.ndarray
    """Tokens per conversation."""
    counts: Counter[str]
    """Numbers of conversations with the properties in `NOTES`."""


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
            if len(ids) > context_length + 1:
                counts["truncated"] += 1
                counts["cut"] += any(start < offsets[context_length][1] < stop for start, stop in spans)
            if not any(learned[1:]):  # the first token is never a target
                counts["skipped"] += 1
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
        self,
        name: str,
        model: TokenModelConfig,
        tokenizer: Tokenizer,
        train: EncodedConversations,
        val: EncodedConversations,
        batch_size: int,
        seed: int,
    ) -> None:
        """Pack the conversations. Raises `UserError` if a split has none, or fewer rows than a batch."""
        self.name, self.model, self.tokenizer, T = name, model, tokenizer, model.context_length
        self.token_lengths = tokenizer.token_lengths
        for split, encoded in (("training", train), ("validation", val)):
            if not len(encoded.lengths_N):
                problem = f"no {split} conversation has a token of the assistant among its first {T + 1:,}"
                remedy = "raise `model.context_length`, or give other conversations or another `data.template`"
                raise UserError(f"{problem}; {remedy}.")
            noted = [f"{encoded.counts[key]:,} {note}" for key, note in NOTES.items() if encoded.counts[key]]
            if noted:
                self.notes = (*self.notes, f"of the {split} conversations, {', '.join(noted)}")

        def pack(split: EncodedConversations, batch_size: int) -> PackedExamples:
            starts_N = np.cumsum(split.lengths_N) - split.lengths_N
            return PackedExamples(split.tokens, starts_N, split.lengths_N - 1, T, batch_size, seed, split.weights)

        self._train, self._val = pack(train, batch_size), pack(val, 1)
        self.prompt: list[int] = val.tokens[: max(1, int(val.weights.argmax()))].tolist()
        """Tokens of the first held-out conversation, up to its first answer."""
        self._assistant_fraction = float(train.weights.mean())
        self.per_step, self.steps_per_epoch = self._train.per_step, self._train.steps_per_epoch
        digest = hashlib.sha256(f"chat {FORMAT} {T}".encode())
        for part in (*train[:3], *val[:3]):
            digest.update(part.tobytes())
        self.fingerprint = digest.hexdigest()

    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> Batch:
        return self._train.batch(step, rows)

    def val_batches(self, batch_size: int, n: int | None = None) -> Iterator[Batch]:
        return self._val.val_batches(batch_size, n)

    def describe(self) -> str:
        n_train, n_val = (len(split.lengths_N) for split in (self._train, self._val))
        rows = f"{n_train:,} conversations in {len(self._train.rows):,} rows"
        learned = f"{self._assistant_fraction:.0%} of their tokens the assistant's"
        return f"{self.name}: {rows}, {learned}; held out: {n_val:,} conversation(s)"
