"""CPContext: the plan of one micro-batch, its group and its exchange. What users pass as cp_context."""

from __future__ import annotations

import copy
import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flashqla_cp.parallel.comm import Comm
from flashqla_cp.parallel.exchange.base import Exchange
from flashqla_cp.parallel.exchange.choose import check_exchange_name, map_exchange, resolve_exchange
from flashqla_cp.parallel.exchange.headwise import Headwise, RowTable, token_rows
from flashqla_cp.parallel.halo import Halo
from flashqla_cp.parallel.once import differentiable_once
from flashqla_cp.parallel.plan import ShardPlan, offsets_to_read, read_offsets
from flashqla_cp.parallel.plan_check import check_plans

Made = TypeVar("Made")


def build_cp_context(
    cu_seqlens: torch.Tensor | Sequence[int],
    group: dist.ProcessGroup | DeviceMesh | None,
    conv1d_kernel_size: int | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    *,
    layout: str = "contiguous",
    token_ranges: Sequence[Sequence[tuple[int, int]]] | None = None,
    num_tokens: int | None = None,
    exchange: str = "auto",
    check_plan: bool = True,
) -> CPContext:
    """Plan one micro-batch over the ranks of a group. Call it on every rank, once per micro-batch.

    Args:
        cu_seqlens: offsets of the documents in the whole stream, before sharding, [N+1], any integer dtype, any device.
        group: ProcessGroup or 1-D DeviceMesh, any size; None is the default group.
        conv1d_kernel_size: width W of the causal convolution that will use the context; None prepares it on first use.
        cu_seqlens_cpu: the same offsets on the CPU, which saves the copy from the device: of cu_seqlens only dtype,
            shape and length are looked at then, and values if it is on the CPU too.
        layout: "contiguous" (near-equal cuts), "zigzag" (rank r holds parts r and 2P-1-r of 2P, in that order),
            "zigzag_per_document" (each document cut that way), or "custom" with token_ranges.
        token_ranges: token_ranges[r] = [(start, end), ...] that rank r stores, in order; all ranks' tile the stream.
        num_tokens: length of the stream with its padded tail, when longer than cu_seqlens[-1].
        exchange: "auto", "allgather", "sharded", "hierarchical" or "headwise".
        check_plan: compare the plan across ranks with one small collective, and raise on all when ranks differ or
            one of them failed. Switched off, ranks that disagree hang or compute nonsense.

    Raises:
        TypeError, ValueError: a bad argument; the text names it. RuntimeError: another rank's plan differs or failed.
    """
    comm = Comm(group)
    plan, error = None, None
    fingerprint = b""
    try:
        offsets = read_offsets(*offsets_to_read(cu_seqlens, cu_seqlens_cpu))
        total = _as_count(num_tokens, "num_tokens", least=0)
        plan = ShardPlan.build(layout, offsets, comm.world_size, total, token_ranges)
        conv1d_kernel_size = _as_count(conv1d_kernel_size, "conv1d_kernel_size", least=1)
        check_exchange_name(exchange)
        settings = f"{exchange} {conv1d_kernel_size} {comm.forced_ranks_per_node()}"
        fingerprint = plan.digest() + settings.encode()
    except Exception as caught:  # whatever it is: the other ranks are waiting to be told
        error = caught
    if check_plan:
        check_plans(comm, fingerprint, error)
    elif error is not None:
        raise error
    assert plan is not None, "a rank without a plan has raised"
    device = cu_seqlens.device if isinstance(cu_seqlens, torch.Tensor) else torch.device("cpu")
    return CPContext(plan, comm, resolve_exchange(exchange, comm), conv1d_kernel_size, device)


