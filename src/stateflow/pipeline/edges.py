"""A channel for each direction between two ranks, so that no message waits for one that goes elsewhere.

The operations of one NCCL communicator follow one another on one stream, and one that waits for its partner keeps
multiprocessors busy: a receive that is posted while its message is still being computed takes them from the
computation beside it, and holds up every send behind it.  With a channel of its own, a message only follows those
between the same two ranks in the same direction, so a receive can be posted as late as it is needed
(``lowering.lower``), and the wait is short.

Channels are backends of two ranks that torch's registry of process groups does not know: only the two ranks make them.
(``new_group`` needs all ranks of the program, or equally many groups on both ends.)
"""

from __future__ import annotations

import atexit
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

Edge = tuple[int, int]  # (sending, receiving) rank in the pipeline's group

# A message of some ten megabytes takes less than a millisecond with as few; more would be taken from computations.
NCCL_CTAS = 4


class _Channels(dict[Edge, object]):
    """Those of one group, as long as the group: communicators are expensive, and both ends must agree on a new one."""

    def __init__(self, group: dist.ProcessGroup):
        super().__init__()
        self.group = group


_made: dict[str, _Channels] = {}  # by the group's name
atexit.register(_made.clear)  # before the backends' libraries go


class Edges:
    """The channels of this rank, connected.

    Args:
        group: the pipeline's, over NCCL or gloo.
        edges: all of the pipeline, the same on every rank, in any order.

    Raises ValueError for a group over another backend.
    """

    def __init__(self, group: dist.ProcessGroup, edges: Iterable[Edge], device: torch.device):
        self._device, self._backend = device, group._get_backend(device)
        self._rank = dist.get_rank(group)
        self._timeout = self._current_timeout()
        channels = _made.get(group.group_name)
        if channels is None or channels.group is not group:  # a name comes again after destroy_process_group
            channels = _made[group.group_name] = _Channels(group)
        self._channels = channels
        # Both ends of an edge make their channels in one global order, so nobody waits in a circle.
        for edge in sorted(set(edges)):
            if self._rank in edge and edge not in self._channels:
                self._channels[edge] = self._make(edge)
                self._connect(edge)

    def send(self, tensor: Tensor, peer: int) -> list[dist.Work]:
        """Starts to send to rank ``peer`` of the pipeline's group."""
        return [self._channels[self._rank, peer].send([tensor], 1, 0)]

    def receive(self, buffer: Tensor, peer: int) -> list[dist.Work]:
        """Starts to receive from rank ``peer`` of the pipeline's group."""
        return [self._channels[peer, self._rank].recv([buffer], 0, 0)]

    def follow_timeout(self) -> None:
        """Gives all channels the timeout that the pipeline's group has by now."""
        timeout = self._current_timeout()
        if timeout != self._timeout:
            self._timeout = timeout
            for channel in self._channels.values():
                channel._set_default_timeout(timeout)

    def _current_timeout(self) -> timedelta:
        with suppress(AttributeError):  # a backend without
            return self._backend.options._timeout
        return dist.default_pg_timeout

    def _make(self, edge: Edge):
        """A backend of two ranks: 0 sends, 1 receives."""
        group = self._channels.group
        ends = "-".join(str(dist.get_global_rank(group, rank)) for rank in edge)
        store = dist.PrefixStore(f"stateflow/{group.group_name}/{ends}/", _get_default_store())
        rank = edge.index(self._rank)
        if isinstance(self._backend, dist.ProcessGroupGloo):
            return dist.ProcessGroupGloo(store, rank, 2, self._timeout)
        if not (dist.is_nccl_available() and isinstance(self._backend, dist.ProcessGroupNCCL)):
            raise ValueError(f"a pipeline's group over {dist.get_backend(group)}; use nccl or gloo")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        options.is_high_priority_stream = True
        options.config.max_ctas = NCCL_CTAS
        return dist.ProcessGroupNCCL(store, rank, 2, options)

    def _connect(self, edge: Edge) -> None:
        """The first message makes the connection, for which both ends have to come."""
        token = torch.zeros(1, device=self._device)
        for work in self.send(token, edge[1]) if edge[0] == self._rank else self.receive(token, edge[0]):
            work.wait()
