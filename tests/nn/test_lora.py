"""Low-rank adaptation."""

import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

from jaxformer.cli import merge as merge_command
from jaxformer.config import Config, LoraConfig, OptimizerConfig, TrainConfig
from jaxformer.data.windows import TextConfig, next_token_batch
from jaxformer.errors import UserError
from jaxformer.models.decoder import ExpertsConfig
from jaxformer.nn.lora import adapted_matrices, init_adapters, merge
from jaxformer.nn.parameters import parameter_axes
from jaxformer.ops import RoPE
from jaxformer.parallel.mesh import make_mesh
from jaxformer.runs.checkpoints import CheckpointReader
from jaxformer.runs.pretrained import pretrained_run
from jaxformer.runs.run import BASE, create_run, load_run, read_config
from jaxformer.train.log import read_metrics, without_timings
from jaxformer.train.loop import Outcome, train
from jaxformer.train.resume import Resume
from jaxformer.train.setup import TrainSetup
from jaxformer.train.step import make_gradient
from tests.arrays import apply, assert_close, plain_decoder, random_params
from tests.helpers import flip_a_bit, small_run, write_books

EXPERTS = plain_decoder(
    30, 8, 16, n_blocks=1, n_heads=2, d_ff=(32,), norm="rmsnorm", experts=ExpertsConfig(2, 1),
    positions="none", rope=RoPE(),
)  # fmt: skip
AXES = parameter_axes(EXPERTS.build())
LORA = LoraConfig(rank=3, alpha=6.0)


def drawn(config: LoraConfig, seed: int = 0):
    """Return parameters and adapters of which both factors are drawn."""
    params = random_params(EXPERTS.build(), jnp.zeros(8, jnp.int32), seed=seed)
    adapters = jax.jit(lambda: init_adapters(jax.random.key(1), params, AXES, config))()
    draw = np.random.default_rng(2)
    return params, jax.tree.map(lambda x: np.float32(x + 0.1 * draw.normal(size=x.shape)), jax.device_get(adapters))


@pytest.mark.slow
def test_a_merged_matrix_is_the_formula_in_float64():
    config = replace(LORA, matrices=("matrix", "embedding"))
    params, adapters = drawn(config)
    merged = flatten_dict(jax.jit(lambda *trees: merge(*trees, config))(params, adapters), sep=".")
    for name, einsum in (
        ("blocks_0.attention.W_Q", "dr,rhk->dhk"),
        ("blocks_0.attention.W_O", "hkr,rd->hkd"),
        ("blocks_0.mlp.experts.W_1", "edr,erf->edf"),
        ("W_out", "dr,rv->dv"),
    ):
        weight = np.float64(flatten_dict(params, sep=".")[name])
        A, B = (np.float64(flatten_dict(adapters, sep=".")[f"{name}.{factor}"]) for factor in "AB")
        expected = weight + 6.0 / 3 * np.einsum(einsum, A, B)
        assert np.abs(expected - weight).max() > 0.01
        np.testing.assert_allclose(merged[name], expected, atol=1e-6)


@pytest.mark.slow
def test_new_adapters_change_no_bit_and_parameters_without_them_stay_the_same_arrays():
    config = replace(LORA, matrices=("W_V",))
    params, _ = drawn(config)
    adapters = init_adapters(jax.random.key(1), params, AXES, config)
    merged = merge(params, adapters, config)
    for name, leaf in flatten_dict(params, sep=".").items():
        same = flatten_dict(merged, sep=".")[name]
        np.testing.assert_array_equal(same, leaf)
        assert (same is leaf) == ("W_V" not in name)
    # Of inputs of variance 1, A makes numbers of variance 1.
    A = init_adapters(jax.random.key(1), params, AXES, LoraConfig(rank=400))["blocks_0"]["attention"]["W_Q"]["A"]
    assert float(A.std()) == pytest.approx(16**-0.5, rel=0.05)


@pytest.mark.parametrize(
    ("matrices", "names"),
    [
        (("W_Q", "W_V"), {f"blocks_0.attention.W_{x}" for x in "QV"}),
        (("blocks.0.attention.*",), {f"blocks_0.attention.W_{x}" for x in "QKVO"}),
        (("embedding",), {"embedding.W_E", "W_out"}),
    ],
)
def test_matrices_are_selected_by_name_pattern_and_role(matrices, names):
    assert set(adapted_matrices(AXES, LoraConfig(4, matrices=matrices))) == names


