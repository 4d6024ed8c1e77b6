"""A Llama in NumPy."""

import numpy as np


def rms_norm(x: np.ndarray, gamma: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gamma


def rotate(x_THK: np.ndarray, base: float, adjacent: bool, divisors: np.ndarray | float) -> np.ndarray:
    """Return queries or keys after RoPE of features (2i, 2i + 1), or of (i, i + K/2)."""
    T, _, K = x_THK.shape
    angles = np.arange(T)[:, None, None] * base ** (-np.arange(0, K, 2) / K) / divisors
    z = x_THK[..., 0::2] + 1j * x_THK[..., 1::2] if adjacent else x_THK[..., : K // 2] + 1j * x_THK[..., K // 2 :]
    z = z * np.exp(1j * angles)
    return np.stack([z.real, z.imag], -1).reshape(x_THK.shape) if adjacent else np.concatenate([z.real, z.imag], -1)


def forward(config: dict, tensors: dict[str, np.ndarray], tokens: list[int], adjacent: bool) -> np.ndarray:
    """Return the logits `(T, V)` by NumPy in float64, from names and keys of GGUF."""
    get = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    H, G, K, eps = (config[key] for key in ("head_count", "head_count_kv", "key_length", "layer_norm_rms_epsilon"))
    x, T = get["token_embd.weight"][tokens], len(tokens)
    divisors = get.get("rope_freqs.weight", 1.0)
    for i in range(config["block_count"]):
        part = {name.removeprefix(f"blk.{i}."): tensor for name, tensor in get.items() if name.startswith(f"blk.{i}.")}
        y = rms_norm(x, part["attn_norm.weight"], eps)
        q, k, v = ((y @ part[f"attn_{name}.weight"].T).reshape(T, -1, K) for name in "qkv")
        if "attn_q_norm.weight" in part:
            q, k = rms_norm(q, part["attn_q_norm.weight"], eps), rms_norm(k, part["attn_k_norm.weight"], eps)
        q, k = (rotate(a, config["freq_base"], adjacent, divisors) for a in (q, k))
        scores = np.einsum("thk,shk->hts", q, np.repeat(k, H // G, 1)) / np.sqrt(K)
        scores = np.where(np.tril(np.ones((T, T), bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        heads = np.einsum("hts,shk->thk", weights, np.repeat(v, H // G, 1)).reshape(T, -1)
        x = x + heads @ part["attn_output.weight"].T
        y = rms_norm(x, part["ffn_norm.weight"], eps)
        gate = y @ part["ffn_gate.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ part["ffn_up.weight"].T)) @ part["ffn_down.weight"].T
    return rms_norm(x, get["output_norm.weight"], eps) @ get.get("output.weight", get["token_embd.weight"]).T
