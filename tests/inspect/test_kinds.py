"""Each instrument on an imported model of four kinds: the table of docs/inspecting.md, each cell of which is a test.

A cell is `yes`; or, in the words of its message, the reason why the instrument refuses the model.

    pytest -m '' -n 0 tests/inspect/test_kinds.py --all-kinds

tries all cells, which takes a minute. Without the option, refusals are tried, and each instrument on one of its kinds,
but for those whose programs are large.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import inspect
from jaxformer.data.dataset import Batch
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError
from jaxformer.inspect.film import film
from jaxformer.inspect.pages.live import live_section
from jaxformer.interop.configs import read_config
from jaxformer.interop.families.tables import IMAGE_PROCESSOR
from jaxformer.interop.run import finetuning_config
from jaxformer.models.objective import mean_loss, objective_of
from jaxformer.runs.run import Run, create_run
from tests.arrays import random_params
from tests.helpers import ROOT
from tests.interop.published import N_TOKENS, SHAPES, TEXTS

YES = "yes"
RESULTS = {"Autopsy", "Check", "Edge", "GradientReport", "PerExampleGradients", "TokenExplanation"}
WITHOUT_MODEL = {"draw_alignment", "nesterov_limit", "save_autopsy"}
OF_PAGES = {"the film", "the model on the page"}

CONFIGS: dict[str, dict[str, Any]] = {
    "GPT-NeoX": {
        "model_type": "gpt_neox", "hidden_act": "gelu", "use_parallel_residual": True, "attention_bias": True,
        "rotary_pct": 0.5, "layer_norm_eps": 1e-5, "tie_word_embeddings": False,
    },
    "Gemma 2": {
        "model_type": "gemma2", "head_dim": 4, "sliding_window": 5, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 9, "tie_word_embeddings": True,
    },
    "T5": {
        "model_type": "t5", "d_kv": 4, "d_ff": 40, "num_decoder_layers": 1, "feed_forward_proj": "gated-gelu",
        "relative_attention_num_buckets": 8, "decoder_start_token_id": 3, "pad_token_id": 3,
        "tie_word_embeddings": False,
    },
    "ViT": {
        "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_act": "gelu", "image_size": 8,
        "patch_size": 4, "id2label": {"0": "cat", "1": "dog", "2": "king"},
        IMAGE_PROCESSOR: {"image_processor_type": "ViTImageProcessor", "size": {"height": 8, "width": 8}},
    },
}  # fmt: skip
"""Configs as published, but small."""
TOKENS = np.array([11, 12, 13, 14, 11, 12, 15, 11, 12])
"""Some of them repeated, for the scores of heads that look for that."""


def preference(logits: jax.Array) -> jax.Array:
    """Return a metric of the last prediction, or of the only one."""
    last_V = logits[-1] if logits.ndim == 2 else logits
    return last_V[0] - 2 * last_V[1]


@dataclass(frozen=True)
class Kind:
    """A model as an import makes it, and two examples as a batch; the first source has padding."""

    name: str
    run: Run
    batch: Batch

    @property
    def of(self) -> tuple[Any, Any]:
        """The first arguments of all instruments."""
        return self.run.model, self.run.params

    @property
    def config(self) -> Any:
        """The config of the model."""
        return self.run.config.model

    @property
    def one(self) -> Batch:
        """The first example as a batch."""
        return jax.tree.map(lambda x: x[:1], self.batch)

    @property
    def examples(self) -> list[Batch]:
        return [jax.tree.map(lambda x, b=b: x[b], self.batch) for b in range(2)]

    @property
    def inputs(self) -> tuple[jax.Array, ...]:
        return self.examples[0].inputs

    @property
    def other(self) -> tuple[jax.Array, ...]:
        """Other inputs of the same shapes, with the same padding."""
        return tuple(a if a.dtype == bool else b for a, b in zip(*(x.inputs for x in self.examples), strict=True))

    @property
    def causal(self) -> bool:
        return self.name in ("GPT-NeoX", "Gemma 2")

    @property
    def stack(self) -> str:
        """Stack of blocks that the inputs go through first."""
        return "encoder_blocks" if self.name == "T5" else "blocks"

    @property
    def layer(self) -> str:
        """The first attention layer."""
        return f"{self.stack}.0.attention"

    @property
    def weights(self) -> dict[str, jax.Array]:
        """Parameters of that layer."""
        return self.run.params[f"{self.stack}_0"]["attention"]

    @cached_property
    def last(self) -> str:
        """The last residual stream."""
        return [name for name in self.values if name.endswith("resid_post")][-1]

    @cached_property
    def capture(self) -> Callable[..., Any]:
        """The activations, a function of parameters and inputs."""
        return jax.jit(partial(inspect.capture, self.run.model))

    @cached_property
    def values(self) -> dict[str, np.ndarray]:
        return jax.device_get(self.capture(self.run.params, *self.inputs))

    @cached_property
    def maps(self) -> dict[str, np.ndarray]:
        """Attention maps `(H, T, S)`."""
        return {name.removesuffix(".pattern"): x for name, x in self.values.items() if name.endswith(".pattern")}

    def rows(self, layer: str) -> np.ndarray:
        """Return which rows of a layer's map are no padding."""
        T = self.maps[layer].shape[1]
        return np.asarray(self.inputs[1]) if layer.startswith("encoder") else np.ones(T, bool)

    @cached_property
    def head(self) -> Callable[..., Any]:
        """What follows the last residual stream, a function of that."""
        return jax.jit(lambda stream_TD: inspect.run_from(*self.of, self.inputs, {self.last: stream_TD}))

    @cached_property
    def loss_and_gradient(self) -> Callable[..., Any]:
        """The mean loss of the first example and its gradient by the parameters, a function of these."""
        return jax.jit(jax.value_and_grad(lambda params: mean_loss(self.run.model, params, self.one)))

    @cached_property
    def pull(self) -> jax.Array:
        """Gradient of the loss of the first example by the last residual stream, `(T, D)`."""
        model, example = self.run.model, self.examples[0]

        def loss(stream_TD: jax.Array) -> jax.Array:
            with inspect.intervene(self.last, lambda *_: stream_TD):
                return objective_of(model).example_loss(model, self.run.params, example)

        return jax.jit(jax.grad(loss))(self.values[self.last])


