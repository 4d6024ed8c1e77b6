"""Greedy generation: jaxformer, with all weight formats and speculative decoding, and transformers."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record
from benchmarks.harness import Figures, MeasurementError

AGREEMENT = {"float32": 0.5, "bfloat16": 0.02}
"""Fraction of each text, from its beginning, that must equal the peer's: rounding may decide a near tie, of which
bfloat16 has many, and texts differ from there on."""


def weights(shape: dict[str, int], seed: int = 0) -> dict[str, np.ndarray]:
    """Return a decoder's parameters by dotted name: gains of 1, and matrices large enough that texts do not all
    repeat."""
    L, H, D, F, T, V = (
        shape[n] for n in ("n_blocks", "n_heads", "d_model", "d_ff", "context_length", "vocab_size")
    )  # fmt: skip
    K, rng = D // H, np.random.default_rng(seed)
    shapes = {"embedding.W_E": (V, D), "embedding.W_pos": (T, D), "final_norm.gamma": (D,), "final_norm.beta": (D,)}
    block = {
        "attention_norm.gamma": (D,), "attention_norm.beta": (D,), "mlp_norm.gamma": (D,), "mlp_norm.beta": (D,),
        **{f"attention.W_{x}": (D, H, K) for x in "QKV"}, **{f"attention.b_{x}": (H, 1, K) for x in "QKV"},
        "attention.W_O": (H, K, D), "attention.b_O": (D,),
        "mlp.W_1": (D, F), "mlp.b_1": (F,), "mlp.W_2": (F, D), "mlp.b_2": (D,),
    }  # fmt: skip
    shapes |= {f"blocks_{i}.{name}": each for i in range(L) for name, each in block.items()}
    return {
        name: np.ones(each, np.float32) if name.endswith("gamma") else rng.normal(0, 0.08, each).astype(np.float32)
        for name, each in shapes.items()
    }  # fmt: skip


def prompts(B: int, n: int, vocab_size: int) -> np.ndarray:
    """Return B prompts of n random tokens, int32."""
    return np.random.default_rng(1).integers(0, vocab_size, (B, n)).astype(np.int32)


def jaxformer(
    folder: Path,
    B: int,
    shape: dict[str, int] | str,
    prompt: int,
    new: int,
    weight_format: Any,
    is_speculative: bool = False,
) -> tuple[Any, Figures]:
    """Continue prompts with a decoder of a shape, or of a config's, which then has its own initial parameters; a step
    generates the whole continuation of all prompts."""
    import jax
    import jax.numpy as jnp
    from flax.traverse_util import unflatten_dict

    from jaxformer.cli import machine
    from jaxformer.decode.batches import MIN_ROWS_PER_DEVICE, spread_rows
    from jaxformer.decode.generation import generate_tokens
    from jaxformer.decode.samplers import Sampling
    from jaxformer.decode.speculative import PromptLookup, speculate
    from jaxformer.decode.weights import lay_out, store
    from jaxformer.models.decoder import DecoderConfig
    from jaxformer.ops.masks import EMPTY

    machine.set_up(1 if is_speculative else B, rows_per_device=MIN_ROWS_PER_DEVICE)
    if isinstance(shape, str):
        file, _, name = shape.partition(":")
        config = replace(getattr(import_module(f"configs.{file}"), name).model, context_length=1024)
    else:
        config = DecoderConfig(
            **shape | {"d_ff": (shape["d_ff"],)}, attention_bias=True, activation="gelu", bias=True,  # type: ignore[arg-type]
            norm="layernorm", positions="learned", rope=None, unembedding="tied",
        )  # fmt: skip
    model, platform = config.build(), jax.default_backend()
    if isinstance(shape, str):
        drawn = jax.jit(lambda: model.init(jax.random.key(0), *config.example())["params"])()
    else:
        drawn = unflatten_dict({name: jnp.asarray(w) for name, w in weights(shape).items()}, sep=".")
    params = spread_rows(lay_out(jax.device_put(store(drawn, weight_format, model)), model), B)
    dtype = jnp.float32 if platform == "cpu" else jnp.bfloat16
    tokens_BP = prompts(B, prompt, config.vocab_size)
    complete: Any = partial(generate_tokens, model, params)
    if is_speculative:
        complete = partial(speculate, model, params, PromptLookup(config.vocab_size), {})

    def run() -> list[list[int]]:
        rows: list[list[int]] = [[] for _ in range(B)]
        pieces = complete(
            tokens_BP.tolist(), Sampling(temperature=0), [0] * B, max_new_tokens=new,
            context_length=config.context_length, cache_dtype=dtype,
        )  # fmt: skip
        for piece in pieces:
            for row, tokens in zip(rows, piece.tokens, strict=True):
                row.extend(tokens[tokens != EMPTY].tolist())
        return rows

    cached = 2 * config.n_blocks * config.kv_heads * config.width_of_head * jnp.dtype(dtype).itemsize
    read = sum(
        leaf.nbytes for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if "W_pos" not in jax.tree_util.keystr(path)
    )  # fmt: skip
    return lambda _: run()[0][-1], {
        "_tokens": run(), "tokens": B * new, "_dtype": weight_format,
        "bytes_per_step": read + int(B * cached * (prompt + new / 2)),
    }  # fmt: skip


def transformers(folder: Path, B: int, shape: dict[str, int], prompt: int, new: int) -> tuple[Any, Figures]:
    """Continue the same prompts with Hugging Face's `generate`; on a GPU with a static cache, in bfloat16."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(record.cores())
    config = GPT2Config(
        vocab_size=shape["vocab_size"], n_positions=shape["context_length"], n_embd=shape["d_model"],
        n_layer=shape["n_blocks"], n_head=shape["n_heads"], n_inner=shape["d_ff"], bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    named = {name: torch.from_numpy(w) for name, w in translate(weights(shape), shape["n_blocks"]).items()}
    missing, unexpected = model.load_state_dict(named, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "use_cache": True}
    if torch.cuda.is_available():
        model = model.to("cuda", torch.bfloat16)
        options["cache_implementation"] = "static"  # transformers then compiles the decode step itself
    tokens_BP = torch.from_numpy(prompts(B, prompt, shape["vocab_size"]).astype(np.int64)).to(model.device)
    mask_BP = torch.ones_like(tokens_BP)

    @torch.inference_mode()
    def run() -> torch.Tensor:
        return model.generate(tokens_BP, attention_mask=mask_BP, **options)[:, prompt:]

    run()
    return lambda _: run()[0, -1], {"_tokens": run().tolist()}


def translate(parameters: dict[str, np.ndarray], n_blocks: int) -> dict[str, np.ndarray]:
    """Return jaxformer's parameters by their names in transformers."""
    named = {
        "wte.weight": parameters["embedding.W_E"], "wpe.weight": parameters["embedding.W_pos"],
        "ln_f.weight": parameters["final_norm.gamma"], "ln_f.bias": parameters["final_norm.beta"],
    }  # fmt: skip
    same = {
        "ln_1.weight": "attention_norm.gamma", "ln_1.bias": "attention_norm.beta", "attn.c_proj.bias": "attention.b_O",
        "ln_2.weight": "mlp_norm.gamma", "ln_2.bias": "mlp_norm.beta", "mlp.c_fc.weight": "mlp.W_1",
        "mlp.c_fc.bias": "mlp.b_1", "mlp.c_proj.weight": "mlp.W_2", "mlp.c_proj.bias": "mlp.b_2",
    }  # fmt: skip
    for i in range(n_blocks):
        of = {name.removeprefix(f"blocks_{i}."): w for name, w in parameters.items()}
        D = of["attention.W_O"].shape[-1]
        block = {theirs: of[ours] for theirs, ours in same.items()} | {
            "attn.c_attn.weight": np.concatenate([of[f"attention.W_{x}"].reshape(D, -1) for x in "QKV"], axis=1),
            "attn.c_attn.bias": np.concatenate([of[f"attention.b_{x}"].reshape(-1) for x in "QKV"]),
            "attn.c_proj.weight": of["attention.W_O"].reshape(-1, D),
        }
        named |= {f"h.{i}.{name}": w for name, w in block.items()}
    return {f"transformer.{name}": w for name, w in named.items()}


def memory(folder: Path, **_: Any) -> tuple[Any, Figures]:
    """Read memory on all cores, or on the GPU: 256 MB or 4 GB."""
    import jax
    import jax.numpy as jnp

    if jax.default_backend() == "gpu":
        x, largest = jnp.ones(2**30, jnp.float32), jax.jit(jnp.max)
        return lambda _: largest(x), {"bytes": 2**32}
    parts = np.array_split(np.ones(2**26, np.float32), record.cores())
    pool = ThreadPoolExecutor(len(parts))
    return lambda _: max(pool.map(np.max, parts)), {"bytes": 2**28}


def check_texts(facts: dict[str, Figures]) -> None:
    """Raise `MeasurementError` unless the first weight format generates the peer's texts."""
    peers = {"transformers"} & facts.keys()
    for peer in peers:
        name, ours = next((name, each) for name, each in facts.items() if each.get("_dtype") in AGREEMENT)
        pairs = zip(ours["_tokens"], facts[peer]["_tokens"], strict=True)
        same = min(agreement(a, b) for a, b in pairs)
        if same < AGREEMENT[ours["_dtype"]]:
            raise MeasurementError(f"{peer} says something else than {name} after {same:.0%} of the text.")


def agreement(a: list[int], b: list[int]) -> float:
    """Return the fraction of a text before the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a)) / len(a)


def check_same_text(facts: dict[str, Figures]) -> None:
    """Raise `MeasurementError` if the texts differ in their first half; later, rounding may decide a near tie."""
    texts = [each["_tokens"] for each in facts.values()]
    if (same := min(agreement(texts[0], text) for text in texts)) < 0.5:
        raise MeasurementError(f"the texts with and without a cache differ after {same:.0%}.")
