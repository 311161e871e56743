"""Scores of a chunk by one warpgroup with tcgen05: P = scale (Q K^T) exp(G_i - G_j), j <= i, and the gates beside."""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from flashqla_cp.kernels.blocks.gates import alloc_gates, spread_gate
from flashqla_cp.kernels.blocks.mma import issue
from flashqla_cp.kernels.blocks.scores import BARRIER, query_norms
from flashqla_cp.kernels.blocks.tensor_memory import take
from flashqla_cp.kernels.chunks import CHUNK

SCORERS = 128


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Scored:
    """What scorers read and make, of every stage.

    q, k [stages, CHUNK, K] and p [stages, CHUNK, CHUNK]: tiles. gate: G to base 2; k_scale: 1 / |k|, with l2norm;
    grow = -exp(G) / |k|, read = scale exp(G) / |q|, fade = exp(Gc - G) / |k| [stages, CHUNK], keep = exp(Gc) [stages],
    without the norms if not l2norm. q_scale [CHUNK]: 1 / |q|. sums [CHUNK, CHUNK]: tensor memory. done: its barrier.
    """

    q: Any
    k: Any
    p: Any
    gate: Any
    k_scale: Any
    grow: Any
    read: Any
    fade: Any
    keep: Any
    q_scale: Any
    sums: Any
    done: Any


def alloc_scored(stages: int, width: int, dtype: str) -> Scored:
    """Memory for a kernel's scorers; the last of its tensor memory, the size of which must fall."""
    tiles = {name: T.alloc_shared((stages, CHUNK, width), dtype) for name in ("q", "k")}
    tiles["p"] = T.alloc_shared((stages, CHUNK, CHUNK), dtype)  # tiles first: small vectors between them waste memory
    gate, k_scale, grow, fade, keep = alloc_gates(stages)
    return Scored(
        **tiles,
        gate=gate,
        k_scale=k_scale,
        grow=grow,
        read=T.alloc_shared((stages, CHUNK), "float32"),
        fade=fade,
        keep=keep,
        q_scale=T.alloc_shared((CHUNK,), "float32"),
        sums=T.alloc_tmem((CHUNK, CHUNK), "float32"),
        done=T.alloc_barrier([1]),
    )


@T.macro
def start_scores(x, slot, row, scale, l2norm):
    """Start Q K^T of tiles of which K's tail is clear, Q's too with l2norm if it must be; meanwhile spread the gates.

    By all scorers together, `row` is their number. On return the sums of the chunk before have been read by all.
    """
    T.tcgen05_before_thread_sync()
    if l2norm:
        query_norms(x.q, x.q_scale, slot, row, x.q.shape[2], x.q.dtype)
    else:
        T.sync_threads(barrier_id=BARRIER, arrive_count=SCORERS)
    # Tails are clear, norms are there, and the last chunk's sums have been read.
    T.tcgen05_after_thread_sync()
    issue(x.q[slot, :, :], x.k[slot, :, :], x.sums, x.done)
    if row < CHUNK:
        query = T.alloc_var("float32", init=scale)
        if l2norm:
            query = scale * x.q_scale[row]
        spread_gate(x.gate, x.k_scale, x.grow, x.fade, x.keep, slot, row, l2norm)
        x.read[slot, row] = T.exp2(x.gate[slot, row]) * query


@T.macro
def finish_scores(x, slot, turn, scores, scores16, scale, l2norm):
    """P of the sums that start_scores began, rounded, to its tile. scores, scores16 [CHUNK, CHUNK]: fragments."""
    take(x.done, 0, turn)
    T.copy(x.sums, scores)
    for a, b in T.Parallel(CHUNK, CHUNK):
        scores16[a, b] = T.if_then_else(
            a >= b,
            scores[a, b]
            * (
                T.exp2(x.gate[slot, a] - x.gate[slot, b])
                * scale
                * ((x.q_scale[a] * x.k_scale[slot, b]) if l2norm else 1.0)
            ),
            0.0,
        )
    T.copy(scores16, x.p[slot, :, :])
