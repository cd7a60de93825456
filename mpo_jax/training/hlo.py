"""What a compiled program moves between devices, and how long its compiler expects it to take, read from its text."""

import collections
import dataclasses
import math
import re

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8}

_HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\) -> .*\{$")
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(")
_CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_WHILE = re.compile(r" while\(.*condition=%?([\w.-]+), body=%?([\w.-]+)")
_TRIPS = re.compile(r'known_trip_count"?:\{"?n"?:"?(\d+)')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_LIMIT = re.compile(r"= [su]32\[\][^ ]* constant\((\d+)\)")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind on one device in one run: how many are executed, and the bytes of their results."""

    count: int = 0
    bytes: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.count + other.count, self.bytes + other.bytes)


def collectives(text: str) -> dict[str, Traffic]:
    """Collectives of a compiled program by kind, those in a loop times its trip count.

    Of a conditional every branch is counted: of the train step's, one is empty. An asynchronous pair counts once; its
    bytes are those of the largest array that its start names.

    Args:
      text: `compiled.as_text()`.

    Raises:
      ValueError: a loop with a collective in it has no constant number of trips.
    """
    bodies, entry = _computations(text)
    return dict(sorted(_traffic(bodies, entry, {}).items()))


def estimated_cycles(text: str) -> int:
    """Cycles that XLA expects a program compiled for a TPU to take on a core, those of a loop times its trip count.

    Instructions for which it gives no estimate, gathers and scatters among them, and branches count as none.

    Args:
      text: `compiled.as_text()`.

    Raises:
      ValueError: a loop has no constant number of trips.
    """
    bodies, entry = _computations(text)

    def total(name: str) -> int:
        cycles = 0
        for line in bodies[name]:
            cycles += sum(map(int, _CYCLES.findall(line)))
            if loop := _WHILE.search(line):
                cycles += _trip_count(line, bodies[loop[1]], loop[1]) * total(loop[2])
        return cycles

    return total(entry)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The instructions of each computation, and the name of the one that is run."""
    bodies, entry, current = {}, "", None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = bodies[header[2]] = []
            entry = header[2] if header[1] else entry
        elif line == "}" or line.startswith("}, "):  # a kernel's settings may go on over lines that begin with }}
            current = None
        elif current is not None:
            current.append(line)
    return bodies, entry


def _traffic(bodies: dict[str, list[str]], name: str, known: dict) -> dict[str, Traffic]:
    if name not in known:
        total = collections.defaultdict(Traffic)
        for line in bodies.get(name, ()):
            if found := _COLLECTIVE.search(line):
                total[found[2]] += Traffic(1, _size(found[1], asynchronous=bool(found[3])))
                continue
            trips, inner = 1, _called(line)
            if loop := _WHILE.search(line):
                inner = [loop[2]]
            for callee in inner:
                moved = _traffic(bodies, callee, known)
                if moved and loop:
                    trips = _trip_count(line, bodies[loop[1]], loop[1])
                for kind, traffic in moved.items():
                    total[kind] += Traffic(traffic.count * trips, traffic.bytes * trips)
        known[name] = total
    return known[name]


def _called(line: str) -> list[str]:
    branches = _BRANCHES.search(line)
    return _CALLED.findall(line) + ([b.strip(" %") for b in branches[1].split(",")] if branches else [])


def _trip_count(line: str, condition: list[str], name: str) -> int:
    """From the loop's annotation, or the one constant that its counter is compared with."""
    if found := _TRIPS.search(line):
        return int(found[1])
    limits = {int(limit) for text in condition if (limit := next(iter(_LIMIT.findall(text)), None))}
    if len(limits) != 1:
        raise ValueError(f"loop condition {name} compares with {sorted(limits)}, expected one constant")
    return limits.pop()


def _size(shape: str, *, asynchronous: bool) -> int:
    sizes = [
        BYTES.get(dtype, 4) * math.prod(int(n) for n in dimensions.split(",") if n)
        for dtype, dimensions in _ARRAY.findall(shape)
    ]
    return max(sizes) if asynchronous else sum(sizes)
