"""Export as a folder that transformers reads."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers

from jaxformer.cli.arguments import load_config
from jaxformer.decode import Sampling, generate_tokens
from jaxformer.errors import UserError
from jaxformer.interop.families import FAMILIES
from jaxformer.interop.huggingface import export_huggingface
from jaxformer.interop.obstacles import resolved, unmatched
from jaxformer.interop.run import import_run
from jaxformer.ops import RoPE
from jaxformer.ops.positions import Llama3Scaling
from jaxformer.runs.run import Run, load_run
from tests.arrays import apply
from tests.helpers import ROOT
from tests.interop.published import publish, their_greedy, their_logits
from tests.interop.test_parity import CASES, tokens
from tests.runs.random_runs import random_run

load_file = pytest.importorskip("safetensors.numpy").load_file
WORDS = " ".join(f"{a}{b}" for a in "abcdefgh" for b in "ijklmnop")
LLAMA = load_config(f"{ROOT}/configs/quick.py:llama").model
SMALL = replace(LLAMA, vocab_size=280, context_length=96, d_model=16, n_blocks=2, n_heads=2, d_ff=(40,))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a small `quick:llama` with random parameters."""
    return random_run(tmp_path_factory.mktemp("runs") / "small", [WORDS * 9], SMALL)


def read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


