"""Tiny random models of transformers, in folders as they are published."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError
from jaxformer.interop.packages import find_model

TEXTS = ["The cat sees the dog.", "A king likes the sea, and the house finds the cat."]
N_TOKENS = 280

SHAPES: dict[str, Any] = {
    "vocab_size": 291, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 96, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip

BIASES = ("final_logits_bias", "e_score_correction_bias")
"""Ends of names of buffers that are stored as parameters are."""
CLASSES = {
    "GPT2": ("GPT2Config", "GPT2LMHeadModel"), "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "Gemma3WithImages": ("Gemma3Config", "Gemma3ForConditionalGeneration"),
    "ViT": ("ViTConfig", "ViTForImageClassification"), "ViTModel": ("ViTConfig", "ViTModel"),
    "DeiT": ("DeiTConfig", "DeiTForImageClassificationWithTeacher"),
    "DeiTStudent": ("DeiTConfig", "DeiTForImageClassification"),
    "Dinov2": ("Dinov2Config", "Dinov2Model"), "Dinov2Classifier": ("Dinov2Config", "Dinov2ForImageClassification"),
    "CLIP": ("CLIPConfig", "CLIPModel"),
    "Bert": ("BertConfig", "BertForMaskedLM"), "BertModel": ("BertConfig", "BertModel"),
    "BertClassifier": ("BertConfig", "BertForSequenceClassification"),
    "Roberta": ("RobertaConfig", "RobertaForMaskedLM"), "RobertaModel": ("RobertaConfig", "RobertaModel"),
    "RobertaClassifier": ("RobertaConfig", "RobertaForSequenceClassification"),
    "Marian": ("MarianConfig", "MarianMTModel"), "Bart": ("BartConfig", "BartForConditionalGeneration"),
    "T5": ("T5Config", "T5ForConditionalGeneration"),
    "M2M100": ("M2M100Config", "M2M100ForConditionalGeneration"),
    **{name: (f"{name}Config", f"{name}ForMaskedLM")
       for name in ("Albert", "DistilBert", "Electra", "ModernBert", "XLMRoberta")},
}  # fmt: skip
"""Classes of families whose names are others than those of most."""


def publish(folder: Path, family: str, std: float = 0.3, shard_size: str = "5GB", **changes: Any) -> Any:
    """Write a random model of a family of transformers to a folder, with a tokenizer; return it, a torch module."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config_class, model_class = CLASSES.get(family, (f"{family}Config", f"{family}ForCausalLM"))
    config = getattr(transformers, config_class)(**{**SHAPES, **changes})
    model = getattr(transformers, model_class)(config).eval()
    if config.model_type == "t5" and changes.get("tie_word_embeddings") is False:  # as checkpoints have it
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        del model.all_tied_weights_keys["lm_head.weight"]
    return write(folder, model, std, shard_size)


def write(folder: Path, model: Any, std: float = 0.3, shard_size: str = "5GB") -> Any:
    """Write a torch model, with random parameters, to a folder, with a tokenizer; return the model."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    vectors = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(BIASES)]
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *vectors]:
            if name.endswith("embed_positions.weight") and model.config.model_type == "marian":
                continue  # sinusoidal
            gain = "norm" in name and name.endswith("weight")
            # Gains and biases as a training leaves them: neither all one nor all zero.
            parameter.copy_(
                parameter + 0.1 * torch.randn_like(parameter) if gain else std * torch.randn_like(parameter)
            )
    model.save_pretrained(folder, max_shard_size=shard_size)
    Tokenizer.train(TEXTS, N_TOKENS).save(folder / "tokenizer.json")
    return model


def installed_model(name: str) -> Path:
    """Return the file of a model in a package; skip the test, with the command that installs it, without one."""
    try:
        return find_model(name)
    except UserError as missing:
        pytest.skip(str(missing))


def their_logits(model: Any, tokens_T: np.ndarray) -> np.ndarray:
    """Return the logits of a torch model, `(T, V)`."""
    import torch

    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor(tokens_T)[None]).logits[0].numpy()
    return logits


def their_greedy(model: Any, prompt: list[int], n: int) -> list[int]:
    """Return n greedy tokens of a torch model after a prompt."""
    import torch

    ids = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=n,
        min_new_tokens=n, do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    tokens: list[int] = ids[0, len(prompt) :].tolist()
    return tokens
