"""A process that continues prompts with Hugging Face `generate` when asked: see `decode` and `processes`.

    python benchmarks/decode_hf.py FOLDER BATCH

It needs torch, transformers and NumPy, and neither JAX nor jaxformer.
"""

import json
import sys
from pathlib import Path

import numpy as np
import record
import torch
from processes import serve
from transformers import GPT2Config, GPT2LMHeadModel


def translate(weights: dict[str, np.ndarray], n_blocks: int) -> dict[str, torch.Tensor]:
    """jaxformer's parameters by the names that transformers has for them."""
    named = {
        "wte.weight": weights["embedding.W_E"],
        "wpe.weight": weights["embedding.W_pos"],
        "ln_f.weight": weights["final_norm.gamma"],
        "ln_f.bias": weights["final_norm.beta"],
    }
    for i in range(n_blocks):
        of = {name.removeprefix(f"blocks_{i}."): w for name, w in weights.items() if name.startswith(f"blocks_{i}.")}
        D = of["attention.W_O"].shape[-1]
        qkv = [of[f"attention.W_{x}"].reshape(D, -1) for x in "QKV"]
        biases = [of[f"attention.b_{x}"].reshape(-1) for x in "QKV"]
        named |= {
            f"h.{i}.{name}": w
            for name, w in {
                "ln_1.weight": of["attention_norm.gamma"],
                "ln_1.bias": of["attention_norm.beta"],
                "attn.c_attn.weight": np.concatenate(qkv, axis=1),
                "attn.c_attn.bias": np.concatenate(biases),
                "attn.c_proj.weight": of["attention.W_O"].reshape(-1, D),
                "attn.c_proj.bias": of["attention.b_O"],
                "ln_2.weight": of["mlp_norm.gamma"],
                "ln_2.bias": of["mlp_norm.beta"],
                "mlp.c_fc.weight": of["mlp.W_1"],
                "mlp.c_fc.bias": of["mlp.b_1"],
                "mlp.c_proj.weight": of["mlp.W_2"],
                "mlp.c_proj.bias": of["mlp.b_2"],
            }.items()
        }
    return {f"transformer.{name}": torch.from_numpy(w.copy()) for name, w in named.items()}


def main(folder: Path, batch_size: int) -> None:
    """Set up as one does with transformers, make one text to compare, and serve."""
    job = json.loads((folder / "job.json").read_text())
    shape, on_gpu = job["shape"], job["device"] == "gpu"
    torch.set_num_threads(record.cores())
    config = GPT2Config(
        vocab_size=shape["vocab_size"], n_positions=shape["context_length"], n_embd=shape["d_model"],
        n_layer=shape["n_blocks"], n_head=shape["n_heads"], n_inner=shape["d_ff"], bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    weights = dict(np.load(folder / "weights.npz"))
    missing, unexpected = model.load_state_dict(translate(weights, shape["n_blocks"]), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    options: dict = {"max_new_tokens": job["new"], "do_sample": False, "use_cache": True}
    if on_gpu:
        model = model.to("cuda", torch.bfloat16)
        options["cache_implementation"] = "static"  # transformers then compiles the decode step itself
    prompts = torch.from_numpy(np.load(folder / f"prompts_{batch_size}.npy").astype(np.int64)).to(model.device)
    seen = torch.ones_like(prompts)

    @torch.inference_mode()
    def run() -> torch.Tensor:
        return model.generate(prompts, attention_mask=seen, **options)[:, job["prompt"] :]

    run()
    serve(
        lambda taken: run()[0, -1],
        tokens=run().tolist(),
        versions=record.versions("torch", "transformers"),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
