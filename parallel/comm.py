"""The only file with collectives: thin, asynchronous, logged for tests.

Every rank of a group calls the same collectives in the same order with sizes that follow from the plan alone. A group
of one rank communicates nothing.
"""

from __future__ import annotations

import math
import os
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# torch 2.13 renamed it; the old name warns there and is the only one before.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_logs: list[list[Record]] = []
_nodes: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[int, ...]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Record:
    """One collective: its name and the bytes this rank sends to, and receives from, other ranks."""

    name: str
    bytes_sent: int
    bytes_received: int


@contextmanager
def record_collectives() -> Iterator[list[Record]]:
    """Collect a Record for each collective that this process issues inside the block, in order."""
    log: list[Record] = []
    _logs.append(log)
    try:
        yield log
    finally:
        _logs.remove(log)


@dataclass(slots=True)
class Pending:
    """A result on its way. wait() returns it and may be called once."""

    work: dist.Work | None
    finish: Callable[[], torch.Tensor]

    def wait(self) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
        return self.finish()


class Comm:
    """Collectives of one process group.

    group: a ProcessGroup, a 1-D DeviceMesh, or None for the default group.

    Raises TypeError for anything else and ValueError when torch.distributed is not initialised or this process is not
    a member.
    """

    gather_name = "all_gather"

    def __init__(self, group: dist.ProcessGroup | DeviceMesh | None):
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError("group: torch.distributed is not initialised; call init_process_group first")
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(f"group: expected a 1-D DeviceMesh, got {group.ndim} dimensions; pass mesh['cp']")
            group = group.get_group()
        if group is None:
            group = dist.group.WORLD
        if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives to the others
            raise ValueError("group: this rank is not one of its members; build a context on its members only")
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group: expected a ProcessGroup or a 1-D DeviceMesh, got {type(group).__name__}")
        self._group = weakref.ref(group)
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(f"group: process {dist.get_rank()} is not a member of it")

    def __deepcopy__(self, memo: object) -> Comm:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "group: a process group cannot be saved or sent to another process; of a model that is enabled for one, "
            "save model.state_dict(), or call disable_context_parallel(model) first"
        )

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, which torch.distributed keeps and not we: only then does destroy_process_group end its
        threads, which else release tensors while the interpreter shuts down, and abort it.

        Raises RuntimeError when it has been destroyed.
        """
        group = self._group()
        if group is None:
            raise RuntimeError("cp_context: its process group has been destroyed; build a new context")
        return group

    def all_gather(self, local: torch.Tensor) -> Pending:
        """Gather equal tensors: wait() returns [world_size, *local.shape]."""
        if self.world_size == 1:
            return Pending(None, lambda: local[None])
        gathered = local.new_empty(self.world_size, *local.shape)
        size = local.numel() * local.element_size()
        self._log("all_gather", size * (self.world_size - 1), size * (self.world_size - 1))
        work = _all_gather_flat(gathered.view(-1), local.contiguous().view(-1), group=self.group, async_op=True)
        return Pending(work, lambda: gathered)

    def all_to_all(self, send: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Pending:
        """Send consecutive rows of `send` to the ranks in order. Counts are rows; wait() returns [sum, ...] rows."""
        if self.world_size == 1:
            return Pending(None, lambda: send)
        received = send.new_empty(sum(receive_counts), *send.shape[1:])
        width = math.prod(send.shape[1:])
        size = width * send.element_size()
        sent, kept = size * sum(send_counts), size * send_counts[self.rank]
        self._log("all_to_all", sent - kept, size * sum(receive_counts) - kept)
        work = dist.all_to_all_single(
            received.view(-1),
            send.contiguous().view(-1),
            [count * width for count in receive_counts],
            [count * width for count in send_counts],
            group=self.group,
            async_op=True,
        )
        return Pending(work, lambda: received)

    def all_gather_bytes(self, message: bytes, size: int) -> list[bytes]:
        """Gather one short message of at most `size` bytes per rank, zero-filled; blocks. For set-up, not for steps."""
        if self.world_size == 1:
            return [message.ljust(size, b"\0")]
        local = torch.frombuffer(bytearray(message[:size].ljust(size, b"\0")), dtype=torch.uint8)
        return [bytes(row.tolist()) for row in self.all_gather(local.to(self._device())).wait().cpu()]

    def forced_ranks_per_node(self) -> int | None:
        """What FLASHQLA_CP_RANKS_PER_NODE says, if anything. Raises ValueError unless it divides the group."""
        forced = os.environ.get("FLASHQLA_CP_RANKS_PER_NODE")
        if forced is None:
            return None
        if not forced.isdecimal() or int(forced) < 1 or self.world_size % int(forced):
            expected = f"a divisor of the group's {self.world_size} ranks"
            raise ValueError(f"FLASHQLA_CP_RANKS_PER_NODE: got {forced!r}, expected {expected}")
        return int(forced)

    def ranks_per_node(self) -> int:
        """Ranks that share a host, when all hosts hold equally many consecutive ranks; otherwise 1.

        FLASHQLA_CP_RANKS_PER_NODE overrides the discovery, which costs one small collective per group.
        """
        forced = self.forced_ranks_per_node()
        if forced is not None:
            return forced
        if self.group not in _nodes:
            hosts = self.all_gather_bytes(socket.gethostname().encode(), 64)
            _nodes[self.group] = tuple(hosts.index(host) for host in hosts)
        first = _nodes[self.group]
        size = first.count(first[0])
        regular = all(first[rank] == rank - rank % size for rank in range(len(first)))
        return size if regular and len(first) % size == 0 else 1

    def _device(self) -> torch.device:
        if "nccl" in dist.get_backend(self.group):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def _log(self, name: str, sent: int, received: int) -> None:
        for log in _logs:
            log.append(Record(name, sent, received))


class Peers:
    """Some ranks of a Comm, as if they were a group of their own: all-to-alls of the whole group, empty elsewhere.

    No process group is created, every rank of the Comm takes part in the same collective, and the sets of peers that
    use it at the same time must be disjoint and of one size. peers: ranks of the Comm, this one included.
    """

    gather_name = "all_to_all"

    def __init__(self, comm: Comm, peers: Sequence[int]):
        self.comm, self.peers = comm, tuple(peers)
        self.rank, self.world_size = self.peers.index(comm.rank), len(self.peers)

    def all_gather(self, local: torch.Tensor) -> Pending:
        """Gather equal tensors of the peers: wait() returns [len(peers), *local.shape]."""
        if self.world_size == 1:
            return Pending(None, lambda: local[None])
        copies = local[None].expand(self.world_size, *local.shape)
        return self.all_to_all(copies, [1] * self.world_size, [1] * self.world_size)

    def all_to_all(self, send: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Pending:
        """As Comm.all_to_all, with counts in the order of the peers, which must be ascending."""
        if self.world_size == 1:
            return Pending(None, lambda: send)
        sends, receives = ([0] * self.comm.world_size for _ in range(2))
        for peer, send_count, receive_count in zip(self.peers, send_counts, receive_counts, strict=True):
            sends[peer], receives[peer] = send_count, receive_count
        return self.comm.all_to_all(send, sends, receives)
