"""Flax Linen modules for one example, which wire parameters around the functions of `jaxformer.ops`."""

from jaxformer.nn.attention import MultiHeadAttention
from jaxformer.nn.block import Block, SideInputs, run_blocks
from jaxformer.nn.capture import OUTPUT, capture_point
from jaxformer.nn.embedding import Embedding
from jaxformer.nn.execution import PLAIN, Execution
from jaxformer.nn.experts import Experts
from jaxformer.nn.latent_attention import LatentAttention
from jaxformer.nn.mlp import ACTIVATIONS, MLP
from jaxformer.nn.norms import LayerNorm, RMSNorm
from jaxformer.nn.parameters import parameter, parameter_axes
from jaxformer.nn.patches import LearnedPositions, PatchEmbedding
from jaxformer.nn.recurrent import AttentiveRecurrence, FixedContext, Recurrence

__all__ = [
    "ACTIVATIONS", "MLP", "OUTPUT", "PLAIN", "AttentiveRecurrence", "Block", "Embedding", "Execution", "Experts",
    "FixedContext", "LatentAttention", "LayerNorm", "LearnedPositions", "MultiHeadAttention", "PatchEmbedding",
    "RMSNorm", "Recurrence", "SideInputs", "capture_point", "parameter", "parameter_axes", "run_blocks",
]  # fmt: skip
