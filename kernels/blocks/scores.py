"""Scores of queries and keys of a chunk, one warpgroup's work one chunk ahead of the recurrence."""

import tilelang.language as T

from flashqla_cp.kernels.chunks import CHUNK as C

L2_EPS = 1e-6
BARRIER = 1  # named, of the warpgroup that scores


@T.macro
def query_norms(q_tile, q_scale, slot, row, K, dtype):
    """q_scale [C] = 1 / |q| of the rows of q_tile[slot] [C, K], by one warpgroup, two threads a row."""
    part = T.alloc_local((8,), dtype)
    square = T.alloc_var("float32", init=0.0)
    for j in T.serial(K // 16):
        for e in T.vectorized(8):
            part[e] = q_tile[slot, row // 2, row % 2 * (K // 2) + j * 8 + e]
        for e in T.unroll(8):
            square = square + T.cast(part[e], "float32") * T.cast(part[e], "float32")
    square = square + T.shfl_xor(square, 1)
    T.sync_threads(barrier_id=BARRIER, arrive_count=128)
    if row % 2 == 0:
        q_scale[row // 2] = T.rsqrt(square + L2_EPS)
    T.sync_threads(barrier_id=BARRIER, arrive_count=128)


@T.macro
def score(q_tile, k_tile, p_tile, gate, q_scale, k_scale, slot, out, scale, dtype, l2norm):
    """p_tile[out] [C, C] = scale (Q K^T) exp(G_i - G_j) for j <= i, else 0. Norms scale rows, as decays do."""
    log_scale = T.alloc_var("float32", init=T.log2(T.abs(scale)))
    sign = T.alloc_var("float32", init=T.if_then_else(scale < 0.0, -1.0, 1.0))
    scores = T.alloc_fragment((C, C), "float32")
    weight = T.alloc_fragment((C, C), "float32")
    row_gate = T.alloc_fragment((C,), "float32")
    column_gate = T.alloc_fragment((C,), "float32")
    column_scale = T.alloc_fragment((C,), "float32")
    scores16 = T.alloc_fragment((C, C), dtype)
    for a in T.Parallel(C):
        row_gate[a] = gate[slot, a] + log_scale
        if l2norm:
            row_gate[a] = row_gate[a] + T.log2(q_scale[a])
    if l2norm:
        T.copy(k_scale[slot, :], column_scale)
    T.copy(gate[slot, :], column_gate)
    T.wgmma_gemm(q_tile[slot, :, :], k_tile[slot, :, :], scores, transpose_B=True, clear_accum=True)
    for a, b in T.Parallel(C, C):
        weight[a, b] = T.if_then_else(a >= b, sign * T.exp2(row_gate[a] - column_gate[b]), 0.0)
    T.wait_wgmma(0)
    for a, b in T.Parallel(C, C):
        scores16[a, b] = scores[a, b] * weight[a, b] * (column_scale[b] if l2norm else 1.0)
    T.copy(scores16, p_tile[out, :, :])


@T.macro
def scale_rows(tile, factor, slot, row, K, dtype):
    """tile[slot] [C, K]: rows times factor[slot] [C], in place, by one warpgroup."""
    part = T.alloc_local((8,), dtype)
    for j in T.unroll(C * K // (8 * 128)):
        for e in T.vectorized(8):
            part[e] = tile[slot, j * (1024 // K) + row // (K // 8), row % (K // 8) * 8 + e]
        for e in T.unroll(8):
            part[e] = T.cast(T.cast(part[e], "float32") * factor[slot, j * (1024 // K) + row // (K // 8)], dtype)
        for e in T.vectorized(8):
            tile[slot, j * (1024 // K) + row // (K // 8), row % (K // 8) * 8 + e] = part[e]
