"""Configs of published models mean what they mean in transformers: each field alone and in pairs, built in, written by
hand and removed, gives equal outputs or a refusal that names it."""

import json
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxformer.errors import UserError
from jaxformer.interop.run import pretrained_model
from jaxformer.runs.run import abstract_params
from tests.interop.published import CLASSES, publish

pytestmark = [  # transformers warns of older fields
    pytest.mark.slow, *(pytest.mark.filterwarnings(f"ignore::{kind}Warning") for kind in ("Future", "Deprecation")),
]  # fmt: skip

REMOVED = object()
"""Value of a field that is taken out of a config."""
LINEAR = {"rope_type": "linear", "factor": 3.0}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0}
ROPES: list[Any] = [
    {"rope_type": "default", "rope_theta": 300.0}, {"rope_theta": 300.0}, LINEAR, {"type": "linear", "factor": 3.0},
    {**LINEAR, "rope_theta": 300.0}, {**LLAMA3, "original_max_position_embeddings": 16}, LLAMA3, {},
    {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 16}, {"type": "dynamic", "factor": 2.0},
    {"full_attention": {"rope_type": "default", "rope_theta": 300.0}, "sliding_attention": {"rope_theta": 30.0}},
    {"full_attention": LINEAR}, {"sliding_attention": LINEAR}, {**LINEAR, "partial_rotary_factor": 0.5},
]  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"
VALUES: dict[str, list[Any]] = {
    "vocab_size": [300], "hidden_size": [48], "n_embd": [48], "intermediate_size": [56], "n_inner": [56],
    "num_hidden_layers": [1, 3], "n_layer": [1], "num_attention_heads": [3, 12], "n_head": [3],
    "num_key_value_heads": [1, 6, None], "head_dim": [6, None], "max_position_embeddings": [64], "n_positions": [64],
    "hidden_act": ["relu", "gelu", "swish", "gelu_new", "gelu_pytorch_tanh"], "hidden_activation": ["silu", "relu"],
    "activation_function": ["relu", "gelu", "gelu_pytorch_tanh", "silu"], "rms_norm_eps": [0.03],
    "layer_norm_eps": [0.03], "layer_norm_epsilon": [0.03], "tie_word_embeddings": [True, False],
    "attention_bias": [True], "mlp_bias": [True], "rope_parameters": ROPES, "rope_scaling": ROPES,
    "rope_theta": [300.0], "rope_local_base_freq": [30.0], "partial_rotary_factor": [0.5],
    "original_max_position_embeddings": [32], "sliding_window": [3, None], "use_sliding_window": [True, False],
    "max_window_layers": [0, 2], "sliding_window_pattern": [2, 1], "layer_types": [[FULL, SLIDING], [SLIDING] * 2],
    "attention_chunk_size": [3], "num_local_experts": [2], "num_experts": [2], "num_experts_per_tok": [1],
    "query_pre_attn_scalar": [9], "final_logit_softcapping": [0.5, None], "attn_logit_softcapping": [0.5],
    "use_bidirectional_attention": [True], "type_vocab_size": [1, 3], "is_decoder": [True], "is_causal": [False],
    "add_cross_attention": [True], "scale_attn_weights": [False], "scale_attn_by_inverse_layer_idx": [True],
    "reorder_and_upcast_attn": [True], "position_embedding_type": ["relative_key"], "pad_token_id": [7, None],
    "id2label": [{"0": "a", "1": "b", "2": "c", "3": "d"}, {"1": "b", "0": "a", "2": "c"}], "label2id": [{"a": 0}],
    "num_labels": [3, 4], "problem_type": ["regression"], "is_encoder_decoder": [True], "n_ctx": [32],
    "chunk_size_feed_forward": [3], "per_layer_config": [{"0": {"attention_dropout": 0.3}}, {}],
    "transformers_weights": ["other.safetensors"], "configuration_files": [["config.4.0.0.json"]],
    "architectures": [None, ["OtherModel"]], "dtype": ["bfloat16"], "torch_dtype": ["float16"],
    "attn_implementation": ["eager"], "summary_type": ["first"], "eos_token_id": [5, [5, 6], None],
    "bos_token_id": [5], "summary_activation": ["tanh"], "transformers_version": ["4.30.0"], "pretraining_tp": [2],
    "output_hidden_states": [True], "return_dict": [False], "gradient_checkpointing": [True],
    "tie_encoder_decoder": [True], "auto_map": [{"AutoConfig": "x.Y"}], "_name_or_path": ["x"], "embedding_size": [9],
}  # fmt: skip
"""Other values of fields; of those of the config classes that are not listed, a number is another and a bool not."""
FIELDS_OF_BASES: dict[str, dict[str, Any]] = {
    "Llama": {}, "Mistral": {"sliding_window": 5}, "Mixtral": {"num_local_experts": 3},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "Qwen3": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "head_dim": 6},
    "Gemma3": {"sliding_window": 5, "layer_types": [SLIDING, FULL], "head_dim": 6, "query_pre_attn_scalar": 5},
    "GPT2": {}, "Bert": {}, "BertModel": {}, "BertClassifier": {"num_labels": 3},
    "Roberta": {"pad_token_id": 1}, "RobertaModel": {"pad_token_id": 1},
    "RobertaClassifier": {"pad_token_id": 1, "num_labels": 3},
}  # fmt: skip
"""Fields of the model that others are drawn from, by family."""
OLDER: dict[str, dict[str, Any]] = {
    "Gemma3": {"rope_parameters": REMOVED, "layer_types": REMOVED, "rope_theta": 200.0, "rope_local_base_freq": 20.0},
    "": {"rope_parameters": REMOVED, "layer_types": REMOVED, "rope_theta": 200.0},
}
"""What changes a config to that of an older version of transformers."""
DECODERS = {"hidden_act", "is_causal", "rope_parameters", "rope_scaling"}
ENCODERS = {"is_decoder", "position_embedding_type"}
REFUSED: dict[str, set[str]] = {
    "Llama": {"hidden_act", "is_causal", "rope_parameters", "architectures", "tie_word_embeddings"},
    "Mistral": DECODERS, "Mixtral": DECODERS,
    "Qwen2": DECODERS | {"architectures"}, "Qwen3": DECODERS,
    "Gemma3": {
        "rope_parameters", "is_causal", "hidden_activation", "use_bidirectional_attention", "attn_logit_softcapping",
    },
    "GPT2": {"scale_attn_weights", "scale_attn_by_inverse_layer_idx", "n_head", "is_causal"},
    "Bert": ENCODERS | {"hidden_act"}, "BertModel": ENCODERS,
    "BertClassifier": ENCODERS | {"architectures", "num_attention_heads", "hidden_act", "problem_type"},
    "Roberta": ENCODERS | {"architectures", "num_attention_heads"},
    "RobertaModel": ENCODERS | {"num_attention_heads"},
    "RobertaClassifier": ENCODERS | {"architectures", "problem_type"},
}  # fmt: skip
"""Fields that are refused alone, in some of the values drawn: numbers of heads where they are missing."""
WITHOUT_EFFECT = {
    "_name_or_path", "attention_dropout", "attention_probs_dropout_prob", "attn_implementation", "attn_pdrop",
    "auto_map", "bos_token_id", "chunk_size_feed_forward", "classifier_dropout", "dtype", "embd_pdrop",
    "embedding_size", "eos_token_id", "gradient_checkpointing", "hidden_dropout_prob", "id2label", "initializer_range",
    "is_encoder_decoder", "label2id", "max_position_embeddings", "n_ctx", "n_positions", "output_attentions",
    "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp", "problem_type",
    "reorder_and_upcast_attn", "resid_pdrop", "return_dict", "router_aux_loss_coef", "router_jitter_noise",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "tie_encoder_decoder", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
"""Fields that change no output of any family."""
TOKENS = np.random.default_rng(1).integers(10, 270, 12)
MAX_DRAWS = 200

Changes = dict[str, Any]


@dataclass
class Outcomes:
    """What became of the draws of a family."""

    counts: Counter[str] = field(default_factory=Counter)
    refused: set[str] = field(default_factory=set)
    """Fields that were refused alone."""
    effect: set[str] = field(default_factory=set)
    """Fields that changed the outputs alone."""
    wrong: list[Any] = field(default_factory=list)


def draws(family: str, published: Changes, of_class: dict[str, Any]) -> list[tuple[str, Changes]]:
    """Return `MAX_DRAWS` changes, of one field and then of two, each with the way that it is made: built into the
    model, or written into the config of the base, of this or an older version."""
    values = {name: [not x if isinstance(x, bool) else x + 1] for name, x in of_class.items() if type(x) in (int, bool)}
    values |= {name: [0.5] for name, x in of_class.items() if type(x) is float} | VALUES
    single = [("built", {name: x}) for name in of_class if name in values for x in values[name]]
    single += [("written", {name: x}) for name in values for x in values[name]]
    single += [(way, {name: REMOVED}) for way in ("written", "older") for name in published if name != "model_type"]
    single += [("older", {name: x}) for name in values if "rope" in name or "layer" in name for x in values[name]]
    if family in ("Bert", "Roberta"):  # without architectures, an encoder has no head, whatever class reads it
        single = [(way, x) for way, x in single if x not in ({"architectures": None}, {"architectures": REMOVED})]
    random = np.random.default_rng(sum(map(ord, family)))
    single = [single[i] for i in random.permutation(len(single))]
    # Each field once, then further values of fields, then pairs; in an order of which each part is a fair sample.
    first = {next(iter(changes)): i for i, (_, changes) in reversed([*enumerate(single)])}
    chosen = [single[i] for i in first.values()]
    chosen += [draw for i, draw in enumerate(single) if i not in first.values()][: max(0, 140 - len(chosen))]
    while len(chosen) < MAX_DRAWS:
        (way, one), (other, two) = (single[i] for i in random.integers(len(single), size=2))
        if way == other and one.keys() != two.keys():
            chosen.append((way, one | two))
    return [chosen[i] for i in random.permutation(MAX_DRAWS)]


def changed(config: Changes, changes: Changes) -> Changes:
    return {name: x for name, x in (config | changes).items() if x is not REMOVED}


def their_output(family: str, folder: Path, tokens_T: np.ndarray = TOKENS) -> np.ndarray | None:
    """Return the output of transformers; None if it does not load the folder, or only parts of it."""
    import torch
    import transformers

    model_class = getattr(transformers, CLASSES.get(family, ("", f"{family}ForCausalLM"))[1])
    try:
        model, info = model_class.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        ignored = {name for name in info["missing_keys"] if "pooler" in name}
        if info["missing_keys"] - ignored or info["unexpected_keys"] or info["mismatched_keys"]:
            return None
        with torch.no_grad():
            out = model.eval()(torch.tensor(tokens_T)[None], return_dict=True)
        output = (out.last_hidden_state.mean(1) if family.endswith("tModel") or family == "RobertaModel" else out[0])[0]
    except Exception:  # whatever its layers raise
        return None
    output = output.numpy()
    if family.endswith("Model"):
        output = output / np.linalg.norm(output)
    return output if np.isfinite(output).all() else None


def our_output(folder: Path, tokens_T: np.ndarray = TOKENS) -> np.ndarray:
    """Return the output of the imported model."""
    pretrained = pretrained_model(folder)
    model = pretrained.model.build()
    params = pretrained.load(abstract_params(model))
    return np.asarray(model.apply({"params": params}, tokens_T))


@pytest.mark.parametrize("family", FIELDS_OF_BASES)
def test_configs_mean_what_they_mean_in_transformers(family: str, tmp_path: Path, request: pytest.FixtureRequest):
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    base = FIELDS_OF_BASES[family]
    publish(tmp_path / "base", family, **base)
    published = json.loads((tmp_path / "base" / "config.json").read_text())
    config_class = getattr(transformers, CLASSES.get(family, (f"{family}Config",))[0])
    of_class = {name: x for name, x in config_class().to_dict().items() if name != "model_type"}
    outcomes, outputs = Outcomes(), {"written": their_output(family, tmp_path / "base")}
    outputs["older"] = outputs["written"]
    if "rope_parameters" in published:
        shutil.copytree(tmp_path / "base", tmp_path / "older")
        (tmp_path / "older" / "config.json").write_text(json.dumps(changed(published, OLDER.get(family, OLDER[""]))))
        outputs["older"] = their_output(family, tmp_path / "older")
    assert all(output is not None for output in outputs.values())
    all_draws = draws(family, published, of_class)
    chosen = all_draws[:: MAX_DRAWS // request.config.getoption("--config-draws")]
    with jax.disable_jit():
        for i, (way, changes) in enumerate(chosen):
            folder = tmp_path / str(i)
            check(family, way, changes, folder, tmp_path / "base", published, outputs, outcomes)
            shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{family}: {len(chosen)} draws, {dict(outcomes.counts)}, refused: {sorted(outcomes.refused)}")
    assert not outcomes.wrong
    assert outcomes.counts["equal"] >= (len(chosen) // 2 if len(chosen) == MAX_DRAWS else 1)  # few may be rejected
    expected = REFUSED[family]
    assert outcomes.refused == expected if len(chosen) == MAX_DRAWS else outcomes.refused <= expected
    assert not outcomes.effect & WITHOUT_EFFECT


@pytest.mark.parametrize("family", ["Mistral", "Qwen2", "Qwen3", "Gemma3"])
def test_windows_of_configs_without_their_length_are_those_of_transformers(family: str, tmp_path: Path):
    small = {
        "hidden_size": 8,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_hidden_layers": 1,
    }
    enabled = {"use_sliding_window": True, "max_window_layers": 0} if "Qwen" in family else {}
    publish(tmp_path / "model", family, max_position_embeddings=5000, **small, **enabled)
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    assert config.pop("sliding_window") == 4096
    file.write_text(json.dumps(config))
    tokens_T = np.random.default_rng(2).integers(10, 270, 4200)
    theirs = their_output(family, tmp_path / "model", tokens_T)
    size = np.abs(theirs).max()
    np.testing.assert_allclose(our_output(tmp_path / "model", tokens_T) / size, theirs / size, rtol=0, atol=1e-4)
    file.write_text(json.dumps(config | {"sliding_window": 5000}))
    assert np.abs(their_output(family, tmp_path / "model", tokens_T) - theirs).max() > 1e-2 * size


def check(
    family: str, way: str, changes: Changes, folder: Path, base: Path, published: Changes, expected: Any, out: Outcomes
) -> None:  # fmt: skip
    """Count the outcome of a draw."""
    if way == "built":
        try:
            publish(folder, family, **FIELDS_OF_BASES[family] | changes)
        except Exception:  # transformers cannot build it
            out.counts["rejected"] += 1
            return
    else:
        shutil.copytree(base, folder)
        older = OLDER.get(family, OLDER[""]) if way == "older" else {}
        (folder / "config.json").write_text(json.dumps(changed(published, older | changes)))
    theirs, key = their_output(family, folder), next(iter(changes)) if len(changes) == 1 else None
    try:
        ours, refusal = our_output(folder), ""
    except UserError as error:
        ours, refusal = None, str(error)
    except Exception as error:
        out.wrong.append((way, changes, "raises", repr(error)))
        return
    if theirs is None:
        out.counts["rejected"] += 1
    elif ours is not None and ours.shape == theirs.shape and np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max():
        out.counts["equal"] += 1
        if key and way in expected and np.abs(theirs - expected[way]).max() > 1e-5 * np.abs(theirs).max():
            out.effect.add(key)
    elif ours is None and any(name in refusal for name in changes):
        out.counts["refused"] += 1
        out.refused |= {key} - {None}
    else:
        difference = refusal or (
            np.abs(ours - theirs).max() if ours.shape == theirs.shape else (ours.shape, theirs.shape)
        )
        out.wrong.append((way, {name: "REMOVED" if x is REMOVED else x for name, x in changes.items()}, difference))
