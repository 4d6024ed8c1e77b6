"""Metadata of GGUF files means what it means in llama.cpp: each key of the `gguf` package that is added, changed or
removed gives equal log-probabilities or a refusal that names it."""

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxformer.errors import UserError
from jaxformer.interop.families import GGUF_FAMILIES
from jaxformer.interop.gguf import export_gguf
from jaxformer.interop.obstacles import FAMILIES_BY_FORMAT, resolved
from jaxformer.interop.run import pretrained_model
from jaxformer.interop.sampling import GGUF_KEYS, PREFIX
from jaxformer.runs.run import Run, abstract_params
from tests.helpers import ROOT
from tests.interop.gguf_files import CONFIGS, KEYS, SHAPE_KEYS, V, random_model, write_gguf
from tests.interop.test_gguf import small

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.slow
__all__ = ["small"]  # a fixture

PROMPT = np.random.default_rng(0).integers(20, 270, 12)
VALUES: dict[str, list[Any]] = {
    "context_length": [32], "feed_forward_length": [[40] * 7], "attention.head_count": [[6] * 7, 3, 2],
    "attention.head_count_kv": [[2] * 7, 1, 6], "attention.layer_norm_rms_epsilon": [0.03], "rope.freq_base": [300.0],
    "rope.freq_base_swa": [30.0], "rope.scaling.type": ["none", "linear", "yarn", "longrope"],
    "rope.scaling.factor": [2.0, 1.0, 0.0], "rope.scale_linear": [2.0], "rope.scaling.attn_factor": [0.5, 1.0],
    "rope.scaling.original_context_length": [16], "rope.scaling.finetuned": [True], "rope.dimension_count": [4, 10],
    "attention.key_length": [6, 10], "attention.value_length": [6, 10], "attention.sliding_window": [3, 0],
    "attention.sliding_window_pattern": [2, 1, [True, False] * 3 + [True]], "attention.causal": [False, True],
    "attention.scale": [0.1], "attention.clamp_kqv": [0.5], "attention.max_alibi_bias": [2.0],
    "attention.output_scale": [0.5], "attention.temperature_scale": [0.5], "attention.temperature_length": [4],
    "final_logit_softcapping": [5.0, 0.0], "attn_logit_softcapping": [5.0], "router_logit_softcapping": [5.0],
    "logit_scale": [0.5], "residual_scale": [0.5], "embedding_scale": [0.5], "expert_weights_scale": [0.5],
    "expert_weights_norm": [True], "use_parallel_residual": [True, False], "swin_norm": [True],
    "activation_sparsity_scale": [[0.5] * 7], "swiglu_clamp_exp": [[0.5] * 7], "swiglu_clamp_shexp": [[0.5] * 7],
    "tensor_data_layout": ["Meta AI original pth", "x"], "rope.dimension_sections": [[2, 2, 1, 0]],
    "attention.layer_norm_epsilon": [0.03], "attention.group_norm_epsilon": [0.03], "pooling_type": [0],
    "vocab_size": [300], "expert_count": [0], "classifier.output_labels": [["a", "b"]], "block_count": [1],
}  # fmt: skip
"""Values of keys below the architecture; any other is a small number, of the type that llama.cpp reads."""
OTHERS: dict[str, list[Any]] = {
    "general.alignment": [64], "general.type": ["model", "adapter"], "split.count": [0, 1, 2], "split.no": [0, 1],
}  # fmt: skip
"""Values of other keys."""


def keys_of_package(case: str) -> dict[str, list[Any]]:
    """Return values for the keys of the `gguf` package that a file of an architecture may have."""
    architecture = case.partition(",")[0]
    of_class = lambda c: [x for n, x in vars(c).items() if not n.startswith("_") and isinstance(x, str)]  # noqa: E731
    classes = gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope, gguf.Keys.Classifier
    names = [key.removeprefix("{arch}.") for c in classes for key in of_class(c) if "{dense}" not in key]
    number = {name: [0.5 if name.startswith("rope.scaling") or name.endswith("scale") else 2] for name in names}
    n_blocks = {**SHAPE_KEYS, **KEYS[case]}["block_count"]
    cut = lambda x: x[:n_blocks] if isinstance(x, list) and len(x) == 7 else x  # noqa: E731
    values = {f"{architecture}.{name}": [cut(x) for x in xs] for name, xs in (number | VALUES).items()}
    return values | OTHERS | {key: ["x"] for key in of_class(gguf.Keys.General) if key not in OTHERS and "{" not in key}


def written_keys(case: str) -> list[str]:
    """Return the keys that the base of an architecture has."""
    return [f"{case.partition(',')[0]}.{key}" for key in {**SHAPE_KEYS, **KEYS[case]}]


