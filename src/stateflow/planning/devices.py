"""What devices can do: a table for predictions without the device at hand.

The achievable fractions are assumptions, and the first thing to doubt in an analytic prediction. Those of Hopper are
set by measurements of docs/benchmarks.md: a 3B Gated DeltaNet of two pipeline stages on two H200 (bf16, full
recomputation, 64K tokens) spends 1.44 s a sequence and stage, with a recurrence that takes 0.73 ms forward and 1.87 ms
backward for 32,768 tokens and 20 heads of 128 x 128, and attention of a chunk over its prefix that reaches 590 and 550
of 989 TFLOP/s. Those of the A100 are of an earlier state of this library on H200s. ``stateflow plan`` without
--analytic measures instead.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

GIB = 2**30


def gib_text(num_bytes: float) -> str:
    """GiB with one digit behind the point; below 1, as small models have it, with the first two that count."""
    gib = num_bytes / GIB
    return f"{gib:.1f}" if gib >= 1 or gib == 0 else f"{gib:.2g}"


@dataclass(frozen=True)
class Device:
    """A device and its link to the next pipeline rank.

    Attributes:
        flops: dense 16-bit FLOP/s by the data sheet (CPU: a guess for two cores).
        memory_bandwidth: bytes/s of device memory.
        memory: bytes; a run may use ``usable_fraction`` of it, the rest is context, libraries and fragmentation.
        dense_fraction, attention_fraction, recurrence_fraction: achieved share of ``flops`` in matrix products with
            weights, in softmax attention, and in recurrences (6 FLOPs an element of the state and token).
        launch_seconds: host time of one layer's forward; an action cannot be faster than its launches.
        link_latency, link_bandwidth: of a message to a neighbour, s and bytes/s, while both directions are in use.
    """

    name: str
    flops: float
    memory_bandwidth: float
    memory: float
    link_latency: float
    link_bandwidth: float
    launch_seconds: float
    dense_fraction: float = 0.45
    attention_fraction: float = 0.34
    recurrence_fraction: float = 0.04
    usable_fraction: float = 0.93


def _host_memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


DEVICES = {
    # Links: measured for H200 (7 GB/s at 1 MB, 304 GB/s at 320 MB over NVLink), by the data sheet's ratio otherwise.
    "h200": Device("H200", 989e12, 4.8e12, 140 * GIB, 1.4e-4, 304e9, 2e-3, 0.58, 0.55, 0.08),
    "h100": Device("H100", 989e12, 3.35e12, 79 * GIB, 1.4e-4, 304e9, 2e-3, 0.58, 0.55, 0.08),
    "a100": Device("A100", 312e12, 2.0e12, 79 * GIB, 1.4e-4, 202e9, 2e-3),
    "cpu": Device("CPU", 1e11, 2e10, _host_memory(), 2e-4, 1e9, 3e-4, 0.5, 0.1, 0.1),
}


def device_named(name: str | None) -> Device:
    """The entry of ``DEVICES``; None is the GPU of this machine, or the H200 where there is none in the table.

    Raises:
        ValueError: for a name that is not in the table.
    """
    if name is not None:
        if name.lower() not in DEVICES:
            raise ValueError(f"--device {name}: unknown; there are {', '.join(DEVICES)}")
        return DEVICES[name.lower()]
    import torch

    if torch.cuda.is_available():
        found = torch.cuda.get_device_name().lower()
        for key, device in DEVICES.items():
            if key in found:
                return device
    return DEVICES["h200"]
