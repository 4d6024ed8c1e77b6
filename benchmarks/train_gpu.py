"""Training speed on a GPU: as a share of what the card multiplies, and beside torch.

    python benchmarks/train_gpu.py [NAME …] [--smoke] [--profile FOLDER] [--batch-size B] [--results FOLDER]

- `gpt2_124m`: `configs/gpt.py:gpt2_124m` in bfloat16, beside the same model compiled by torch, with its flash
  attention, bfloat16 autocast and fused AdamW.
- `rmsnorm`: `configs/ladder.py:rmsnorm` beside the same model compiled by torch, once in float32, which is what
  torch computes in where it is told nothing, and once in bfloat16 as jaxformer does.
- `kernels`: the kernels of a step of `gpt2_124m` that take the time.
- `long_context`: one block as wide as `configs/gpt.py:llama_1b` at 65,536 and 131,072 positions: whether it runs,
  and what memory it takes.

All processes of a measurement take turns, one that multiplies large square matrices among them: the card's rate is
measured in the same minutes as what is divided by it. Before anything is timed the losses have to agree.
`--smoke` does all of it in a minute at tiny shapes on whatever device there is, and writes nothing unless it is told
where. What falls short is said, and is no failure; `--profile` then shows which kernels take the time. XLA_FLAGS
reaches jaxformer and stands in the results.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import kernel_times
import record
from peers import WARM_UP, Job, software, start
from processes import Failed, Worker, has, take_turns

PROFILED = 3
"""Steps in a profile."""


@dataclass(frozen=True)
class Plan:
    """Settings of the measurement."""

    rounds: int
    bursts: int
    steps: int
    smoke: bool
    python_torch: str
    batch_size: int
    """For gpt2_124m."""
    precision: str
    profile: Path | None
    results: Path | None

    @property
    def steps_taken(self) -> int:
        """By each worker."""
        return WARM_UP + self.rounds * self.bursts * self.steps + PROFILED

    def job(self, config: str, batch_size: int, tiny: Mapping[str, Any], **changes: Any) -> Job:
        """Return the config with these changes; in a smoke test, with a tiny model."""
        changes |= {"train": {"batch_size": min(batch_size, 4) if self.smoke else batch_size}}
        changes |= {"compute": {"precision": self.precision}}
        if self.smoke:
            changes["model"] = {**changes.get("model", {}), **tiny}
        return Job(config, self.steps_taken, changes)


@dataclass(frozen=True)
class Ratio:
    """A figure, and what it should be at least, if anything."""

    what: str
    value: float
    goal: float | None = None

    def __str__(self) -> str:
        if self.goal is None:
            return f"{self.what:<75}{self.value:8.3f}"
        verdict = "reached" if self.value >= self.goal else f"short: {self.value / self.goal:.0%} of the goal"
        return f"{self.what:<75}{self.value:8.3f}  goal {self.goal:.2f}  {verdict}"


def flops_a_token(facts: Mapping[str, Any]) -> int:
    """Floating-point operations that training on a token takes by the model's mathematics: 6·N + 12·L·T·d.

    N counts the weights that every token is multiplied with: the matrices of the blocks and the unembedding, no
    biases, gains, positions or rows looked up. d is the width of all heads together. Attention counts as if every
    position saw all T, as is usual (Chowdhery et al. 2022, appendix B); a causal mask hides half of it. What is
    computed twice counts once.
    """
    attention = 12 * facts["n_blocks"] * facts["context_length"] * facts["attention_width"]
    return 6 * facts["matrix_parameters"] + attention


def measure(
    name: str, job: Job, peers: Mapping[str, Sequence[str]], plan: Plan, matmul: Worker
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the figures of jaxformer, of the peers and of the matrix products, measured by turns, and the versions."""
    print(f"\n{name}:", flush=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        workers = start(job, Path(folder), peers, plan.python_torch, stack)
        ms = take_turns([*workers, matmul], plan.rounds, plan.bursts, plan.steps)
        facts, card = workers[0].facts, matmul.facts["device"]
        tokens = facts["batch_size"] * facts["context_length"]
        rate = 1e3 * matmul.facts["flops_a_step"] / ms.pop("matmul")
        rates = {each: 1e3 * tokens / took * flops_a_token(facts) for each, took in ms.items()}
        print(f"{facts['parameters']:,} parameters, {facts['batch_size']} x {facts['context_length']} tokens a step, "
              f"{facts['attention']}; the {card} multiplies at {rate / 1e12:.4g} TFLOP/s")  # fmt: skip
        for worker in workers:
            took, dtype = ms[worker.name], worker.facts["dtype"]
            print(f"{worker.name:24}{dtype:10}{took:10.2f} ms a step{1e3 * tokens / took:14,.0f} tokens/s"
                  f"{rates[worker.name] / rate:8.3f} of that rate")  # fmt: skip
        figures: dict[str, Any] = {
            "config": job.config,
            "changes": job.changes,
            **{key: facts[key] for key in ("parameters", "batch_size", "context_length", "attention", "xla_flags")},
            "dtypes": {worker.name: worker.facts["dtype"] for worker in workers},
            "losses_apart": {worker.name: worker.facts["losses_apart"] for worker in workers[1:]},
            "turns": {"rounds": plan.rounds, "bursts": plan.bursts, "steps": plan.steps},
            "median_ms_a_step": {each: round(took, 3) for each, took in ms.items()},
            "tokens_per_s": {each: round(1e3 * tokens / took) for each, took in ms.items()},
            "matmul": {**{key: matmul.facts[key] for key in ("size", "dtype")}, "flops_per_s": rate},
            "model_flops_a_token": flops_a_token(facts),
            "share_of_matmul_rate": {each: round(r / rate, 4) for each, r in rates.items()},
            "compiler": {"note": "what is inside a loop counts once, however often it runs", **facts["compiler"]},
        }
        if plan.profile:
            profile = plan.profile / name
            workers[0].take(1, PROFILED, profile)
            figures["kernels_ms_a_step"] = kernel_times.busiest(profile, PROFILED)
            print(f"the longest kernels, of {ms['jaxformer']:.2f} ms a step:")
            print(kernel_times.table(figures["kernels_ms_a_step"]))
        return figures, software(workers)


def store(
    name: str, figures: dict[str, Any], versions: dict[str, str], ratios: list[Ratio], plan: Plan, matmul: Worker
) -> None:
    """Write the result, if one is to be written."""
    if plan.results:
        figures["ratios"] = [asdict(ratio) for ratio in ratios]
        file = record.write(f"gpu_{name}", figures, versions, plan.results, gpu=matmul.facts["device"])
        print(f"written: {file}")


def gpt2_124m_job(plan: Plan) -> Job:
    """Without a warm-up, so that the first steps learn something by which to tell two models apart."""
    tiny = {"vocab_size": 211, "context_length": 32, "d_model": 32, "n_blocks": 2, "n_heads": 2, "d_ff": (128,)}
    return plan.job("gpt:gpt2_124m", plan.batch_size, tiny, optimizer={"warmup_steps": 0})


def gpt2_124m(plan: Plan, matmul: Worker) -> list[Ratio]:
    """Share of the card's rate, and speed over torch."""
    # On a CPU, torch compiles for a minute.
    peers = {"torch_compiled": ["--eager"] if plan.smoke else []}
    figures, versions = measure("gpt2_124m", gpt2_124m_job(plan), peers, plan, matmul)
    ms = figures["median_ms_a_step"]
    ratios = [
        Ratio("gpt2_124m: model FLOP/s over the card's matmul rate",
              figures["share_of_matmul_rate"]["jaxformer"], 0.55),
        Ratio("gpt2_124m: speed over compiled torch", ms["torch_compiled"] / ms["jaxformer"], 1.2),
    ]  # fmt: skip
    store("gpt2_124m", figures, versions, ratios, plan, matmul)
    return ratios


def rmsnorm(plan: Plan, matmul: Worker) -> list[Ratio]:
    """Speed over torch."""
    tiny = {"vocab_size": 211, "d_model": 32, "n_blocks": 2, "n_heads": 2, "head_dim": 8, "d_ff": (64, 64)}
    peers = {"torch_compiled_float32": ["--float32"], "torch_compiled": []}
    figures, versions = measure("rmsnorm", plan.job("ladder:rmsnorm", 4096, tiny), peers, plan, matmul)
    ms = figures["median_ms_a_step"]
    ratios = [
        Ratio("rmsnorm: speed over compiled torch in float32, its default",
              ms["torch_compiled_float32"] / ms["jaxformer"], 3.0),
        Ratio("rmsnorm: speed over compiled torch in jaxformer's dtype", ms["torch_compiled"] / ms["jaxformer"]),
    ]  # fmt: skip
    store("rmsnorm", figures, versions, ratios, plan, matmul)
    return ratios


def long_context(plan: Plan, matmul: Worker) -> list[Ratio]:
    """Memory at two lengths, of which one is twice the other."""
    tiny = {"vocab_size": 211, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "d_ff": (64,)}
    lengths = (64, 128) if plan.smoke else (65_536, 131_072)
    all_figures, versions, memory = dict[str, Any](), dict[str, Any](), list[float]()
    for length in lengths:
        job = plan.job("gpt:llama_1b", 1, tiny, model={"n_blocks": 1, "context_length": length}, mesh="")
        figures, versions = measure(f"long_context_{length}", job, {}, plan, matmul)
        all_figures[str(length)] = figures
        memory.append(figures["compiler"]["memory_bytes"])
        print(f"the compiler plans {memory[-1] / 2**30:.3f} GiB")
    ratios = [Ratio(f"long_context: memory at {lengths[0]:,} positions, doubled, over that at twice as many",
                    2 * memory[0] / memory[1], 1.0)]  # fmt: skip
    store("long_context", all_figures, versions, ratios, plan, matmul)
    return ratios


def kernels(plan: Plan, matmul: Worker) -> list[Ratio]:
    """Device time by kernel; a result of its own, so that a profiler that fails spoils no other."""
    with tempfile.TemporaryDirectory() as folder:
        once = replace(plan, rounds=1, bursts=1, profile=plan.profile or Path(folder))
        figures, versions = measure("kernels", gpt2_124m_job(plan), {}, once, matmul)
    store("kernels", figures, versions, [], plan, matmul)
    return []


MEASUREMENTS = {"gpt2_124m": gpt2_124m, "kernels": kernels, "rmsnorm": rmsnorm, "long_context": long_context}


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description="Training speed on a GPU beside torch.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MEASUREMENTS)} (default: all)")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, any device")
    parser.add_argument("--batch-size", type=int, default=64, help="windows a step for gpt2_124m (default: 64)")
    parser.add_argument(
        "--precision", default="auto", choices=("auto", "float32", "bfloat16"), help="compute.precision of the configs"
    )
    parser.add_argument("--profile", type=Path, help="write a profile of each below this folder")
    parser.add_argument("--results", type=Path, help="where to write results (default: benchmarks/results)")
    parser.add_argument("--python-torch", default=sys.executable, help="an interpreter that has torch and NumPy")
    asked = parser.parse_args()
    if unknown := set(asked.names) - set(MEASUREMENTS):
        parser.error(f"no measurement is called {', '.join(unknown)}; there are {', '.join(MEASUREMENTS)}")
    if not has(asked.python_torch, "torch", "numpy"):
        parser.error(f"{asked.python_torch} has no torch; pip install torch, or give --python-torch")
    return asked


def main() -> int:
    """Measure; 0 if all ran, 1 if something failed."""
    asked = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # when time is up, what there is is still printed
    # Processes share the card.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    rounds, bursts, steps, size = (1, 2, 2, 128) if asked.smoke else (5, 2, 5, 8192)
    results = asked.results or (None if asked.smoke else record.RESULTS)
    plan = Plan(
        rounds, bursts, steps, asked.smoke, asked.python_torch, asked.batch_size, asked.precision, asked.profile,
        results,
    )  # fmt: skip
    ratios, failed = [], False
    with Worker("matmul", sys.executable, "matmul.py", str(size), asked.precision) as matmul:
        if matmul.facts["platform"] != "gpu" and not asked.smoke:
            print("error: there is no GPU; --smoke runs on any device.", file=sys.stderr)
            return 1
        matmul.take(1)
        try:
            for name in asked.names or MEASUREMENTS:
                try:
                    ratios += MEASUREMENTS[name](plan, matmul)
                except Failed as error:
                    failed = True
                    print(f"error: {name}: {error}", file=sys.stderr)
        finally:
            print("\n" + "\n".join(map(str, ratios)))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
