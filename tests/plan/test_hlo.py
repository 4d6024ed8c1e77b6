"""Compiled programs: texts with sums by hand, and a program that XLA compiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxformer.plan.hlo import first_group, memory_bytes, parse, type_bytes

PROGRAM = """\
HloModule step, is_scheduled=true

%fused (param_0: bf16[16,4,8], param_1: s32[]) -> bf16[1,4,8] {
  %param_0 = bf16[16,4,8]{2,1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = bf16[1,4,8]{2,1,0} dynamic-slice(%param_0, %param_1, %zero, /*index=3*/%zero), sizes={1,4,8}
}

%all-reduce-scatter.1 (input: bf16[4,8]) -> bf16[2,8] {
  %input = bf16[4,8]{1,0} parameter(0)
  %sum = bf16[4,8]{1,0:T(8,128)(2,1)} all-reduce(%input), channel_id=7, replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %part = bf16[2,8]{1,0} slice(%sum), slice={[0:2], [0:8]}
}

%begins (in: bf16[2,8]) -> bf16[4,8] {
  %in = bf16[2,8]{1,0} parameter(0)
  ROOT %a = bf16[4,8]{1,0} all-gather(%in), channel_id=9, replica_groups=[2,2]<=[4], dimensions={0}
}

%goes_on (in: bf16[2,8]) -> bf16[4,8] {
  %in = bf16[2,8]{1,0} parameter(0)
  ROOT %a = bf16[4,8]{1,0} all-gather(%in), channel_id=9, replica_groups=[2,2]<=[4], dimensions={0}
}

%add (x: bf16[], y: bf16[]) -> bf16[] {
  %x = bf16[] parameter(0)
  %y = bf16[] parameter(1)
  ROOT %z = bf16[] add(%x, %y)
}

%body (state: (s32[], bf16[16,4,8])) -> (s32[], bf16[16,4,8]) {
  %state = (s32[]{:T(128)}, bf16[16,4,8]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %stack = bf16[16,4,8]{2,1,0} get-tuple-element(%state), index=1
  %one = bf16[1,4,8]{2,1,0} fusion(%stack, %i), kind=kLoop, calls=%fused
  %flat = bf16[4,8]{1,0} bitcast(%one)
  %own = bf16[2,8]{1,0} fusion(%flat), kind=kCustom, calls=%all-reduce-scatter.1
  %kernel = bf16[2,8]{1,0:S(1)} custom-call(%own), custom_call_target="kernel", backend_config={"text": "
}}, "more": "lines"}
  %first = bf16[4,8]{1,0} fusion(%own), kind=kCustom, calls=%begins
  %second = bf16[4,8]{1,0} fusion(%own), kind=kCustom, calls=%goes_on
  ROOT %next = (s32[], bf16[16,4,8]{2,1,0}) tuple(%i, %stack)
}

