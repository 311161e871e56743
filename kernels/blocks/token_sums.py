"""What backward makes of a chunk's rows, a thread a row: norms, tails, and gradients of gates from sums over tokens."""

import tilelang.language as T

from flashqla_cp.kernels.blocks.gates import LEAST_STRENGTH
from flashqla_cp.kernels.blocks.scores import L2_EPS, squared_lengths
from flashqla_cp.kernels.chunks import CHUNK

WARP = 32


@T.macro
def clear_rows_from(tile, slot, length, row, width, dtype):
    """Zero the rows from `length` on of tile[slot] [CHUNK, width]; fences as for clear_tail."""
    if row >= length:
        for j in T.serial(width // 8):
            for e in T.vectorized(8):
                tile[slot, row, j * 8 + e] = T.cast(0.0, dtype)


@T.macro
def put_norms(tile, norm, first, lane, width, dtype):
    """norm = 1 / the lengths of rows first to first + 15 of tile[0], by a warp."""
    low, high = squared_lengths(tile, 0, first, lane, width, dtype)
    if lane % 4 == lane // 8:
        norm[first + lane // 4] = T.rsqrt(low + L2_EPS)
        norm[first + lane // 4 + 8] = T.rsqrt(high + L2_EPS)


@T.macro
def normalize(q_tile, k_tile, q_norm, k_norm, row, width, dtype):
    """Rows of q_tile[0] and k_tile[0] [CHUNK, width] of length 1; norms [CHUNK] = 1 / what their lengths were.

    Two rows at a time hide each other's latency, in a loop that is short: this code runs once a chunk.
    """
    q_part = T.alloc_local((8,), dtype)
    k_part = T.alloc_local((8,), dtype)
    T.sync_warp()  # rows that others cleared
    for part in T.unroll(2):
        put_norms(q_tile, q_norm, row // WARP * WARP + 16 * part, row % WARP, width, dtype)
        put_norms(k_tile, k_norm, row // WARP * WARP + 16 * part, row % WARP, width, dtype)
    T.sync_warp()
    q_factor = T.alloc_var("float32", init=q_norm[row])
    k_factor = T.alloc_var("float32", init=k_norm[row])
    for j in T.unroll(width // 8, annotations={"pragma_unroll_factor": 4}):
        for e in T.vectorized(8):
            q_part[e] = q_tile[0, row, j * 8 + e]
        for e in T.vectorized(8):
            k_part[e] = k_tile[0, row, j * 8 + e]
        for e in T.unroll(8):
            q_part[e] = T.cast(T.cast(q_part[e], "float32") * q_factor, dtype)
            k_part[e] = T.cast(T.cast(k_part[e], "float32") * k_factor, dtype)
        for e in T.vectorized(8):
            q_tile[0, row, j * 8 + e] = q_part[e]
        for e in T.vectorized(8):
            k_tile[0, row, j * 8 + e] = k_part[e]


@T.macro
def finish_gates(p, row, sums, keep, partial, barrier):
    """Gradient of a token's log gate, by CHUNK threads, from sums over the chunk.

    Of what stays in the chunk: what a row reads minus what it gives, added up from the token on. Of what goes to the
    state behind: what the rows in front of the token give. And all that is carried through. No term is added and
    subtracted again, so that strong decay leaves the small ones exact.

    sums: [2, CHUNK] each, half p of them: what a token reads by its query and by its key, what it gives to later rows
    and to the state behind, its share of <S, dS'>. keep [2]: exp(Gc). partial [4]: shared memory.
    """
    read, recalled, given, leaving, carried = sums
    T.sync_threads(barrier_id=barrier, arrive_count=CHUNK)
    slope = T.alloc_var("float32", init=read[p, row] + recalled[p, row] - given[p, row])
    through = T.alloc_var("float32", init=keep[p] * carried[p, row])
    before = T.alloc_var("float32", init=0.0)
    if row % WARP > 0:
        before = leaving[p, row - 1]
    for level in T.unroll(5):
        through = through + T.shfl_xor(through, 16 >> level)
        above = T.alloc_var("float32", init=T.shfl_down(slope, 1 << level))
        if row % WARP + (1 << level) < WARP:
            slope = slope + above
        below = T.alloc_var("float32", init=T.shfl_up(before, 1 << level))
        if row % WARP >= 1 << level:
            before = before + below
    if row % WARP == 0:
        partial[row // WARP] = through
    if row == WARP:
        partial[2] = slope
    if row == WARP - 1:
        partial[3] = before + leaving[p, row]
    T.sync_threads(barrier_id=barrier, arrive_count=CHUNK)
    slope = slope + before + partial[0] + partial[1]
    if row < WARP:
        slope = slope + partial[2]
    else:
        slope = slope + partial[3]
    return slope


@T.macro
def begins_from_nothing(chain, entered, entry_row):
    """1 where a chain begins with no state in front, whatever its first gate is; chain: -1 where none begins."""
    nothing = T.alloc_var("int32", init=0)
    if chain >= 0:
        nothing = 1
        if entered != 0 and entry_row[chain] >= 0:
            nothing = 0
    return nothing


@T.macro
def finish_strength(product, given, dtype, sigmoid, double):
    """Gradient of a write strength or, with `sigmoid`, of its logit. product: dV_i . U_i; given: of the op's beta."""
    strength = T.alloc_var("float32", init=given)
    chained = T.alloc_var("float32", init=1.0)
    if sigmoid:
        strength = 1.0 / (1.0 + T.exp(0.0 - strength))
        chained = strength * (1.0 - strength)
        if double:
            strength = strength * 2.0
            chained = chained * 2.0
    strength = T.if_then_else(strength < LEAST_STRENGTH[dtype], LEAST_STRENGTH[dtype], strength)  # NaN stays
    return product / strength / strength * chained