def test_the_role_matrix_selects_all_between_embedding_and_logits():
    names = adapted_matrices(AXES, LORA)
    assert {name.rpartition(".")[2] for name in names} == {"W_Q", "W_K", "W_V", "W_O", "W_1", "W_2", "W_router"}
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [("W_q", "did you mean W_Q?"), ("gamma", "which the model has no matrix of"), ("blocks.7.*", "it has W_1, W_2")],
)
def test_an_entry_without_a_matrix_is_refused(pattern, said):
    with pytest.raises(ValueError) as caught:
        adapted_matrices(AXES, LoraConfig(4, matrices=("W_Q", pattern)))
    assert f"`lora.matrices` names '{pattern}', " in str(caught.value) and said in str(caught.value)
    with pytest.raises(ValueError, match=r"`lora.whole` names 'head.\*', but the model has no such parameter"):
        adapted_matrices(AXES, LoraConfig(4, whole=("head.*",)))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rank": -1}, "rank` is -1; it must be at least 0"),
        ({"rank": 2**21}, "rank` is 2097152; it must be at most"),
        ({"rank": 4, "alpha": 0.0}, r"`lora\.alpha` is 0.0; it must be above 0"),
        ({"rank": 4, "alpha": float("nan")}, "alpha` is nan"),
        ({"rank": 4, "matrices": ()}, r"`lora\.matrices` is empty"),
    ],
)
def test_options_out_of_range_are_refused(fields, said):
    with pytest.raises(UserError, match=said):
        LoraConfig(**fields)


def test_adapters_of_drawn_parameters_are_refused():
    with pytest.raises(
        UserError, match=r"`lora\.rank` is 4, but there is nothing to adapt; name a run with `init_from`"
    ):
        Config("test", EXPERTS, TextConfig(), steps=1, lora=LoraConfig(4))


def setup_of(mesh: str, n_devices: int, lora: LoraConfig) -> TrainSetup:
    config = Config(
        "test", EXPERTS, TextConfig(), steps=4, train=TrainConfig(batch_size=8), lora=lora, init_from="given",
        optimizer=OptimizerConfig("adamw", learning_rate=0.01, weight_decay=0.1, clip_norm=1.0),
    )  # fmt: skip
    return TrainSetup(config, make_mesh(mesh, jax.devices()[:n_devices]))


TOKENS_BT = np.random.default_rng(0).integers(30, size=(8, 9), dtype=np.int32)
BATCH = next_token_batch(TOKENS_BT)


@pytest.mark.slow
def test_the_gradient_of_adapters_is_that_of_the_dense_matrix_by_the_chain_rule():
    """dA = s dW B^T and dB = s A^T dW, where dW is the gradient of a training without adapters, on one device."""
    params, adapters = drawn(LORA)
    setup = setup_of("fsdp=2,expert=2,tensor=2", 8, LORA)
    dense = setup_of("", 1, LoraConfig())
    loss, gradient = jax.jit(make_gradient(dense))(merge(params, adapters, LORA), BATCH, dense.example_keys(0))
    placed = jax.device_put(adapters, setup.state_shardings.params)
    frozen = jax.device_put(params, setup.state_shardings.frozen_params)
    loss_2, grads = jax.jit(make_gradient(setup))(placed, BATCH, setup.example_keys(0), frozen)
    assert float(loss_2) == pytest.approx(float(loss), rel=1e-5)
    assert jax.tree.structure(grads) == jax.tree.structure(adapters)  # and nothing of the base
    dW, factors, actual = (flatten_dict(tree, sep=".") for tree in (gradient, adapters, grads))
    for name in adapted_matrices(AXES, LORA):
        A, B, G = (np.float64(x) for x in (factors[f"{name}.A"], factors[f"{name}.B"], dW[name]))
        stack = A.shape[: len(AXES[name].stack)]
        A2, B2 = A.reshape(*stack, -1, 3), B.reshape(*stack, 3, -1)
        G2 = G.reshape(*stack, A2.shape[-2], B2.shape[-1])
        assert_close(actual[f"{name}.A"], (2.0 * G2 @ B2.swapaxes(-1, -2)).reshape(A.shape))
        assert_close(actual[f"{name}.B"], (2.0 * A2.swapaxes(-1, -2) @ G2).reshape(B.shape))


