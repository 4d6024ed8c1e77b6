"""Training steps lowered for CUDA, which needs no GPU and no compiler for one: calls of attention kernels by case."""

import re
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from jaxformer.config import ComputeConfig, Config, OptimizerConfig, TrainConfig
from jaxformer.data.windows import TextConfig
from jaxformer.models.decoder import BlockAttention
from jaxformer.ops import RoPE
from jaxformer.ops.kernels import cudnn_attention
from jaxformer.ops.masks import Causal
from jaxformer.parallel.mesh import make_mesh
from jaxformer.plan.topology import assume_gpu
from jaxformer.train import kernels
from jaxformer.train.setup import TrainSetup
from jaxformer.train.step import make_train_step
from tests.arrays import plain_decoder

MODEL = plain_decoder(
    vocab_size=300, context_length=128, d_model=256, n_blocks=2, n_heads=4, d_ff=(256,),
    norm="rmsnorm", positions="none", rope=RoPE(), unembedding="tied",
)  # fmt: skip
CONFIG = Config(
    "t", MODEL, data=TextConfig(), steps=2, optimizer=OptimizerConfig(), train=TrainConfig(batch_size=8),
    compute=ComputeConfig(precision="bfloat16"),
)  # fmt: skip
FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Choose attention as on an H100."""
    for name in ("check_cudnn_version", "check_compute_capability", "is_cuda_compute_capability_equal"):
        monkeypatch.setattr(cudnn, name, getattr(cudnn, name))  # restored after the test
    assume_gpu("9.0")
    choose = kernels.make_attention

    def on_gpu(name, platform, *arguments, **options):
        return choose(name, "gpu", *arguments, **options | {"try_first": False})

    monkeypatch.setattr(kernels, "make_attention", on_gpu)


def count_calls(module: str, target: str) -> int:
    """Return how often a StableHLO module calls a target, through its functions; a loop's body counts once."""
    functions = dict(re.findall(r"func\.func \w+ @(\w+)\((.*?)\n  }", module, re.DOTALL))

    @cache
    def count(name: str) -> int:
        body = functions[name]
        own = len(re.findall(rf"@{re.escape(target)}\(", body))
        return own + sum(map(count, re.findall(r"\bcall @(\w+)\(", body)))

    return count("main")


def lower(config: Config) -> tuple[str, str]:
    """Return the log line of attention, and the step for CUDA."""
    setup = TrainSetup(config, make_mesh("fsdp=2", jax.devices()[:2]))
    traced = make_train_step(setup).trace(
        setup.abstract_state, setup.abstract_batch, jax.ShapeDtypeStruct((), jnp.int32)
    )
    return setup.attention.line, traced.lower(lowering_platforms=("cuda",)).as_text()


def test_calls_are_counted_through_functions():
    module = """module @t {
  func.func public @main(%a: f32) {
    %0 = func.call @block(%a)
    %1 = call @block(%0)
    %2 = stablehlo.custom_call @kernel(%1)
  }
  func.func private @block(%a: f32) {
    %0 = stablehlo.custom_call @kernel(%a)
    %1 = stablehlo.custom_call @kernelBackward(%a)
  }
}"""
    assert (count_calls(module, "kernel"), count_calls(module, "kernelBackward")) == (3, 2)


@pytest.mark.slow
def test_each_block_attends_once_forward_and_once_backward():
    line, module = lower(replace(CONFIG, compute=replace(CONFIG.compute, remat="block")))
    assert line == "attention: cudnn"
    assert (count_calls(module, FORWARD), count_calls(module, BACKWARD)) == (2, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "data", "line", "calls"),
    [
        ({"attention": BlockAttention(32), "n_kv_heads": 2}, {}, "attention: cudnn", 1),
        ({"prefix": True}, {}, "attention: xla (not cudnn: the mask is an array", 0),
    ],
)
def test_cudnn_is_called_where_it_can_attend(model, data, line, calls):
    config = replace(CONFIG, data=replace(CONFIG.data, **data), model=replace(MODEL, **model, n_blocks=1))
    chosen, module = lower(config)
    assert chosen.startswith(line)
    assert (count_calls(module, FORWARD), count_calls(module, BACKWARD)) == (calls, calls)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "line", "calls"),
    [
        ("9.0", "attention: cudnn", 2),  # the backward pass computes the output again
        ("8.0", "attention: blockwise (not cudnn: cuDNN supports packed documents on GPUs from Hopper on)", 0),
    ],
)
def test_packed_documents_are_attended_to_by_cudnn_from_hopper_on(capability, line, calls):
    assume_gpu(capability)
    model = replace(MODEL, context_length=512, n_blocks=1)
    chosen, module = lower(replace(CONFIG, data=replace(CONFIG.data, packing="documents"), model=model))
    assert chosen == line
    assert (count_calls(module, FORWARD), count_calls(module, BACKWARD)) == (calls, calls // 2)


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, 0, 0), (None, None, 0)], ids=str)
def test_gradients_of_each_example_call_the_kernel_once(axes):
    """Also if the examples share queries, keys or values, and the gradient of the output, here 1."""
    arrays = [jax.ShapeDtypeStruct((3,) * (axis == 0) + (2, 128, 64), jnp.bfloat16) for axis in axes]
    loss = lambda q, k, v: cudnn_attention(q, k, v, Causal()).astype(jnp.float32).sum()  # noqa: E731
    gradient = jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1, 2)), axes)).trace(*arrays)
    module = gradient.lower(lowering_platforms=("cuda",)).as_text()
    assert (count_calls(module, FORWARD), count_calls(module, BACKWARD)) == (1, 1)
    assert [x.shape for x in jax.tree.leaves(gradient.out_info)] == 3 * [(3, 2, 128, 64)]


def test_gradients_of_each_example_with_a_bias_that_they_share_call_the_kernel_once():
    q, bias = jax.ShapeDtypeStruct((3, 2, 128, 64), jnp.bfloat16), jax.ShapeDtypeStruct((2, 128, 128), jnp.float32)
    loss = lambda q, bias: cudnn_attention(q, q, q, Causal(), bias=bias).astype(jnp.float32).sum()  # noqa: E731
    gradient = jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1)), (0, None))).trace(q, bias)
    module = gradient.lower(lowering_platforms=("cuda",)).as_text()
    kernels = [FORWARD.replace("Softmax", "ScaleBiasSoftmax"), BACKWARD.replace("Softmax", "ScaleBiasSoftmax")]
    assert [count_calls(module, kernel) for kernel in kernels] == [1, 1]
    assert [x.shape for x in gradient.out_info] == [(3, 2, 128, 64), (3, 2, 128, 128)]
