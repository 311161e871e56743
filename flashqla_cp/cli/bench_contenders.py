"""What `flashqla-cp bench` puts side by side: this library's op and the peers' that are installed, alone on one device,
as a middle rank of several, or on real ranks.

A middle rank is the expensive one: it makes whole maps and waits for a state. Here it is one process. The others are
imagined to hold the same tokens, so a collective becomes local copies of what it would carry, of the same size, and
everything else runs as on a real rank; the time on the wire is left out. The state that arrives is then known: that
behind as many repeats of the tokens as there are ranks in front.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from flashqla_cp.cli.bench_timing import first_line
from flashqla_cp.conv import causal_conv1d
from flashqla_cp.op import chunk_gated_delta_rule
from flashqla_cp.parallel.comm import Comm, Pending
from flashqla_cp.parallel.context import CPContext
from flashqla_cp.parallel.exchange.choose import resolve_exchange
from flashqla_cp.parallel.plan import ShardPlan
from flashqla_cp.testing.conv_workload import ConvWorkload
from flashqla_cp.testing.workload import Workload

OURS = "flashqla_cp"
Op = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """An op to time. call(q, k, v, g, beta) -> o. check: the same for the comparison with the expected result; None
    where that is not known. strict: it is not timed when the comparison fails."""

    name: str
    middle: bool
    call: Callable[..., torch.Tensor]
    check: Callable[..., torch.Tensor] | None
    strict: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another library's op, its stand-in for a middle rank: (tokens, ranks, device) -> its cp_context, and its context
    of one document over a group of ranks with `tokens` each: (tokens, group, device) -> its cp_context; None where a
    peer has none."""

    op: Op
    middle_context: Callable[[int, int, torch.device], Any] | None = None
    rank_context: Callable[[int, dist.ProcessGroup, torch.device], Any] | None = None


