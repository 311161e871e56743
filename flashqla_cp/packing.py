"""What a call on kernels keeps for its backward, as a list of flat tensors of fixed length: what an operator returns.

Operators of torch say the sizes of their results before they run, and no result may share memory with anything else.
The slots, in order: decay, inverse, key_scale, bound of Solved; boundary, correction, corrects of Maps; row, values of
Entries; what the exchange keeps, joined. A slot is empty where a call has none of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashqla_cp.chains import Kept
from flashqla_cp.kernels.chunks import CHUNK
from flashqla_cp.kernels.host.tables import TableSizes
from flashqla_cp.parallel.context import CPContext

ENTRIES = slice(7, 9)
SLOTS = 10


def slot_dtypes(dtype: torch.dtype) -> list[torch.dtype]:
    """dtypes of the slots, for q, k and v in `dtype`."""
    wide, whole = torch.float32, torch.int32
    return [wide, dtype, wide, wide, wide, wide, whole, whole, wide, wide]


def nothing(like: torch.Tensor) -> list[torch.Tensor]:
    """Empty slots on the device of q, k or v."""
    return [torch.empty(0, dtype=dtype, device=like.device) for dtype in slot_dtypes(like.dtype)]


def slot_sizes(
    q: torch.Tensor,
    v: torch.Tensor,
    *,
    num_documents: int,
    longest: int | None,
    processors: int,
    l2norm: bool,
    entered: bool,
    recompute: str,
) -> list[int]:
    """Sizes of the slots of a call without a context. longest: tokens of every document, if they are batch rows."""
    tokens, (heads, width), v_heads = q.shape[0] * q.shape[1], q.shape[2:], v.shape[2]
    if recompute == "forward" or not tokens or not num_documents:
        return [0] * SLOTS
    size = TableSizes.of(tokens, num_documents, num_v_heads=v_heads, processors=processors, longest=longest)
    scales = (size.chunks if l2norm else 1) * heads * CHUNK
    solved = [size.chunks * v_heads * CHUNK, size.chunks * v_heads * CHUNK**2, scales, v_heads * size.chunks]
    state, rows = v_heads * width**2, size.rows if size.divided else 0
    maps = [rows * state, rows * state, rows * v_heads]
    entries = [num_documents, num_documents * state] if entered else [0, 0]
    return [*([0] * 4 if recompute == "solve" else solved), *maps, *entries, 0]


def pack(kept: Kept, q: torch.Tensor, v: torch.Tensor, context: CPContext | None) -> list[torch.Tensor]:
    """The slots of what is kept, for the backward of the same call. q, v: the op's."""
    *parts, row, values = kept._replace(exchanged=()).without_tensors()[1]
    slots = nothing(q)
    for place, part in enumerate(parts):
        if part is not None:
            slots[place] = part.flatten()
    if row is not None and values is not None:
        slots[ENTRIES] = [row.clone(), values.flatten()]  # rows may be the context's own
    if kept.exchanged:
        assert context is not None
        context.memo[_key(q, v)] = [part.shape for part in kept.exchanged]
        slots[-1] = torch.cat([part.flatten() for part in kept.exchanged])
    return slots


def unpack(
    slots: Sequence[torch.Tensor], q: torch.Tensor, v: torch.Tensor, context: CPContext | None, recompute: str
) -> list[Any]:
    """The inverse of pack: what Kept.with_tensors takes."""
    heads, v_heads, width = q.shape[2], v.shape[2], q.shape[3]
    states = (-1, v_heads, width, width)
    shapes: list[tuple[int, ...]] = [
        (-1, v_heads, CHUNK),
        (-1, v_heads, CHUNK, CHUNK),
        (-1, heads, CHUNK),
        (v_heads, -1),
        states,
        states,
        (-1, v_heads),
        (-1,),
        states,
    ]
    parts = [slot.view(shape) if len(slot) else None for slot, shape in zip(slots[:-1], shapes, strict=True)]
    if len(slots[7]):
        parts[8] = slots[8].view(states)  # there may be rows that all say that there is no state
    kept = [] if context is None or recompute == "forward" else context.memo.get(_key(q, v), [])
    pieces = slots[-1].split([shape.numel() for shape in kept]) if kept else ()
    return [*parts, *(piece.view(shape) for piece, shape in zip(pieces, kept, strict=True))]


def _key(q: torch.Tensor, v: torch.Tensor) -> tuple[Any, ...]:
    """Where a context has the shapes of what its exchange keeps."""
    return "exchanged", v.shape[2], q.shape[3]
