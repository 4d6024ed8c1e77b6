"""One side of `benchmarks.equivalence`: a process that trains, samples from and exports small models of one checkout.

It uses only what docs/api.md promises and the commands, so that modules may lie elsewhere in another checkout. It reads
requests, lines of JSON `[CONFIG, MESH, FILE]`, and answers each with a line: `"done"` once the results are in FILE, or
what went wrong. An empty list is answered with the names of all configs. Each request is served by a fork, which has
imported everything but has no devices yet.
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

import jaxformer

STEPS = 20
DEVICES = {"data=1": 1, "fsdp=2": 2}
"""Number of virtual devices of each mesh."""
TRAIN = (
    f"--steps {STEPS} --train.batch-size 8 --train.log-every 1 --train.gradients-every {STEPS} --train.report-every 0 "
    f"--train.eval-every {STEPS} --train.eval-examples 8 --train.checkpoint-every 0 --train.divergence continue"
)
SMALL = {
    "vocab_size": 280, "context_length": 32, "d_model": 32, "d_embedding": 16, "d_joint": 16, "n_blocks": 2,
    "n_encoder_blocks": 2, "n_decoder_blocks": 2, "n_temporal_blocks": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32,
    "d_ff": 48, "n_experts": 4, "n_frames": 4,
}  # fmt: skip
"""Upper bounds of a model's fields."""
LONGEST_WARM_UP = 5
DATA = {
    "CaptionsConfig": "--data.path data/captions",
    "ChatConfig": "--data.path data/chat.jsonl",
    "DatesConfig": "--data.n-pairs 200 --data.n-held-out 20 --data.locales en_GB --data.forms short",
    "ImagesConfig": "--data.path data/images",
    "LabelledTextConfig": "--data.path data/reviews",
    "MovingImagesConfig": "--data.path data/images",
    "PairsConfig": "--data.path data/pairs",
}
"""Options of each kind of data; all others read the books."""
GREEDY = ("--prompt", "The king sees", "--temperature", "0", "--max-new-tokens", "24")
SAMPLE = {
    "CaptionsConfig": ("--images", "data/picture.png", "--prompt", "red", "blue"),
    "DatesConfig": ("--prompt", "7/9/2023"),
    "ImagesConfig": ("--images", "data/picture.png"),
    "LabelledTextConfig": ("--prompt", "The king sees the sea."),
    "MaskedTextConfig": ("--prompt", "The [MASK] sees the [MASK]."),
    "MovingImagesConfig": None,
    "PairsConfig": ("--prompt", "The king sees"),
}
"""Options of `sample.py` for each kind of data; None where it takes files of a kind of its own."""
DECODING = (
    (), ("--weights", "int8"), ("--cache-dtype", "int8"), ("--draft", "ngram"), ("--num-beams", "3"),
    ("--prefill-chunk", "2"), ("--temperature", "1", "--top-k", "9", "--top-p", "0.9", "--seed", "5"),
    ("--repetition-penalty", "1.3", "--presence-penalty", "0.2", "--min-p", "0.1", "--temperature", "0.8"),
)  # fmt: skip
"""Further options of `sample.py`, for `THOROUGH`; all other configs are sampled from with the first."""
FORMATS = ("safetensors", "hf", "gguf")
THOROUGH = ("quick:llama", "gpt:llama_1b", "moe:moe", "translation:transformer", "vision:vit", "dates:bahdanau")
"""Configs that are also exported as StableHLO and in bfloat16."""

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


def shrink(model: Any, prefix: str = "--model") -> Iterator[str]:
    """Yield the options that make a model small, and leave it the same in kind."""
    for field in dataclasses.fields(model):
        value, option = getattr(model, field.name), f"{prefix}.{field.name.replace('_', '-')}"
        if dataclasses.is_dataclass(value):
            yield from shrink(value, option)
        elif field.name in SMALL and value:
            widths = value if isinstance(value, tuple) else (value,)
            yield from (option, *(str(min(width, SMALL[field.name])) for width in widths))


def command(checkout: Path, *words: str) -> tuple[int, str]:
    """Run a command, such as `train.py` or `export`, in this process; return its exit status and standard output."""
    is_script = words[0].endswith(".py")
    sys.argv = [str(checkout / words[0]), *words[1:]] if is_script else ["jaxformer", *words]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            run = runpy.run_path if is_script else runpy.run_module
            run(sys.argv[0], run_name="__main__")
        except SystemExit as ended:
            return int(ended.code or 0), out.getvalue()
    return 0, out.getvalue()


