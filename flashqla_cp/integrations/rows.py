"""The rows of a batch that a rank stores: of which document each is, and whether other sources tell the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from flashqla_cp.parallel.context import CPContext


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """The rows of this rank, joined, on the CPU. document: int64, -1 for padding. begins: a document's first token.
    position: int64, in the whole document, meaningless for padding; None where only beginnings are compared."""

    document: torch.Tensor
    begins: torch.Tensor
    position: torch.Tensor | None = None


def check_rows(
    rows: Rows, batch: int, length: int, position_ids: torch.Tensor | None, seq_idx: torch.Tensor | None
) -> None:
    """Raise unless position_ids and seq_idx tell the same documents; padding rows may hold anything."""
    covered = rows.document >= 0
    if position_ids is not None:
        positions = as_rows(position_ids, "position_ids", batch, length).flatten()
        wrong = covered & ((positions == 0) != rows.begins)
        if wrong.any():
            at = int(wrong.nonzero()[0])
            raise ValueError(
                f"position_ids: {int(positions[at])} at row {at} of this rank, where the boundaries given otherwise "
                f"{'begin' if rows.begins[at] else 'continue'} a document; expected positions in the whole documents, "
                "0 at and only at their first tokens"
            )
        wrong = covered & (positions != rows.position) if rows.position is not None else wrong
        if wrong.any():
            at = int(wrong.nonzero()[0])
            raise ValueError(
                f"position_ids: {int(positions[at])} at row {at} of this rank, which by its plan holds position "
                f"{int(rows.position[at])} of a document; is the batch sharded in another layout?"  # type: ignore[index]
            )
    if seq_idx is not None:
        index = as_rows(seq_idx, "seq_idx", batch, length)
        documents, both = rows.document.view(batch, length), covered.view(batch, length)
        wrong = (index.diff(dim=1) != 0) != (documents.diff(dim=1) != 0)
        if (wrong & both[:, 1:] & both[:, :-1]).any():
            raise ValueError("seq_idx: changes at other rows than the documents given otherwise")


def rows_of_context(context: CPContext) -> Rows:
    key = "documents of rows"
    if key not in context.memo:
        stored = [torch.arange(start, end, device="cpu") for start, end in context.plan.ranges[context.rank]]
        stream = torch.cat([*stored, torch.empty(0, dtype=torch.int64, device="cpu")])
        context.memo[key] = _locate(stream, context.plan.cu_seqlens)
    return context.memo[key]


def rows_of_offsets(offsets: list[int], num_rows: int) -> Rows:
    return replace(_locate(torch.arange(num_rows, device="cpu"), offsets), position=None)


def _locate(stream: torch.Tensor, offsets: Sequence[int]) -> Rows:
    """Rows by their places in the stream."""
    starts = torch.tensor(offsets, dtype=torch.int64, device="cpu")
    document = torch.searchsorted(starts, stream, right=True) - 1
    position, covered = stream - starts[document], stream < starts[-1]
    return Rows(document=document.where(covered, -1), begins=covered & (position == 0), position=position)


def as_rows(given: torch.Tensor, name: str, batch: int, length: int) -> torch.Tensor:
    """Row values [B, T] on the CPU; a single row counts for all of the batch."""
    values = given.detach().cpu()
    values = values[None] if values.ndim == 1 else values
    if values.shape not in ((1, length), (batch, length)):
        raise ValueError(f"{name}: got shape {list(given.shape)}, expected [{batch}, {length}] like the batch")
    return values.expand(batch, length)
