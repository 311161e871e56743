"""Scores of queries and keys of a chunk, one warpgroup's work one chunk ahead of the recurrence.

A warp has the 16 rows of queries that its tensor core gives it of a product of 64.
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from flashqla_cp.kernels.blocks.chunk_io import normalize_rows
from flashqla_cp.kernels.blocks.gates import normalizes_keys, spread_gate
from flashqla_cp.kernels.chunks import CHUNK as C

L2_EPS = 1e-6
BARRIER = 1  # named, of the warpgroup that scores
SCORERS = 128
MMA_NAMES = {"bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Scored:
    """What scorers read and make, of every stage.

    q, k [stages, C, K]: tiles. gate: G to base 2; k_scale: 1 / |k|, with l2norm; grow = -exp(G) / |k|, read = scale
    exp(G) / |q|, fade = exp(Gc - G) / |k| [stages, C], keep = exp(Gc) [stages], query = scale / |q| and column = G to
    base 2 minus log2(1 / |k|) [2, C], without the norms if not l2norm, without that of k where normalizes_keys. 1 / |k|
    is at most 1000.
    """

    q: Any
    k: Any
    gate: Any
    k_scale: Any
    grow: Any
    read: Any
    fade: Any
    keep: Any
    query: Any
    column: Any


@T.macro
def add_squares(rows, sums, dtype):
    """Add products of 16 columns of rows g and g + 8 with themselves, by mma.sync; lane 4 g + t has 4 numbers of each.

    The order of columns is free, and need not be the same in two rows: only products of a row with itself are wanted.
    They end in lanes of which t = g // 2, in sums[g % 2] and sums[6 + g % 2].
    """
    left = T.alloc_local((8,), dtype)
    right = T.alloc_local((4,), dtype)
    for pair in T.unroll(2):
        for half in T.unroll(2):
            for e in T.vectorized(2):
                left[4 * pair + 2 * half + e] = rows[4 * half + 2 * pair + e]
    for half in T.unroll(2):
        for e in T.vectorized(4):
            right[e] = rows[4 * half + e]
        T.ptx_mma(
            "float32",
            "m16n8k16",
            "row",
            "col",
            MMA_NAMES[dtype],
            MMA_NAMES[dtype],
            "fp32",
            left.data,
            0,
            right.data,
            0,
            sums.data,
            4 * half,
            T.bool(False),
        )


@T.macro
def squared_lengths(tile, slot, first, lane, width, dtype):
    """Squared lengths of rows first + g and first + g + 8 of tile[slot] [C, width], in lanes 4 g + t of t = g // 2."""
    part = T.alloc_local((2, 8), dtype)
    rows = T.alloc_local((8,), dtype)
    sums = T.alloc_local((8,), "float32")
    for i in T.unroll(8):
        sums[i] = 0.0
    for j in T.unroll(width // 32):
        for half in T.unroll(2):
            for e in T.vectorized(8):
                # Rows side by side begin with the other half of a line of 64, so that no bank is met twice.
                part[half, e] = tile[
                    slot,
                    first + lane // 4 + 8 * half,
                    j // 2 * 64 + (j % 2 + lane // 4) % 2 * 32 + lane % 4 * 8 + e,
                ]
        for quad in T.unroll(2):
            for half in T.unroll(2):
                for e in T.vectorized(4):
                    rows[4 * half + e] = part[half, 4 * quad + e]
            add_squares(rows, sums, dtype)
    return (
        T.if_then_else(lane // 4 % 2 == 0, sums[0], sums[1]),
        T.if_then_else(lane // 4 % 2 == 0, sums[6], sums[7]),
    )


@T.macro
def spread_rows(x, slot, turn, thread, scale, l2norm):
    """Factors of all rows of a chunk, by all scorers. Rows of Q that a document does not have may hold anything."""
    first = T.alloc_var("int32", init=thread // 32 * 16)  # of the warp's rows
    lane = T.alloc_var("int32", init=thread % 32)
    query = T.alloc_local((2,), "float32")
    query[0] = scale
    query[1] = scale
    if l2norm:
        low, high = squared_lengths(x.q, slot, first, lane, x.q.shape[2], x.q.dtype)
        query[0] = scale * T.rsqrt(low + L2_EPS)
        query[1] = scale * T.rsqrt(high + L2_EPS)
    if lane % 4 == lane // 8:
        for half in T.unroll(2):
            x.query[turn, first + lane // 4 + 8 * half] = query[half]
            x.read[slot, first + lane // 4 + 8 * half] = (
                T.exp2(x.gate[slot, first + lane // 4 + 8 * half]) * query[half]
            )
    folds = l2norm and not normalizes_keys(l2norm, x.k.dtype)
    if lane < 16:
        spread_gate(x.gate, x.k_scale, x.grow, x.fade, x.keep, slot, first + lane, folds)
        column = T.alloc_var("float32", init=x.gate[slot, first + lane])
        if folds:
            column = column - T.log2(x.k_scale[slot, first + lane])
        x.column[turn, first + lane] = column


@T.macro
def normalize_keys(x, slot, length, thread, l2norm):
    """Keys in front of `length` of length 1 where no factor holds their norms, by all scorers, before any product."""
    if normalizes_keys(l2norm, x.k.dtype):
        normalize_rows(x.k, x.k_scale, slot, length, thread, SCORERS)
        T.fence_proxy_async()
        T.sync_threads(barrier_id=BARRIER, arrive_count=SCORERS)


@T.macro
def scale_queries(x, slot, thread):
    """Rows of Q times scale exp(G), with l2norm times 1 / |q|, in place, by all scorers, two threads of a warp a row.

    Lanes side by side have rows side by side, and meet no bank twice.
    """
    at = T.alloc_var("int32", init=thread // 32 * 16 + thread % 16)
    half = T.alloc_var("int32", init=thread % 32 // 16)
    factor = T.alloc_var("float32", init=x.read[slot, at])
    width = x.q.shape[2]
    part = T.alloc_local((8,), x.q.dtype)
    for j in T.unroll(width // 16):
        for e in T.vectorized(8):
            part[e] = x.q[slot, at, half * (width // 2) + j * 8 + e]
        for e in T.unroll(8):
            part[e] = T.cast(T.cast(part[e], "float32") * factor, x.q.dtype)
        for e in T.vectorized(8):
            x.q[slot, at, half * (width // 2) + j * 8 + e] = part[e]


@T.macro
def score(x, p_tile, slot, out, turn, thread, scale, l2norm):
    """p_tile[out] [C, C] = scale (Q K^T) exp(G_i - G_j) for j <= i, else 0, and the factors of gates.

    By one warpgroup, with tails of K clear. turn: 0 and 1 in turn. On return no product of this warp reads Q any more.
    """
    scores = T.alloc_fragment((C, C), "float32")
    row_gate = T.alloc_fragment((C,), "float32")
    row_factor = T.alloc_fragment((C,), "float32")
    column_gate = T.alloc_fragment((C,), "float32")
    scores16 = T.alloc_fragment((C, C), p_tile.dtype)
    # The product runs while norms and factors are made.
    T.wgmma_gemm(x.q[slot, :, :], x.k[slot, :, :], scores, transpose_B=True, clear_accum=True)
    T.sync_warp()  # which keeps it in front of them
    spread_rows(x, slot, turn, thread, scale, l2norm)
    T.sync_threads(barrier_id=BARRIER, arrive_count=SCORERS)
    T.copy(x.gate[slot, :], row_gate)
    T.copy(x.column[turn, :], column_gate)
    T.copy(x.query[turn, :], row_factor)
    T.wait_wgmma(0)
    for a, b in T.Parallel(C, C):
        scores16[a, b] = T.if_then_else(
            a >= b,
            scores[a, b] * (T.exp2(row_gate[a] - column_gate[b]) * row_factor[a]),
            0.0,
        )
    T.copy(scores16, p_tile[out, :, :])
