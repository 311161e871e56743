"""One step of a chain of maps by a block: some rows of a state, transposed, times a correction. To fp32 rounding.

    S^T M^T        or, for the adjoint, S^T M        M^T [K in, K out]

By mma.sync in TF32, three products for one: with x = x_high + x_low, x_high rounded to what the tensor cores read,

    s m = s_low m_high + s_high m_low + s_high m_high        leaves out s_low m_low, 2^-22 of s m, and what the tensor
                                                             cores ignore of the low parts, 2^-21

A warp has 32 outputs and half of the inner dimension, which the registers of its lanes hold: every number of M is read
once, from global memory, and split by one warp. As soon as a step has used a number, that of the step behind takes its
place. S, which many warps read, is split once, as it is put in shared memory; there the two halves' sums meet, too.
Tensor cores cut off what they add to a sum, so sums of 16 inner numbers are made apart and added with rounding.

The order of the inner dimension and of the outputs is free where both operands agree: of 16 inner numbers, two steps of
mma.sync, thread t of the 4 that share a row has 4 t to 4 t + 3, and column n of tile j is output 4 n + j. So what a
lane reads, and what it finishes, are 4 numbers side by side.
"""

import tilelang.language as T

from flashqla_cp.kernels.blocks.product_shares import INNER, OUTPUTS, VECTOR, WARP
from flashqla_cp.kernels.blocks.small_products import add_tile, nearest_tf32

STATE_PAD = 4  # numbers behind a line: with these the vectors that a quarter of a warp reads lie in different banks
TILES = OUTPUTS // 8  # of mma.sync, along a warp's outputs


