"""What the heads of trained rungs attend to: the figures of docs/heads.md.

    python -m studies.heads RUN … [--windows N] [--results FOLDER]

For each head of each run, from windows of held-out text: the statistics of `jaxformer inspect`, the loss without the
head, how much of the variance of its weights is explained by the distance to a key alone or by the key's token alone,
and the tokens that it prefers; and its map of the first tokens. Stored in `heads.json` by the names of the runs.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import record
from jaxformer.inspect.attention import named_attention_maps
from jaxformer.inspect.heads import ablate_heads, head_statistics
from jaxformer.runs.run import load_data, load_run

STATISTICS = ("entropy", "distance", "first", "previous", "duplicate", "induction")
MIN_VISIBLE = 8
"""Rows with fewer visible positions are not counted where heads are compared with a mean."""
MIN_SEEN = 400
"""Weights on a token from which its mean is taken; a tenth for a pair of tokens."""
SHOWN = 16
"""Tokens of the first window whose attention maps are stored, in tenths of a weight."""
CLASSES = ("begins a word", "continues a word", "punctuation")


def explained(weights_N: np.ndarray, group_N: np.ndarray, half_N: np.ndarray) -> float:
    """Return the fraction of the variance of weights on one half that the groups' means on the other half explain."""
    count_G, sum_G = (np.bincount(group_N[half_N], x, group_N.max() + 1) for x in (None, weights_N[half_N]))
    mean_G = np.where(count_G > 0, sum_G / np.maximum(count_G, 1), weights_N[half_N].mean())
    rest_N = weights_N[~half_N]
    return float(1 - np.mean((rest_N - mean_G[group_N[~half_N]]) ** 2) / rest_N.var())


def preferred(relative_N: np.ndarray, group_N: np.ndarray, at_least: int, n: int = 6) -> list[tuple[int, float]]:
    """Return the groups with the largest mean weight, relative to the mean at the same distance."""
    groups, group_N, count_G = np.unique(group_N, return_inverse=True, return_counts=True)
    mean_G = np.where(count_G >= at_least, np.bincount(group_N, relative_N) / count_G, 0)
    return [(int(groups[g]), round(float(mean_G[g]), 2)) for g in np.argsort(-mean_G)[:n]]


def token_class(text: str) -> int:
    """Return the index in `CLASSES` of a token."""
    return 2 if not any(c.isalnum() for c in text) else 0 if text.startswith(" ") else 1


def describe(run_folder: Path, n_windows: int) -> dict[str, Any]:
    """Return what is measured of a run's heads, by layer and head."""
    run = load_run(run_folder)
    config, tokenizer = run.text_model()
    V, text = config.vocab_size, lambda token: tokenizer.decode([token])
    data: Any = load_data(run_folder, run.config)
    batch = next(iter(data.val_batches(n_windows, n_windows)))
    tokens_BT = np.asarray(batch.inputs[0])
    maps_B = jax.jit(jax.vmap(lambda tokens_T: named_attention_maps(run.model, run.params, tokens_T)))(tokens_BT)
    statistics, ablation = head_statistics(run.model, run.params, tokens_BT), ablate_heads(run.model, run.params, batch)

    B, T = tokens_BT.shape
    t, s = np.nonzero(np.tri(T)[MIN_VISIBLE - 1 :])
    t += MIN_VISIBLE - 1
    distance_N, key_N, query_N = np.tile(t - s, B), tokens_BT[:, s].ravel(), tokens_BT[:, t].ravel()
    class_N = np.array([token_class(text(token)) for token in range(V)])[key_N]
    far_N = distance_N > 0  # not a token that reads itself
    half_N = np.repeat(np.arange(B) % 2 == 0, len(t))
    heads = []
    for layer, maps_BHTS in maps_B.items():
        for head in range(maps_BHTS.shape[1]):
            weights_N = np.asarray(maps_BHTS)[:, head, t, s].ravel()
            by_distance = np.bincount(distance_N, weights_N) / np.bincount(distance_N)
            relative_N = weights_N / by_distance[distance_N]
            heads.append(
                {"layer": layer, "head": head}
                | {name: round(float(getattr(statistics[layer], name)[head]), 4) for name in STATISTICS}
                | {"nats_without": round(float(ablation.mean[layer][head]), 4)}
                | {
                    "map": [
                        "".join(map(str, row))
                        for row in np.minimum(10 * maps_BHTS[0, head, :SHOWN, :SHOWN], 9).astype(int)
                    ]
                }
                | {
                    "by_distance": round(explained(weights_N, distance_N, half_N), 3),
                    "by_token": round(explained(relative_N, key_N, half_N), 3),
                    "weight_at_distance": [round(float(x), 4) for x in by_distance[:6]],
                    "by_class": {
                        name: round(float(relative_N[far_N & (class_N == c)].mean()), 2)
                        for c, name in enumerate(CLASSES)
                    },
                    "keys": [
                        (text(token), ratio) for token, ratio in preferred(relative_N[far_N], key_N[far_N], MIN_SEEN)
                    ],
                    "pairs": [
                        (text(pair // V), text(pair % V), ratio)
                        for pair, ratio in preferred(relative_N[far_N], (query_N * V + key_N)[far_N], MIN_SEEN // 10)
                    ],
                }
            )
    shown = [text(int(token)) for token in tokens_BT[0, :SHOWN]]
    return {"loss": round(ablation.loss, 4), "tokens": shown, "heads": heads}


def main() -> int:
    """Measure, store and print; return the exit status."""
    parser = argparse.ArgumentParser(description="What the heads of trained rungs attend to.", allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs of configs/ladder.py")
    parser.add_argument("--windows", type=int, default=1024, help="windows of held-out text (default: 1024)")
    parser.add_argument("--results", type=Path, default=record.STUDY_RESULTS, help="folder of heads.json")
    own = parser.parse_args()
    figures = {run.name: describe(run, own.windows) for run in own.runs}
    record.write("heads", {"windows": own.windows, "runs": figures}, record.versions("jax", "jaxlib"), own.results)
    for name, run in figures.items():
        print(f"{name}: {run['loss']} nats per token")
        for head in run["heads"]:
            print(" ", *(f"{key} {value}" for key, value in head.items()), sep="  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