def test_a_factor_is_sharded_like_its_side_of_the_matrix():
    shardings = setup_of("fsdp=2,tensor=2", 4, LORA).state_shardings
    factors = shardings.params["blocks_0"]["attention"]["W_Q"]
    assert tuple(factors["A"].spec) == ("fsdp", None) and tuple(factors["B"].spec) == (None, "tensor", None)
    assert tuple(shardings.frozen_params["blocks_0"]["attention"]["W_Q"].spec) == ("fsdp", "tensor", None)
    assert optax.tree.get(shardings.opt_state, "mu")["blocks_0"]["attention"]["W_Q"]["A"] == factors["A"]


def test_the_optimizer_holds_nothing_of_the_frozen_parameters():
    setup = setup_of("", 1, replace(LORA, matrices=("W_Q",)))
    n_adapters = sum(leaf.size for leaf in jax.tree.leaves(setup.abstract_state.params))
    assert n_adapters == 16 * 3 + 3 * 2 * 8
    n_state = sum(leaf.size for leaf in jax.tree.leaves(setup.abstract_state.opt_state))
    assert 2 * n_adapters <= n_state <= 2 * n_adapters + 4  # both moments, and counts


WHOLE = ("blocks.0.mlp.W_1", "W_out")
"""Trained in full, though a pattern of those that are adapted names the first."""
TEXTS = ["The king sees the cat. The dog likes the sea. " * 20]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return small_run(tmp_path_factory.mktemp("runs") / "base", TEXTS, steps=2)


@pytest.fixture(scope="module")
def books(tmp_path_factory) -> Path:
    return write_books(tmp_path_factory.mktemp("books"))


def tuned(
    folder: Path, base: Path, books: Path, resume: bool = False,
) -> Outcome:  # fmt: skip
    """Train adapters, or go on training them."""
    config = replace(
        read_config(base), steps=8, init_from=str(base), lora=LoraConfig(2, 8.0, ("W_Q", "W_O", "W_1"), WHOLE),
        data=TextConfig(str(books)), optimizer=OptimizerConfig("adamw", learning_rate=0.03, weight_decay=0.1),
        train=TrainConfig(batch_size=8, log_every=1, eval_every=4, report_every=0, checkpoint_every=4),
    )  # fmt: skip
    tokenizer = load_run(base).tokenizer
    if not resume:
        create_run(folder, config, tokenizer, allow_suffix=False)
    data = config.data.load(config.model, 8, config.seed, tokenizer)
    start, on = pretrained_run(folder / BASE if resume else base), make_mesh("", jax.devices()[:1])
    return train(TrainSetup(config, on, start), data, folder, [], Resume() if resume else None)


