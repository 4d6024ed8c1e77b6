"""Compare two checkouts: `python -m tools.equivalence BASE`, where BASE is the folder of another checkout.

Each config is shrunk until it trains in seconds and trained for 20 steps by both checkouts, on one device and on two.
Losses, learning rates, the first gradient, evaluations, parameters, samples and exported files are compared; see
`equivalence_side.py`. A quantity is equal to the last bit, within 1e-6 of it (relative, or absolute below 1), or
different. On one machine, JAX computes the same at each run, so a difference is due to the code. Programs are compiled
without costly optimisations, for both sides alike. The step times are printed but not judged.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import ByteLevelBPETokenizer

from benchmarks import record
from tools.equivalence_side import DEVICES, Results

SIDE = Path(__file__).with_name("equivalence_side.py")
TOLERANCE = 1e-6
EQUAL, CLOSE, DIFFERENT = VERDICTS = ("equal", f"within {TOLERANCE:g}", "DIFFERENT")
"""Verdicts, from the best to the worst."""
QUICK_TO_COMPILE = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_opt_preset=CPU_OPT_PRESET_FAST_COMPILE"
)
"""Flags with which XLA compiles in a third of the time; used with a version that knows them all."""


class Side:
    """A checkout and the process that measures it, started when it is needed."""

    def __init__(self, checkout: Path, scratch: Path, store: Path | None) -> None:
        self.checkout, self.scratch = checkout.resolve(), scratch
        self._process: subprocess.Popen[str] | None = None
        self.cache = (store.resolve() if store else scratch) / "cache"
        is_clean = not git(self.checkout, "status", "--porcelain")
        is_own = git(self.checkout, "rev-parse", "--show-toplevel") == str(self.checkout)  # no copy inside another
        commit = git(self.checkout, "rev-parse", "HEAD") if is_clean and is_own else ""
        self.store = store.resolve() / f"{commit[:12]}-{environment()}" if store and commit else None

    def measure(self, name: str, mesh: str) -> Results | str:
        """Return the results of one config, stored ones if there are; or what went wrong."""
        file = (self.store or self.scratch) / f"{name.replace(':', '-').replace(' ', '')}-{mesh}.npz"
        if not (self.store and file.exists()):
            file.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self.scratch / "unfinished.npz"
            if (answer := self.ask([name, mesh, str(unfinished)])) != "done":
                return answer
            shutil.move(unfinished, file)
        with np.load(file) as stored:
            return dict(stored.items())

    def ask(self, request: list[str]) -> Any:
        """Return the answer to a request."""
        if self._process is None:
            flags = QUICK_TO_COMPILE if "jaxlib 0.10.2" in versions() else ""
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(SIDE), str(self.checkout)], cwd=self.scratch, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=(self.scratch / "log").open("a"),
                env=os.environ | {
                    "PYTHONPATH": str(self.checkout), "JAXFORMER_CACHE": str(self.cache),
                    "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{flags} {os.environ.get('XLA_FLAGS', '')}",
                },
            )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        if not (answer := self._process.stdout.readline()):
            raise SystemExit(f"error: {self.checkout} cannot be measured: {(self.scratch / 'log').read_text()[-3000:]}")
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()


def git(checkout: Path, *words: str) -> str:
    """Return what git says of a checkout; empty if it is none."""
    ended = subprocess.run(["git", "-C", str(checkout), *words], capture_output=True, text=True)
    return ended.stdout.strip() if ended.returncode == 0 else ""


def versions() -> str:
    """Return the versions that results depend on."""
    packages = record.versions("jax", "jaxlib", "flax", "optax", "numpy", "tokenizers")
    return ", ".join(f"{name} {version}" for name, version in packages.items())


def environment() -> str:
    """Return a digest of everything besides the commit that results depend on."""
    what = (versions(), sys.version, QUICK_TO_COMPILE, record.cpu(), os.environ.get("XLA_FLAGS", ""))
    return hashlib.sha256(repr((what, SIDE.read_bytes(), inspect.getsource(write_data))).encode()).hexdigest()[:8]


def difference(base: np.ndarray, ours: np.ndarray) -> float:
    """Return the largest difference of two arrays, relative to the base's values where these exceed 1; infinity if
    texts, whole numbers, shapes or dtypes differ."""
    if (base.shape, base.dtype.kind) != (ours.shape, ours.dtype.kind):
        return np.inf
    if base.dtype.kind == "f" and base.dtype == ours.dtype:
        if base.tobytes() == ours.tobytes():
            return 0.0
        with np.errstate(all="ignore"):
            gap = np.abs(np.float64(ours) - np.float64(base)) / np.maximum(1, np.abs(np.float64(base)))
        return float(np.max(np.where(np.isnan(gap), np.inf, gap), initial=0)) or np.finfo(float).tiny
    return 0.0 if np.array_equal(base, ours) and "f" not in base.dtype.kind + ours.dtype.kind else np.inf


def compare(base: Results, ours: Results) -> dict[str, tuple[str, str]]:
    """Return the verdict on each quantity, and what differs most."""
    verdicts = {}
    for quantity in dict.fromkeys(key.partition("|")[0] for key in [*base, *ours]):
        b, o = ({k: v for k, v in side.items() if k.partition("|")[0] == quantity} for side in (base, ours))
        gone, new = ([key.partition("|")[2] for key in one if key not in other] for one, other in ((b, o), (o, b)))
        if gone or new:
            verdicts[quantity] = DIFFERENT, f"only in the base: {gone[:3]}; only here: {new[:3]}"
            continue
        gaps = {key: difference(b[key], o[key]) for key in b}
        worst = max(gaps, key=lambda key: gaps[key])
        gap, name = gaps[worst], worst.partition("|")[2]
        verdict = EQUAL if gap == 0 else CLOSE if gap <= TOLERANCE else DIFFERENT
        shown = f"{b[worst]} and {o[worst]}" if b[worst].ndim == 0 else f"{b[worst].shape} and {o[worst].shape}"
        detail = f"{name} by {gap:.1e}" if np.isfinite(gap) else f"{name}: {shown[:300]}"
        verdicts[quantity] = verdict, detail if gap else ""
    return verdicts


def write_data(folder: Path) -> None:
    """Write a little data of each kind, the same at every call."""
    draw, rng = random.Random(0), np.random.default_rng(0)
    nouns, verbs = ["cat", "dog", "king", "sea", "house"], ["sees", "likes", "finds", "leaves"]
    sentences = [f"The {draw.choice(nouns)} {draw.choice(verbs)} the {draw.choice(nouns)}." for _ in range(800)]
    for part in ("books", "images", "captions"):
        (folder / part).mkdir(parents=True)
    for i in range(8):
        (folder / f"books/{i}.txt").write_text(" ".join(sentences[i::8]))
    for part, n in (("train", 40), ("val", 10)):
        pairs = "".join(f"{s}\t{s[::-1]}\n" for s in (s[4:20] for s in sentences[:n]))
        (folder / f"pairs.{part}.tsv").write_text(pairs)
        (folder / f"reviews.{part}.tsv").write_text("".join(f"{s}\t{'sea' in s}\n" for s in sentences[:n]))
        labelled = ("".join(f"{word}\t{len(word) > 3}\n" for word in s.split()) for s in sentences[:n])
        (folder / f"words.{part}.tsv").write_text("\n".join(labelled))
    for part, n in (("train", 40), ("t10k", 20)):
        pixels, labels = rng.integers(0, 256, (n, 28, 28), np.uint8), np.arange(n, dtype=np.uint8) % 10
        for what, array in (("images-idx3", pixels), ("labels-idx1", labels)):
            head = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
            (folder / f"images/{part}-{what}-ubyte").write_bytes(head + array.tobytes())
    lines = ["file\tcaption\tsplit"]
    with zipfile.ZipFile(folder / "captions/images.zip", "w") as archive:
        for i in range(24):
            Image.fromarray(rng.integers(0, 256, (64, 64, 3), np.uint8)).save(folder / "picture.png")
            archive.write(folder / "picture.png", f"{i}.png")
            lines.append(f"{i}.png\t{draw.choice(nouns)} {i}\t{'train' if i < 16 else 'val'}")
    (folder / "captions/captions.tsv").write_text("\n".join(lines) + "\n")
    pictures = [Image.fromarray(rng.integers(0, 256, (42, 42), np.uint8)) for _ in range(8)]
    pictures[0].save(folder / "picture.png")
    pictures[0].save(folder / "video.gif", save_all=True, append_images=pictures[1:])
    turns = [[{"role": "user", "content": s}, {"role": "assistant", "content": s[4:8]}] for s in sentences[:40]]
    (folder / "chat.jsonl").write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    (folder / "chat.jinja").write_text("{% for m in messages %}{{ m.role + m.content + '<|endoftext|>' }}{% endfor %}")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(sentences, 280, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.save(str(folder / "tokenizer.json"))


def main(arguments: list[str] | None = None) -> int:
    """Compare; return the exit status: 0 if nothing is different, 1 if something is, 2 for wrong input."""
    parser = argparse.ArgumentParser(prog="python -m tools.equivalence", description=__doc__.partition("\n\n")[0])
    parser.add_argument("base", type=Path, metavar="BASE", help="folder of the other checkout")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="configs, such as quick:llama, or files, such as moe")
    parser.add_argument("--store", type=Path, metavar="FOLDER", help="where results of clean commits are kept")
    options = parser.parse_args(arguments)
    if not (options.base / "train.py").exists():
        parser.error(f"BASE is {options.base}, which is no checkout; make one with git worktree add.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exit normally, so that nothing is left behind
    with tempfile.TemporaryDirectory() as scratch:
        write_data(Path(scratch) / "data")
        sides = [Side(checkout, Path(scratch), options.store) for checkout in (options.base, record.ROOT)]
        try:
            return run(sides, options.only)
        finally:
            for side in sides:
                side.close()


def run(sides: list[Side], only: list[str] | None) -> int:
    """Compare all configs on all meshes; print a line for each, then a table."""
    names, ours = (side.ask([]) for side in sides)
    if names != ours:
        print(f"{DIFFERENT}: the configs are {names} and {ours}")
    chosen = [name for name in names if only is None or {name, name.partition(":")[0]} & {*only}]
    if not chosen:
        print(f"error: there is no {' or '.join(only or ())}; there are {', '.join(names)}.", file=sys.stderr)
        return 2
    counts: dict[str, dict[str, int]] = {}
    ratios, failed, began = [], names != ours, time.monotonic()
    for name in chosen:
        for mesh in DEVICES:
            base, here = (side.measure(name, mesh) for side in sides)
            if isinstance(base, str) or isinstance(here, str):
                failed = True
                for which, side in (("the base", base), ("this checkout", here)):
                    if isinstance(side, str):
                        print(f"{name:<34} {mesh:<8}FAILED in {which}: {side.strip()[-600:]}", flush=True)
                continue
            before, after = (float(side.pop("step time|")) for side in (base, here))
            ratios.append(after / before)
            verdicts = compare(base, here)
            for quantity, (verdict, _) in verdicts.items():
                counts.setdefault(quantity, dict.fromkeys(VERDICTS, 0))[verdict] += 1
            worst = max((verdict for verdict, _ in verdicts.values()), key=VERDICTS.index)
            failed |= worst == DIFFERENT
            print(f"{name:<34} {mesh:<8}{worst:<14}step {before:.1f} and {after:.1f} ms", flush=True)
            for quantity, (verdict, detail) in verdicts.items():
                if verdict != EQUAL:
                    print(f"    {quantity}: {verdict}; {detail}", flush=True)
    width = max(map(len, counts), default=0)
    print(f"\n{'':<{width}}{EQUAL:>10}{CLOSE:>14}{DIFFERENT:>12}")
    for quantity, count in counts.items():
        print(f"{quantity:<{width}}{count[EQUAL]:>10}{count[CLOSE]:>14}{count[DIFFERENT]:>12}")
    pace = f"; step time over the base's, median {statistics.median(ratios):.2f}" if ratios else ""
    print(f"{len(chosen)} configs and variants in {time.monotonic() - began:.0f} s{pace}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
