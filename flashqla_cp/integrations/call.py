"""What a call of a transformers model says: its context, its cache, its documents. told: its arguments by name."""

from __future__ import annotations

from typing import Any

import torch

from flashqla_cp.active import active_context, in_backward
from flashqla_cp.integrations.documents import Documents, Sharding, Told, find_documents
from flashqla_cp.parallel.context import CPContext

CACHES = ("cache", "cache_params", "past_key_values", "past_key_value")


def context_of(told: dict[str, Any]) -> CPContext | None:
    """The context that a call was given, or of the use_context around it. Raises ValueError for two."""
    given: CPContext | None = told.get("cp_context")
    active = None if "cp_context" in told and in_backward() else active_context()
    if given is not None and active is not None and given is not active:
        raise ValueError(f"cp_context: got {given!r} inside use_context of {active!r}, expected one context")
    return active if given is None else given


def told_documents(
    sharding: Sharding, told: dict[str, Any], rows: torch.Tensor, attention: str | None = None
) -> Documents:
    """Documents of the rows [B, T, ..] of a call; raises what find_documents does.

    attention: the kind of full attention that will read position_ids too, None where there is none.
    """
    positions = told.get("position_ids")
    blind = attention if positions is None else None
    if positions is not None and positions.ndim == 3:
        # Of four planes the first is that of the text; three are those of an image and tell no documents.
        positions = positions[0] if positions.shape[0] == 4 else None
    sources = Told(
        context=context_of(told),
        cu_seqlens=told.get("cu_seq_lens_q"),
        key_offsets=told.get("cu_seq_lens_k"),
        position_ids=positions,
        seq_idx=told.get("seq_idx"),
        mask=told.get("attention_mask"),
        blind_attention=blind,
    )
    return find_documents(sharding, rows.shape[0], rows.shape[1], sources)


def cache_of(told: dict[str, Any]) -> Any:
    """The cache that a call was given, None without one."""
    return next((told[name] for name in CACHES if told.get(name) is not None), None)
