"""Configs: bounds, JSON and differences."""

import inspect
import json
import re
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest

from jaxformer.config import (
    Config,
    ImageModelConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    TokenModelConfig,
    TrainConfig,
)
from jaxformer.config.fields import Fraction, differences, field_docstrings, from_dict, to_dict
from jaxformer.data.windows import TextConfig
from jaxformer.errors import UserError
from jaxformer.ladder.rungs import RungDecoderConfig
from jaxformer.models.clip import CLIPConfig
from jaxformer.models.decoder import BlockAttention, DecoderConfig, ExpertsConfig
from jaxformer.models.encoder import EncoderConfig
from jaxformer.models.vivit import ViViTConfig
from jaxformer.ops import RoPE
from jaxformer.ops.positions import Llama3Scaling
from tests.arrays import plain_decoder

CONFIG = Config(
    "test", plain_decoder(d_ff=(7, 11), n_kv_heads=None), data=TextConfig(), steps=3,
    train=TrainConfig(log_to=("wandb", "tensorboard")),
)  # fmt: skip


def test_json_round_trip_is_identity():
    values = json.loads(json.dumps(to_dict(CONFIG)))
    assert values["model"].pop("kind") == "jaxformer.models.decoder:DecoderConfig"
    assert values["data"].pop("kind") == "jaxformer.data.windows:TextConfig"
    kinds = {"model": from_dict(DecoderConfig, values["model"]), "data": from_dict(TextConfig, values["data"])}
    assert from_dict(Config, {**values, **kinds}) == CONFIG


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"strid": 5}, "did you mean 'stride'"),
        ({"stride": "5"}, "stride is '5'"),
        ({"stride": [[0] * 10_000]}, r"stride is \[\[0, 0.{1,80}0\]\]; it must be a whole number"),
    ],
)
def test_unknown_names_and_wrong_types_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        from_dict(TextConfig, values)


@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (
            DecoderConfig,
            {"activation": "geIu"},
            "activation is 'geIu'; it must be one of relu, .*did you mean gelu",
        ),
        (DecoderConfig, {"activation": ["relu"]}, r"activation is \['relu'\]; it must be one of relu, "),
        (
            TrainConfig,
            {"log_to": ["wandbb"]},
            "log_to is 'wandbb'; it must be one of tensorboard, .*did you mean wandb",
        ),
        (OptimizerConfig, {"name": 3}, "name is 3; it must be one of nesterov_sgd, "),
    ],
)
def test_a_value_that_is_no_choice_is_answered_with_the_choices(cls, values, message):
    with pytest.raises(UserError, match=message):
        from_dict(cls, values)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_blocks": np.int64(10**12)}, "n_blocks is 1000000000000; it must be at most 1024"),
        ({"rope": RoPE(np.float32("inf"))}, "rope.base is inf; it must be a finite number"),
    ],
)
def test_numpy_and_huge_numbers_are_checked(fields, message):
    with pytest.raises(UserError, match=message):
        replace(plain_decoder(), **fields)


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"d_ff": 64}, {"d_ff": (64,)}),
        ({"d_ff": [64, 32]}, {"d_ff": (64, 32)}),
        ({"d_ff": np.int64(64)}, {"d_ff": (64,)}),
        ({"attention": BlockAttention(np.int64(8))}, {"attention": (BlockAttention(8),)}),
    ],
)
def test_one_value_or_a_list_is_accepted_for_a_tuple(fields, same):
    config = plain_decoder(**fields)
    assert config == plain_decoder(**same) and hash(config) == hash(plain_decoder(**same))
    assert json.dumps(to_dict(config)) == json.dumps(to_dict(plain_decoder(**same)))
    assert config.build() == plain_decoder(**same).build()


