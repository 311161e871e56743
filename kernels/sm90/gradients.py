"""Gradients of queries, keys, gates and write strengths, chunk by chunk: the schedule for sm_90 (wgmma).

Everything that a chunk needs is there: the state in front (S), the gradient of the state behind (dS'), the values it
wrote (U) and their right hand side's gradient (dV). With q, k normalised where l2norm says so, per value head:

    Da = scale (dO U^T) exp(G_i - G_j)    j <= i       Db = -(dV U^T) exp(G_i - G_j)    j < i
    dQ = Da K + diag(scale exp G) dO S^T
    dK = Da^T Q + (Db + Db^T) K - diag(exp G) dV S^T + diag(exp(Gc - G)) U dS'^T
    dbeta_i = (dV U^T)_ii / beta_i^2

summed over the value heads of a key head in fp32. The gradient of a log gate is what is read over it. Of a value head:

    sum over i >= t of  q_i . dQ_i + k_i . (Db K - diag(exp G) dV S^T)_i - k_i . (Da^T Q + Db^T K)_i
    sum over j < t of   k_j . (diag(exp(Gc - G)) U dS'^T)_j          and exp(Gc) <S, dS'>

A pair's term is added once and subtracted once, from one rounded Da or Db, so pairs on one side of a token cancel in
its sum, to fp32 rounding; a token's pair with itself (the diagonal of Da), beside which strong decay leaves nothing of
the others, is kept out of these products and joins dQ and dK at the end.

Roles of a block, which takes chunks of a key head in turn:

    1 warpgroup      pairs of tokens (Da, Db, dbeta's products), dQ, and <S, dS'>
    1 warpgroup      dK
    2 warps          row factors, norms, tails, and the gradient of gates from all of these
    2 warps          copies by TMA: of a value head, of a key head

Letters: C chunk, K key dim, V value dim, H key heads, HV value heads.
"""

import tilelang.language as T

from flashqla_cp.kernels.blocks.segments import CHUNK_COLUMNS
from flashqla_cp.kernels.blocks.token_sums import (
    begins_from_nothing,
    clear_rows_from,
    finish_gates,
    finish_strength,
    normalize,
)
from flashqla_cp.kernels.chunks import CHUNK as C
from flashqla_cp.kernels.spec import KernelSpec
from flashqla_cp.kernels.tuning import gradients_config

GROUP, KEEPERS, WARP = 128, 64, 32
QUERY_BARRIER, KEEPERS_BARRIER, KEY_BARRIER = 3, 4, 5  # the compiler's reductions have 1 and 2


