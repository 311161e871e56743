"""Output and exit states of every segment: the schedule for sm_90 (wgmma).

States are held transposed, S^T [V, K], so that the whole recurrence of a chunk runs in the registers of the
warpgroup that owns 64 rows of V: what one product leaves in the accumulators is, rounded, the left operand of the next.

    X = S^T K^T            Y = -X diag(exp G)         U = V^T T^T + Y T^T     (T holds diag(beta))
    O^T = (S^T Q^T) diag(scale exp G) + U P^T         S^T = exp(Gc) S^T + (U diag(exp(Gc - G))) K

Roles of a block, which runs one segment of one value head:

    V / 64 warpgroups     the recurrence                 wait ready, arrive free
    1 warpgroup           scores, one chunk ahead:       wait full, arrive ready
                          P = scale (Q K^T) exp(G_i - G_j)
    1 warp                copies by TMA                  wait free, arrive full

Letters: C chunk, K key dim, V value dim, H key heads, HV value heads.
"""

import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout

from flashqla_cp.kernels.blocks.chunk_io import clear_tail
from flashqla_cp.kernels.blocks.scores import BARRIER, SCORERS, Scored, normalize_keys, score
from flashqla_cp.kernels.blocks.segments import CHAIN, COLUMNS, END, ENTRY, LAST, START
from flashqla_cp.kernels.blocks.segments import CHUNK as FIRST_CHUNK
from flashqla_cp.kernels.blocks.stores import store_tokens, transposed_accumulator
from flashqla_cp.kernels.chunks import CHUNK as C
from flashqla_cp.kernels.spec import KernelSpec
from flashqla_cp.kernels.tuning import forward_config

FULL_ROW = T.GemmWarpPolicy.FullRow
WARP = 32


