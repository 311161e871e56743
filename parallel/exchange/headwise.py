"""Headwise: all-to-all of the activations (Ulysses), as a reference and for comparison.

Rows (tokens, or state rows of documents) sharded over ranks with all heads become all rows with the heads of one
owner, and back. Nothing else is exchanged: each owner runs the whole stream for its heads. Bytes grow with T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flashqla_cp.parallel.comm import Comm
from flashqla_cp.parallel.exchange.sharded import head_counts
from flashqla_cp.parallel.once import differentiable_once
from flashqla_cp.parallel.plan import ShardPlan

Tensors = tuple[torch.Tensor, ...]
Deal = Sequence[Sequence[int]]
Round = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True, eq=False)
class RowTable:
    """How many rows each rank stores, and the stream position of row i of all ranks' rows joined."""

    counts: tuple[int, ...]
    position: torch.Tensor
    _prepared: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @torch.inference_mode(False)
    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(joined row of each stream position, stream position of each joined row)."""
        if device not in self._prepared:
            self._prepared[device] = (self.position.argsort().to(device), self.position.to(device))
        return self._prepared[device]

    def own(self, rank: int, device: torch.device) -> torch.Tensor:
        """Stream positions of the rows of a rank."""
        return self.on(device)[1].split(self.counts)[rank]


@dataclass(slots=True, eq=False)
class HeadTable:
    """Heads in the order in which they are sent, owner by owner, and how many go to each."""

    order: tuple[int, ...]
    counts: tuple[int, ...]
    _prepared: dict[torch.device, tuple[torch.Tensor, list[Round]]] = field(default_factory=dict)

    @torch.inference_mode(False)
    def on(self, device: torch.device) -> tuple[torch.Tensor, list[Round]]:
        """The order, and the rounds of (place in it, head) in which copies of a head are added up, one a round."""
        if device not in self._prepared:
            order = torch.tensor(self.order, dtype=torch.int64, device="cpu")
            turns = [self.order[:place].count(head) for place, head in enumerate(self.order)]
            turn = torch.tensor(turns, dtype=torch.int64, device="cpu")
            places = [(turn == number).nonzero().flatten() for number in range(max(turns, default=-1) + 1)]
            rounds = [(place.to(device), order[place].to(device)) for place in places]
            self._prepared[device] = (order.to(device), rounds)
        return self._prepared[device]


def token_rows(plan: ShardPlan) -> RowTable:
    """Rows are tokens, in the stream's order."""
    pieces = [torch.arange(start, end, device="cpu") for owned in plan.ranges for start, end in owned]
    counts = tuple(plan.local_tokens(rank) for rank in range(plan.world_size))
    return RowTable(counts, torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device="cpu"))


def _document_rows(owned: Sequence[Sequence[int]]) -> RowTable:
    """Rows are the states of documents, in the documents' order."""
    flat = [document for documents in owned for document in documents]
    return RowTable(tuple(map(len, owned)), torch.tensor(flat, dtype=torch.int64, device="cpu"))