CHECKS: dict[str, Callable[[Kind], Any]] = {}
LARGE: set[str] = set()
"""Rows whose programs take seconds to compile."""


def of(*names: str, large: bool = False) -> Callable[[Callable[[Kind], Any]], Callable[[Kind], Any]]:
    """Make a function the check of the instruments in one row of the table."""

    def register(check: Callable[[Kind], Any]) -> Callable[[Kind], Any]:
        row = ", ".join(name if name in OF_PAGES else f"`{name}`" for name in names)
        CHECKS[row] = check
        LARGE.update([row] * large)
        return check

    return register


def close(ours: Any, expected: Any, tolerance: float = 1e-4) -> None:
    """Compare relative to the largest magnitude."""
    assert np.shape(ours) == np.shape(expected)
    scale = np.abs(expected).max()
    assert np.abs(np.asarray(ours) - np.asarray(expected)).max() <= tolerance * scale


def entropy(weights: np.ndarray) -> np.ndarray:
    return -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)


def dot(a: Any, b: Any) -> float:
    return float(sum(jax.tree.leaves(jax.tree.map(lambda x, y: np.vdot(x, y), a, b))))


@of("capture", "capture_shapes", "capturing")
def parts_add_up(kind: Kind) -> None:
    """What blocks write adds up to the stream, and heads to what attention writes."""

    def call() -> tuple[Any, dict[str, jax.Array]]:
        with inspect.capturing("*") as values:
            return kind.run.model.apply({"params": kind.run.params}, *kind.inputs), values

    output, shapes = jax.eval_shape(call)
    of_shapes = inspect.capture_shapes(*kind.of, *kind.inputs)
    assert list(of_shapes) == list(kind.values) == list(shapes)
    assert all(of_shapes[name].shape == x.shape for name, x in kind.values.items())
    assert kind.values["logits"].shape == output.shape
    for before in (name for name in kind.values if name.endswith("resid_pre")):
        block = before.removesuffix(".resid_pre")
        written = (kind.values.get(f"{block}.{part}", 0) for part in ("attn_out", "cross_attn_out", "mlp_out"))
        close(kind.values[f"{block}.resid_post"], kind.values[before] + sum(written))
    heads_TD = np.einsum("htk,hkd->td", kind.values[f"{kind.layer}.z"], kind.weights["W_O"])
    close(kind.values[kind.layer], heads_TD + np.asarray(kind.weights.get("b_O", 0)))


