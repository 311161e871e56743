"""Scores of a chunk by one warpgroup with tcgen05: P = scale (Q K^T) exp(G_i - G_j), j <= i, and the gates beside."""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from flashqla_cp.kernels.blocks.gates import alloc_gates
from flashqla_cp.kernels.blocks.mma import issue
from flashqla_cp.kernels.blocks.scores import BARRIER, SCORERS, Scored, spread_rows
from flashqla_cp.kernels.blocks.tensor_memory import take
from flashqla_cp.kernels.chunks import CHUNK


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScoredInMemory(Scored):
    """Beside Scored: p [stages, CHUNK, CHUNK], tiles; sums [CHUNK, CHUNK], tensor memory; done, its barrier."""

    p: Any
    sums: Any
    done: Any


def alloc_scored(stages: int, width: int, dtype: str) -> ScoredInMemory:
    """Memory for a kernel's scorers; the last of its tensor memory, the size of which must fall."""
    tiles = {name: T.alloc_shared((stages, CHUNK, width), dtype) for name in ("q", "k")}
    tiles["p"] = T.alloc_shared((stages, CHUNK, CHUNK), dtype)  # tiles first: small vectors between them waste memory
    gate, k_scale, grow, fade, keep = alloc_gates(stages)
    return ScoredInMemory(
        **tiles,
        gate=gate,
        k_scale=k_scale,
        grow=grow,
        read=T.alloc_shared((stages, CHUNK), "float32"),
        fade=fade,
        keep=keep,
        query=T.alloc_shared((2, CHUNK), "float32"),
        column=T.alloc_shared((2, CHUNK), "float32"),
        sums=T.alloc_tmem((CHUNK, CHUNK), "float32"),
        done=T.alloc_barrier([1]),
    )


@T.macro
def start_scores(x, slot, turn, row, scale, l2norm):
    """Start Q K^T of tiles of which K's tail is clear, Q's too with l2norm if it must be; meanwhile make the factors.

    By all scorers together, `row` is their number. On return the sums of the chunk before have been read by all.
    """
    T.tcgen05_before_thread_sync()
    T.sync_threads(barrier_id=BARRIER, arrive_count=SCORERS)
    # Tails are clear, and the last chunk's sums have been read.
    T.tcgen05_after_thread_sync()
    issue(x.q[slot, :, :], x.k[slot, :, :], x.sums, x.done)
    spread_rows(x, slot, turn, row, scale, l2norm)


@T.macro
def finish_scores(x, slot, turn, scores, scores16):
    """P of the sums that start_scores began, rounded, to its tile. scores, scores16 [CHUNK, CHUNK]: fragments."""
    T.sync_threads(barrier_id=BARRIER, arrive_count=SCORERS)
    take(x.done, 0, turn)
    T.copy(x.sums, scores)
    for a, b in T.Parallel(CHUNK, CHUNK):
        scores16[a, b] = T.if_then_else(
            a >= b,
            scores[a, b] * (T.exp2(x.gate[slot, a] - x.column[turn, b]) * x.query[turn, a]),
            0.0,
        )
    T.copy(scores16, x.p[slot, :, :])
