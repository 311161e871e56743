"""ShardPlan: which rank owns which tokens of the stream. Frozen, checks itself, equal on every rank."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from flashqla_cp.parallel.foreign import taken_over
from flashqla_cp.parallel.fragments import Fragments, Owners, Range, cut_documents, merge_touching

LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document", "custom")


def _near_equal(start: int, end: int, parts: int) -> list[Range]:
    """Cut [start, end) into parts whose lengths differ by at most one token."""
    cuts = [start + (end - start) * i // parts for i in range(parts + 1)]
    return list(pairwise(cuts))


def _fold_zigzag(parts: Sequence[Range], world_size: int) -> list[list[Range]]:
    """Give part r and part 2P-1-r of 2P parts to rank r, in that order."""
    return [[parts[rank], parts[2 * world_size - 1 - rank]] for rank in range(world_size)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """Who owns which tokens.

    cu_seqlens: offsets of the documents in the stream, N+1 integers that start at 0 and never decrease.
    num_tokens: length of the stream, padded tail included. ranges: per rank the (start, end) ranges it stores, in the
    order in which it stores them; together they tile [0, num_tokens) exactly once. layout: the rule that made them.

    Raises ValueError when offsets or ranges break these rules.
    """

    cu_seqlens: tuple[int, ...]
    num_tokens: int
    ranges: tuple[tuple[Range, ...], ...]
    layout: str = "custom"
    owners: Owners = field(init=False, compare=False, repr=False)
    fragments: Fragments = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_offsets(self.cu_seqlens, self.num_tokens)
        _check_tiling(self.ranges, self.num_tokens)
        object.__setattr__(self, "ranges", tuple(merge_touching(owned) for owned in self.ranges))
        object.__setattr__(self, "owners", Owners.of(self.ranges))
        offsets = torch.tensor(self.cu_seqlens, dtype=torch.int64, device="cpu")
        object.__setattr__(self, "fragments", cut_documents(offsets, self.owners))

    @classmethod
    def build(
        cls,
        layout: str,
        cu_seqlens: Sequence[int],
        world_size: int,
        num_tokens: int | None = None,
        token_ranges: Sequence[Sequence[Range]] | None = None,
    ) -> ShardPlan:
        """Make the plan of a named layout. token_ranges goes with layout="custom" and only with it."""
        if layout not in LAYOUTS:
            raise ValueError(f"layout: got {layout!r}, expected one of {LAYOUTS}")
        if (token_ranges is not None) != (layout == "custom"):
            need = "required by" if token_ranges is None else "only allowed with"
            raise ValueError(f'token_ranges: {need} layout="custom", got layout={layout!r}')
        offsets = tuple(int(offset) for offset in cu_seqlens)
        check_offsets(offsets, num_tokens)
        total = offsets[-1] if num_tokens is None else num_tokens
        if token_ranges is not None:
            ranges = _as_ranges(token_ranges, world_size)
        elif layout == "contiguous":
            ranges = [[part] for part in _near_equal(0, total, world_size)]
        elif layout == "zigzag":
            ranges = _fold_zigzag(_near_equal(0, total, 2 * world_size), world_size)
        else:
            ranges = [[] for _ in range(world_size)]
            for start, end in pairwise((*offsets, total)):
                for rank, pair in enumerate(_fold_zigzag(_near_equal(start, end, 2 * world_size), world_size)):
                    ranges[rank].extend(pair)
        return cls(cu_seqlens=offsets, num_tokens=total, ranges=tuple(tuple(owned) for owned in ranges), layout=layout)

    @property
    def world_size(self) -> int:
        return len(self.ranges)

    @property
    def num_documents(self) -> int:
        return len(self.cu_seqlens) - 1

    def local_tokens(self, rank: int) -> int:
        """Number of tokens that a rank stores, padding included."""
        return sum(end - start for start, end in self.ranges[rank])

    def entry_documents(self, rank: int) -> list[int]:
        """Documents whose first token a rank owns, ascending; it reads their initial state. Empty ones: see below."""
        begins = ~self.fragments.has_predecessor & (self.fragments.rank == rank)
        return sorted(self.fragments.document[begins].tolist() + self.empty_documents(rank))

    def exit_documents(self, rank: int) -> list[int]:
        """Documents whose last token a rank owns, ascending; it returns their final state. Empty ones: see below."""
        ends = ~self.fragments.has_successor & (self.fragments.rank == rank)
        return sorted(self.fragments.document[ends].tolist() + self.empty_documents(rank))

    def empty_documents(self, rank: int) -> list[int]:
        """Empty documents whose state a rank looks after.

        No rank owns a token of them. The owner of the token at their offset stands in or, at the end of the stream,
        the owner of the last token; rank 0 when the stream has no token.
        """
        empty = [doc for doc, (start, end) in enumerate(pairwise(self.cu_seqlens)) if start == end]
        if not empty or not self.num_tokens:
            return empty if rank == 0 else []
        places = torch.tensor([min(self.cu_seqlens[doc], self.num_tokens - 1) for doc in empty], device="cpu")
        keeper = self.owners.locate(places)[0].tolist()
        return [doc for doc, owner in zip(empty, keeper, strict=True) if owner == rank]

    def digest(self) -> bytes:
        """32 bytes that differ between plans that differ."""
        text = repr((self.cu_seqlens, self.num_tokens, self.ranges))
        return hashlib.sha256(text.encode()).digest()


def check_offsets(offsets: Sequence[int], num_tokens: int | None, name: str = "cu_seqlens") -> None:
    """Raise ValueError unless offsets start at 0, never decrease and end within num_tokens (None: any length)."""
    if len(offsets) < 1 or offsets[0] != 0:
        raise ValueError(f"{name}: expected offsets that start at 0, got {_short(offsets)}")
    for index, (left, right) in enumerate(pairwise(offsets)):
        if right < left:
            raise ValueError(f"{name}: offsets decrease at index {index + 1}, from {left} to {right}")
    if num_tokens is not None and offsets[-1] > num_tokens:
        raise ValueError(f"{name}: ends at {offsets[-1]}, past the {num_tokens} tokens there are")


def read_offsets(cu_seqlens: torch.Tensor | Sequence[int], name: str = "cu_seqlens") -> list[int]:
    """Offsets as Python integers; copies from the device if they live there. Raises TypeError or ValueError unless they
    are 1-D integers with values."""
    offsets = offsets_tensor(cu_seqlens, name)
    if offsets.device.type == "meta":
        raise ValueError(f"{name}: is on meta, which has no values; pass offsets on the CPU or a GPU")
    return offsets.tolist()


def offsets_tensor(cu_seqlens: torch.Tensor | Sequence[int], name: str = "cu_seqlens") -> torch.Tensor:
    """Offsets as a tensor, where they live; values unread. Raises TypeError or ValueError unless 1-D integers."""
    refuse_dtensor(cu_seqlens, name)
    cu_seqlens = taken_over(cu_seqlens, name)
    if not isinstance(cu_seqlens, torch.Tensor):
        try:
            dtype = None if len(cu_seqlens) else torch.int64
            cu_seqlens = torch.as_tensor(cu_seqlens, dtype=dtype, device="cpu")
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            raise TypeError(f"{name}: expected integer offsets [N+1], got {cu_seqlens!r:.80}: {error}") from error
    if cu_seqlens.dtype.is_floating_point or cu_seqlens.dtype.is_complex or cu_seqlens.dtype == torch.bool:
        raise TypeError(f"{name}: expected integers, got {cu_seqlens.dtype}")
    if cu_seqlens.ndim != 1:
        raise ValueError(f"{name}: expected offsets of shape [N+1], got {list(cu_seqlens.shape)}")
    return cu_seqlens


def offsets_to_read(cu_seqlens: Any, cu_seqlens_cpu: Any) -> tuple[Any, str]:
    """The offsets that count, and their argument's name: those on the CPU where they are given, else cu_seqlens.

    Raises TypeError or ValueError where cu_seqlens cannot be what the other is a copy of, as far as that costs no
    waiting for a device: dtype, shape and length, and values where both are on the CPU and not being traced.
    """
    if cu_seqlens_cpu is None:
        return cu_seqlens, "cu_seqlens"
    if cu_seqlens is None or cu_seqlens is cu_seqlens_cpu:  # one capsule cannot be taken over for both
        return cu_seqlens_cpu, "cu_seqlens_cpu"
    there, here = offsets_tensor(cu_seqlens, "cu_seqlens"), offsets_tensor(cu_seqlens_cpu, "cu_seqlens_cpu")
    if len(there) != len(here):
        raise ValueError(f"cu_seqlens: has {len(there)} offsets, expected the {len(here)} of cu_seqlens_cpu, its copy")
    if there.device.type == here.device.type == "cpu" and not torch.compiler.is_compiling():
        left, right = there.tolist(), here.tolist()
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            if a != b:
                raise ValueError(f"cu_seqlens: is {a} at index {index}, expected {b} as in cu_seqlens_cpu, its copy")
    return here, "cu_seqlens_cpu"


def refuse_dtensor(value: object, name: str) -> None:
    """Raise TypeError for a DTensor, told by what only it has, so that its slow module need not be loaded."""
    if hasattr(value, "to_local") and hasattr(value, "device_mesh"):
        raise TypeError(f"{name}: DTensor is not supported; pass its local shard, value.to_local()")


def _short(values: Sequence[int]) -> str:
    return str(list(values)) if len(values) <= 8 else f"{list(values[:6])} and {len(values) - 6} more"


def _as_ranges(token_ranges: Sequence[Sequence[Range]], world_size: int) -> list[list[Range]]:
    expected = "expected a list of (start, end) pairs of integers for each rank"
    if not isinstance(token_ranges, Sequence) or not all(isinstance(owned, Sequence) for owned in token_ranges):
        raise TypeError(f"token_ranges: {expected}, got {token_ranges!r:.80}")
    if len(token_ranges) != world_size:
        raise ValueError(f"token_ranges: got {len(token_ranges)} lists, expected one per rank, {world_size}")
    ranges = []
    for rank, owned in enumerate(token_ranges):
        pairs = []
        for pair in owned:
            if not isinstance(pair, Sequence) or len(pair) != 2:
                raise ValueError(f"token_ranges[{rank}]: expected (start, end) pairs, got {pair!r:.80}")
            try:
                pairs.append((operator.index(pair[0]), operator.index(pair[1])))
            except TypeError as error:
                raise TypeError(f"token_ranges[{rank}]: expected integers, got {pair!r:.80}") from error
        ranges.append(pairs)
    return ranges


def _check_tiling(ranges: Sequence[Sequence[Range]], num_tokens: int) -> None:
    spans = []
    for rank, owned in enumerate(ranges):
        for start, end in owned:
            if start > end or start < 0:
                raise ValueError(f"token_ranges[{rank}]: range ({start}, {end}) is not a range of tokens")
            if end > start:
                spans.append((start, end, rank))
    reached = 0
    for start, end, rank in sorted(spans):
        if start > reached:
            raise ValueError(f"token_ranges: no rank owns tokens {reached} to {start}")
        if start < reached:
            raise ValueError(f"token_ranges[{rank}]: range ({start}, {end}) overlaps tokens that are owned already")
        reached = end
    if reached != num_tokens:
        problem = "no rank owns" if reached < num_tokens else "the stream does not have"
        raise ValueError(f"token_ranges: {problem} tokens {min(reached, num_tokens)} to {max(reached, num_tokens)}")