@of("intervene", "run_from")
def another_stream_gives_its_output(kind: Kind) -> None:
    others = jax.device_get(kind.capture(kind.run.params, *kind.other))
    assert np.abs(others["logits"] - kind.values["logits"]).max() > 1e-2
    close(kind.head(others[kind.last]), others["logits"])  # by `run_from`, which intervenes


@of("capture_gradients", "gradient_of", large=True)
def gradients_of_weights_are_those_of_what_they_compute(kind: Kind) -> None:
    """dL/dW_V = xᵀ dL/dv."""
    wrt = (f"{kind.layer}.W_V", f"{kind.layer}.v")
    grads = inspect.gradient_of(*kind.of, *kind.inputs, of=preference, wrt=wrt)
    x_SD = kind.values[f"{kind.layer}_norm"]
    assert np.abs(grads[wrt[0]]).max() > 0
    close(grads[wrt[0]], np.einsum("sd,gsk->dgk", x_SD, grads[wrt[1]]))
    model, params = kind.of
    call = lambda: preference(model.apply({"params": params}, *kind.inputs))  # noqa: E731
    close(inspect.capture_gradients(call, names=wrt[1])[1][wrt[1]], grads[wrt[1]])


@of("attention_maps", "named_attention_maps")
def rows_of_maps_sum_to_one(kind: Kind) -> None:
    named = jax.eval_shape(lambda: inspect.named_attention_maps(*kind.of, *kind.inputs))  # a part of the activations
    shapes = {name: x.shape for name, x in kind.maps.items()}
    assert {name: x.shape for name, x in named.items()} == shapes
    maps = jax.eval_shape(lambda: inspect.attention_maps(*kind.of, *kind.inputs))
    assert [x.shape for x in maps] == list(shapes.values())
    for layer, weights_HTS in kind.maps.items():
        np.testing.assert_allclose(weights_HTS.sum(-1), 1, atol=1e-5)
        age_TS = np.subtract.outer(*map(np.arange, weights_HTS.shape[1:]))
        visible_TS = np.ones_like(age_TS, bool)
        if layer.startswith("decoder_blocks.0.attention") or kind.causal:
            visible_TS = (age_TS >= 0) & (age_TS < (5 if kind.name == "Gemma 2" else 9))
        elif kind.name == "T5":
            visible_TS &= np.asarray(kind.inputs[1])
        assert ((weights_HTS > 0) == visible_TS).all()


@of("attention_entropy")
def entropies_are_those_of_the_maps(kind: Kind) -> None:
    found = inspect.attention_entropy(*kind.of, *kind.one.inputs)
    for (layer, weights_HTS), entropy_H in zip(kind.maps.items(), found, strict=True):
        close(entropy_H, entropy(weights_HTS)[:, kind.rows(layer)].mean(-1))