class LocalCopies(Comm):
    """Stands for a group whose other ranks hold what this one holds: collectives are copies, nothing is sent.

    per_node: ranks of a node, all of them if None."""

    def __init__(self, rank: int, world_size: int, per_node: int | None = None):
        self.rank, self.world_size = rank, world_size
        self._per_node = world_size if per_node is None else per_node

    @property
    def group(self) -> dist.ProcessGroup:
        raise RuntimeError("group: local copies stand in for it, there is none")

    def forced_ranks_per_node(self) -> int | None:
        return None

    def ranks_per_node(self) -> int:
        return self._per_node

    def all_gather(self, local: torch.Tensor) -> Pending:
        gathered = local[None].expand(self.world_size, *local.shape).contiguous()
        return Pending(None, lambda: gathered)

    def all_to_all(self, send: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Pending:
        """Every rank sends what this one sends to itself, over and over where it has more rows to send."""
        own = send[sum(send_counts[: self.rank]) :][: send_counts[self.rank]]
        total = sum(receive_counts)
        if len(own):
            received = own.repeat(-(-total // len(own)), *[1] * (own.dim() - 1))[:total]
        else:
            received = send.new_zeros(total, *send.shape[1:])
        return Pending(None, lambda: received)


def middle_context(tokens: int, ranks: int, device: torch.device, exchange: str = "auto") -> CPContext:
    """Context of rank ranks // 2 of `ranks` that share one document and hold `tokens` each; none of them is there."""
    return middle_of_documents((0, ranks * tokens), ranks, device, exchange)


def middle_of_documents(offsets: Sequence[int], ranks: int, device: torch.device, exchange: str) -> CPContext:
    """The same for documents that are cut into equal contiguous parts."""
    comm = LocalCopies(ranks // 2, ranks)
    plan = ShardPlan.build("contiguous", offsets, ranks)
    return CPContext(plan, comm, resolve_exchange(exchange, comm), None, device)


def contenders(
    work: Workload, middle_rank: int | None, backend: str, peers: dict[str, Peer], device: torch.device
) -> list[Contender]:
    """This library first, then the peers; with middle_rank each a second time, as the middle rank of so many."""
    packed: dict[str, Any] = {}
    if work.documents > 1:
        packed["cu_seqlens"] = torch.tensor(work.offsets(), dtype=torch.int32, device=device)

    def ours(context: CPContext | None) -> Callable[..., torch.Tensor]:
        kw = {"cp_context": context} if context is not None else packed
        return timed_as(chunk_gated_delta_rule, kw | {"backend": backend})

    def timed_as(op: Op, kw: dict[str, Any]) -> Callable[..., torch.Tensor]:
        return lambda *x: op(*x, **kw)[0]

    found = [Contender(name=OURS, middle=False, call=ours(None), check=ours(None))]
    for name, peer in peers.items():
        call = timed_as(peer.op, packed)
        found.append(Contender(name=name, middle=False, call=call, check=call))
    if middle_rank is None:
        return found
    # By head, the states of most heads come back from ranks that are not there: the whole is checked with a gather.
    timed, checked = (middle_context(work.tokens, middle_rank, device, name) for name in ("auto", "allgather"))
    found.append(Contender(name=OURS, middle=True, call=ours(timed), check=ours(checked)))
    for name, peer in peers.items():
        assert peer.middle_context is not None, "every peer of this op has one"
        try:
            call = timed_as(peer.op, {"cp_context": peer.middle_context(work.tokens, middle_rank, device)})
        except Exception as error:  # a peer of another version; its own line of the table says so
            call = _failing(error)
        found.append(Contender(name=name, middle=True, call=call, check=call, strict=False))
    return found


def _failing(error: Exception) -> Callable[..., torch.Tensor]:
    def call(*_: torch.Tensor) -> torch.Tensor:
        raise error

    return call


def conv_contenders(work: ConvWorkload, backend: str, peers: dict[str, Peer], device: torch.device) -> list[Contender]:
    """The same for the convolution, alone on a device: call(x, weight) -> y."""
    offsets = None
    if work.documents > 1:
        offsets = torch.tensor(work.offsets(), dtype=torch.int32, device=device)

    def timed(conv: Op, **options: Any) -> Callable[..., torch.Tensor]:
        return lambda x, weight: conv(x, weight, activation="silu", cu_seqlens=offsets, **options)[0]

    calls = {OURS: timed(causal_conv1d, backend=backend)} | {name: timed(peer.op) for name, peer in peers.items()}
    return [Contender(name=name, middle=False, call=call, check=call) for name, call in calls.items()]


def find_peers(op: str = "gdn") -> tuple[dict[str, Peer], dict[str, str]]:
    """The peers of an op that can be imported, and for each other one the reason why not."""
    os.environ.setdefault("FLA_FLASH_QLA", "0")  # read at import: fla is to run its own kernels, not FlashQLA's
    found, absent = {}, {}
    for name, load in (CONV_LOADERS if op == "conv" else LOADERS).items():
        try:
            found[name] = load()
        except Exception as error:  # a broken installation of a peer is no reason not to time the rest
            absent[name] = first_line(error)
    return found, absent


class _Absent:
    """Stands for torch.distributed inside a peer."""

    def __init__(self, rank: int):
        self.rank = rank

    def get_rank(self, group: object = None) -> int:
        return self.rank


def _imagine_ranks(module: Any, ranks: int) -> None:
    """Make a peer's module gather local copies, as a middle rank. Stays so: the process is there to measure."""

    def gather(x: torch.Tensor, group: object = None, **_: object) -> tuple[torch.Tensor, None]:
        return x[None].expand(ranks, *x.shape).contiguous(), None

    module.all_gather_into_tensor, module.dist = gather, _Absent(ranks // 2)


def _fields(tokens: int, group: object, rank: int, ranks: int, device: torch.device) -> dict[str, Any]:
    """What the peers' contexts of a rank of one document have in common."""
    offsets = torch.tensor([0, tokens], dtype=torch.int32)
    return {
        "group": group,
        "cu_seqlens": offsets.to(device),
        "cu_seqlens_cpu": offsets,
        "is_first_rank": rank == 0,
        "is_last_rank": rank == ranks - 1,
        "pre_num_ranks": rank,
        "post_num_ranks": ranks - rank - 1,
    }


def _middle(tokens: int, ranks: int, device: torch.device) -> dict[str, Any]:
    return _fields(tokens, object(), ranks // 2, ranks, device)


def _load_flash_qla() -> Peer:
    import flash_qla.ops.gated_delta_rule.chunk.cp.preprocess as exchange
    from flash_qla import chunk_gated_delta_rule as op
    from flash_qla.ops.gated_delta_rule.chunk.cp.context import FlashQLACPContext

    def context(tokens: int, ranks: int, device: torch.device) -> Any:
        _imagine_ranks(exchange, ranks)
        return FlashQLACPContext(**_middle(tokens, ranks, device), is_inter=True)

    def on_ranks(tokens: int, group: dist.ProcessGroup, device: torch.device) -> Any:
        fields = _fields(tokens, group, dist.get_rank(group), dist.get_world_size(group), device)
        return FlashQLACPContext(**fields, is_inter=True)

    return Peer(op=op, middle_context=context, rank_context=on_ranks)


def _load_fla() -> Peer:
    import fla.ops.cp.chunk_delta_h as exchange
    from fla.ops.cp.context import FLACPContext
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as op

    def context(tokens: int, ranks: int, device: torch.device) -> Any:
        _imagine_ranks(exchange, ranks)
        return FLACPContext(**_middle(tokens, ranks, device))

    def on_ranks(tokens: int, group: dist.ProcessGroup, device: torch.device) -> Any:
        return FLACPContext(**_fields(tokens, group, dist.get_rank(group), dist.get_world_size(group), device))

    return Peer(op=op, middle_context=context, rank_context=on_ranks)


def _load_fla_conv() -> Peer:
    from fla.modules.convolution import causal_conv1d as conv

    return Peer(op=conv)


CONV_LOADERS: dict[str, Callable[[], Peer]] = {"fla": _load_fla_conv}
LOADERS: dict[str, Callable[[], Peer]] = {"flash_qla": _load_flash_qla, "fla": _load_fla}
