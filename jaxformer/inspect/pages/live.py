"""Page section that runs a decoder on the reader's own text, in a script: `docs/lab/src/inspect/live.ts`."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.data.tokenizer import BYTE_OF, Tokenizer
from jaxformer.inspect.pages.page import Section, embed
from jaxformer.inspect.pages.weights import GROUP, pack_names, pack_params, round_params
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.objective import Params
from jaxformer.nn.norms import epsilon
from jaxformer.ops.positions import Llama3Scaling
from jaxformer.runs.run import Run, count_parameters
from jaxformer.runs.snapshots import load_snapshot, snapshot_steps

FLOAT16_PARAMETERS = 5_000_000
"""Maximum parameters stored as float16; those of larger models are stored in 8 bits."""
MAX_EMBEDDED_BYTES = 40_000_000
"""Maximum size of the parameters, of all frames of a film, within a page; larger ones are in files beside it."""
MAX_FILE_BYTES = 24_000_000
"""Maximum size of such a file: hosts of static pages refuse larger ones than 25 MB."""
MAX_FILM_PARAMETERS = 200_000_000
"""Maximum parameters of all frames of a film together."""
KNOWN = {
    "norm": ("none", "rmsnorm", "layernorm"),
    "norm_placement": ("pre", "post", "both"),
    "positions": ("none", "learned", "sinusoidal"),
    "embedding_norm": (False,),
    "unembedding_bias": (False,),
    "score_soft_cap": (None,),
    "sinks": (False,),
    "latents": (None,),
    "qk_norm_kind": ("head",),
    "residual_scale": (1.0,),
    "logit_scale": (1.0,),
    "activation": (
        "relu",
        "squared_relu",
        "gelu",
        "gelu_exact",
        "quick_gelu",
        "silu",
        "swiglu",
        "geglu",
        "geglu_exact",
        "tanh",
    ),
}
"""What `decoder.ts` in docs/lab/src/inspect computes; another norm or activation is to be added there, and to
`backward.ts`."""
SCRIPT = "the page's script"
MAX_TOKENS = 256
"""Maximum tokens of a text on the page, which bounds the memory for attention maps."""
CONFIG_FIELDS = (
    "vocab_size", "d_model", "n_blocks", "n_heads", "activation", "norm_placement", "positions", "embedding_scale",
    "logit_soft_cap",
)  # fmt: skip
"""Fields of `DecoderConfig` that the script reads unchanged."""
ENDINGS = "'s|'t|'re|'ve|'m|'ll|'d"
ENDINGS_OF_ANY_CASE = "'[sS\u017f]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
"""`ENDINGS` under Unicode case folding, which maps the long s to s."""
GPT2_SPLIT = rf"{ENDINGS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
"""Pattern by which byte-level tokenizers split a text into words (Radford et al. 2019)."""
KNOWN_SPLITS = (
    GPT2_SPLIT,
    *(
        rf"(?i:{ENDINGS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
        for digits in (r"\p{N}{1,3}", r"\p{N}")  # Llama 3; Qwen
    ),
)
"""Tokenizer patterns that have the same meaning in JavaScript after `_javascript`."""


@dataclass(frozen=True)
class LiveSection(Section):
    """A text field, and the results that a decoder in the page computes for its text."""

    config: DecoderConfig
    arrays: list[list]
    """Names and sizes of the parameters; see `pack_names`."""
    bits: int
    """Bits of a stored parameter: 16 or 8."""
    weights: bytes
    """The stored parameters, or those of all frames of a film; see `pack_params`."""
    tokenizer: Tokenizer
    text: str
    """Initial text."""
    file: str | None = None
    """Name, without a number, of the files beside the page that hold `weights`; None where the page itself does."""
    film: Sequence[int] = ()
    """Steps of a film's frames, the last of which has the section's parameters."""

    is_live: ClassVar = True

    @property
    def files(self) -> dict[str, bytes]:
        """Parts of the weights by the names of the files beside the page; none where the page itself holds them."""
        starts = range(0, len(self.weights), MAX_FILE_BYTES) if self.file is not None else ()
        return {f"{self.file}.{i}": self.weights[at : at + MAX_FILE_BYTES] for i, at in enumerate(starts)}

    @property
    def fetches(self) -> bool:
        """Whether the weights are in files beside the page, which it fetches once it is served."""
        return self.file is not None

    def body(self) -> str:
        """Return the HTML element with the packed model and tokenizer."""
        data = pack_settings(self.config) | {
            "arrays": self.arrays, "bits": self.bits, "group": GROUP, "size": len(self.weights),
            "tokenizer": pack_tokenizer(self.tokenizer), "text": self.text, "film": self.film,
        }  # fmt: skip
        if self.file is not None:
            data |= {"files": list(self.files), "sha256": hashlib.sha256(self.weights).hexdigest()}
        else:
            data["weights"] = base64.b64encode(self.weights).decode()
        return embed("live", data)


def live_section(
    model: nn.Module,
    params: Params,
    tokenizer: Tokenizer,
    tokens_T: jax.Array,
    max_parameters: int,
    file: str = "the weights",
    film: Iterable[tuple[int, Params]] = (),
) -> LiveSection:
    """Return the section for a causal decoder, with the given tokens as initial text.

    Args:
      params: parameters, stored as float16 or, for more than `FLOAT16_PARAMETERS`, in 8 bits.
      max_parameters: maximum number of parameters.
      file: name of the files beside the page for parameters of more than `MAX_EMBEDDED_BYTES`.
      film: steps and parameters of a film, of which the last are `params`; see `film_frames`. Frames that are not
        finite are left out.

    Raises:
      NotImplementedError: the page's script cannot run the model or its tokenizer, or the model is too large.
    """
    config: Any = getattr(model, "config", None)
    n_parameters = sum(x.size for x in jax.tree.leaves(params))
    is_own = type(config).__module__.startswith("jaxformer.")  # another subclass may change the computation
    if not (isinstance(config, DecoderConfig) and is_own):
        raise NotImplementedError(f"{SCRIPT} supports decoders only, and this is a {type(model).__name__}.")
    if config.routes_tokens or config.prefix:
        raise NotImplementedError(f"{SCRIPT} supports neither mixtures of experts nor attention to a prefix.")
    for name, known in KNOWN.items():
        if (value := getattr(config, name)) not in known:
            raise NotImplementedError(f"{SCRIPT} does not support the {name} {value}.")
    for rope in filter(None, map(config.block_rope, range(config.n_blocks))):
        if rope.fraction < 1 or rope.interleaved or not isinstance(rope.scaling, float | Llama3Scaling):
            raise NotImplementedError(f"{SCRIPT} does not support {rope}.")
    if n_parameters > max_parameters:
        problem = f"it has {n_parameters:,} parameters, but the limit is {max_parameters:,}"
        raise NotImplementedError(f"{problem}; raise `max_live_parameters`.")
    pack_tokenizer(tokenizer)  # raises if the script does not support it
    bits = 16 if n_parameters <= FLOAT16_PARAMETERS else 8
    rounded_params = round_params(params, bits)
    text = tokenizer.decode(np.asarray(tokens_T).tolist()).strip("\ufffd")  # parts of characters at the ends
    text_T = jnp.array(tokenizer.encode_prompt(text)[: min(config.n_positions, MAX_TOKENS)] or [tokenizer.end_of_text])
    placed = jax.tree.map(lambda x, like: jax.device_put(x, jnp.asarray(like).sharding), rounded_params, params)
    difference = float(jnp.abs(_logits(model, params, text_T) - _logits(model, placed, text_T)).max())
    packed = {}
    for step, frame in film:
        with suppress(NotImplementedError):
            packed[step] = pack_params(round_params(frame, bits), bits)
    steps = list(packed) if len(packed) > 1 else []
    weights = b"".join(packed.values()) if steps else pack_params(rounded_params, bits)
    about = (
        f"The model itself, with its {n_parameters:,} parameters, runs in this page, offline: type a text, point at "
        "its tokens, ablate heads, or generate token by token. The parameters are stored "
        f"{'as float16' if bits == 16 else 'in 8 bits'} ({len(weights) / 1e6:,.1f} MB"
        f"{f' in {len(steps)} frames' if steps else ''}), which changes the logits of "
        f"the text below by at most {difference:.2g}."
    )
    beside = file if len(weights) > MAX_EMBEDDED_BYTES else None
    return LiveSection(
        "Your own text", config, pack_names(params), bits, weights, tokenizer, text, beside, steps, about=about
    )


@partial(jax.jit, static_argnums=0)
def _logits(model: nn.Module, params: Params, tokens_T: jax.Array) -> Any:
    """Return the logits of a text, `(T, V)`, by one program for all parameters."""
    return model.apply({"params": params}, tokens_T)


def film_frames(run: Run) -> Iterator[tuple[int, Params]]:
    """Yield the steps and parameters of a run's film up to the run's own, which are the last; none if there is no film,
    or its frames have more than `MAX_FILM_PARAMETERS` together."""
    steps = [step for step in snapshot_steps(run.path) if step < run.step]
    if steps and (len(steps) + 1) * count_parameters(run.params) <= MAX_FILM_PARAMETERS:
        yield from ((step, load_snapshot(run, step)) for step in steps)
        yield run.step, run.params


def pack_settings(config: DecoderConfig) -> dict[str, Any]:
    """Return a decoder's settings as JSON for the script."""
    c, is_residual = config, config.contract.has_residual_stream
    settings = {
        **{name: getattr(c, name) for name in CONFIG_FIELDS}, "residual": is_residual,
        "unembedding": "mlp" if c.unembedding == "linear" and not c.has_W_out else c.unembedding,
        "n_kv_heads": c.kv_heads, "head_dim": c.width_of_head, "value_dim": c.width_of_values, "scale": c.scale,
        "windows": c.block_windows,
        "norm_eps": None if c.norm == "none" else epsilon(c.norm, c.norm_eps), "qk_eps": epsilon("rmsnorm", c.norm_eps),
        "frequencies": [_frequencies(c, i) for i in range(c.n_blocks)],
        "has_lens": is_residual and (c.norm == "none" or c.norm_placement != "post"),
    }  # fmt: skip
    return {"config": settings, "max_tokens": min(c.n_positions, MAX_TOKENS)}


