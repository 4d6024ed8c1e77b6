"""Decoding speed beside Hugging Face `generate`, from the same weights, greedily.

    python benchmarks/decode.py [--batch-sizes 1 8] [--python-torch PATH] [--smoke] [--results FOLDER]

On a CPU: a GPT-2 of 4 blocks, width 256, MLP 2048, context 512, vocabulary 2048, in float32. On a GPU: GPT-2's own
shape in bfloat16, beside `generate` with a static cache and `torch.compile`. 256 tokens after a prompt of 32 (random
tokens). Processes take turns, and must have begun the same text before anything is timed.

A step has to read all weights and the keys and values so far: the share of the bandwidth limit is those bytes over the
time of a token, by the rate at which this machine was measured, in the same run, to read memory.

Each batch size is stored as soon as it is measured. `--smoke` does all of it in seconds at a tiny shape on the CPU, and
writes nothing unless it is told where.

torch and transformers may live in an environment of their own (`--python-torch`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import record
from processes import Failed, Worker, has, take_turns


@dataclass(frozen=True)
class Setting:
    """Settings of the measurement on one kind of device."""

    device: str
    shape: dict[str, int]
    weights: tuple[str, ...]
    """Formats of weights; the first is the one that the peer has."""
    agreement: float
    """Share of each text, from its beginning, that must be the peer's: rounding may tip a near tie, of which bfloat16
    has many, and a row is another from there on."""
    prompt: int = 32
    """Tokens of each prompt."""
    new: int = 256
    """Tokens generated after it."""
    first: tuple[int, int] = (8, 400)
    """Lengths of prompts whose time to the first token is measured."""


SETTINGS = {
    "cpu": Setting(
        "cpu",
        {"n_blocks": 4, "n_heads": 4, "d_model": 256, "d_ff": 2048, "context_length": 512, "vocab_size": 2048},
        ("float32", "int8"), agreement=0.5,
    ),
    "gpu": Setting(
        "gpu",
        {"n_blocks": 12, "n_heads": 12, "d_model": 768, "d_ff": 3072, "context_length": 1024, "vocab_size": 50257},
        ("bfloat16", "int8"), agreement=0.02,
    ),
    "smoke": Setting(
        "cpu",
        {"n_blocks": 2, "n_heads": 2, "d_model": 32, "d_ff": 64, "context_length": 64, "vocab_size": 211},
        ("float32",), agreement=0.5, prompt=8, new=8, first=(8, 40),
    ),
}  # fmt: skip


def agree(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]) -> float:
    """Return the fraction of the texts that is the same up to their first difference, in the worst row."""
    equal = ([x == y for x, y in zip(row, other, strict=True)] for row, other in zip(a, b, strict=True))
    return min((row.index(False) if False in row else len(row)) / len(row) for row in equal)


def measure(batch_size: int, setting: Setting, folder: Path, python: str, rounds: int) -> tuple[dict, dict]:
    """Return the tokens per second of each side with its other measurements, and the versions."""
    with ExitStack() as stack:
        ours = {
            weights: stack.enter_context(
                Worker(
                    f"jaxformer {weights}", sys.executable, "decode_jaxformer.py", str(folder), str(batch_size), weights
                )
            )
            for weights in setting.weights
        }
        peer = stack.enter_context(Worker("transformers", python, "decode_hf.py", str(folder), str(batch_size)))
        first = next(iter(ours.values()))
        same = {worker.name: agree(worker.facts["tokens"], peer.facts["tokens"]) for worker in ours.values()}
        if same[first.name] < setting.agreement:
            raise Failed(
                f"transformers says something else than {first.name} after {same[first.name]:.0%} of the text."
            )
        ms = take_turns([*ours.values(), peer], rounds, 1)
        rate = {name: batch_size * setting.new / each * 1e3 for name, each in ms.items()}
        read = {f"jaxformer {weights}": worker.facts["bytes_a_step"] for weights, worker in ours.items()}
        gb_per_s = first.facts["gb_per_s"]
        figures = {
            "tokens_per_s": {name: round(each, 1) for name, each in rate.items()},
            "speed_over_transformers": {name: round(rate[name] / rate["transformers"], 2) for name in read},
            "share_of_bandwidth": {
                name: round(read[name] * rate[name] / batch_size / 1e9 / gb_per_s, 3) for name in read
            },
            "same_text_as_transformers": {name: round(share, 3) for name, share in same.items()},
            "memory_gb_per_s": round(gb_per_s, 1),
            "first_token_over_forward": first.facts["first_token_over_forward"],
        }
        return figures, peer.facts["versions"] | first.facts["versions"]


def main() -> int:
    """Measure; 0, 1 if that failed, or 2 without torch and transformers."""
    parser = argparse.ArgumentParser(description="Decoding speed beside Hugging Face generate.")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--python-torch", default=sys.executable, help="an interpreter with torch and transformers")
    parser.add_argument("--rounds", type=int, default=7, help="texts that each makes")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape on the CPU")
    parser.add_argument("--results", type=Path, help="where to write the result (default: benchmarks/results)")
    asked = parser.parse_args()
    if not has(asked.python_torch, "torch", "transformers", "numpy"):
        print(
            f"error: {asked.python_torch} lacks torch or transformers; install them, or give --python-torch.",
            file=sys.stderr,
        )
        return 2
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share a GPU
    setting = SETTINGS["smoke" if asked.smoke else asked.device]
    if setting.device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"  # also where there is a GPU
    rounds, sizes = (1, asked.batch_sizes[:1]) if asked.smoke else (asked.rounds, asked.batch_sizes)
    results = asked.results or (None if asked.smoke else record.RESULTS)
    figures: dict = {
        "shape": setting.shape, "prompt": setting.prompt, "new_tokens": setting.new, "rounds": rounds
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.json").write_text(json.dumps(asdict(setting)))
        try:
            for size in sizes:
                measured, versions = measure(size, setting, Path(folder), asked.python_torch, rounds)
                figures[f"batch_{size}"] = measured
                print(f"batch {size}: {json.dumps(measured, indent=2)}", flush=True)
                if results:
                    print(f"written: {record.write(f'decode_{asked.device}', figures, versions, results)}")
        except Failed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
