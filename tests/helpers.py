"""Helpers of several tests: data, options, small runs, processes and disks."""

import os
import pty
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, Self, TextIO

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.__main__ import main
from jaxformer.config import Config
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.data.windows import TextConfig
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.objective import next_token_nll
from jaxformer.runs.checkpoints import CheckpointManager
from jaxformer.runs.run import create_run
from tests.arrays import plain_decoder

ROOT = Path(__file__).parents[1]
slow = partial(pytest.param, marks=pytest.mark.slow)
"""A case that the default run leaves out: another case shows enough there."""


def write_books(folder: Path, n: int = 6, words: int = 900) -> Path:
    """Write a folder of texts from a small grammar, the same at every call."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    nouns, verbs = ["cat", "dog", "king", "sea", "house"], ["sees", "likes", "finds", "leaves"]
    for i in range(n):
        sentences = [
            f"The {draw.choice(nouns)} {draw.choice(verbs)} the {draw.choice(nouns)}." for _ in range(words // 5)
        ]
        (folder / f"{i}.txt").write_text(" ".join(sentences))
    return folder


def changed(options: Sequence[str], *changes: str) -> list[str]:
    """Return the options, in which those that `changes` name are replaced; none may be given twice."""
    groups: dict[str, list[str]] = {}
    for part in (options, changes):
        flag = ""
        for word in part:
            if word.startswith("--"):
                flag = word.partition("=")[0]
                groups[flag] = []
            groups.setdefault(flag, []).append(word)
    return [word for group in groups.values() for word in group]


def tiny(data: Path, steps: int = 20, *changes: str) -> list[str]:
    """Return options with which `train.py` takes seconds, some of them changed."""
    options = [
        "--config", str(ROOT / "configs/quick.py"), "--data.path", str(data), "--steps", str(steps),
        "--model.vocab-size", "280", "--model.context-length", "16", "--model.d-model", "16", "--model.n-blocks", "1",
        "--model.n-heads", "2", "--model.d-ff", "32", "--train.batch-size", "4", "--train.sample-tokens", "4",
        "--train.eval-every", "10", "--train.report-every", "10", "--train.checkpoint-every", "5",
        "--train.eval-examples", "8", "--train.log-every", "3", "--optimizer.learning-rate", "0.1",
        "--optimizer.warmup-steps", "0",
    ]  # fmt: skip
    return changed(options, *changes)


SMALL = plain_decoder(
    vocab_size=280, context_length=16, d_model=16, n_blocks=1, n_heads=2, d_ff=(32,),
    norm="rmsnorm",
)  # fmt: skip


def small_run(folder: Path, texts: list[str], steps: int = 0, model: DecoderConfig = SMALL) -> Path:
    """Create a run of a small model, after some steps of gradient descent, for sampling and evaluation."""
    config, tokenizer = (
        Config(folder.name, model, data=TextConfig(), steps=max(1, steps)),
        Tokenizer.train(texts, model.vocab_size),
    )
    run_folder, built = create_run(folder, config, tokenizer, allow_suffix=False), model.build()
    params = jax.jit(built.init)(jax.random.key(0), jnp.zeros(model.context_length, jnp.int32))["params"]
    if steps:
        tokens = np.array(tokenizer.encode(texts[0]))
        windows_BT = np.lib.stride_tricks.sliding_window_view(tokens, model.context_length + 1)[::8]
        loss = lambda params: jnp.mean(jax.vmap(partial(next_token_nll, built, params))(windows_BT))  # noqa: E731
        step = jax.jit(lambda params: jax.tree.map(lambda p, g: p - 0.5 * g, params, jax.grad(loss)(params)))
        for _ in range(steps):
            params = step(params)
    with CheckpointManager(run_folder) as checkpoints:
        checkpoints.save(steps, params, {"none": jnp.zeros(1)}, {"step": steps}, None)
    return run_folder


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Yield a list to which an event is added for each program that is compiled within this context."""
    compiled: list[str] = []
    listener = lambda event, seconds, **_: compiled.extend([event] * ("backend_compile" in event))  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


def start(script: str, *arguments: str, cwd: Path) -> subprocess.Popen:
    """Start `train.py` or `sample.py` as a user would, without the devices that tests pretend to have."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / script), *arguments],
        cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"},
    )  # fmt: skip


IN_TERMINAL = """if True:
    import fcntl, os, signal, sys, termios
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C and hanging up are for this process
    for number in (signal.SIGINT, signal.SIGHUP):  # the tests' own may be ignored, which is inherited
        signal.signal(number, signal.SIG_DFL)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def start_in_terminal(script: str, *arguments: str, cwd: Path) -> tuple[subprocess.Popen, int]:
    """Start a script as `start` does, in a terminal of its own; return its descriptor, too."""
    terminal, its_side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, str(ROOT / script), *arguments],
        cwd=cwd, stdin=its_side, stdout=its_side, stderr=its_side, start_new_session=True,
        env={name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"},
    )  # fmt: skip
    os.close(its_side)
    return process, terminal


def run(script: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    """Run it to the end."""
    process = start(script, *arguments, cwd=cwd)
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


class Here:
    """A command in this process, in place of a `subprocess.Popen` of it."""

    def __init__(self, command: list[str], stdout: TextIO | None = None, stderr: Any = None) -> None:
        with redirect_stdout(stdout or sys.stdout), redirect_stderr(stdout or sys.stderr):
            self.status = main(command[3:])  # after `python -m jaxformer`

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def kill(self) -> None:
        """Do nothing: it has ended."""

    def wait(self) -> int:
        """Return the exit status."""
        return self.status


def flip_a_bit(file: Path) -> None:
    """Flip a bit in the middle of a file, as a failing disk does."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@contextmanager
def mounted(parent: Path, size: str) -> Iterator[Path]:
    """Mount a small disk; skip the test where mounting is not permitted."""
    disk = parent / "disk"
    disk.mkdir()
    try:
        result = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command to make a small disk with")
    if result.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {result.stderr.decode().strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def fill(disk: Path, leave: int) -> Path:
    """Fill a small disk but for `leave` bytes; return the file."""
    file = disk / "full"
    file.write_bytes(b"")
    with file.open("r+b", buffering=0) as out:
        try:
            while True:
                out.write(bytes(4096))
        except OSError:
            out.truncate(max(0, out.tell() - leave))
    return file
