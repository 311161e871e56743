"""The triangular inverse of every chunk, (I + A)^-1 diag(beta), one kernel text for all architectures.

    A_ij = beta_i exp(G_i - G_j) (k_i . k_j)     j < i

A block takes one chunk of one key head. A warpgroup forms K K^T, of which a warp keeps 16 rows; it weighs them for two
value heads at a time, in blocks of 16 columns. Between rows of different blocks the decay is the product of two, from
j to the first row of i's block and from there to i, so that no exponent is ever positive and a column's is made once.
Then two warps per value head substitute down the four diagonal blocks, in fp32, a lane holding one column in registers
and the rows of A being broadcast from shared memory. Products in TF32, operands rounded to nearest, join blocks to
pairs and pairs to the whole:

    [[P, 0], [R, Q]]^-1 = [[P^-1, 0], [-Q^-1 R P^-1, Q^-1]]

Unlike a series in powers of A this never cancels. Rows and columns past the chunk's length are zero.

bound [HV, chunks] is the base-2 logarithm of a bound of ||M|| of the chunk: sum of g_t + log max(1, |1 - beta_t
|k_t|^2|).
Letters: T tokens, C chunk, K key dim, H key heads, HV value heads.
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout

from flashqla_cp.kernels.blocks.gates import LEAST_STRENGTH
from flashqla_cp.kernels.blocks.mma import multiply
from flashqla_cp.kernels.blocks.scores import L2_EPS
from flashqla_cp.kernels.blocks.segments import CHUNK_COLUMNS
from flashqla_cp.kernels.blocks.small_products import (
    HELD,
    SIDE,
    TILES,
    add_product,
    lane_of,
    nearest_tf32,
    place_of,
    round_block,
)
from flashqla_cp.kernels.chunks import CHUNK as C
from flashqla_cp.kernels.spec import KernelSpec

BLOCKS, WARP, THREADS = C // SIDE, 32, 128
LOWER = BLOCKS * (BLOCKS - 1) // 2  # blocks below the diagonal, block (r, c) at r (r - 1) / 2 + c
LINE = SIDE + 4  # numbers from a column of a diagonal block to the next


@dataclass(frozen=True, eq=False, kw_only=True)
class Shared:
    """A block's shared memory. rows: the keys' products, as `spread_rows` says. lower, diagonal: blocks of -A, then of
    its inverse, below the diagonal as small_products.py has them and on it by columns. Vectors: of tokens."""

    rows: Any
    lower: Any
    diagonal: Any
    column_factor: Any
    tile16: Any
    gate: Any
    strength: Any
    square: Any
    norm: Any


def build_solve(spec: KernelSpec):
    """dims: head_dim, ratio (HV / H). dtypes: qkv, beta. flags: l2norm, sigmoid, double."""
    K, ratio, dtype, f32, i32 = spec.dim("head_dim"), spec.dim("ratio"), spec.dtype("qkv"), "float32", "int32"
    l2norm, sigmoid, double = spec.has("l2norm"), spec.has("sigmoid"), spec.has("double")
    least = LEAST_STRENGTH[dtype]
    SLOTS = min(ratio, 2)  # value heads at a time
    tokens, chunks, H, HV = (T.dynamic(n) for n in ("tokens", "chunks", "H", "HV"))
    key_chunks = chunks if l2norm else T.dynamic("key_chunks")
    kt, kh, bt, bh = (T.dynamic(n) for n in ("k_token", "k_head", "beta_token", "beta_head"))

    @T.macro
    def spread_rows(gram, rows, length, lane, warp):
        """rows = gram: 16 rows for each warp, eight columns after eight, each lane's as small_products.py has them.
        Rows past the end are zero."""
        for a, b in T.Parallel(C, C):
            rows[a // SIDE, b // 8, lane_of(a, b), place_of(a, b)] = gram[a, b]
        T.sync_threads()
        if length < C:
            for tile in T.serial(C // 8):
                for e in T.unroll(4):
                    if warp * SIDE + e // 2 * 8 + lane // 4 >= length:
                        rows[warp, tile, lane, e] = 0.0
            T.sync_threads()

    @T.macro
    def measure(x, key_scale, chunk, key_head, length, row):
        """Squares of a key's length, and norms."""
        x.square[row] = x.rows[row // SIDE, row // 8, lane_of(row, row), place_of(row, row)]
        if l2norm:
            x.norm[row] = T.rsqrt(x.square[row] + L2_EPS)
            key_scale[chunk, key_head, row] = T.if_then_else(row < length, x.norm[row], 1.0)  # of a row of length 1

    @T.macro
    def load_gates(x, decay, beta, chunk, head, start, length, works, slot, row):
        """Cumulative gate and write strength of a token; 0 where there is none."""
        weight = T.alloc_var(f32, init=0.0)
        total = T.alloc_var(f32, init=0.0)
        if works == 1:
            total = decay[chunk, head, row]
            if row < length:
                weight = T.cast(beta[start + row, head], f32)
                if sigmoid:
                    weight = 1.0 / (1.0 + T.exp(0.0 - weight))
                    if double:
                        weight = weight * 2.0
                weight = T.if_then_else(weight < least, least, weight)  # NaN stays
        x.gate[slot, row] = total
        x.strength[slot, row] = weight

    @T.macro
    def weigh(x, s, lane, warp):
        """-A of a warp's 16 rows and a value head."""
        y = T.alloc_local((4,), f32)
        factor = T.alloc_local((2,), f32)
        weight = T.alloc_local((2,), f32)
        row_factor = T.alloc_local((2,), f32)
        row_gate = T.alloc_local((2,), f32)
        column_gate = T.alloc_local((2,), f32)
        first = T.alloc_var(f32, init=x.gate[s, warp * SIDE])
        for half in T.unroll(2):
            row_gate[half] = x.gate[s, warp * SIDE + half * 8 + lane // 4]
            weight[half] = 0.0 - x.strength[s, warp * SIDE + half * 8 + lane // 4]
            if l2norm:
                weight[half] = weight[half] * x.norm[warp * SIDE + half * 8 + lane // 4]
            row_factor[half] = weight[half] * T.exp2(row_gate[half] - first)
        for part in T.unroll(2):
            column = T.alloc_var(i32, init=part * WARP + lane)
            if column < warp * SIDE:
                faded = T.alloc_var(f32, init=T.exp2(first - x.gate[s, column]))
                if l2norm:
                    faded = faded * x.norm[column]
                x.column_factor[s, warp, column] = faded
        T.sync_warp()
        for c in T.unroll(BLOCKS - 1):
            if c < warp:
                for tile in T.unroll(TILES):
                    for e in T.vectorized(2):
                        factor[e] = x.column_factor[s, warp, c * SIDE + tile * 8 + lane % 4 * 2 + e]
                    for e in T.vectorized(4):
                        y[e] = x.rows[warp, c * TILES + tile, lane, e]
                    for e in T.unroll(4):
                        y[e] = nearest_tf32(y[e] * factor[e % 2] * row_factor[e // 2])
                    for e in T.vectorized(4):
                        x.lower[s, warp * (warp - 1) // 2 + c, tile, lane, e] = y[e]
        for tile in T.unroll(TILES):
            for e in T.vectorized(2):
                column_gate[e] = x.gate[s, warp * SIDE + tile * 8 + lane % 4 * 2 + e]
            if l2norm:
                for e in T.vectorized(2):
                    factor[e] = x.norm[warp * SIDE + tile * 8 + lane % 4 * 2 + e]
            for e in T.vectorized(4):
                y[e] = x.rows[warp, warp * TILES + tile, lane, e]
            for e in T.unroll(tile * 2, 4):  # the first rows of the second tile are above the diagonal
                y[e] = y[e] * weight[e // 2] * T.exp2(T.min(row_gate[e // 2] - column_gate[e % 2], 0.0))
                if l2norm:
                    y[e] = y[e] * factor[e % 2]
                x.diagonal[s, warp, tile * 8 + lane % 4 * 2 + e % 2, e // 2 * 8 + lane // 4] = T.if_then_else(
                    e // 2 * 8 + lane // 4 > tile * 8 + lane % 4 * 2 + e % 2, y[e], 0.0
                )

    @T.macro
    def substitute(diagonal, slot, number, column, solution):
        """A column of the inverse of a diagonal block, from what is below its diagonal."""
        row = T.alloc_local((4,), f32)
        for i in T.unroll(SIDE):
            solution[i] = T.if_then_else(i == column, 1.0, 0.0)
        for known in T.unroll(SIDE - 1):
            for quad in T.unroll(SIDE // 4):
                if quad * 4 + 3 > known:
                    for e in T.vectorized(4):
                        row[e] = diagonal[slot, number, known, quad * 4 + e]
                    for e in T.unroll(4):
                        if quad * 4 + e > known:
                            solution[quad * 4 + e] = solution[quad * 4 + e] + row[e] * solution[known]

    @T.macro
    def invert_diagonal(x, slot, row):
        """The inverses of the diagonal blocks, of which a lane takes the column of token `row`, and zeros above."""
        solution = T.alloc_local((SIDE,), f32)
        number = T.alloc_var(i32, init=row // SIDE)
        weight = T.alloc_var(f32, init=x.strength[slot, row])
        for vector in T.unroll(SIDE // 8, C // 8):
            if vector >= (number + 1) * (SIDE // 8):
                for e in T.vectorized(8):
                    x.tile16[slot, row, vector * 8 + e] = T.cast(0.0, dtype)
        substitute(x.diagonal, slot, number, row % SIDE, solution)
        T.sync_warp()
        for i in T.unroll(SIDE):
            x.tile16[slot, number * SIDE + i, row] = T.cast(solution[i] * weight, dtype)
        for i in T.unroll(SIDE):
            solution[i] = nearest_tf32(solution[i])
        for quad in T.unroll(SIDE // 4):
            for e in T.vectorized(4):
                x.diagonal[slot, number, row % SIDE, quad * 4 + e] = solution[quad * 4 + e]
        T.sync_warp()

    @T.macro
    def load_block(lower, slot, number, lane, y):
        """y = a block below the diagonal."""
        for tile in T.unroll(TILES):
            for e in T.vectorized(4):
                y[tile * 4 + e] = lower[slot, number, tile, lane, e]

    @T.macro
    def load_columns(diagonal, slot, number, lane, y):
        """y = the transpose of a diagonal block's inverse, which is kept by columns."""
        for i in T.unroll(HELD // 2):
            for e in T.vectorized(2):
                y[i * 2 + e] = diagonal[slot, number, i % 2 * 8 + lane // 4, i // 2 * 8 + lane % 4 * 2 + e]

    @T.macro
    def load_rows(diagonal, slot, number, lane, y):
        """y = a diagonal block's inverse."""
        for i in T.unroll(HELD // 2):
            for e in T.unroll(2):
                y[i * 2 + e] = diagonal[slot, number, i // 2 * 8 + lane % 4 * 2 + e, i % 2 * 8 + lane // 4]

    @T.macro
    def put_block(x, slot, r, c, lane, y):
        """Block (r, c) of the result: y diag(beta), rounded."""
        weight = T.alloc_local((2,), f32)
        for tile in T.unroll(TILES):
            for e in T.vectorized(2):
                weight[e] = x.strength[slot, c * SIDE + tile * 8 + lane % 4 * 2 + e]
            for half in T.unroll(2):
                for e in T.vectorized(2):
                    x.tile16[slot, r * SIDE + half * 8 + lane // 4, c * SIDE + tile * 8 + lane % 4 * 2 + e] = T.cast(
                        y[tile * 4 + half * 2 + e] * weight[e], dtype
                    )

    @T.macro
    def join_pair(x, slot, pair, lane):
        """The block between two diagonal ones, 2 pair and 2 pair + 1. It takes the place of -A, in the first pair
        transposed, as join_halves reads it."""
        left = T.alloc_local((HELD,), f32)
        right = T.alloc_local((HELD,), f32)
        product = T.alloc_local((HELD,), f32)
        joined = T.alloc_local((HELD,), f32)
        T.clear(product)
        T.clear(joined)
        load_columns(x.diagonal, slot, pair * 2, lane, left)
        load_block(x.lower, slot, pair * (LOWER - 1), lane, right)
        add_product(left, right, product)  # the transpose of -R P^-1
        round_block(product)
        load_rows(x.diagonal, slot, pair * 2 + 1, lane, left)
        add_product(left, product, joined)
        put_block(x, slot, pair * 2 + 1, pair * 2, lane, joined)
        if pair == 0:
            T.clear(joined)
            add_product(product, left, joined)
        round_block(joined)
        for tile in T.unroll(TILES):
            for e in T.vectorized(4):
                x.lower[slot, pair * (LOWER - 1), tile, lane, e] = joined[tile * 4 + e]

    @T.macro
    def join_halves(x, slot, c, lane):
        """Blocks (2, c) and (3, c) of the inverse, c < 2."""
        left = T.alloc_local((HELD,), f32)
        right = T.alloc_local((HELD,), f32)
        upper = T.alloc_local((HELD,), f32)  # transposes of rows 2 and 3 of -R P^-1
        under = T.alloc_local((HELD,), f32)
        joined = T.alloc_local((HELD,), f32)
        T.clear(upper)
        T.clear(under)
        T.clear(joined)
        load_columns(x.diagonal, slot, c, lane, left)
        load_block(x.lower, slot, 1 + c, lane, right)
        add_product(left, right, upper)
        load_block(x.lower, slot, 3 + c, lane, right)
        add_product(left, right, under)
        if c == 0:
            load_block(x.lower, slot, 0, lane, left)
            load_block(x.lower, slot, 2, lane, right)
            add_product(left, right, upper)
            load_block(x.lower, slot, 4, lane, right)
            add_product(left, right, under)
        round_block(upper)
        round_block(under)
        load_rows(x.diagonal, slot, 2, lane, left)
        add_product(left, upper, joined)
        put_block(x, slot, 2, c, lane, joined)
        T.clear(joined)
        load_block(x.lower, slot, LOWER - 1, lane, left)
        add_product(left, upper, joined)
        load_rows(x.diagonal, slot, 3, lane, left)
        add_product(left, under, joined)
        put_block(x, slot, 3, c, lane, joined)

    @T.macro
    def bound_map(x, bound, chunk, head, length, slot, lane):
        """The chunk's bound, by one warp."""
        growth = T.alloc_var(f32, init=0.0)
        for part in T.unroll(2):
            row = T.alloc_var(i32, init=part * WARP + lane)
            if row < length:
                n = T.alloc_var(f32, init=x.square[row])
                if l2norm:
                    n = n * x.norm[row] * x.norm[row]
                growth = growth + T.log2(T.max(1.0, T.abs(1.0 - x.strength[slot, row] * n)))
        for level in T.unroll(5):
            growth = growth + T.shfl_xor(growth, 16 >> level)
        if lane == 0:
            bound[head, chunk] = growth + x.gate[slot, C - 1]

    @T.macro
    def solve_heads(x, beta, decay, inverse, bound, chunk, start, length, key_head, turn):
        """One or two value heads, SLOTS turn and the next, two warps each."""
        thread = T.get_thread_binding()
        lane = T.alloc_var(i32, init=thread % WARP)
        warp = T.alloc_var(i32, init=thread // WARP)
        slot = T.alloc_var(i32, init=thread // C)
        pair = T.alloc_var(i32, init=thread // WARP % 2)
        head = T.alloc_var(i32, init=turn * SLOTS + slot)
        works = T.alloc_var(i32, init=0)
        if slot < SLOTS and head < ratio:
            works = 1
        head = head + key_head * ratio
        if slot < SLOTS:
            load_gates(x, decay, beta, chunk, head, start, length, works, slot, thread % C)
        T.sync_threads()
        for s in T.unroll(SLOTS):
            weigh(x, s, lane, warp)
        T.sync_threads()
        if works == 1:
            invert_diagonal(x, slot, thread % C)
            join_pair(x, slot, pair, lane)
        T.sync_threads()
        if works == 1:
            join_halves(x, slot, pair, lane)
            if pair == 1:
                bound_map(x, bound, chunk, head, length, slot, lane)
        T.fence_proxy_async()
        T.sync_threads()
        for s in T.unroll(SLOTS):
            if turn * SLOTS + s < ratio:
                T.tma_copy(
                    x.tile16[s, 0:C, 0:C],
                    inverse[chunk, key_head * ratio + turn * SLOTS + s, 0:C, 0:C],
                    leader_scope_threads=THREADS,
                )
        T.tma_store_wait(0)

    @T.prim_func
    def solve(
        k: T.StridedTensor((tokens, H, K), (kt, kh, 1), dtype),
        beta: T.StridedTensor((tokens, HV), (bt, bh), spec.dtype("beta")),
        decay: T.Tensor((chunks, HV, C), f32),
        chunk_table: T.Tensor((chunks, CHUNK_COLUMNS), i32),
        inverse: T.Tensor((chunks, HV, C, C), dtype),
        key_scale: T.Tensor((key_chunks, H, C), f32),
        bound: T.Tensor((HV, chunks), f32),
    ):
        with T.Kernel(chunks * H, threads=THREADS) as block:
            k_tile = T.alloc_shared((C, K), dtype)
            rows = T.alloc_shared((BLOCKS, C // 8, WARP, HELD // TILES), f32)
            lower = T.alloc_shared((SLOTS, LOWER, TILES, WARP, HELD // TILES), f32)
            diagonal = T.alloc_shared((SLOTS, BLOCKS, SIDE, LINE), f32)
            column_factor = T.alloc_shared((SLOTS, BLOCKS, C), f32)
            tile16 = T.alloc_shared((SLOTS, C, C), dtype)
            gate = T.alloc_shared((SLOTS, C), f32)
            strength = T.alloc_shared((SLOTS, C), f32)
            square = T.alloc_shared((C,), f32)
            norm = T.alloc_shared((C,), f32)
            x = Shared(
                rows=rows,
                lower=lower,
                diagonal=diagonal,
                column_factor=column_factor,
                tile16=tile16,
                gate=gate,
                strength=strength,
                square=square,
                norm=norm,
            )
            gram = T.alloc_fragment((C, C), f32)
            loaded = T.alloc_barrier([THREADS])
            T.annotate_layout({tile16: make_full_bank_swizzled_layout(tile16)})
            thread = T.get_thread_binding()
            key_head = T.alloc_var(i32, init=T.truncmod(block, H))
            chunk = T.alloc_var(i32, init=T.truncdiv(block, H))
            start = T.alloc_var(i32, init=chunk_table[chunk, 0])
            length = T.alloc_var(i32, init=chunk_table[chunk, 1])
            if length > 0:
                T.tma_copy(k[start : start + C, key_head, 0:K], k_tile, barrier=loaded)
                T.mbarrier_arrive(loaded)
                T.mbarrier_wait_parity(loaded, 0)
                multiply(spec.target, k_tile, k_tile, gram)
                T.sync_threads()  # memory of the keys, and then of their products, is used again below
                spread_rows(gram, x.rows, length, thread % WARP, thread // WARP)
                if thread < C:
                    measure(x, key_scale, chunk, key_head, length, thread)
                if ratio <= SLOTS:  # without a loop the result takes the memory of the products: more blocks fit
                    solve_heads(x, beta, decay, inverse, bound, chunk, start, length, key_head, 0)
                else:
                    for turn in T.serial((ratio + SLOTS - 1) // SLOTS):
                        solve_heads(x, beta, decay, inverse, bound, chunk, start, length, key_head, turn)
                        T.sync_threads()

    return solve
