"""Chunks and segments of a set of chains, as the kernels read them.

Sizes that the host must know, to allocate and to launch, are bounds made from numbers of tokens and chains; the tables
themselves are made on the device from the chains' ends, so that offsets on a GPU are never read back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from flashqla_cp.kernels import tuning
from flashqla_cp.kernels.arch import Arch
from flashqla_cp.kernels.blocks import segments as column
from flashqla_cp.kernels.chunks import CHUNK
from flashqla_cp.kernels.host.launcher import launch, spec_of

# It looks at every way to cut. typed: NumPy's integers equal Python's, but no kernel need take them.
segment_chunks = lru_cache(maxsize=1024, typed=True)(tuning.segment_chunks)


class TableSizes(NamedTuple):
    """Rows of the tables, bounds that need no offset: see Tables."""

    most: int
    divided: bool
    chunks: int
    segments: int
    rows: int

    @classmethod
    def of(
        cls,
        num_tokens: int,
        num_chains: int,
        *,
        num_v_heads: int,
        processors: int,
        exchanged: bool = False,
        num_cut: int | None = None,
        longest: int | None = None,
        trains: bool = True,
    ) -> TableSizes:
        """Sizes for chains of num_tokens in all and `longest` at most; exchanged: num_cut of them go on elsewhere, at
        their end or at their beginning, all of them if None; trains: whether a backward follows, which wants finer
        segments."""
        most = segment_chunks(num_tokens, num_v_heads, processors, trains)
        chunks = num_tokens // CHUNK + num_chains
        divided = exchanged or -(-(num_tokens if longest is None else longest) // CHUNK) > most
        cut = 0 if not exchanged else num_chains if num_cut is None else num_cut
        rows = chunks // most + cut if divided else 0
        return cls(most=most, divided=divided, chunks=chunks, segments=chunks // most + num_chains, rows=max(rows, 1))


class Tables(NamedTuple):
    """Chunks and segments of chains; rows past the last are ghosts.

    num_tokens: rows of the tensors. num_chains: documents, or fragments of them. most: chunks of a segment at most.
    divided: whether any chain may have more than one segment. chunks int32 [chunks, 2], segments int32 [segments, 9],
    links and back_links int32 [rows, 3], of states and gradients (the same tensor without an exchange): see
    kernels/blocks/segments.py. end int32 [chains]: where the chains end, as it was given.
    """

    num_tokens: int
    num_chains: int
    most: int
    divided: bool
    chunks: torch.Tensor
    segments: torch.Tensor
    links: torch.Tensor
    back_links: torch.Tensor
    end: torch.Tensor

    @classmethod
    def of(
        cls,
        start: torch.Tensor,
        end: torch.Tensor,
        num_tokens: int,
        arch: Arch,
        *,
        num_v_heads: int,
        processors: int,
        exchanged: tuple[torch.Tensor, torch.Tensor] | None = None,
        num_cut: int | None = None,
        longest: int | None = None,
        trains: bool = True,
    ) -> Tables:
        """Tables of chains [start, end), int32 [chains] on the device of the tensors.

        exchanged: int32 [chains] twice, chains that emit (their last segment's map is wanted too) and chains that
        receive (so is their first segment's gradient map), or None where no chain can. num_cut: how many emit or how
        many receive, whichever is more, if known. longest: tokens of the longest chain, if known; processors:
        multiprocessors to keep busy; trains: whether a backward follows.
        """
        chains = start.shape[0]
        size = TableSizes.of(
            num_tokens,
            chains,
            num_v_heads=num_v_heads,
            processors=processors,
            exchanged=exchanged is not None,
            num_cut=num_cut,
            longest=longest,
            trains=trains,
        )
        table = start.new_empty
        links = table(size.rows, column.LINK_COLUMNS)
        made = cls(
            num_tokens=num_tokens,
            num_chains=chains,
            most=size.most,
            divided=size.divided,
            chunks=table(size.chunks, column.CHUNK_COLUMNS),
            segments=table(size.segments, column.COLUMNS),
            links=links,
            back_links=links if exchanged is None else torch.empty_like(links),
            end=end,
        )
        base = table(3 if exchanged is None else 4, chains + 1)
        ends = start, end, *((start, end) if exchanged is None else exchanged)  # the kernel without never reads these
        spec = spec_of("tables", arch.name, exchange=exchanged is not None)
        launch(spec, *ends, base, made.chunks, made.segments, made.links, made.back_links, num_tokens, size.most)
        return made

    def rows_of(self, length: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        """Carried rows of chains of known lengths, as the table kernel counts them: of states, where `more` says
        which chains emit, or of gradients, where it says which receive."""
        pieces = self.pieces_of(length)
        return torch.where(pieces > 0, pieces - 1 + more, 0)

    def pieces_of(self, length: torch.Tensor) -> torch.Tensor:
        """Segments of chains of known lengths, as the table kernel counts them."""
        chunks = (length + CHUNK - 1) // CHUNK
        return (chunks + self.most - 1) // self.most


def tables_of_batch(
    batch: int, length: int, arch: Arch, num_v_heads: int, processors: int, trains: bool, device: torch.device
) -> Tables:
    """Tables of `batch` documents of one length. Made of nothing but these numbers, so they may be kept.

    By stream, for nothing else orders another one behind the kernel that fills them. Not while a CUDA graph is
    captured: its memory is the graph's, and nothing is computed before it is replayed.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _make_batch(batch, length, arch, num_v_heads, processors, trains, device)
    return _kept_batch(batch, length, arch, num_v_heads, processors, trains, device, stream_of(device))


def _make_batch(
    batch: int, length: int, arch: Arch, num_v_heads: int, processors: int, trains: bool, device: torch.device
) -> Tables:
    with torch.inference_mode(False):
        ends = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
        return Tables.of(
            ends[:-1],
            ends[1:],
            batch * length,
            arch,
            num_v_heads=num_v_heads,
            processors=processors,
            longest=length,
            trains=trains,
        )


@lru_cache(maxsize=64)
def _kept_batch(
    batch: int,
    length: int,
    arch: Arch,
    num_v_heads: int,
    processors: int,
    trains: bool,
    device: torch.device,
    stream: int,
) -> Tables:
    return _make_batch(batch, length, arch, num_v_heads, processors, trains, device)


def stream_of(device: torch.device) -> int:
    """The current stream of a device, as a key."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def to_device(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """int32 numbers on a device, without waiting for it."""
    host = torch.tensor(values, dtype=torch.int32, device="cpu")
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
