"""Cases of tests/interop/test_families.py: tiny models of each published family, and what varies in them."""

import shutil
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import jax
import numpy as np
import pytest

from jaxformer.data.pairs import TargetTokens
from jaxformer.decode import Sampling, translate_tokens
from jaxformer.errors import UserError
from jaxformer.inspect import attention_maps, named_attention_maps
from jaxformer.interop import export_run
from jaxformer.interop.obstacles import resolved
from jaxformer.interop.run import pretrained_model
from jaxformer.models.encoder_decoder import EncoderDecoderConfig
from jaxformer.ops.losses import negative_log_likelihood
from jaxformer.runs.run import Run, abstract_params
from tests.interop.published import SHAPES, their_greedy, their_logits, write

TOKENS = np.random.default_rng(3).integers(10, 270, 40)
"""More than any window or original context below."""
N_NEW = 32
RATE = 2.0**10
"""Learning rate of the step that shows a gradient of theirs: so large that the rounding of parameters loses little."""

Differences = dict[str, float]
"""Largest difference from transformers, relative to the largest value there, by what is compared."""


def relative(ours: Any, theirs: Any) -> float:
    """Return the largest difference divided by the largest magnitude of theirs."""
    theirs = np.asarray(theirs)
    assert np.shape(ours) == theirs.shape
    return float(np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max())


def tree_difference(ours: Any, theirs: Any) -> float:
    """Return the largest `relative` difference of the leaves."""
    return max(jax.tree.leaves(jax.tree.map(relative, ours, theirs)))


def imported(folder: Path) -> tuple[Any, Any]:
    """Return our config and parameters of a published folder."""
    pretrained = pretrained_model(folder)
    return pretrained.model, pretrained.load(abstract_params(pretrained.model.build()))


def imported_run(folder: Path) -> Run:
    """Return the import of a published folder, without writing it, which test_import.py checks."""
    pretrained = pretrained_model(folder)
    model = pretrained.model.build()
    params = pretrained.load(abstract_params(model))
    return Run(folder, pretrained.config, model, params, pretrained.tokenizer, step=0, sampling=pretrained.sampling)


def exported_again(run: Run, folder: Path) -> float:
    """Return how much the parameters of a run differ after an export to transformers and the import of it, of the same
    config."""
    export_run(run, "hf", folder)
    model, params = imported(folder)
    assert resolved(model) == resolved(run.config.model)
    return max(jax.tree.leaves(jax.tree.map(relative, params, run.params)))


def after_step(theirs: Any, loss: Any, folder: Path) -> Any:
    """Return our parameters of a torch model after a step of gradient descent with the learning rate `RATE`."""
    import torch

    loss.backward()
    torch.optim.SGD(theirs.parameters(), lr=RATE).step()
    after = Path(f"{folder}-after")
    theirs.save_pretrained(after)
    shutil.copy(folder / "tokenizer.json", after)
    return imported(after)[1]


def gradient_difference(grads: Any, before: Any, after: Any) -> float:
    """Return the largest difference of a gradient from that of their step, relative to the largest of its parameter, or
    to a hundredth of the largest of all: a step is rounded to the last bit of a parameter, and some gradients, such as
    that of the bias of keys without positions, are 0 but for rounding."""
    steps = jax.tree.map(lambda old, new: (np.asarray(old) - np.asarray(new)) / RATE, before, after)
    sizes = jax.tree.map(lambda step: np.abs(step).max(), steps)
    least = 1e-2 * max(jax.tree.leaves(sizes))
    differences = jax.tree.map(lambda g, step, size: np.abs(g - step).max() / max(size, least), grads, steps, sizes)
    return float(max(jax.tree.leaves(differences)))


def likeliest(run: Run, prompt_T: np.ndarray, text_T: np.ndarray) -> list[int]:
    """Return the likeliest token after a prompt and after each token of the text that follows it, through the cache:
    greedy tokens, if the text is these. In parts of one length, whose ops are compiled once for all families."""
    apply = lambda method, *args: run.model.apply({"params": run.params}, *args, method=method)  # noqa: E731
    cache, tokens = run.model.init_cache(len(prompt_T) + len(text_T)), []
    for start, part_T in ((0, prompt_T), (len(prompt_T), text_T)):
        x_TD, cache = apply("extend", part_T, start + np.arange(len(part_T)), cache, np.array(start))
        tokens.append(np.asarray(apply("unembed", x_TD)).argmax(-1))
    return [int(tokens[0][-1]), *map(int, tokens[1][:-1])]


