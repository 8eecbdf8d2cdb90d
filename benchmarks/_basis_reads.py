"""How often a compiled program reads a basis: counted in its optimized HLO."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

__all__ = ["Read", "basis_reads"]

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(?.*?\)?) ([\w\-]+)\((.*)$")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:to_apply|body|condition|calls)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
# They hand arrays on; what they call is looked at by itself.
_PLUMBING = {"parameter", "tuple", "get-tuple-element", "while", "call", "conditional", "bitcast"}
_BYTES = {"f32": 4, "bf16": 2, "f64": 8, "f16": 2}


class Read(NamedTuple):
    """An instruction that reads a part of the basis.

    Attributes:
      name: the instruction's name.
      opcode: what it does.
      bytes: the size of the part, once for each operand that is one.
    """

    name: str
    opcode: str
    bytes: int


def basis_reads(compiled: Any, shapes: Iterable[tuple[int, ...]]) -> list[Read]:
    """Return the instructions of a compiled function that have a part of the basis as an operand.

    A part is an array with as many numbers as the parts of one leaf, k times the leaf's, of which
    nothing else in the program may have as many. A fusion reads an operand once; instructions inside
    of a fusion are not looked at. The body of a loop counts once.
    """
    sizes = {math.prod(shape) for shape in shapes}
    computations: dict[str, list[tuple[str, str, str, str]]] = {}
    entry, current = "", ""
    for line in compiled.as_text().splitlines():
        found = _COMPUTATION.match(line)
        if found:
            current = found[1]
            computations[current] = []
            entry = current if line.startswith("ENTRY") else entry
        elif (found := _INSTRUCTION.match(line)) and current:
            computations[current].append((found[1], found[2], found[3], found[4]))
    reads: list[Read] = []
    seen: set[str] = set()

    def visit(name: str) -> None:
        if name in seen or name not in computations:
            return
        seen.add(name)
        parts = {}
        for inner, kind, opcode, rest in computations[name]:
            got = _ARRAY.fullmatch(re.sub(r"\{.*\}", "", kind))
            if got and math.prod(int(x) for x in got[2].split(",") if x) in sizes:
                size = math.prod(int(x) for x in got[2].split(",") if x)
                parts[inner] = size * _BYTES.get(got[1], 4)
            if opcode in ("call", "while", "conditional"):
                for called in _CALLED.findall(rest):
                    visit(called)
                for branches in _BRANCHES.findall(rest):
                    for called in branches.split(","):
                        visit(called.strip().lstrip("%"))
            if opcode in _PLUMBING:
                continue
            operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
            total = sum(parts.get(operand, 0) for operand in operands)
            if total:
                reads.append(Read(inner, opcode, total))

    visit(entry)
    return reads