%condition (state: (s32[], bf16[16,4,8])) -> pred[] {
  %state = (s32[]{:T(128)}, bf16[16,4,8]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %limit = s32[]{:T(128)} constant(16)
  ROOT %below = pred[] compare(%i, %limit), direction=LT
}

ENTRY %main (w: bf16[16,4,8]) -> f32[] {
  %w = bf16[16,4,8]{2,1,0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], bf16[16,4,8]{2,1,0}) tuple(%zero, %w)
  %loop = (s32[], bf16[16,4,8]{2,1,0}) while(%start), condition=%condition, body=%body
  %loss = f32[] constant(1)
  ROOT %total = f32[] all-reduce(%loss), channel_id=1, replica_groups={}, to_apply=%add
}
"""


def test_loop_body_counts_per_iteration():
    program = parse(PROGRAM)
    assert program.entry == "main"
    assert [program.runs[name] for name in ("main", "body", "fused", "begins")] == [1, 16, 16, 16]
    assert program.unknown_loops == 0


def test_loop_of_unknown_length_counts_once_and_is_reported():
    program = parse(PROGRAM.replace("direction=LT", "direction=NE"))
    assert program.runs["body"] == 1 and program.unknown_loops == 1


@pytest.mark.parametrize(
    "branches", ["branch_computations={%begins, %fused}", "true_computation=%fused, false_computation=%begins"]
)
def test_of_a_conditional_the_branch_of_a_true_condition_counts(branches):
    text = PROGRAM.replace(
        "  %loss =", f"  %c = bf16[1,4,8]{{2,1,0}} conditional(%zero, %w, %w), {branches}\n  %loss ="
    )
    runs = parse(text).runs
    assert (runs["fused"], runs["begins"]) == (16 + 1, 16)


def test_known_trip_count_of_the_compiler_is_used():
    known = 'body=%body, backend_config={"known_trip_count":{"n":"5"}}'
    assert parse(PROGRAM.replace("body=%body", known)).runs["body"] == 5


def test_bytes_sent_by_kind():
    result = {c.kind: (c.times, c.n_bytes) for c in parse(PROGRAM).collectives(4)}
    assert result == {
        "all-gather": (16, 16 * 1 / 2 * 64),  # one all-gather of 4 x 8 bfloat16 between 2, in two fusions
        "reduce-scatter": (16, 16 * 1 / 2 * 64),  # written as an all-reduce and a slice
        "all-reduce": (1, 2 * 3 / 4 * 4),  # a float32 between all 4
    }


def test_asynchronous_collectives_count_once_by_their_result():
    text = PROGRAM.replace(
        "  ROOT %total",
        "  %begun = (bf16[2,8]{1,0}, bf16[4,8]{1,0}, u32[]) all-gather-start(%w), replica_groups={{0,1},{2,3}}\n"
        "  %done = bf16[4,8]{1,0} all-gather-done(%begun)\n"
        "  %sent = (f32[3]{0}, f32[3]{0}, u32[], u32[]) collective-permute-start(%loss), source_target_pairs={{0,1}}\n"
        "  ROOT %total",
    ).replace("(%w), replica", "(%small), replica")
    result = {c.kind: (c.times, c.n_bytes) for c in parse(text).collectives(4)}
    assert result["all-gather"] == (17, 17 * 32)
    assert result["collective-permute"] == (1, 12)


def test_memory_traffic():
    # Of the stack, 64 bytes are read and written each time; `own` reads 64 and writes the 32 of its slice, the kernel
    # reads 32 and leaves its result on the chip; each part of the gather reads 32 and writes 64. At the end, 4 and 4.
    each = (64 + 4 + 64) + (64 + 32) + 32 + 2 * (32 + 64)
    compare = 4 + 4 + 1  # the condition reads two integers and writes a bool
    assert parse(PROGRAM).memory_traffic() == 16 * (each + compare) + 8
    ((kernels, n_bytes),) = parse(PROGRAM).loop_bodies()
    assert [i.name for i in kernels] == ["one", "own", "kernel", "first", "second"]
    assert n_bytes == each


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("f32[]", 4), ("bf16[2,3]{1,0:T(8,128)(2,1)}", 12), ("pred[5]", 5), ("s4[8]{0}", 4), ("f8e4m3fn[7]", 7),
        ("(f32[2]{0}, (u8[3], s64[1]))", 8 + 3 + 8), ("token[]", 0), ("c64[2]", 16),
    ],
)  # fmt: skip
def test_bytes_of_a_type(text, size):
    assert type_bytes(text) == size


def test_arrays_on_the_chip_are_not_in_memory():
    assert memory_bytes("(bf16[4]{0:T(8)S(1)}, bf16[4]{0:T(8)})") == 8


@pytest.mark.parametrize(
    ("groups", "devices"),
    [
        ("replica_groups={{0,1,2},{3,4,5}}", [0, 1, 2]), ("replica_groups=[8,2]<=[2,8]T(1,0)", [0, 8]),
        ("replica_groups=[2,8]<=[16]", list(range(8))), ("replica_groups={}", list(range(16))),
        ("replica_groups=mesh['a'=4,'b'=2] {'a'}", [0, 2, 4, 6]), ("replica_groups=mesh['a'=4,'b'=2] {'b'}", [0, 1]),
        ("channel_id=1", list(range(16))),
    ],
)  # fmt: skip
def test_first_group_of_replica_groups(groups, devices):
    assert first_group(groups, 16) == devices


def test_communication_between_hosts_is_apart():
    """Of two hosts of two, the gathers are within one; the last sum is over both."""
    result = {(c.kind, c.per_host) for c in parse(PROGRAM).collectives(4, host_size=2)}
    assert result == {("all-gather", 0), ("reduce-scatter", 0), ("all-reduce", 2)}
    across = PROGRAM.replace("replica_groups=[2,2]<=[4]", "replica_groups=[2,2]<=[2,2]T(1,0)")  # devices 0 and 2
    assert ("all-gather", 1) in {(c.kind, c.per_host) for c in parse(across).collectives(4, host_size=2)}


def test_collectives_of_a_compiled_program():
    """A loop of 5 over all-gathers and reduce-scatters between 8 devices."""
    mesh = Mesh(np.array(jax.devices()), ("x",))

    def step(w_L):
        def body(total, w):
            gathered = jax.lax.all_gather(w, "x", tiled=True)
            return total + jax.lax.psum_scatter(jnp.sin(gathered), "x", tiled=True), None

        return jax.lax.scan(body, w_L[0], w_L)[0]

    each = jax.shard_map(step, mesh=mesh, in_specs=PartitionSpec(None, "x"), out_specs=PartitionSpec("x"))
    text = jax.jit(each).lower(jax.ShapeDtypeStruct((5, 32), jnp.float32)).compile().as_text()
    result = {c.kind: (c.times, c.n_bytes) for c in parse(text).collectives(8)}
    sent = 5 * 7 / 8 * 32 * 4
    assert result == {"all-gather": (5, sent), "reduce-scatter": (5, sent)}