def test_one_word_of_several_is_not_taken_apart_and_a_path_is_a_text(tmp_path):
    assert LoraConfig(matrices="W_Q").matrices == ("W_Q",) and TrainConfig(log_to="wandb").log_to == ("wandb",)
    assert TextConfig(path=tmp_path).path == str(tmp_path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: plain_decoder(d_model="64"), "d_model is '64'; it must be a whole number"),
        (lambda: plain_decoder(d_ff=(64, "32")), "d_ff is '32'; it must be a whole number"),
        (lambda: plain_decoder(bias="no"), "bias is 'no'; it must be True or False"),
        (lambda: plain_decoder(n_blocks=True), "n_blocks is True; it must be a whole number"),
        (lambda: OptimizerConfig(learning_rate="1e-3"), "learning_rate` is '1e-3'; it must be a number"),
        (lambda: OptimizerConfig(learning_rate=10**400), "learning_rate` is inf; it must be a finite number"),
        (lambda: TextConfig(path=3), "`data.path` is 3; it must be text"),
        (lambda: replace(CONFIG, model="decoder"), "`model` is 'decoder'; it must be a ModelConfig"),
    ],
)
def test_values_of_another_type_are_refused_with_the_type(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_help_on_a_config_class_shows_a_sentence_on_each_field():
    doc = inspect.getdoc(DecoderConfig)
    assert doc.startswith("Shape of a `Decoder`.\n\n")
    for f in fields(DecoderConfig):
        assert re.search(rf"^{f.name}: [A-Zε][^.]{{8,}}[.;]", doc, re.MULTILINE), f.name
    assert f"vocab_size: {field_docstrings(TokenModelConfig)['vocab_size']}" in doc  # inherited


def model_configs(cls=ModelConfig):
    return [cls, *(deeper for below in cls.__subclasses__() for deeper in model_configs(below))]


def test_no_config_of_a_model_changes_a_field_of_its_base_and_the_chains_are_short():
    found = [cls for cls in model_configs() if cls.__module__.startswith(("jaxformer.models", "jaxformer.ladder"))]
    assert {DecoderConfig, RungDecoderConfig, ViViTConfig} <= {*found}
    for cls in found:
        inherited = {name for base in cls.__mro__[1:] for name in vars(base).get("__annotations__", {})}
        assert not inherited & vars(cls).get("__annotations__", {}).keys(), cls
    assert DecoderConfig.__mro__.index(ModelConfig) == 2 and RungDecoderConfig.__mro__.index(ModelConfig) == 3


def test_nested_parts_are_stored_and_read():
    scaled = RoPE(5e5, Llama3Scaling(8.0, 1.0, 4.0, 64))
    kinds = (BlockAttention(8, RoPE(100.0)), BlockAttention(use_rope=False))
    config = DecoderConfig(rope=scaled, attention=kinds, experts=ExpertsConfig(4))
    stored = json.loads(json.dumps(to_dict(config)))
    of_llama3 = {"factor": 8.0, "low": 1.0, "high": 4.0, "original_context": 64}
    assert stored["rope"]["scaling"] == {"kind": "jaxformer.ops.positions:Llama3Scaling"} | of_llama3
    assert from_dict(DecoderConfig, stored) == config
    assert from_dict(DecoderConfig, {"rope": None, "experts": {}}) == DecoderConfig(rope=None, experts=ExpertsConfig())
    for values, message in (
        ({"rope": {"bas": 3}}, "config.rope has a field 'bas' that RoPE does not know; did you mean 'base'"),
        ({"rope": {"scaling": {"factor": 8.0, "low": 1.0}}}, "config.rope.scaling is incomplete: .* 'high'"),
        ({"rope": {"scaling": {"kind": "own.py:Mine", "k": 1.0}}}, "config.rope.scaling is a 'own.py:Mine'; a run can"),
        ({"attention": [{"window": 0}]}, "window is 0; it must be at least 1"),
        ({"experts": 8}, "config.experts is 8; it must be an ExpertsConfig"),
    ):
        with pytest.raises(UserError, match=message):
            from_dict(DecoderConfig, values)


def test_integer_maxima_apply_to_integer_fields_only():
    assert replace(plain_decoder(), rope=RoPE(5_000_000_000)).rope.base == 5e9
    with pytest.raises(UserError, match="must be at most 16384"):  # in a tuple
        ImageModelConfig((10**6,))
    with pytest.raises(UserError, match="window is 100000000; it must be at most 16777216"):  # in an option
        BlockAttention(10**8)


def test_image_model_example_is_uint8_and_sizes_are_checked():
    assert ImageModelConfig((4,)) == ImageModelConfig((4, 4))  # one number is a square
    (pixels,) = ImageModelConfig((4, 6), 3).example()
    assert pixels.shape == (4, 6, 3) and pixels.dtype == np.uint8
    for name, value in (("image_size", (4, 5, 6)), ("image_size", (4, 0)), ("channels", 0), ("n_classes", -1)):
        wrong = 0 if value == (4, 0) else value
        with pytest.raises(UserError, match=rf"{name} is {re.escape(str(wrong))}; "):
            ImageModelConfig(**{name: value})


def test_missing_required_field_is_named():
    with pytest.raises(UserError, match="steps"):
        from_dict(Config, {"name": "x", "model": CONFIG.model})


@pytest.mark.parametrize(
    "make",
    [
        lambda: OptimizerConfig(learning_rate=float("nan")),
        lambda: TrainConfig(sample_prompt=""),
        lambda: replace(CONFIG, steps=0),
        lambda: replace(CONFIG, seed=2**32),
        lambda: replace(CONFIG, name="../up"),
        lambda: OptimizerConfig(weight_decay=0.1),
        lambda: OptimizerConfig(final_fraction=0.1),
        lambda: OptimizerConfig(decay_fraction=0.2),
        lambda: OptimizerConfig(decay_fraction=0.0, schedule="wsd"),
        lambda: OptimizerConfig(decay_fraction=1.1, schedule="wsd"),
        lambda: OptimizerConfig(schedule="inverse_sqrt"),
        lambda: OptimizerConfig("schedule_free", schedule="cosine"),
        lambda: OptimizerConfig("schedule_free", b1=0.0),
        lambda: OptimizerConfig(name="sgd"),
        lambda: plain_decoder(final_norm=True),
        lambda: plain_decoder(d_ff=(8, 2**20 + 1)),
        lambda: OptimizerConfig(learning_rate=1e39),
    ],
)
def test_values_out_of_range_are_refused(make):
    with pytest.raises(UserError):
        make()


def test_warmup_ends_before_wsd_decay():
    """Check a run of 10 steps, of which the last 2 decay."""
    optimizer = OptimizerConfig(schedule="wsd", warmup_steps=8)
    assert replace(CONFIG, steps=10, optimizer=optimizer).optimizer == optimizer
    with pytest.raises(UserError, match="warmup_steps` is 9, but 'wsd' decays from step 8 on"):
        replace(CONFIG, steps=10, optimizer=replace(optimizer, warmup_steps=9))


def test_base_width_is_stored_and_refused_where_it_means_nothing():
    """With SGD, muP also changes what gradients are: the initialisation decides."""
    adamw = OptimizerConfig("adamw", base_width=64)
    config = replace(CONFIG, optimizer=adamw)
    assert from_dict(OptimizerConfig, json.loads(json.dumps(to_dict(config)))["optimizer"]) == adamw
    with pytest.raises(UserError, match="base_width` is 64, but nesterov_sgd does not scale by width; omit it"):
        OptimizerConfig(base_width=64)
    with pytest.raises(UserError, match=r"`optimizer\.base_width` is 0; it must be at least 1"):
        OptimizerConfig("adamw", base_width=0)
    several = "has several widths, or logits from its embedding; omit it"
    for model in (replace(CONFIG.model, unembedding="tied"), EncoderConfig(), CLIPConfig()):
        with pytest.raises(UserError, match=f"base_width` is 64, but this {type(model).__name__} {several}"):
            replace(config, model=model)
    with pytest.raises(UserError, match="base_width` is 64, but adapters have a width of their own"):
        replace(config, lora=LoraConfig(rank=2), init_from="runs/a")


def test_differences_have_dotted_names():
    other = replace(CONFIG, seed=7, model=replace(CONFIG.model, n_heads=2))
    assert differences(CONFIG, other) == [("model.n_heads", 1, 2), ("seed", 0, 7)]
    assert differences(CONFIG, CONFIG) == []


@dataclass(frozen=True)
class OwnConfig(TokenModelConfig):
    scale: float = 4.0  # in the data configs, at most 1
    rates: tuple[Fraction, ...] | None = None


def test_bounds_stand_beside_fields_and_are_inherited():
    assert OwnConfig(vocab_size=1).scale == 4.0
    for values in ({"vocab_size": 0}, {"rates": (0.5, 1.0)}):
        with pytest.raises(UserError, match=rf"{next(iter(values))} is .*; it must be .*\.$"):
            OwnConfig(**values)
