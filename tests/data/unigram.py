"""Unigram tokenizers without bytes, of the forms in which XLM-R, ALBERT and T5 are published."""

import struct

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = ["the cat sees the dog.", "A king likes the sea, and the house finds the cat.", "ça va, naïve fish: fi of"] * 9


def precompiled(replacements: dict[str, str]) -> normalizers.Normalizer:
    """Return the normalizer of a SentencePiece model that replaces these texts: a trie of their bytes as a double
    array, in which a unit has the byte that leads to it, an offset, and a flag for a value, and the replacements."""
    texts = "".join(f"{text}\0" for text in replacements.values()).encode()
    trie: dict = {}
    for source in replacements:
        node = trie
        for byte in source.encode():
            node = node.setdefault(byte, {})
        node[None] = texts.index(replacements[source].encode() + b"\0")
    units = [0] * 512

    def fill(node: dict, position: int, label: int) -> None:
        base = len(units)  # children are at `base` xor their byte, which is a sum for multiples of 256
        units.extend([0] * 256)
        units[position] = ((position ^ base) << 10) | (None in node) << 8 | label
        for byte, child in node.items():
            if byte is None:
                units[base] = child | 1 << 31
            else:
                fill(child, base + byte, byte)

    fill(trie, 0, 0)
    return normalizers.Precompiled(struct.pack(f"<I{len(units)}I", 4 * len(units), *units) + texts)


CHARACTERS = precompiled({"ﬁ": "fi", "Ⓐ": "A", "\t": " ", "　": " "})

XLM_R = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
ALBERT = ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
T5 = ("<pad>", "</s>", "<unk>")


def unigram(special: tuple[str, ...] = XLM_R, vocab_size: int = 90) -> tokenizers.Tokenizer:
    """Return a tokenizer with the special tokens of a model, and its normalizer and template."""
    inner = tokenizers.Tokenizer(models.Unigram())
    lower = [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()] if special == ALBERT else []
    inner.normalizer = normalizers.Sequence([*lower, CHARACTERS]) if lower else CHARACTERS
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    inner.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=[*special], unk_token="<unk>", show_progress=False
    )
    inner.train_from_iterator(TEXTS, trainer)
    if "<mask>" in special or "[MASK]" in special:
        inner.add_special_tokens([tokenizers.AddedToken(special[-1], lstrip=True, special=True)])
    around = {XLM_R: "<s> $A </s>", ALBERT: "[CLS] $A [SEP]", T5: "$A </s>"}[special].split()
    ids = [(token, special.index(token)) for token in around if token in special]
    inner.post_processor = processors.TemplateProcessing(single=around, special_tokens=ids)
    return inner