def assert_equal_params(ours: Any, theirs: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def greedy(run: Run, prompt: list[int], n: int) -> list[int]:
    """Return n greedy tokens."""
    pieces = generate_tokens(
        run.model, run.params, [prompt], Sampling(temperature=0), [0], max_new_tokens=n, context_length=96
    )  # fmt: skip
    return np.concatenate([piece.tokens[0] for piece in pieces]).tolist()


@pytest.mark.slow
def test_import_of_an_export_is_bit_identical(run, tmp_path):
    run = replace(run, sampling={"temperature": 0.6, "top_p": 0.95})
    export_huggingface(run, tmp_path / "out")
    path, _ = import_run(tmp_path / "out", tmp_path / "run")
    again = load_run(path)
    assert_equal_params(again.params, run.params)
    assert again.sampling == run.sampling
    assert again.tokenizer.as_json() == run.tokenizer.as_json()
    export_huggingface(again, tmp_path / "again")
    for name in ("config.json", "model.safetensors", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_config_names_what_other_libraries_read(run, tmp_path):
    export_huggingface(run, tmp_path / "out")
    config = read_json(tmp_path / "out/config.json")
    expected = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 280, "hidden_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 40, "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "max_position_embeddings": 96, "bos_token_id": 0, "eos_token_id": 0, "dtype": "float32",
    }  # fmt: skip
    assert expected.items() <= config.items()
    assert config["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}
    names = load_file(tmp_path / "out/model.safetensors").keys()
    assert len(names) == 3 + 2 * 9 and "model.layers.1.mlp.gate_proj.weight" in names
    assert read_json(tmp_path / "out/generation_config.json")["eos_token_id"] == 0
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip


@pytest.mark.slow
def test_bfloat16_rounds_and_the_config_says_so(run, tmp_path):
    export_huggingface(run, tmp_path / "out", "bfloat16")
    assert read_json(tmp_path / "out/config.json")["dtype"] == "bfloat16"
    again = load_run(import_run(tmp_path / "out", tmp_path / "run")[0])
    rounded = jax.tree.map(lambda p: np.asarray(p).astype("bfloat16").astype(np.float32), run.params)
    assert_equal_params(again.params, rounded)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "squared_relu"}, "activation 'squared_relu' has no equivalent in "),
        ({"norm_placement": "post"}, "norm_placement 'post' has no equivalent in "),
        ({"d_ff": (8, 8)}, r"d_ff \(8, 8\) has no equivalent in "),
        ({"prefix": True, "bias": True}, "prefix True and bias True have no equivalent in llama, the nearest of the "),
    ],
)
def test_part_without_an_equivalent_is_named(run, tmp_path, changes, message):
    model = replace(SMALL, **changes)
    with pytest.raises(UserError, match=message):
        export_huggingface(replace(run, config=replace(run.config, model=model)), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_model_without_an_equivalent_is_answered_with_one_and_the_extra_to_install(run, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxformer.errors.importlib.util.find_spec", lambda _: None)  # a plain installation
    with pytest.raises(UserError) as error:
        export_huggingface(replace(run, config=load_config("quick")), tmp_path / "out")
    message = str(error.value)
    assert message.startswith("activation 'relu' and bias True have no equivalent in qwen3")
    assert "use `format='safetensors'` (install it with pip install 'jaxformer[hf]'), or train with" in message
    assert message.endswith(" `model.activation='swiglu'`, `model.bias=False`.")


@pytest.mark.parametrize("name", ["quick.py:llama", "gpt.py:llama_1b", "gpt.py:llama_7b", "gpt.py:llama_70b"])
def test_committed_llamas_have_an_equivalent(name):
    config = load_config(f"{ROOT}/configs/{name}").model
    assert unmatched(resolved(config), FAMILIES["llama"]) == {}


def test_limits_of_a_rope_scaling_have_an_equivalent():
    scaled = replace(resolved(SMALL), rope=RoPE(scaling=Llama3Scaling(2.0, 2.0, 8.0, 24)))
    assert unmatched(scaled, FAMILIES["llama"]) == {}


def test_other_model_is_refused(run, tmp_path):
    config = load_config(f"{ROOT}/configs/vision.py:vivit")
    other = replace(run, config=config, model=config.model.build())
    with pytest.raises(UserError, match=r"holds a ViViT.*, which none of llama, .* describes; use `format='saf"):
        export_huggingface(other, tmp_path / "out")


def test_fields_of_training_alone_change_nothing(run, tmp_path):
    changed = replace(SMALL, dropout=0.1, unembedding_std=None)
    export_huggingface(run, tmp_path / "a")
    export_huggingface(replace(run, config=replace(run.config, model=changed)), tmp_path / "b")
    assert (tmp_path / "a/config.json").read_bytes() == (tmp_path / "b/config.json").read_bytes()


def test_token_before_each_text_is_named(run, tmp_path):
    inner = tokenizers.Tokenizer.from_str(run.tokenizer.as_json())
    inner.add_special_tokens(["<s>"])
    bos = inner.token_to_id("<s>")
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    other = replace(run, tokenizer=type(run.tokenizer)(inner))
    export_huggingface(other, tmp_path / "out")
    assert read_json(tmp_path / "out/config.json")["bos_token_id"] == bos
    config = read_json(tmp_path / "out/tokenizer_config.json")
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "<|endoftext|>")


def test_config_of_a_published_tokenizer_and_all_ends_of_a_text_remain(run, tmp_path):
    inner = tokenizers.Tokenizer.from_str(run.tokenizer.as_json())
    inner.add_special_tokens(["<pad>"])
    config = {"eos_token": "<|endoftext|>", "chat_template": "{{ messages }}", "eos_token_ids": [0, 7]}
    config |= {"pad_token": "<pad>"}
    export_huggingface(replace(run, tokenizer=type(run.tokenizer)(inner, config=config)), tmp_path / "out")
    written = read_json(tmp_path / "out/tokenizer_config.json")
    assert written["chat_template"] == "{{ messages }}" and "eos_token_ids" not in written
    for name in ("config.json", "generation_config.json"):
        assert read_json(tmp_path / "out" / name)["eos_token_id"] == [0, 7]
    assert read_json(tmp_path / "out/generation_config.json")["pad_token_id"] == inner.token_to_id("<pad>")


@pytest.mark.slow
def test_transformers_computes_the_same_and_encodes_the_same(run, tmp_path):
    transformers = pytest.importorskip("transformers")
    export_huggingface(run, tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ours_TV = apply(run.model, run.params, tokens(96, 280))
    np.testing.assert_allclose(ours_TV, their_logits(model, tokens(96, 280)), rtol=0, atol=1e-4)
    prompt = run.tokenizer.encode(" ai bj")
    assert greedy(run, prompt, 16) == their_greedy(model, prompt, 16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "It's  12 aibj\n\tÄ é 🙂 don't"
    assert tokenizer.encode(text) == run.tokenizer.encode(text)
    assert tokenizer.decode(run.tokenizer.encode(text)) == text
    assert (tokenizer.eos_token_id, tokenizer.model_max_length) == (0, 96)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_export_of_an_import_has_the_same_tensors(tmp_path, case):
    family, changes = CASES[case]
    publish(tmp_path / "model", family, **changes)
    run = load_run(import_run(tmp_path / "model", tmp_path / "run")[0])
    export_huggingface(run, tmp_path / "out")
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        # Gains of Gemma are stored less 1, and a float32 near 1 is a multiple of 2^-24 or 2^-23.
        exact = family != "Gemma3" or "norm" not in name
        np.testing.assert_allclose(ours[name], tensor, rtol=0, atol=0 if exact else 2**-23, err_msg=name)
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    original = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    theirs_TV = their_logits(original, tokens(37))
    np.testing.assert_allclose(their_logits(model, tokens(37)), theirs_TV, rtol=0, atol=1e-4)
