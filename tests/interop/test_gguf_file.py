"""GGUF files, whole and broken, of every supported architecture and type of tensor."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxformer.__main__ import main
from jaxformer.decode import Sampling, generate_tokens
from jaxformer.errors import UserError
from jaxformer.interop.configs import read_config
from jaxformer.interop.gguf import export_gguf, llama3_divisors
from jaxformer.interop.gguf_file import DTYPES, QUANTISED, GgufFile, find_llama3
from jaxformer.interop.obstacles import resolved
from jaxformer.interop.run import import_run, pretrained_model
from jaxformer.runs.run import Run, load_run
from tests.interop.gguf_files import QUANTISABLE, V, random_model, write_gguf
from tests.interop.test_gguf import CASES, llama_cpp_greedy, random_run, small

gguf = pytest.importorskip("gguf")
__all__ = ["small"]  # a fixture

TOKENS = np.random.default_rng(0).integers(280, size=37)
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
"""In published folders."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a complete file."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "whole.gguf", "llama", random_model("llama").tensors)


@pytest.mark.slow
def test_greedy_tokens_equal_those_of_llama_cpp(tmp_path: Path):
    file = write_gguf(tmp_path / "x.gguf", "gemma3", random_model("gemma3").tensors)
    run = load_run(import_run(file, tmp_path / "run")[0])
    banned = [i for i, text in enumerate(run.tokenizer.token_bytes) if not text.isascii() or not text]
    banned += range(run.tokenizer.vocab_size, V)
    sampling = Sampling(temperature=0, bad_words=tuple((i,) for i in banned))
    prompt = TOKENS[:7].tolist()
    pieces = list(generate_tokens(run.model, run.params, [prompt], sampling, [0], max_new_tokens=24, context_length=64))
    tokens, logprobs = (
        np.concatenate([getattr(piece, name)[0] for piece in pieces]) for name in ("tokens", "logprobs")
    )
    theirs = llama_cpp_greedy(file, prompt, 24, banned)
    assert [token["id"] for token in theirs] == tokens.tolist()
    np.testing.assert_allclose([token["logprob"] for token in theirs], logprobs, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama, llama3 scaling", "qwen3"])
def test_import_of_an_export_is_the_same_model(small: Run, tmp_path: Path, case: str):
    run = replace(random_run(small, **CASES[case]), sampling={"temperature": 0.6, "top_k": 20, "top_p": 0.95})
    export_gguf(run, tmp_path / "out.gguf")
    again = load_run(import_run(tmp_path / "out.gguf", tmp_path / "run")[0])
    assert again.sampling == run.sampling
    jax.tree.map(np.testing.assert_array_equal, again.params, run.params)
    read, written = (replace(resolved(r.config.model), embedding_std=1.0) for r in (again, run))  # at the start alone
    assert read == written
    text = "It's  ai bj\n\tÄ é 🙂 <|endoftext|> 1234"
    assert again.tokenizer.encode(text) == run.tokenizer.encode(text)
    assert again.tokenizer.ends_of_text == run.tokenizer.ends_of_text


def random_blocks(kind: str, rows: int, columns: int) -> np.ndarray:
    """Return the bytes of random numbers in a type of which the package writes none, with finite scales."""
    per_block, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = np.random.default_rng(0).integers(256, size=(rows, columns // per_block, n_bytes), dtype=np.uint8)
    scales = slice(-2, None) if kind == "Q6_K" else slice(4)
    data[..., scales] = np.array([0.01, 0.02], np.float16).view(np.uint8)[: 2 if kind == "Q6_K" else 4]
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", [*DTYPES, *QUANTISED])
def test_tensors_are_dequantised_as_by_gguf(tmp_path: Path, kind: str):
    shapes = {"model.embed_tokens.weight": (280, 256), Q_PROJ: (48, 256)}  # six heads
    tensors, raw = {}, {}
    if kind in (*DTYPES, *QUANTISABLE):
        rng = np.random.default_rng(0)
        tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    else:
        theirs = zip(("token_embd.weight", "blk.0.attn_q.weight"), shapes.values(), strict=True)
        raw = {name: (random_blocks(kind, *shape), kind) for name, shape in theirs}
    file = write_gguf(tmp_path / "x.gguf", "llama", tensors, kind=kind, raw=raw)
    stored = {x.name: gguf.quants.dequantize(x.data, x.tensor_type) for x in gguf.GGUFReader(file).tensors}
    read = GgufFile.open(file)
    assert read.names == stored.keys()
    for name, tensor in stored.items():
        np.testing.assert_array_equal(read.read(name).astype(np.float32), tensor)
        assert read.dtype(name) == (kind if kind in DTYPES else "F32") and read.shape(name) == tensor.shape
    if tensors:  # within the rounding of the type, rows of heads in pairs
        pairs = [8 * head + 2 * (i % 4) + i // 4 for head in range(6) for i in range(8)]
        query = stored["blk.0.attn_q.weight"][pairs]
        np.testing.assert_allclose(query, tensors[Q_PROJ], atol=0 if kind == "F32" else 0.4)


@pytest.mark.slow
def test_command_imports_a_quantised_file_that_is_sampled_and_trained_from(
    tmp_path: Path, monkeypatch: Any, capsys: Any
):
    monkeypatch.chdir(tmp_path)
    shapes = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
    keys = {"llama.embedding_length": 32, "llama.feed_forward_length": 64, "llama.rope.dimension_count": 8}
    keys |= {"llama.attention.key_length": 8}
    keys |= {"tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    heads = {"num_attention_heads": 4}, {"llama.attention.head_count": 4}
    model = random_model("llama", **shapes, **heads[0])
    write_gguf(tmp_path / "small.Q8_0.gguf", "llama", model.tensors, keys | heads[1], "Q8_0", heads=(4, 2))
    assert main(["import", "small.Q8_0.gguf"]) == 0
    assert "sample with: python -m jaxformer sample --run runs/small.Q8_0 --chat" in capsys.readouterr().out
    run = load_run("runs/small.Q8_0")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=0.05), run.params, model.params)
    assert main(["sample", "--run", "runs/small.Q8_0", "--chat", "--prompt", "cat", "--max-new-tokens", "3"]) == 0
    pretrained = pretrained_model(Path("small.Q8_0.gguf"))
    assert pretrained.config.name == "small.Q8_0"
    loaded = pretrained.load(jax.eval_shape(lambda: run.params))
    jax.tree.map(np.testing.assert_array_equal, loaded, run.params)
    (tmp_path / "other.gguf").write_bytes(b"")
    assert main(["train", "--init-from", "other.gguf"]) == 2
    assert "other.gguf is no GGUF file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("scaling", "head_dim", "base"),
    [
        ((8.0, 1.0, 4.0, 8192), 128, 500_000.0),  # Llama 3.1
        ((32.0, 1.0, 4.0, 8192), 64, 500_000.0),  # Llama 3.2
        ((4.0, 2.0, 8.0, 4096), 32, 10_000.0),
    ],
)
def test_llama3_scaling_is_found_from_its_divisors(scaling: tuple, head_dim: int, base: float):
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    rope = {"rope_type": "default", "rope_theta": base}
    divisors = llama3_divisors(rope | dict(zip(names, scaling, strict=True)), head_dim)
    factor, low, high, context = scaling
    found = find_llama3(divisors, rope, head_dim)
    assert found == {"rope_type": "llama3", **dict(zip(names, (factor, 1.0, high / low, context / low), strict=True))}
    with pytest.raises(ValueError, match="is not a scaling of Llama 3"):
        find_llama3(divisors[::-1], rope, head_dim)


BROKEN: dict[str, dict[str, Any]] = {
    "architecture of .* is 'mamba', which is not supported; supported are llama, qwen3, qwen2, gemma, gemma2,": {
        "general.architecture": "mamba"
    },
    "is one of 3 parts of a model; merge them with llama-gguf-split": {"split.count": 3},
    "no equivalent as a llama: ValueError: expert_count is 8, and only 0 has": {"llama.expert_count": 8},
    "attention.value_length is 4 and rope.dimension_count 2, and only equal ones have": {
        "llama.rope.dimension_count": 2
    },
    "there is no block_count": {"llama.block_count": None},
    "there is no attention.layer_norm_rms_epsilon": {"llama.attention.layer_norm_rms_epsilon": None},
    "rope.scaling.type is 'yarn', and only none or linear has": {"llama.rope.scaling.type": "yarn"},
    "no tensor blk.2.*, which block_count, attention.head_count_kv.* imply": {"llama.block_count": 3},
    "has shape .24, 24., but its config implies .24, 32": {
        "llama.attention.head_count": 8,
        "llama.attention.key_length": 4,
    },
    "ZeroDivisionError": {"llama.attention.head_count": 0},
    "TypeError": {"llama.attention.head_count": [6, 3]},
    "n_blocks is '2'; it must be a whole number|TypeError": {"llama.block_count": "2"},
    "it splits text as 'tekken', which is not supported; supported are gpt-2, smollm, llama-bpe, dbrx, qwen2": {
        "tokenizer.ggml.pre": "tekken"
    },
    "it splits text as None": {"tokenizer.ggml.pre": None},
    "has no readable tokenizer .ValueError: it is 'bert', which is not supported; supported are gpt2 .* and llama": {
        "tokenizer.ggml.model": "bert"
    },
    "has no readable tokenizer .KeyError: 'tokenizer.ggml.merges'": {"tokenizer.ggml.merges": None},
    "has no readable tokenizer .*out of vocabulary": {"tokenizer.ggml.merges": ["q z"]},
    "has no readable tokenizer .IndexError": {"tokenizer.ggml.eos_token_id": 99_999},
    r"has no readable tokenizer .ValueError: zip": {"tokenizer.ggml.token_type": [1]},
    r"x.gguf has no end-of-text token <.endoftext.>.*; import the model from a folder with": {
        "tokenizer.ggml.eos_token_id": None,
        "tokenizer.ggml.tokens": ["<s>", "ab", *map(chr, range(97, 123))],
        "tokenizer.ggml.token_type": [3] + [1] * 27,
        "tokenizer.ggml.merges": ["a b"],
    },
}


@pytest.mark.parametrize("message", BROKEN)
def test_files_without_equivalent_are_one_sentence_and_leave_nothing(tmp_path: Path, message: str):
    file = write_gguf(tmp_path / "x.gguf", "llama", random_model("llama").tensors, BROKEN[message])
    with pytest.raises(UserError, match=message):
        import_run(file, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


def test_unsupported_types_of_tensors_are_named(tmp_path: Path):
    data = np.zeros((24, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.IQ2_XS][1]), np.uint8)
    file = write_gguf(tmp_path / "x.gguf", "llama", {}, raw={"blk.0.attn_q.weight": (data, "IQ2_XS")})
    with pytest.raises(
        UserError, match=r"blk.0.attn_q.weight in .* is IQ2_XS, which is not supported; use a file with"
    ):
        GgufFile.open(file)


def test_scaling_other_than_that_of_llama_is_refused(tmp_path: Path):
    tensors = random_model("llama").tensors | {"rope_freqs.weight": np.array([1.0, 3.0], np.float32)}
    with pytest.raises(UserError, match=r"rope_freqs\.weight is not a scaling of Llama 3\.1"):
        GgufFile.open(write_gguf(tmp_path / "x.gguf", "llama", tensors))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no GGUF file; name one, or a folder with config.json and safetensors"),
        (b"GGU", "is no GGUF file"),
        (b"PK\x03\x04", "is no GGUF file"),
        (b"GGUF\x01\0\0\0", "is incomplete or corrupt .its version is 1, not 2 or 3.; download it again"),
    ],
)
def test_files_of_other_formats_are_refused(tmp_path: Path, content: bytes, message: str):
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(UserError, match=message):
        import_run(tmp_path / "x.gguf", tmp_path / "run")


def test_truncated_files_are_refused(whole: Path, tmp_path: Path):
    content = whole.read_bytes()
    for n in [*range(4, len(content) // 2, 997), len(content) - 1]:
        (tmp_path / "cut.gguf").write_bytes(content[:n])
        with pytest.raises(UserError, match=r"cut.gguf is incomplete.*; download it again"):
            GgufFile.open(tmp_path / "cut.gguf")


@pytest.mark.slow
def test_damaged_headers_are_one_sentence(whole: Path, tmp_path: Path):
    """Check that no byte of the header leads to an error of another kind."""
    content, draw = whole.read_bytes(), random.Random(0)
    header = content.index(b"output_norm") + 60
    for _ in range(100):
        damaged = bytearray(content)
        for _ in range(draw.choice([1, 1, 4])):
            damaged[draw.randrange(4, header)] = draw.randrange(256)
        (tmp_path / "damaged.gguf").write_bytes(damaged)
        try:
            file = GgufFile.open(tmp_path / "damaged.gguf")
            read_config(file.config)
            file.tokenizer()
        except UserError as error:
            assert "\n" not in str(error)
