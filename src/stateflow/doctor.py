"""``stateflow doctor``: what runs here, whether the kernels are right on it, and what is known to go wrong."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from stateflow.recurrence import mamba3_kernels, self_check
from stateflow.recurrence.self_check import Checkable, Outcome, Problem
from stateflow_kernels.plan_table import Shape

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOKENS = 32768
MAMBA3_SIZES = (128, 64, 32)  # N, P and angles, those of every flavor of a paper's size


@dataclass(frozen=True)
class Known:
    """Something that is known to go wrong with versions `first` <= version < `fixed` of a component."""

    component: str
    first: str
    fixed: str
    what: str
    here: str
    source: str

    def applies(self, versions: dict[str, str | None]) -> bool:
        version = versions.get(self.component)
        return version is not None and _numbers(self.first) <= _numbers(version) < _numbers(self.fixed)


KNOWN = (
    Known(
        "triton",
        "3.4.0",
        "3.7.1",
        "dot(trans(accumulator), x) is miscompiled: wrong gradients of k and g in kernels that use it",
        "StateFlow's kernels do not, and are checked on first use; do not trust other libraries' gated backward here",
        "flash-linear-attention issue 640",
    ),
    Known(
        "triton",
        "3.6.0",
        "3.6.1",
        "gated delta rule kernels of another library ran 30 to 60 % slower than under 3.5.0 on an H20",
        "only speed: compare with another Triton before trusting a measurement",
        "triton issue 9757",
    ),
    Known(
        "triton",
        "3.6.0",
        "3.6.1",
        "kernels with matrix products in loops without a load pipeline (one stage) gave wrong results on an H200",
        "no plan of StateFlow's has such a loop; the cause, compiler or ptxas, was not found",
        "StateFlow's own GPU tests",
    ),
    Known(
        "ptxas",
        "12.8.0",
        "12.9.0",
        "leaves out the write of a register in some kernels with matrix products, which then read outside their memory",
        "Triton has no newer ptxas here that StateFlow could call: name one by TRITON_PTXAS_PATH",
        "StateFlow's own GPU tests, flash-linear-attention issue 1262",
    ),
)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version.split("+")[0])[:3])


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _ptxas() -> str | None:
    """The version of the assembler that Triton calls."""
    try:
        from stateflow_kernels.plans import ptxas_version
    except ImportError:
        return None
    return ptxas_version()


def versions() -> dict[str, str | None]:
    """By component; None: not found."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _installed("triton"),
        "ptxas": _ptxas(),
        "torchtitan": _installed("torchtitan"),
    }


def _devices() -> list[torch.device]:
    """Where the kernels can run: all GPUs, or the CPU where Triton interprets."""
    if torch.cuda.is_available():
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    from stateflow_kernels.primitives import INTERPRETED

    return [torch.device("cpu")] if INTERPRETED else []


