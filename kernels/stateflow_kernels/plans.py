"""Which plan the kernels of an operation are launched with."""

import torch

from .gated_delta_rule import Plan, default_plan


def fallback_plan(device: torch.device, dtype: torch.dtype, k_dim: int, v_dim: int) -> Plan:
    """The plan that fits any shape on this device."""
    if device.type != "cuda":
        return default_plan(k_dim, v_dim, dtype)
    shared_memory = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return default_plan(k_dim, v_dim, dtype, shared_memory)


def plan_for(
    family: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    batch: int,
    num_tokens: int,
    num_heads: int,
    k_dim: int,
    v_dim: int,
) -> Plan:
    """The plan for these shapes. `num_heads` are those of this rank.

    There is no table of tuned plans yet: every shape gets the default.
    """
    return fallback_plan(device, dtype, k_dim, v_dim)


def table_entries() -> list[str]:
    """The tuned plans that there are, a line each, for people to read."""
    return []