def _frequencies(c: DecoderConfig, block: int) -> list[float] | None:
    """Return the K/2 RoPE frequencies of a block in radians per position; None without RoPE."""
    if (rope := c.block_rope(block)) is None:
        return None
    frequencies: list[float] = rope.frequencies(c.width_of_head).tolist()
    return frequencies


def pack_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a byte-pair-encoding tokenizer as JSON for the script. Raises `NotImplementedError` for features that it
    does not support."""
    form = json.loads(tokenizer.as_json())
    model, splits = form["model"], list(_splits(form["pre_tokenizer"]))
    unknown = [name for name in ("continuing_subword_prefix", "end_of_word_suffix") if model.get(name)]
    if model["type"] != "BPE":
        unknown = [model["type"], *unknown]
    if unknown:
        raise NotImplementedError(f"{SCRIPT} does not support {' or '.join(unknown)} of tokenizers.")
    if any(not token["special"] for token in form["added_tokens"]):
        raise NotImplementedError(f"{SCRIPT} does not support added tokens that are not special.")
    vocab, is_byte_level = model["vocab"], {"kind": "bytes"} in splits
    if is_byte_level:
        symbols: Any = [vocab.get(character) for _, character in sorted((byte, c) for c, byte in BYTE_OF.items())]
    else:
        symbols = {piece: i for piece, i in vocab.items() if len(piece) == 1}
    fallback = [vocab.get(f"<0x{byte:02X}>") for byte in range(256)]
    if not is_byte_level and (None in fallback or not model.get("byte_fallback")):
        raise NotImplementedError(f"{SCRIPT} does not support character-level tokenizers without byte fallback.")
    pieces = tokenizer.token_bytes
    return {
        "normalizers": list(_normalizers(form["normalizer"])), "splits": [s for s in splits if s["kind"] != "bytes"],
        "symbols": symbols, "fallback": fallback,
        "merges": [[vocab[left], vocab[right], vocab[left + right]] for left, right in model["merges"]],
        "words": _unsplit_words(vocab, is_byte_level) if model.get("ignore_merges") else {},
        "lengths": [len(piece) for piece in pieces], "bytes": base64.b64encode(b"".join(pieces)).decode(),
        "begin": tokenizer.before_text, "end": tokenizer.end_of_text,
    }  # fmt: skip


def _unsplit_words(vocab: dict[str, int], is_byte_level: bool) -> dict[str, list[int]]:
    """Return the token of each word that is in the vocabulary, for tokenizers that then ignore the merges."""
    if not is_byte_level:
        return {piece: [i] for piece, i in vocab.items()}
    words = {}
    for piece, i in vocab.items():
        with suppress(KeyError, UnicodeDecodeError):  # special tokens, and parts of characters
            words[bytes(BYTE_OF[character] for character in piece).decode()] = [i]
    return words


def _steps(step: dict[str, Any] | None, parts: str) -> list[dict[str, Any]]:
    """Return the steps of a normaliser or pre-tokenizer, with sequences flattened."""
    if step is None:
        return []
    return [inner for part in step[parts] for inner in _steps(part, parts)] if step["type"] == "Sequence" else [step]


def _normalizers(step: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    for s in _steps(step, "normalizers"):
        if s["type"] in ("NFC", "NFD", "NFKC", "NFKD"):
            yield {"kind": "unicode", "form": s["type"]}
        elif s["type"] == "Prepend":
            yield {"kind": "prepend", "start": s["prepend"]}
        elif s["type"] == "Replace" and "String" in s["pattern"]:
            yield {"kind": "replace", "pattern": s["pattern"]["String"], "by": s["content"]}
        else:
            raise NotImplementedError(f"{SCRIPT} does not support the normaliser {s['type']}.")


def _splits(step: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    for s in _steps(step, "pretokenizers"):
        if s["type"] == "ByteLevel":
            if s["add_prefix_space"]:
                yield {"kind": "space"}
            if s["use_regex"]:
                yield {"kind": "regex", "pattern": _javascript(GPT2_SPLIT)}
            yield {"kind": "bytes"}
        elif s["type"] == "Metaspace":
            settings = {"replacement": s["replacement"], "prepend": s["prepend_scheme"], "split": s["split"]}
            yield {"kind": "metaspace", **settings}
        elif s["type"] == "Digits":
            yield {"kind": "regex", "pattern": r"\p{N}" if s["individual_digits"] else r"\p{N}+"}
        elif s["type"] == "Split" and s["pattern"].get("Regex") in KNOWN_SPLITS and s["behavior"] == "Isolated":
            yield {"kind": "regex", "pattern": _javascript(s["pattern"]["Regex"])}
        else:
            raise NotImplementedError(f"{SCRIPT} does not support the pre-tokenizer {s['type']}.")


def _javascript(pattern: str) -> str:
    """Translate a known pattern to JavaScript, where `\\s` differs and not every engine has flags on groups."""
    pattern = pattern.replace(f"(?i:{ENDINGS})", ENDINGS_OF_ANY_CASE)
    return pattern.replace(r"\s", r"\p{White_Space}").replace(r"\S", r"\P{White_Space}")
