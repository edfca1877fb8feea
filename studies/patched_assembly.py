"""Changes of a compiled kernel's control bits, to see whether a fault comes from how the assembler scheduled it.

An instruction of sm_90 has 128 bits. Those from 105 on are the scheduler's: cycles until the next one (4), yield (1),
the scoreboards that its result and the reading of its operands release (3 each, 7: none), and those it waits for (6).
Changes only make a program wait longer: what it computes is the same, if it was assembled right.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from stateflow_kernels import aot

_WORDS = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+([^;]*);\s+/\* 0x([0-9a-f]{16}) \*/\s+/\* 0x([0-9a-f]{16}) \*/")
# In the upper word: first bit, mask.
_STALL, _YIELD, _RESULT, _OPERANDS, _WAITS = (41, 15), (45, 1), (46, 7), (49, 7), (52, 63)
_LOADS = ("LDS", "LDSM")


@dataclass
class Instruction:
    address: str
    text: str
    low: int
    high: int

    @property
    def operation(self) -> str:
        return re.sub(r"^@!?U?P\w+\s+", "", self.text).split()[0]

    def get(self, field: tuple[int, int]) -> int:
        return self.high >> field[0] & field[1]

    def set(self, field: tuple[int, int], value: int) -> None:
        self.high = self.high & ~(field[1] << field[0]) | value << field[0]


def _pause(one: Instruction) -> None:
    one.set(_STALL, 15)
    one.set(_YIELD, 0)  # without it, a long pause is not valid


def wait_for_uniform(code: list[Instruction]) -> None:
    """The longest pause behind each instruction that may write a uniform register."""
    for one in code:
        if re.match(r"R2UR|U(MOV|IADD|SHF|LEA|LOP|SEL)", one.operation):
            _pause(one)


def wait_for_groups(code: list[Instruction]) -> None:
    """The longest pause between the end of a group of products and what waits for it."""
    for one in code:
        if one.operation.startswith("HGMMA") and "gsb0" in one.text:
            _pause(one)


def wait_always(code: list[Instruction]) -> None:
    """The longest pause behind each instruction that has any: no result comes too late but those of scoreboards."""
    for one in code:
        if one.get(_STALL):
            _pause(one)


def wait_for_loads(code: list[Instruction]) -> None:
    """Each load of shared memory releases a scoreboard: those without count on a later one's, to come in order."""
    for i, load in enumerate(code):
        if not load.operation.startswith(_LOADS) or load.get(_RESULT) != 7:
            continue
        first = int(re.search(r" R(\d+)", load.text)[1])
        width = 4 if "M88.4" in load.text or ".128" in load.text else 2 if ".64" in load.text else 1
        result = re.compile(rf"(?<!\w)R({'|'.join(map(str, range(first, first + width)))})(?!\d)")
        released, scoreboard = set(), None
        for later in code[i + 1 :]:
            waited = {n for n in released if later.get(_WAITS) >> n & 1}
            scoreboard = min(waited) if waited else scoreboard
            if result.search(later.text):
                break
            if later.operation.startswith(_LOADS):
                released |= {later.get(field) for field in (_RESULT, _OPERANDS)} - {7}
        if scoreboard is not None:
            load.set(_RESULT, scoreboard)


def patched(cubin: bytes, change: Callable[[list[Instruction]], None]) -> tuple[bytes, list[str]]:
    """The changed kernel, and the instructions that are not what they were."""
    code, changed = [], []
    for address, text, low, high in _WORDS.findall(aot._dump(cubin, "--dump-sass")):
        code.append(Instruction(address, text.strip(), int(low, 16), int(high, 16)))
    before = [one.high for one in code]
    words = [one.low.to_bytes(8, "little") + one.high.to_bytes(8, "little") for one in code]
    start = cubin.index(b"".join(words))
    change(code)
    for i, (one, high) in enumerate(zip(code, before, strict=True)):
        if one.high != high:
            place = start + 16 * i + 8
            cubin = cubin[:place] + one.high.to_bytes(8, "little") + cubin[place + 8 :]
            changed.append(f"{one.address} {one.text}")
    return cubin, changed