class LlamaCpp:
    """A process of llama.cpp, which ends at some files, and begins anew."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def logprobs(self, file: Path) -> np.ndarray | None:
        """Return its log-probabilities of the token after `PROMPT`, `(V,)`; None if it does not load the file."""
        if self.process is None or self.process.poll() is not None:
            command, pipe = [sys.executable, "-m", "tests.interop.llama_cpp"], subprocess.PIPE
            self.process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
            )
        request = {
            "prompt": PROMPT.tolist(),
            "n_predict": 1,
            "temperature": 0,
            "n_probs": V,
            "cache_prompt": False,
            "logit_bias": [[87, 1e9]],  # w, as the server holds back parts of characters; unlike log-probabilities
        }
        print(json.dumps([str(file), request]), file=self.process.stdin, flush=True)
        answer = next((line for line in self.process.stdout if line.startswith('{"answer')), None)
        if answer is None:
            self.process.communicate()
            return None
        choices = json.loads(answer)["answer"].get("choices")
        if choices is None or choices[0]["logprobs"] is None:  # not even a number
            return None
        (first,) = choices[0]["logprobs"]["content"]
        logprobs = {token["id"]: token["logprob"] for token in first["top_logprobs"]}
        return np.array([logprobs.get(i, np.nan) for i in range(V)])


@pytest.fixture(scope="module")
def llama_cpp() -> Iterator[LlamaCpp]:
    pytest.importorskip("xllamacpp")
    server = LlamaCpp()
    yield server
    server.process.communicate()


def our_logprobs(file: Path) -> np.ndarray:
    """Return those of the imported model."""
    pretrained = pretrained_model(file)
    model = pretrained.model.build()
    logits_TV = model.apply({"params": pretrained.load(abstract_params(model))}, PROMPT)
    return np.asarray(jax.nn.log_softmax(logits_TV[-1]))


@pytest.mark.parametrize("case", CONFIGS)
def test_an_architecture_computes_what_llama_cpp_computes(case: str, llama_cpp: LlamaCpp, small: Run, tmp_path: Path):
    """Check the parameters and log-probabilities of files as llama.cpp's converter writes them, and of exports."""
    model = random_model(case)
    file = write_gguf(tmp_path / "x.gguf", case, model.tensors)
    theirs = llama_cpp.logprobs(file)
    scale = np.abs(theirs).max()
    with jax.disable_jit():
        pretrained = pretrained_model(file)
        assert resolved(pretrained.model) == resolved(model.config)
        params = pretrained.load(abstract_params(pretrained.model.build()))
        atol = 2**-22 if case.startswith("gemma") else 0  # of gains, to which the writer adds 1
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), params, model.params)
        # llama.cpp looks GELU up in a table of float16, also in the place of the exact one.
        assert np.abs(our_logprobs(file) - theirs).max() < 3e-4 * scale
    if case.partition(",")[0] in FAMILIES_BY_FORMAT["gguf"]:
        run = replace(small, config=replace(small.config, model=model.config), params=model.params)
        export_gguf(run, tmp_path / "exported.gguf")
        assert np.abs(llama_cpp.logprobs(tmp_path / "exported.gguf") - theirs).max() < 1e-5 * scale


def test_names_of_tensors_are_those_of_the_package():
    named = {f"{name.format(bid='{i}')}.{part}" for name in gguf.TENSOR_NAMES.values() for part in ("weight", "bias")}
    assert {row.theirs for family in GGUF_FAMILIES.values() for row in family.weights} <= named


REFUSED = {"attention.causal", "rope.scaling.attn_factor", "rope.scaling.type"} | {PREFIX + name for name in GGUF_KEYS}
"""Keys that are refused in every architecture, in some of the values drawn."""
OF_WINDOWS = {"rope.dimension_count", "rope.dimension_count_swa", "rope.freq_base_swa", "attention.sliding_window"}
REFUSED_MORE = {
    **dict.fromkeys(("gemma2", "gemma3", "olmo2", "cohere2"), OF_WINDOWS),
    "granite": {"rope.scaling.finetuned"}, "smollm3": {"attention.scale"}, "olmo": {"attention.clamp_kqv"},
    "command-r": {"logit_scale"}, "glm4": {"rope.dimension_sections"},
}  # fmt: skip
"""Other keys that are, in some architectures."""


@pytest.mark.parametrize("case", CONFIGS)
def test_keys_mean_what_they_mean_in_llama_cpp(
    case: str, llama_cpp: LlamaCpp, tmp_path: Path, request: pytest.FixtureRequest
):
    architecture, n_draws = case.partition(",")[0], request.config.getoption("--config-draws")
    counts, refused, wrong = Counter(), set(), []
    tensors, file = random_model(case).tensors, tmp_path / "x.gguf"
    draws = [{key: x} for key, xs in keys_of_package(case).items() for x in xs]
    draws += [{key: None} for key in written_keys(case)]
    random, keys = np.random.default_rng(0), [draw for draw in draws if re.search("rope|attention|soft", str(draw))]
    draws += [keys[i] | keys[j] for i, j in random.integers(len(keys), size=(40, 2))]
    with jax.disable_jit():
        for changes in draws[[*CONFIGS].index(case) % 50 :: max(1, 200 // n_draws)] if n_draws < 200 else draws:
            write_gguf(file, case, tensors, changes)
            theirs = llama_cpp.logprobs(file)
            try:
                ours, refusal = our_logprobs(file), ""
            except UserError as error:
                ours, refusal = None, str(error)
            names = {key.removeprefix(f"{architecture}.") for key in changes}
            if theirs is None:
                counts["rejected"] += 1
            elif ours is not None and np.abs(ours - theirs).max() < 1e-3 * np.abs(theirs).max():
                counts["equal"] += 1
            elif ours is None and any(name in refusal for name in names):
                counts["refused"] += 1
                refused |= names if len(names) == 1 else set()
            else:
                wrong.append((changes, refusal or np.abs(ours - theirs).max()))
            file.unlink()
    print(f"\n{case}: {counts.total()} draws, {dict(counts)}, refused: {sorted(refused)}")
    assert not wrong
    assert counts["equal"] >= (counts.total() // 2 if n_draws == 200 else 1)  # a few may be rejected, most of them
    assert refused <= REFUSED | REFUSED_MORE.get(architecture, set())
