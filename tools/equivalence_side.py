"""One side of `tools.equivalence`: a process that trains, samples from and exports small models of one checkout.

It uses only what docs/api.md promises and the commands, so that modules may lie elsewhere in another checkout. It reads
requests, lines of JSON `[CONFIG, MESH, FILE]`, and answers each with a line: `"done"` once the results are in FILE, or
what went wrong. CONFIG is a name and perhaps more options. An empty list is answered with the names of all configs and
the variants. Each request is served by a fork, which has imported everything but has no devices yet.
"""

import contextlib
import dataclasses
import io
import json
import os
import re
import runpy
import shutil
import sys
import traceback
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint  # noqa: F401  # imported once, before the forks

import jaxformer
import jaxformer.decode
import jaxformer.inspect

STEPS = 20
DEVICES = {"data=1": 1, "fsdp=2": 2}
"""Number of virtual devices of each mesh."""
TRAIN = (
    f"--steps {STEPS} --train.batch-size 8 --train.log-every 1 --train.gradients-every {STEPS} --train.report-every 0 "
    f"--train.eval-every {STEPS} --train.eval-examples 8 --train.checkpoint-every 0 --train.divergence continue"
)
SMALL = {
    "vocab_size": 280, "context_length": 64, "d_model": 24, "d_embedding": 16, "d_joint": 16, "n_blocks": 2,
    "n_encoder_blocks": 2, "n_decoder_blocks": 2, "n_temporal_blocks": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 24,
    "d_ff": 48, "n_experts": 4, "n_frames": 4,
}  # fmt: skip
"""Upper bounds of a model's fields."""
LONGEST_WARM_UP, LARGEST_DECAY = 5, 0.5
DATA = {
    "CaptionsConfig": "--data.path data/captions",
    "ChatConfig": "--data.path data/chat.jsonl --data.tokenizer data/tokenizer.json --data.template data/chat.jinja",
    "DatesConfig": "--data.n-pairs 200 --data.n-held-out 20 --data.locales en_GB --data.forms short",
    "ImagesConfig": "--data.path data/images",
    "LabelledTextConfig": "--data.path data/reviews",
    "LabelledTokensConfig": "--data.path data/words",
    "MovingImagesConfig": "--data.path data/images",
    "PairsConfig": "--data.path data/pairs",
}
"""Options of each kind of data; all others read the books."""
TEXT = ("--prompt", "The king sees", "--max-new-tokens", "24")
GREEDY = (*TEXT, "--temperature", "0", "--top-logprobs", "3")
SAMPLE = {
    "CaptionsConfig": ("--images", "data/picture.png", "--prompt", "red", "blue"),
    "DatesConfig": ("--prompt", "7/9/2023"),
    "ImagesConfig": ("--images", "data/picture.png"),
    "LabelledTextConfig": ("--prompt", "The king sees the sea."),
    "LabelledTokensConfig": ("--prompt", "The king sees the sea."),
    "MaskedTextConfig": ("--prompt", "The [MASK] sees the [MASK]."),
    "MovingImagesConfig": ("--images", "data/video.gif"),
    "PairsConfig": ("--prompt", "king sees the"),
}
"""Options of `sample.py` for each kind of data; all others continue a text."""
DECODING = (
    "--temperature 0 --weights int8", "--temperature 0 --cache-dtype int8", "--temperature 0 --prefill-chunk 2",
    "--temperature 0 --draft lookup", "--num-beams 3",
    "--num-samples 2 --temperature 1 --top-k 9 --top-p 0.9 --seed 5 --top-logprobs 3",
    "--min-p 0.1 --repetition-penalty 1.3 --presence-penalty 0.2", "--typical-p 0.5 --seed 1",
)  # fmt: skip
"""Further options of `sample.py`, for the texts of `THOROUGH`."""
VARIANTS = (
    "quick:modern --compute.precision bfloat16",
    "quick:modern --compute.attention blockwise --compute.remat dots",
    "quick:quick --compute.scan-blocks --compute.remat block --compute.grad-accumulation-steps 2",
    "quick:quick --model.attention.0.window 8 --model.attention.0.rope.base 100 --model.attention.1.window none",
    "quick:quick --model.norm-placement both --model.activation geglu --model.n-kv-heads 2",
    "quick:quick --optimizer.name muon",
    "quick:llama --data.packing documents",
    "moe:moe --model.experts.capacity-factor none --model.experts.shared-expert",
    "translation:transformer --model.dropout 0.2",
    "vision:vivit --model.attention factorised",
)
"""What no config has: a config and more options."""
FORMATS = ("safetensors", "hf", "gguf")
THOROUGH = ("quick:llama", "gpt:llama_1b", "moe:moe", "translation:transformer", "vision:vit", "dates:bahdanau")
"""Configs that are also sampled from with `DECODING`, and exported as StableHLO and in bfloat16."""

NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")

Results = dict[str, np.ndarray]
"""Arrays and texts, by `QUANTITY|NAME`."""


def configs(checkout: Path) -> dict[str, Any]:
    """Return the configs of all files by name, such as `quick:llama`."""
    found = {}
    for file in sorted((checkout / "configs").glob("*.py")):
        for name, value in runpy.run_path(str(file)).items():
            if isinstance(value, jaxformer.Config):
                found[f"{file.stem}:{name}"] = value
    return found


def shrink(model: Any, prefix: str = "--model") -> Iterator[list[str]]:
    """Yield the options that make a model small, and leave it the same in kind."""
    # Heads at a distance need a RoPE frequency of about that period.
    is_narrow = getattr(model, "local_heads", 0) and not getattr(model, "head_dim", None)
    bounds = SMALL | {"d_model": 2 * SMALL["d_model"]} if is_narrow else SMALL
    for field in dataclasses.fields(model):
        value, option = getattr(model, field.name), f"{prefix}.{field.name.replace('_', '-')}"
        if dataclasses.is_dataclass(value):
            yield from shrink(value, option)
        elif field.name in bounds and value:
            widths = value if isinstance(value, tuple) else (value,)
            yield [option, *(str(min(width, bounds[field.name])) for width in widths)]


def command(checkout: Path, *words: str) -> tuple[int, str, str]:
    """Run a command, such as `train.py` or `export`, in this process; return its exit status, output and errors."""
    is_script = words[0].endswith(".py")
    sys.argv = [str(checkout / words[0]), *words[1:]] if is_script else ["jaxformer", *words]
    status: Any = 0
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            run = runpy.run_path if is_script else runpy.run_module
            run(sys.argv[0], run_name="__main__")
        except SystemExit as ended:
            status = ended.code
    return int(status or 0), out.getvalue(), err.getvalue()


def measure(checkout: Path, name: str, config: Any, mesh: str, folder: Path) -> Results:
    """Train a config in a new folder, and return everything that should be equal."""
    (spec, *more), kind = name.split(), type(config.data).__name__
    options = ["--config", spec, *TRAIN.split(), *DATA.get(kind, "--data.path data/books").split()]
    options += ["--optimizer.warmup-steps", str(min(config.optimizer.warmup_steps, LONGEST_WARM_UP))]
    if (config.optimizer.decay_fraction or 0) > LARGEST_DECAY:
        options += ["--optimizer.decay-fraction", str(LARGEST_DECAY)]
    options += [word for option in shrink(config.model) if option[0] not in more for word in option]
    status, _, errors = command(checkout, "train.py", *options, *more, "--run", str(folder), "--mesh", mesh)
    if status:
        raise RuntimeError(f"training ended with exit status {status}: {errors[-500:]}")
    results = logged(folder)
    for path, array in jax.tree_util.tree_leaves_with_path(jaxformer.load_run(folder).params):
        results[f"parameters|{jax.tree_util.keystr(path)}"] = np.asarray(array)
    is_first, is_thorough = mesh == next(iter(DEVICES)), name in THOROUGH
    samples = [SAMPLE.get(kind, GREEDY)] if is_first else []  # sampling does not depend on the mesh of the training
    if is_thorough and samples == [GREEDY]:
        samples += [(*TEXT, *options.split()) for options in DECODING]
    for words in samples:
        results |= sample(checkout, folder, *words)
    if is_first:
        for fmt in (*FORMATS, "stablehlo") if is_thorough else FORMATS:
            for dtype in ("float32", "bfloat16") if is_thorough else ("float32",):
                results |= export(checkout, folder, fmt, dtype)
    return results


