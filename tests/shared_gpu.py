"""Ranks of a test on the GPUs that there are, on a single one if need be."""

from __future__ import annotations

import os

import torch


def gpu_of(rank: int) -> torch.device:
    """Makes it current; before the first communicator of this process.

    NCCL refuses ranks of one host that share a GPU, so there each rank is a host of its own, and messages go through
    sockets: the same calls, streams and events, at another speed.
    """
    count = torch.cuda.device_count()
    if rank >= count or count == 1:
        os.environ["NCCL_HOSTID"] = f"host of rank {rank}"
    device = torch.device("cuda", rank % count)
    torch.cuda.set_device(device)
    return device
