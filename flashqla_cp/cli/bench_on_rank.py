"""What each rank of `flashqla-cp bench --nproc` measures, in the same order as all others.

Every rank holds the same tokens, one part of one long document: the result of each is then known in fp64, and all do
equal work. A row is the op, alone or with one exchange, or an exchange by itself. Timed are, in each direction,

    whole       the call as it is in training
    stand_in    the same call where collectives are local copies of what they would carry: all but the wire
    exchange    the exchange of maps alone, its folds included, with nothing beside it

so that whole - stand_in is the time of communication that is exposed, and exchange minus that is what overlap hides.
A rank that is not in a row's group returns None for it and waits for the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from flashqla_cp.cli.bench_contenders import OURS, Contender, LocalCopies, find_peers
from flashqla_cp.cli.bench_draws import Draw, Expected, errors_of, preparation, refusal_of
from flashqla_cp.cli.bench_timing import Call, first_line
from flashqla_cp.cli.bench_together import Together
from flashqla_cp.op import chunk_gated_delta_rule
from flashqla_cp.parallel.comm import record_collectives
from flashqla_cp.parallel.context import CPContext, build_cp_context
from flashqla_cp.parallel.exchange.base import Links
from flashqla_cp.testing.workload import Workload

DIRECTIONS = ("forward", "backward")
PER_NODE = "FLASHQLA_CP_RANKS_PER_NODE"
MAPS = ("allgather", "sharded", "hierarchical")  # exchanges of maps, which can be timed by themselves

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRequest:
    """What is to be measured. works: tokens are those of one rank. exchanges: names. backend: the op's. peers: names.
    heads: numbers of value heads of the exchanges that are timed alone. calls: how many of each are timed."""

    works: tuple[Workload, ...]
    exchanges: tuple[str, ...]
    backend: str
    peers: tuple[str, ...]
    heads: tuple[int, ...]
    calls: int


def group_sizes(world_size: int) -> list[int]:
    """Powers of two below the number of ranks, from 2 on, and that number."""
    return [*(2**power for power in range(1, 32) if 2**power < world_size), world_size]


def measure_on_this_rank(rank: int, request: RankRequest) -> list[Row | None]:
    """The rows that RankRequest asks for; the ranks are those of the default group."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    world = dist.group.WORLD
    assert world is not None
    everyone = Together.of(world, device, request.calls)
    smaller = [dist.new_group(list(range(size))) for size in group_sizes(everyone.comm.world_size)[:-1]]
    here = _Here(request, device, everyone)
    rows: list[Row | None] = []
    for work in request.works:
        rows += here.field(work)
    for group in (*smaller, world):
        if rank < dist.get_world_size(group):
            part = Together.of(group, device, request.calls)
            rows += here.scaling(part)
            rows += here.exchanges(part)
        else:
            rows += [None] * here.rows_of_a_group(dist.get_world_size(group))
        everyone.line_up()
    return rows


