"""jaxformer's modern decoder once more in torch, written as one writes it there, to measure beside."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS = {
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "swiglu": F.silu,
}
SUPPORTED = {
    "scaled": True, "output_projection": True, "window": None, "bias": False, "residual": True, "norm": "rmsnorm",
    "norm_placement": "pre", "final_norm": True, "positions": "rope", "unembedding": "tied", "dropout": 0.0,
}  # fmt: skip
"""What is written here once and for all; every other field of the config is followed."""
EPS = 1e-6


class Shape:
    """The fields of a `DecoderConfig` that size the model.

    Raises:
      ValueError: the config asks for what is not written here.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        for name, value in SUPPORTED.items():
            if config[name] != value:
                raise ValueError(f"the torch peer has {name} {value!r} only, not {config[name]!r}")
        self.V, self.T, self.D = config["vocab_size"], config["context_length"], config["d_model"]
        self.H = config["n_heads"]
        self.G = config["n_kv_heads"] or self.H
        self.K = config["head_dim"] or self.D // self.H
        self.n_blocks, self.d_ff = config["n_blocks"], config["d_ff"]
        self.activation, self.qk_norm, self.rope_base = config["activation"], config["qk_norm"], config["rope_base"]


class RMSNorm(nn.Module):
    """torch's RMSNorm with jaxformer's epsilon."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, EPS)


class Attention(nn.Module):
    """Causal attention with RoPE, fused where torch fuses it."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.qkv = nn.Linear(s.D, (s.H + 2 * s.G) * s.K, bias=False)
        self.out = nn.Linear(s.H * s.K, s.D, bias=False)
        self.query_norm = RMSNorm(s.K) if s.qk_norm else nn.Identity()
        self.key_norm = RMSNorm(s.K) if s.qk_norm else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s = self.s
        q, k, v = self.qkv(x).unflatten(-1, (-1, s.K)).transpose(1, 2).split([s.H, s.G, s.G], dim=1)
        q, k = rotate(self.query_norm(q), cos, sin), rotate(self.key_norm(k), cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=s.G != s.H)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Linear layers with the activation between them, gated for 'swiglu'."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        widths = [s.D, *s.d_ff, s.D]
        self.activation = ACTIVATIONS[s.activation]
        self.linears = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(widths))
        gated = pairwise(widths[:-1]) if s.activation == "swiglu" else []
        self.gates = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in gated)

    def forward(self, x: Tensor) -> Tensor:
        *hidden, last = self.linears
        for i, linear in enumerate(hidden):
            x = self.activation(self.gates[i](x)) * linear(x) if self.gates else self.activation(linear(x))
        return last(x)


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the stream."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(s.D), Attention(s)
        self.mlp_norm, self.mlp = RMSNorm(s.D), MLP(s)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """`(B, T + 1)` tokens to the mean cross-entropy of the last T."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(s.V, s.D)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.n_blocks))
        self.final_norm = RMSNorm(s.D)
        angles = torch.arange(s.T)[:, None] * s.rope_base ** (-torch.arange(0, s.K, 2) / s.K)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = F.linear(self.final_norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE with features paired across halves."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def translate(weights: Mapping[str, np.ndarray], n_blocks: int) -> dict[str, Tensor]:
    """jaxformer's parameters, by dotted name, as the `state_dict` of a `Decoder`."""
    state = {"embedding.weight": weights["embedding.W_E"], "final_norm.weight": weights["final_norm.gamma"]}
    for i in range(n_blocks):
        prefix = f"blocks_{i}."
        block = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        state |= {f"blocks.{i}.{name}": value for name, value in _translate_block(block).items()}
    return {name: torch.from_numpy(np.array(value)) for name, value in state.items()}


def _translate_block(block: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    D = block["attention_norm.gamma"].size
    qkv = [block[f"attention.W_{name}"].reshape(D, -1) for name in "QKV"]
    state = {
        "attention_norm.weight": block["attention_norm.gamma"],
        "mlp_norm.weight": block["mlp_norm.gamma"],
        "attention.qkv.weight": np.concatenate(qkv, axis=1).T,
        "attention.out.weight": block["attention.W_O"].reshape(-1, D).T,
    }
    for name, value in block.items():
        part, _, leaf = name.partition(".")
        if leaf in ("gamma_Q", "gamma_K"):
            state[f"{part}.{'query' if leaf == 'gamma_Q' else 'key'}_norm.weight"] = value
        if part == "mlp":
            kind, _, number = leaf.rpartition("_")
            state[f"mlp.{'gates' if kind == 'W_gate' else 'linears'}.{int(number) - 1}.weight"] = value.T
    return state
