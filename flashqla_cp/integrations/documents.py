"""Which documents a batch holds, from what a framework hands to a model: one source decides, all others must agree.

The sources, in order: a CPContext; cu_seq_lens_q, offsets of the documents of the whole stream; position_ids of the
rows that this rank stores, 0 where a document begins. seq_idx, the document of each row, is only compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from flashqla_cp.integrations.attention import check_positions
from flashqla_cp.integrations.refusals import agree, check_key_offsets, is_padded, refuse_padding
from flashqla_cp.integrations.rows import as_rows, check_rows, rows_of_context, rows_of_offsets
from flashqla_cp.parallel.comm import Comm
from flashqla_cp.parallel.context import CPContext, build_cp_context
from flashqla_cp.parallel.plan import ShardPlan, check_offsets, read_offsets

PASS = "pass them by `with use_context(ctx): model(...)`, as cu_seq_lens_q, or as position_ids"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sharding:
    """How contexts are made. comm: the group, None without context parallelism. conv_width: taps of the convolution."""

    comm: Comm | None
    layout: str
    exchange: str
    conv_width: int

    @property
    def world_size(self) -> int:
        return 1 if self.comm is None else self.comm.world_size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Told:
    """What came with a batch: context; cu_seqlens and key_offsets [N+1]; position_ids, seq_idx and mask [B, T]; None
    for what did not. blind_attention: the kind of full attention that would need position_ids and got none."""

    context: CPContext | None = None
    cu_seqlens: torch.Tensor | None = None
    key_offsets: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    seq_idx: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    blind_attention: str | None = None

    @property
    def source(self) -> str:
        """Name of what decides."""
        return "cu_seq_lens_q" if self.cu_seqlens is not None else "position_ids"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Documents:
    """What the op needs to know. context: this rank's part; cu_seqlens: CPU offsets in the joined rows of the batch.

    With neither, each row of the batch is one document.
    """

    context: CPContext | None = None
    cu_seqlens: torch.Tensor | None = None

    @property
    def packed(self) -> bool:
        """Whether this rank stores more than one document in a row."""
        return self.cu_seqlens is not None or (self.context is not None and len(self.context.segment_documents) > 1)


def find_documents(sharding: Sharding, batch: int, length: int, told: Told) -> Documents:
    """Documents of a batch of `batch` rows of `length` tokens stored by this rank.

    Communicates only in a group of several ranks without a context: then a context is made, and what one rank refuses
    is raised on all. With a context a rank raises alone what it alone can see.

    Raises:
        ValueError: sources that contradict each other or the batch; a group of several ranks and no source, or padding
            there; full attention that is told no positions. TypeError: offsets that are not integers. RuntimeError:
            ranks that disagree, or that refused.
    """
    context, comm = told.context, sharding.comm
    if context is None and comm is not None and comm.world_size > 1:
        agree(comm, told.source, lambda: _check_alone(sharding, batch, length, told))
        made = _make_context(sharding, batch, length, told)
        return agree(comm, told.source, lambda: _settle(made, sharding, batch, length, told))
    check_key_offsets(told.cu_seqlens, told.key_offsets)
    return _settle(context, sharding, batch, length, told)


def _settle(context: CPContext | None, sharding: Sharding, batch: int, length: int, told: Told) -> Documents:
    """The documents by a context or, on one device without one, by the other sources; communicates nothing."""
    if context is None:
        found = _rows_of_one_device(batch, length, told)
    else:
        found = _checked(context, sharding, batch, length, told)
    if told.blind_attention is not None:
        check_positions(told.blind_attention, sharding.world_size, found.packed, told.cu_seqlens is not None)
    return found


def _rows_of_one_device(batch: int, length: int, told: Told) -> Documents:
    if told.cu_seqlens is not None:
        if batch != 1:
            raise ValueError(f"cu_seq_lens_q: got offsets for a batch of {batch} rows, expected one row")
        offsets = read_offsets(told.cu_seqlens, "cu_seq_lens_q")
        check_offsets(offsets, length, "cu_seq_lens_q")
        if offsets[-1] != length:
            raise ValueError(
                f"cu_seq_lens_q: end at {offsets[-1]} in a row of {length} tokens, expected {length}; give padding at "
                "the end an offset of its own"
            )
    elif told.position_ids is not None:
        offsets = _offsets_of_positions(as_rows(told.position_ids, "position_ids", batch, length))
        told = replace(told, position_ids=None)  # a row may go on from tokens that are not there
    else:
        offsets = [row * length for row in range(batch + 1)]
    check_rows(rows_of_offsets(offsets, batch * length), batch, length, told.position_ids, told.seq_idx)
    whole_rows = offsets == [row * length for row in range(batch + 1)]
    return Documents(cu_seqlens=None if whole_rows else torch.tensor(offsets, dtype=torch.int32, device="cpu"))


def _check_alone(sharding: Sharding, batch: int, length: int, told: Told) -> None:
    """What a rank can refuse before it has heard of the others."""
    check_key_offsets(told.cu_seqlens, told.key_offsets)
    if is_padded(told.mask):
        refuse_padding(told.mask)
    if told.cu_seqlens is None and told.position_ids is None:
        raise ValueError(
            f"boundaries: the sequence is sharded over {sharding.world_size} ranks and no document boundaries came "
            f"with it; {PASS}"
        )
    if batch != 1:
        raise ValueError(
            f"input: got a batch of {batch} rows with the sequence sharded over {sharding.world_size} ranks, expected "
            "one row; pack the documents into it"
        )
    if told.cu_seqlens is None and told.position_ids is not None:
        as_rows(told.position_ids, "position_ids", batch, length)
        if sharding.layout == "zigzag_per_document":
            raise ValueError(
                f"position_ids: do not tell documents in layout {sharding.layout!r}; use use_context or cu_seq_lens_q"
            )


def _checked(context: CPContext, sharding: Sharding, batch: int, length: int, told: Told) -> Documents:
    if sharding.world_size > 1 and is_padded(told.mask):
        refuse_padding(told.mask)
    if told.context is None and told.cu_seqlens is not None and length != context.local_tokens:
        raise ValueError(
            f"cu_seq_lens_q: offsets up to {context.plan.cu_seqlens[-1]}, of which rank {context.rank} stores "
            f"{context.local_tokens} tokens in layout {sharding.layout!r}, for {length} tokens on this rank; expected "
            "the offsets of the whole stream, before sharding"
        )
    _check_context(context, sharding, batch, length)
    _check_offsets_of(context, told.cu_seqlens)
    check_rows(rows_of_context(context), batch, length, told.position_ids, told.seq_idx)
    return Documents(context=context)


def _make_context(sharding: Sharding, batch: int, length: int, told: Told) -> CPContext:
    assert sharding.comm is not None, "several ranks have a group"
    offsets: torch.Tensor | list[int]
    if told.cu_seqlens is not None:
        offsets = told.cu_seqlens
    else:
        assert told.position_ids is not None, "one of the two was given"
        offsets = _gather_offsets(sharding, as_rows(told.position_ids, "position_ids", batch, length))
    return build_cp_context(
        offsets,
        sharding.comm.group,
        sharding.conv_width,
        layout=sharding.layout,
        exchange=sharding.exchange,
    )


def _gather_offsets(sharding: Sharding, positions: torch.Tensor) -> list[int]:
    """Offsets of the whole stream from every rank's position_ids [1, T]; raises alike on every rank."""
    comm, layout = sharding.comm, sharding.layout
    assert comm is not None, "several ranks have a group"
    local = positions.flatten().to(torch.int64)
    lengths = comm.all_gather(torch.tensor([local.numel()], device=local.device)).wait().flatten().tolist()
    padded = local.new_full((max(lengths),), -1)
    padded[: local.numel()] = local
    stored = [row[:count].cpu() for row, count in zip(comm.all_gather(padded).wait(), lengths, strict=True)]
    if all(torch.equal(row, torch.arange(len(row), device="cpu")) for row in stored):
        raise ValueError(
            "position_ids: every rank counts its own rows from 0, as a model does that is given none; pass this rank's "
            "rows of the positions in the whole stream, or use use_context"
        )
    total = sum(lengths)
    plan = ShardPlan.build(layout, [0, total], comm.world_size, total)
    planned = [plan.local_tokens(rank) for rank in range(comm.world_size)]
    if planned != lengths:
        raise ValueError(f"position_ids: ranks store {lengths} tokens, layout {layout!r} gives them {planned}")
    stream = torch.empty(total, dtype=torch.int64, device="cpu")
    for row, ranges in zip(stored, plan.ranges, strict=True):
        for (start, end), piece in zip(ranges, row.split([end - start for start, end in ranges]), strict=True):
            stream[start:end] = piece
    begins = stream == 0
    follows = begins[1:] | (stream.diff() == 1)
    if not begins[:1].all() or not follows.all():
        at = 0 if not begins[:1].all() else int((~follows).nonzero()[0]) + 1
        raise ValueError(
            f"position_ids: token {at} of the stream in layout {layout!r} has position {int(stream[at])}, which "
            "neither begins a document (0) nor follows on the one before; is the batch sharded in another layout?"
        )
    return [*begins.nonzero().flatten().tolist(), total]


