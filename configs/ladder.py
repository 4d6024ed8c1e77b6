"""The ladder: each rung is the previous one with one change.

Budget and optimizer are those of the sources: vocabulary 2048, windows of 32 tokens at stride 1 in batches of 4096,
10,644 steps, Nesterov SGD with learning rate 0.05 and momentum 0.9. Their data, 48 MB of English books of which these
steps are three epochs, is an option (`--data.path books`); by default, a rung trains on the corpus `sotu`. Each rung
lists the sources' validation results on books: perplexity, and attention entropy in nats.

The last rungs are followed by candidates for a recipe: a small model that should learn from a tenth of the tokens what
`small` learns from all. They are trained only if named (`--rungs`), or by `studies/recipe.py`, which decides.
"""

from dataclasses import replace
from typing import Any

from jaxformer.config import ComputeConfig, Config, ModelConfig, OptimizerConfig, TrainConfig
from jaxformer.data.windows import TextConfig
from jaxformer.ladder.mlp import MLPConfig
from jaxformer.ladder.rungs import RungDecoderConfig
from jaxformer.models.recurrent_lm import RecurrentLMConfig
from jaxformer.ops import RoPE

REPORTED: dict[str, str] = {}
"""Results that the sources report, by rung, in the order of the ladder."""
RECIPE: dict[str, str] = {}
"""Change of each candidate for the recipe, in order."""
RECIPE_TARGETS = 800_000
"""Number of predicted tokens in the training of each candidate."""
DIVERGING_RUNGS = {"four_blocks"}
"""Rungs that are expected to diverge."""


def rung(name: str, model: ModelConfig, reported: str) -> Config:
    """Return the sources' run of a model, and add its results to `REPORTED`. It uses gradient accumulation: with 4,096
    windows at once, four blocks would need 22 GiB instead of 6."""
    REPORTED[name] = reported
    return replace(in_budget(name, model), compute=ComputeConfig(grad_accumulation_steps=4))


def in_budget(name: str, model: ModelConfig) -> Config:
    """Return a run with the data, budget and optimizer of the ladder."""
    return Config(
        name=name,
        model=model,
        steps=10_644,
        data=TextConfig(stride=1, unwrap=True),  # books, wrapped to a page's width
        optimizer=OptimizerConfig(name="nesterov_sgd", learning_rate=0.05, momentum=0.9),
        train=TrainConfig(batch_size=4096, eval_examples=512),
    )


# An MLP on each position separately, which predicts a token from the previous one.
rowwise = MLPConfig(vocab_size=2048, context_length=32, d_model=256, d_ff=(2048, 2048))
mlp_rowwise = rung("mlp_rowwise", rowwise, "does not work")

# An MLP on the concatenation of all positions: O((nd)²).
mlp_concat = rung("mlp_concat", replace(rowwise, mixing="concatenate"), "hits a wall")

# The derivation of attention: an MLP on A X, (X B) X, X Xᵀ X and Q Kᵀ V, with a causal mask but without a softmax.
mix_static = rung("mix_static", replace(rowwise, mixing="static"), "no figure")
mix_dynamic = rung("mix_dynamic", replace(rowwise, mixing="dynamic"), "no figure")
mix_gram = rung("mix_gram", replace(rowwise, mixing="gram"), "no figure")
qkv = replace(rowwise, mixing="qkv")
mix_qkv = rung("mix_qkv", qkv, "no figure")

# Without the mask, a position reads the token that it predicts: the loss falls, but the text is nonsense.
mix_unmasked = rung("mix_unmasked", replace(qkv, causal=False), "cheats: it reads its own targets")

# One head, projections sampled from N(0, 1), no 1/√d, and an MLP that outputs logits directly.
first = RungDecoderConfig(
    vocab_size=2048, context_length=32, d_model=256, n_blocks=1, n_heads=1, scaled=False, projection_std=1.0,
    positions="learned", rope=None, d_ff=(2048, 2048), activation="relu", bias=True, norm="none", final_norm=False,
    residual=False, mlp_logits=True,
)  # fmt: skip
attention_unscaled = rung("attention_unscaled", first, "hundreds; entropy 0.003")

# Scores / √d, projections from N(0, 1/d).
scaled = replace(first, scaled=True, projection_std=None)
attention_scaled = rung("attention_scaled", scaled, "degenerate; entropy 1.492, then 0.089")

# Residual connections, and W_out as unembedding.
with_residual = replace(scaled, residual=True, mlp_logits=False)
residual = rung("residual", with_residual, "68.284, 67.68; entropy 1.16 to 1.18")

# Four heads as wide as the model (256, whatever --model.d-model says), concatenated through W_O.
full_heads = replace(with_residual, n_heads=4, head_dim=256, output_projection=True, scaled_by_model=True)
multihead_full = rung("multihead_full", full_heads, "66.48; entropy 0.69, 0.158, 1.011, 0.861")

# Four heads, each a quarter as wide. Their scores are still divided by the root of the model's width, as is inferred of
# the source's code (claim 69 in docs/sources/transformer.md).
low_rank_heads = replace(full_heads, head_dim=None)
multihead = rung("multihead", low_rank_heads, "65.11")

