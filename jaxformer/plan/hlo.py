"""Reader of compiled programs (HLO text): execution counts of computations, communication, memory traffic.

The compiler's own `cost_analysis` counts a loop's body once, whatever its trip count.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

BITS = {"pred": 8, "bf16": 16, "tf32": 32, "c64": 64, "c128": 128}
"""Bits of types whose names do not state them; other names are f, s or u and the bits (float8 has a suffix)."""

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

FREE = {
    *("parameter", "constant", "iota", "tuple", "get-tuple-element", "bitcast", "partition-id", "replica-id"),
    *("while", "conditional", "call", "after-all", "opt-barrier"),
}
"""Operations without memory traffic."""
SLICES = ("dynamic-slice", "slice", "gather")
CALLED = ("calls", "to_apply", "called_computations", "branch_computations")


@dataclass(frozen=True)
class Instruction:
    """`name = type opcode(operands), attributes`."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    def called(self, *attributes: str) -> list[str]:
        """Return the names of the computations that these attributes reference."""
        matches = re.findall(rf"\b(?:{'|'.join(attributes)})=(?:\{{([^}}]*)\}}|(%?[\w.\-]+))", self.attributes)
        return [name.strip().lstrip("%") for listed, single in matches for name in (listed or single).split(",")]


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind in a step."""

    kind: str
    times: int
    """Number of executions."""
    n_bytes: float
    """Bytes that each device sends."""
    per_host: int = 0
    """Devices of a group per host; 0 for groups within one host."""


@dataclass(frozen=True)
class Program:
    """Computations by name, each a list of instructions in order."""

    computations: dict[str, list[Instruction]]
    entry: str

    @cached_property
    def runs(self) -> Counter[str]:
        """Number of executions of each computation; of a conditional, the last branch counts, which is that of a true
        condition."""
        counts: Counter[str] = Counter()

        def visit(name: str, times: int) -> None:
            counts[name] += times
            for i in self.computations.get(name, ()):
                is_loop = i.opcode == "while"
                inner_times = times * ((self.trip_count(i) or 1) if is_loop else 1)
                called = i.called(*(("body", "condition") if is_loop else CALLED))
                if i.opcode == "conditional":
                    called = i.called("true_computation") or called[-1:]
                for inner in called:
                    visit(inner, inner_times)

        visit(self.entry, 1)
        return counts

    @cached_property
    def fused(self) -> set[str]:
        """Computations that are parts of a fused operation."""
        instructions = (i for body in self.computations.values() for i in body if i.opcode != "call")
        return {name for i in instructions for name in i.called("calls", "to_apply")}

    @property
    def unknown_loops(self) -> int:
        """Number of loops with unknown trip count, which are counted once."""
        loops = (i for body in self.computations.values() for i in body if i.opcode == "while")
        return sum(self.trip_count(i) is None for i in loops)

    def trip_count(self, loop: Instruction) -> int | None:
        """Return the trip count of a `while`: the compiler's annotation, or N from a condition `i < N`, as in
        `jax.lax.scan`; None without either."""
        if known := re.search(r'known_trip_count"?:\{"n":"(\d+)"', loop.attributes):
            return int(known[1])
        condition = self.computations.get(loop.called("condition")[0], [])
        constants = {i.name: i.operands[0] for i in condition if i.opcode == "constant" and i.operands}
        root = next((i for i in condition if i.is_root), None)
        if root is None:
            return None
        limits = [constants[name] for name in root.operands if name in constants]
        parts = [root, *(i for name in root.called("calls") for i in self.computations.get(name, ()))]
        is_below = any("direction=LT" in i.attributes for i in parts)
        return int(limits[0]) if len(limits) == 1 and is_below and limits[0].isdecimal() else None

    def collectives(self, n_devices: int, host_size: int | None = None) -> list[Collective]:
        """Return the communication of a step by kind, with communication between hosts listed separately.

        Each takes what `bytes_sent` says, of the larger side.

        Args:
          host_size: devices per host; None if hosts do not matter.
        """
        times: Counter[tuple[str, int]] = Counter()
        n_bytes: dict[tuple[str, int], float] = defaultdict(float)
        channels: set[str] = set()
        for name, i in self._instructions():
            if (one := self.collective(name, i, n_devices, host_size)) is None:
                continue
            if name in self.fused and (channel := re.search(r"channel_id=(\d+)", i.attributes)):
                if channel[1] in channels:  # an asynchronous collective appears in several fusions
                    continue
                channels.add(channel[1])
            key = one.kind, one.per_host
            times[key] += self.runs[name]
            n_bytes[key] += self.runs[name] * one.n_bytes
        keys = sorted(filter(times.get, times), key=lambda key: (COLLECTIVES.index(key[0]), key[1]))
        return [Collective(kind, times[kind, k], n_bytes[kind, k], k) for kind, k in keys]

    def collective(
        self, computation: str, i: Instruction, n_devices: int, host_size: int | None = None
    ) -> Collective | None:
        """Return the communication of one execution of an instruction; None if it begins none."""
        kind = i.opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            return None
        group = first_group(i.attributes, n_devices)
        # The type of a `-start` is a tuple of operands, results and counters.
        results = tuple_elements(i.type) if i.opcode.endswith("-start") else [i.type]
        S = max(sum(map(type_bytes, self.types(computation, i.operands))), *map(type_bytes, results))
        # The TPU compiler writes a reduce-scatter as a fusion of an all-reduce and a slice.
        if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"
        return Collective(kind, 1, bytes_sent(kind, len(group), S), devices_per_host(group, host_size))

    def _instructions(self) -> Iterator[tuple[str, Instruction]]:
        """Yield all instructions with the names of their computations."""
        return ((name, i) for name, body in self.computations.items() for i in body)

    def traffic(self) -> Iterator[tuple[Instruction, float]]:
        """Yield each unfused operation with the bytes that a device reads and writes for it in memory, operands and
        results of all its executions.

        Only the slice of a sliced array and the update of an array updated in place count. Arrays in on-chip memory
        (`S(1)`) are free.
        """
        for name, i in self._instructions():
            if name not in self.fused:
                yield i, self.runs[name] * self.bytes_of(name, i)

    def memory_traffic(self) -> float:
        """Return the bytes that a device reads from and writes to memory; see `traffic`."""
        return sum(n_bytes for _, n_bytes in self.traffic())

    def is_matmul(self, i: Instruction) -> bool:
        """Return True for a matmul, also one within a fusion."""
        if i.opcode == "custom-call":
            return re.search(r'custom_call_target="[^"]*(gemm|matmul)', i.attributes) is not None
        inner = self.computations.get(i.called("calls")[0], []) if i.opcode == "fusion" else []
        return i.opcode in ("dot", "convolution") or any(map(self.is_matmul, inner))

    def loop_bodies(self) -> list[tuple[list[Instruction], float]]:
        """Return, per loop, the operations of its body that are kernels on a GPU, and the memory traffic of one
        iteration in bytes."""
        loops = [i for _, i in self._instructions() if i.opcode == "while"]
        bodies = [(name, self.computations[name]) for loop in loops for name in loop.called("body")]
        return [
            ([i for i in body if i.opcode not in FREE], sum(self.bytes_of(name, i) for i in body))
            for name, body in bodies
        ]

    def bytes_of(self, computation: str, i: Instruction) -> float:
        """Return the bytes that one execution of an instruction reads and writes; see `traffic`."""
        if i.opcode in FREE or i.opcode.endswith("-done"):
            return 0
        if i.opcode.endswith("-start"):
            return memory_bytes(i.type)
        types = self.types(computation, i.operands)
        if i.opcode in SLICES:
            return 2 * memory_bytes(i.type)
        if i.opcode == "dynamic-update-slice":
            return 2 * memory_bytes(types[1])
        if i.opcode != "fusion":
            return memory_bytes(i.type) + sum(map(memory_bytes, types))
        inner = self.computations.get(i.called("calls")[0], [])
        read = sum(min(memory_bytes(t), self._bytes_read(inner, k)) for k, t in enumerate(types))
        return read + min(memory_bytes(i.type), self._bytes_written(inner))

    def _bytes_read(self, body: list[Instruction], k: int) -> float:
        """Return the bytes that a fused computation reads from its k-th parameter."""
        names = {i.name for i in body if i.opcode == "parameter" and i.operands == (str(k),)}
        total = 0.0
        for i in body:
            if not names & set(i.operands):
                continue
            if i.opcode == "bitcast":
                names.add(i.name)
            elif i.opcode in SLICES:
                total += type_bytes(i.type)
            elif i.opcode == "dynamic-update-slice" and i.operands[0] in names and i.operands[1] not in names:
                continue
            elif i.opcode == "fusion":
                inner = self.computations.get(i.called("calls")[0], [])
                total += sum(self._bytes_read(inner, j) for j, name in enumerate(i.operands) if name in names)
            else:
                return float("inf")
        return total

    def _bytes_written(self, body: list[Instruction]) -> float:
        """Return the bytes that a fused computation writes."""
        by_name = {i.name: i for i in body}

        def result_bytes(i: Instruction) -> float:
            if i.opcode == "tuple":
                return sum(result_bytes(by_name[name]) for name in i.operands)
            if i.opcode == "bitcast":
                return result_bytes(by_name[i.operands[0]])
            return type_bytes(by_name[i.operands[1]].type if i.opcode == "dynamic-update-slice" else i.type)

        return next((result_bytes(i) for i in body if i.is_root), 0.0)

    def types(self, computation: str, names: tuple[str, ...]) -> list[str]:
        """Return the types of instructions of a computation."""
        known = {i.name: i.type for i in self.computations[computation]}
        return [known.get(name, "") for name in names]


def parse(text: str) -> Program:
    """Parse the text of `compiled.as_text()`."""
    computations: dict[str, list[Instruction]] = {}
    entry, body = "", None
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) .*->.*\{\s*$", line):
            body = computations[head[2]] = []
            entry = head[2] if head[1] else entry
        elif line.rstrip() == "}":  # lines of a kernel's metadata may also begin with a brace
            body = None
        elif body is not None and (i := re.match(r"\s+(ROOT )?%?([\w.\-]+) = (.*)", line)):
            body.append(_instruction(i[2], i[3], bool(i[1])))
    return Program(computations, entry)


def _instruction(name: str, text: str, is_root: bool) -> Instruction:
    end = _closing(text, 0) + 1 if text[0] == "(" else text.index(" ")
    rest = text[end:].lstrip()
    start = rest.index("(")
    stop = _closing(rest, start)
    arguments = re.sub(r"/\*.*?\*/", "", rest[start + 1 : stop])
    # Older texts write the type before each operand.
    operands = tuple(o.split()[-1].lstrip("%") for o in _split(arguments) if o.split())
    return Instruction(name, text[:end], rest[:start], operands, rest[stop + 1 :], is_root)


def _closing(text: str, start: int) -> int:
    """Return the index of the bracket that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if not depth:
            return index
    raise ValueError(f"no closing bracket in {text[:80]!r}")


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(c, 0)
        if c == "," and not depth:
            parts.append("")
        else:
            parts[-1] += c
    return parts


