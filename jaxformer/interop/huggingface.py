"""Export of a run to a folder that transformers, vLLM and other libraries read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxformer.data.tokenizer import END_IDS
from jaxformer.interop.formats import Dtype
from jaxformer.interop.output import cast, complete_path, save_safetensors
from jaxformer.interop.publish import publish, special_tokens
from jaxformer.runs.run import TOKENIZER, Run


def export_huggingface(run: Run, folder: Path, dtype: Dtype = "float32") -> None:
    """Write a run to a new folder in the layout of the published family that its model belongs to. Raises `UserError`
    if the folder exists, safetensors is not installed, or no family has an equivalent for a part of the model."""
    published = publish(run)
    _, tokenizer = run.text_model()
    special = special_tokens(tokenizer)
    ids = {"bos_token_id": special.bos, "eos_token_id": list(special.eos) if special.eos[1:] else special.eos[0]}
    own = {name: value for name, value in tokenizer.config.items() if name != END_IDS}
    with complete_path(folder) as scratch:
        scratch.mkdir()
        arrays = {name: cast(name, tensor, dtype) for name, tensor in published.tensors}
        save_safetensors(arrays, scratch / "model.safetensors", {"format": "pt"})
        # Versions of transformers before 5 read torch_dtype, later ones dtype.
        _write_json(scratch / "config.json", published.config | ids | {"dtype": dtype, "torch_dtype": dtype})
        _write_json(scratch / "generation_config.json", ids | {"pad_token_id": special.eos[0]})
        tokenizer.save(scratch / TOKENIZER)
        _write_json(scratch / "tokenizer_config.json", {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": special.bos_text, "eos_token": special.eos_text,
            "pad_token": special.eos_text, "model_max_length": published.n_positions,
            "clean_up_tokenization_spaces": False, **own,
        })  # fmt: skip


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
