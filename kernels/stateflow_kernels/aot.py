"""Compiles kernels for GPUs that this machine need not have, and says what they take.

    python -m stateflow_kernels.aot [module ...] [--arch 90]      without TRITON_INTERPRET in the environment

Compiles every case of the named modules of this package (without names: of all that have an `aot_cases`) for each of
`TARGETS`, or those asked for, and prints one line of JSON a case: `module`, `case`, `arch`, `triton`, `num_warps`,
`num_stages`, `registers` of a thread, `spill_bytes` (the stack frame of a thread; nothing but spilled registers lives
there), `shared_bytes` of a program, `wgmma` (whether the PTX has that instruction), `overwritten`, `undefined`,
`touched` and `under_way` (faults of compilers and of kernels, see the functions), `serialized` (whether each product
is waited for before the next one, as the assembler has it throughout a kernel where registers are too few somewhere),
and `failed` with the compiler's words instead of the last nine where it does not compile.
Exit status 1 if any case failed.
"""

import argparse
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import stateflow_kernels

from .assembler import bundled, touched, undefined, under_way

TARGETS = (80, 90)


@dataclass(frozen=True)
class AotCase:
    """One specialisation of one kernel, as a launch would compile it.

    Attributes:
        name: unique within the module.
        kernel: the `triton.jit` function.
        signature: the type of every argument that is no constexpr: "*bf16", "*fp32", "*i64", "i32", "fp32".
        constexprs: the value of every other argument; None for a pointer that is not given.
        num_warps, num_stages, maxnreg: launch options; the last one is the most registers a thread may have.
        archs: what it is written for.
    """

    name: str
    kernel: object
    signature: dict[str, str]
    constexprs: dict[str, object]
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None
    archs: tuple[int, ...] = TARGETS


def compile_case(case: AotCase, arch: int):
    """The compiled kernel. Pointers count as multiples of 16 bytes, as torch's allocations are; numbers as anything."""
    names = case.kernel.arg_names
    unknown = {*case.signature, *case.constexprs} ^ set(names)
    if unknown:
        raise ValueError(f"{case.name}: signature and constexprs must give each argument once, not {sorted(unknown)}")
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source_type = ASTSource
    if case.kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as source_type
    source = source_type(case.kernel, signature, constexprs=dict(case.constexprs), attrs=aligned)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "maxnreg": case.maxnreg}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _dump(cubin: bytes, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [bundled("cuobjdump"), what, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and its bytes of stack frame and local memory."""
    text = _dump(cubin, "--dump-resource-usage")
    used = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return used["REG"], used["STACK"] + used["LOCAL"]


def overwritten(ttgir: str) -> list[str]:
    """Buffers that a round of a loop fills while products of the round before may still read them.

    Triton 3.6.0 leaves products in flight that only add to an accumulator, and gives a tile one buffer that is used in
    another way too, or that is not loaded ahead at all.

    Returns:
        Their names in the IR, in order; empty if all is well.
    """
    single = set(re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<1x", ttgir))
    source, found, depth, read, inside = {}, [], 0, [], set()
    for line in ttgir.splitlines():
        if "scf.for" in line:
            depth, read, inside = depth + 1, [], set()
        elif "scf.yield" in line:
            depth -= 1
        if match := re.search(r"(%\w+) = ttg\.memdesc_(?:index|trans|subview) (%\w+)", line):
            source[match[1]] = source.get(match[2], match[2])
        elif depth and (match := re.search(r"(%\w+) = ttg\.local_alloc %", line)):
            inside.add(match[1])
        elif depth and (match := re.search(r"ttng\.warp_group_dot (%\w+), (%\w+),", line)):
            read += [source.get(name, name) for name in match.groups()]
        elif depth and (match := re.search(r"ttng\.warp_group_dot_wait .*pendings = (\d+)", line)):
            if int(match[1]):
                found += [name for name in read if name in single | inside]
            read = []
    return list(dict.fromkeys(found))


def serialized(sass: str) -> bool:
    """Whether there are nearly as many waits for products of warpgroups as products."""
    return 2 * sass.count("WARPGROUP.DEPBAR") > sass.count("HGMMA") > 0


def report(case: AotCase, arch: int) -> dict[str, object]:
    """What a compiled case takes."""
    compiled = compile_case(case, arch)
    registers, spill_bytes = resources(compiled.asm["cubin"])
    sass = _dump(compiled.asm["cubin"], "--dump-sass")
    return {
        "registers": registers,
        "spill_bytes": spill_bytes,
        "shared_bytes": compiled.metadata.shared,
        "wgmma": "wgmma" in compiled.asm["ptx"],
        # In Gluon buffers are the kernel's own, and its barriers guard them.
        "overwritten": [] if case.kernel.is_gluon() else overwritten(compiled.asm["ttgir"]),
        "undefined": undefined(sass),
        "touched": touched(sass),
        "under_way": under_way(sass),
        "serialized": serialized(sass),
    }


def modules(names: list[str]) -> Iterator[tuple[str, object]]:
    for name in names or sorted(module.name for module in pkgutil.iter_modules(stateflow_kernels.__path__)):
        module = importlib.import_module(f"stateflow_kernels.{name}")
        if hasattr(module, "aot_cases"):
            yield name, module
        elif names:
            raise ValueError(f"stateflow_kernels.{name} has no aot_cases")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m stateflow_kernels.aot", description="compiles kernels")
    parser.add_argument("modules", nargs="*", metavar="module")
    parser.add_argument("--arch", type=int, nargs="+", choices=TARGETS, default=TARGETS)
    asked = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise ValueError("TRITON_INTERPRET is set: interpreted kernels cannot be compiled; unset it")
    any_failed = False
    for name, module in modules(asked.modules):
        for case in module.aot_cases():
            for arch in (arch for arch in case.archs if arch in asked.arch):
                line = {"module": name, "case": case.name, "arch": arch, "triton": triton.__version__}
                line |= {"num_warps": case.num_warps, "num_stages": case.num_stages}
                try:
                    line |= report(case, arch)
                except Exception as error:  # the others are still worth a line
                    line["failed"] = f"{type(error).__name__}: {error}"
                    any_failed = True
                print(json.dumps(line), flush=True)
    return int(any_failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