def _describe_device(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu, interpreted"
    properties = torch.cuda.get_device_properties(device)
    size = properties.total_memory / 2**30
    return f"{device} {properties.name}, sm_{properties.major}{properties.minor}, {size:.0f} GiB"


def _describe_outcome(problem: Checkable, outcome: Outcome) -> list[str]:
    lines = []
    for trial in outcome.trials:
        misses = trial.misses(problem.bounds)
        if misses:
            lines.append(f"    FAILED with {trial.plan}: {', '.join(misses)}")
        else:
            errors = " ".join(f"{name} {error:.1e}" for name, error in trial.errors.items())
            plan = "" if trial is outcome.trials[0] else f" with {trial.plan}"
            lines.append(f"    ok{plan}: {errors}")
    if outcome.plan is None:
        lines.append("    no plan passed: the PyTorch form runs instead")
    return lines


def _gated_delta(
    device: torch.device, dtype: torch.dtype, heads: int, k_dim: int, v_dim: int, tokens: int
) -> list[tuple[Problem, object]]:
    """In the exact order, and in segments where `exact_order = false` has any."""
    from stateflow_kernels.plans import plan_for
    from stateflow_kernels.waves import walk_segments

    shape = dict(device=device, dtype=dtype, batch=1, num_tokens=tokens, num_heads=heads, k_dim=k_dim, v_dim=v_dim)
    found = []
    for segments in dict.fromkeys((1, walk_segments(-(-tokens // 64), heads, k_dim, v_dim))):
        options = dict(normalize=True, has_docs=True, in_segments=segments > 1)
        plan = plan_for("gated_delta_rule", **shape, num_segments=segments)
        found.append((Problem(device, dtype, heads, heads, k_dim, v_dim, **options), plan))
    return found


def _mamba3(
    device: torch.device, dtype: torch.dtype, heads: int, tokens: int
) -> list[tuple[mamba3_kernels.Problem, object]]:
    from stateflow_kernels.plans import plan_for

    shape = dict(device=device, dtype=dtype, batch=1, num_tokens=tokens, num_heads=heads)
    sizes = dict(zip(("k_dim", "v_dim", "num_angles"), MAMBA3_SIZES, strict=True))
    plan = plan_for("mamba3", **shape, **sizes, num_key_heads=1)
    return [(mamba3_kernels.Problem(device, dtype, dtype, heads, *MAMBA3_SIZES, has_docs=True), plan)]


def _choices(shapes: Sequence[Shape], device: torch.device) -> list[str]:
    """What runs for these shapes, and of the gated delta rule what `exact_order = false` changes."""
    from stateflow.planning.kernel_report import describe, in_segments

    lines = []
    for shape in shapes:
        lines += describe(shape, device)
        if shape.family == "gated_delta_rule" and shape.segments == 1:
            other, text = in_segments(shape)
            lines += [f"  {text}", *(f"  {line}" for line in ([] if other is None else describe(other, device)))]
    return lines


def _shapes_of(config: Path, overrides: Sequence[str]) -> list[Shape]:
    """None of a config that is refused, which `preflight` says, or has nothing for the kernels."""
    from stateflow.commands import read_config
    from stateflow.planning.kernel_shapes import config_shapes

    try:
        return config_shapes(read_config(config, overrides))
    except (ValueError, OSError):
        return []


def run(
    heads: int,
    k_dim: int,
    v_dim: int,
    config: Path | None = None,
    overrides: Sequence[str] = (),
    tokens: int = TOKENS,
) -> int:
    """Prints the report, with ``config`` also on that run. Returns 0, or 1 if something would end or spoil a run."""
    from stateflow import preflight
    from stateflow_kernels import plans

    found = versions()
    width = max(map(len, found))
    for name, version in found.items():
        print(f"{name:<{width}}  {'not found' if version is None else version}")

    devices, failed = _devices(), False
    entries = plans.table_entries()
    if not torch.cuda.is_available():  # tables of other machines: that they are there is enough
        entries = [entry for entry in entries if not entry.startswith(" ")]
    print(f"\nmeasured plans{'' if entries else ': none'}; where none applies, every shape gets the default")
    for entry in entries:
        print(f"  {entry}")
    shapes = [] if config is None else _shapes_of(config, overrides)
    asked = [Shape("gated_delta_rule", heads, heads, k_dim, v_dim, "bfloat16", 1, tokens)]
    for device in devices:
        print(f"\nwhat runs on {_describe_device(device)}{', of a rank of the config' if shapes else ''}:")
        for line in _choices(shapes or asked, device):
            print(f"  {line}")

    for name, problems in (
        ("the gated delta rule", lambda device, dtype: _gated_delta(device, dtype, heads, k_dim, v_dim, tokens)),
        ("Mamba-3", lambda device, dtype: _mamba3(device, dtype, heads, tokens)),
    ):
        print(f"\nself-checks of {name}, relative errors against float64:")
        if not devices:
            print("  none: there is no CUDA device, so the kernels cannot run and PyTorch forms do")
            print("  (TRITON_INTERPRET=1 in the environment checks them, interpreted on the CPU)")
        for device in devices:
            print(f"  {_describe_device(device)}")
            for dtype in DTYPES:
                for problem, plan in problems(device, dtype):
                    print(f"   {problem}")
                    outcome = self_check.run(problem, plan)
                    print("\n".join(_describe_outcome(problem, outcome)), flush=True)
                    failed |= outcome.plan != plan

    known = [entry for entry in KNOWN if entry.applies(found)]
    print("\nknown to go wrong with these versions:" + ("" if known else " nothing"))
    for entry in known:
        print(f"  {entry.component} {found[entry.component]}: {entry.what} ({entry.source})")
        print(f"    {entry.here}")

    print("\nbefore a launch:", flush=True)
    findings = preflight.check_versions(found)
    if torch.cuda.is_available():
        findings += preflight.check_links(torch.cuda.device_count(), torch.cuda.can_device_access_peer)
    if config is not None:
        findings += preflight.check_config(config, overrides)
    print("\n".join(map(str, findings)))
    return int(failed or any(finding.fatal for finding in findings))
