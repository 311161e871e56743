"""Contexts of fla's build_cp_context, which hold one rank's offsets, made ours, which know the whole stream.

fla cuts a stream of P ranks into P equal parts (contiguous) or 2P (zigzag: rank r has the parts r and 2P-1-r).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashqla_cp.integrations.weak_table import WeakTable
from flashqla_cp.parallel.comm import Comm
from flashqla_cp.parallel.context import CPContext, build_cp_context


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Translated:
    """Our context for one of fla's, what that one said then, and the offsets and layout of the whole stream."""

    told: list[int]
    stream: tuple[list[int], str]
    exchange: str
    context: CPContext


_translated: WeakTable[_Translated] = WeakTable()


def translate_context(context: Any, exchange: str, device: torch.device) -> CPContext:
    """Our context for one of fla's build_cp_context: the same group and layout, the documents of all ranks.

    Args:
        context: an FLACPContext with a group. Remembered: later calls with it communicate nothing.
        exchange: as in our build_cp_context.
        device: where its group can communicate.

    Raises:
        ValueError: ranks whose contexts do not fit together, on every rank alike; a context that was edited since.
    """
    told = tell(context)
    known = _translated.get(context)
    if known is not None and known.told != told:
        # The other ranks cannot see it, so there is nobody to ask again.
        raise ValueError("cp_context: its offsets were edited since its first use; build a new context instead")
    if known is None or known.exchange != exchange:
        offsets, layout = _gather(told, Comm(context.group), device) if known is None else known.stream
        # Every rank has computed it from the same numbers: nothing is left to compare.
        ours = build_cp_context(offsets, context.group, layout=layout, exchange=exchange, check_plan=False)
        known = _Translated(told=told, stream=(offsets, layout), exchange=exchange, context=ours)
        _translated.set(context, known)
    return known.context


def _gather(told: list[int], comm: Comm, device: torch.device) -> tuple[list[int], str]:
    lengths = comm.all_gather(torch.tensor([len(told)], device=device)).wait().flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.int64, device=device)
    padded[: len(told)] = torch.tensor(told, device=device)
    gathered = comm.all_gather(padded).wait().tolist()
    return join([row[:length] for row, length in zip(gathered, lengths, strict=True)])


def tell(context: Any) -> list[int]:
    """What one rank's context says: the number of its parts, whether each goes on with a document, its offsets."""
    offsets = context.cu_seqlens if context.cu_seqlens_cpu is None else context.cu_seqlens_cpu
    firsts = context.is_first_by_part if context.layout == "zigzag" else (context.is_first_rank,)
    return [len(firsts), *(int(not first) for first in firsts), *offsets.tolist()]


def join(told: Sequence[Sequence[int]]) -> tuple[list[int], str]:
    """Offsets of the whole stream, without empty documents, and the layout, from what every rank of a group said."""
    parts = told[0][0]
    lengths = {row[-1] for row in told}
    if {row[0] for row in told} != {parts} or len(lengths) != 1 or told[0][-1] % parts:
        shapes = [(row[0], row[-1]) for row in told]
        raise ValueError(f"cp_context: ranks have (parts, tokens) {shapes}, expected the same of all")
    length = told[0][-1] // parts
    slots: list[tuple[int, list[int]]] = []
    for part in range(parts):
        pieces = []
        for row in told:
            inside = [offset - part * length for offset in row[1 + parts :]]
            pieces.append((row[1 + part], [offset for offset in inside if 0 < offset < length]))
        slots += pieces if part == 0 else reversed(pieces)
    offsets = []
    for slot, (goes_on, inside) in enumerate(slots):
        offsets += [slot * length] * (not goes_on) + [slot * length + offset for offset in inside]
    if not offsets or offsets[0] != 0:
        raise ValueError("cp_context: the first rank goes on with a document that nobody began")
    return [*offsets, len(slots) * length], "contiguous" if parts == 1 else "zigzag"