def logged(folder: Path) -> Results:
    """Return what the log of a run says."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "loss" in row]
    results: Results = {
        "first loss|": np.array(trained[0]["loss"]),
        "losses|": np.array([row["loss"] for row in trained]),
        "learning rates|": np.array([row["lr"] for row in trained]),
        "gradient norms|": np.array([row["grad_norm"] for row in trained]),
        "step time|": np.median([row["step_ms"] for row in trained[2:]]),
    }
    for line in next(row["gradients"] for row in trained if "gradients" in row):
        results[f"first gradient|{line['name']}"] = np.array(line["g"])
    for row in rows:
        values = {"val_loss": row.get("val_loss")} | {f"entropy {i}": v for i, v in enumerate(row.get("entropy") or ())}
        results |= {f"evaluation|{k} at {row['step']}": np.array(v) for k, v in values.items() if v is not None}
    return results


def sample(checkout: Path, folder: Path, *options: str) -> Results:
    """Sample from a run; return the text, and the numbers in it."""
    status, out, errors = command(checkout, "sample.py", "--run", str(folder), "--jsonl", *options)
    if status:
        raise RuntimeError(f"sampling with {' '.join(options)} ended with exit status {status}: {errors[-500:]}")
    out = re.sub(r'"(first_token_s|seconds)": [^,}]*', "", out)
    numbers = [float(number) for number in NUMBER.findall(out)]
    key = f"samples|{' '.join(options)}"
    return {f"{key} text": np.array(NUMBER.sub("#", out)), f"{key} numbers": np.array(numbers)}


def export(checkout: Path, folder: Path, fmt: str, dtype: str) -> Results:
    """Export a run; return the tensors and texts of the files, and digests of others."""
    out, prefix = folder / f"export.{fmt}", f"export {fmt}"
    status, *_ = command(checkout, "export", str(folder), "--format", fmt, "--out", str(out), "--dtype", dtype)
    results = {f"{prefix}|{dtype} exit status": np.array(status)}
    for file in sorted(path for path in (out, *out.rglob("*")) if path.is_file()):
        name = out.name if file == out else str(file.relative_to(out))
        quantity = f"{prefix} {name}" if file.suffix == ".json" else prefix
        results |= {f"{quantity}|{dtype} {name} {key}": value for key, value in contents(file).items()}
    if out.exists():
        shutil.rmtree(out) if out.is_dir() else out.unlink()
    return results


def contents(file: Path) -> Results:
    """Return the tensors and the metadata of a file; if it has no tensors, its digest."""
    content = file.read_bytes()
    if file.suffix == ".safetensors":
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        found = {"metadata": np.array(json.dumps(header.pop("__metadata__", {}), sort_keys=True))}
        for name, tensor in header.items():
            begin, end = tensor["data_offsets"]
            kind = {"F32": np.float32, "F16": np.float16}.get(tensor["dtype"], np.uint8)
            found[f"{name} {tensor['dtype']}"] = np.frombuffer(content[start + begin : start + end], kind)
            found[f"{name} shape"] = np.array(tensor["shape"])
        return found
    if file.suffix == ".gguf":
        import gguf

        reader = gguf.GGUFReader(file)
        metadata = {f"field {name}": np.array(str(field.contents())) for name, field in reader.fields.items()}
        return metadata | {f"{t.name} {t.tensor_type.name}": np.array(t.data) for t in reader.tensors}
    if file.suffix == ".npz":
        return {key: np.frombuffer(x, np.uint8) if x.dtype.kind == "V" else x for key, x in np.load(file).items()}
    if file.suffix == ".bin":
        return called(file)
    if file.suffix == ".json":
        return {key: np.array(value) for key, value in flat(json.loads(content))}
    return {"": np.array(sha256(content).hexdigest())}


def called(file: Path) -> Results:
    """Return the results of an exported program for some arguments."""
    from jax import export as programs

    weights = dict(np.load(file.with_name("weights.npz")))
    given = json.loads(file.with_name("signature.json").read_text())
    narrow = given["weights"]["dtype"]
    weights = {key: x.view(narrow) if x.dtype.kind == "V" else x for key, x in weights.items()}

    def array(spec: Any) -> Any:
        if isinstance(spec, list):
            return [array(part) for part in spec]
        shape = [2 if size == "B" else size for size in spec["shape"]]
        return (1 + np.arange(np.prod(shape, dtype=int)) % 7).reshape(shape).astype(spec["dtype"])

    specs = given["programs"][file.stem]["arguments"].items()
    arguments = [weights if name == "weights" else array(spec) for name, spec in specs]
    found = programs.deserialize(bytearray(file.read_bytes())).call(*arguments)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(found)]
    return {f"result {i}": x.astype(np.float32) if x.dtype.kind == "V" else x for i, x in enumerate(leaves)}


def flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the leaves of a JSON value as text, by path."""
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from flat(part, f"{path}.{key}")
    else:
        yield path, json.dumps(value)


def serve(checkout: Path) -> None:
    """Answer requests until there are no more."""
    known = configs(checkout)
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        if not (request := json.loads(line)):
            print(json.dumps([*known, *VARIANTS]), file=answers, flush=True)
            continue
        name, mesh, file = request
        if not (child := os.fork()):
            answer = "done"
            try:
                os.environ["JAX_NUM_CPU_DEVICES"] = str(DEVICES[mesh])  # the commands leave it alone then
                jax.config.update("jax_num_cpu_devices", DEVICES[mesh])
                folder = Path("runs/run")
                results = measure(checkout, name, known[name.split()[0]], mesh, folder)
                np.savez(file, **results)  # type: ignore[arg-type]  # no quantity is named allow_pickle
            except BaseException:  # whatever it is, the other side may do better
                answer = traceback.format_exc()
            finally:
                shutil.rmtree("runs", ignore_errors=True)
                print(json.dumps(answer), file=answers, flush=True)
                os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
