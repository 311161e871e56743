"""Full attention beside the Gated DeltaNet layers: nothing here shards it, but it must be told what they are told."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

ATTENTION_WARNING = "model: its full-attention layers"


def find_attention(model: nn.Module) -> list[str]:
    """Names of the full-attention modules."""
    found = []
    for name, module in model.named_modules():
        called_so = any("Attention" in cls.__name__ for cls in type(module).__mro__)
        if called_so and {"q_proj", "k_proj"} <= set(module._modules):
            found.append(name)
    return found


def warn_of_attention(found: list[str]) -> None:
    """Warn of full-attention modules: nothing here shards them, and on the rows of one rank they are silently wrong."""
    warnings.warn(
        f"{ATTENTION_WARNING} ({len(found)} modules, the first {found[0]!r}) are left alone and see this rank's "
        "rows only; give them a context parallelism of their own, such as Ulysses or ring attention",
        stacklevel=3,
    )


def attention_kind(model: Any) -> str:
    """What transformers calls the implementation of a model's full attention."""
    return str(getattr(getattr(model, "config", None), "_attn_implementation", None))


def check_positions(kind: str, ranks: int, packed: bool, told_offsets: bool) -> None:
    """Raise ValueError for full attention without position_ids where those that transformers then makes, which count
    the rows of this rank from 0, are not those of the documents.

    packed: whether the rows hold several documents. told_offsets: whether cu_seq_lens_q came, which flash attentions
    read.
    """
    if ranks > 1:
        raise ValueError(
            f"position_ids: got none for a model with full attention, its sequence sharded over {ranks} ranks; pass "
            "this rank's rows of the positions in the whole documents, else rotary embeddings count these rows from 0"
        )
    if packed and not (told_offsets and "flash" in kind):
        raise ValueError(
            f"position_ids: got none for packed documents and a model with full attention ({kind!r}), which would not "
            "tell them apart; pass the positions in the documents, 0 where one begins"
        )
