"""Folders of published models, whole and broken."""

import json
import shutil
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from flax.traverse_util import flatten_dict
from tokenizers import processors

import jaxformer.interop.run
from jaxformer.__main__ import main
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError
from jaxformer.interop.configs import read_config
from jaxformer.interop.families import FAMILIES
from jaxformer.interop.families.encoders import class_names
from jaxformer.interop.families.tables import REQUIRED
from jaxformer.interop.folder import ModelFolder
from jaxformer.interop.run import import_run, load_published_tokenizer, open_published, pretrained_model
from jaxformer.models.decoder import BlockAttention
from jaxformer.ops import RoPE
from jaxformer.ops.positions import Llama3Scaling
from jaxformer.parallel.mesh import make_mesh
from jaxformer.runs.run import Run, create_run, load_run
from jaxformer.train.setup import TrainSetup
from tests.arrays import apply
from tests.interop import numpy_llama
from tests.interop.published import TEXTS

numpy_files = pytest.importorskip("safetensors.numpy")

V, D, F, H, G, K = 283, 12, 20, 3, 1, 4
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": V, "hidden_size": D,
    "intermediate_size": F, "num_hidden_layers": 1, "num_attention_heads": H, "num_key_value_heads": G,
    "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "rope_theta": 500.0, "torch_dtype": "float32",
}  # fmt: skip
"""Config as transformers wrote it before version 5."""
SHAPES = {
    "model.embed_tokens.weight": (V, D),
    "model.layers.0.input_layernorm.weight": (D,),
    "model.layers.0.self_attn.q_proj.weight": (H * K, D),
    "model.layers.0.self_attn.k_proj.weight": (G * K, D),
    "model.layers.0.self_attn.v_proj.weight": (G * K, D),
    "model.layers.0.self_attn.o_proj.weight": (D, H * K),
    "model.layers.0.post_attention_layernorm.weight": (D,),
    "model.layers.0.mlp.gate_proj.weight": (F, D),
    "model.layers.0.mlp.up_proj.weight": (F, D),
    "model.layers.0.mlp.down_proj.weight": (D, F),
    "model.norm.weight": (D,),
    "lm_head.weight": (V, D),
}


