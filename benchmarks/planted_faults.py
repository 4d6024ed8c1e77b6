"""Whether the tests catch faults in the heart: `python -m benchmarks.planted_faults [FAULT …]`.

Each fault is planted, by itself, in a copy of the checkout, wherever in the package its text stands; then the tests
that should notice run until one fails. Before, all of them must pass in the copy without a fault.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks import record


class Fault(NamedTuple):
    """A text of the package, which must be there exactly once, the one that replaces it, and tests of which one must
    fail then: the fast ones of a file, or single tests, which may be slow."""

    old: str
    new: str
    tests: tuple[str, ...]


FAULTS = {
    "causal mask without the query's own position": Fault(
        "return query_T1 >= key_1S", "return query_T1 > key_1S", ("tests/ops/test_masks.py",)
    ),
    "window one position too long": Fault(
        "jnp.abs(query_T1 - key_1S) < width", "jnp.abs(query_T1 - key_1S) <= width", ("tests/ops/test_masks.py",)
    ),
    "packed documents see each other": Fault(
        "return self.causal.array(T, S) & segment(self.segments_T, self.segments_T)",
        "return self.causal.array(T, S)",
        ("tests/ops/test_masks.py",),
    ),
    "scores without 1/√K": Fault(
        "return K**-0.5 if scale is None else scale",
        "return 1.0 if scale is None else scale",
        ("tests/ops/test_attention.py",),
    ),
    "query heads grouped in another order": Fault(
        "q_GRTK = q_HTK.reshape(G, H // G, T, K) * scale",
        "q_GRTK = q_HTK.reshape(H // G, G, T, K).swapaxes(0, 1) * scale",
        ("tests/ops/test_attention.py",),
    ),
    "RoPE rotates the other way": Fault(
        "jnp.concatenate([-sin, sin], axis=-1)",
        "jnp.concatenate([sin, -sin], axis=-1)",
        ("tests/ops/test_positions.py",),
    ),
    "positions written one slot late": Fault(
        "update_slice(position_S, positions_T.astype(position_S.dtype), slot, 0)",
        "update_slice(position_S, positions_T.astype(position_S.dtype), slot + 1, 0)",
        ("tests/ops/test_cache.py", "tests/models/test_decoder.py"),
    ),
    "pre-norm applied for post-norm": Fault(
        "return norm(x_TD + drop(f(x_TD)))",
        "return x_TD + drop(f(norm(x_TD)))",
        ("tests/nn/test_block.py",),
    ),
    "residual connection dropped": Fault(
        "return x_TD + drop(f(norm(x_TD)))", "return drop(f(norm(x_TD)))", ("tests/nn/test_block.py",)
    ),
    "one dropout key for all sublayers": Fault(
        "list(jax.random.split(key, 3 if crosses else 2))", "[key] * 3", ("tests/nn/test_block.py",)
    ),
    "dropout without a key": Fault(
        "if not self.dropout or key is None:",
        "key = jax.random.key(0) if key is None else key\n        if not self.dropout:",
        ("tests/nn/test_block.py", "tests/models/test_decoder.py"),
    ),
    "no gradient through tied weights": Fault(
        'self.embedding.W_E.T if c.unembedding == "tied"',
        'jax.lax.stop_gradient(self.embedding.W_E).T if c.unembedding == "tied"',
        ("tests/models/test_decoder.py",),
    ),
    "targets are the inputs": Fault(
        "windows_BT[:, 1:][:, -n_predicted:]",
        "windows_BT[:, :-1][:, -n_predicted:]",
        ("tests/data/test_windows.py",),
    ),
    "loss over padding": Fault(
        "targets_N, jnp.reshape(weights_B, -1), _max_logits(x_ND), smoothing",
        "targets_N, jnp.full(targets_N.shape, jnp.sum(weights_B) / targets_N.size), _max_logits(x_ND), smoothing",
        ("tests/models/test_objective.py::test_auxiliary_losses_and_gradients_do_not_depend_on_padding",),
    ),
    "microbatches are summed instead of averaged": Fault(
        "1 / (targets_B.size * across.n)",
        "1 / targets_B.size",
        ("tests/train/test_step.py::test_gradient_accumulation_is_the_same_training",),
    ),
    "gradients of sharded parameters summed twice": Fault(
        "sum_over_batch(grads, specs.params)",
        "sum_over_batch(grads)",
        ("tests/train/test_step.py::test_training_is_the_same_on_every_mesh",),
    ),
    "updates clipped instead of gradients": Fault(
        "clipped = jax.tree.map(lambda g: jnp.where(norm < limit, g, (g / norm) * limit), grads)\n"
        "        return rule.update(clipped, state, params)",
        "updates, state = rule.update(grads, state, params)\n"
        "        return jax.tree.map(lambda g: jnp.where(norm < limit, g, (g / norm) * limit), updates), state",
        ("tests/train/test_optimizer.py",),
    ),
    "schedule one step late": Fault(
        "return optax.join_schedules(parts, joints)",
        "return lambda count: optax.join_schedules(parts, joints)(jnp.maximum(count - 1, 0))",
        ("tests/train/test_optimizer.py",),
    ),
    "weight decay of gains and biases": Fault(
        "axes[_name(path)].role in (Role.MATRIX, Role.EMBEDDING)", "True", ("tests/train/test_optimizer.py",)
    ),
    "top-k keeps one more": Fault(
        "min(k, logits_V.shape[-1])", "min(k + 1, logits_V.shape[-1])", ("tests/decode/test_samplers.py",)
    ),
}


def plant(checkout: Path, fault: Fault) -> tuple[Path, str] | None:
    """Plant a fault; return the file and its text before, or None unless the text is there exactly once."""
    found = [(file, file.read_text(encoding="utf-8")) for file in (checkout / "jaxformer").rglob("*.py")]
    found = [(file, text) for file, text in found if fault.old in text]
    if len(found) != 1 or found[0][1].count(fault.old) != 1:
        return None
    file, text = found[0]
    file.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    return file, text


def not_of_the_checkout(folder: str, names: list[str]) -> set[str]:
    """Return the names in a folder that need no copy: caches, and the runs at the top."""
    caches = shutil.ignore_patterns(".git", "__pycache__", ".*cache")(folder, names)
    return caches | ({"runs", "build"} if Path(folder) == record.ROOT else set())


def failure(checkout: Path, tests: list[str]) -> str:
    """Run tests until one fails; return its name, or what else went wrong, and an empty text if all pass."""
    single = [test for test in tests if "::" in test]
    environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    for marks, some in (("not slow", [test for test in tests if test not in single]), ("not exhaustive", single)):
        command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", "-m", marks, *some]
        ended = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True) if some else None
        if ended is not None and ended.returncode:
            named = re.search(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE)
            return named[1] if named else (ended.stdout + ended.stderr)[-1000:]
    return ""


def main(arguments: list[str] | None = None) -> int:
    """Plant the faults; return the exit status: 0 if all are caught, else 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planted_faults", description=__doc__)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"all by default: {'; '.join(FAULTS)}")
    names = parser.parse_args(arguments).faults or [*FAULTS]
    if unknown := {*names} - {*FAULTS}:
        parser.error(f"there is no fault {unknown.pop()!r}; see --help.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exit normally, so that nothing is left behind
    with tempfile.TemporaryDirectory() as scratch:
        checkout = Path(scratch) / "checkout"
        shutil.copytree(record.ROOT, checkout, ignore=not_of_the_checkout)
        if problem := failure(checkout, sorted({test for name in names for test in FAULTS[name].tests})):
            print(f"without a fault, a test fails: {problem}", file=sys.stderr)
            return 1
        caught = [caught_by_tests(checkout, name) for name in names]
    print(f"{sum(caught)} of {len(names)} faults are caught")
    return int(not all(caught))


def caught_by_tests(checkout: Path, name: str) -> bool:
    """Plant one fault and take it back; print what came of it."""
    began, fault = time.monotonic(), FAULTS[name]
    if (planted := plant(checkout, fault)) is None:
        print(f"{name:<46} NOT PLANTED: its text is not in the package exactly once", flush=True)
        return False
    file, text = planted
    try:
        found = failure(checkout, [*fault.tests])
    finally:
        file.write_text(text, encoding="utf-8")
    print(f"{name:<46} {f'caught by {found}' if found else 'MISSED'}, {time.monotonic() - began:.0f} s", flush=True)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
