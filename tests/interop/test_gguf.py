"""Export to GGUF, read back by `gguf`, run by NumPy and by llama.cpp."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.decode import Sampling, generate_tokens
from jaxformer.errors import UserError
from jaxformer.interop.gguf import export_gguf
from jaxformer.interop.gguf_tokenizer import pre_type
from jaxformer.models.decoder import BlockAttention
from jaxformer.ops import RoPE
from jaxformer.ops.positions import Llama3Scaling
from jaxformer.runs.run import Run
from tests.arrays import apply, plain_decoder, random_params
from tests.helpers import slow
from tests.interop.llama_cpp import llama_cpp
from tests.interop.numpy_llama import forward
from tests.runs import random_runs

gguf = pytest.importorskip("gguf")

WORDS = " ".join(f"{a}{b}" for a in "abcdefgh" for b in "ijklmnop")
SHAPE = plain_decoder(
    vocab_size=300, context_length=96, d_model=40, n_blocks=2, n_heads=4, n_kv_heads=2, head_dim=12, d_ff=(56,),
    activation="swiglu", bias=False, norm="rmsnorm", norm_eps=1e-5, final_norm=True,
    positions="none", rope=RoPE(500.0),
)  # fmt: skip
LLAMA3 = {"rope": RoPE(500.0, Llama3Scaling(8.0, 1.0, 4.0, 64))}
TOKENIZER = {
    "model": {"type": "BPE", "ignore_merges": False},
    "pre_tokenizer": {"type": "ByteLevel", "use_regex": True},
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied": {"unembedding": "tied", "n_kv_heads": None, "head_dim": None},
    "llama, llama3 scaling": LLAMA3,
    "llama, linear scaling": {"rope": RoPE(500.0, 2.0)},
    "qwen3": {"qk_norm": True},
}
"""Fields that differ from `SHAPE`."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return random_runs.random_run(tmp_path_factory.mktemp("runs") / "small", [WORDS * 3], SHAPE)


def random_run(small: Run, **changes: Any) -> Run:
    """Return the run with random parameters of another model; its tokenizer has fewer tokens than the model rows."""
    config = replace(small.config, model=replace(SHAPE, **changes))
    model = config.model.build()
    return replace(small, config=config, model=model, params=random_params(model, *config.model.example()))