two = replace(low_rank_heads, n_blocks=2)
two_blocks = rung("two_blocks", two, "55.74; first block nearly one-hot")

four = replace(two, n_blocks=4)
four_blocks = rung("four_blocks", four, "NaN before step 100")

# RMSNorm before attention and MLP; the sources report a training perplexity of 27.4.
normed = replace(four, norm="rmsnorm")
rmsnorm = rung("rmsnorm", normed, "48.66 at the end, 50.369 before it")

# Scores divided by the root of the head's width, as by Vaswani et al.: twice as large.
head_scale = rung("head_scale", replace(normed, scaled_by_model=False), "no figure")

# Not rungs of the ladder: recurrent networks with an equally wide state, for the same data and budget.
recurrent_tanh, recurrent_gru, recurrent_lstm = (
    in_budget(f"recurrent_{cell}", RecurrentLMConfig(2048, 32, cell)) for cell in ("tanh", "gru", "lstm")
)


def next_rung(before: Config, name: str, change: str, batch_size: int | None = None, **changes: Any) -> Config:
    """Return a candidate that changes some fields of `before`, trained on `RECIPE_TARGETS` tokens."""
    RECIPE[name] = change
    parts: dict[str, Any] = {part: replace(getattr(before, part), **fields) for part, fields in changes.items()}
    config = replace(before, name=name, **parts)
    model: Any = config.model
    B = batch_size or before.train.batch_size
    steps = RECIPE_TARGETS // (B * model.context_length)
    return replace(config, steps=steps, train=replace(before.train, batch_size=B, eval_every=steps // 2))


# The rung `head_scale` with 1 million parameters besides the embedding and W_out, from which the other candidates
# start. Of the learning rates 0.1, 0.2, 0.4 and 0.8, this one has the lowest loss, although it diverges with two of
# three seeds.
small = next_rung(
    head_scale, "small", "`head_scale`, 128 wide, batches of 64", 64,
    model={"d_model": 128, "d_ff": (320, 320)}, optimizer={"learning_rate": 0.2},
    compute={"grad_accumulation_steps": 1},
)  # fmt: skip

# SGD hardly moves parameters with a large initialisation: embeddings, positions, W_Q. Adam's steps have one size for
# all.
adamw = next_rung(
    small, "adamw", "AdamW", optimizer={"name": "adamw", "learning_rate": 6e-3, "weight_decay": 0.1},
)  # fmt: skip

cosine = next_rung(
    adamw, "cosine", "warm-up, then half-cosine decay", optimizer={"schedule": "cosine", "warmup_steps": 50},
)  # fmt: skip

rotary = next_rung(cosine, "rotary", "RoPE", model={"positions": "none", "rope": RoPE()})

# One hidden layer with about as many parameters as the two before.
squared_relu = next_rung(
    rotary, "squared_relu", "squared ReLU, one hidden layer, no biases",
    model={"activation": "squared_relu", "d_ff": (720,), "bias": False},
)  # fmt: skip

# The same number of parameters. A block's norms and attention take time whatever its width, and learning from so few
# tokens needs little depth.
shallow = next_rung(
    squared_relu, "shallow", "2 wide blocks of 2 heads instead of 4 of 4",
    model={"n_blocks": 2, "n_heads": 2, "d_ff": (1680,)},
)  # fmt: skip

# The same number of targets per step, most of which have more context. Windows of a text no longer overlap.
long_context = next_rung(
    shallow, "long_context", "32 non-overlapping windows of 64 tokens", 32,
    model={"context_length": 64}, data={"stride": None},
)  # fmt: skip

# Twice as many steps, in the time saved by fewer blocks: Adam's update takes as long at any batch size.
small_batches = next_rung(long_context, "small_batches", "batches of 16", 16)

# Embeddings of about the same size, which a step of Adam changes twelve times as much: most tokens are rare.
small_embeddings = next_rung(
    small_batches, "small_embeddings", "embeddings with standard deviation 0.08, times 12",
    model={"embedding_std": 0.08, "embedding_scale": 12.0},
)  # fmt: skip

# The two previous tokens are the best predictors of a token, but heads would first have to learn to attend to them.
local_heads = next_rung(
    small_embeddings, "local_heads", "heads initialised to attend one and two tokens back",
    model={"local_heads": 2, "attention_bias": True},
)  # fmt: skip

# Linear decay from the peak to 0 after 7 % of the steps.
linear = next_rung(
    local_heads, "linear", "linear decay instead of half-cosine decay",
    optimizer={"schedule": "wsd", "decay_fraction": 0.93},
)  # fmt: skip

# Rare tokens have a gradient in few batches, so the mean square of their gradients needs a longer average.
long_average = next_rung(
    linear, "long_average", "squared gradients averaged over 100 steps", optimizer={"b2": 0.99}
)  # fmt: skip

# Values with the token's own embedding, which otherwise would have to pass through a block's norm and W_V.
value_embedding = next_rung(
    long_average, "value_embedding", "a second embedding, added to each block's values",
    model={"value_embedding": True},
)  # fmt: skip

# MLPs narrow enough that the training time per target does not exceed that of `small`.
best = next_rung(value_embedding, "best", "MLPs of 1,312", model={"d_ff": (1312,)})