class Headwise:
    """Turns token shards with all heads into whole streams with some heads, and back, differentiably."""

    name = "headwise"

    def __init__(self, plan: ShardPlan, comm: Comm):
        self.comm, self.tokens = comm, token_rows(plan)
        self._tables: dict[tuple[tuple[int, ...], ...], HeadTable] = {}
        ranks = range(plan.world_size)
        self.entry_rows = _document_rows([plan.entry_documents(rank) for rank in ranks])
        self.exit_rows = _document_rows([plan.exit_documents(rank) for rank in ranks])

    def owned_heads(self, num_heads: int, num_v_heads: int) -> tuple[list[list[int]], list[list[int]]]:
        """Key heads and value heads of every owner."""
        both = [self.heads_of(num_heads, num_v_heads, owner) for owner in range(self.comm.world_size)]
        return [keys for keys, _ in both], [values for _, values in both]

    def heads_of(self, num_heads: int, num_v_heads: int, owner: int) -> tuple[list[int], list[int]]:
        """Key heads and value heads of one owner. Groups stay together while there are as many groups as ranks;
        with more ranks than groups, value heads are dealt out and key heads go with each of them."""
        size, ratio = self.comm.world_size, num_v_heads // num_heads
        if num_heads >= size:
            counts = head_counts(num_heads, size)
            keys = list(range(sum(counts[:owner]), sum(counts[: owner + 1])))
            return keys, [key * ratio + i for key in keys for i in range(ratio)]
        counts = head_counts(num_v_heads, size)
        values = list(range(sum(counts[:owner]), sum(counts[: owner + 1])))
        return [value // ratio for value in values], values

    def to_heads(self, tensors: Sequence[torch.Tensor], rows: Sequence[RowTable], heads: Sequence[Deal]) -> Tensors:
        """tensors [local rows, heads, ...] -> [all rows, own heads, ...]. heads[i][p]: tensor i's for owner p.

        Differentiated as one: whoever differentiates any of them takes part in the collectives of all.
        """
        return _ToHeads.apply(self.comm, rows, [self._table(deal) for deal in heads], *tensors)

    def to_rows(self, tensors: Sequence[torch.Tensor], rows: Sequence[RowTable], heads: Sequence[Deal]) -> Tensors:
        """The way back for tensors whose heads are each owned once; differentiated as one, too."""
        return _ToRows.apply(self.comm, rows, [self._table(deal) for deal in heads], *tensors)

    def _table(self, deal: Deal) -> HeadTable:
        key = tuple(map(tuple, deal))
        if key not in self._tables:
            self._tables[key] = HeadTable(tuple(head for heads in key for head in heads), tuple(map(len, key)))
        return self._tables[key]

    def traffic(
        self, num_heads: int, num_v_heads: int, head_k_dim: int, head_v_dim: int, dtype: torch.dtype
    ) -> dict[str, list[tuple[str, int]]]:
        """Bytes sent to other ranks: q, k, v, g and beta there, o and the final states back; backward mirrors it."""
        rank, tokens, exits = self.comm.rank, self.tokens.counts, self.exit_rows.counts
        keys, values = self.owned_heads(num_heads, num_v_heads)
        item, wide = dtype.itemsize, max(4, dtype.itemsize)

        def out(deal: Deal, rows: Sequence[int], width: int) -> tuple[str, int]:
            return "all_to_all", (sum(map(len, deal)) - len(deal[rank])) * rows[rank] * width

        def back(deal: Deal, rows: Sequence[int], width: int) -> tuple[str, int]:
            return "all_to_all", len(deal[rank]) * (sum(rows) - rows[rank]) * width

        key, value, gate = (
            (keys, tokens, head_k_dim * item),
            (values, tokens, head_v_dim * item),
            (values, tokens, wide),
        )
        arguments, results = (key, key, value, gate, gate), (value, (values, exits, head_k_dim * head_v_dim * wide))
        return {
            "forward": [*(out(*move) for move in arguments), *(back(*move) for move in results)],
            "backward": [*(out(*move) for move in results), *(back(*move) for move in arguments)],
        }


def _gather_rows(comm: Comm, rows: RowTable, heads: HeadTable, x: torch.Tensor) -> torch.Tensor:
    """[local rows, heads, ...] -> [all rows, own heads, ...]: heads may be sent to several owners."""
    counts = heads.counts
    index, _ = heads.on(x.device)
    local, mine, inner = len(x), counts[comm.rank], x.shape[2:]
    send = x.index_select(1, index).transpose(0, 1).reshape(len(index) * local, *inner)
    received = comm.all_to_all(send, [n * local for n in counts], [mine * n for n in rows.counts]).wait()
    blocks = received.split([mine * n for n in rows.counts])
    joined = torch.cat([b.view(mine, n, *inner) for b, n in zip(blocks, rows.counts, strict=True)], dim=1)
    return joined.transpose(0, 1).index_select(0, rows.on(x.device)[0])


def _gather_heads(comm: Comm, rows: RowTable, heads: HeadTable, num_heads: int, x: torch.Tensor) -> torch.Tensor:
    """[all rows, own heads, ...] -> [local rows, heads, ...], summed where several owners hold a head."""
    counts = heads.counts
    index, rounds = heads.on(x.device)
    local, mine, inner = rows.counts[comm.rank], counts[comm.rank], x.shape[2:]
    joined = x.index_select(0, rows.on(x.device)[1]).transpose(0, 1)
    send = torch.cat([block.reshape(-1, *inner) for block in joined.split(rows.counts, dim=1)])
    received = comm.all_to_all(send, [mine * n for n in rows.counts], [n * local for n in counts]).wait()
    parts = received.view(len(index), local, *inner).transpose(0, 1)
    if len(index) == num_heads:
        return parts.contiguous()
    total = torch.zeros(
        local, num_heads, *inner, dtype=torch.float32 if x.element_size() < 4 else x.dtype, device=x.device
    )
    for place, head in rounds:  # one copy of a head each: the same sum on every run
        total.index_add_(1, head, parts.index_select(1, place).to(total.dtype))
    return total.to(x.dtype)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, comm: Comm, rows: Sequence[RowTable], heads: list[HeadTable], *tensors: torch.Tensor
    ) -> Tensors:
        ctx.comm, ctx.rows, ctx.heads = comm, rows, heads
        ctx.num_heads = [x.shape[1] for x in tensors]
        return tuple(_gather_rows(comm, *move) for move in zip(rows, heads, tensors, strict=True))

    @staticmethod
    @differentiable_once("chunk_gated_delta_rule")
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        moves = zip(ctx.rows, ctx.heads, ctx.num_heads, grads, strict=True)
        return None, None, None, *(_gather_heads(ctx.comm, *move) for move in moves)


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, comm: Comm, rows: Sequence[RowTable], heads: list[HeadTable], *tensors: torch.Tensor
    ) -> Tensors:
        ctx.comm, ctx.rows, ctx.heads = comm, rows, heads
        counts = [len(table.order) for table in heads]
        return tuple(_gather_heads(comm, *move) for move in zip(rows, heads, counts, tensors, strict=True))

    @staticmethod
    @differentiable_once("chunk_gated_delta_rule")
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        moves = zip(ctx.rows, ctx.heads, grads, strict=True)
        return None, None, None, *(_gather_rows(ctx.comm, *move) for move in moves)
