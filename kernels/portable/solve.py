"""The triangular inverse of every chunk, (I + A)^-1 diag(beta), one kernel text for all architectures.

    A_ij = beta_i exp(G_i - G_j) (k_i . k_j)     j < i

A block takes one chunk of one key head. A warpgroup forms K K^T; then two warps per value head of the group substitute
down the rows of the diagonal blocks P and Q of 32, in fp32, a lane holding one column in registers and the rows of A
being broadcast from shared memory; two products in TF32, operands rounded to nearest, join them:

    [[P, 0], [R, Q]]^-1 = [[P^-1, 0], [-Q^-1 R P^-1, Q^-1]]

Unlike a series in powers of A this never cancels. Rows and columns past the chunk's length are zero.

bound [HV, chunks] is the base-2 logarithm of a bound of ||M|| of the chunk: sum of g_t + log max(1, |1 - beta_t
|k_t|^2|).
Letters: T tokens, C chunk, K key dim, H key heads, HV value heads.
"""

import tilelang.language as T

from flashqla_cp.kernels.blocks.gates import LEAST_STRENGTH
from flashqla_cp.kernels.blocks.mma import multiply
from flashqla_cp.kernels.blocks.scores import L2_EPS
from flashqla_cp.kernels.blocks.segments import CHUNK_COLUMNS
from flashqla_cp.kernels.chunks import CHUNK as C
from flashqla_cp.kernels.spec import KernelSpec

HALF, WARP, THREADS = C // 2, 32, 128


@T.macro
def nearest_tf32(x):
    """x rounded to the 10 bits of mantissa that the tensor cores read, ties away from zero."""
    return T.reinterpret(T.reinterpret(x, "uint32") + T.cast(0x1000, "uint32"), "float32")