@of("head_statistics")
def scores_of_heads_are_those_of_the_maps(kind: Kind) -> None:
    """By hand, from the maps: rows that are no padding, but the first; cells after an earlier, equal token."""
    statistics = inspect.head_statistics(*kind.of, *kind.one.inputs)
    assert list(statistics) == list(kind.maps)
    for layer, weights_HTS in kind.maps.items():
        found, rows_T = statistics[layer], kind.rows(layer)
        close(found.entropy, entropy(weights_HTS)[:, rows_T].mean(-1))
        if "cross" in layer:
            assert np.isnan(found.previous).all() and np.isnan(found.induction).all()
            continue
        T = weights_HTS.shape[1]
        close(found.previous, weights_HTS[:, np.arange(1, T), np.arange(T - 1)][:, rows_T[1:]].mean(-1))
        if kind.name == "ViT":
            assert np.isnan(found.induction).all()
            continue
        tokens_T = np.asarray(kind.inputs[2 if layer.startswith("decoder") else 0])
        before = [(t, [s + 1 for s in range(t) if tokens_T[s] == tokens_T[t]]) for t in range(T) if rows_T[t]]
        close(found.induction, np.mean([weights_HTS[:, t, after].sum(-1) for t, after in before if after], axis=0))


@of("ablate_heads", "ablation_loss", large=True)
def an_ablated_head_is_one_without_output_weights(kind: Kind) -> None:
    found = inspect.ablate_heads(*kind.of, kind.one)
    assert list(found.zero) == list(kind.maps)
    cut = dict(kind.run.params)
    cut[f"{kind.stack}_0"] = cut[f"{kind.stack}_0"] | {
        "attention": kind.weights | {"W_O": kind.weights["W_O"].at[1].set(0)}
    }
    (loss, _), (without, _) = map(kind.loss_and_gradient, (kind.run.params, cut))
    close(found.loss, loss)
    np.testing.assert_allclose(found.zero[kind.layer][1], without - loss, atol=1e-4)
    mean = inspect.ablation_loss(*kind.of, kind.one, [(kind.layer, 1)])
    np.testing.assert_allclose(mean, found.loss + found.mean[kind.layer][1], atol=1e-4)


