"""Whether the influence of training documents predicts what training without them does.

    python -m studies.influence [--smooth] [--subsets 40] [--texts 10] [--left-out 0.1] [--folder FOLDER]
        [--results FOLDER]

A small model is trained on the State of the Union addresses, and again without random subsets of the documents, whose
targets have weight 0, everything else being equal. For each of some held-out texts, the measured log-probabilities are
compared with the sums of the estimates of the documents left out, by Spearman's rank correlation over the subsets: the
derivative through training, and TracIn at every step, the product of the gradients of text and documents (Pruthi et al.
2020). Stored in `influence.json`: as `edge`, of a training with clipped SGD at the edge of stability; with `--smooth`,
as `smooth`, of AdamW without clipping, and GELU in place of ReLU.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import spearmanr

from benchmarks import record
from jaxformer.cli import machine, train
from jaxformer.inspect.influence import Replay
from jaxformer.runs.run import load_run

BATCH, TEXT_TOKENS = 16, 65
OPTIONS = [
    "--config", "quick", "--steps", "400", "--model.vocab-size", "1024", "--model.context-length", "64",
    "--model.d-model", "64", "--model.n-blocks", "2", "--model.n-heads", "4", "--model.d-ff", "256",
    "--train.batch-size", f"{BATCH}",
]  # fmt: skip
SMOOTH = [
    "--model.activation", "gelu", "--optimizer.name", "adamw", "--optimizer.learning-rate", "0.003",
    "--optimizer.clip-norm", "none",
]  # fmt: skip


def trim(done: int, _: int) -> None:
    """Return freed memory now and then; see `jaxformer.cli.influence`."""
    if done % 16 == 0:
        machine.release_freed_memory()


def tracin(replay: Replay, texts: list[np.ndarray]) -> np.ndarray:
    """Return the sum over all steps of learning rate times the product of the gradients of each text and each document,
    `(texts, N)`: the effect of each update by itself."""
    gradients = jax.jit(
        lambda params: jax.tree.map(
            lambda *x: jnp.stack(x), *(jax.grad(replay.log_probability)(params, t) for t in texts)
        )
    )
    inputs, total = replay._inputs(0, replay.n_steps), np.zeros((len(texts), len(replay.documents)), np.float32)
    state, weights = replay._setup.init_state(), replay._weights(None)
    for each in inputs:
        floats = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else None, state)
        to_state = jax.tree.map(lambda x: jnp.zeros((len(texts), *x.shape), x.dtype), floats)
        _, of_step = replay._pull(state, weights, to_state._replace(params=gradients(state.params)), *each)
        total += np.asarray(of_step)
        trim(int(each[-1]), replay.n_steps)
        state, _ = replay._advance(state, weights, *each)
    return total


def main() -> int:
    """Measure, store and print; return the exit status."""
    parser = argparse.ArgumentParser(
        description="Influence of documents against training without them.", allow_abbrev=False
    )
    parser.add_argument("--smooth", action="store_true", help="train smoothly")
    parser.add_argument("--subsets", type=int, default=40, help="random subsets of documents (default: 40)")
    parser.add_argument("--texts", type=int, default=10, help="held-out texts (default: 10)")
    parser.add_argument("--left-out", type=float, default=0.1, help="fraction of the documents (default: 0.1)")
    parser.add_argument("--folder", type=Path, help="folder of the runs, kept (default: temporary)")
    parser.add_argument("--results", type=Path, default=record.STUDY_RESULTS, help="folder of influence.json")
    own = parser.parse_args()
    machine.set_up(BATCH)
    with tempfile.TemporaryDirectory() as scratch:
        training, seconds = "smooth" if own.smooth else "edge", {}
        folder = (own.folder or Path(scratch)) / training
        if not folder.exists():
            assert train.main([*OPTIONS, *(SMOOTH if own.smooth else ()), "--run", str(folder)]) == 0
        run = load_run(folder)
        replay = Replay(run)
        val = replay._data.corpus.val.tokens
        starts = np.linspace(0, len(val) - TEXT_TOKENS, own.texts).astype(int)
        texts = [np.asarray(val[start : start + TEXT_TOKENS]) for start in starts]

        def timed(name: str, function: Callable[[], Any]) -> Any:
            function_start = time.perf_counter()
            result = function()
            seconds[name] = round(time.perf_counter() - function_start, 1)
            print(f"{name}: {seconds[name]} s", flush=True)
            return result

        replay.train()
        base_params = timed("one training", replay.train)
        assert jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(x, y), base_params, run.params))
        _, derivative_QN = timed("derivative through training", lambda: replay.influence(texts, progress=trim))
        tracin_QN = timed("TracIn at every step", lambda: tracin(replay, texts))
        rng, N = np.random.default_rng(0), len(replay.documents)
        measured: list[np.ndarray] = []
        predicted: dict[str, list[np.ndarray]] = {"derivative": [], "tracin": []}
        base = np.array([float(replay.log_probability(base_params, text)) for text in texts])
        for i in range(own.subsets):
            left_out = rng.choice(N, round(own.left_out * N), replace=False)
            params = replay.train(replay.leave_out(left_out))
            measured.append([float(replay.log_probability(params, text)) for text in texts] - base)
            for name, of in (("derivative", derivative_QN), ("tracin", tracin_QN)):
                predicted[name].append(-of[:, left_out].sum(axis=1))
            print(f"subset {i + 1} of {own.subsets}", flush=True)
    measured_SQ = np.array(measured)
    figures = {
        "documents": N,
        "left_out": round(own.left_out * N),
        "subsets": own.subsets,
        "parameters": int(sum(x.size for x in jax.tree.leaves(run.params))),
        "steps": replay.n_steps,
        "text_tokens": TEXT_TOKENS - 1,
        "seconds": seconds,
        "nats": [round(float(x), 2) for x in base],
        "measured_std": [round(float(x), 4) for x in measured_SQ.std(axis=0)],
    }
    for name, values in predicted.items():
        values_SQ = np.array(values)
        ranks = [float(spearmanr(values_SQ[:, q], measured_SQ[:, q]).statistic) for q in range(own.texts)]
        slopes = [float(np.polyfit(values_SQ[:, q], measured_SQ[:, q], 1)[0]) for q in range(own.texts)]
        figures[name] = {"rank_correlation": [round(x, 3) for x in ranks], "slope": [round(x, 2) for x in slopes]}
        print(f"{name}: rank correlation mean {np.mean(ranks):.3f}, from {min(ranks):.3f} to {max(ranks):.3f}")
    stored = own.results / "influence.json"
    both = json.loads(stored.read_text(encoding="utf-8"))["figures"] if stored.exists() else {}
    both[training] = figures
    record.write("influence", both, record.versions("jax", "jaxlib"), own.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