def build_forward(spec: KernelSpec):
    """dims: head_dim (K = V), ratio (HV / H). dtypes: qkv. flags: initial_state, final_state, l2norm."""
    K = V = spec.dim("head_dim")
    ratio, dtype, f32 = spec.dim("ratio"), spec.dtype("qkv"), "float32"
    config = forward_config(spec)
    STAGES, WORKERS = config.stages, config.roles[0].threads
    has_initial, has_final, l2norm = (spec.has(flag) for flag in ("initial_state", "final_state", "l2norm"))
    tokens, chunks, H, HV, segments, rows, chains, entries = (
        T.dynamic(n) for n in ("tokens", "chunks", "H", "HV", "segments", "rows", "chains", "entries")
    )
    key_chunks = chunks if l2norm else T.dynamic("key_chunks")
    listed = chains if has_initial else T.dynamic("listed")
    finals = chains if has_final else T.dynamic("finals")
    qt, qh, kt, kh, vt, vh = (T.dynamic(n) for n in ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head"))

    @T.prim_func
    def forward(
        q: T.StridedTensor((tokens, H, K), (qt, qh, 1), dtype),
        k: T.StridedTensor((tokens, H, K), (kt, kh, 1), dtype),
        v: T.StridedTensor((tokens, HV, V), (vt, vh, 1), dtype),
        inverse: T.Tensor((chunks, HV, C, C), dtype),
        decay: T.Tensor((chunks, HV, C), f32),
        key_scale: T.Tensor((key_chunks, H, C), f32),
        table: T.Tensor((segments, COLUMNS), "int32"),
        carried: T.Tensor((rows, HV, V, K), f32),
        initial: T.Tensor((entries, HV, V, K), f32),
        entry_row: T.Tensor((listed,), "int32"),
        o: T.Tensor((tokens, HV, V), dtype),
        final: T.Tensor((finals, HV, V, K), f32),
        scale: T.float32,
    ):
        with T.Kernel(segments * HV, threads=config.threads) as block:
            q_tile = T.alloc_shared((STAGES, C, K), dtype)
            k_tile = T.alloc_shared((STAGES, C, K), dtype)
            v_tile = T.alloc_shared((STAGES, C, V), dtype)
            t_tile = T.alloc_shared((STAGES, C, C), dtype)
            p_tile = T.alloc_shared((STAGES, C, C), dtype)
            o_tile = T.alloc_shared((V // 64, C, 64), dtype)
            grow = T.alloc_shared((STAGES, C), f32)  # -exp(G), with l2norm times 1 / |k|
            read = T.alloc_shared((STAGES, C), f32)  # scale exp(G), with l2norm times 1 / |q|
            fade = T.alloc_shared((STAGES, C), f32)  # exp(Gc - G), with l2norm times 1 / |k|
            keep = T.alloc_shared((STAGES,), f32)  # exp(Gc)
            gate = T.alloc_shared((STAGES, C), f32)
            k_scale = T.alloc_shared((STAGES, C), f32)  # 1 / |k|, with l2norm
            query = T.alloc_shared((2, C), f32)  # scale, with l2norm times 1 / |q|
            column = T.alloc_shared((2, C), f32)  # G, with l2norm minus log2 1 / |k|
            full = T.alloc_barrier([WARP] * STAGES)
            ready = T.alloc_barrier([SCORERS] * STAGES)
            free = T.alloc_barrier([WORKERS] * STAGES)
            T.annotate_layout({o_tile: make_full_bank_swizzled_layout(o_tile)})
            thread = T.get_thread_binding()
            head = T.alloc_var("int32", init=T.truncmod(block, HV))
            segment = T.alloc_var("int32", init=T.truncdiv(block, HV))
            begin = T.alloc_var("int32", init=table[segment, START])
            end = T.alloc_var("int32", init=table[segment, END])
            count = T.alloc_var("int32", init=T.truncdiv(end - begin + (C - 1), C))
            if thread < WORKERS:
                T.set_max_nreg(config.roles[0].registers, 1)
                state = T.alloc_fragment((V, K), f32)
                state16 = T.alloc_fragment((V, K), dtype)
                recalled = T.alloc_fragment((V, C), f32)
                recalled16 = T.alloc_fragment((V, C), dtype)
                value = T.alloc_fragment((V, C), f32)
                value16 = T.alloc_fragment((V, C), dtype)
                faded16 = T.alloc_fragment((V, C), dtype)
                factor = T.alloc_fragment((C,), f32)
                out = T.alloc_fragment((V, C), f32)
                out16 = T.alloc_fragment((V // 64, C, 64), dtype)  # registers of `out`, named the other way round
                entry = T.alloc_var("int32", init=table[segment, ENTRY])
                chain = T.alloc_var("int32", init=table[segment, CHAIN])
                group = T.alloc_var("int32", init=thread // 128)
                T.annotate_layout({out16: transposed_accumulator(V)})
                first = T.alloc_var("int32", init=-1)
                if has_initial and count > 0:
                    first = entry_row[chain]
                if entry >= 0:
                    T.copy(carried[entry, head, 0:V, 0:K], state)
                elif first >= 0:
                    T.copy(initial[first, head, 0:V, 0:K], state)
                else:
                    T.clear(state)
                slot = T.alloc_var("int32", init=0)
                upcoming = T.alloc_var("int32", init=0)
                phase = T.alloc_var("int32", init=0)
                if count > 0:
                    T.mbarrier_wait_parity(ready[0], 0)
                    T.copy(state, state16)
                    T.wgmma_gemm(
                        state16, k_tile[0, :, :], recalled, transpose_B=True, clear_accum=True, policy=FULL_ROW
                    )
                    T.wait_wgmma(0)
                for i in T.serial(count):
                    T.copy(grow[slot, :], factor)
                    T.wgmma_gemm(state16, q_tile[slot, :, :], out, transpose_B=True, clear_accum=True, policy=FULL_ROW)
                    for a, b in T.Parallel(V, C):
                        recalled16[a, b] = recalled[a, b] * factor[b]
                    T.wait_wgmma(0)
                    T.wgmma_gemm(
                        v_tile[slot, :, :],
                        t_tile[slot, :, :],
                        value,
                        transpose_A=True,
                        transpose_B=True,
                        clear_accum=True,
                        policy=FULL_ROW,
                    )
                    T.wgmma_gemm(recalled16, t_tile[slot, :, :], value, transpose_B=True, policy=FULL_ROW)
                    for a, b in T.Parallel(V, C):
                        out[a, b] = out[a, b] * read[slot, b]
                    for a, b in T.Parallel(V, K):
                        state[a, b] = state[a, b] * keep[slot]
                    T.copy(fade[slot, :], factor)
                    T.wait_wgmma(0)
                    for a, b in T.Parallel(V, C):
                        faded16[a, b] = value[a, b] * factor[b]
                    T.wgmma_gemm(faded16, k_tile[slot, :, :], state, policy=FULL_ROW)
                    T.copy(value, value16)
                    T.wgmma_gemm(value16, p_tile[slot, :, :], out, transpose_B=True, policy=FULL_ROW)
                    T.wait_wgmma(1)
                    # The next chunk's first product runs while this one's output leaves; behind the last chunk it is
                    # repeated on the same keys, for nothing.
                    upcoming = slot
                    if i + 1 < count:
                        upcoming = slot + 1
                        if upcoming == STAGES:
                            upcoming = 0
                            phase = phase ^ 1
                    T.mbarrier_wait_parity(ready[upcoming], phase)
                    T.copy(state, state16)
                    T.wait_wgmma(0)
                    for a, b in T.Parallel(V, C):
                        out16[a // 64, b, a % 64] = T.cast(out[a, b], dtype)
                    T.wgmma_gemm(
                        state16, k_tile[upcoming, :, :], recalled, transpose_B=True, clear_accum=True, policy=FULL_ROW
                    )
                    store_tokens(out16, o_tile, o, begin + i * C, end, head, group, thread, 0)
                    T.wait_wgmma(0)
                    T.mbarrier_arrive(free[slot])
                    slot = upcoming
                T.tma_store_wait(0)
                if has_final and count > 0 and table[segment, LAST] == 1:
                    T.copy(state, final[chain, head, 0:V, 0:K])
            elif thread < WORKERS + SCORERS:
                T.set_max_nreg(config.roles[1].registers, 0)
                row = T.alloc_var("int32", init=thread - WORKERS)
                slot = T.alloc_var("int32", init=0)
                phase = T.alloc_var("int32", init=0)
                x = Scored(
                    q=q_tile,
                    k=k_tile,
                    gate=gate,
                    k_scale=k_scale,
                    grow=grow,
                    read=read,
                    fade=fade,
                    keep=keep,
                    query=query,
                    column=column,
                )
                for i in T.serial(count):
                    length = T.alloc_var("int32", init=end - begin - i * C)
                    T.mbarrier_wait_parity(full[slot], phase)
                    if length < C:
                        clear_tail(k_tile, slot, length, row, SCORERS, K, dtype)
                        clear_tail(v_tile, slot, length, row, SCORERS, V, dtype)
                        T.fence_proxy_async()
                        T.sync_threads(barrier_id=BARRIER, arrive_count=SCORERS)
                    normalize_keys(x, slot, length, row, l2norm)
                    score(x, p_tile, slot, slot, i % 2, row, scale, l2norm)
                    T.fence_proxy_async()
                    T.mbarrier_arrive(ready[slot])
                    slot = slot + 1
                    if slot == STAGES:
                        slot = 0
                        phase = phase ^ 1
            else:
                T.set_max_nreg(config.roles[2].registers, 0)
                if thread < WORKERS + SCORERS + WARP:
                    key_head = T.alloc_var("int32", init=T.truncdiv(head, ratio))
                    chunk = T.alloc_var("int32", init=table[segment, FIRST_CHUNK])
                    slot = T.alloc_var("int32", init=0)
                    phase = T.alloc_var("int32", init=1)
                    for i in T.serial(count):
                        start = T.alloc_var("int32", init=begin + i * C)
                        T.mbarrier_wait_parity(free[slot], phase)
                        T.tma_copy(decay[chunk + i, head, 0:C], gate[slot, :], barrier=full[slot])
                        if l2norm:
                            T.tma_copy(key_scale[chunk + i, key_head, 0:C], k_scale[slot, :], barrier=full[slot])
                        T.tma_copy(k[start : start + C, key_head, 0:K], k_tile[slot, :, :], barrier=full[slot])
                        T.tma_copy(q[start : start + C, key_head, 0:K], q_tile[slot, :, :], barrier=full[slot])
                        T.tma_copy(v[start : start + C, head, 0:V], v_tile[slot, :, :], barrier=full[slot])
                        T.tma_copy(inverse[chunk + i, head, 0:C, 0:C], t_tile[slot, :, :], barrier=full[slot])
                        T.mbarrier_arrive(full[slot])
                        slot = slot + 1
                        if slot == STAGES:
                            slot = 0
                            phase = phase ^ 1

    return forward
