"""Several ranks on one GPU: a topology tried out on fewer GPUs than it has ranks.

Off unless asked for, since a run that shares GPUs by mistake would only be slow: processes take turns on a GPU, and
messages go through sockets. All else, kernels, streams, events and NCCL's calls, is as on as many GPUs as ranks.
"""

from __future__ import annotations

import os
import platform

import torch

VARIABLE = "STATEFLOW_SHARE_GPUS"


def asked() -> bool:
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def devices_missing(num_ranks: int) -> str | None:
    """That this machine has fewer GPUs, or without any fewer cores, than ranks; None if not."""
    gpus = torch.cuda.is_available()
    here = torch.cuda.device_count() if gpus else os.cpu_count() or 1
    if num_ranks <= here:
        return None
    return f"the run needs {num_ranks} {'GPUs' if gpus else 'cores'}, here {'is' if here == 1 else 'are'} {here}"


def enable_if_asked() -> None:
    """In a worker, before it chooses its device: ranks beyond the last GPU begin again with the first.

    NCCL refuses two ranks of one host on a GPU, so each round of ranks is a host of its own to it.
    """
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not (asked() and here and int(os.environ.get("LOCAL_WORLD_SIZE", "0")) > here):
        return
    turn, local = divmod(int(os.environ["LOCAL_RANK"]), here)
    os.environ["LOCAL_RANK"] = str(local)  # torchtitan's device
    os.environ["NCCL_HOSTID"] = f"{platform.node()}, turn {turn}"
