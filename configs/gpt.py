"""Published architectures to train from scratch on a device mesh: GPT-2 (Radford et al. 2019), GPT-3 (Brown et al.
2020), Llama 3.2 (1B) and Llama 2 (Touvron et al. 2023).

The meshes are for a v5e:16x16 (llama_1b, llama_7b) and a v5p:8x8x8 (llama_70b, gpt3_175b); gpt2_124m is data-parallel
over all devices. `python -m jaxformer plan --config configs/gpt.py:llama_7b --topology v5e:16x16` reports the memory
and time of a run.
"""

from dataclasses import replace

from jaxformer.config import ComputeConfig, Config, OptimizerConfig, TrainConfig
from jaxformer.data.windows import TextConfig
from jaxformer.models.decoder import DecoderConfig
from jaxformer.ops import RoPE

adamw = OptimizerConfig(
    name="adamw", learning_rate=6e-4, schedule="cosine", warmup_steps=2000, final_fraction=0.1, weight_decay=0.1,
    clip_norm=1.0,
)  # fmt: skip

gpt2 = DecoderConfig(
    vocab_size=50_257, context_length=1024, d_model=768, n_blocks=12, n_heads=12,
    attention_bias=True, positions="learned", rope=None, d_ff=(3072,), bias=True, norm="layernorm", unembedding="tied",
    embedding_std=0.02,
)  # fmt: skip

gpt2_124m = Config(
    name="gpt2_124m",
    model=gpt2,
    data=TextConfig(), steps=100_000,
    optimizer=adamw,
    train=TrainConfig(
        batch_size=32, eval_examples=256, eval_every=1000, report_every=5000, gradients_every=1000,
        checkpoint_every=1000,
    ),
)  # fmt: skip

# Table 2.1: 175.0 B parameters, batches of 3.2 M tokens; appendix B: 300 B tokens. Here every block has full attention;
# in the paper, every other block has banded attention.
gpt3_175b = replace(
    gpt2_124m,
    name="gpt3_175b",
    model=replace(
        gpt2, context_length=2048, d_model=12_288, n_blocks=96, n_heads=96, d_ff=(49_152,),
    ),
    steps=95_000,
    optimizer=replace(adamw, learning_rate=6e-5, warmup_steps=120),
    train=replace(gpt2_124m.train, batch_size=1536),
    compute=ComputeConfig(remat="block", scan_blocks=True),
    mesh="fsdp=512",
)  # fmt: skip

llama = DecoderConfig(
    vocab_size=32_000, context_length=4096, d_model=4096, n_blocks=32, n_heads=32,
    d_ff=(11_008,), activation="swiglu", embedding_std=0.02,
)  # fmt: skip

llama_7b = Config(
    name="llama_7b",
    model=llama,
    data=TextConfig(),
    steps=500_000,
    optimizer=replace(adamw, learning_rate=3e-4),
    train=TrainConfig(
        batch_size=512,
        eval_examples=1024,
        eval_every=1000,
        report_every=5000,
        gradients_every=1000,
        checkpoint_every=1000,
    ),
    compute=ComputeConfig(remat="block", scan_blocks=True),
    mesh="fsdp=256",
)

llama_1b = replace(
    llama_7b,
    name="llama_1b",
    model=replace(
        llama, vocab_size=128_256, context_length=8192, d_model=2048, n_blocks=16, n_kv_heads=8, d_ff=(8192,),
        rope=RoPE(500_000.0), unembedding="tied",
    ),
)  # fmt: skip

llama_70b = replace(
    llama_7b,
    name="llama_70b",
    model=replace(llama, d_model=8192, n_blocks=80, n_heads=64, n_kv_heads=8, d_ff=(28_672,)),
    optimizer=replace(adamw, learning_rate=1.5e-4),
    train=replace(llama_7b.train, batch_size=1024),
    mesh="fsdp=512",
)