def build_gradients(spec: KernelSpec):
    """dims: head_dim (K = V), ratio (HV / H). dtypes: qkv, beta. flags: l2norm, sigmoid, double."""
    K = V = spec.dim("head_dim")
    ratio, dtype, f32, i32 = spec.dim("ratio"), spec.dtype("qkv"), "float32", "int32"
    l2norm, sigmoid, double = (spec.has(flag) for flag in ("l2norm", "sigmoid", "double"))
    config = gradients_config(spec)
    PANELS = V // 64
    tokens, chunks, chains, H, HV, slab = (T.dynamic(n) for n in ("tokens", "chunks", "chains", "H", "HV", "slab"))
    qt, qh, kt, kh, ot, oh = (T.dynamic(n) for n in ("q_token", "q_head", "k_token", "k_head", "do_token", "do_head"))
    bt, bh = T.dynamic("beta_token"), T.dynamic("beta_head")

    @T.macro
    def multiply_rows(left, right, sums, p):
        """Start sums [C, C] = left right^T of a value head's rows."""
        T.wgmma_gemm(left[p * PANELS, :, :], right[p * PANELS, :, :], sums, transpose_B=True, clear_accum=True)
        if PANELS == 2:
            T.wgmma_gemm(left[p * PANELS + 1, :, :], right[p * PANELS + 1, :, :], sums, transpose_B=True)

    @T.macro
    def multiply_states(rows, state, sums, p, full, phase):
        """Start sums [C, K] = a value head's rows times a state, as its parts arrive."""
        T.mbarrier_wait_parity(full[0], phase)
        T.wgmma_gemm(rows[p * PANELS, :, :], state[0, :, :], sums, clear_accum=True)
        if PANELS == 2:
            T.mbarrier_wait_parity(full[1], phase)
            T.wgmma_gemm(rows[p * PANELS + 1, :, :], state[1, :, :], sums)

    @T.macro
    def weigh(pairs, factor, row_gate, column_gate, pairs16):
        """pairs16 = factor pairs exp(G_i - G_j) for j < i."""
        for a, b in T.Parallel(C, C):
            pairs16[a, b] = T.cast(
                T.if_then_else(a > b, pairs[a, b] * factor * T.exp2(row_gate[a] - column_gate[b]), 0.0), dtype
            )

    @T.macro
    def scale_rows(part, factor):
        """part = diag(factor) part."""
        for a, b in T.Parallel(C, K):
            part[a, b] = part[a, b] * factor[a]

    @T.macro
    def add_part(sums, part):
        """sums += part."""
        for a, b in T.Parallel(C, K):
            sums[a, b] = sums[a, b] + part[a, b]

    @T.macro
    def dot_rows(part, tile, dot):
        """dot = the rows of part times those of the tile; part is lost."""
        for a, b in T.Parallel(C, K):
            part[a, b] = part[a, b] * tile[0, a, b]
        T.reduce_sum(part, dot, dim=1)

    @T.macro
    def add_own(sums, own, tile):
        """The pairs of tokens with themselves: sums += diag(own) tile."""
        for a, b in T.Parallel(C, K):
            sums[a, b] = sums[a, b] + own[a] * tile[0, a, b]

    @T.macro
    def unnormalize(sums, part, dot, factor, tile, norm):
        """Through the norm: gradients of rows from those of rows of length 1."""
        for a, b in T.Parallel(C, K):
            part[a, b] = sums[a, b]
        dot_rows(part, tile, dot)
        T.copy(norm, factor)
        for a, b in T.Parallel(C, K):
            sums[a, b] = factor[a] * (sums[a, b] - tile[0, a, b] * dot[a])

    @T.macro
    def put_rows(sums, tile, p, out, start, length, head, row, barrier):
        """Store sums as rows of a token each, through a tile of a value head that nobody else reads any more."""
        # A warp writes rows of its own here, which no other warp's products read.
        for a, b in T.Parallel(C, K):
            tile[p * PANELS + b // 64, a, b % 64] = T.cast(sums[a, b], dtype)
        T.sync_threads(barrier_id=barrier, arrive_count=GROUP)
        for i in T.serial(C * K // 8 // GROUP):
            at = T.alloc_var(i32, init=i * (GROUP * 8 // K) + row // (K // 8))
            if at < length:
                for e in T.vectorized(8):
                    out[start + at, head, row % (K // 8) * 8 + e] = tile[
                        p * PANELS + row % (K // 8) // 8, at, row % 8 * 8 + e
                    ]
        T.fence_proxy_async()

    @T.macro
    def finish(n, row, start, length, head, strength, nothing, x, dg, dbeta):
        """Gradients of the gates and write strengths of the n-th value head's chunk, when all its sums are there.
        nothing: the first gate scales no state, and its gradient is 0 where a sum would leave rounding."""
        summed, sums, diagonal, keep, partial = x
        T.mbarrier_wait_parity(summed[n % 2], n // 2 % 2)
        slope = finish_gates(n % 2, row, sums, keep, partial, KEEPERS_BARRIER)
        if row < length:
            if row == 0 and nothing == 1:
                dg[start, head] = 0.0
            else:
                dg[start + row, head] = slope
            dbeta[start + row, head] = finish_strength(diagonal[n % 2, row], strength, dtype, sigmoid, double)

    @T.prim_func
    def gradients(
        q: T.StridedTensor((tokens, H, K), (qt, qh, 1), dtype),
        k: T.StridedTensor((tokens, H, K), (kt, kh, 1), dtype),
        do: T.StridedTensor((tokens, HV, V), (ot, oh, 1), dtype),
        dv: T.Tensor((tokens, HV, V), dtype),
        values: T.Tensor((chunks, slab, C, V), dtype),
        states: T.Tensor((chunks, slab, V, K), dtype),
        dstates: T.Tensor((chunks, slab, V, K), dtype),
        decay: T.Tensor((chunks, HV, C), f32),
        beta: T.StridedTensor((tokens, HV), (bt, bh), spec.dtype("beta")),
        chunk_table: T.Tensor((chunks, CHUNK_COLUMNS), i32),
        entry_row: T.Tensor((chains,), i32),
        dq: T.Tensor((tokens, H, K), dtype),
        dk: T.Tensor((tokens, H, K), dtype),
        dg: T.Tensor((tokens, HV), f32),
        dbeta: T.Tensor((tokens, HV), f32),
        scale: T.float32,
        entered: T.int32,
        offset: T.int32,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=config.threads) as block:
            o_tile = T.alloc_shared((2 * PANELS, C, 64), dtype)
            r_tile = T.alloc_shared((2 * PANELS, C, 64), dtype)  # dV
            u_tile = T.alloc_shared((2 * PANELS, C, 64), dtype)
            s_tile = T.alloc_shared((PANELS, 64, K), dtype)
            d_tile = T.alloc_shared((PANELS, 64, K), dtype)
            q_tile = T.alloc_shared((1, C, K), dtype)
            k_tile = T.alloc_shared((1, C, K), dtype)
            a_tile = T.alloc_shared((C, C), dtype)
            b_tile = T.alloc_shared((C, C), dtype)
            gate = T.alloc_shared((2, C), f32)
            read = T.alloc_shared((2, C), f32)  # scale exp(G)
            fade = T.alloc_shared((2, C), f32)  # exp(Gc - G)
            keep = T.alloc_shared((2,), f32)  # exp(Gc)
            q_norm = T.alloc_shared((C,), f32)
            k_norm = T.alloc_shared((C,), f32)
            own = T.alloc_shared((2, C), f32)  # the diagonal of Da
            asked_dot = T.alloc_shared((2, C), f32)  # q_i . dQ_i
            recalled_dot = T.alloc_shared((2, C), f32)  # k_i . what it reads
            leaving_dot = T.alloc_shared((2, C), f32)  # k_i . what it gives to the state behind
            given_dot = T.alloc_shared((2, C), f32)  # k_i . what it gives to later rows
            diagonal = T.alloc_shared((2, C), f32)
            carried = T.alloc_shared((2, 64), f32)
            partial = T.alloc_shared((4,), f32)
            rows_full = T.alloc_barrier([WARP] * 2)
            rows_ready = T.alloc_barrier([KEEPERS] * 2)
            rows_free = T.alloc_barrier([2 * GROUP] * 2)
            keys_full = T.alloc_barrier([WARP])
            keys_ready = T.alloc_barrier([KEEPERS])
            keys_free = T.alloc_barrier([2 * GROUP])
            s_full = T.alloc_barrier([WARP] * PANELS)
            s_free = T.alloc_barrier([2 * GROUP] * PANELS)
            d_full = T.alloc_barrier([WARP] * PANELS)
            d_free = T.alloc_barrier([2 * GROUP] * PANELS)
            made = T.alloc_barrier([GROUP])
            taken = T.alloc_barrier([GROUP])
            summed = T.alloc_barrier([2 * GROUP] * 2)
            thread = T.get_thread_binding()
            key_heads = T.alloc_var(i32, init=T.truncdiv(slab, ratio))
            turns = T.alloc_var(i32, init=T.truncdiv(chunks * key_heads - block + (blocks - 1), blocks))
            done = T.alloc_var(i32, init=0)  # key heads' chunks
            n = T.alloc_var(i32, init=0)  # value heads' chunks
            if thread < GROUP:
                T.set_max_nreg(config.roles[0].registers, 1)
                query_sum = T.alloc_fragment((C, K), f32)
                query_part = T.alloc_fragment((C, K), f32)
                query_factor = T.alloc_fragment((C,), f32)
                query_dot = T.alloc_fragment((C,), f32)
                query_own = T.alloc_fragment((C,), f32)
                asked = T.alloc_fragment((C, C), f32)  # Da, then what <S, dS'> is in
                written = T.alloc_fragment((C, C), f32)  # Db
                asked16 = T.alloc_fragment((C, C), dtype)
                written16 = T.alloc_fragment((C, C), dtype)
                row_gate = T.alloc_fragment((C,), f32)
                column_gate = T.alloc_fragment((C,), f32)
                for turn in T.serial(turns):
                    item = T.alloc_var(i32, init=turn * blocks + block)
                    chunk = T.alloc_var(i32, init=T.truncdiv(item, key_heads))
                    key_head = T.alloc_var(i32, init=T.truncdiv(offset, ratio) + T.truncmod(item, key_heads))
                    start = T.alloc_var(i32, init=chunk_table[chunk, 0])
                    length = T.alloc_var(i32, init=chunk_table[chunk, 1])
                    if length > 0:
                        T.clear(query_sum)
                        T.clear(query_own)
                        for j in T.serial(ratio):
                            p = T.alloc_var(i32, init=n % 2)
                            T.mbarrier_wait_parity(rows_ready[p], (n // 2) % 2)
                            multiply_rows(o_tile, u_tile, asked, p)
                            multiply_rows(r_tile, u_tile, written, p)
                            T.copy(gate[p, :], row_gate)
                            T.copy(gate[p, :], column_gate)
                            T.wait_wgmma(PANELS)
                            for a, b in T.Parallel(C, C):
                                if a == b:
                                    own[p, a] = asked[a, b] * scale
                            weigh(asked, scale, row_gate, column_gate, asked16)
                            T.wait_wgmma(0)
                            for a, b in T.Parallel(C, C):
                                if a == b:
                                    diagonal[p, a] = written[a, b]
                            weigh(written, -1.0, row_gate, column_gate, written16)
                            T.mbarrier_wait_parity(taken, (n % 2) ^ 1)
                            # The last product that read a warp's rows of these was waited for by that warp.
                            T.copy(asked16, a_tile)
                            T.copy(written16, b_tile)
                            T.fence_proxy_async()
                            T.sync_threads(barrier_id=QUERY_BARRIER, arrive_count=GROUP)
                            T.mbarrier_arrive(made)
                            multiply_states(o_tile, s_tile, query_part, p, s_full, n % 2)
                            # The diagonal of S^T dS'^T^T, 64 rows of V on 64, sums to <S, dS'>.
                            for h in T.unroll(PANELS):
                                T.mbarrier_wait_parity(d_full[h], n % 2)
                            T.wgmma_gemm(s_tile[0, :, :], d_tile[0, :, :], asked, transpose_B=True, clear_accum=True)
                            if PANELS == 2:
                                T.wgmma_gemm(s_tile[1, :, :], d_tile[1, :, :], asked, transpose_B=True)
                            T.copy(own[p, :], query_dot)
                            for a in T.Parallel(C):
                                query_own[a] = query_own[a] + query_dot[a]
                            T.copy(read[p, :], query_factor)
                            T.wait_wgmma(0)
                            for h in T.unroll(PANELS):
                                T.mbarrier_arrive(s_free[h])
                                T.mbarrier_arrive(d_free[h])
                            if j < ratio - 1:
                                T.mbarrier_arrive(rows_free[p])
                            for a, b in T.Parallel(64, 64):
                                if a == b:
                                    carried[p, a] = asked[a, b]
                            scale_rows(query_part, query_factor)
                            if j == 0:
                                T.mbarrier_wait_parity(keys_ready, done % 2)
                            T.wgmma_gemm(a_tile, k_tile[0, :, :], query_part)
                            T.wait_wgmma(0)
                            add_part(query_sum, query_part)
                            dot_rows(query_part, q_tile, query_dot)
                            T.copy(query_dot, asked_dot[p, :])
                            T.mbarrier_arrive(summed[p])
                            # Here and not in front of the next products, where it would wait for stores of results.
                            T.fence_proxy_async()
                            n = n + 1
                        add_own(query_sum, query_own, k_tile)
                        if l2norm:
                            unnormalize(query_sum, query_part, query_dot, query_factor, q_tile, q_norm)
                        T.mbarrier_arrive(keys_free)
                        p = T.alloc_var(i32, init=(n - 1) % 2)
                        put_rows(query_sum, o_tile, p, dq, start, length, key_head, thread, QUERY_BARRIER)
                        T.mbarrier_arrive(rows_free[p])
                        done = done + 1
            elif thread < 2 * GROUP:
                T.set_max_nreg(config.roles[0].registers, 1)
                key_sum = T.alloc_fragment((C, K), f32)
                key_part = T.alloc_fragment((C, K), f32)
                key_factor = T.alloc_fragment((C,), f32)
                key_dot = T.alloc_fragment((C,), f32)
                key_own = T.alloc_fragment((C,), f32)
                for turn in T.serial(turns):
                    item = T.alloc_var(i32, init=turn * blocks + block)
                    chunk = T.alloc_var(i32, init=T.truncdiv(item, key_heads))
                    key_head = T.alloc_var(i32, init=T.truncdiv(offset, ratio) + T.truncmod(item, key_heads))
                    start = T.alloc_var(i32, init=chunk_table[chunk, 0])
                    length = T.alloc_var(i32, init=chunk_table[chunk, 1])
                    if length > 0:
                        T.clear(key_sum)
                        T.clear(key_own)
                        for j in T.serial(ratio):
                            p = T.alloc_var(i32, init=n % 2)
                            T.mbarrier_wait_parity(rows_ready[p], (n // 2) % 2)
                            multiply_states(r_tile, s_tile, key_part, p, s_full, n % 2)
                            for a in T.Parallel(C):
                                key_factor[a] = 0.0 - T.exp2(gate[p, a])
                            T.wait_wgmma(0)
                            for h in T.unroll(PANELS):
                                T.mbarrier_arrive(s_free[h])
                            scale_rows(key_part, key_factor)
                            if j == 0:
                                T.mbarrier_wait_parity(keys_ready, done % 2)
                            T.mbarrier_wait_parity(made, n % 2)
                            T.wgmma_gemm(b_tile, k_tile[0, :, :], key_part)
                            T.copy(own[p, :], key_dot)
                            for a in T.Parallel(C):
                                key_own[a] = key_own[a] + key_dot[a]
                            T.wait_wgmma(0)
                            add_part(key_sum, key_part)
                            dot_rows(key_part, k_tile, key_dot)
                            T.copy(key_dot, recalled_dot[p, :])
                            multiply_states(u_tile, d_tile, key_part, p, d_full, n % 2)
                            T.copy(fade[p, :], key_factor)
                            T.wait_wgmma(0)
                            for h in T.unroll(PANELS):
                                T.mbarrier_arrive(d_free[h])
                            if j < ratio - 1:
                                T.mbarrier_arrive(rows_free[p])
                            scale_rows(key_part, key_factor)
                            add_part(key_sum, key_part)
                            dot_rows(key_part, k_tile, key_dot)
                            T.copy(key_dot, leaving_dot[p, :])
                            T.wgmma_gemm(a_tile, q_tile[0, :, :], key_part, transpose_A=True, clear_accum=True)
                            T.wgmma_gemm(b_tile, k_tile[0, :, :], key_part, transpose_A=True)
                            T.wait_wgmma(0)
                            T.mbarrier_arrive(taken)
                            add_part(key_sum, key_part)
                            dot_rows(key_part, k_tile, key_dot)
                            T.copy(key_dot, given_dot[p, :])
                            T.mbarrier_arrive(summed[p])
                            T.fence_proxy_async()
                            n = n + 1
                        add_own(key_sum, key_own, q_tile)
                        if l2norm:
                            unnormalize(key_sum, key_part, key_dot, key_factor, k_tile, k_norm)
                        T.mbarrier_arrive(keys_free)
                        p = T.alloc_var(i32, init=(n - 1) % 2)
                        put_rows(key_sum, u_tile, p, dk, start, length, key_head, thread - GROUP, KEY_BARRIER)
                        T.mbarrier_arrive(rows_free[p])
                        done = done + 1
            else:
                T.set_max_nreg(config.roles[1].registers, 0)
                if thread < 2 * GROUP + WARP:
                    for turn in T.serial(turns):
                        item = T.alloc_var(i32, init=turn * blocks + block)
                        chunk = T.alloc_var(i32, init=T.truncdiv(item, key_heads))
                        place = T.alloc_var(i32, init=T.truncmod(item, key_heads) * ratio)
                        start = T.alloc_var(i32, init=chunk_table[chunk, 0])
                        if chunk_table[chunk, 1] > 0:
                            for j in T.serial(ratio):
                                p = T.alloc_var(i32, init=n % 2)
                                head = T.alloc_var(i32, init=offset + place + j)
                                T.mbarrier_wait_parity(rows_free[p], ((n // 2) % 2) ^ 1)
                                T.tma_copy(decay[chunk, head, 0:C], gate[p, :], barrier=rows_full[p])
                                for h in T.unroll(PANELS):
                                    T.tma_copy(
                                        do[start : start + C, head, h * 64 : h * 64 + 64],
                                        o_tile[p * PANELS + h, :, :],
                                        barrier=rows_full[p],
                                    )
                                    T.tma_copy(
                                        dv[start : start + C, head, h * 64 : h * 64 + 64],
                                        r_tile[p * PANELS + h, :, :],
                                        barrier=rows_full[p],
                                    )
                                    T.tma_copy(
                                        values[chunk, place + j, 0:C, h * 64 : h * 64 + 64],
                                        u_tile[p * PANELS + h, :, :],
                                        barrier=rows_full[p],
                                    )
                                T.mbarrier_arrive(rows_full[p])
                                for h in T.unroll(PANELS):
                                    T.mbarrier_wait_parity(s_free[h], (n % 2) ^ 1)
                                    T.tma_copy(
                                        states[chunk, place + j, h * 64 : h * 64 + 64, 0:K],
                                        s_tile[h, :, :],
                                        barrier=s_full[h],
                                    )
                                    T.mbarrier_arrive(s_full[h])
                                for h in T.unroll(PANELS):
                                    T.mbarrier_wait_parity(d_free[h], (n % 2) ^ 1)
                                    T.tma_copy(
                                        dstates[chunk, place + j, h * 64 : h * 64 + 64, 0:K],
                                        d_tile[h, :, :],
                                        barrier=d_full[h],
                                    )
                                    T.mbarrier_arrive(d_full[h])
                                n = n + 1
                elif thread < 2 * GROUP + 2 * WARP:
                    for turn in T.serial(turns):
                        item = T.alloc_var(i32, init=turn * blocks + block)
                        chunk = T.alloc_var(i32, init=T.truncdiv(item, key_heads))
                        key_head = T.alloc_var(i32, init=T.truncdiv(offset, ratio) + T.truncmod(item, key_heads))
                        start = T.alloc_var(i32, init=chunk_table[chunk, 0])
                        if chunk_table[chunk, 1] > 0:
                            T.mbarrier_wait_parity(keys_free, (done % 2) ^ 1)
                            T.tma_copy(q[start : start + C, key_head, 0:K], q_tile[0, :, :], barrier=keys_full)
                            T.tma_copy(k[start : start + C, key_head, 0:K], k_tile[0, :, :], barrier=keys_full)
                            T.mbarrier_arrive(keys_full)
                            done = done + 1
                else:
                    row = T.alloc_var(i32, init=thread - 2 * GROUP - 2 * WARP)
                    sums = (asked_dot, recalled_dot, given_dot, leaving_dot, carried)
                    x = (summed, sums, diagonal, keep, partial)
                    last_start = T.alloc_var(i32, init=0)
                    last_length = T.alloc_var(i32, init=0)
                    last_head = T.alloc_var(i32, init=0)
                    last_strength = T.alloc_var(f32, init=0.0)
                    last_nothing = T.alloc_var(i32, init=0)
                    for turn in T.serial(turns):
                        item = T.alloc_var(i32, init=turn * blocks + block)
                        chunk = T.alloc_var(i32, init=T.truncdiv(item, key_heads))
                        place = T.alloc_var(i32, init=T.truncmod(item, key_heads) * ratio)
                        start = T.alloc_var(i32, init=chunk_table[chunk, 0])
                        length = T.alloc_var(i32, init=chunk_table[chunk, 1])
                        if length > 0:
                            nothing = begins_from_nothing(chunk_table[chunk, 2], entered, entry_row)
                            for j in T.serial(ratio):
                                p = T.alloc_var(i32, init=n % 2)
                                strength = T.alloc_var(f32, init=0.0)
                                if row < length:
                                    strength = T.cast(beta[start + row, offset + place + j], f32)
                                T.mbarrier_wait_parity(rows_full[p], (n // 2) % 2)
                                if length < C:
                                    for h in T.unroll(PANELS):
                                        clear_rows_from(o_tile, p * PANELS + h, length, row, 64, dtype)
                                        clear_rows_from(r_tile, p * PANELS + h, length, row, 64, dtype)
                                    T.fence_proxy_async()
                                grown = T.alloc_var(f32, init=T.exp2(gate[p, row]))
                                read[p, row] = grown * scale
                                fade[p, row] = T.exp2(gate[p, C - 1] - gate[p, row])
                                if row == C - 1:
                                    keep[p] = grown
                                T.mbarrier_arrive(rows_ready[p])
                                if j == 0:
                                    T.mbarrier_wait_parity(keys_full, done % 2)
                                    if length < C:
                                        clear_rows_from(q_tile, 0, length, row, K, dtype)
                                        clear_rows_from(k_tile, 0, length, row, K, dtype)
                                    if l2norm:
                                        normalize(q_tile, k_tile, q_norm, k_norm, row, K, dtype)
                                    if l2norm or length < C:
                                        T.fence_proxy_async()
                                    T.mbarrier_arrive(keys_ready)
                                    done = done + 1
                                if n > 0:
                                    finish(
                                        n - 1,
                                        row,
                                        last_start,
                                        last_length,
                                        last_head,
                                        last_strength,
                                        last_nothing,
                                        x,
                                        dg,
                                        dbeta,
                                    )
                                last_start = start
                                last_length = length
                                last_head = offset + place + j
                                last_strength = strength
                                last_nothing = nothing
                                n = n + 1
                    if n > 0:
                        finish(
                            n - 1, row, last_start, last_length, last_head, last_strength, last_nothing, x, dg, dbeta
                        )

    return gradients
