"""jaxformer's decoder in idiomatic torch, as a peer for measurements."""

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
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "scaled": (True,), "scaled_by_model": (False,), "output_projection": (True,), "experts": (None,),
    "residual": (True,), "norm": ("rmsnorm", "layernorm"), "norm_placement": ("pre",), "positions": ("none", "learned"),
    "unembedding": ("tied", "linear"), "dropout": (0.0,),
}  # fmt: skip
"""Supported values of restricted config fields; all other fields are supported in full."""
EPS = 1e-6
PLAIN = {"window": None, "rope": None, "use_rope": True}
"""Attention of each block."""


class Shape:
    """Fields of a `DecoderConfig` that determine the model.

    Raises:
      ValueError: the config has a value that is not supported here.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        for name, values in SUPPORTED.items():
            if (value := config.get(name, values[0])) not in values:  # only rungs have all of these fields
                raise ValueError(f"the torch peer has {name} {' or '.join(map(repr, values))}, not {value!r}")
        self.V, self.T, self.D = config["vocab_size"], config["context_length"], config["d_model"]
        self.H = config["n_heads"]
        self.G = config["n_kv_heads"] or self.H
        self.K = config["head_dim"] or self.D // self.H
        self.n_blocks, self.d_ff = config["n_blocks"], config["d_ff"]
        self.activation, self.bias = config["activation"], config["bias"]
        self.attention_bias, self.qk_norm = config["attention_bias"], config["qk_norm"]
        self.norm, self.final_norm, self.tied = config["norm"], config["final_norm"], config["unembedding"] == "tied"
        self.embedding_scale = config["embedding_scale"]
        if (config["rope"] is None) == (config["positions"] == "none") or config["attention"] != [PLAIN]:
            raise ValueError(
                "the torch peer has either RoPE or learned positions, alike and without windows in each block"
            )
        self.rope_base = None if config["rope"] is None else config["rope"]["base"]


class RMSNorm(nn.Module):
    """RMSNorm of torch with jaxformer's epsilon."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, EPS)


NORMS = {"rmsnorm": RMSNorm, "layernorm": nn.LayerNorm}


class Attention(nn.Module):
    """Causal attention, fused where torch supports it; with RoPE if a rotation is given."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.qkv = nn.Linear(s.D, (s.H + 2 * s.G) * s.K, bias=s.attention_bias)
        self.out = nn.Linear(s.H * s.K, s.D, bias=s.attention_bias)
        self.query_norm = RMSNorm(s.K) if s.qk_norm else nn.Identity()
        self.key_norm = RMSNorm(s.K) if s.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        s = self.s
        q, k, v = self.qkv(x).unflatten(-1, (-1, s.K)).transpose(1, 2).split([s.H, s.G, s.G], dim=1)
        q, k = self.query_norm(q), self.key_norm(k)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=s.G != s.H)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Linear layers with the activation between them, gated for 'swiglu'."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        widths = [s.D, *s.d_ff, s.D]
        self.activation = ACTIVATIONS[s.activation]
        self.linears = nn.ModuleList(nn.Linear(a, b, bias=s.bias) for a, b in pairwise(widths))
        gated = pairwise(widths[:-1]) if s.activation == "swiglu" else []
        self.gates = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in gated)

    def forward(self, x: Tensor) -> Tensor:
        *hidden, last = self.linears
        for i, linear in enumerate(hidden):
            x = self.activation(self.gates[i](x)) * linear(x) if self.gates else self.activation(linear(x))
        return last(x)


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.attention_norm, self.attention = NORMS[s.norm](s.D), Attention(s)
        self.mlp_norm, self.mlp = NORMS[s.norm](s.D), MLP(s)

    def forward(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Decoder from tokens `(B, T + 1)` to the mean cross-entropy of the last T."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.embedding, self.embedding_scale = nn.Embedding(s.V, s.D), s.embedding_scale
        self.positions = nn.Parameter(torch.zeros(s.T, s.D)) if s.rope_base is None else None
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.n_blocks))
        self.final_norm = NORMS[s.norm](s.D) if s.final_norm else nn.Identity()
        self.unembedding = nn.Linear(s.D, s.V, bias=False)
        if s.tied:
            self.unembedding.weight = self.embedding.weight
        rotation = None
        if s.rope_base is not None:
            angles = torch.arange(s.T)[:, None] * s.rope_base ** (-torch.arange(0, s.K, 2) / s.K)
            rotation = torch.stack([angles.cos(), angles.sin()])
        self.register_buffer("rotation", rotation, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        if self.positions is not None:
            x = x + self.positions
        for block in self.blocks:
            x = block(x, self.rotation)
        logits = self.unembedding(self.final_norm(x))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def matrices(self) -> list[nn.Parameter]:
        """Return the parameters with weight decay."""
        return [p for p in self.parameters() if p.ndim >= 2 and p is not self.positions]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE, with features paired across halves."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def translate(weights: Mapping[str, np.ndarray], n_blocks: int) -> dict[str, Tensor]:
    """Return jaxformer's parameters, by dotted name, as the `state_dict` of a `Decoder`."""
    outer = {
        "embedding.W_E": "embedding.weight", "embedding.W_pos": "positions", "final_norm.gamma": "final_norm.weight",
        "final_norm.beta": "final_norm.bias",
    }  # fmt: skip
    state = {theirs: weights[ours] for ours, theirs in outer.items() if ours in weights}
    state["unembedding.weight"] = weights["W_out"].T if "W_out" in weights else weights["embedding.W_E"]
    for i in range(n_blocks):
        prefix = f"blocks_{i}."
        block = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        state |= {f"blocks.{i}.{name}": value for name, value in _translate_block(block).items()}
    return {name: torch.from_numpy(np.array(value)) for name, value in state.items()}


def _translate_block(block: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    D = block["attention_norm.gamma"].size
    projections = [block[f"attention.W_{name}"].reshape(D, -1) for name in "QKV"]
    state = {
        "attention.qkv.weight": np.concatenate(projections, axis=1).T,
        "attention.out.weight": block["attention.W_O"].reshape(-1, D).T,
    }
    if "attention.b_O" in block:
        state["attention.qkv.bias"] = np.concatenate([block[f"attention.b_{name}"].ravel() for name in "QKV"])
        state["attention.out.bias"] = block["attention.b_O"]
    gains = {"gamma": "weight", "beta": "bias", "gamma_Q": "query_norm.weight", "gamma_K": "key_norm.weight"}
    for name, value in block.items():
        part, _, leaf = name.partition(".")
        if leaf in gains:
            state[f"{part}.{gains[leaf]}"] = value
        if part == "mlp":
            kind, _, number = leaf.rpartition("_")
            layer = f"mlp.{'gates' if kind == 'W_gate' else 'linears'}.{int(number) - 1}"
            state[f"{layer}.bias" if kind == "b" else f"{layer}.weight"] = value.T
    return state
