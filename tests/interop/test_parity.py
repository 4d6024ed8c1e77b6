"""Imported models compute what transformers computes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxformer.decode import Sampling, generate_tokens
from jaxformer.interop.run import import_run
from jaxformer.runs.run import Run, load_run
from tests.interop.published import publish, their_greedy, their_logits

pytestmark = pytest.mark.slow

GPT2_SHAPES: dict[str, Any] = {
    "n_embd": 24, "n_layer": 2, "n_head": 6, "n_positions": 96, "hidden_size": 24, "num_key_value_heads": None,
}  # fmt: skip
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, biases, wide heads": ("Llama", {"attention_bias": True, "head_dim": 10}),
    "gpt2, untied, wide": ("GPT2", {**GPT2_SHAPES, "tie_word_embeddings": False, "n_inner": 44}),
    "gemma3, scaling, soft cap": (
        "Gemma3",
        {
            "num_hidden_layers": 3, "sliding_window": 9, "head_dim": 8, "final_logit_softcapping": 5.0,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"], "rope_parameters": GEMMA_ROPE,
            "tie_word_embeddings": False,
        },
    ),
    "mixtral, one expert, window": (
        "Mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 7, "tie_word_embeddings": True},
    ),
}  # fmt: skip
"""Family and fields of its config that differ from `published.SHAPES`, besides what test_families.py compares."""
LENGTH = 95
N_NEW = 24

EPSILON, EPSILON_FIELD = 4e-6, ("rms_norm_eps", "layer_norm_epsilon")
"""Of the norms: no family's default."""

Forward = Callable[[np.ndarray], np.ndarray]


@pytest.fixture(params=CASES, scope="module")
def case(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Run, Forward]:
    """Return a torch model, the run imported from its folder, and the jitted model of the run."""
    family, changes = CASES[request.param]
    folder = tmp_path_factory.mktemp("published")
    is_sharded = family == "Llama"
    size = "10KB" if is_sharded else "5GB"
    model = publish(folder / "model", family, shard_size=size, **{**changes, EPSILON_FIELD[family == "GPT2"]: EPSILON})
    assert (len(list((folder / "model").glob("*.safetensors"))) > 2) == is_sharded
    path, _ = import_run(folder / "model", folder / "run")
    run = load_run(path)
    return model, run, forward(run)


def forward(run: Run) -> Forward:
    """Return the jitted model, `(T,)` to `(T, V)`."""
    return jax.jit(lambda tokens_T: run.model.apply({"params": run.params}, tokens_T))


def tokens(n: int, vocab_size: int = 291) -> np.ndarray:
    """Return random tokens, `(n,)`."""
    return np.random.default_rng(n).integers(0, vocab_size, n)


def test_logits_equal_those_of_transformers(case):
    model, run, logits = case
    assert run.config.model.norm_eps == EPSILON
    np.testing.assert_allclose(logits(tokens(LENGTH)), their_logits(model, tokens(LENGTH)), rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ["gemma3, scaling, soft cap", "mixtral, one expert, window"], indirect=True)
def test_greedy_tokens_equal_those_of_transformers_and_log_probabilities_those_of_the_full_pass(case):
    """Of what decoding has by itself: positions that are scaled and of each layer, windows and experts."""
    model, run, logits = case
    prompt = tokens(5).tolist()
    pieces = generate_tokens(
        run.model, run.params, [prompt], Sampling(temperature=0), [0], max_new_tokens=N_NEW, context_length=96
    )  # fmt: skip
    tokens_N, logprobs_N = (
        np.concatenate(parts, axis=1)[0]
        for parts in zip(*((piece.tokens, piece.logprobs) for piece in pieces), strict=True)
    )
    assert tokens_N.tolist() == their_greedy(model, prompt, N_NEW)
    text_T = np.concatenate([prompt, tokens_N, np.zeros(LENGTH - len(prompt) - N_NEW, int)])
    full_TV = jax.nn.log_softmax(logits(text_T))
    np.testing.assert_allclose(logprobs_N, full_TV[np.arange(4, 4 + N_NEW), tokens_N], rtol=0, atol=2e-5)


def test_half_precision_is_stored_exactly(tmp_path: Path):
    torch = pytest.importorskip("torch")
    model = publish(tmp_path / "model", "Llama").to(torch.float16)
    model.save_pretrained(tmp_path / "model")
    model = type(model).from_pretrained(tmp_path / "model", dtype=torch.float32)
    run = load_run(import_run(tmp_path / "model", tmp_path / "run")[0])
    assert {leaf.dtype.name for leaf in jax.tree.leaves(run.params)} == {"float32"}
    np.testing.assert_allclose(forward(run)(tokens(11)), their_logits(model, tokens(11)), rtol=0, atol=1e-4)
