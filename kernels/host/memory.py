"""Bytes that training on kernels takes, known before the call: pure arithmetic, no GPU."""

from __future__ import annotations

from dataclasses import dataclass

from flashqla_cp.kernels.chunks import CHUNK
from flashqla_cp.kernels.host.backward import slab_parts
from flashqla_cp.kernels.host.tables import TableSizes
from flashqla_cp.kernels.tuning import SCRATCH_BUDGET, head_slabs

WIDE = 4  # bytes of fp32 and int32


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBytes:
    """saved: what a call of the op keeps for its backward beside its inputs. scratch: what the backward allocates and
    gives back, beside the gradients themselves."""

    saved: int
    scratch: int


def training_bytes(
    num_tokens: int,
    num_documents: int,
    *,
    num_heads: int,
    num_v_heads: int,
    head_dim: int,
    processors: int,
    element_size: int = 2,
    l2norm: bool = False,
    exchanged: bool = False,
    num_entries: int = 0,
    longest: int | None = None,
) -> TrainingBytes:
    """Bytes of one call for num_tokens rows (of all the batch) and head_dim = K = V.

    Args:
        num_documents: batch rows, documents or, on a rank of several, the fragments of documents that it holds.
        processors: multiprocessors of the device. element_size: bytes of an element of q, k and v.
        exchanged: with a context that cuts documents. The few states that its exchange keeps are not counted.
        num_entries: states in front of documents: initial states, and those that arrive from other ranks.
        longest: tokens of the longest document, known for equal batch rows and with a context.
    """
    size = TableSizes.of(
        num_tokens,
        num_documents,
        num_v_heads=num_v_heads,
        processors=processors,
        exchanged=exchanged,
        longest=longest,
    )
    state = num_v_heads * head_dim**2 * WIDE
    solved = size.chunks * num_v_heads * (CHUNK * WIDE + CHUNK**2 * element_size + WIDE)
    solved += (size.chunks if l2norm else 1) * num_heads * CHUNK * WIDE
    maps = size.rows * (2 * state + num_v_heads * WIDE) if size.divided else 0
    entries = num_entries * state + (num_documents * WIDE if num_entries else 0)
    head_bytes = sum(slab_parts(size.chunks, head_dim)) * element_size
    slabs = head_slabs(num_v_heads, num_v_heads // num_heads, head_bytes, SCRATCH_BUDGET)
    slab = max(count for _, count in slabs) * head_bytes
    dmaps = size.rows * state * (2 if exchanged else 1) if size.divided else 0
    return TrainingBytes(
        saved=solved + maps + entries,
        scratch=slab + dmaps + 2 * num_tokens * num_v_heads * WIDE,
    )