def product_registers(shares):
    """This thread's numbers of M^T."""
    return T.alloc_local((OUTPUTS * shares.inner // WARP,), "float32")


@T.macro
def product_memory(shares):
    """S^T as a left operand has it: a line has rows n and n + 8 of a tile; of two numbers side by side in both rows
    the high parts, then the low ones. And the sums that one half of the warps finishes for the other."""
    state = T.alloc_shared((shares.columns // 2, 4 * shares.K + STATE_PAD), "float32")
    halves = T.alloc_shared((2, shares.finished // VECTOR, shares.threads // 2, VECTOR), "float32")
    return state, halves


def _number(maps, where, i, j):
    """M^T[i, j] of one of `maps`, which start at `where`: (row, head), or (line,) where they lie below each other."""
    return maps[(*where, i, j)] if len(where) > 1 else maps[where[0] + i, j]


@T.macro
def bring(m, run, maps, where, thread, shares, adjoint):
    """Start to read this thread's numbers of M^T of a run of INNER."""
    inner = shares.first_inner(thread) + run * INNER + thread % 4 * VECTOR
    output = shares.first_output(thread) + thread % WARP // 4 * VECTOR
    for i in T.unroll(VECTOR):
        for e in T.vectorized(VECTOR):
            if adjoint:
                m[(run * VECTOR + i) * VECTOR + e] = _number(maps, where, output + i, inner + e)
            else:
                m[(run * VECTOR + i) * VECTOR + e] = _number(maps, where, inner + i, output + e)


@T.macro
def bring_all(m, maps, where, thread, shares, adjoint):
    """Of all runs."""
    for run in T.unroll(shares.runs):
        bring(m, run, maps, where, thread, shares, adjoint)


@T.macro
def split(x, high, low, count):
    """x[i] as the sum of two numbers, the first of which the tensor cores read whole. The second one is not rounded:
    where x is the NaN that a GPU makes, all of whose bits are set, rounding makes 0 of both."""
    for i in T.unroll(count):
        high[i] = T.reinterpret(T.reinterpret(nearest_tf32(x[i]), "uint32") & T.cast(0xFFFFE000, "uint32"), "float32")
        low[i] = x[i] - high[i]


@T.macro
def place(held, state, thread, shares):
    """Put this thread's finished numbers of S^T where the next product reads them."""
    pair, high, low = (T.alloc_local((4,), "float32") for _ in range(3))
    for t in T.unroll(shares.tiles):
        for side in T.unroll(VECTOR // 2):
            for i in T.unroll(4):
                pair[i] = held[(2 * t + i % 2) * VECTOR + 2 * side + i // 2]
            split(pair, high, low, 4)
            slot = shares.output(thread) // INNER * 8 + side * 4 + shares.output(thread) % INNER // VECTOR
            for e in T.vectorized(4):
                state[shares.line(thread, t), slot * 8 + e] = high[e]
            for e in T.vectorized(4):
                state[shares.line(thread, t), slot * 8 + 4 + e] = low[e]


@T.macro
def add_tiles(left, right, sums, shares):
    """sums += left right of a warp's tiles."""
    for t in T.unroll(shares.tiles):
        for j in T.unroll(TILES):
            add_tile(left, 4 * t, right, 2 * j, sums, (t * TILES + j) * 4)


@T.macro
def multiply(state, m, sums, thread, shares, adjoint, follows, maps, where):
    """sums = a warp's share of the product; then m is of the map at `where`, if one follows."""
    b, b_high, b_low = (T.alloc_local((2 * TILES,), "float32") for _ in range(3))  # 2 inner ones of all tiles
    s_high, s_low = (T.alloc_local((4 * shares.tiles,), "float32") for _ in range(2))  # 2 inner ones of 2 rows
    apart = T.alloc_local((shares.tiles * TILES * 4,), "float32")  # of a run
    for i in T.unroll(shares.tiles * TILES * 4):
        sums[i] = 0.0
    for run in T.unroll(shares.runs):
        for i in T.unroll(shares.tiles * TILES * 4):
            apart[i] = 0.0
        for half in T.unroll(2):
            slot = (shares.first_inner(thread) // INNER + run) * 8 + half * 4 + thread % 4
            for t in T.unroll(shares.tiles):
                for e in T.vectorized(4):
                    s_high[4 * t + e] = state[shares.line(thread, t), slot * 8 + e]
                for e in T.vectorized(4):
                    s_low[4 * t + e] = state[shares.line(thread, t), slot * 8 + 4 + e]
            for j in T.unroll(TILES):
                for i in T.unroll(2):
                    if adjoint:
                        b[2 * j + i] = m[(run * VECTOR + j) * VECTOR + 2 * half + i]
                    else:
                        b[2 * j + i] = m[(run * VECTOR + 2 * half + i) * VECTOR + j]
            split(b, b_high, b_low, 2 * TILES)
            add_tiles(s_low, b_high, apart, shares)
            add_tiles(s_high, b_low, apart, shares)
            add_tiles(s_high, b_high, apart, shares)
        for i in T.unroll(shares.tiles * TILES * 4):
            sums[i] = T.if_then_else(run == 0, apart[i], sums[i] + apart[i])
        if follows == 1:
            bring(m, run, maps, where, thread, shares, adjoint)


@T.macro
def product(shared, m, finished, thread, shares, adjoint, follows, maps, where):
    """finished = this thread's numbers of S^T M^T, or of S^T M, of what was placed and brought; then `state` may be
    written again, and m is of the map at `where`, if one follows."""
    state, halves = shared
    sums = T.alloc_local((shares.tiles * TILES * 4,), "float32")
    vector = T.alloc_local((VECTOR,), "float32")
    # A thread finishes the columns of one parity, in both rows.
    part = T.alloc_var("int32", init=shares.part(thread))
    partner = thread % (shares.threads // 2)
    T.sync_threads()
    multiply(state, m, sums, thread, shares, adjoint, follows, maps, where)
    for v in T.unroll(shares.finished // VECTOR):
        for j in T.unroll(VECTOR):
            at = (v // 2 * TILES + j) * 4 + v % 2 * 2
            vector[j] = T.if_then_else(part == 0, sums[at + 1], sums[at])
            finished[v * VECTOR + j] = T.if_then_else(part == 0, sums[at], sums[at + 1])
        for e in T.vectorized(VECTOR):
            halves[part, v, partner, e] = vector[e]
    T.sync_threads()
    for v in T.unroll(shares.finished // VECTOR):
        for e in T.vectorized(VECTOR):
            vector[e] = halves[1 - part, v, partner, e]
        for j in T.unroll(VECTOR):
            finished[v * VECTOR + j] = finished[v * VECTOR + j] + vector[j]
