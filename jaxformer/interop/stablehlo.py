"""Export of a model as StableHLO, which `jax.export` runs without this package.

The programs contain no weights: these are an argument, so that prefill and decode step share one copy. Attention is
`ops.attention`, without platform-specific fused kernels, so that any machine can lower for all platforms.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from jaxformer.contract import Task, contract_of
from jaxformer.data.tokenizer import TOKENIZER_CONFIG
from jaxformer.errors import UserError, import_extra
from jaxformer.interop.formats import Dtype
from jaxformer.interop.output import complete_path, copy_files, flat_params
from jaxformer.models.objective import Params
from jaxformer.ops.masks import EMPTY
from jaxformer.runs.run import CLASSES, SAMPLING, TOKENIZER, Run

PLATFORMS = ("cpu", "cuda", "tpu")
Weights = Mapping[str, jax.Array]
"""Parameters by path."""
LogitsAndCache = tuple[jax.Array, list[jax.Array]]
WEIGHTS, SIGNATURE, README = "weights.npz", "signature.json", "README.md"


class Program(NamedTuple):
    """A function of the weights by name and of the arrays, or lists of arrays, of a batch; with the shapes of its
    arguments by name, and the names of its results."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    outputs: tuple[str, ...]


def export_stablehlo(run: Run, folder: Path, dtype: Dtype = "float32", cache_length: int | None = None) -> None:
    """Write the programs of a run, its weights, and a description of both to a new folder. A causal language model with
    a KV cache has the programs `prefill` and `decode`, with a cache of `cache_length` tokens, also the length of padded
    prompts (None for the context length); any other model has `forward`. The batch size B is symbolic. Raises
    `UserError` if the folder exists, flatbuffers is not installed, the dtype is float16, or `cache_length` is given for
    a model without such a cache."""
    contract, kind = contract_of(run.model), type(run.model).__name__
    if dtype == "float16":
        raise UserError("`dtype` is float16, which activations may exceed; use float32 or bfloat16 for stablehlo.")
    import_extra("flatbuffers", "`format='stablehlo'`")
    weights = flat_params(run.params, dtype)
    shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in weights.items()}
    if contract.task is Task.CAUSAL_LM and contract.has_cache:
        cache_length = cache_length or run.text_model()[0].context_length
        programs, readme = cached_programs(run.model, shapes, cache_length, dtype), "cached.md"
    elif cache_length is None:
        programs, readme = {"forward": forward_program(run.model, shapes)}, "forward.md"
    else:
        raise UserError(f"`cache_length` is {cache_length}, but {run.path} holds a {kind} without a cache; omit it.")
    n_tokens = contract.vocab_size if run.tokenizer is None else run.tokenizer.vocab_size
    with complete_path(folder) as scratch:
        scratch.mkdir()
        signatures = {}
        for name, program in programs.items():
            exported = jax.export.export(jax.jit(program.function), platforms=PLATFORMS)(*program.arguments.values())
            (scratch / f"{name}.bin").write_bytes(exported.serialize())
            signatures[name] = signature(program, exported)
        np.savez(scratch / WEIGHTS, **weights)  # type: ignore[arg-type]  # no weight is named allow_pickle
        copy_files(run.path, scratch, TOKENIZER, TOKENIZER_CONFIG, CLASSES, SAMPLING)
        description = {
            "format": "jax.export",
            "jax": jax.__version__,
            "platforms": PLATFORMS,
            "model": kind,
            "task": contract.task,
            "vocab_size": contract.vocab_size,
            "n_tokens": n_tokens,
            "max_tokens": contract.max_tokens,
            "n_slots": cache_length,
            "end_of_text": None if run.tokenizer is None else run.tokenizer.end_of_text,
            "ends_of_text": [] if run.tokenizer is None else run.tokenizer.ends_of_text,
            "weights": {"file": WEIGHTS, "dtype": dtype},
            "programs": signatures,
        }
        (scratch / SIGNATURE).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        (scratch / README).write_text(_asset(readme).replace("{load}", _asset("load.md")), encoding="utf-8")


def _asset(name: str) -> str:
    """Return instructions for the programs; `{load}` stands for the content of load.md."""
    return (Path(__file__).parent / "assets" / name).read_text(encoding="utf-8")


