"""What several tests need."""

import os
import random
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def write_books(folder: Path, n: int = 6, words: int = 900) -> Path:
    """A folder of texts with something to learn: words from a small grammar, the same for every run."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    nouns, verbs = ["cat", "dog", "king", "sea", "house"], ["sees", "likes", "finds", "leaves"]
    for i in range(n):
        sentences = [
            f"The {draw.choice(nouns)} {draw.choice(verbs)} the {draw.choice(nouns)}." for _ in range(words // 5)
        ]
        (folder / f"{i}.txt").write_text(" ".join(sentences))
    return folder


def tiny(data: Path, steps: int = 20) -> list[str]:
    """Options that make `train.py` a matter of seconds."""
    return [
        "--config", str(ROOT / "configs/quick.py"), "--data.path", str(data), "--steps", str(steps),
        "--model.vocab-size", "280", "--model.context-length", "16", "--model.d-model", "16", "--model.n-blocks", "2",
        "--model.n-heads", "2", "--model.d-ff", "32", "--train.batch-size", "4", "--train.sample-tokens", "20",
        "--train.eval-every", "10", "--train.report-every", "10", "--train.checkpoint-every", "5",
        "--train.eval-windows", "8", "--train.log-every", "3", "--optimizer.learning-rate", "0.1",
        "--optimizer.warmup-steps", "0",
    ]  # fmt: skip


def start(script: str, *arguments: str, cwd: Path) -> subprocess.Popen:
    """Start `train.py` or `sample.py` as a user would, without the devices that tests pretend to have."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / script), *arguments],
        cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"},
    )  # fmt: skip


def run(script: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    """Run it to the end."""
    process = start(script, *arguments, cwd=cwd)
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