def loss_of(loss: Callable[[Any], tuple[Any, Any]], params: Any, gradient: bool) -> tuple[Any, Any, Any]:
    """Return the value of a loss, what else it returns, and, if asked for, its gradient; else None."""
    if not gradient:
        return *loss(params), None
    (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return value, aux, grads


def compare_decoders(theirs: Any, folder: Path, gradient: bool) -> Differences:
    """Compare a causal language model, a torch module with eager attention, with its import."""
    import torch
    from transformers import AutoModelForCausalLM

    run = imported_run(folder)

    def loss(params: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        logits_TV = run.model.apply({"params": params}, TOKENS)
        # The maps are read here, where the ops of the pass are those of the gradient: compiled already.
        map_HTS = attention_maps(run.model, params, TOKENS)[-1]
        return negative_log_likelihood(logits_TV[:-1], TOKENS[1:]).mean(), (logits_TV, map_HTS)

    out = theirs(torch.tensor(TOKENS)[None], output_attentions=True)
    their_map_HTS = out.attentions[-1][0].detach()
    their_loss = torch.nn.functional.cross_entropy(out.logits[0, :-1], torch.tensor(TOKENS[1:]))
    their_logits_TV, exported = out.logits[0].detach(), Path(f"{folder}-export")
    theirs_N = np.array(their_greedy(theirs, TOKENS.tolist(), len(TOKENS)))
    with jax.disable_jit():  # compiling takes longer
        assert likeliest(run, TOKENS, theirs_N)[:N_NEW] == theirs_N[:N_NEW].tolist()
        value, (logits_TV, map_HTS), grads = loss_of(loss, run.params, gradient)
        found = {
            "logits": relative(logits_TV, their_logits_TV),
            "loss": relative(value, their_loss.detach()),
            "an attention map": relative(map_HTS, their_map_HTS),
        }
        if gradient:
            found["gradient"] = gradient_difference(grads, run.params, after_step(theirs, their_loss, folder))
        assert exported_again(run, exported) < 1e-6  # gains that are stored minus 1 are rounded
    again = AutoModelForCausalLM.from_pretrained(exported)
    return found | {
        f"{N_NEW} greedy tokens": 0.0,
        "logits of the export": relative(their_logits(again, TOKENS), their_logits_TV),
    }


def compare_encoder_decoders(theirs: Any, folder: Path, gradient: bool) -> Differences:
    """Compare an encoder-decoder, a torch module with eager attention, with its import: logits of a source with padding
    and a target."""
    import torch
    from transformers import AutoModelForSeq2SeqLM

    run = imported_run(folder)
    assert run.tokenizer is not None
    source_S, target_T = TOKENS[:24], TOKENS[::-1].copy()
    valid_S, special = np.arange(len(source_S)) < 21, TargetTokens.of(run.tokenizer)
    tensors = {
        "input_ids": torch.tensor(source_S)[None], "attention_mask": torch.tensor(valid_S)[None].long(),
        "decoder_input_ids": torch.tensor(target_T)[None],
    }  # fmt: skip

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        logits_TV = run.model.apply({"params": params}, source_S, valid_S, target_T)
        return negative_log_likelihood(logits_TV[:-1], target_T[1:]).mean(), logits_TV

    out = theirs(**tensors, output_attentions=True)
    their_loss = torch.nn.functional.cross_entropy(out.logits[0, :-1], torch.tensor(target_T[1:]))
    their_logits_TV, exported = out.logits[0].detach(), Path(f"{folder}-export")
    new = {"max_new_tokens": N_NEW, "min_new_tokens": N_NEW - 1}
    ids = theirs.generate(tensors["input_ids"][:, :21], attention_mask=torch.ones(1, 21).long(), do_sample=False, **new)
    [tokens_N] = translate_tokens(
        run.model, run.params, [source_S[:21].tolist()], end_of_text=run.tokenizer.end_of_text, context_length=96,
        max_new_tokens=N_NEW, special=special, sampling=Sampling(temperature=0, min_new_tokens=N_NEW - 1),
    )  # fmt: skip
    assert tokens_N == ids[0, 1 : len(tokens_N) + 1].tolist() and len(tokens_N) >= N_NEW - 1
    assert isinstance(run.config.model, EncoderDecoderConfig)
    n_blocks = run.config.model.n_decoder_blocks

    @jax.jit  # a single program, as compiling takes most of the time
    def compute(params: Any) -> tuple[Any, ...]:
        value, logits_TV, grads = loss_of(loss, params, gradient)
        maps = named_attention_maps(run.model, params, source_S, valid_S, target_T)
        encoded_SD = run.model.apply({"params": params}, source_S, valid_S, method="encode")
        return value, logits_TV, grads, maps[f"decoder_blocks.{n_blocks - 1}.cross_attention"], encoded_SD

    value, logits_TV, grads, crossing_HTS, encoded_SD = compute(run.params)
    if gradient and "b_out" in grads:  # which they do not train
        grads["b_out"] = np.zeros_like(grads["b_out"])
    found = {
        "encoder's output": relative(encoded_SD[valid_S], out.encoder_last_hidden_state[0, valid_S].detach()),
        "logits": relative(logits_TV, their_logits_TV),
        "loss": relative(value, their_loss.detach()),
        "an attention map": relative(crossing_HTS, out.cross_attentions[-1][0].detach()),
    }
    if gradient:
        found["gradient"] = gradient_difference(grads, run.params, after_step(theirs, their_loss, folder))
    found |= {f"{N_NEW} greedy tokens": 0.0}
    if run.config.model.fairseq_sinusoids:
        with pytest.raises(UserError, match="fairseq_sinusoids True"):
            export_run(run, "hf", exported)
        return found
    assert exported_again(run, exported) == 0
    again = AutoModelForSeq2SeqLM.from_pretrained(exported).eval()
    assert TargetTokens.of(pretrained_model(exported).tokenizer) == special
    with torch.no_grad():
        again_TV = again(**tensors).logits[0]
    return found | {"logits of the export": relative(again_TV, their_logits_TV)}


VALID = np.arange(len(TOKENS)) < 34
SCALE = 1024.0
"""Factor of the loss of encoders, so that a step is larger than the rounding of parameters."""
FORMS = ("Model", "ForSequenceClassification", "ForTokenClassification")
"""Forms of encoders besides masked language models."""


def encoded(model: Any, params: Any) -> jax.Array:
    """Return the output of an encoder for `TOKENS`, of which the last are padding."""
    output: jax.Array = model.apply({"params": params}, TOKENS, VALID)
    return output[VALID] if output.ndim == 2 else output


def encoded_by(theirs: Any, **options: Any) -> Any:
    """Return the outputs of a torch encoder for `TOKENS`, of which the last are padding."""
    import torch

    tokens, valid = torch.tensor(TOKENS)[None], torch.tensor(VALID.astype(int))[None]
    return theirs(tokens, attention_mask=valid, **options)


def compare_encoders(theirs: Any, folder: Path, gradient: bool) -> Differences:
    """Compare a masked language model, a torch module with eager attention, and another form of its family, with their
    imports; the folder is named by the index of the variation."""
    import torch
    import transformers

    run = imported_run(folder)
    model, kind = run.model, theirs.config.model_type
    is_shared = kind == "albert"

    def loss(params: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        logits_NV = encoded(model, params)
        map_HTS = attention_maps(model, params, TOKENS, VALID)[-1]
        return SCALE * negative_log_likelihood(logits_NV, TOKENS[VALID]).mean(), (logits_NV, map_HTS)

    out = encoded_by(theirs, output_attentions=True)
    their_logits_NV = out.logits[0][VALID]
    their_loss = SCALE * torch.nn.functional.cross_entropy(their_logits_NV, torch.tensor(TOKENS[VALID]))
    with jax.disable_jit():  # compiling takes longer
        value, (logits_NV, map_HTS), grads = loss_of(loss, run.params, gradient)
        if gradient and is_shared:  # their gradient is the sum of those of our copies
            blocks = [grads[name] for name in grads if name.startswith("blocks_")]
            total = jax.tree.map(lambda *leaves: sum(leaves), *blocks)
            grads = {name: total if name.startswith("blocks_") else leaf for name, leaf in grads.items()}
        found = {
            "logits": relative(logits_NV, their_logits_NV.detach()),
            "loss": relative(value, their_loss.detach()),
            "an attention map": relative(map_HTS[:, VALID], out.attentions[-1][0].detach()[:, VALID]),
        }
        if gradient:
            found["gradient"] = gradient_difference(grads, run.params, after_step(theirs, their_loss, folder))
        form = FORMS[(int(folder.name) + len(kind)) % len(FORMS)]
        theirs.config.num_labels = 3
        other = getattr(transformers, type(theirs).__name__.replace("ForMaskedLM", form))(theirs.config).eval()
        write(Path(f"{folder}-other"), other)
        config, params = imported(Path(f"{folder}-other"))
        expected = encoded_by(other)[0][0].detach()
        if form == "Model":
            pooled = expected[VALID].mean(0)
            expected = pooled / pooled.norm()
        elif form == "ForTokenClassification":
            expected = expected[VALID]
        found["another form"] = relative(encoded(config.build(), params), expected)
        exported = Path(f"{folder}-export")
        if is_shared:
            with pytest.raises(UserError, match="has no equivalent"):
                export_run(run, "hf", exported)
            return found
        export_run(run, "hf", exported)
        config, params = imported(exported)
        assert np.array_equal(encoded(config.build(), params), logits_NV)
    again = encoded_by(transformers.AutoModelForMaskedLM.from_pretrained(exported).eval()).logits[0][VALID]
    return found | {"logits of the export": relative(again.detach(), their_logits_NV.detach())}


@dataclass(frozen=True)
class Case:
    """A family.

    Attributes:
      models: published models of it, for the table.
      base: fields of its tiny config besides `published.SHAPES`.
      choices: values of fields from which variations are drawn, each independently; `...` for that of the base. The
        first ones should have the shapes of other families, whose compiled programs are then shared.
      compare: function that compares a torch model with the import of its folder, the gradient only if asked for, and
        returns the largest differences.
    """

    models: str
    base: Mapping[str, Any] = field(default_factory=dict)
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    compare: Callable[[Any, Path, bool], Differences] = compare_decoders

    def variation(self, i: int) -> dict[str, Any]:
        """Return the i-th variation: the first values for 0, and else a draw for each field by itself."""
        drawn = {name: x[0] if i == 0 else Random(f"{name} {i}").choice(x) for name, x in self.choices.items()}
        # A copy, since some config classes of transformers change the nested ones that they are given.
        return deepcopy({**self.base, **{name: x for name, x in drawn.items() if x is not ...}})


FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 300.0, "factor": 3.0}
LLAMA_CHOICES: dict[str, tuple[Any, ...]] = {
    "rms_norm_eps": (4e-6, 1e-2), "tie_word_embeddings": (True, False), "head_dim": (4, 10),
    "num_key_value_heads": (2, 1, 6), "rope_parameters": (LLAMA3, ..., LINEAR),
}  # fmt: skip
LAYERS = {"encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "decoder_attention_heads": 6}
STACKS: dict[str, tuple[Any, ...]] = {"encoder_layers": (1, 2), "decoder_layers": (1, 2)}
YARN = {"rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 300.0, "short_factor": [1.0, 2.0], "long_factor": [1.5, 3.0],
    "original_max_position_embeddings": 4,
}  # fmt: skip
PARTIAL = {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 1.0}
OLMO_CHOICES: dict[str, tuple[Any, ...]] = {
    "tie_word_embeddings": (False, True), "head_dim": (4, 10), "num_key_value_heads": (2, 1, 6),
    "rope_parameters": (YARN, ..., LINEAR), "attention_bias": (False, True),
}  # fmt: skip
EXPERTS = {"num_experts": 3, "moe_intermediate_size": 40}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "num_hidden_layers": 3}

BERT_CHOICES: dict[str, tuple[Any, ...]] = {
    "hidden_act": (..., "gelu_new", "relu", "gelu"), "layer_norm_eps": (1e-12, 1e-3), "num_hidden_layers": (2, 3),
    "type_vocab_size": (1, 2),
}  # fmt: skip

CASES: dict[str, Case] = {
    "Llama": Case("Llama 1 to 3.3, SmolLM2, TinyLlama", {}, LLAMA_CHOICES | {"attention_bias": (True, False)}),
    "Mistral": Case("Mistral 7B, Codestral 22B", {}, LLAMA_CHOICES | {"sliding_window": (7, None)}),
    "Mixtral": Case(
        "Mixtral 8x7B and 8x22B",
        {"num_local_experts": 3},
        LLAMA_CHOICES | {"num_experts_per_tok": (1, 2), "sliding_window": (None, 7)},
    ),
    "Qwen2": Case("Qwen 1.5 to 2.5, 0.5B to 72B", QWEN_WINDOW, LLAMA_CHOICES | {"max_window_layers": (0, 1, 3)}),
    "Qwen3": Case("Qwen 3, 0.6B to 32B", QWEN_WINDOW, LLAMA_CHOICES | {"attention_bias": (False, True)}),
    "Gemma3": Case(
        "Gemma 3, 270M and 1B",
        {"sliding_window": 9, "num_hidden_layers": 3, "layer_types": [FULL, SLIDING, SLIDING], "head_dim": 4},
        {
            "rms_norm_eps": (1e-5, 1e-2), "tie_word_embeddings": (True, False), "num_key_value_heads": (2, 1),
            "final_logit_softcapping": (5.0, None), "query_pre_attn_scalar": (9, 4), "attention_bias": (False, True),
            "rope_parameters": (..., {FULL: LINEAR, SLIDING: {"rope_type": "default", "rope_theta": 30.0}}),
        },
    ),
    "Gemma": Case(
        "Gemma 1, 2B and 7B",
        {"head_dim": 4},
        {
            "rms_norm_eps": (4e-6, 1e-2), "tie_word_embeddings": (True, False), "num_key_value_heads": (2, 1),
            "hidden_act": ("gelu_pytorch_tanh", "gelu"), "attention_bias": (False, True), "head_dim": (4, 10),
            "rope_parameters": (YARN, LINEAR, LLAMA3),
        },
    ),
    "Gemma2": Case(
        "Gemma 2, 2B to 27B",
        {"head_dim": 4, "sliding_window": 7},
        {
            "rms_norm_eps": (4e-6, 1e-2), "tie_word_embeddings": (True, False), "num_key_value_heads": (2, 1),
            "attn_logit_softcapping": (2.0, None, 50.0), "final_logit_softcapping": (5.0, None),
            "query_pre_attn_scalar": (9, 4), "attention_bias": (False, True), "rope_parameters": (..., LINEAR),
            "layer_types": (..., [FULL, SLIDING]),
        },
    ),
    "Ministral": Case(
        "Ministral 8B", {"sliding_window": 7}, LLAMA_CHOICES | {"layer_types": ([FULL, SLIDING], ..., [SLIDING, FULL])}
    ),
    "Olmo": Case("OLMo 1, 1B and 7B", {}, OLMO_CHOICES),
    "Olmo2": Case("OLMo 2, 1B to 32B", {}, OLMO_CHOICES | {"rms_norm_eps": (4e-6, 1e-2)}),
    "Olmo3": Case(
        "OLMo 3, 7B and 32B",
        {"sliding_window": 7},
        OLMO_CHOICES
        | {
            "rms_norm_eps": (4e-6, 1e-2), "layer_types": ([SLIDING, FULL], ..., [FULL, FULL]),
            "rope_parameters": ({FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 500.0}}, ...),
        },
    ),
    "SmolLM3": Case(
        "SmolLM3 3B",
        {"sliding_window": 7, "pad_token_id": 0},
        LLAMA_CHOICES
        | {
            "no_rope_layers": ([1, 0], [0, 1], [1, 1]), "use_sliding_window": (False, True),
            "attention_bias": (False, True), "rope_parameters": (YARN, ..., LLAMA3),
        },
    ),
    "Granite": Case(
        "Granite 3 and 4 dense, 1B to 8B",
        {},
        LLAMA_CHOICES
        | {
            "embedding_multiplier": (12.0, 1.0), "residual_multiplier": (0.25, 1.5), "logits_scaling": (8.0, 0.5),
            "attention_multiplier": (0.125, 0.7), "attention_bias": (False, True),
        },
    ),
    "Phi3": Case(
        "Phi-3 mini and medium, Phi-4 and Phi-4-mini",
        {"original_max_position_embeddings": 4, "pad_token_id": 0},
        {
            "rms_norm_eps": (4e-6, 1e-2), "tie_word_embeddings": (False, True), "num_key_value_heads": (2, 1, 6),
            "sliding_window": (None, 7),
            "rope_parameters": (LONGROPE, {"rope_type": "default", "partial_rotary_factor": 0.5}, ...),
        },
    ),
    "Glm4": Case(
        "GLM-4-0414, 9B and 32B",
        {"pad_token_id": 0},
        LLAMA_CHOICES
        | {"attention_bias": (True, False), "head_dim": (4, 8), "rope_parameters": (..., PARTIAL, LINEAR)},
    ),
    "Qwen3Moe": Case(
        "Qwen 3, 30B-A3B and 235B-A22B",
        EXPERTS,
        LLAMA_CHOICES
        | {
            "num_experts_per_tok": (2, 1), "norm_topk_prob": (True, False), "attention_bias": (False, True),
            "use_sliding_window": (False, True), "sliding_window": (7,),
        },
    ),
    "Qwen2Moe": Case(
        "Qwen 1.5 MoE, Qwen 2 57B-A14B",
        {**EXPERTS, "shared_expert_intermediate_size": 36},
        LLAMA_CHOICES
        | {
            "num_experts_per_tok": (2, 1), "norm_topk_prob": (False, True), "qkv_bias": (True, False),
            "use_sliding_window": (False, True), "sliding_window": (7,), "max_window_layers": (1, 2),
        },
    ),
    "GptOss": Case(
        "gpt-oss 20B and 120B",
        {"num_local_experts": 3, "sliding_window": 7},
        LLAMA_CHOICES
        | {
            "num_experts_per_tok": (2, 1), "attention_bias": (True, False), "layer_types": (..., [FULL, SLIDING]),
            "rope_parameters": ({**YARN, "truncate": False}, ..., LINEAR),
        },
    ),
    "DeepseekV3": Case(
        "DeepSeek V3 and R1, Moonlight 16B-A3B, in bfloat16",
        {
            "num_key_value_heads": 6, "qk_rope_head_dim": 4, "moe_intermediate_size": 40, "n_routed_experts": 4,
            "topk_group": 1,
        },
        {
            "rms_norm_eps": (4e-6, 1e-2), "tie_word_embeddings": (False, True), "q_lora_rank": (12, None),
            "kv_lora_rank": (12, 10), "qk_nope_head_dim": (4, 6), "v_head_dim": (4, 5),
            "num_experts_per_tok": (2, 1), "norm_topk_prob": (True, False), "n_shared_experts": (2, 1),
            "first_k_dense_replace": (1, 0), "routed_scaling_factor": (2.5, 1.0), "n_group": (2, 1),
            "rope_parameters": ({**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}, YARN, ...),
        },
    ),
    "Gemma3WithImages": Case(
        "Gemma 3, 4B to 27B, without images",
        {
            "text_config": {**SHAPES, "head_dim": 4, "sliding_window": 9, "layer_types": [FULL, SLIDING]},
            "vision_config": {
                "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                "image_size": 16, "patch_size": 8,
            },
            "mm_tokens_per_image": 4,
        },
        {"tie_word_embeddings": (True,)},
    ),
    "GPT2": Case(
        "GPT-2, 124M to 1.6B, DistilGPT2",
        {"n_embd": 24, "n_layer": 2, "n_head": 6, "n_positions": 96, "hidden_size": 24, "num_key_value_heads": None},
        {
            "tie_word_embeddings": (True, False), "n_inner": (None, 44), "layer_norm_epsilon": (1e-5, 1e-2),
            "activation_function": ("gelu_new", "gelu", "relu"), "n_head": (6, 3),
        },
    ),
    "Marian": Case(
        "opus-mt, Tatoeba challenge",
        {**LAYERS, "pad_token_id": 289, "decoder_start_token_id": 289},
        {
            **STACKS, "scale_embedding": (True, False), "activation_function": ("swish", "gelu", "relu"),
            "forced_eos_token_id": (0, None),
        },
        compare_encoder_decoders,
    ),
    "Bart": Case(
        "BART base and large, also for summaries; DistilBART",
        {**LAYERS, "pad_token_id": 1, "decoder_start_token_id": 2},
        {
            **STACKS, "scale_embedding": (False, True), "activation_function": ("gelu", "relu", "gelu_new"),
            "forced_bos_token_id": (5, None),
        },
        compare_encoder_decoders,
    ),
    "M2M100": Case(
        "M2M100 418M and 1.2B, NLLB-200 600M to 3.3B",
        {**LAYERS, "pad_token_id": 1, "decoder_start_token_id": 2},
        {
            **STACKS, "scale_embedding": (True, False), "activation_function": ("relu", "gelu", "gelu_new"),
            "forced_bos_token_id": (5, None),
        },
        compare_encoder_decoders,
    ),
    "T5": Case(
        "T5 and Flan-T5, small to 11B",
        {"d_kv": 4, "d_ff": 40, "decoder_start_token_id": 3, "pad_token_id": 3, "num_hidden_layers": 1},
        {
            # With more blocks in the decoder than in the encoder, version 5 of transformers cannot generate.
            "num_decoder_layers": (1,), "num_hidden_layers": (1, 2),
            "feed_forward_proj": ("gated-gelu", "relu", "gated-silu", "gelu"),
            "tie_word_embeddings": (False, True), "relative_attention_num_buckets": (8, 32),
            "relative_attention_max_distance": (20, 128, 40), "layer_norm_epsilon": (1e-6, 1e-2), "d_kv": (4, 6),
        },
        compare_encoder_decoders,
    ),
    **{
        name: Case(models, base, BERT_CHOICES | choices, compare_encoders)
        for name, models, base, choices in (
            ("Bert", "BERT, MiniLM, BGE, E5, GTE", {"pad_token_id": 0}, {}),
            ("Roberta", "RoBERTa, DistilRoBERTa", {"pad_token_id": 1, "type_vocab_size": 1}, {}),
            ("XLMRoberta", "XLM-R base and large, multilingual E5, BGE-M3", {"pad_token_id": 1}, {}),
            ("Electra", "ELECTRA small, base and large", {"pad_token_id": 0}, {"embedding_size": (40, 24)}),
            ("Albert", "ALBERT base to xxlarge", {"pad_token_id": 0}, {"embedding_size": (40, 16)}),
        )
    },
    "DistilBert": Case(
        "DistilBERT",
        {"dim": 24, "n_heads": 6, "n_layers": 2, "hidden_dim": 40, "pad_token_id": 0},
        {"activation": ("gelu", "relu"), "sinusoidal_pos_embds": (False, True), "n_layers": (2, 3)},
        compare_encoders,
    ),
    "ModernBert": Case(
        "ModernBERT base and large",
        {"num_hidden_layers": 4, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 6},
        {
            "norm_eps": (1e-5, 1e-2), "norm_bias": (False, True), "attention_bias": (False, True),
            "classifier_bias": (False, True), "classifier_pooling": ("mean", "cls"), "local_attention": (6, 7, 1),
            "hidden_activation": ("gelu", "gelu_pytorch_tanh"), "classifier_activation": ("gelu", "relu"),
            "global_attn_every_n_layers": (3, 2, 1),
            "rope_parameters": (..., {FULL: LINEAR, SLIDING: {"rope_type": "default", "rope_theta": 30.0}}),
        },
        compare_encoders,
    ),
}  # fmt: skip
"""Cases by the name of the family in `published.CLASSES`."""


LAYER_NORM_CHOICES: dict[str, tuple[Any, ...]] = {"tie_word_embeddings": (False, True), "layer_norm_eps": (1e-5, 1e-2)}
BY_N_EMBD = {"layer_norm_epsilon": (1e-5, 1e-2), "tie_word_embeddings": (True, False)}
CASES |= {
    "GPTNeoX": Case(
        "Pythia, 14M to 12B, GPT-NeoX-20B, Dolly 2",
        {"num_attention_heads": 3},
        LAYER_NORM_CHOICES | {
            "use_parallel_residual": (True, False), "attention_bias": (True, False),
            "hidden_act": ("gelu", "gelu_fast"),
            "rope_parameters": (..., {**LINEAR, "partial_rotary_factor": 0.5}, {"rope_theta": 30.0}),
        },
    ),
    "GPTJ": Case(
        "GPT-J-6B",
        {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 96, "hidden_size": 24, "num_key_value_heads": None},
        BY_N_EMBD | {"rotary_dim": (4, 2, 8), "n_inner": (None, 44), "activation_function": ("gelu_new", "relu")},
    ),
    "Phi": Case(
        "Phi-1, 1.5 and 2",
        {},
        LAYER_NORM_CHOICES | {
            "num_key_value_heads": (2, None, 1), "hidden_act": ("gelu_new", "gelu"),
            "rope_parameters": (..., {**LINEAR, "partial_rotary_factor": 1.0}),
        },
    ),
    "StableLm": Case(
        "StableLM 2 1.6B, StableLM 3B, Stable Code 3B",
        {"num_attention_heads": 3},
        LAYER_NORM_CHOICES | {
            "use_parallel_residual": (False, True), "use_qkv_bias": (True, False), "num_key_value_heads": (1, 3),
            "rope_parameters": (..., {**LLAMA3, "partial_rotary_factor": 0.5}),
        },
    ),
    "Falcon": Case(
        "Falcon 7B, 11B, 40B and 180B",
        {},
        BY_N_EMBD | {
            "new_decoder_architecture": (True, False), "num_kv_heads": (2, 3), "num_ln_in_parallel_attn": (None, 1),
            "bias": (False, True), "ffn_hidden_size": (None, 44), "multi_query": (True,), "parallel_attn": (True,),
        },
    ),
    "Bloom": Case("BLOOM and BLOOMZ, 560M to 176B", {}, BY_N_EMBD | {"num_attention_heads": (6, 8, 3)}),
    "OPT": Case(
        "OPT, 125M to 66B but 350M",
        {"ffn_dim": 40},
        {
            "tie_word_embeddings": (True, False), "enable_bias": (True, False), "do_layer_norm_before": (True, False),
            "layer_norm_elementwise_affine": (True, False), "activation_function": ("relu", "gelu"),
            "_remove_final_layer_norm": (False, True),
        },
    ),
    "Starcoder2": Case(
        "StarCoder 2, 3B to 15B",
        {},
        {
            "tie_word_embeddings": (True, False), "norm_epsilon": (1e-5, 1e-2), "sliding_window": (7, None),
            "use_bias": (True, False), "num_key_value_heads": (2, 1, 6), "rope_parameters": (..., LINEAR, LLAMA3),
        },
    ),
    "Cohere": Case(
        "Command R and R+, Aya 23 and Expanse",
        {},
        LAYER_NORM_CHOICES | {
            "use_qk_norm": (True, False), "attention_bias": (False, True), "logit_scale": (0.0625, 2.0),
            "num_key_value_heads": (2, 1, 6), "rope_parameters": (..., LINEAR),
        },
    ),
    "Cohere2": Case(
        "Command R7B and A",
        {"sliding_window": 7, "num_hidden_layers": 3},
        LAYER_NORM_CHOICES | {
            "layer_types": ([SLIDING, SLIDING, FULL], ..., [FULL, SLIDING, FULL]), "attention_bias": (False, True),
            "logit_scale": (0.0625, 2.0), "num_key_value_heads": (2, 1, 6), "rope_parameters": (..., LINEAR),
        },
    ),
}  # fmt: skip