def build_solve(spec: KernelSpec):
    """dims: head_dim, ratio (HV / H). dtypes: qkv, beta. flags: l2norm, sigmoid, double."""
    K, ratio, dtype, f32 = spec.dim("head_dim"), spec.dim("ratio"), spec.dtype("qkv"), "float32"
    l2norm, sigmoid, double = spec.has("l2norm"), spec.has("sigmoid"), spec.has("double")
    least = LEAST_STRENGTH[dtype]
    SLOTS = min(ratio, 2)  # value heads at a time
    # Columns weighted at a time. Sums of wgmma lie in a warp by 16 rows, so that warps above the diagonal have no work.
    BAND = 16 if spec.target.mma == "wgmma" else C
    tokens, chunks, H, HV = (T.dynamic(n) for n in ("tokens", "chunks", "H", "HV"))
    key_chunks = chunks if l2norm else T.dynamic("key_chunks")
    kt, kh, bt, bh = (T.dynamic(n) for n in ("k_token", "k_head", "beta_token", "beta_head"))

    @T.macro
    def substitute(lower, slot, half, x, lane):
        """Column `lane` of the inverse of the half's diagonal block of I + A. lower[slot] holds A^T."""
        row = T.alloc_local((4,), f32)
        for i in T.unroll(HALF):
            x[i] = T.if_then_else(i == lane, 1.0, 0.0)
        for known in T.unroll(HALF - 1):
            for quad in T.unroll(HALF // 4):
                if quad * 4 + 3 > known:
                    for e in T.vectorized(4):
                        row[e] = lower[slot, half * HALF + known, half * HALF + quad * 4 + e]
                    for e in T.unroll(4):
                        if quad * 4 + e > known:
                            x[quad * 4 + e] = x[quad * 4 + e] - row[e] * x[known]

    @T.prim_func
    def solve(
        k: T.StridedTensor((tokens, H, K), (kt, kh, 1), dtype),
        beta: T.StridedTensor((tokens, HV), (bt, bh), spec.dtype("beta")),
        decay: T.Tensor((chunks, HV, C), f32),
        chunk_table: T.Tensor((chunks, CHUNK_COLUMNS), "int32"),
        inverse: T.Tensor((chunks, HV, C, C), dtype),
        key_scale: T.Tensor((key_chunks, H, C), f32),
        bound: T.Tensor((HV, chunks), f32),
    ):
        with T.Kernel(chunks * H, threads=THREADS) as block:
            k_tile = T.alloc_shared((C, K), dtype)
            lower = T.alloc_shared((SLOTS, C, C + 4), f32)
            gate = T.alloc_shared((SLOTS, C), f32)
            strength = T.alloc_shared((SLOTS, C), f32)
            square = T.alloc_shared((C,), f32)
            gram = T.alloc_fragment((C, C), f32)
            weighted = T.alloc_fragment((C, BAND), f32)
            corner = T.alloc_fragment((HALF, HALF), f32)
            x = T.alloc_local((HALF,), f32)
            loaded = T.alloc_barrier([THREADS])
            thread = T.get_thread_binding()
            lane = T.alloc_var("int32", init=thread % WARP)
            warp = T.alloc_var("int32", init=thread // WARP)
            slot = T.alloc_var("int32", init=thread // C)
            half = T.alloc_var("int32", init=thread // WARP % 2)
            key_head = T.alloc_var("int32", init=T.truncmod(block, H))
            chunk = T.alloc_var("int32", init=T.truncdiv(block, H))
            start = T.alloc_var("int32", init=chunk_table[chunk, 0])
            length = T.alloc_var("int32", init=chunk_table[chunk, 1])
            if length > 0:
                T.tma_copy(k[start : start + C, key_head, 0:K], k_tile, barrier=loaded)
                T.mbarrier_arrive(loaded)
                T.mbarrier_wait_parity(loaded, 0)
                multiply(spec.target, k_tile, k_tile, gram)
                T.sync_threads()  # the keys' memory is used again below
                for a, b in T.Parallel(C, C):
                    if a == b:
                        square[a] = gram[a, b]
                if l2norm:
                    T.sync_threads()
                    if thread < C:
                        # Rows past the end may hold anything; they count as rows of length 1.
                        inverse_norm = T.alloc_var(f32, init=1.0)
                        if thread < length:
                            inverse_norm = T.rsqrt(square[thread] + L2_EPS)
                        key_scale[chunk, key_head, thread] = inverse_norm
                for turn in T.serial((ratio + SLOTS - 1) // SLOTS):
                    mine = T.alloc_var("int32", init=turn * SLOTS + slot)
                    works = T.alloc_var("int32", init=0)
                    if slot < SLOTS and mine < ratio:
                        works = 1
                    mine = mine + key_head * ratio
                    if slot < SLOTS:
                        t = T.alloc_var("int32", init=thread % C)
                        weight = T.alloc_var(f32, init=0.0)
                        gate[slot, t] = 0.0
                        if works == 1:
                            gate[slot, t] = decay[chunk, mine, t]
                            if t < length:
                                weight = T.cast(beta[start + t, mine], f32)
                                if sigmoid:
                                    weight = 1.0 / (1.0 + T.exp(0.0 - weight))
                                    if double:
                                        weight = weight * 2.0
                                weight = T.if_then_else(weight < least, least, weight)  # NaN stays
                        strength[slot, t] = weight
                    T.sync_threads()
                    for s in T.unroll(SLOTS):
                        for band in T.unroll(C // BAND):
                            if warp >= band:
                                for a, b in T.Parallel(C, BAND):
                                    weighted[a, b] = T.if_then_else(
                                        a > band * BAND + b and a < length,
                                        gram[a, band * BAND + b]
                                        * (
                                            T.if_then_else(
                                                l2norm,
                                                T.rsqrt((square[a] + L2_EPS) * (square[band * BAND + b] + L2_EPS)),
                                                1.0,
                                            )
                                            * strength[s, a]
                                            * T.exp2(gate[s, a] - gate[s, band * BAND + b])
                                        ),
                                        0.0,
                                    )
                                for a, b in T.Parallel(C, BAND):
                                    lower[s, band * BAND + b, a] = weighted[a, b]
                    T.sync_threads()
                    if works == 1:
                        substitute(lower, slot, half, x, lane)
                        T.sync_warp()
                        weight = T.alloc_var(f32, init=strength[slot, half * HALF + lane])
                        for i in T.unroll(HALF):
                            inverse[chunk, mine, half * HALF + i, half * HALF + lane] = T.cast(x[i] * weight, dtype)
                            if half == 1:
                                inverse[chunk, mine, i, HALF + lane] = T.cast(0.0, dtype)
                        for i in T.unroll(HALF):
                            x[i] = nearest_tf32(x[i])
                        for quad in T.unroll(HALF // 4):
                            for e in T.vectorized(4):
                                lower[slot, half * HALF + lane, half * HALF + quad * 4 + e] = x[quad * 4 + e]
                        if half == 0:
                            growth = T.alloc_var(f32, init=0.0)
                            for part in T.unroll(2):
                                if lane + part * HALF < length:
                                    n = T.alloc_var(f32, init=square[lane + part * HALF])
                                    if l2norm:
                                        n = n / (n + L2_EPS)
                                    growth = growth + T.log2(
                                        T.max(1.0, T.abs(1.0 - strength[slot, lane + part * HALF] * n))
                                    )
                            for level in T.unroll(5):
                                growth = growth + T.shfl_xor(growth, 16 >> level)
                            if lane == 0:
                                bound[mine, chunk] = growth + gate[slot, C - 1]
                    T.sync_threads()
                    for s in T.unroll(SLOTS):
                        if turn * SLOTS + s < ratio:
                            T.gemm(
                                lower[s, 0:HALF, HALF:C],
                                lower[s, 0:HALF, 0:HALF],
                                corner,
                                transpose_A=True,
                                transpose_B=True,
                                clear_accum=True,
                            )
                            T.sync_threads()
                            for a, b in T.Parallel(HALF, HALF):
                                lower[s, b, HALF + a] = nearest_tf32(corner[a, b])
                            T.sync_threads()
                            T.gemm(
                                lower[s, HALF:C, HALF:C],
                                lower[s, 0:HALF, HALF:C],
                                corner,
                                transpose_A=True,
                                transpose_B=True,
                                clear_accum=True,
                            )
                            for a, b in T.Parallel(HALF, HALF):
                                inverse[chunk, key_head * ratio + turn * SLOTS + s, HALF + a, b] = T.cast(
                                    0.0 - corner[a, b] * strength[s, b], dtype
                                )
                    T.sync_threads()

    return solve
