"""Input pipeline: batches of shuffled windows, by jaxformer and by grain with one record per window."""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Figures


def jaxformer(folder: Path, n_tokens: int, length: int, batch_size: int) -> tuple[Any, Figures]:
    """Build each batch with one gather, in the background."""
    from jaxformer.config import TokenModelConfig
    from jaxformer.data.tokenizer import Tokenizer
    from jaxformer.data.tokens import Corpus, Split
    from jaxformer.data.windows import TextConfig, TextDataset

    split = Split(tokens(n_tokens), 1, n_tokens)
    corpus = Corpus(split, split, Tokenizer.train(["a"], 257), "")
    data = TextDataset(TextConfig(stride=1), TokenModelConfig(2048, length - 1), corpus, batch_size, seed=0)
    stream = data.stream(0, 10**6)
    return lambda _: next(stream).targets[0, 0], {"tokens": batch_size * length}


def grain(folder: Path, n_tokens: int, length: int, batch_size: int) -> tuple[Any, Figures]:
    """Read, shuffle and batch single windows, in one thread: grain's threads make Python records slower."""
    import grain

    class Windows:
        """One window per record."""

        def __init__(self) -> None:
            self.tokens = tokens(n_tokens)

        def __len__(self) -> int:
            return n_tokens - length + 1

        def __getitem__(self, i: int) -> np.ndarray:
            return self.tokens[i : i + length].astype(np.int32)

    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    stream = iter(grain.MapDataset.source(Windows()).seed(0).shuffle().to_iter_dataset(options).batch(batch_size))
    return lambda _: next(stream)[0, 0], {"tokens": batch_size * length}


def tokens(n: int) -> np.ndarray:
    """Return n random tokens, uint16."""
    return np.random.default_rng(0).integers(0, 2048, n).astype(np.uint16)
