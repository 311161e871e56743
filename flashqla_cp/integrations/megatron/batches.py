"""Which documents Megatron's rows belong to, and how they are sharded: from shapes, or from PackedSeqParams.

Letters: T rows of this rank in each sequence, B sequences, P context-parallel ranks.

Format sbhd: rank r holds the parts r and 2P-1-r of 2P of each sequence. With the B sequences joined to one stream
that is the layout zigzag_per_document of B documents of T*P tokens. Format thd: one stream, documents by cu_seqlens.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from flashqla_cp.integrations.documents import Documents
from flashqla_cp.integrations.weak_table import WeakTable
from flashqla_cp.parallel.context import CPContext, build_cp_context
from flashqla_cp.parallel.plan import check_offsets, read_offsets

PACKED_LAYOUTS = ("zigzag_per_document", "zigzag", "contiguous")
KEPT_SHAPES = 32

_of_sequences: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, CPContext]] = weakref.WeakKeyDictionary()
_of_packed: WeakTable[_Known] = WeakTable()


@dataclass(slots=True, kw_only=True, eq=False)
class _Known:
    """What was made of one PackedSeqParams object, valid as long as it has the same tensors, unchanged.

    The tensors are held, so no other one can take their place unseen; versions count edits in place.
    """

    tensors: tuple[torch.Tensor | None, ...]
    versions: tuple[int | None, ...]
    offsets: list[int]
    documents: dict[Any, Documents] = field(default_factory=dict)


def find_documents(layer: Any, T: int, B: int, packed: Any) -> Documents:
    """Documents of [T, B] rows of this rank for a layer with pg_collection and options, and PackedSeqParams or None.

    A context is made once for a shape, or for a PackedSeqParams object, on all ranks alike.

    Raises:
        ValueError: documents that are missing, contradict the rows, or cannot have been sharded that way.
    """
    group = layer.pg_collection.cp
    if packed is not None and packed.cp_group is not None:
        group = packed.cp_group  # dynamic context parallelism: a group for this batch
    elif packed is not None and packed.local_cp_size is not None:
        if int(packed.local_cp_size) != 1:
            raise ValueError(f"packed_seq_params: got local_cp_size={packed.local_cp_size} without a cp_group")
        group = None
    P = 1 if group is None else group.size()
    formats = ("thd", "sbhd", "bshd", None)
    if packed is not None and packed.qkv_format not in formats:
        raise ValueError(f"packed_seq_params: got qkv_format={packed.qkv_format!r}, expected one of {formats}")
    if packed is not None and packed.qkv_format == "thd":
        return _find_packed(layer, T, B, P, group, packed)
    if packed is not None and packed.cu_seqlens_q is not None:
        offsets = _recall(packed).offsets
        if offsets != [0, T * P]:
            raise ValueError(
                f"packed_seq_params: got {_short(offsets)} in format {packed.qkv_format!r}, expected one sequence of "
                f"{T * P} tokens; packed documents come in format 'thd'"
            )
    if P == 1:
        return Documents()
    return Documents(context=_context_of_sequences(layer, T, B, P, group))


def _context_of_sequences(layer: Any, T: int, B: int, P: int, group: dist.ProcessGroup) -> CPContext:
    if T % 2:
        raise ValueError(f"hidden_states: got {T} rows of each sequence, expected two equal parts (zigzag)")
    known = _of_sequences.setdefault(group, {})
    key = (T, B, layer.exchange, layer.conv_kernel_dim)
    if key not in known:
        if len(known) >= KEPT_SHAPES:
            del known[next(iter(known))]
        offsets = [row * T * P for row in range(B + 1)]
        known[key] = _build(layer, offsets, group, "zigzag_per_document")
    return known[key]


def _find_packed(layer: Any, T: int, B: int, P: int, group: Any, packed: Any) -> Documents:
    if B != 1:
        raise ValueError(f"hidden_states: got {B} sequences in format 'thd', expected one row of packed documents")
    known = _recall(packed)
    key = (T, group and weakref.ref(group), layer.exchange, layer.packed_layout, layer.conv_kernel_dim)
    if key not in known.documents:
        _check_packed(known.offsets, T, P, layer.packed_layout)
        if P == 1:
            documents = Documents(cu_seqlens=torch.tensor(known.offsets, dtype=torch.int32, device="cpu"))
        else:
            documents = Documents(context=_build(layer, known.offsets, group, layer.packed_layout))
        known.documents[key] = documents
    return known.documents[key]


def _build(layer: Any, offsets: list[int], group: dist.ProcessGroup, layout: str) -> CPContext:
    return build_cp_context(offsets, group, layer.conv_kernel_dim, layout=layout, exchange=layer.exchange)


def _check_packed(offsets: list[int], T: int, P: int, layout: str) -> None:
    check_offsets(offsets, None, "packed_seq_params.cu_seqlens_q")
    if offsets[-1] != T * P:
        raise ValueError(
            f"packed_seq_params: the offsets end at {offsets[-1]}, expected {T * P}, the {T} rows of each of {P} ranks"
        )
    parts = {"zigzag_per_document": 2 * P, "zigzag": 2 * P, "contiguous": P}[layout]
    lengths = [end - start for start, end in pairwise(offsets)] if layout == "zigzag_per_document" else offsets[-1:]
    uneven = [length for length in lengths if length % parts]
    if P > 1 and uneven:
        what = "document lengths" if layout == "zigzag_per_document" else "a stream length"
        raise ValueError(
            f"packed_seq_params: got {uneven[0]} tokens, expected {what} divisible by {parts} in packed_layout "
            f"{layout!r} on {P} ranks; pad them"
        )


def _recall(packed: Any) -> _Known:
    """The record of a PackedSeqParams object, read anew when its tensors are others or were edited."""
    tensors = (
        packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded,
        packed.cu_seqlens_kv if packed.cu_seqlens_kv_padded is None else packed.cu_seqlens_kv_padded,
    )
    if tensors[0] is None:
        raise ValueError("packed_seq_params: has no cu_seqlens_q; expected the offsets of the packed documents")
    versions = tuple(_version(x) for x in tensors)
    known = _of_packed.get(packed)
    if known is not None and None not in versions:
        same = all(new is old for new, old in zip(tensors, known.tensors, strict=True))
        if same and versions == known.versions:
            return known
    offsets = _read(tensors)
    if known is None or known.offsets != offsets:
        known = _Known(tensors=tensors, versions=versions, offsets=offsets)
        _of_packed.set(packed, known)
    known.tensors, known.versions = tensors, versions
    return known


def _read(tensors: tuple[Any, ...]) -> list[int]:
    offsets = read_offsets(tensors[0], "packed_seq_params.cu_seqlens_q")
    if tensors[1] is not None and read_offsets(tensors[1], "packed_seq_params.cu_seqlens_kv") != offsets:
        raise ValueError("packed_seq_params: cu_seqlens_kv differs from cu_seqlens_q; a layer has one set of documents")
    return offsets


def _version(x: torch.Tensor | None) -> int | None:
    """Count of edits in place; None where it is not kept or an edit may go past it, as on the CPU through numpy."""
    if x is None:
        return 0
    return None if x.is_inference() or x.device.type == "cpu" else x._version


def _short(offsets: list[int]) -> str:
    return str(offsets) if len(offsets) <= 8 else f"{offsets[:6]} and {len(offsets) - 6} more"
