"""Bytes that training on kernels takes, known before the call: pure arithmetic, no GPU."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

from flashqla_cp.kernels.chunks import CHUNK
from flashqla_cp.kernels.host.backward import slab_parts
from flashqla_cp.kernels.host.tables import TableSizes
from flashqla_cp.kernels.stages import HEAD_DIMS, RATIOS
from flashqla_cp.kernels.tuning import SCRATCH_BUDGET, head_slabs

WIDE = 4  # bytes of fp32 and int32
ELEMENT_SIZES = (2,)  # of bf16 and fp16, which kernels take
RECOMPUTE = ("none", "solve", "forward")  # what the backward computes again: each keeps less than the one before


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBytes:
    """saved: what a call of the op keeps for its backward beside its inputs. scratch: what the backward holds at most
    beside that and the gradients themselves, and gives back."""

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
    num_cut: int | None = None,
    num_entries: int = 0,
    longest: int | None = None,
    recompute: str = "none",
    strided_do: bool = False,
    num_exits: int = 0,
) -> TrainingBytes:
    """Bytes of one call for num_tokens rows (of all the batch) and head_dim = K = V.

    Args:
        num_documents: batch rows, documents or, on a rank of several, the fragments of documents that it holds.
        processors: multiprocessors of the device. element_size: bytes of an element of q, k and v.
        exchanged: with a context that cuts documents. The few states that its exchange keeps are not counted.
        num_cut: fragments that go on elsewhere, at their end or at their beginning, whichever are more; at most
            num_documents, which is also what None means.
        num_entries: states in front of documents: initial states, and those that arrive from other ranks.
        longest: tokens of the longest document, known for equal batch rows and with a context.
        recompute: of the call.
        strided_do: the gradient of o arrives as a view that kernels cannot read in place, or not at all: expanded, as
            that of o.sum(), or transposed. A copy is made.
        num_exits: final states whose gradient arrives and is copied, since it is not [N, HV, V, K] in fp32.

    Raises ValueError for what no call on kernels has: sizes below 1, value heads that are no multiple of the heads,
    a size of heads or of elements without a kernel, an unknown recompute.
    """
    _check_least(1, num_heads=num_heads, num_v_heads=num_v_heads, processors=processors)
    _check_least(0, num_tokens=num_tokens, num_documents=num_documents, num_entries=num_entries, num_exits=num_exits)
    if num_v_heads % num_heads:
        raise ValueError(
            f"num_v_heads: got {num_v_heads} value heads, expected a multiple of num_heads={num_heads} (HV % H == 0)"
        )
    _check_known("num_v_heads / num_heads", num_v_heads // num_heads, RATIOS)
    _check_known("head_dim", head_dim, HEAD_DIMS)
    _check_known("element_size", element_size, ELEMENT_SIZES)
    _check_known("recompute", recompute, RECOMPUTE)
    if num_cut is not None:
        _check_least(0, num_cut=num_cut)
        if num_cut > num_documents or (num_cut and not exchanged):
            wanted = f"at most num_documents={num_documents}" if exchanged else "0 without exchanged=True"
            raise ValueError(f"num_cut: got {num_cut}, expected {wanted}")
    if longest is not None:
        _check_least(0, longest=longest)
        if longest > num_tokens:
            raise ValueError(f"longest: got {longest}, expected no more than num_tokens={num_tokens}")
    num_tokens, num_documents, num_entries, num_exits = map(int, (num_tokens, num_documents, num_entries, num_exits))
    num_heads, num_v_heads, head_dim, processors = map(int, (num_heads, num_v_heads, head_dim, processors))
    size = TableSizes.of(
        num_tokens,
        num_documents,
        num_v_heads=num_v_heads,
        processors=processors,
        exchanged=exchanged,
        num_cut=None if num_cut is None else int(num_cut),
        longest=None if longest is None else int(longest),
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
    copied = num_exits * state + (num_tokens * num_v_heads * head_dim * element_size if strided_do else 0)
    kept = {"none": solved + maps + entries, "solve": maps + entries, "forward": 0}[recompute]
    again = solved + maps + entries - kept
    return TrainingBytes(
        saved=kept,
        scratch=again + slab + dmaps + copied + 2 * num_tokens * num_v_heads * WIDE,
    )


def _check_least(least: int, **sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, numbers.Integral) or size < least:
            raise ValueError(f"{name}: got {size!r}, expected an integer of at least {least}")


def _check_known(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(map(repr, known))}")
