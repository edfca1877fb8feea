"""Which ptxas assembles the kernels, and a look at what it made.

ptxas 12.8.93, which Triton 3.6.0 calls for Hopper, leaves out the write of a uniform register in kernels whose operands
of products are narrower than 64 columns of 16 bits: descriptors of shared memory are then whatever was in the register,
and the kernel reads outside of its memory (seen on an H200 with heads of 32 x 40). Triton ships a newer one beside it,
for Blackwell, which assembles for every GPU and does not do this. So that one is called, unless the user names another.
"""

import functools
import os
import re
import subprocess
from pathlib import Path

import torch
import triton

VARIABLE = "TRITON_PTXAS_PATH"
# Versions that are replaced: from the first up to, but without, the second.
BROKEN = ((12, 8), (12, 9))


def bundled(name: str = "ptxas") -> Path:
    """A program that comes with Triton."""
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def ptxas_path() -> Path:
    """The assembler that Triton calls for GPUs before Blackwell."""
    return Path(os.environ.get(VARIABLE) or bundled())


@functools.cache
def version_of(path: Path) -> str | None:
    """Such as "12.8.93"; None if it does not run."""
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.search(r"V(\d+\.\d+\.\d+)", text)
    return None if found is None else found[1]


def _is_broken(version: str | None) -> bool:
    return version is not None and BROKEN[0] <= tuple(int(n) for n in version.split(".")) < BROKEN[1]


def _is_torchs(path: Path) -> bool:
    """Whether it comes with torch. Inductor, when it first compiles, names that one if none is named (torch 2.11)."""
    return path.is_relative_to(Path(torch.__file__).parent)


def choose() -> None:
    """Has Triton call a ptxas that assembles these kernels right, in this process and those that it starts.

    It is named in the environment even where Triton would call the same one: else what is called, and with it the plans
    that were measured, would depend on whether inductor has compiled something before. Does nothing if the user named
    one, or if Triton has none.
    """
    named = os.environ.get(VARIABLE)
    if named and not _is_torchs(Path(named)):
        return
    chosen = bundled()
    if _is_broken(version_of(chosen)):
        newer = bundled("ptxas-blackwell")
        if (version := version_of(newer)) is not None and not _is_broken(version):
            chosen = newer
    if version_of(chosen) is None:
        return
    os.environ[VARIABLE] = str(chosen)
    # Triton keeps the version that is part of a compiled kernel's name: without this, kernels of the old one are found.
    from triton.backends.nvidia import compiler

    compiler.get_ptxas_version.cache_clear()


_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s+([^;]*);")


def undefined(sass: str) -> list[str]:
    """Instructions that read a uniform register which no instruction before them writes.

    `sass`: one kernel, as `cuobjdump --dump-sass` prints it. In the order of addresses, which is that of a loop's first
    round. Returns "address instruction" for the first such read of each register.
    """
    written: set[int] = set()
    found = []
    for address, operation, operands in _INSTRUCTION.findall(sass):
        operands = [operand.strip() for operand in operands.split(",")]
        target = None
        if re.fullmatch(r"UR\d+", operands[0]):
            target = int(operands.pop(0)[2:])
        reads: list[int] = []
        for i, operand in enumerate(operands):
            if descriptor := re.match(r"gdesc\[UR(\d+)\]", operand):
                # Two descriptors of two registers each. Behind the accumulator and a left operand in registers only
                # the second one counts.
                first = int(descriptor[1])
                reads += range(first + (2 if i > 1 else 0), first + 4)
            else:
                reads += map(int, re.findall(r"\bUR(\d+)\b", operand))
        unset = [register for register in reads if register not in written]
        if unset:
            found.append(f"{address} {operation} UR{unset[0]}")
            written.update(unset)
        if target is not None:
            width = 4 if ".128" in operation else 2 if ".64" in operation or ".WIDE" in operation else 1
            written.update(range(target, target + width))
    return found


