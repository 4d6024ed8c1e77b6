"""Pure functions on one example: no Flax, no state, no batch axis (`jax.vmap` adds one).

`jaxformer.ops.attention` and `jaxformer.ops.linear_cross_entropy` are functions; import the other names of their files
with `from jaxformer.ops.attention import …`.
"""

from jaxformer.ops import masks
from jaxformer.ops.attention import (
    attention,
    attention_scores,
    attention_weights,
    attention_with_lse,
    combine_attention,
    cross_attention,
    multi_head_attention,
    row_entropy,
)
from jaxformer.ops.bias import ALiBi, RelativePositionBias, alibi_slopes
from jaxformer.ops.blockwise import blockwise_attention, blockwise_attention_with_lse
from jaxformer.ops.cache import (
    KVCache,
    LayerCache,
    decode_step,
    init_cache,
    read_layer,
    write_layer,
    write_positions,
)
from jaxformer.ops.kernels import cudnn_attention, splash_attention
from jaxformer.ops.latent import latent_attention
from jaxformer.ops.linear_cross_entropy import Unembedding, linear_cross_entropy
from jaxformer.ops.losses import cross_entropy, negative_log_likelihood
from jaxformer.ops.masks import Causal, Packed
from jaxformer.ops.norms import l2_normalize, layer_norm, rms_norm
from jaxformer.ops.patches import patchify
from jaxformer.ops.positions import NTK, Llama3Scaling, LongRoPE, RoPE, Yarn, rope, sinusoidal
from jaxformer.ops.recurrent import gru_step, lstm_step

__all__ = [
    "NTK", "ALiBi", "Causal", "KVCache", "LayerCache", "Llama3Scaling", "LongRoPE", "Packed", "RelativePositionBias",
    "RoPE", "Unembedding", "Yarn", "alibi_slopes", "attention", "attention_scores", "attention_weights",
    "attention_with_lse", "blockwise_attention", "blockwise_attention_with_lse", "combine_attention",
    "cross_attention", "cross_entropy", "cudnn_attention", "decode_step", "gru_step", "init_cache", "l2_normalize",
    "latent_attention", "layer_norm", "linear_cross_entropy", "lstm_step", "masks", "multi_head_attention",
    "negative_log_likelihood", "patchify", "read_layer", "rms_norm", "rope", "row_entropy", "sinusoidal",
    "splash_attention", "write_layer", "write_positions",
]  # fmt: skip