def tuple_elements(type_: str) -> list[str]:
    """Return the types in a tuple's type, or the type itself."""
    return _split(type_[1:-1]) if type_.startswith("(") else [type_]


def type_bytes(type_: str) -> float:
    """Return the bytes of an array, or of all arrays in a tuple, from a type such as `bf16[2,3]{1,0}`."""
    return sum(n_bytes for n_bytes, _ in _arrays(type_))


def memory_bytes(type_: str) -> float:
    """Return `type_bytes` of the arrays in the device's main memory."""
    return sum(n_bytes for n_bytes, layout in _arrays(type_) if not re.search(r"S\([1-9]", layout))


def _arrays(type_: str) -> Iterator[tuple[float, str]]:
    """Yield the bytes and the layout of each array in a type."""
    for name, shape, layout in re.findall(r"([a-z]\w*)\[([\d,]*)\](\{[^{}]*\})?", type_):
        width = re.match(r"(?:f|s|u)(\d+)", name)
        bits = BITS.get(name, int(width[1]) if width else 0)
        yield bits * prod(map(int, filter(None, shape.split(",")))) / 8, layout


def bytes_sent(kind: str, n: int, S: float) -> float:
    """Return the bytes that each of n devices sends in a collective over an array of S bytes.

    That is (n - 1)/n · S in an all-gather, a reduce-scatter or an all-to-all; twice as much in an all-reduce, which is
    a reduce-scatter and an all-gather; and S in a permutation.
    """
    return {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1}.get(kind, (n - 1) / n) * S


def devices_per_host(group: Sequence[int], host_size: int | None) -> int:
    """Return the devices per host of a group that spans hosts of `host_size` devices, the fewest on any; 0 for one
    within a host, and if `host_size` is None."""
    hosts = Counter(device // host_size if host_size else 0 for device in group)
    return min(hosts.values()) if len(hosts) > 1 else 0


def first_group(attributes: str, n_devices: int) -> list[int]:
    """Return the devices in the first group of a collective's `replica_groups`; all devices without groups."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return [int(device) for device in listed[1].split(",")]
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        sizes = [int(size) for size in iota[2].split(",")]
        order = [int(axis) for axis in iota[3].split(",")] if iota[3] else None
        devices = np.arange(prod(sizes)).reshape(sizes).transpose(order).ravel()
        return [int(device) for device in devices[: int(iota[1])]]
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", attributes):
        axes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        of_group = tuple(slice(None) if f"'{axis}'" in mesh[2] else 0 for axis in axes)
        return [int(device) for device in np.arange(prod(axes.values())).reshape(*axes.values())[of_group].flat]
    return list(range(n_devices))