_PRODUCT = re.compile(r"HGMMA\.64x(\d+)x\d+\.(F16|F32)")


def _named(operation: str, operands: str) -> set[int]:
    """The registers of a thread that an instruction names; those of an address are one or two."""
    parts = re.findall(r"M88\.(\d)|\.(64|128)\b", operation)
    width = max([1, *(int(matrices) if matrices else int(bits) // 32 for matrices, bits in parts)])
    found = set()
    for place in re.finditer(r"\[[^]]*\]|(?<!\w)R(\d+)", operands):
        if place[1] is None:
            found.update(map(int, re.findall(r"(?<!\w)R(\d+)", place[0])))
        else:
            found.update(range(int(place[1]), int(place[1]) + width))
    return found


def touched(sass: str) -> list[str]:
    """Instructions that read or write what a product under way accumulates into, before the wait that covers it.

    A product belongs to the group that the next HGMMA with a `gsb0` ends; DEPBAR waits until no more than so many are
    under way. `sass` and the order as for `undefined`. Returns "address operation register", one an instruction.
    """
    groups: list[set[int]] = [set()]  # the last one has not ended
    found = []
    for address, operation, operands in _INSTRUCTION.findall(sass):
        if product := _PRODUCT.match(operation):
            first = int(re.match(r"R(\d+)", operands)[1])
            groups[-1].update(range(first, first + int(product[1]) // (2 if product[2] == "F32" else 4)))
            if "gsb0" in operands:
                groups.append(set())
        elif operation.startswith("WARPGROUP.DEPBAR"):
            under_way = int(operands.split(",")[1], 16)
            groups = groups[max(0, len(groups) - 1 - under_way) :]
        elif meant := _named(operation, operands) & set().union(*groups):
            found.append(f"{address} {operation} R{min(meant)}")
    return found


# Of an instruction's upper word: the scoreboards that its result releases and that it waits for, see below.
_ENCODED = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)[^;]*;[^\n]*\n\s*/\* 0x([0-9a-f]{16}) \*/")
_RESULT, _WAITS, _NONE = (46, 7), (52, 63), 7


def under_way(sass: str) -> list[str]:
    """Loads of tiles from shared memory that may be under way at a barrier behind which a place is given back.

    Such a barrier is followed by an arrival at an mbarrier. The copy engine, which may then write the next tile there,
    does not wait for loads: what they bring must have been used before, by something that is stored.

    Bits 46 to 48 of an instruction's upper word name the scoreboard that its result releases (7: none), bits 52 to 57
    those that it waits for. Shared memory and shuffles answer in order, so what comes later speaks for a load that
    names none. `sass` and the order as for `undefined`. Returns "address operation, barrier address".
    """
    code = [(address, operation, int(word, 16)) for address, operation, word in _ENCODED.findall(sass)]
    asked: list[tuple[int, str | None]] = []  # scoreboard; a load of a tile
    found = []
    for i, (address, operation, word) in enumerate(code):
        waits = word >> _WAITS[0] & _WAITS[1]
        come = [j for j, (scoreboard, _) in enumerate(asked) if scoreboard != _NONE and waits >> scoreboard & 1]
        if come:
            asked = asked[come[-1] + 1 :]
        if operation.startswith("BAR.") and _gives_back(code[i + 1 :]):
            found += [f"{load}, barrier {address}" for _, load in asked if load is not None]
        elif operation.startswith(("LDS", "SHFL")):
            load = f"{address} {operation}" if operation.startswith(("LDSM", "LDS.128")) else None
            asked.append((word >> _RESULT[0] & _RESULT[1], load))
    return found


def _gives_back(code: list[tuple[str, str, int]]) -> bool:
    """Whether an mbarrier is told before the next barrier or jump."""
    for _, operation, _ in code:
        if operation.startswith("SYNCS.ARRIVE"):
            return True
        if operation.startswith(("BAR.", "BRA", "EXIT")):
            return False
    return False
