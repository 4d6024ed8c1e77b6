"""What a compiled program does, read from its text: how often each operation runs, and what it moves.

The compiler's own `cost_analysis` counts the body of a loop once, however often it runs.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

BITS = {"pred": 8, "bf16": 16, "tf32": 32, "c64": 64, "c128": 128}
"""Of the types whose name does not end in, or (float8) begin with, their width."""

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all",
    "opt-barrier", "partition-id", "replica-id", "iota",
}  # fmt: skip
"""Operations that move nothing through memory, or whose inner operations are counted instead."""


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
        """Computations named by these attributes."""
        found = re.findall(rf"\b(?:{'|'.join(attributes)})=(?:\{{([^}}]*)\}}|(%?[\w.\-]+))", self.attributes)
        return [name.strip().lstrip("%") for listed, single in found for name in (listed or single).split(",")]


@dataclass(frozen=True)
class Collective:
    """One kind of exchange: how often in a step, and the bytes that each device sends in all of them together."""

    kind: str
    times: int
    n_bytes: float


@dataclass(frozen=True)
class Program:
    """Computations by name, each a list of instructions in order."""

    computations: dict[str, list[Instruction]]
    entry: str

    @cached_property
    def runs(self) -> Counter[str]:
        """How often each computation runs: bodies of loops as often as their conditions say."""
        counts: Counter[str] = Counter()

        def visit(name: str, times: int) -> None:
            counts[name] += times
            for i in self.computations.get(name, ()):
                if i.opcode == "while":
                    n = self.trip_count(i) or 1
                    for inner in i.called("body", "condition"):
                        visit(inner, times * n)
                else:
                    # Each branch of a conditional counts: which is taken is known only when it runs.
                    for inner in i.called("calls", "to_apply", "called_computations", "branch_computations",
                                          "true_computation", "false_computation"):  # fmt: skip
                        visit(inner, times)

        visit(self.entry, 1)
        return counts

    @cached_property
    def fused(self) -> set[str]:
        """Computations that are parts of one operation."""
        instructions = (i for body in self.computations.values() for i in body if i.opcode != "call")
        return {name for i in instructions for name in i.called("calls", "to_apply")}

    @property
    def unknown_loops(self) -> int:
        """Loops whose length the text does not tell; they are counted as if they ran once."""
        loops = (i for body in self.computations.values() for i in body if i.opcode == "while")
        return sum(self.trip_count(i) is None for i in loops)

    def trip_count(self, loop: Instruction) -> int | None:
        """How often a `while` runs: what the compiler wrote beside it, or the N of its condition `i < N`.

        A loop made by `jax.lax.scan` counts from 0 in steps of 1.
        """
        if known := re.search(r'known_trip_count"?:\{"n":"(\d+)"', loop.attributes):
            return int(known[1])
        condition = self.computations.get(loop.called("condition")[0], [])
        constants = {i.name: i.operands[0] for i in condition if i.opcode == "constant" and i.operands}
        root = next((i for i in condition if i.is_root), None)
        limits = [constants[name] for name in root.operands if name in constants] if root else []
        below = root is not None and any("direction=LT" in i.attributes for i in self._inside(root))
        return int(limits[0]) if len(limits) == 1 and below and limits[0].isdecimal() else None

    def _inside(self, i: Instruction) -> Iterator[Instruction]:
        """An instruction, and those of the fusion it may be."""
        yield i
        for name in i.called("calls"):
            yield from self.computations.get(name, ())

    def collectives(self, n_devices: int) -> list[Collective]:
        """What devices exchange in a step, by kind. Each device sends, of n that share an array of S bytes:

        (n - 1)/n · S in an all-gather, a reduce-scatter and an all-to-all, where S is the larger side; twice as much
        in an all-reduce, which is both of the first; and S in a permutation.
        """
        times: Counter[str] = Counter()
        moved: dict[str, float] = defaultdict(float)
        seen: set[str] = set()
        for name, body in self.computations.items():
            for i in body:
                kind = i.opcode.removesuffix("-start")
                if kind not in COLLECTIVES:
                    continue
                if name in self.fused and (channel := re.search(r"channel_id=(\d+)", i.attributes)):
                    if channel[1] in seen:  # written out where it begins, and again wherever it goes on
                        continue
                    seen.add(channel[1])
                n = group_size(i.attributes, n_devices)
                # What begins an exchange has operands, results and counters in its type, one after the other.
                results = elements(i.type) if i.opcode.endswith("-start") else [i.type]
                S = max(sum(map(type_bytes, self._types(body, i.operands))), *map(type_bytes, results))
                # The TPU compiler writes a reduce-scatter as a fusion of an all-reduce and the slice that is kept.
                if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
                    kind = "reduce-scatter"
                share = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1}.get(kind, (n - 1) / n)
                times[kind] += self.runs[name]
                moved[kind] += self.runs[name] * share * S
        return [Collective(kind, times[kind], moved[kind]) for kind in COLLECTIVES if times[kind]]

    def memory_traffic(self) -> float:
        """Bytes that a device reads from and writes to its memory: operands and results of what is not fused.

        Of an array that is only sliced, the slice counts, and of one that is updated in place, the update. Arrays that
        the compiler keeps on the chip (`S(1)`) are free.
        """
        return sum(
            times * sum(self._traffic(name, i) for i in self.computations[name])
            for name, times in self.runs.items()
            if name in self.computations and name not in self.fused
        )

    def _traffic(self, computation: str, i: Instruction) -> float:
        if i.opcode in FREE or i.opcode.endswith("-done"):
            return 0
        if i.opcode.endswith("-start"):
            return memory_bytes(i.type)
        types = self._types(self.computations[computation], i.operands)
        if i.opcode in ("dynamic-slice", "slice", "gather"):
            return 2 * memory_bytes(i.type)
        if i.opcode == "dynamic-update-slice":
            return 2 * memory_bytes(types[1])
        if i.opcode != "fusion":
            return memory_bytes(i.type) + sum(map(memory_bytes, types))
        inner = self.computations.get(i.called("calls")[0], [])
        read = sum(min(memory_bytes(t), self._read(inner, k)) for k, t in enumerate(types))
        return read + min(memory_bytes(i.type), self._written(inner))

    def _read(self, body: list[Instruction], k: int) -> float:
        """Bytes that a fused computation reads of its k-th parameter."""
        names = {i.name for i in body if i.opcode == "parameter" and i.operands == (str(k),)}
        total = 0.0
        for i in body:
            if not names & set(i.operands):
                continue
            if i.opcode == "bitcast":
                names.add(i.name)
            elif i.opcode in ("dynamic-slice", "slice", "gather"):
                total += type_bytes(i.type)
            elif i.opcode == "dynamic-update-slice" and i.operands[0] in names and i.operands[1] not in names:
                continue
            elif i.opcode == "fusion":
                inner = self.computations.get(i.called("calls")[0], [])
                total += sum(self._read(inner, at) for at, name in enumerate(i.operands) if name in names)
            else:
                return float("inf")
        return total

    def _written(self, body: list[Instruction]) -> float:
        """Bytes that a fused computation writes."""
        by_name = {i.name: i for i in body}

        def size(i: Instruction) -> float:
            if i.opcode == "tuple":
                return sum(size(by_name[name]) for name in i.operands)
            if i.opcode == "bitcast":
                return size(by_name[i.operands[0]])
            return type_bytes(by_name[i.operands[1]].type if i.opcode == "dynamic-update-slice" else i.type)

        return next((size(i) for i in body if i.is_root), 0.0)

    def _types(self, body: list[Instruction], names: tuple[str, ...]) -> list[str]:
        known = {i.name: i.type for i in body}
        return [known.get(name, "") for name in names]


def parse(text: str) -> Program:
    """A program from `compiled.as_text()`."""
    computations: dict[str, list[Instruction]] = {}
    entry, body = "", None
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) .*->.*\{\s*$", line):
            body = computations[head[2]] = []
            entry = head[2] if head[1] else entry
        elif line.rstrip() == "}":  # a kernel's metadata may have lines of its own that begin so
            body = None
        elif body is not None and (i := re.match(r"\s+(ROOT )?%?([\w.\-]+) = (.*)", line)):
            body.append(_instruction(i[2], i[3], bool(i[1])))
    return Program(computations, entry)


def _instruction(name: str, text: str, is_root: bool) -> Instruction:
    end = _closing(text, 0) + 1 if text[0] == "(" else text.index(" ")
    rest = text[end:].lstrip()
    opened = rest.index("(")
    closed = _closing(rest, opened)
    inside = re.sub(r"/\*.*?\*/", "", rest[opened + 1 : closed])
    # Older texts write the type before each operand.
    operands = tuple(o.split()[-1].lstrip("%") for o in _split(inside) if o.split())
    return Instruction(name, text[:end], rest[:opened], operands, rest[closed + 1 :], is_root)


def _closing(text: str, start: int) -> int:
    depth = 0
    for at in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if not depth:
            return at
    raise ValueError(f"no closing bracket in {text[:80]!r}")


def _split(text: str) -> list[str]:
    """At commas outside of brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(c, 0)
        if c == "," and not depth:
            parts.append("")
        else:
            parts[-1] += c
    return parts