def tensors(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Return random tensors of a Llama."""
    rng = np.random.default_rng(0)
    return {name: (0.2 * rng.standard_normal(shape)).astype(dtype) for name, shape in SHAPES.items()}


def write(
    folder: Path, config: dict[str, Any] | None = None, weights: dict[str, np.ndarray] | None = None,
    shards: int = 1, n_tokens: int = 280,
) -> Path:  # fmt: skip
    """Write a published model's folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    weights = tensors() if weights is None else weights
    if shards == 1:
        numpy_files.save_file(weights, folder / "model.safetensors")
    else:
        files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
        for i, file in enumerate(files):
            numpy_files.save_file({name: weights[name] for name in sorted(weights)[i::shards]}, folder / file)
        weight_map = {name: files[i % shards] for i, name in enumerate(sorted(weights))}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    Tokenizer.train(TEXTS, n_tokens).save(folder / "tokenizer.json")
    return folder


def without(weights: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """Return the tensors but one."""
    return {key: value for key, value in weights.items() if key != name}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return the run of `tensors`, imported from a folder of three shards by the command."""
    folder = tmp_path_factory.mktemp("imported")
    assert main(["import", str(write(folder / "model", shards=3)), "--run", str(folder / "run")]) == 0
    return load_run(folder / "run")


def forward(weights: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """Return the logits `(T, V)` of a Llama by NumPy in float64, from names and order of transformers."""
    names = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    named = {f"blk.0.{ours}.weight": weights[f"model.layers.0.{name}.weight"] for name, ours in names.items()}
    named |= {"token_embd.weight": weights["model.embed_tokens.weight"], "output.weight": weights["lm_head.weight"]}
    config = {
        "head_count": H, "head_count_kv": G, "key_length": K, "block_count": 1,
        "layer_norm_rms_epsilon": CONFIG["rms_norm_eps"], "freq_base": CONFIG["rope_theta"],
    }  # fmt: skip
    return numpy_llama.forward(config, named | {"output_norm.weight": weights["model.norm.weight"]}, tokens, False)


def test_logits_of_an_imported_llama_equal_those_by_numpy(imported: Run):
    tokens = np.random.default_rng(1).integers(V, size=19)
    expected_TV = forward(tensors(), tokens.tolist())
    np.testing.assert_allclose(apply(imported.model, imported.params, tokens), expected_TV, rtol=0, atol=1e-5)
    assert np.abs(expected_TV).max() > 0.1


def test_matrices_are_transposed_and_heads_are_parted(imported: Run):
    weights, run = tensors(), imported
    attention, mlp = run.params["blocks_0"]["attention"], run.params["blocks_0"]["mlp"]
    query_HKD = weights["model.layers.0.self_attn.q_proj.weight"].reshape(H, K, D)
    output_DHK = weights["model.layers.0.self_attn.o_proj.weight"].reshape(D, H, K)
    np.testing.assert_array_equal(attention["W_Q"], np.moveaxis(query_HKD, 2, 0))
    np.testing.assert_array_equal(attention["W_O"], np.moveaxis(output_DHK, 0, 2))
    np.testing.assert_array_equal(mlp["W_gate_1"], weights["model.layers.0.mlp.gate_proj.weight"].T)
    np.testing.assert_array_equal(run.params["W_out"], weights["lm_head.weight"].T)
    model: Any = run.config.model
    assert (model.norm_eps, model.rope.base, model.n_kv_heads, model.n_positions) == (1e-5, 500.0, 1, 32)


@pytest.mark.slow
def test_bfloat16_is_read_exactly_and_stored_as_it_is(tmp_path: Path):
    weights = tensors(ml_dtypes.bfloat16)
    folder, _ = import_run(write(tmp_path / "model", weights=weights), tmp_path / "run")
    wide, _ = import_run(tmp_path / "model", tmp_path / "wide", dtype="float32")
    for run, dtype, held in (
        *((folder, "stored", "bfloat16"), (wide, "stored", "float32")),
        *((folder, None, "float32"), (wide, "bfloat16", "bfloat16")),
    ):
        params = load_run(run, dtype=dtype).params
        assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {held}
        np.testing.assert_array_equal(
            params["W_out"].astype(np.float32), weights["lm_head.weight"].T.astype(np.float32)
        )
    with pytest.raises(ValueError, match="cannot be held in int8; choose float32, bfloat16, float16 or stored"):
        load_run(folder, dtype="int8")


@pytest.mark.slow
def test_a_tied_head_may_be_absent_or_a_copy(tmp_path: Path):
    weights, config = tensors(), CONFIG | {"tie_word_embeddings": True}
    write(tmp_path / "absent", config, without(weights, "lm_head.weight"))
    write(tmp_path / "copy", config, weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    runs = [load_run(import_run(tmp_path / name, tmp_path / f"run-{name}")[0]) for name in ("absent", "copy")]
    jax.tree.map(np.testing.assert_array_equal, *(run.params for run in runs))
    assert "W_out" not in runs[0].params
    with pytest.raises(UserError, match=r"ties lm_head\.weight to model\.embed_tokens\.weight, but the two differ"):
        import_run(write(tmp_path / "other", config, weights), tmp_path / "run")
    float8 = write(tmp_path / "float8", config, weights | {"lm_head.weight": np.zeros((V, D), np.int8)})
    content = (float8 / "model.safetensors").read_bytes()
    n = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + n].replace(b'"I8"', b'"F8_E4M3"')  # NumPy has no such dtype
    (float8 / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content[8 + n :])
    with pytest.raises(UserError, match=r"ties lm_head\.weight to model\.embed_tokens\.weight, but the two differ"):
        import_run(float8, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Mistral", "Mixtral", "GPT2"])
def test_fields_that_a_config_lacks_have_the_default_of_transformers(name: str):
    transformers = pytest.importorskip("transformers")
    theirs = getattr(transformers, f"{name}Config")().to_dict()
    family = FAMILIES[theirs["model_type"]]
    widths = {"n_kv_heads", "head_dim"}  # of which another default is another shape
    rows = [row for row in family.fields if row.ours not in widths and row.default is not REQUIRED]
    assert {row.ours: row.default for row in rows if not callable(row.default)} == {
        row.ours: theirs[row.theirs] for row in rows if not callable(row.default)
    }
    if family.rope_base is not None:
        assert theirs["rope_parameters"]["rope_theta"] == family.rope_base


@pytest.mark.slow
def test_base_models_without_prefix_are_read(tmp_path: Path):
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors().items()}
    run = load_run(import_run(write(tmp_path / "model", weights=bare), tmp_path / "run")[0])
    np.testing.assert_array_equal(run.params["embedding"]["W_E"], bare["embed_tokens.weight"])


QWEN: dict[str, Any] = {"model_type": "qwen2", "architectures": None}
BAD_CONFIGS = {
    "model_type is 'mamba'": {"model_type": "mamba"},
    "first of architectures is 'LlamaForSequenceClassification'": {"architectures": ["LlamaForSequenceClassification"]},
    "checkpoint is quantised .'gptq'.": {"quantization_config": {"quant_method": "gptq"}},
    "rope_type of rope_parameters or rope_scaling is 'axial'": {"rope_scaling": {"rope_type": "axial", "factor": 2.0}},
    "hidden_act is 'relu'": {"hidden_act": "relu"},
    "mlp_bias is True": {"mlp_bias": True},
    "there is no 'low_freq_factor'": {"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "high_freq_factor": 4.0}},
    "n_heads is 0.*; in the published config, n_heads is num_attention_heads": {"num_attention_heads": 0},
    "d_model is '12'; it must be a whole number": {"hidden_size": "12"},
    "its config implies .283, 16": {"hidden_size": 16, "head_dim": 4},
    "n_blocks is 1000000000000": {"num_hidden_layers": 10**12},
    "n_blocks is 1e.30; it must be a whole number": {"num_hidden_layers": 1e30},
    "there is no n_embd": {"model_type": "gpt2", "architectures": None, "hidden_size": None},
    "no equivalent as a gemma3_text: ZeroDivisionError": {
        "model_type": "gemma3_text",
        "architectures": [],
        "sliding_window_pattern": 0,
    },
    "layer_types is .'linear_attention'.; it must have 1 of": QWEN | {"layer_types": ["linear_attention"]},
    "layer_types is .'full_attention', 'full_attention'.": QWEN | {"layer_types": ["full_attention"] * 2},
    "no sliding_window": QWEN | {"layer_types": ["sliding_attention"]},
    "rope_scaling has full_attention": {"rope_scaling": {"full_attention": {"rope_type": "default"}}},
    "is_causal is None, and only True has": {"is_causal": None},
    "rope.base is 'x'; it must be a number": {"rope_theta": "x"},
    "there is no hidden_size": {"hidden_size": None},
    "no tensor model.layers.1": {"num_hidden_layers": 2},
}


@pytest.mark.parametrize("message", BAD_CONFIGS)
def test_configs_without_equivalent_are_refused(tmp_path: Path, message: str):
    source = write(tmp_path / "model", CONFIG | BAD_CONFIGS[message])
    with pytest.raises(UserError, match=message):
        import_run(source, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def published(model_type: str, **changes: Any) -> Any:
    """Return our config for `CONFIG` of another family with two blocks, and changes; one of None is left out."""
    theirs = CONFIG | {"model_type": model_type, "architectures": None, "num_hidden_layers": 2, "head_dim": K} | changes
    return read_config({name: value for name, value in theirs.items() if value is not None})


def test_rope_scaling_takes_precedence_over_rope_parameters_as_in_transformers():
    saved = {"rope_type": "default", "rope_theta": 300.0}
    linear = {"rope_type": "linear", "factor": 2.0}
    both = published("llama", rope_theta=None, rope_parameters=saved, rope_scaling=linear)
    assert both.rope == RoPE(10_000.0, 2.0)  # that of `saved` is replaced, too
    assert published("llama", rope_parameters=saved, rope_scaling=linear).rope.base == CONFIG["rope_theta"]
    assert published("llama", rope_parameters=saved, rope_scaling={}).rope.base == 300.0
    for scaling in ({"rope_type": "axial", "factor": 2.0}, {"type": "proportional", "factor": 2.0}):
        with pytest.raises(
            UserError, match=r"rope_type of rope_parameters or rope_scaling is '(axial|proportional)', not one"
        ):
            published("llama", rope_parameters=saved, rope_scaling=scaling)
    llama3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = published("llama", rope_scaling=llama3).rope.scaling
    assert scaling == Llama3Scaling(2.0, 1.0, 4.0, CONFIG["max_position_embeddings"])
    outer = published("llama", rope_scaling=llama3, original_max_position_embeddings=8)
    assert outer.rope.scaling.original_context == 8
    gemma = published("gemma3_text", rope_scaling=linear, rope_parameters={"full_attention": saved}, sliding_window=5)
    assert (gemma.rope, {kind.rope for kind in gemma.attention}) == (RoPE(300.0, 2.0), {RoPE(10_000.0)})


def test_windows_and_kinds_of_layers_are_those_of_the_family():
    kinds = {"layer_types": ["sliding_attention", "full_attention"]}
    full, local = BlockAttention(), BlockAttention(4096)
    assert published("mistral").attention == (local,) and published("mixtral").attention == (full,)
    assert published("mistral", **kinds).attention == (local,)
    assert published("llama", sliding_window=5, **kinds).attention == (full,)
    assert published("qwen2", **kinds, use_sliding_window=True).block_windows == (4096, 32)
    assert published("qwen2").attention == (full,)
    gemma = published("gemma3_text", **kinds)
    assert gemma.attention == (BlockAttention(4096, RoPE(10_000.0)), full)
    local = gemma.attention[0]  # in every block but the sixth
    assert published("gemma3_text", num_hidden_layers=26).attention == (*(local,) * 5, full)
    theirs = CONFIG | {"model_type": "mistral", "architectures": None, "sliding_window": None}
    assert read_config(theirs).attention == (full,)


def test_other_names_of_a_field_take_precedence():
    gpt2 = {"n_embd": 12, "n_layer": 1, "n_head": 3, "vocab_size": V, "model_type": "gpt2"}
    assert read_config(gpt2).n_heads == 3 and read_config(gpt2 | {"num_attention_heads": 2}).n_heads == 2


def test_classes_are_in_the_order_of_their_ids():
    names = {str(i): f"class {i}" for i in reversed(range(11))}
    assert class_names({"id2label": names}) == [f"class {i}" for i in range(11)]
    assert class_names({"num_labels": 3, "id2label": None}) == ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert class_names({}) == ["LABEL_0", "LABEL_1"]
    bert = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "num_attention_heads": H}
    bert |= {"vocab_size": V, "hidden_size": D, "num_hidden_layers": 1, "intermediate_size": F}
    assert read_config(bert | {"num_labels": 3}).n_classes == 3
    with pytest.raises(UserError, match=r"id2label is .'x': 'y'. .invalid literal for int"):
        read_config(bert | {"id2label": {"x": "y"}})


def test_a_whole_file_of_weights_takes_precedence_over_an_index(tmp_path: Path):
    source, whole = write(tmp_path / "model", shards=3), tensors()
    whole["lm_head.weight"] = whole["lm_head.weight"] + 1
    numpy_files.save_file(whole, source / "model.safetensors")
    for file in source.glob("model-0000*"):
        file.unlink()  # nothing of them is read
    np.testing.assert_array_equal(ModelFolder.open(source).read("lm_head.weight"), whole["lm_head.weight"])


def break_shard(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-7])


def pickle(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")


BROKEN = {
    "model-00002-of-00003.safetensors is missing or corrupt .Error while deserializing": break_shard,
    "model-00002-of-00003.safetensors is missing or corrupt .No such file": lambda folder: (
        folder / "model-00002-of-00003.safetensors"
    ).unlink(),
    "has neither model.safetensors nor .*; convert pickled weights": pickle,
    "config.json cannot be read .*No such file": lambda folder: (folder / "config.json").unlink(),
    "config.json cannot be read": lambda folder: (folder / "config.json").write_text("{"),
    "config.json cannot be read .it is not an object": lambda folder: (folder / "config.json").write_text("[1]"),
    "has an adapter": lambda folder: (folder / "adapter_config.json").write_text("{}"),
    "has no tokenizer.json": lambda folder: (folder / "tokenizer.json").unlink(),
    "tokenizer.json is not a readable tokenizer": lambda folder: (folder / "tokenizer.json").write_text("{}"),
    "has a token 4,000,000,000; ids must be below 16,777,216": lambda folder: (folder / "tokenizer.json").write_text(
        (folder / "tokenizer.json").read_text().replace('"vocab":{', '"vocab":{"zzq":4000000000,')
    ),
    "has no tensor lm_head.weight": lambda folder: (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "model-00002-of-00003.safetensors"}})
    ),
}


@pytest.mark.parametrize("message", BROKEN)
def test_broken_folders_are_one_sentence_and_leave_nothing(tmp_path: Path, message: str):
    source = write(tmp_path / "model", shards=3)
    BROKEN[message](source)
    with pytest.raises(UserError, match=message):
        import_run(source, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_tensors_that_do_not_fit_are_refused(tmp_path: Path):
    weights, query = tensors(), "model.layers.0.self_attn.q_proj.weight"
    for number, (changes, message) in enumerate(
        [
            ({query: np.zeros((H * K, D + 1), np.float32)}, rf"shape \({H * K}, {D + 1}\), but its config implies"),
            ({query: np.zeros((H * K, D), np.int8)}, "is I8, and quantised weights are not supported"),
            ({"model.layers.0.mamba.A_log": np.zeros(3, np.float32)}, "has a tensor model.layers.0.mamba.A_log"),
        ]
    ):
        source = write(tmp_path / str(number), weights=weights | changes)
        with pytest.raises(UserError, match=message):
            import_run(source, tmp_path / "run")


def test_tokenizers_with_more_tokens_than_rows_are_refused(tmp_path: Path):
    weights = {name: w[:270] if w.shape[0] == V else w for name, w in tensors().items()}
    source = write(tmp_path / "model", CONFIG | {"vocab_size": 270}, weights)
    with pytest.raises(UserError, match="has 280 tokens, but the model embeds 270"):
        import_run(source, tmp_path / "run")


@pytest.mark.slow
def test_special_tokens_without_a_row_are_left_out(tmp_path: Path):
    weights = {name: w[:280] if w.shape[0] == V else w for name, w in tensors().items()}
    source = write(tmp_path / "model", CONFIG | {"vocab_size": 280}, weights)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    added = tokenizer["added_tokens"]
    added.append({**added[0], "id": 280, "content": "<image_soft_token>"})  # as Gemma 3 1B has
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    run = load_run(import_run(source, tmp_path / "run")[0])
    assert run.tokenizer is not None
    assert run.tokenizer.vocab_size == 280
    added[-1]["special"] = False
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="has 281 tokens, but the model embeds 280"):
        import_run(source, tmp_path / "other")


@pytest.mark.parametrize(
    ("config", "generation", "message"),
    [
        ({"eos_token": "<|im_end|>"}, None, r"has no end-of-text token <\|im_end\|>"),
        ({}, {"eos_token_id": [0, 280]}, "has no token 0, 280, which the model's config names as its eos_token_id"),
        ({"chat_template": "{{ messages }}<|im_end|>"}, None, r"lacks <\|im_end\|>, which its chat template writes"),
        ({"chat_template": "{{ bos_token }}", "bos_token": "<|im_end|>"}, None, "lacks bos_token, which its chat"),
        ({"post_processor": True}, None, r"has no token 280, which its post-processor \(TemplateProcessing\) adds"),
    ],
)
def test_special_tokens_that_texts_need_are_refused_without_a_row(
    tmp_path: Path, config: dict[str, Any], generation: Any, message: str
):
    weights = {name: w[:280] if w.shape[0] == V else w for name, w in tensors().items()}
    source = write(tmp_path / "model", CONFIG | {"vocab_size": 280}, weights)
    inner = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    inner.add_special_tokens(["<|im_end|>"])
    if config.pop("post_processor", False):
        tokens = [("<|im_end|>", 280)]
        inner.post_processor = processors.TemplateProcessing(single="<|im_end|> $A", special_tokens=tokens)
    inner.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    if generation is not None:
        (source / "generation_config.json").write_text(json.dumps(generation))
    said = rf"without its tokens from 280 on, which the model does not embed, the tokenizer of .* {message}"
    with pytest.raises(UserError, match=said):
        import_run(source, tmp_path / "run")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no model is named; give a folder with config.json and safetensors, a GGUF file, or smollm2"),
        (["nowhere"], "nowhere does not exist; name a folder with config.json and safetensors, or a GGUF file"),
        (["weights.bin"], "weights.bin is no GGUF file; name one, or a folder with config.json and safetensors"),
        (["ggufs"], "ggufs has no config.json; name its GGUF file, such as ggufs/a.gguf"),
        (["model", "--context-length", "33"], "--context-length is 33; the model has 32 positions; omit it"),
        (["model", "--context-length", "0"], "context-length is 0; it must be at least 1"),
        (["model", "--mesh", "fsdp=3"], "needs fsdp 3 x data 2 = 6 devices, but there are 8; change --mesh"),
    ],
)
def test_wrong_arguments_are_one_sentence(tmp_path: Path, monkeypatch: Any, capsys: Any, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"")
    (tmp_path / "ggufs").mkdir()
    (tmp_path / "ggufs/a.gguf").write_bytes(b"")
    write(tmp_path / "model")
    assert main(["import", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


def leaves(tree: Any) -> list[np.ndarray]:
    """Return the arrays of a tree."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


@pytest.mark.slow
def test_an_import_holds_one_tensor_beside_the_shards_of_the_parameters(
    tmp_path: Path, monkeypatch: Any, imported: Run
):
    source, tensors_read, held = write(tmp_path / "model", shards=2), list[Any](), {}
    maps, read = Path("/proc/self/maps"), ModelFolder.read

    def watched(published: ModelFolder, name: str) -> np.ndarray:
        assert all(tensor() is None for tensor in tensors_read)  # those of earlier parameters
        tensor = read(published, name)
        tensors_read.append(weakref.ref(tensor))
        assert not maps.exists() or str(source) not in maps.read_text()
        return tensor

    def watched_create(*args: Any, params: Any, **options: Any) -> Path:
        held.update(flatten_dict(jax.tree.map(lambda x: (x.shape, x.addressable_data(0).shape), params), sep="."))
        return create_run(*args, params=params, **options)

    monkeypatch.setattr(ModelFolder, "read", watched)
    monkeypatch.setattr(jaxformer.interop.run, "create_run", watched_create)
    folder, _ = import_run(source, tmp_path / "run", mesh=make_mesh("fsdp=4,tensor=2"))
    assert len(tensors_read) == len(SHAPES)
    assert held["blocks_0.mlp.W_gate_1"] == ((D, F), (D // 4, F // 2))
    assert held["blocks_0.attention.W_Q"] == ((D, H, K), (D // 4, H, K))
    jax.tree.map(np.testing.assert_array_equal, load_run(folder).params, imported.params)


@pytest.mark.slow
def test_training_begins_with_published_parameters_on_any_mesh(tmp_path: Path):
    source = write(tmp_path / "model", weights=tensors(ml_dtypes.bfloat16))
    expected = leaves(load_run(import_run(source, tmp_path / "run")[0]).params)
    pretrained = pretrained_model(source)
    assert pretrained.config is not None
    config = replace(pretrained.config, init_from=str(source))
    setup = TrainSetup(config, make_mesh("fsdp=2,tensor=2", jax.devices()[:4]), pretrained)
    state = setup.init_state()
    for actual, parameter in zip(leaves(state.params), expected, strict=True):
        np.testing.assert_array_equal(actual, parameter)
    assert jax.tree.map(lambda x: x.sharding, state) == setup.state_shardings


def test_init_from_refuses_pickled_weights_before_anything_is_written(tmp_path: Path, monkeypatch: Any, capsys: Any):
    monkeypatch.chdir(tmp_path)
    pickle(write(tmp_path / "model"))
    assert main(["train", "--init-from", "model"]) == 2
    assert "convert pickled weights, which would run code when they are read" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def sampled(capsys: Any, *options: str) -> dict[str, Any]:
    """Return the row of the text that `sample` prints."""
    capsys.readouterr()
    assert main(["sample", "--run", "run", "--jsonl", *options]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.slow
def test_rows_beyond_the_tokenizer_are_never_drawn(tmp_path: Path, monkeypatch: Any, capsys: Any):
    monkeypatch.chdir(tmp_path)
    weights = tensors()
    weights["model.norm.weight"][:] = 1.0
    weights["lm_head.weight"][280:] *= 50  # their logits are far above, or far below, all others
    import_run(write(tmp_path / "model", weights=weights), tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert apply(run.model, run.params, np.arange(9)).argmax(-1).max() >= 280
    for options in (["--temperature", "1"], ["--num-beams", "2"], ["--draft", "lookup"]):
        tokens = sampled(capsys, "--max-new-tokens", "9", *options)["tokens"]
        assert tokens and max(tokens) < 280


@pytest.mark.slow
def test_each_of_several_ends_of_text_ends_a_text(tmp_path: Path, monkeypatch: Any, capsys: Any):
    monkeypatch.chdir(tmp_path)
    source = write(tmp_path / "model")
    import_run(source, tmp_path / "run")
    tokens = sampled(capsys, "--max-new-tokens", "6", "--temperature", "0")["tokens"]
    later = next(token for token in tokens if token != tokens[0])
    (source / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": tokens[0]}))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, later]}))  # which takes precedence
    shutil.rmtree(tmp_path / "run")
    import_run(source, tmp_path / "run")
    row = sampled(capsys, "--max-new-tokens", "6", "--temperature", "0")
    assert row["ended"] != "length" and len(row["tokens"]) <= tokens.index(later) + 1 < 6


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("</s>", "eos_token_id of .* is '</s>'; it must be an id"),
        ([True], "eos_token_id of .* is .True."),
        (2**32, "tokenizer.json has no token 4294967296, which"),
        (281, "tokenizer.json has no token 281, which the model's config names as its eos_token_id"),
    ],
)
def test_ends_of_text_that_are_no_tokens_are_refused(tmp_path: Path, value: Any, message: str):
    source = write(tmp_path / "model", CONFIG | {"eos_token_id": value})
    with pytest.raises(UserError, match=message):
        import_run(source, tmp_path / "run")


JUNK = [None, -1, 0, 1.5, 1e308, "x", "", [], {}, True, [1], ["a"], {"a": 1}, 2**70, [[]], "\ud800", [None], [{}]]
"""Values of other types than a published file has."""
PUBLISHED: dict[str, Any] = {
    "config.json": CONFIG | {"eos_token_id": [0, 280], "layer_types": ["full_attention"], "head_dim": K},
    "generation_config.json": {"eos_token_id": [0, 280]},
    "tokenizer_config.json": {
        "eos_token": "<|im_end|>", "bos_token": {"content": "<|endoftext|>", "lstrip": False},
        "chat_template": "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
        "extra_special_tokens": ["<x>"],
        "added_tokens_decoder": {"280": {"content": "<|im_end|>", "special": True, "lstrip": False}},
    },
    "special_tokens_map.json": {"eos_token": "<|im_end|>", "additional_special_tokens": ["<y>"]},
}  # fmt: skip


def mutate(rng: np.random.Generator, value: Any) -> Any:
    """Return a JSON value with one part of it removed or replaced."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.2:
        return JUNK[rng.integers(len(JUNK))]
    keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = keys[rng.integers(len(keys))]
    if rng.random() < 0.2:
        value.pop(key)
    else:
        value[key] = mutate(rng, value[key])
    return value


@pytest.mark.slow
def test_files_with_values_of_other_types_are_read_or_refused_in_one_sentence(tmp_path: Path):
    source = write(tmp_path / "model", shards=2)
    files = {file.name: json.loads(file.read_text()) for file in source.glob("*.json")} | PUBLISHED
    outcomes: Counter[tuple[str, bool]] = Counter()
    for seed in range(200):
        rng = np.random.default_rng(seed)
        for name, value in files.items():
            (source / name).write_text(json.dumps(value))
        name = sorted(files)[rng.integers(len(files))]
        if name == "special_tokens_map.json":
            (source / "tokenizer_config.json").unlink()  # which supersedes it
        changed = mutate(rng, json.loads(json.dumps(files[name])))
        (source / name).write_text(json.dumps(changed))
        try:
            published = open_published(source)
            config = read_config(published.config)
            tokenizer = load_published_tokenizer(published, config)
            tokenizer.decode(tokenizer.encode_prompt("a\n é 🙂"))
            assert tokenizer.special_tokens and tokenizer.ends_of_text
            outcomes[name, True] += 1
        except UserError as error:
            assert "\n" not in str(error), (seed, name)
            outcomes[name, False] += 1
    assert {(name, False) for name in files} <= outcomes.keys() and sum(n for (_, x), n in outcomes.items() if x) > 50