@of("patched_back", "singular_values")
def heads_are_parts_of_parameters(kind: Kind) -> None:
    earlier = jax.tree.map(np.zeros_like, kind.run.params)
    patched = inspect.patched_back(kind.run.params, earlier, kind.layer, 1)[f"{kind.stack}_0"]["attention"]
    W_Q, W_K = (np.asarray(kind.weights[name]) for name in ("W_Q", "W_K"))
    H, G = W_Q.shape[1], W_K.shape[1]
    for name, head in (("W_Q", 1), ("W_K", G // H), ("W_V", G // H)):
        whole = np.asarray(kind.weights[name])
        np.testing.assert_array_equal(patched[name], whole * (np.arange(whole.shape[1]) != head)[None, :, None])
    QK_HK, _ = inspect.singular_values(kind.weights)
    expected = np.linalg.svd(W_Q[:, 1] @ W_K[:, G // H].T, compute_uv=False)
    close(QK_HK[1], expected[: QK_HK.shape[1]])


@of("logit_lens")
def the_lens_of_the_last_stream_is_the_output(kind: Kind) -> None:
    lens = inspect.logit_lens(*kind.of, *kind.inputs)
    assert list(lens)[-1] == kind.last
    close(lens[kind.last], kind.values["logits"])


@of("logit_attribution")
def contributions_sum_to_the_logit(kind: Kind) -> None:
    """Before the soft cap."""
    parts = inspect.logit_attribution(*kind.of, *kind.inputs, target_T=np.roll(TOKENS, -1))
    total_T = sum(np.sum(x, axis=0) if name.endswith(".z") else np.asarray(x) for name, x in parts.items())
    cap = kind.config.logit_soft_cap
    capped_T = total_T if cap is None else cap * np.tanh(total_T / cap)
    close(capped_T, kind.values["logits"][np.arange(len(TOKENS)), np.roll(TOKENS, -1)])


@of("agreement", "jacobian_lens", "lens_logits", "regression_lens", large=True)
def lenses_of_the_last_stream_change_nothing(kind: Kind) -> None:
    """Neither its mean Jacobian, which is the identity, nor its regression on itself."""
    tokens_T = kind.inputs[0]
    lens = inspect.regression_lens(*kind.of, [tokens_T], ridge=0.0)
    close(inspect.lens_logits(*kind.of, lens, tokens_T)[kind.last], kind.values["logits"], 1e-3)
    same, divergence = inspect.agreement(*kind.of, lens, [tokens_T])[kind.last]
    assert same == 1 and abs(divergence) < 1e-4
    A_DD, b_D = inspect.jacobian_lens(*kind.of, [tokens_T])[kind.last]
    np.testing.assert_allclose(A_DD, np.eye(len(A_DD)), atol=1e-6)
    np.testing.assert_allclose(b_D, 0, atol=1e-6 * np.abs(kind.values[kind.last]).max())


@of("backward_lens", large=True)
def the_loss_pulls_the_stream_against_its_gradient(kind: Kind) -> None:
    pulled = inspect.backward_lens(*kind.of, kind.examples[0])
    params = kind.run.params
    out_DV = params["W_out"] if "W_out" in params else params["embedding"]["W_E"].T
    close(pulled[kind.last], -np.asarray(kind.pull) @ np.asarray(out_DV) * kind.config.logit_scale)


@of("path_attribution")
def paths_to_the_logits_add_up_to_the_last_stream(kind: Kind) -> None:
    """To first order."""
    edges = inspect.path_attribution(*kind.of, kind.inputs, kind.other, preference, n_exact=0)
    direct = sum(edge.estimate for edge in edges if edge.target == "logits")
    np.testing.assert_allclose(direct, slope(kind), rtol=1e-3)
    by_head = [edge.target for edge in edges if edge.source == "blocks.0.attention.z.2"]
    assert by_head == ["logits"]  # the MLP is parallel


def slope(kind: Kind) -> float:
    """Return the derivative of the metric along the difference of the last stream for the other inputs."""
    stream, other = kind.values[kind.last], kind.capture(kind.run.params, *kind.other)[kind.last]
    return float(jax.jvp(lambda x: preference(kind.head(x)), (stream,), (np.asarray(other) - stream,))[1])


@of("attribution_patching", "patch_activations", large=True)
def patching_the_last_stream_changes_the_output_where_it_is_read(kind: Kind) -> None:
    pair = kind.inputs, kind.other, kind.last, preference
    patched_T = np.asarray(inspect.patch_activations(*kind.of, *pair)[kind.last])
    plain, other = (float(preference(kind.capture(kind.run.params, *x)["logits"])) for x in (kind.inputs, kind.other))
    expected_T = np.full(len(patched_T), plain)
    expected_T[0 if kind.name == "ViT" else -1] = other  # the class token; the last token
    np.testing.assert_allclose(patched_T, expected_T, atol=1e-4 * abs(expected_T).max())
    estimates_T = inspect.attribution_patching(*kind.of, *pair)[kind.last]
    np.testing.assert_allclose(np.sum(estimates_T - plain), slope(kind), rtol=1e-3)


@of("gradient_report", "per_example_gradients", large=True)
def norms_are_those_of_the_gradient(kind: Kind) -> None:
    found = inspect.per_example_gradients(*kind.of, kind.one)
    _, grads = kind.loss_and_gradient(kind.run.params)
    norm = dot(grads, grads) ** 0.5
    np.testing.assert_allclose([found.norm_B[0], found.mean_norm], norm, rtol=1e-4)
    np.testing.assert_allclose(found.cosine_B, 1, rtol=1e-4)
    report = inspect.gradient_report(kind.run.params, grads)
    np.testing.assert_allclose(sum(row.grad_norm**2 for row in report.rows), norm**2, rtol=1e-4)
    assert f"{kind.layer}.heads.1.W_Q" in {row.name for row in report.rows}


@of("gradients_by_position")
def norms_by_position_are_those_of_the_streams_gradient(kind: Kind) -> None:
    found = inspect.gradients_by_position(*kind.of, kind.examples[0], kind.last)[kind.last]
    close(found, np.linalg.norm(kind.pull, axis=-1))


@of("gauss_newton_product", "hessian_product", "largest_eigenvalues", "sharpness", large=True)
def curvature_is_that_of_difference_quotients(kind: Kind) -> None:
    (model, params), step = kind.of, 1e-3
    value, direction = inspect.sharpness(model, params, kind.one, tolerance=0.01)
    length = dot(direction, direction)
    near = [jax.tree.map(lambda p, v, s=s: p + s * step * v, params, direction) for s in (1, -1)]
    H_v = jax.tree.map(lambda a, b: (a - b) / (2 * step), *(kind.loss_and_gradient(params)[1] for params in near))
    assert value > 0
    np.testing.assert_allclose(dot(direction, H_v) / length, value, rtol=0.02)
    G_v = inspect.gauss_newton_product(model, params, kind.one, direction)
    up, down = (np.asarray(kind.capture(p, *kind.inputs)["logits"], np.float64) for p in near)
    tangent = (up - down) / (2 * step)
    p = np.asarray(jax.nn.softmax(kind.values["logits"]), np.float64)
    variance = (p * tangent**2).sum(-1) - (p * tangent).sum(-1) ** 2
    np.testing.assert_allclose(dot(direction, G_v), variance.mean(), rtol=0.02)


@of("saturation", large=True)
def the_gradient_of_scores_follows_the_formula(kind: Kind) -> None:
    (found,) = inspect.saturation(*kind.of, kind.one, 1.0, kind.layer)
    np.testing.assert_allclose(found.scores, found.scores_by_hand, rtol=1e-3)
    W_Q = kind.loss_and_gradient(kind.run.params)[1][f"{kind.stack}_0"]["attention"]["W_Q"]
    np.testing.assert_allclose(found.W_Q, np.linalg.norm(W_Q), rtol=1e-3)
    np.testing.assert_allclose(
        found.entropy, entropy(kind.maps[kind.layer])[:, kind.rows(kind.layer)].mean(), rtol=1e-4
    )


@of("explain")
def explanations_are_probabilities_and_mean_weights(kind: Kind) -> None:
    tokens = np.asarray(kind.inputs[0])
    rows = inspect.explain(*kind.of, tokens)
    p_TV = np.asarray(jax.nn.softmax(kind.values["logits"]))
    close([row.probability for row in rows], p_TV[np.arange(len(tokens) - 1), tokens[1:]])
    mean_TS = np.concatenate(list(kind.maps.values())).mean(0)
    assert [row.attended[0][0] for row in rows] == mean_TS.argmax(-1)[:-1].tolist()


@of("check_init")
def observed_moments_are_those_of_the_activations(kind: Kind) -> None:
    report = inspect.check_init(*kind.of, kind.one.inputs[0])
    assert len(report.expected) == len(report.observed) == kind.config.n_blocks
    for i, block in enumerate(report.observed):
        np.testing.assert_allclose(block.stream, np.square(kind.values[f"blocks.{i}.resid_pre"]).mean(), rtol=1e-4)
        np.testing.assert_allclose(block.entropy, entropy(kind.maps[f"blocks.{i}.attention"]).mean(), rtol=1e-4)


@of("verify", large=True)
def invariants_hold(kind: Kind) -> None:
    for check in inspect.verify(*kind.of, kind.batch):
        assert check.holds, check
        if check.name == "attention mask":  # others compile for long, and test_property_checks.py has them
            break


@of("first_non_finite", large=True)
def a_planted_value_is_found(kind: Kind) -> None:
    model, params = kind.of
    assert inspect.first_non_finite(model, params, kind.one) is None
    broken = dict(params)
    broken[f"{kind.stack}_0"] = broken[f"{kind.stack}_0"] | {
        "attention": kind.weights | {"W_V": kind.weights["W_V"].at[0, 0, 0].set(np.nan)}
    }
    found = inspect.first_non_finite(model, broken, kind.one)
    assert found is not None and found.origin == f"the parameter {kind.layer}.W_V"


@of("router_report")
def experts_are_loaded(kind: Kind) -> Any:
    return inspect.router_report(*kind.of, kind.one.inputs)


@of("alignment")
def an_alignment_is_the_mean_of_the_last_cross_attention(kind: Kind) -> None:
    source_S, target_T = kind.inputs[0], kind.inputs[-1]
    found_TS = inspect.alignment(*kind.of, source_S, target_T)
    values = kind.capture(kind.run.params, source_S, np.ones(len(source_S), bool), target_T)
    np.testing.assert_allclose(np.sum(found_TS, axis=-1), 1, atol=1e-5)
    close(found_TS, values["decoder_blocks.0.cross_attention.pattern"].mean(0))


@of("Replay")
def a_training_is_repeated(kind: Kind) -> None:
    inspect.Replay(kind.run)


@of("the film")
def frames_are_measured(kind: Kind) -> None:
    next(film(kind.run, kind.batch))


@of("the model on the page")
def the_page_runs_the_model(kind: Kind) -> None:
    live_section(*kind.of, kind.run.tokenizer, kind.inputs[0], max_parameters=10**6)


def table() -> dict[str, dict[str, str]]:
    """Return the cells of the table by row and kind."""
    text = (ROOT / "docs/inspecting.md").read_text(encoding="utf-8")
    lines = re.search(r"<!-- kinds -->\n(.+?)<!-- end -->", text, re.DOTALL)[1].strip().splitlines()
    (_, *kinds), _, *rows = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in lines)
    assert kinds == list(CONFIGS)
    return {row: dict(zip(kinds, cells, strict=True)) for row, *cells in rows}


@pytest.fixture(scope="module")
def kind_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Kind]:
    """Return a function that makes each kind once."""
    return cache(lambda name: make_kind(name, tmp_path_factory.mktemp("kind") / "run"))


def make_kind(name: str, folder: Path) -> Kind:
    """Return a random model of a config as the import of such a model reads it."""
    config = finetuning_config("run", read_config({**SHAPES, "num_hidden_layers": 1, **CONFIGS[name]}))
    model, tokenizer = config.model.build(), None if name == "ViT" else Tokenizer.train(TEXTS, N_TOKENS)
    params = random_params(model, *config.model.example())
    run = Run(create_run(folder, config, tokenizer, allow_suffix=False), config, model, params, tokenizer, step=0)
    draw = np.random.default_rng(0)
    tokens_BT = np.stack([TOKENS, draw.permuted(TOKENS)])
    targets_BT = np.roll(tokens_BT, -1, axis=1)
    if name == "ViT":
        batch = Batch((draw.integers(0, 256, (2, 8, 8, 3), np.uint8),), np.array([0, 2]))
    elif name == "T5":
        valid_BS = np.arange(len(TOKENS)) < np.array([[7], [9]])
        batch = Batch((tokens_BT[::-1], valid_BS, tokens_BT), targets_BT)
    else:
        batch = Batch((tokens_BT,), targets_BT)
    return Kind(name, run, jax.tree.map(jnp.asarray, batch))


def test_the_table_has_a_row_for_each_instrument_and_each_row_a_check() -> None:
    names = {name.strip("`") for row in table() for name in row.split(", ")}
    assert names == {*inspect.__all__} - RESULTS - WITHOUT_MODEL | OF_PAGES
    assert list(table()) == list(CHECKS)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "row" not in metafunc.fixturenames:
        return
    cells = [(kind, row) for kind in CONFIGS for row in CHECKS]
    if not metafunc.config.getoption("--all-kinds"):
        known = {row: [kind for kind in CONFIGS if cells[kind] == YES] for row, cells in table().items()}
        drawn = [kinds[i % len(kinds)] if kinds else "" for i, kinds in enumerate(known.values())]
        tried = {cell for cell in zip(drawn, known, strict=True) if cell[1] not in LARGE}
        cells = [cell for cell in cells if cell in tried or cell[0] not in known[cell[1]]]
    metafunc.parametrize(("name", "row"), cells)


@pytest.mark.slow
def test_an_instrument_applies_to_a_kind_or_says_why_not(kind_of: Callable[[str], Kind], name: str, row: str) -> None:
    cell, kind = table()[row][name], kind_of(name)
    if cell == YES:
        CHECKS[row](kind)
    elif cell == "no experts":
        assert CHECKS[row](kind) == {}
    else:
        with pytest.raises((UserError, ValueError, TypeError, NotImplementedError), match=re.escape(cell)):
            CHECKS[row](kind)