class CPContext:
    """One micro-batch sharded over a group: made by build_cp_context, read-only, good for any number of calls.

    One object drives the convolution and the recurrence of every layer, and several contexts may be in flight.

    Attributes:
        plan: who owns which tokens. rank, world_size, group: this process in its group. exchange: strategy in use.
        local_tokens: rows this rank stores, its part of the padded tail included.
        cu_seqlens, cu_seqlens_cpu: int32 offsets (int64 past 2^31 tokens) of the pieces this rank stores, in storage
            order, on the device of the offsets given and on the CPU; padding between pieces counts as a piece.
        segment_documents: for each of those pieces its document, or -1 for padding.
        num_documents: documents of the whole stream.
        handle: an integer tensor that stands for this context inside compiled graphs; see context_of.
    """

    @torch.inference_mode(False)
    def __init__(
        self, plan: ShardPlan, comm: Comm, exchange: str, conv1d_kernel_size: int | None, device: torch.device
    ):
        self.plan, self.comm, self.exchange = plan, comm, exchange
        self.rank, self.world_size = comm.rank, comm.world_size
        self.local_tokens = plan.local_tokens(comm.rank)
        self.num_documents = plan.num_documents
        self.headwise = Headwise(plan, comm) if exchange == "headwise" and plan.fragments.crosses_ranks else None
        self.map_exchange: Exchange | None = None if self.headwise else map_exchange(exchange, plan, comm)
        offsets, documents = _local_pieces(plan, comm.rank)
        self.cu_seqlens_cpu = torch.tensor(
            offsets, dtype=torch.int32 if offsets[-1] < 2**31 else torch.int64, device="cpu"
        )
        self.cu_seqlens = self.cu_seqlens_cpu.to(device)
        self.segment_documents = tuple(documents)
        self.conv1d_kernel_size = conv1d_kernel_size
        self.memo: dict[Any, Any] = {}
        if conv1d_kernel_size is not None:
            self.halo(conv1d_kernel_size)
        self.handle = _handle_of(self)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group. Raises RuntimeError when it has been destroyed."""
        return self.comm.group

    @torch.inference_mode(False)
    def halo(self, kernel_size: int) -> Halo:
        """Routes of the rows that a causal convolution over kernel_size tokens reads across cuts."""
        key = ("halo", kernel_size)
        if key not in self.memo:
            self.memo[key] = Halo.of(self.plan, self.comm, kernel_size)
        return self.memo[key]

    def rows(self) -> RowTable:
        """Where the rows of all ranks lie in the stream."""
        if "rows" not in self.memo:
            self.memo["rows"] = self.headwise.tokens if self.headwise else token_rows(self.plan)
        return self.memo["rows"]

    @torch.inference_mode(False)
    def kept(self, name: tuple[Any, ...], device: torch.device, make: Callable[[], Made]) -> Made:
        """What `make` puts on a device. It is made once for each stream that asks, because one stream does not wait for
        the work by which another fills it. The capture of a CUDA graph makes nothing: it takes what any stream has, for
        whoever captures has waited for the calls before, and keeps the context as long as the graph.

        Raises:
            RuntimeError: a capture asks for what no call before it has made.
        """
        on_gpu = device.type == "cuda"
        made = self.memo.setdefault((*name, device), {})
        stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else 0
        if stream in made:
            return made[stream]
        if on_gpu and torch.cuda.is_current_stream_capturing():
            if not made:
                raise RuntimeError(
                    "cp_context: this call is its first of the kind, and in the capture of a CUDA graph; make the same "
                    "call once before the capture, and keep the context as long as the graph"
                )
            return list(made.values())[-1]  # a copy, for other threads may add theirs
        made[stream] = make()
        return made[stream]

    def shard(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """The rows of this rank. x [.., num_tokens, ..] -> [.., local_tokens, ..]; differentiable, no communication.

        Raises ValueError when x does not have num_tokens rows in dim.
        """
        if x.shape[dim] != self.plan.num_tokens:
            raise ValueError(f"x: has {x.shape[dim]} rows in dim {dim}, the stream has {self.plan.num_tokens}")
        pieces = [x.narrow(dim, start, end - start) for start, end in self.plan.ranges[self.rank]]
        return torch.cat(pieces, dim) if pieces else x.narrow(dim, 0, 0)

    def unshard(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """The whole stream on every rank, for checks. x [.., local_tokens, ..] -> [.., num_tokens, ..].

        Differentiable once: every rank is expected to compute the same function of the result, so the gradient of x is
        this rank's rows of its own gradient, without communication; summed over ranks, parameter gradients are those
        of one process. Raises ValueError when x does not have local_tokens rows in dim.
        """
        if x.shape[dim] != self.local_tokens:
            raise ValueError(f"x: has {x.shape[dim]} rows in dim {dim}, this rank stores {self.local_tokens}")
        return _Unshard.apply(x.movedim(dim, 0), self).movedim(0, dim)

    def comm_bytes(
        self,
        num_v_heads: int,
        head_k_dim: int,
        head_v_dim: int,
        *,
        num_heads: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> dict[str, list[tuple[str, int]]]:
        """Bytes this rank sends to other ranks in one call of the op, without an initial state.

        Per direction ("forward", "backward") a list of (collective, bytes) in order of issue. Maps travel in fp32, in
        fp64 for fp64 inputs (dtype). exchange="headwise" sends the activations: give their dtype, and num_heads if
        there are fewer key heads than value heads; gates are counted in fp32.
        """
        if self.headwise is not None:
            return self.headwise.traffic(num_heads or num_v_heads, num_v_heads, head_k_dim, head_v_dim, dtype)
        if self.map_exchange is None or self.world_size == 1 or not self.plan.fragments.crosses_ranks:
            return {"forward": [], "backward": []}
        size = 8 if dtype == torch.float64 else 4
        traffic = self.map_exchange.traffic(num_v_heads, head_k_dim, head_v_dim)
        return {way: [(name, count * size) for name, count in calls] for way, calls in traffic.items()}

    def __deepcopy__(self, memo: object) -> CPContext:
        return self  # read-only; a model that holds it can be copied

    def __repr__(self) -> str:
        owners = " | ".join(
            f"{rank}: " + (",".join(f"{start}-{end}" for start, end in owned) or "none")
            for rank, owned in enumerate(self.plan.ranges)
        )
        if len(owners) > 160:
            owners = owners[:157] + "..."
        return (
            f"CPContext(rank {self.rank}/{self.world_size}, {self.plan.layout}, {self.exchange}, "
            f"{self.num_documents} documents, {self.plan.num_tokens} tokens; {owners})"
        )


_contexts: dict[int, CPContext] = {}
_numbers = itertools.count()


def context_of(handle: torch.Tensor) -> CPContext:
    """The context that a handle stands for. It lives as long as the handle's memory does, so a graph that has kept the
    handle for its backward can still find it."""
    return _contexts[int(handle)]


def _handle_of(context: CPContext) -> torch.Tensor:
    """A number in CPU memory, int64 []: graphs read it when they run, so that no context is compiled into them."""
    number = next(_numbers)
    handle = torch.tensor(number, dtype=torch.int64, device="cpu")
    # A twin without the handle, all parts shared: were it the context itself, neither would ever be freed.
    _contexts[number] = copy.copy(context)
    weakref.finalize(handle.untyped_storage(), _contexts.pop, number).atexit = False
    return handle


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, context: CPContext) -> torch.Tensor:
        ctx.context, plan = context, context.plan
        counts = [plan.local_tokens(rank) for rank in range(plan.world_size)]
        padded = x.new_zeros(max(counts), *x.shape[1:])
        padded[: len(x)] = x
        gathered = context.comm.all_gather(padded).wait()
        joined = torch.cat([rows[:count] for rows, count in zip(gathered, counts, strict=True)])
        order = context.rows().on(x.device)[0]
        return joined.index_select(0, order)

    @staticmethod
    @differentiable_once("CPContext.unshard")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.context.shard(grad, dim=0).contiguous(), None


def _local_pieces(plan: ShardPlan, rank: int) -> tuple[list[int], list[int]]:
    """Offsets of a rank's pieces in storage order, and their documents; the padded end is left off."""
    own = plan.fragments.owned_by(rank)
    columns = (own.offset, own.length, own.document)
    offsets, documents = [0], []
    for start, length, document in sorted(zip(*(column.tolist() for column in columns), strict=True)):
        if start > offsets[-1]:
            offsets.append(start)
            documents.append(-1)
        offsets.append(start + length)
        documents.append(document)
    return offsets, documents


def _as_count(value: Any, name: str, least: int) -> int | None:
    if value is None:
        return None
    try:
        count = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name}: got {value!r:.80}, expected an integer or None") from error
    if isinstance(value, bool) or count < least:
        raise ValueError(f"{name}: got {value!r}, expected an integer of at least {least}, or None")
    return count
