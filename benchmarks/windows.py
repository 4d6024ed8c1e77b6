"""Speed of the input pipeline at the ladder's shape, beside grain's usual one record per example.

    python benchmarks/windows.py

Both read the same tokens in the same process by turns: batches of 4096 windows of 33 tokens at stride 1, shuffled
without replacement. One makes each batch with one gather (`jaxformer.data.windows`), in the background;
the other has grain read window by window, shuffle and batch, in one thread. The target is 50 million tokens per second.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import grain
import numpy as np
import record

from jaxformer.config import TokenModelConfig
from jaxformer.data.corpus import Corpus, Split
from jaxformer.data.dataset import Batch
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.data.windows import TextConfig, TextDataset

TOKENS, LENGTH, BATCH = 15_000_000, 33, 4096


class Record:
    """One window a record."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens) - LENGTH + 1

    def __getitem__(self, i: int) -> np.ndarray:
        return self.tokens[i : i + LENGTH].astype(np.int32)


def size(batch: Batch | np.ndarray) -> int:
    """Return the tokens of a batch."""
    return batch.targets.size + len(batch.targets) if isinstance(batch, Batch) else batch.size


def tokens_per_second(stream: Iterator[Any], batches: int) -> float:
    """Return the tokens per second over so many batches, after the first."""
    next(stream)
    began = time.perf_counter()
    total = sum(size(next(stream)) for _ in range(batches))
    return total / (time.perf_counter() - began)


def main() -> None:
    """Measure, print, and write the result."""
    tokens = np.random.default_rng(0).integers(0, 2048, TOKENS).astype(np.uint16)
    split = Split(tokens, 1, TOKENS)
    corpus = Corpus(split, split, Tokenizer.train(["a"], 257), "")
    ours = TextDataset(TextConfig(stride=1), TokenModelConfig(2048, LENGTH - 1), corpus, BATCH, seed=0)
    here = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)  # its threads only make Python records slower
    peer = grain.MapDataset.source(Record(tokens)).seed(0).shuffle().to_iter_dataset(here).batch(BATCH)
    speeds: dict[str, list[float]] = {"jaxformer": [], "grain_record_a_window": []}
    for _ in range(5):
        speeds["jaxformer"].append(tokens_per_second(ours.stream(0, 402), 400))
        speeds["grain_record_a_window"].append(tokens_per_second(iter(peer), 2))
    figures = {name: round(median(values)) for name, values in speeds.items()}
    ratio = figures["jaxformer"] / figures["grain_record_a_window"]
    for name, value in figures.items():
        print(f"{name:<24}{value / 1e6:8.1f} million tokens/s")
    print(f"jaxformer is {ratio:.0f} x as fast")
    file = record.write(
        "windows", {"tokens_per_s": figures, "ratio": round(ratio, 1)}, record.versions("numpy", "grain")
    )
    print(f"written: {file}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()  # it has no options
    main()
