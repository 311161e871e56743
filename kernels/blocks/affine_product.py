"""One step of a chain of maps by a block: some rows of a state, transposed, times a correction. In fp32.

    S^T M^T        or, for the adjoint, S^T M        M^T [K in, K out]

A warp has a run of the inner dimension and half of the rows, a thread a tile of 8 outputs of K by some rows; the warps'
sums meet in shared memory.
"""

import tilelang.language as T

from flashqla_cp.kernels.blocks.product_shares import COLUMNS, PAD, PARTS


@T.macro
def product_memory(K, slots):
    """M^T of `slots` steps, the states that it meets, and sums."""
    tile = T.alloc_shared((slots, K, K + PAD), "float32")
    state = T.alloc_shared((K, COLUMNS + PAD), "float32")
    partial = T.alloc_shared((PARTS, COLUMNS, K), "float32")
    return tile, state, partial


@T.macro
def multiply(tile, slot, state, partial, thread, shares, adjoint):
    """partial[part] [COLUMNS, K] = the warps' share of S^T M^T, or of S^T M; tile[slot] is M^T, state S."""
    sums = T.alloc_local((shares.wide * 8,), "float32")
    m = T.alloc_local((4 * 8,), "float32")
    s = T.alloc_local((shares.wide,), "float32")
    for i in T.unroll(shares.wide * 8):
        sums[i] = 0.0
    for quad in T.unroll(shares.run // 4):
        for i in T.unroll(8):
            for e in T.vectorized(4):
                if adjoint:  # 4 inner ones of output i
                    m[i * 4 + e] = tile[
                        slot,
                        i * shares.groups + thread % shares.groups,
                        shares.part(thread) * shares.run + quad * 4 + e,
                    ]
                else:  # 4 outputs by an inner one
                    m[i * 4 + e] = tile[
                        slot,
                        shares.part(thread) * shares.run + quad * 4 + i // 2,
                        i % 2 * (shares.K // 2) + thread % shares.groups * 4 + e,
                    ]
        for r in T.unroll(4):
            for e in T.vectorized(shares.wide):
                s[e] = state[shares.part(thread) * shares.run + quad * 4 + r, shares.column(thread) + e]
            for v in T.unroll(shares.wide):
                for i in T.unroll(8):
                    if adjoint:
                        sums[v * 8 + i] = sums[v * 8 + i] + m[i * 4 + r] * s[v]
                    else:
                        sums[v * 8 + i] = sums[v * 8 + i] + m[r * 8 + i] * s[v]
    for v in T.unroll(shares.wide):
        if adjoint:
            for i in T.unroll(8):
                partial[shares.part(thread), shares.column(thread) + v, i * shares.groups + thread % shares.groups] = (
                    sums[v * 8 + i]
                )
        else:
            for half in T.unroll(2):
                for e in T.vectorized(4):
                    partial[
                        shares.part(thread),
                        shares.column(thread) + v,
                        half * (shares.K // 2) + thread % shares.groups * 4 + e,
                    ] = sums[v * 8 + half * 4 + e]


@T.macro
def product(tile, slot, state, partial, thread, shares, adjoint):
    """What `multiply` says, once this thread's copies have come; then M^T and `state` may be written again."""
    T.sync_threads()
    multiply(tile, slot, state, partial, thread, shares, adjoint)
    T.sync_threads()