def elements(type_: str) -> list[str]:
    """The types in a tuple's type, or the type itself."""
    return _split(type_[1:-1]) if type_.startswith("(") else [type_]


def type_bytes(type_: str) -> float:
    """Bytes of an array, or of all in a tuple, from a type such as `bf16[2,3]{1,0}`."""
    return sum(_bits(name) * prod(map(int, filter(None, shape.split(",")))) / 8 for name, shape, _ in _arrays(type_))


def memory_bytes(type_: str) -> float:
    """As `type_bytes`, of what lies in the device's main memory."""
    return sum(
        _bits(name) * prod(map(int, filter(None, shape.split(",")))) / 8
        for name, shape, layout in _arrays(type_)
        if not re.search(r"S\([1-9]", layout)
    )


def _arrays(type_: str) -> list[tuple[str, str, str]]:
    return re.findall(r"([a-z]\w*)\[([\d,]*)\](\{[^{}]*\})?", type_)


def _bits(name: str) -> int:
    if name in BITS:
        return BITS[name]
    width = re.match(r"(?:f|s|u)(\d+)", name)
    return int(width[1]) if width else 0


def group_size(attributes: str, n_devices: int) -> int:
    """How many devices share one exchange, from its `replica_groups`; without any, all."""
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return listed[1].count(",") + 1
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", attributes):
        return int(iota[2])
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", attributes):
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        return prod(sizes[axis] for axis in re.findall(r"'(\w+)'", mesh[2]))
    return n_devices
