"""One layer forward and backward over a sequence: attention and a GRU, in jaxformer and in torch."""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record
from benchmarks.harness import Figures


def sequence(B: int, T: int, D: int) -> np.ndarray:
    """Return random inputs, `(B, T, D)` float32."""
    return np.random.default_rng(0).standard_normal((B, T, D), np.float32)


def jaxformer(folder: Path, layer: str, B: int, T: int, D: int, H: int) -> tuple[Any, Figures]:
    """Differentiate the mean square of a layer's outputs, with the batch sharded over the devices."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from jaxformer.cli import machine
    from jaxformer.nn.attention import MultiHeadAttention
    from jaxformer.nn.recurrent import Recurrence
    from jaxformer.ops.masks import Causal
    from jaxformer.parallel.mesh import BATCH, batch_sharding, make_mesh, on_each_shard, sum_over_batch
    from jaxformer.train.kernels import make_attention

    machine.set_up(B)
    mesh, q_HTK = make_mesh(), jax.ShapeDtypeStruct((H, T, D // H), jnp.float32)
    if layer == "gru":
        gru = Recurrence("gru", D, D)
        model: Any = gru
        arguments: tuple[Any, ...] = ((jnp.zeros(D),),)
    else:
        attention, _ = make_attention("auto", jax.default_backend(), q_HTK, q_HTK, Causal())
        model, arguments = MultiHeadAttention(H, D // H, attention=attention), (None, Causal())
    x_BTD = jax.device_put(sequence(B, T, D), batch_sharding(mesh))
    params = model.init(jax.random.key(0), x_BTD[0], *arguments)

    def loss(params: Any, x_BTD: jax.Array) -> jax.Array:
        return jnp.mean(jax.vmap(lambda x_TD: model.apply(params, x_TD, *arguments)[0])(x_BTD) ** 2)

    def gradients(params: Any, x_BTD: jax.Array) -> Any:
        return sum_over_batch(jax.value_and_grad(loss)(params, x_BTD))

    split = PartitionSpec(BATCH)
    step = jax.jit(on_each_shard(gradients, mesh, (PartitionSpec(), split), PartitionSpec()))
    return lambda _: step(params, x_BTD)[0], {}


def torch(folder: Path, layer: str, B: int, T: int, D: int, H: int) -> tuple[Any, Figures]:
    """Do the same with `torch.nn.GRU`, or with projections and `scaled_dot_product_attention`."""
    import torch
    from torch.nn import functional

    torch.set_num_threads(record.cores())
    x_BTD = torch.from_numpy(sequence(B, T, D))
    gru = torch.nn.GRU(D, D, batch_first=True)
    qkv, out = torch.nn.Linear(D, 3 * D, bias=False), torch.nn.Linear(D, D, bias=False)

    def step(_: int) -> torch.Tensor:
        if layer == "gru":
            y_BTD = gru(x_BTD)[0]
        else:
            q, k, v = qkv(x_BTD).unflatten(-1, (3 * H, D // H)).transpose(1, 2).chunk(3, dim=1)
            y_BTD = out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        loss = y_BTD.square().mean()
        for module in (gru, qkv, out):
            module.zero_grad()
        loss.backward()
        return loss.detach()

    return step, {}