def measure(checkout: Path, name: str, config: Any, mesh: str, folder: Path) -> Results:
    """Train a config in a new folder, and return everything that should be equal."""
    kind, results = type(config.data).__name__, {}
    warm_up = min(config.optimizer.warmup_steps, LONGEST_WARM_UP)
    words = ["train.py", "--config", name, "--run", str(folder), "--mesh", mesh, *TRAIN.split(), *shrink(config.model)]
    data = DATA.get(kind, "--data.path data/books").split()
    status, out = command(checkout, *words, "--optimizer.warmup-steps", str(warm_up), *data)
    if status:
        raise RuntimeError(f"training ended with exit status {status}: {out[-500:]}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "loss" in row]
    results["first loss|"] = np.array(trained[0]["loss"])
    results["losses|"] = np.array([row["loss"] for row in trained])
    results["learning rates|"] = np.array([row["lr"] for row in trained])
    results["gradient norms|"] = np.array([row["grad_norm"] for row in trained])
    results["step time|"] = np.median([row["step_ms"] for row in trained[2:]])
    for line in next(row["gradients"] for row in trained if "gradients" in row):
        results[f"first gradient|{line['name']}"] = np.array(line["g"])
    for row in rows:
        for key, value in row.items():
            if key in ("val_loss", "entropy") and value is not None:
                for i, part in enumerate(value if key == "entropy" else [value]):
                    results[f"evaluation|{key} {i} at {row['step']}"] = np.array(part)
    params = jaxformer.load_run(folder).params
    for path, array in jax.tree_util.tree_leaves_with_path(params):
        results[f"parameters|{jax.tree_util.keystr(path)}"] = np.asarray(array)
    if (options := SAMPLE.get(kind, GREEDY)) is not None:
        for more in DECODING if name in THOROUGH and options is GREEDY else DECODING[:1]:
            status, out = command(checkout, "sample.py", "--run", str(folder), *options, *more)
            results[f"samples|{' '.join(more)}"] = np.array(f"exit status {status}: {out}")
    if mesh == next(iter(DEVICES)):
        for fmt in (*FORMATS, *(("stablehlo",) if name in THOROUGH else ())):
            for dtype in ("float32", *(("bfloat16",) if name in THOROUGH else ())):
                results |= export(checkout, folder, fmt, dtype)
    return results


def export(checkout: Path, folder: Path, fmt: str, dtype: str) -> Results:
    """Export a run; return the tensors and a digest of each other file."""
    out, prefix = folder / f"export.{fmt}", f"export {fmt}|{dtype}"
    status, _ = command(checkout, "export", str(folder), "--format", fmt, "--out", str(out), "--dtype", dtype)
    results = {f"{prefix} exit status": np.array(status)}
    for file in sorted(out.rglob("*") if out.is_dir() else [out] if out.exists() else []):
        for key, value in contents(file).items() if file.is_file() else ():
            results[f"{prefix} {file.name} {key}"] = value
    shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)
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
        return {
            name: array.view(np.uint8) if array.dtype.kind == "V" else array for name, array in np.load(file).items()
        }
    if file.suffix == ".bin":  # a program, whose operations may change
        from jax import export as jax_export

        program = jax_export.deserialize(bytearray(content))
        shapes = f"{program.in_tree} {program.in_avals} {program.out_tree} {program.out_avals} {program.platforms}"
        return {"shapes": np.array(re.sub(r"0x[0-9a-f]+", "", shapes))}
    return {"": np.array(sha256(content).hexdigest())}


def serve(checkout: Path) -> None:
    """Answer requests until there are no more."""
    known = configs(checkout)
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        if not (request := json.loads(line)):
            print(json.dumps(list(known)), file=answers, flush=True)
            continue
        name, mesh, file = request
        if not (child := os.fork()):
            answer = "done"
            try:
                os.environ["JAX_NUM_CPU_DEVICES"] = str(DEVICES[mesh])  # the commands leave it alone then
                jax.config.update("jax_num_cpu_devices", DEVICES[mesh])
                folder = Path("runs") / name.replace(":", "-")
                np.savez(file, **measure(checkout, name, known[name], mesh, folder))
            except BaseException:  # whatever it is, the other side may do better
                answer = traceback.format_exc()
            finally:
                shutil.rmtree("runs", ignore_errors=True)
                print(json.dumps(answer), file=answers, flush=True)
                os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
