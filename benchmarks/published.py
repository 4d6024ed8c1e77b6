"""Greedy generation with SmolLM2-135M, from its package: jaxformer in all weight formats, transformers, llama.cpp."""

from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.harness import Figures

TEXT = "The General Assembly proclaims this Universal Declaration as a common standard of achievement. " * 9


def resident_bytes() -> int:
    """Return the physical memory of this process."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmRSS:")[1].split()[0])


def jaxformer(folder: Path, B: int, prompt: int, new: int, weights: Any) -> tuple[Any, Figures]:
    """Continue a prompt in B rows; a step generates the whole continuation of all rows."""
    import jax
    import numpy as np

    from jaxformer.cli import machine
    from jaxformer.decode.batches import MIN_ROWS_PER_DEVICE, spread_rows
    from jaxformer.decode.generation import generate_tokens
    from jaxformer.decode.samplers import Sampling
    from jaxformer.decode.weights import lay_out, store
    from jaxformer.interop.packages import find_model
    from jaxformer.interop.run import import_run
    from jaxformer.models.decoder import DecoderConfig
    from jaxformer.runs.run import load_run

    machine.set_up(B, rows_per_device=MIN_ROWS_PER_DEVICE)
    if not (folder / "smollm2").exists():
        import_run(find_model("smollm2"), folder / "smollm2")
    run = load_run(folder / "smollm2", convert=lambda part, model: lay_out(store(part, weights, model), model))
    machine.release_freed_memory()
    (config, tokenizer), model = run.text_model(), run.model
    assert isinstance(config, DecoderConfig)
    params = spread_rows(run.params, B)
    prompts = [tokenizer.encode(TEXT)[:prompt]] * B

    def complete() -> np.ndarray:
        pieces = generate_tokens(
            model, params, prompts, Sampling(temperature=0), [0] * B, max_new_tokens=new,
            context_length=config.n_positions,
        )  # fmt: skip
        return np.concatenate([piece.tokens for piece in pieces], axis=1)

    tokens_BN = complete()
    n_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    cached = 4 * 2 * config.n_blocks * config.kv_heads * config.width_of_head  # keys and values in float32
    return lambda _: complete()[0, -1], {
        "_tokens": tokens_BN.tolist(), "_dtype": weights, "tokens": B * new, "weights_bytes": n_bytes,
        "memory_bytes": resident_bytes(), "bytes_per_step": n_bytes + int(B * cached * (prompt + new / 2)),
    }  # fmt: skip


def transformers(folder: Path, B: int, prompt: int, new: int) -> tuple[Any, Figures]:
    """Continue the same prompt with Hugging Face's `generate`, from the same dequantised weights in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from jaxformer.interop.packages import find_model

    torch.set_num_threads(record.cores())
    file = find_model("smollm2")
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype="float32").eval()
    tokens_BP = torch.tensor([AutoTokenizer.from_pretrained(**source).encode(TEXT)[:prompt]] * B)
    options = {"max_new_tokens": new, "do_sample": False, "use_cache": True, "eos_token_id": None, "pad_token_id": 0}

    @torch.inference_mode()
    def complete() -> torch.Tensor:
        return model.generate(tokens_BP, attention_mask=torch.ones_like(tokens_BP), **options)[:, prompt:]

    tokens_BN = complete()
    return lambda _: complete()[0, -1], {"_tokens": tokens_BN.tolist(), "memory_bytes": resident_bytes()}


def llama_cpp(folder: Path, B: int, prompt: int, new: int) -> tuple[Any, Figures]:
    """Continue the same prompt with llama.cpp, from the original file, whose matrices are in Q4_1."""
    import xllamacpp

    from jaxformer.interop.packages import find_model

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(find_model("smollm2")), 1024, 1, False
    params.cpuparams.n_threads, params.verbosity = record.cores(), 0
    server = xllamacpp.Server(params)
    text = {"prompt": TEXT, "n_predict": 1}
    n = server.handle_completions(text)["usage"]["prompt_tokens"]
    request = {
        "prompt": TEXT[: len(TEXT) * prompt // n], "n_predict": new, "temperature": 0, "cache_prompt": False,
        "ignore_eos": True,
    }  # fmt: skip
    complete = partial(server.handle_completions, request)

    def step(_: int) -> int:
        usage = complete()["usage"]
        assert usage["completion_tokens"] == new, usage
        return new

    step(0)
    return step, {"memory_bytes": resident_bytes()}
