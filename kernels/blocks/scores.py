"""Scores of a chunk by one warpgroup with tcgen05, P = scale (Q K^T) exp(G_i - G_j) for j <= i, and the gates beside."""

import tilelang.language as T

from flashqla_cp.kernels.blocks.gates import spread_gate
from flashqla_cp.kernels.blocks.mma import issue
from flashqla_cp.kernels.blocks.tensor_memory import take
from flashqla_cp.kernels.chunks import CHUNK

SCORERS = 128
L2_EPS = 1e-6


@T.macro
def start_scores(q_tile, k_tile, slot, score_sum, scored, q_scale, row, l2norm):
    """Start Q K^T of tiles [stages, CHUNK, K] whose tails are clear; with l2norm leave 1 / |q| in q_scale [CHUNK].

    By all scorers together: on return the sums of the chunk before may be overwritten, and q_scale may be read.
    """
    if l2norm:
        # Two threads a row of Q. Norms are scales of rows, which the decays take in.
        half = q_tile.shape[2] // 2
        part = T.alloc_local((8,), q_tile.dtype)
        square = T.alloc_var("float32", init=0.0)
        for j in T.serial(half // 8):
            for e in T.vectorized(8):
                part[e] = q_tile[slot, row // 2, row % 2 * half + j * 8 + e]
            for e in T.unroll(8):
                square = square + T.cast(part[e], "float32") * T.cast(part[e], "float32")
        square = square + T.shfl_xor(square, 1)
        T.sync_threads(barrier_id=1, arrive_count=SCORERS)  # the last chunk's norms have been read
        if row % 2 == 0:
            q_scale[row // 2] = T.rsqrt(square + L2_EPS)
    # Tails are clear, norms are there, and the last chunk's sums have been read.
    T.tcgen05_before_thread_sync()
    T.sync_threads(barrier_id=1, arrive_count=SCORERS)
    T.tcgen05_after_thread_sync()
    issue(q_tile[slot, :, :], k_tile[slot, :, :], score_sum, scored)


@T.macro
def spread_scores(gate, k_scale, q_scale, grow, read, fade, keep, slot, row, scale, l2norm):
    """Factors of row `row`: those of spread_gate, and read = scale exp(G) / |q|."""
    if row < CHUNK:
        query = T.alloc_var("float32", init=scale)
        if l2norm:
            query = scale * q_scale[row]
        spread_gate(gate, k_scale, grow, fade, keep, slot, row, l2norm)
        read[slot, row] = T.exp2(gate[slot, row]) * query


@T.macro
def finish_scores(score_sum, scored, turn, scores, scores16, p_tile, gate, k_scale, q_scale, slot, scale, l2norm):
    """P of the sums that start_scores began, rounded, to p_tile[slot]. scores, scores16 [CHUNK, CHUNK]: fragments."""
    take(scored, 0, turn)
    T.copy(score_sum, scores)
    for a, b in T.Parallel(CHUNK, CHUNK):
        scores16[a, b] = T.if_then_else(
            a >= b,
            scores[a, b]
            * (T.exp2(gate[slot, a] - gate[slot, b]) * scale * ((q_scale[a] * k_scale[slot, b]) if l2norm else 1.0)),
            0.0,
        )
    T.copy(scores16, p_tile[slot, :, :])