def read(file: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return keys, by their last part, and tensors in float32 of a GGUF file."""
    reader = gguf.GGUFReader(file)
    keys = {name.rpartition(".")[2]: field.contents() for name, field in reader.fields.items()}
    return keys, {x.name: gguf.quants.dequantize(x.data, x.tensor_type) for x in reader.tensors}


@pytest.mark.parametrize("case", ["llama", *(slow(case) for case in CASES if case != "llama")])
def test_numpy_forward_of_the_file_gives_the_logits(small, tmp_path, case):
    run = random_run(small, **CASES[case])
    export_gguf(run, tmp_path / "out.gguf")
    config, tensors = read(tmp_path / "out.gguf")
    if case == "llama, linear scaling":
        tensors["rope_freqs.weight"] = np.array(config["factor"])
    tokens = np.random.default_rng(0).integers(300, size=91)
    logits_TV = forward(config, tensors, tokens.tolist(), adjacent=config["architecture"] == "llama")
    expected_TV = apply(run.model, run.params, jnp.asarray(tokens))
    np.testing.assert_allclose(logits_TV, expected_TV, rtol=0, atol=1e-4)
    assert np.abs(expected_TV).max() > 1


@pytest.mark.slow
def test_llama_cpp_draws_the_same_greedy_tokens(small, tmp_path):
    run = random_run(small, **LLAMA3)
    export_gguf(run, tmp_path / "out.gguf")
    n_tokens = run.tokenizer.vocab_size
    # The server of llama.cpp holds back bytes that are no complete character.
    banned = [i for i, text in enumerate(run.tokenizer.token_bytes) if not text.isascii() or not text]
    banned += range(n_tokens, 300)
    prompt = np.random.default_rng(1).integers(n_tokens, size=7).tolist()
    pieces = list(generate_tokens(
        run.model, run.params, [prompt], Sampling(temperature=0, bad_words=tuple((i,) for i in banned)), [0],
        max_new_tokens=24, context_length=96,
    ))  # fmt: skip
    tokens, logprobs = (
        np.concatenate([getattr(piece, name)[0] for piece in pieces]) for name in ("tokens", "logprobs")
    )
    theirs = llama_cpp_greedy(tmp_path / "out.gguf", prompt, 24, banned)
    assert [token["id"] for token in theirs] == tokens.tolist()
    np.testing.assert_allclose([token["logprob"] for token in theirs], logprobs, atol=2e-3)


def llama_cpp_greedy(file: Path, prompt: list[int], n: int, banned: list[int]) -> list[dict[str, Any]]:
    """Return n greedy tokens of llama.cpp, without the banned ones, and their log-probabilities."""
    pytest.importorskip("xllamacpp")
    request = {
        "prompt": prompt, "n_predict": n, "temperature": 0, "n_probs": 1, "logit_bias": [[i, False] for i in banned],
    }  # fmt: skip
    return llama_cpp(file, request)["choices"][0]["logprobs"]["content"]


def part(kind: str, **settings: Any) -> dict[str, Any]:
    return {"type": kind, "add_prefix_space": False, **settings}


@pytest.mark.parametrize(
    ("ignore_merges", "parts", "name"),
    [
        (False, [part("ByteLevel", use_regex=True)], "gpt-2"),
        (False, [part("Digits", individual_digits=True), part("ByteLevel", use_regex=True)], "smollm"),
        (
            True,
            [
                part(
                    "Split",
                    behavior="Isolated",
                    invert=False,
                    pattern={
                        "Regex": "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}"
                        "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
                    },
                ),
                part("ByteLevel", use_regex=False),
            ],
            "llama-bpe",
        ),
    ],
)
def test_pre_tokenizer_has_the_name_of_llama_cpp(ignore_merges, parts, name):
    model = {"type": "BPE", "ignore_merges": ignore_merges}
    assert pre_type({"model": model, "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts}}) == name


@pytest.mark.parametrize(
    "tokenizer",
    [
        TOKENIZER | {"pre_tokenizer": part("ByteLevel", use_regex=False)},
        TOKENIZER | {"pre_tokenizer": {"type": "ByteLevel", "use_regex": True, "add_prefix_space": True}},
        TOKENIZER | {"pre_tokenizer": None},
        TOKENIZER | {"model": {"type": "BPE", "ignore_merges": True}},
        TOKENIZER | {"pre_tokenizer": part("Split", behavior="Removed", invert=False, pattern={"Regex": " "})},
    ],
)
def test_pre_tokenizer_that_llama_cpp_lacks_is_refused(tokenizer):
    with pytest.raises(
        UserError, match=r"no equivalent among llama.cpp's gpt-2, smollm, llama-bpe, dbrx, qwen2; export"
    ):
        pre_type(tokenizer)


def test_normalizer_that_llama_cpp_lacks_is_refused():
    assert pre_type(TOKENIZER | {"normalizer": {"type": "NFC"}}) == "gpt-2"
    with pytest.raises(
        UserError, match=r"changes or splits text by .*Lowercase.*, which has no equivalent among .*; export it with"
    ):
        pre_type(TOKENIZER | {"normalizer": {"type": "Lowercase"}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"attention": BlockAttention(8)},
            "attention.window 8 has no equivalent in llama, .* or train with `model.attention.window=None`",
        ),
        (
            {"qk_norm": True, "attention": BlockAttention(8)},
            "attention.window 8 has no equivalent in qwen3, the nearest of the families llama, qw",
        ),
        ({"logit_soft_cap": 9.0}, "logit_soft_cap 9.0 has no equivalent in llama"),
    ],
)
def test_part_that_llama_cpp_lacks_is_refused(small, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        export_gguf(random_run(small, **changes), tmp_path / "out.gguf")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("dtype", "stored"), [("bfloat16", "BF16"), ("float16", "F16")])
def test_matrices_are_rounded_and_vectors_are_not(small, tmp_path, dtype, stored):
    run = random_run(small)
    export_gguf(run, tmp_path / "out.gguf", dtype)
    types = {x.name: x.tensor_type.name for x in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert {types[name] for name in types if "norm" in name} == {"F32"}
    assert {types[name] for name in types if "norm" not in name} == {stored}
    _, tensors = read(tmp_path / "out.gguf")
    W_E = np.asarray(run.params["embedding"]["W_E"])
    assert np.array_equal(tensors["token_embd.weight"], W_E.astype(dtype).astype(np.float32))


def test_tokenizer_of_the_file_is_the_runs_own(small, tmp_path):
    export_gguf(random_run(small), tmp_path / "out.gguf")
    keys = read(tmp_path / "out.gguf")[0]
    content = json.loads(small.tokenizer.as_json())
    n = len(content["model"]["vocab"])
    assert keys["tokens"][:n] == sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    assert keys["tokens"][n:] == [f"[PAD{i}]" for i in range(n, 300)]
    assert keys["token_type"] == [3] + [1] * (n - 1) + [5] * (300 - n)  # control, normal, unused
    assert [merge.split(" ") for merge in keys["merges"]] == content["model"]["merges"]
    assert (keys["model"], keys["pre"], keys["add_bos_token"], keys["eos_token_id"]) == ("gpt2", "gpt-2", False, 0)


@pytest.mark.slow
def test_chat_template_is_written_where_there_is_one(small, tmp_path):
    assert small.tokenizer is not None
    run = random_run(replace(small, tokenizer=small.tokenizer.with_chat_template("{{ messages }}")))
    export_gguf(run, tmp_path / "chat.gguf")
    export_gguf(random_run(small), tmp_path / "plain.gguf")
    assert read(tmp_path / "chat.gguf")[0]["chat_template"] == "{{ messages }}"
    assert "chat_template" not in read(tmp_path / "plain.gguf")[0]
