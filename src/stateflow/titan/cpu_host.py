"""Run torchtitan 0.2.2's stock Trainer where torch sees no accelerator.

torchtitan chooses its device once, when ``torchtitan.tools.utils`` is imported, and falls back to "cuda"
where there is none. No option changes that, so :func:`enable` replaces the two module-level names
``device_type`` and ``device_module`` in every torchtitan module that holds a copy of them. The device
module is ``torch.cpu`` with the few torch.cuda-style calls that the Trainer makes on top; its memory
figures are the process's resident set.
"""

import contextlib
import importlib
import os
import platform
import resource
import sys
import types
from pathlib import Path

import torch

# The modules of torchtitan 0.2.2 that copy the names at import. Others read ``utils.device_type`` at the
# call.
_MODULES_WITH_A_COPY = (
    "torchtitan.tools.utils",
    "torchtitan.tools.profiling",
    "torchtitan.components.metrics",
    "torchtitan.distributed.utils",
    "torchtitan.distributed.parallel_dims",
)

_PROC_STATUS = Path("/proc/self/status")
_PROC_CLEAR_REFS = Path("/proc/self/clear_refs")


MOST_PARAMETERS = 5e8  # of which weights, gradients and AdamW take 8 GB


def refuse_large(job_config) -> None:
    """Raises ValueError for a model that a machine without a GPU would only fill its memory with."""
    from stateflow.model import count_parameters
    from stateflow.titan.flavors import resolve_model

    parameters = count_parameters(resolve_model(job_config))
    if parameters > MOST_PARAMETERS and not torch.cuda.is_available():
        raise ValueError(
            f"{job_config.model.flavor} has {parameters / 1e9:.3g} billion parameters and there is no GPU here; on a "
            f"CPU take one of at most {MOST_PARAMETERS / 1e9:g}, e.g. titan_configs/demo.toml"
        )


def resident_bytes() -> tuple[int, int]:
    """The process's resident set: (now, highest since the last :func:`reset_peak_resident_bytes`), in bytes.

    Where /proc is missing both are the highest since the process started, which cannot be reset.
    """
    try:
        fields = dict(line.split(":", 1) for line in _PROC_STATUS.read_text().splitlines())
        now, peak = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
        return now, peak
    except (OSError, KeyError):
        unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB elsewhere
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return peak, peak


def reset_peak_resident_bytes() -> None:
    """Make the highest resident set count from now on (Linux; elsewhere nothing happens)."""
    with contextlib.suppress(OSError):
        _PROC_CLEAR_REFS.write_text("5")  # "5" resets VmHWM, see proc(5)


class CpuDeviceModule(types.ModuleType):
    """``torch.cpu`` plus what the Trainer asks of torch.cuda. Other names are looked up in ``torch.cpu``."""

    def __init__(self) -> None:
        super().__init__("stateflow_cpu_device")

    def __getattr__(self, name: str):
        return getattr(torch.cpu, name)

    def set_device(self, device: object) -> None:
        """Nothing to choose: there is one CPU."""

    def current_device(self) -> int:
        """0. An integer, unlike torch.cpu's "cpu", because ``barrier(device_ids=...)`` wants one."""
        return 0

    def synchronize(self, device: object = None) -> None:
        """CPU work is done when the call returns."""

    def empty_cache(self) -> None:
        """There is no caching allocator to empty."""

    def get_device_name(self, device: object = None) -> str:
        return f"CPU ({platform.machine()})"

    def get_device_properties(self, device: object = None) -> types.SimpleNamespace:
        total_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return types.SimpleNamespace(name=self.get_device_name(device), total_memory=total_memory)

    def memory_stats(self, device: object = None) -> dict[str, int]:
        """The keys of torch.cuda.memory_stats that torchtitan reads, in bytes of resident set."""
        now, peak = resident_bytes()
        return {
            "active_bytes.all.current": now,
            "active_bytes.all.peak": peak,
            "reserved_bytes.all.current": now,
            "reserved_bytes.all.peak": peak,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    def reset_peak_memory_stats(self, device: object = None) -> None:
        reset_peak_resident_bytes()

    def max_memory_allocated(self, device: object = None) -> int:
        return resident_bytes()[1]

    def memory_allocated(self, device: object = None) -> int:
        return resident_bytes()[0]


def accelerator_in_use() -> bool:
    """Whether to train on an accelerator: there is one, and CUDA_VISIBLE_DEVICES is not set to nothing."""
    return torch.accelerator.is_available() and os.environ.get("CUDA_VISIBLE_DEVICES") != ""


def is_enabled() -> bool:
    """Whether torchtitan has been switched to the CPU by :func:`enable`."""
    utils = sys.modules.get("torchtitan.tools.utils")
    return isinstance(getattr(utils, "device_module", None), CpuDeviceModule)


def enable() -> None:
    """Switch torchtitan to the CPU, in the modules loaded so far and in those still to be imported.

    Calling it again is harmless. It must run before the Trainer is built.
    """
    for name in _MODULES_WITH_A_COPY:
        importlib.import_module(name)
    utils = sys.modules["torchtitan.tools.utils"]
    device_module = utils.device_module if is_enabled() else CpuDeviceModule()
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "torchtitan" or module is None:
            continue
        namespace = vars(module)
        if "device_type" in namespace:
            module.device_type = "cpu"
        if "device_module" in namespace:
            module.device_module = device_module
    # Modules imported later (distributed.dual_pipe_v) ask this function.
    utils.get_device_info = lambda: ("cpu", device_module)
    # No peak is known for a CPU: an MFU of 0 % rather than one against torchtitan's default, an A100.
    utils.get_peak_flops = lambda device_name: float("inf")


def enable_if_needed() -> bool:
    """Call :func:`enable` if no accelerator is in use, and say whether torchtitan now runs on the CPU."""
    if not accelerator_in_use():
        enable()
    return is_enabled()
