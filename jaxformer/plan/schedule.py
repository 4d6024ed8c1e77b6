"""Communication that a compiled schedule leaves exposed: not hidden behind kernels that run at the same time."""

from __future__ import annotations

import re
from math import prod

from jaxformer.plan.hlo import FREE, Instruction, Program
from jaxformer.plan.roofline import Chip


def exposed_seconds(program: Program, n_devices: int, chip: Chip, host_size: int | None = None) -> float:
    """Return the seconds per step in which a device only waits for others, at the chip's peak rates.

    Between its start and its end, an asynchronous collective is hidden behind the kernels scheduled there, each of
    which takes the longer of its matmuls and its memory traffic. Collectives of one computation run one after the
    other; one without start and end is exposed.
    """
    return sum(
        program.runs[name] * _exposed(program, name, n_devices, chip, host_size)
        for name in program.computations
        if name not in program.fused and program.runs[name]
    )


def _exposed(program: Program, name: str, n_devices: int, chip: Chip, host_size: int | None) -> float:
    waiting: dict[str, float] = {}  # seconds that collectives still need, in order of their start
    total = 0.0
    for i in program.computations[name]:
        if sent := program.collective(name, i, n_devices, host_size):
            waiting[i.name] = chip.send_seconds([sent])
        if i.opcode.endswith("-done") or (sent and not i.opcode.endswith("-start")):
            last = i.name if sent else i.operands[0]
            while last in waiting:  # those before it must end, too
                total += waiting.pop(next(iter(waiting)))
        elif not sent:
            seconds = seconds_of(program, name, i, chip)
            for first in list(waiting):
                hidden = min(seconds, waiting[first])
                waiting[first] -= hidden
                seconds -= hidden
    return total


def seconds_of(program: Program, computation: str, i: Instruction, chip: Chip) -> float:
    """Return the seconds of one execution of an instruction; those of a loop without its communication."""
    if i.opcode == "while":
        (body,) = i.called("body")
        each = sum(seconds_of(program, body, inner, chip) for inner in program.computations[body])
        return (program.trip_count(i) or 1) * each
    if i.opcode in FREE:
        return 0.0
    return max(flops_of(program, computation, i) / chip.flops, program.bytes_of(computation, i) / chip.bandwidth)


def flops_of(program: Program, computation: str, i: Instruction) -> float:
    """Return the FLOPs of the matmuls of an instruction, also those within a fusion and of cuBLAS; none of attention
    kernels."""
    if i.opcode == "fusion":
        (inner,) = i.called("calls")
        return sum(flops_of(program, inner, each) for each in program.computations.get(inner, ()))
    if i.opcode != "dot" and not (i.opcode == "custom-call" and program.is_matmul(i)):
        return 0.0
    axes = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d",]*)', i.attributes)
    shapes = [re.findall(r"\d+", shape) for type_ in (program.types(computation, i.operands[:1])[0], i.type)
              for shape in re.findall(r"\[([\d,]*)\]", type_)[:1]]  # fmt: skip
    if axes is None or len(shapes) < 2:
        return 0.0
    left, out = ([int(n) for n in shape] for shape in shapes)
    return 2.0 * prod(out) * prod(left[int(axis)] for axis in re.findall(r"\d+", axes[1]))
