"""Parts of a model by hand, and by the figures of papers."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxformer.cli.arguments import load_config
from jaxformer.decode import Sampling, generate_tokens, programs
from jaxformer.models.decoder import BlockAttention, DecoderConfig, ExpertsConfig, LatentsConfig
from jaxformer.ops import RoPE
from jaxformer.ops.kernels import cudnn_attention
from jaxformer.parallel.mesh import make_mesh
from jaxformer.plan.costs import Part, cache_bytes, count_parts, describe_parts, examples_per_microbatch
from jaxformer.plan.roofline import matmul_flops, model_flops
from jaxformer.plan.topology import assume_gpu
from jaxformer.runs.run import count_parameters
from jaxformer.train.setup import TrainSetup
from tests.arrays import build, rung_like
from tests.helpers import ROOT
from tests.plan.test_roofline import CONFIG, MODEL

T, D, L, F, V = 12, 16, 3, 32, 48  # of MODEL


def setup_of(config, **changes) -> TrainSetup:
    return TrainSetup(
        replace(config, model=rung_like(config.model, **changes)),
        make_mesh(),
    )


def parts_of(setup: TrainSetup) -> dict[str, Part]:
    return {part.name: part for part in count_parts(setup, model_flops(setup))}


@pytest.mark.slow
def test_parts_of_a_decoder_by_hand():
    parts = parts_of(setup_of(CONFIG))
    visible = T * (T + 1) // 2
    assert parts == {
        "embedding": Part("embedding", V * D, V * D, 0),
        "attention": Part("attention", L * 4 * D * D, L * 4 * D * D, 3 * L * (2 * T * 4 * D * D + 4 * D * visible)),
        "MLP": Part("MLP", L * 2 * D * F, L * 2 * D * F, 3 * L * 2 * T * 2 * D * F),
        "other": Part("other", L * 2 * D, L * 2 * D, 0),
        "logits": Part("logits", D * V, D * V, 3 * 2 * T * D * V),
    }


@pytest.mark.slow
def test_experts_are_active_where_tokens_are_routed_to_them():
    E, J = 8, 2
    part = parts_of(setup_of(CONFIG, experts=ExpertsConfig(E, J, capacity_factor=1.25)))["experts"]
    assert (part.n_parameters, part.n_active) == (L * (D * E + E * 2 * D * F), L * (D * E + J * 2 * D * F))
    assert part.flops == 3 * L * 2 * T * (D * E + J * (2 * D * F + D))  # with the router and the weighted sum
    assert f"{part.n_active:,} active per token" in describe_parts([part])[1]


def test_a_model_without_products_is_described():
    assert describe_parts([Part("embedding", 2304, 2304, 0)])[1].split() == ["embedding", "2,304", "0.0%"]


def test_tied_logits_have_flops_and_no_parameters():
    part = parts_of(setup_of(CONFIG, unembedding="tied"))["logits"]
    assert (part.n_parameters, part.flops) == (0, 3 * 2 * T * D * V)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["clip.py", "translation.py:bahdanau", "mlm.py", "ladder.py:mlp_concat"])
def test_parts_add_up_to_the_model(spec):
    setup = TrainSetup(replace(load_config(f"{ROOT}/configs/{spec}"), mesh=""), make_mesh())
    model, parts = model_flops(setup), parts_of(setup).values()
    assert sum(part.n_parameters for part in parts) == count_parameters(setup.abstract_params)
    assert sum(part.flops for part in parts) == pytest.approx(model.total)
    assert not {"embedding", "other"} & {part.name for part in parts if part.flops > 0.05 * model.total}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "n_parameters"),
    [
        ("gpt3_175b", 175.0e9),  # table 2.1 of Brown et al. 2020
        ("llama_70b", 69.0e9),  # the checkpoint of Touvron et al. 2023
    ],
)
def test_published_models_have_their_numbers_of_parameters_and_flops(name, n_parameters):
    """All blocks are alike: those of two are counted. Products have 6 FLOPs per parameter and token, as in appendix D
    of Brown et al. 2020; that of tied logits counts the embedding, and other tables have none."""
    config = load_config(f"{ROOT}/configs/gpt.py:{name}")
    full = config.model
    assert isinstance(full, DecoderConfig)
    setup = TrainSetup(replace(config, mesh="", model=replace(full, n_blocks=2)), make_mesh())
    model, parts = model_flops(setup), parts_of(setup)
    blocks = (parts["attention"].n_parameters + parts["MLP"].n_parameters) * full.n_blocks // 2
    tables = parts["embedding"].n_parameters + parts["logits"].n_parameters
    assert blocks + tables == pytest.approx(n_parameters, rel=0.003)
    matrices = blocks * 2 // full.n_blocks + full.vocab_size * full.d_model
    products = sum(model.by_scope.values()) / full.context_length
    assert products == pytest.approx(6 * matrices, rel=0.003)


@pytest.mark.slow
def test_scores_and_cache_of_gpt2():
    """Radford et al. 2019, table 2: 12 layers of width 768; 12 heads; 1024 positions."""
    setup = TrainSetup(load_config(f"{ROOT}/configs/gpt.py:gpt2_124m"), make_mesh())
    assert model_flops(setup).n_scores == 12 * 12 * 1024**2
    assert cache_bytes(setup) == 2 * 12 * 1024 * 768 * 4 + 1024 * 4  # float32 on a CPU, and int32 positions


def test_cache_is_of_decoders():
    assert cache_bytes(setup_of(CONFIG, n_kv_heads=2)) == 2 * L * 2 * 4 * T * 4 + T * 4
    assert cache_bytes(setup_of(CONFIG, n_kv_heads=2, value_dim=7)) == L * 2 * (4 + 7) * T * 4 + T * 4
    latent = replace(CONFIG, model=replace(MODEL, latents=LatentsConfig(7, rope_width=2)))
    assert cache_bytes(TrainSetup(latent, make_mesh())) == L * (7 + 2) * T * 4 + T * 4
    vit = replace(load_config(f"{ROOT}/configs/vision.py:vit"), mesh="")
    assert cache_bytes(TrainSetup(vit, make_mesh())) is None


@pytest.mark.slow
def test_the_cache_of_a_window_is_that_of_texts_of_any_length(monkeypatch):
    """Texts of 7 and 62 tokens, of a model with a context of 32 and a prefill in chunks of 4."""
    windows, slots = [5, None, 8], [8, 32, 16]
    attention = tuple(map(BlockAttention, windows))
    shape = {"n_blocks": len(windows), "context_length": 32, "attention": attention}
    setup = setup_of(CONFIG, **shape, positions="none", rope=RoPE())
    monkeypatch.setattr("jaxformer.decode.completion.CompletionOptions.prefill_chunk", 4)
    measured, decode = set(), programs.decode

    def measure(*args, **options):
        state, samples = decode(*args, **options)
        measured.add(sum(leaf.nbytes for leaf in jax.tree.leaves(state.cache)))
        return state, samples

    monkeypatch.setattr(programs, "decode", measure)
    model, params = build(setup.config.model)
    given = {"seeds": [0], "context_length": 32, "prefill_chunk": 4}
    for n in (5, 60):
        list(generate_tokens(model, params, [[1, 2]], Sampling(temperature=0), max_new_tokens=n, **given))
    assert measured == {cache_bytes(setup)} == {2 * D * sum(slots) * 4 + max(slots) * 4}


def test_examples_per_microbatch():
    compute = replace(CONFIG.compute, grad_accumulation_steps=2)
    setup = TrainSetup(replace(CONFIG, compute=compute), make_mesh("data=2,tensor=4"))
    assert examples_per_microbatch(setup) == CONFIG.train.batch_size // 2 // 2
    assert MODEL is CONFIG.model


def test_flops_of_kernels_for_gpus_count(monkeypatch):
    """Two products forward, five backward, as the scores are recomputed."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    for name in ("check_cudnn_version", "check_compute_capability", "is_cuda_compute_capability_equal"):
        monkeypatch.setattr(cudnn, name, getattr(cudnn, name))  # restored after the test
    assume_gpu("9.0")
    B, H, G, T, K = 2, 4, 2, 32, 64
    q, k = (jax.ShapeDtypeStruct((B, n, T, K), jnp.bfloat16) for n in (H, G))

    def loss(q, k, v):
        return jax.vmap(cudnn_attention)(q, k, v).astype(jnp.float32).sum()

    product = 2 * B * H * T * T * K
    assert matmul_flops(jax.make_jaxpr(loss)(q, k, k)) == 2 * product
    assert matmul_flops(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(q, k, k), visible=0.5) == (2 + 5) * product / 2
