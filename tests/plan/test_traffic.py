"""Memory traffic by category: of a program by its names, and the minimum by hand."""

from dataclasses import replace

import pytest

from jaxformer.config import ComputeConfig
from jaxformer.plan.hlo import parse
from jaxformer.plan.meshes import on_one_device
from jaxformer.plan.traffic import minimal_traffic, traffic_by_category
from tests.plan.test_meshes import BLOCKS, GAINS, SETUP, TABLES, B, D, F, L, T, V, sizes
from tests.plan.test_roofline import CONFIG, MODEL

MODEL_OP = "jit(train_step)/transpose(jvp(vmap(Decoder.features)))/blocks_1.run/blocks_1/"


def program(*operations: tuple[str, str]) -> str:
    """Return the text of a program of operations, each of eight bfloat16 in and out, by opcode and name."""
    lines = [
        f'  %r{n} = bf16[8]{{0}} {opcode}(%x), metadata={{op_name="{name}"}}'
        for n, (opcode, name) in enumerate(operations)
    ]
    fused = "%fused (p: bf16[8]) -> bf16[8] {\n  %p = bf16[8]{0} parameter(0)\n  ROOT %d = bf16[8]{0} dot(%p, %p)\n}\n"
    return (
        f"{fused}ENTRY %main (x: bf16[8]) -> bf16[8] {{\n  %x = bf16[8]{{0}} parameter(0)\n"
        + "\n".join(lines)
        + "\n}\n"
    )


@pytest.mark.parametrize(
    ("opcode", "name", "category"),
    [
        ("dot", MODEL_OP + "mlp/mlp._hidden_layer/dot_general", "matmuls"),
        ("fusion", MODEL_OP + "mlp/mlp._hidden_layer/dot_general", "matmuls"),  # its computation has a dot
        ("dot", "jit(train_step)/jvp(loss)/while/body/dot_general", "loss"),
        ("add", "jit(train_step)/transpose(jvp(loss))/mul", "loss"),
        ("add", MODEL_OP + "attention/attention.attend/dot_product_attention_bwd", "attention"),
        ("add", MODEL_OP + "blocks_1._normalized/mlp_norm/reduce_sum", "norms, residuals"),
        ("add", MODEL_OP + "add", "norms, residuals"),
        ("add", MODEL_OP + "attention/attention._project/td,dhk->htk/add_any", "norms, residuals"),
        ("add", MODEL_OP + "attention/attention._project/add", "biases"),
        ("add", MODEL_OP + "mlp/mlp._linear/reduce_sum", "biases"),
        ("add", MODEL_OP + "mlp/mlp._hidden_layer/mul", "activation"),
        ("add", "jit(train_step)/jvp(vmap(Decoder.features))/Decoder.embed/embedding/gather", "embedding"),
        ("add", "jit(train_step)/jit(row_norms)/reduce_sum", "optimizer"),
        ("copy", MODEL_OP + "attention/transpose", "other"),
        ("copy", "", "other"),
    ],
)
def test_operations_belong_where_they_were_traced(opcode, name, category):
    text = program((opcode, name)).replace("fusion(%x)", "fusion(%x), calls=%fused")
    assert traffic_by_category(parse(text)) == {category: 2 * 16}
    unbiased = "other" if category == "biases" else category
    assert traffic_by_category(parse(text), has_biases=False) == {unbiased: 2 * 16}


def test_traffic_is_listed_by_size_and_adds_up():
    parsed = parse(program(("add", MODEL_OP + "add"), ("dot", MODEL_OP + "dot"), ("dot", MODEL_OP + "dot")))
    result = traffic_by_category(parsed)
    assert list(result) == ["matmuls", "norms, residuals"]
    assert sum(result.values()) == parsed.memory_traffic()


def test_minimal_traffic_by_hand():
    """Of half the batch, in bfloat16, with heads, hidden width and vocabulary split over two devices."""
    N = B // 2 * T
    matmuls = L * (N * ((3 * D + 3 * D // 2) + (D // 2 + D) + (D + F // 2) + (F // 2 + D))) + BLOCKS / 2
    expected = {
        "matmuls": 3 * 2 * matmuls,
        "attention": 3 * 2 * N * L * 4 * D / 2,
        "loss": 2 * 2 * (N * D + D * V / 2),
        "norms, residuals": 6 * 2 * N * D * 2 * L,
        "activation": 5 * 2 * N * F / 2 * L,
        "optimizer": 20 * ((BLOCKS + TABLES) / 2 + GAINS),  # momentum: two arrays read and written, and a gradient
    }
    result = minimal_traffic(SETUP, sizes(data=2, tensor=2))
    assert result == pytest.approx(expected, abs=100)
    recomputed = on_one_device(replace(CONFIG, compute=ComputeConfig(remat="block")))
    more = minimal_traffic(recomputed, sizes(data=2, tensor=2))
    w_2 = L * (N * (F // 2 + D) + F * D / 2)  # the next block has its result, and nothing else reads it
    assert more["matmuls"] == result["matmuls"] + 2 * (matmuls - w_2) and more["loss"] == result["loss"]
    assert more["activation"] == 6 / 5 * result["activation"]  # its result is written again
    parallel, post = (
        minimal_traffic(on_one_device(replace(recomputed.config, model=replace(MODEL, norm_placement=name))), sizes())
        for name in ("parallel", "post")
    )
    w_o = L * (2 * N * 2 * D + D * D)
    w_2 = L * (2 * N * (F + D) + F * D)
    assert post["matmuls"] - parallel["matmuls"] == 2 * (w_o + w_2)
    tied = minimal_traffic(on_one_device(replace(CONFIG, model=replace(MODEL, unembedding="tied"))), sizes())
    assert tied["loss"] == 2 * 2 * (B * T * D + D * V)