def cached_programs(
    model: nn.Module, weights: Mapping[str, jax.ShapeDtypeStruct], n_slots: int, dtype: Dtype
) -> dict[str, Program]:
    """Return the prefill and decode step of a causal language model with a KV cache, for parameters of these shapes by
    path. `prefill(weights, tokens_BS, length_B)` reads prompts, padded on the right to S = `n_slots` tokens;
    `decode(weights, cache, token_B, position_B)` reads one more token of each row at its position. Both return the
    logits `(B, V)` of the next token in float32 and the cache, a list of arrays with leading axis B. A token's slot is
    its position modulo S."""
    empty = jax.eval_shape(partial(model.init_cache, n_slots, jnp.dtype(dtype)))
    leaves, structure = jax.tree.flatten(empty)

    def logits_and_cache(params: Params, x_D: jax.Array, cache: object) -> LogitsAndCache:
        logits_V: Any = model.apply({"params": params}, x_D, method="unembed")
        return logits_V.astype(jnp.float32), jax.tree.leaves(cache)

    def prefill(weights: Weights, tokens_BS: jax.Array, length_B: jax.Array) -> LogitsAndCache:
        params = unflatten_dict(weights, sep=".")

        def one(tokens_S: jax.Array, length: jax.Array) -> LogitsAndCache:
            index_S = jnp.arange(n_slots)
            positions_S = jnp.where(index_S < length, index_S, EMPTY)
            cache, prefix = model.init_cache(n_slots, jnp.dtype(dtype)), (length,) * contract_of(model).has_prefix
            x_SD, cache = model.apply({"params": params}, tokens_S, positions_S, cache, 0, *prefix, method="extend")
            return logits_and_cache(params, x_SD[length - 1], cache)

        return jax.vmap(one)(tokens_BS, length_B)

    def decode(weights: Weights, cache: list[jax.Array], token_B: jax.Array, position_B: jax.Array) -> LogitsAndCache:
        params = unflatten_dict(weights, sep=".")

        def one(leaves: list[jax.Array], token: jax.Array, position: jax.Array) -> LogitsAndCache:
            cache, slot = jax.tree.unflatten(structure, leaves), position % n_slots
            x_1D, cache = model.apply({"params": params}, token[None], position[None], cache, slot, method="extend")
            return logits_and_cache(params, x_1D[0], cache)

        return jax.vmap(one)(cache, token_B, position_B)

    (B,) = jax.export.symbolic_shape("B")
    integers_B = jax.ShapeDtypeStruct((B,), jnp.int32)
    prompts_BS = jax.ShapeDtypeStruct((B, n_slots), jnp.int32)
    cache = [jax.ShapeDtypeStruct((B, *leaf.shape), leaf.dtype) for leaf in leaves]
    outputs = ("logits", "cache")
    return {
        "prefill": Program(prefill, {"weights": weights, "tokens": prompts_BS, "length": integers_B}, outputs),
        "decode": Program(
            decode, {"weights": weights, "cache": cache, "token": integers_B, "position": integers_B}, outputs
        ),
    }


def forward_program(model: nn.Module, weights: Mapping[str, jax.ShapeDtypeStruct]) -> Program:
    """Return the model's call on a batch; its arguments are the contract's inputs, with leading axis B."""
    (B,) = jax.export.symbolic_shape("B")

    def forward(weights: Weights, *inputs_B: jax.Array) -> Any:
        return jax.vmap(partial(model.apply, {"params": unflatten_dict(weights, sep=".")}))(*inputs_B)

    inputs = {x.name: jax.ShapeDtypeStruct((B, *x.shape), x.dtype) for x in contract_of(model).inputs}
    return Program(forward, {"weights": weights, **inputs}, ("logits",))


def signature(program: Program, exported: jax.export.Exported) -> dict[str, object]:
    """Return the shapes and dtypes of a program's arguments, in order, and of its results, as JSON values."""

    def describe(x: jax.ShapeDtypeStruct) -> dict[str, object]:
        return {"shape": [n if isinstance(n, int) else str(n) for n in x.shape], "dtype": jnp.dtype(x.dtype).name}

    results = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    outputs = dict(zip(program.outputs, results if isinstance(results, tuple) else (results,), strict=False))
    arguments = {name: jax.tree.map(describe, x) for name, x in program.arguments.items() if name != "weights"}
    return {
        "arguments": {"weights": WEIGHTS, **arguments},
        "outputs": {name: jax.tree.map(describe, x) for name, x in outputs.items()},
    }
