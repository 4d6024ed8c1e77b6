"""Random tokenizers of every kind of component, in folders as they are published."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, decoders, normalizers, pre_tokenizers

from jaxformer.data.tokenizer import TOKENIZER_CONFIG, Tokenizer

TEXT = "the cat sat on the mat, the rat sat on the cat; ça và? 日本語 🙂 " * 5
SPECIAL = ("<unk>", "<s>", "</s>", "[CLS]", "[SEP]", "<|im_end|>")
BYTES = [f"<0x{i:02X}>" for i in range(256)]
WORDS = ["[UNK]", "the", "cat", "sat", "c", "##at", "##s", "s", ",", ".", "'", "!", "##ing", "12", "##3", "##t", "a"]
MERGES = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("a", "t"), ("c", "at"), ("▁", "cat"), ("▁", "▁")]
PIECES = [*BYTES, "▁", *"thecason\n.,", *("".join(pair) for pair in MERGES)]
SCORES = [("<unk>", 0.0), ("▁", -3.0), ("▁the", -2.0), ("c", -4.0), ("at", -3.0), *((byte, -20.0) for byte in BYTES)]

N, P, D = normalizers, pre_tokenizers, decoders
NORMALIZERS = [
    None, None, None, N.NFC(), N.NFKC(), N.NFD(), N.Lowercase(), N.BertNormalizer(), N.Strip(), N.StripAccents(),
    N.Replace("cat", "dog"), N.Replace("a", "aa"), N.Prepend("x"), N.Nmt(), N.ByteLevel(),
    N.Sequence([N.NFKC(), N.Lowercase()]),
]  # fmt: skip
KEEPING = [
    P.Digits(True), P.Split("a", "isolated"), P.Split("a", "merged_with_previous"), P.Punctuation("isolated"),
    P.UnicodeScripts(), P.FixedLength(5), P.Split(Regex(r"\w+|\W"), "removed", invert=True),
    P.Punctuation("merged_with_next"),
]  # fmt: skip
"""Pre-tokenizers that keep all of a text."""
REMOVING = [
    P.Split(" ", "removed"), P.Split(Regex(r"\w+| +"), "removed", invert=True), P.Punctuation("removed"),
    P.Whitespace(), P.WhitespaceSplit(), P.CharDelimiterSplit("a"), P.BertPreTokenizer(),
]  # fmt: skip
BYTE_LEVEL = [D.ByteLevel(), D.Sequence([D.ByteLevel(), D.Fuse()])]
FALLBACK = [
    *(D.Sequence([D.Replace("▁", " "), D.ByteFallback(), D.Fuse(), *strip]) for strip in ([], [D.Strip(" ", 1, 0)])),
    *(D.Sequence([D.ByteFallback(), D.Metaspace("▁", scheme)]) for scheme in ("always", "first", "never")),
]
WORD_PIECE = [D.WordPiece(), D.WordPiece(cleanup=False), D.WordPiece("@@")]
OTHERS = [
    None, D.Metaspace(), D.BPEDecoder(), D.CTC(), D.Fuse(), D.Strip(" ", 1, 1), D.Replace("a", "b"), D.ByteFallback(),
    D.Sequence([D.ByteLevel(), D.Strip(" ", 1, 0)]), D.Sequence([D.ByteFallback(), D.Replace("e", "E")]),
    D.Sequence([D.Replace("▁", " "), D.ByteFallback(), D.Fuse(), D.Strip(" ", 2, 0)]),
    D.Sequence([D.ByteFallback(), D.Fuse(), D.Metaspace()]),
]  # fmt: skip
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def draw(folder: Path, seed: int) -> str:
    """Write a random `tokenizer.json` and its config to a folder; return the kind of its model. Two thirds are of a
    form in which its parts fit each other."""
    rng = np.random.default_rng(seed)
    pick = lambda options: options[rng.integers(len(options))]  # noqa: E731
    kind, fits = (
        pick(["byte-level", "byte-level", "fallback", "unigram", "WordPiece", "WordLevel"]),
        rng.random() < 0.67,
    )
    maybe = lambda p: bool(rng.random() < p)  # noqa: E731
    anything = [*BYTE_LEVEL, *FALLBACK, *WORD_PIECE, *OTHERS]
    normalizer, pre, decoder = pick(NORMALIZERS), pick([None, *KEEPING, *REMOVING]), pick(anything)
    model: dict[str, Any] = {"type": "BPE", "dropout": pick([None, 0.5]), "fuse_unk": maybe(0.5)}
    if kind == "byte-level":
        form = json.loads(Tokenizer.train([TEXT], 280).as_json())["model"]
        del form["vocab"]["<|endoftext|>"]
        model |= {"vocab": {piece: i for i, piece in enumerate(form["vocab"])}, "merges": form["merges"]}
        model |= {"ignore_merges": maybe(0.5), "unk_token": pick([None, None, None, "<unk>"])}
        level = P.ByteLevel(add_prefix_space=maybe(0.3), use_regex=maybe(0.6))
        pre = P.Sequence([pick(KEEPING if fits else REMOVING), level]) if maybe(0.5) else level
        if isinstance(normalizer, N.ByteLevel):
            pre = pick([None, P.Digits(True)])
        if fits:
            decoder = pick(BYTE_LEVEL)
        else:
            model |= {"end_of_word_suffix": pick([None, "</w>"]), "continuing_subword_prefix": pick([None, "##"])}
            model |= {"merges": []} if model["continuing_subword_prefix"] else {}  # which must have the prefix
    elif kind in ("fallback", "unigram"):
        replace = N.Replace(" ", "▁")
        style = pick(
            [(N.Sequence([N.Prepend("▁"), replace]), None), (replace, pick([None, P.Split("a", "isolated")])), 0]
        )
        if style:
            normalizer, pre = style
        elif fits:
            pre = P.Metaspace("▁", pick(["always", "first", "never"]), maybe(0.5))
        decoder = pick(FALLBACK) if fits else decoder
        model |= {"vocab": {piece: i for i, piece in enumerate(dict.fromkeys(PIECES))}, "merges": MERGES}
        model |= {"byte_fallback": fits or maybe(0.5), "unk_token": "<unk>"}
        if kind == "unigram":
            model = {"type": "Unigram", "unk_id": 0, "vocab": SCORES, "byte_fallback": model["byte_fallback"]}
    else:
        decoder, pre = pick(WORD_PIECE) if fits else decoder, P.BertPreTokenizer() if maybe(0.5) else pre
        model = {"type": kind, "vocab": {word: i for i, word in enumerate(WORDS)}, "unk_token": "[UNK]"}
        if kind == "WordPiece":
            model |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": pick([100, 3])}
            model["unk_token"] = pick(["[UNK]", "[UNK]", "[UNK]", "[none]"])
    added = _added_tokens(rng, model["vocab"])
    form = {
        "version": "1.0", "added_tokens": added, "model": model, "post_processor": _post_processor(rng, added),
        "normalizer": _json(normalizer), "pre_tokenizer": _json(pre), "decoder": _json(decoder),
        "truncation": pick([None, {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}]),
        "padding": pick([None, {"strategy": {"Fixed": 30}, "direction": "Right", "pad_to_multiple_of": None,
                                "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"}]),
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(form))
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(_config(rng, added)))
    return kind


def _json(component: Any) -> Any:
    return None if component is None else json.loads(component.__getstate__())


def _added_tokens(rng: np.random.Generator, vocab: Any) -> list[dict[str, Any]]:
    flags = lambda: {flag: bool(rng.random() < 0.2) for flag in FLAGS}  # noqa: E731
    known = [entry if isinstance(entry, str) else entry[0] for entry in vocab]
    names = [(name, True) for name in SPECIAL if name not in known]
    names += [(["<x>", "cat", "sat on"][rng.integers(3)], False)] * (rng.random() < 0.3)
    names = [(name, special) for name, special in names if name not in known]
    return [{"id": len(known) + i, "content": text, **flags(), "special": x} for i, (text, x) in enumerate(names)]


def _post_processor(rng: np.random.Generator, added: list[dict[str, Any]]) -> dict[str, Any] | None:
    ids = {token["content"]: token["id"] for token in added}
    around = [
        "A", "A", "A", "<s> A", "<s> A", "A </s>", "<s> A </s>", "[CLS] A [SEP]", "<s> [CLS] A", "A <|im_end|>",
        "</s> A", "</s> A </s>", "A A", "</s> A <s>",
    ]  # fmt: skip
    words = around[rng.integers(len(around))].split()
    parts = [
        {"Sequence": {"id": w, "type_id": 0}} if w == "A" else {"SpecialToken": {"id": w, "type_id": 0}} for w in words
    ]
    tokens = {w: {"id": w, "ids": [ids.get(w, 99999)], "tokens": [w]} for w in words if w != "A"}
    pair = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    template: dict[str, Any] = {"type": "TemplateProcessing", "single": parts, "pair": pair, "special_tokens": tokens}
    level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    if len(words) == 3 and words[1] == "A" and rng.random() < 0.5:
        sep, cls = ([w, ids.get(w, 99999)] for w in (words[2], words[0]))
        template = {"type": "BertProcessing", "sep": sep, "cls": cls}
        if rng.random() < 0.5:
            template |= {"type": "RobertaProcessing", "trim_offsets": True, "add_prefix_space": True}
    forms = [None, level] if words == ["A"] else [template, {"type": "Sequence", "processors": [level, template]}]
    return forms[rng.integers(2)]


def _config(rng: np.random.Generator, added: list[dict[str, Any]]) -> dict[str, Any]:
    decoder = {str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in added}
    more = {"content": "<dec>", **dict.fromkeys(FLAGS, False), "special": True}
    mask = {"content": "<mask>", **dict.fromkeys(FLAGS, False), "lstrip": True, "__type": "AddedToken"}
    options: dict[str, list[Any]] = {
        "eos_token": ["</s>", "</s>", "</s>", "[SEP]", "<|im_end|>"], "bos_token": ["<s>", "<b>"],
        "unk_token": ["<unk>"], "pad_token": ["<pad>", "</s>"], "mask_token": ["<mask>", mask],
        "add_bos_token": [True, False], "add_eos_token": [True, False], "clean_up_tokenization_spaces": [True, False],
        "extra_special_tokens": [["<e1>", "<e2>"], {"image_token": "<i>"}], "additional_special_tokens": [["<e3>"]],
        "added_tokens_decoder": [decoder, decoder | {str(len(decoder) + added[0]["id"]): more}],
    }  # fmt: skip
    drawn = {key: values[rng.integers(len(values))] for key, values in options.items() if rng.random() < 0.3}
    return {"tokenizer_class": "PreTrainedTokenizerFast", **drawn}
