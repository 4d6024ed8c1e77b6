"""Tensors in MXFP4 are those that transformers dequantises."""

from pathlib import Path

import jax
import numpy as np
import pytest

from jaxformer.errors import UserError
from jaxformer.interop.mxfp4 import BLOCKS, SCALES, dequantize
from jaxformer.interop.run import import_run
from jaxformer.runs.run import load_run
from tests.interop.family_cases import imported
from tests.interop.published import publish


def test_numbers_are_dequantized_with_their_exponent_lower_bits_first() -> None:
    blocks, scales = np.zeros((1, 2, 1, 16), np.uint8), np.full((1, 2, 1), 127, np.uint8)
    blocks[0, 0, 0, :2], blocks[0, 1, 0, 15], scales[0, 1, 0] = (0x12, 0xF7), 0xA0, 129
    wanted = np.zeros((1, 32, 2))
    wanted[0, :4, 0], wanted[0, 31, 1] = (1, 0.5, 6, -6), -4
    np.testing.assert_array_equal(dequantize(blocks, scales).astype(np.float32), wanted)


@pytest.mark.slow
def test_a_folder_in_mxfp4_is_imported_as_transformers_dequantises_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    integration = pytest.importorskip("transformers.integrations.mxfp4")
    from safetensors.torch import load_file, save_file

    widths = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
    }
    publish(tmp_path / "model", "GptOss", **widths)
    file = tmp_path / "model/model.safetensors"
    tensors, packed = load_file(file), {}
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        E, D, F = tensors[name].shape
        packed[name + BLOCKS] = torch.randint(256, (E, F, D // 32, 16), dtype=torch.uint8)
        packed[name + SCALES] = torch.randint(120, 128, (E, F, D // 32), dtype=torch.uint8)
        tensors[name] = integration.convert_moe_packed_tensors(packed[name + BLOCKS], packed[name + SCALES])
    save_file(tensors, file, {"format": "pt"})
    wanted = imported(tmp_path / "model")[1]
    save_file({name: x for name, x in tensors.items() if name + BLOCKS not in packed} | packed, file, {"format": "pt"})
    config = tmp_path / "model/config.json"
    config.write_text(config.read_text().replace("{", '{"quantization_config": {"quant_method": "mxfp4"},', 1))
    run = load_run(import_run(tmp_path / "model", tmp_path / "run")[0])
    jax.tree.map(np.testing.assert_array_equal, run.params, wanted)
    config.write_text(config.read_text().replace('"mxfp4"', '"fp8"', 1))
    with pytest.raises(UserError, match=r"quantised .'fp8'."):
        import_run(tmp_path / "model", tmp_path / "other")