def _offsets_of_positions(positions: torch.Tensor) -> list[int]:
    """Offsets in the joined rows of position_ids [B, T]; a row begins a document whatever its first position."""
    batch, length = positions.shape
    begins = positions == 0
    lost = (positions.diff(dim=1) <= 0) & ~begins[:, 1:]
    if lost.any():
        row, at = lost.nonzero()[0].tolist()
        before, after = positions[row, at : at + 2].tolist()
        raise ValueError(
            f"position_ids: in row {row}, position {after} comes after {before}, which neither begins a document (0) "
            "nor goes on"
        )
    begins[:, :1] = True
    return [*begins.flatten().nonzero().flatten().tolist(), batch * length]


def _check_context(context: CPContext, sharding: Sharding, batch: int, length: int) -> None:
    ours = [dist.get_rank()] if dist.is_initialized() else [0]
    if sharding.comm is not None:
        ours = dist.get_process_group_ranks(sharding.comm.group)
    theirs = dist.get_process_group_ranks(context.group)
    if theirs != ours:
        raise ValueError(
            f"cp_context: shards over ranks {theirs}, the model was enabled for ranks {ours}; pass the same group"
        )
    if (batch, length) != (1, context.local_tokens):
        raise ValueError(
            f"cp_context: the batch has {batch} rows of {length} tokens, rank {context.rank} stores one row of "
            f"{context.local_tokens} by its plan"
        )


def _check_offsets_of(context: CPContext, cu_seqlens: torch.Tensor | None) -> None:
    if cu_seqlens is None:
        return
    offsets = sorted(set(read_offsets(cu_seqlens, "cu_seq_lens_q")))
    planned = sorted({0, *context.plan.cu_seqlens})
    if offsets not in (planned, sorted({*planned, context.plan.num_tokens})):
        raise ValueError(
            f"cu_seq_lens_q: {_short(offsets)} contradict the context's {_short(planned)}; expected the offsets of the "
            "whole stream"
        )


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"{values[:6]} and {len(values) - 6} more"
