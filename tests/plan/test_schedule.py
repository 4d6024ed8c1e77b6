"""Exposed communication of schedules, by hand."""

import pytest

from jaxformer.plan.hlo import parse
from jaxformer.plan.roofline import Chip
from jaxformer.plan.schedule import exposed_seconds

CHIP = Chip(flops=1000.0, memory=1e9, bandwidth=400.0, link=100.0, source="")

KERNELS = """\
%fused (p: f32[10,5], q: f32[5,10]) -> f32[10,10] {
  %p = f32[10,5]{1,0} parameter(0)
  %q = f32[5,10]{1,0} parameter(1)
  ROOT %d = f32[10,10]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

"""
MATMUL = "f32[10,10]{1,0} fusion(%x, %y), kind=kCustom, calls=%fused"  # 1 s of 1,000 FLOPs, 2 s of 800 bytes
COPY = "f32[10,5]{1,0} copy(%x)"  # 1 s of 400 bytes
CUBLAS = (  # 10,000 FLOPs, 10 s
    '(f32[10,10]{1,0}, s8[4]{0}) custom-call(%v, %w), custom_call_target="__cublas$gemm", '
    'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
)
START = "(f32[50]{0}, f32[100]{0}) all-gather-start(%s), replica_groups={{0,1}}"  # 200 of 400 bytes: 2 s


def exposed(*schedule: str) -> float:
    """Return the exposed seconds of a schedule of instructions named `a`, `b`, …."""
    lines = "\n".join(f"  %{name} = {text}" for name, text in zip("abcdef", schedule, strict=False))
    head = "ENTRY %main (x: f32[10,5]) -> f32[] {\n"
    given = {"x": "10,5", "y": "5,10", "s": "50", "v": "10,50", "w": "50,10"}
    parameters = "\n".join(f"  %{n} = f32[{shape}]{{0}} parameter({k})" for k, (n, shape) in enumerate(given.items()))
    return exposed_seconds(parse(f"{KERNELS}{head}{parameters}\n{lines}\n}}\n"), 2, CHIP)


@pytest.mark.parametrize(
    ("schedule", "seconds"),
    [
        ((START, "f32[100]{0} all-gather-done(%a)"), 2),
        ((START, COPY, "f32[100]{0} all-gather-done(%a)"), 1),
        ((COPY, START, MATMUL, "f32[100]{0} all-gather-done(%b)", COPY), 0),
        (("f32[100]{0} all-gather(%s), replica_groups={{0,1}}", MATMUL), 2),
        ((START, START, MATMUL, "f32[100]{0} all-gather-done(%b)"), 2),  # the first hides behind the matmul
        ((START, START, CUBLAS, "f32[100]{0} all-gather-done(%b)"), 0),
        ((START, START, COPY, "f32[100]{0} all-gather-done(%a)", MATMUL, "f32[100]{0} all-gather-done(%b)"), 1),
    ],
)
def test_kernels_between_start_and_end_hide_communication(schedule, seconds):
    assert exposed(*schedule) == seconds