@pytest.fixture(scope="module")
def run(base, books, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tuned"
    outcome = tuned(folder, base, books)
    assert outcome.status == "done"
    for frozen, first in zip(
        jax.tree.leaves(outcome.state.frozen_params), jax.tree.leaves(load_run(base).params), strict=True
    ):
        np.testing.assert_array_equal(frozen, first)
    return folder


def arrays(run: Path) -> dict[str, np.ndarray]:
    checkpoints = CheckpointReader(run)
    return checkpoints.arrays(checkpoints.step())


@pytest.mark.slow
def test_training_adapters_lowers_the_held_out_loss_and_changes_no_bit_of_the_base(run, base):
    losses = [row["val_loss"] for row in read_metrics(run) if "val_loss" in row]
    assert losses[-1] < losses[0] - 0.05
    of_base, of_run = arrays(run / BASE), arrays(base)
    assert of_base.keys() == {name for name in of_run if name.startswith("params/")}
    for name, array in of_base.items():
        np.testing.assert_array_equal(array, of_run[name])
    trained = {f"params/blocks_0/attention/{name}/{x}" for name in ("W_Q", "W_O") for x in "AB"}
    trained |= {"params/W_out", "params/blocks_0/mlp/W_1"}
    assert {name for name in arrays(run) if name.startswith("params/")} == trained
    moments = {name.partition("/blocks_0/")[2] for name in arrays(run) if "blocks_0" in name}
    assert moments == {name.partition("/blocks_0/")[2] for name in trained if "blocks_0" in name}


@pytest.mark.slow
def test_a_run_is_loaded_with_its_adapters_merged(run, base):
    loaded, saved = load_run(run), arrays(run)
    assert not loaded.config.lora.rank and read_config(run).lora.rank == 2
    A, B = (np.float64(saved[f"params/blocks_0/attention/W_Q/{x}"]) for x in "AB")
    before = load_run(base).params
    weight = np.float64(before["blocks_0"]["attention"]["W_Q"])
    merged = loaded.params["blocks_0"]["attention"]["W_Q"]
    assert np.abs(merged - weight).max() > 0.01
    np.testing.assert_allclose(merged, weight + 4.0 * np.einsum("dr,rhk->dhk", A, B), atol=1e-6)
    old, new = (flatten_dict(params, sep="/") for params in (before, loaded.params))
    for name in ("W_out", "blocks_0/mlp/W_1"):
        np.testing.assert_array_equal(new[name], saved[f"params/{name}"])
        assert np.abs(old[name] - new[name]).max() > 1e-3
    np.testing.assert_array_equal(loaded.params["embedding"]["W_E"], before["embedding"]["W_E"])
    on_two = load_run(run, mesh=make_mesh("fsdp=2", jax.devices()[:2])).params
    assert_close(on_two["blocks_0"]["attention"]["W_Q"], merged)
    rounded = load_run(run, dtype="bfloat16").params["blocks_0"]["attention"]["W_Q"]
    np.testing.assert_array_equal(rounded, merged.astype(jnp.bfloat16))  # once, after merging


@pytest.mark.slow
def test_resuming_adapters_is_bit_identical(run, base, books, tmp_path):
    stopped = tmp_path / "stopped"
    shutil.copytree(run, stopped)
    shutil.rmtree(stopped / "checkpoints" / "8")
    assert CheckpointReader(stopped).steps() == [4]
    assert tuned(stopped, base, books, resume=True).status == "done"
    expected, actual = arrays(run), arrays(stopped)
    assert expected.keys() == actual.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array)
    rows = [[without_timings(row) for row in read_metrics(folder)] for folder in (run, stopped)]
    assert rows[0] == rows[1]


@pytest.mark.slow
def test_a_merged_run_is_the_same_model_and_needs_no_base(run, tmp_path, capsys):
    out = tmp_path / "merged"
    assert merge_command.main([str(run), "--out", str(out)]) == 0
    assert "merged: step 8 of" in capsys.readouterr().out
    assert not (out / BASE).exists()
    one, other = load_run(run), load_run(out)
    assert (other.step, other.config) == (8, one.config)
    tokens = jnp.arange(16, dtype=jnp.int32)
    np.testing.assert_allclose(
        apply(other.model, other.params, tokens), apply(one.model, one.params, tokens), atol=1e-5
    )
    assert pretrained_run(run).config.lora.rank == 0  # a run that begins with this one has none of its adapters
    assert merge_command.main([str(run), "--out", str(out)]) == 2 and "exists" in capsys.readouterr().err
    assert merge_command.main([str(out), "--out", str(tmp_path / "again")]) == 2
    assert "was trained without --lora.rank" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"has parameters only, so training cannot resume from it; start .*`init_fr"):
        CheckpointReader(out).restore(8, {}, {})


@pytest.mark.slow
def test_a_missing_or_corrupt_base_is_one_sentence(run, tmp_path, capsys):
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    files = (file for file in (copy / BASE / "checkpoints/0/params").rglob("*") if file.is_file())
    flip_a_bit(max(files, key=lambda file: file.stat().st_size))
    with pytest.raises(UserError, match=r"every checkpoint of .*base is corrupt"):
        load_run(copy)
    shutil.rmtree(copy / BASE)
    with pytest.raises(UserError, match=r"base has no complete checkpoint, but .* holds adapters only; restore it"):
        load_run(copy)


def test_a_merge_without_a_folder_to_write_says_how(capsys):
    assert merge_command.main(["runs/tuned"]) == 2
    assert "python -m jaxformer merge runs/tuned --out runs/merged" in capsys.readouterr().err
