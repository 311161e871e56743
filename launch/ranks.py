"""The processes of a training run: a (data, context) mesh, sums over all ranks, and what one process needs of it.

Consecutive ranks form a context group; rank = data_rank * cp + context_rank.
"""

from __future__ import annotations

import datetime
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

BUCKET_BYTES = 32 * 2**20
PATIENCE = datetime.timedelta(minutes=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among the others. cp_group is None where sequences are not sharded."""

    rank: int
    world_size: int
    data_rank: int
    data_size: int
    cp_group: dist.ProcessGroup | None
    device: torch.device

    def sum_in_place(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replace each tensor by its sum over all ranks; few large messages instead of many small ones."""
        if self.world_size == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            dist.all_reduce(flat)
            parts = flat.split([tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def copy_from_first(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replace each tensor by rank 0's."""
        tensors = list(tensors)
        if self.rank:
            for tensor in tensors:
                tensor.zero_()
        self.sum_in_place(tensors)

    def wait_for_all(self) -> None:
        """Return when every rank has come here."""
        if self.world_size > 1:
            dist.barrier()

    def require_equal(self, text: str) -> None:
        """Raise ValueError on every rank when the ranks' texts differ."""
        if self.world_size == 1:
            return
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
        extremes = torch.tensor([number, -number], device=self.device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        if extremes[0] != -extremes[1]:
            raise ValueError(
                "ranks disagree: their settings, their data files (names and lengths) or the checkpoint to resume from "
                "differ; every host needs the same command, the same files and a shared --out folder"
            )

    def together(self, work: Callable[[], None]) -> None:
        """Do a rank's own work; a ValueError of any rank is raised on every rank, so that all stop alike."""
        text = None
        try:
            work()
        except ValueError as error:
            if self.world_size == 1:
                raise
            text = str(error)
        if self.world_size == 1:
            return
        texts: list[str | None] = [None] * self.world_size
        dist.all_gather_object(texts, text)
        failed = [(rank, text) for rank, text in enumerate(texts) if text is not None]
        if failed:
            rank, text = failed[0]
            raise ValueError(text if len(set(texts)) == 1 else f"on rank {rank}: {text}")


def world_size() -> int:
    """Number of processes as the launcher says; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def choose_device(kind: str) -> torch.device:
    """The device of this process: "cpu", "cuda" (the GPU numbered LOCAL_RANK), or "auto", a GPU if there is one.

    Raises:
        ValueError: no GPU for this process.
    """
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= count:
        raise ValueError(
            f"--device: got {kind} with {count} GPU(s) for local rank {index}; expected one GPU for each process: "
            "start fewer processes or choose --device cpu"
        )
    return torch.device("cuda", index)


def default_head_dim() -> int:
    """Width of the programs' heads: 64 where there are GPUs, the smallest with kernels; 32, which is quick on CPUs."""
    return 64 if torch.cuda.is_available() else 32


@contextmanager
def join_ranks(cp: int, device: torch.device) -> Iterator[Ranks]:
    """Join the process group that the launcher describes, or use one that is there, and lay the mesh over it.

    NCCL for GPUs, gloo for CPUs; one process without a launcher needs neither. A group that was there stays.
    """
    size = world_size()
    if size == 1:
        yield Ranks(rank=0, world_size=1, data_rank=0, data_size=1, cp_group=None, device=device)
        return
    ours = not dist.is_initialized()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ours:
        backend, bound = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        dist.init_process_group(backend, timeout=PATIENCE, device_id=bound)
    mesh = init_device_mesh(device.type, (size // cp, cp), mesh_dim_names=("dp", "cp"))
    yield Ranks(
        rank=dist.get_rank(),
        world_size=size,
        data_rank=mesh.get_local_rank("dp"),
        data_size=size // cp,
        cp_group=mesh.get_group("cp") if cp > 1 else None,
        device=device,
    )
    if ours:
        # Not after an error: peers may be inside a collective that this process will never join.
        dist.destroy_process_group()


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Runs of tensors of one dtype of about BUCKET_BYTES."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size >= BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel() * tensor.element_size()
    if bucket:
        yield bucket
