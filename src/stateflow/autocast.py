"""Backwards that compute as their forward did, whatever autocast is on when they run.

`torch.amp.custom_bwd` does this for one type of device that is known beforehand.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor


class Autocast(NamedTuple):
    """What `torch.autocast` does to operations on one type of device."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def at(cls, x: Tensor) -> Autocast:
        """As it is now, where x is."""
        kind = x.device.type
        if not torch.amp.is_autocast_available(kind):
            return cls(kind, False, x.dtype)
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def again(self) -> AbstractContextManager:
        """As it was then."""
        if not self.enabled and not torch._C._is_any_autocast_enabled():
            return nullcontext()  # to enter the other costs the host as much as a launch
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled)