@contextmanager
def nodes_of(exchange: str, world_size: int) -> Iterator[int]:
    """The hierarchy on one host: two nodes are imagined, unless the variable says what a node is."""
    before = os.environ.get(PER_NODE)
    per_node = world_size if exchange != "hierarchical" else max(1, world_size // 2)
    if before is None and exchange == "hierarchical" and world_size % per_node == 0:
        os.environ[PER_NODE] = str(per_node)
    try:
        yield int(os.environ.get(PER_NODE, world_size))
    finally:
        if before is None:
            os.environ.pop(PER_NODE, None)


@dataclass(frozen=True, slots=True)
class _Here:
    request: RankRequest
    device: torch.device
    everyone: Together

    def field(self, work: Workload) -> list[Row]:
        """This library's op alone, with every exchange on all ranks, and the peers' likewise."""
        request, together = self.request, self.everyone
        comm, draw = together.comm, Draw.of(work, 0, "step", self.device)
        expected = None
        if work.tokens == min(other.tokens for other in request.works):
            expected = draw.expected(work, comm.world_size, comm.rank)
        rows = [self._alone(work, draw, OURS, self._ours(None))]
        rows += [self._on_ranks(work, draw, expected, together, name) for name in request.exchanges]
        peers = {name: peer for name, peer in find_peers()[0].items() if name in request.peers} if request.peers else {}
        for name in request.peers:
            if not together.agree(name in peers):
                continue
            peer = peers[name]
            rows.append(self._alone(work, draw, name, _op(peer.op, {})))
            row: Row = {"kind": "op", "name": name, "exchange": "its own", "ranks": comm.world_size}
            found = self._scored(draw, expected, together, self._of_peer(peer, work), strict=False)
            rows.append(_described(row | found, work))
        return rows

    def scaling(self, part: Together) -> list[Row]:
        """The op on some of the ranks, with the exchange that "auto" takes there."""
        rows = []
        for work in self._scaled():
            draw = Draw.of(work, 0, "step", self.device)
            rows.append(self._on_ranks(work, draw, None, part, "auto") | {"kind": "scaling"})
        return rows

    def exchanges(self, part: Together) -> list[Row]:
        """The exchanges of maps alone, for several numbers of value heads."""
        rows = []
        for name in MAPS:
            for heads in self.request.heads:
                work = replace(self.request.works[0], v_heads=heads)
                context = self._context(work, part, name)
                row: Row = {"kind": "exchange", "exchange": name, "ranks": part.comm.world_size, "v_heads": heads}
                for direction in DIRECTIONS:
                    call = _exchange(context, heads, work.head_dim, self.device, direction)
                    row[direction] = {"exchange": part.times(lambda call=call: call)}  # type: ignore[misc]
                    row[direction]["bytes"] = _said(context, work)[direction]
                rows.append(row)
        return rows

    def rows_of_a_group(self, world_size: int) -> int:
        return len(self._scaled()) + len(MAPS) * len(self.request.heads)

    def _scaled(self) -> list[Workload]:
        """The works of one kind of gates, that of slow and fast heads where it was asked for."""
        names = [work.gates for work in self.request.works]
        chosen = "mixed" if "mixed" in names else names[0]
        return [work for work in self.request.works if work.gates == chosen]

    def _ours(self, context: CPContext | None) -> Callable[..., torch.Tensor]:
        return _op(chunk_gated_delta_rule, {"backend": self.request.backend, "cp_context": context})

    def _of_peer(self, peer: Any, work: Workload) -> Callable[..., torch.Tensor]:
        made: list[Any] = []

        def call(*tensors: torch.Tensor) -> torch.Tensor:
            if not made:
                assert peer.rank_context is not None, "every peer of this op has one"
                made.append(peer.rank_context(work.tokens, self.everyone.comm.group, self.device))
            return peer.op(*tensors, cp_context=made[0])[0]

        return call

    def _context(self, work: Workload, part: Together, exchange: str) -> CPContext:
        ranks = part.comm.world_size
        with nodes_of(exchange, ranks):
            offsets = torch.tensor([0, ranks * work.tokens], device=self.device)
            return build_cp_context(offsets, part.comm.group, exchange=exchange)

    def _alone(self, work: Workload, draw: Draw, name: str, call: Callable[..., torch.Tensor]) -> Row:
        row: Row = {"kind": "op", "name": name, "exchange": "none", "ranks": 1}
        return _described(row | self._scored(draw, None, self.everyone, call, strict=False), work)

    def _on_ranks(self, work: Workload, draw: Draw, expected: Expected | None, part: Together, exchange: str) -> Row:
        """One exchange of this library's op, with bytes, the stand-in, and the exchange by itself."""
        context, comm = self._context(work, part, exchange), part.comm
        row: Row = {"kind": "op", "name": OURS, "exchange": context.exchange, "ranks": comm.world_size}
        row |= self._scored(draw, expected, part, self._ours(context), strict=True)
        if "failed" in row:
            return _described(row, work)
        with nodes_of(context.exchange, comm.world_size) as per_node:
            copies = LocalCopies(comm.rank, comm.world_size, per_node)
            imagined = CPContext(context.plan, copies, context.exchange, None, self.device)
        sent, said = _sent(self._ours(context), draw), _said(context, work)
        for direction, stand_in in self._timed(draw, part, self._ours(imagined)).items():
            row[direction] |= {"stand_in": stand_in, "sent": sent[direction], "bytes": said[direction]}
            if context.map_exchange is not None:
                call = _exchange(context, work.v_heads, work.head_dim, self.device, direction)
                row[direction]["exchange"] = part.times(lambda call=call: call)  # type: ignore[misc]
        return _described(row, work)

    def _scored(
        self,
        draw: Draw,
        expected: Expected | None,
        part: Together,
        call: Callable[..., torch.Tensor],
        *,
        strict: bool,
    ) -> Row:
        """Errors of the op where they are known, and its times unless it failed or, if strict, is wrong."""
        row: Row = {"o_error": None, "gradient_errors": None}
        leaves, o, gradients, trouble = draw.leaves(), None, None, None
        for direction in DIRECTIONS:  # apart: a rank that fails in one must not leave others in collectives of the next
            try:
                if o is None:
                    o = call(*leaves)
                else:
                    gradients = torch.autograd.grad(o, leaves, draw.upstream)
            except Exception as error:  # one op that cannot run a case must not cost the others' numbers
                trouble = f"{first_line(error)} ({direction})"
            if not part.agree(trouble is None):
                return row | {"failed": trouble or "not timed: see the other ranks"}
        if expected is not None and o is not None and gradients is not None:
            row |= errors_of(o, gradients, expected)
            trouble = refusal_of(row) if strict else None
            if not part.agree(trouble is None):
                return row | {"failed": trouble or "not timed: see the other ranks"}
        return row | {direction: {"whole": times} for direction, times in self._timed(draw, part, call).items()}

    def _timed(self, draw: Draw, part: Together, call: Callable[..., torch.Tensor]) -> dict[str, Any]:
        contender = Contender(name="", middle=False, call=call, check=None)
        found = {}
        for direction in DIRECTIONS:
            one = draw if direction == "backward" else replace(draw, upstream=None)
            with torch.set_grad_enabled(direction == "backward"):
                found[direction] = part.times(preparation(contender, one, direction))
        return found


def _op(op: Callable[..., Any], options: dict[str, Any]) -> Callable[..., torch.Tensor]:
    return lambda *tensors: op(*tensors, **options)[0]


def _described(row: Row, work: Workload) -> Row:
    return row | {"gates": work.gates, "tokens": work.tokens}


def _sent(call: Callable[..., torch.Tensor], draw: Draw) -> dict[str, int]:
    """Bytes that this rank sends in one call, as they are counted where collectives are issued."""
    leaves = draw.leaves()
    with record_collectives() as forward:
        o = call(*leaves)
    with record_collectives() as backward:
        torch.autograd.grad(o, leaves, draw.upstream)
    logs: dict[str, Sequence[Any]] = {"forward": forward, "backward": backward}
    return {direction: sum(record.bytes_sent for record in log) for direction, log in logs.items()}


def _said(context: CPContext, work: Workload) -> dict[str, int]:
    """The same as the formula says."""
    dim = work.head_dim
    traffic = context.comm_bytes(work.v_heads, dim, dim, num_heads=work.heads, dtype=work.dtype)
    return {direction: sum(count for _, count in calls) for direction, calls in traffic.items()}


def _exchange(context: CPContext, heads: int, dim: int, device: torch.device, direction: str) -> Call:
    """A call of the exchange of maps alone, with maps of the right sizes."""
    exchange, links, rank = context.map_exchange, Links.of_plan(context.plan), context.rank
    assert exchange is not None

    def maps(counts: Sequence[int]) -> torch.Tensor:
        return torch.randn(counts[rank], heads, dim, dim, device=device) / dim

    boundary, correction, gradient = maps(links.emitters), maps(links.interior), maps(links.receivers)
    if direction == "forward":
        return lambda: exchange.forward(boundary, correction).wait()
    kept = exchange.forward(boundary, correction).wait().kept
    return lambda: exchange.backward(gradient, kept).wait()
