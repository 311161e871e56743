"""Maps of segments: the schedule for sm_90 (wgmma).

    boundary_state    E: what the segment makes of a zero state            [rows, HV, V, K], transposed
    correction        M: what it makes of the state in front, transposed   [rows, HV, K, K]

Both run the recurrence of forward.py without its outputs: E from zero, M^T from the identity and with nothing written.
A head whose gates bound ||M|| by exp(threshold) over trailing chunks needs those chunks only, and no M. That is decided
here, for each segment and head; `corrects` tells the others. Of a segment's two blocks per head the second ends at once
then. Segments that nothing follows have no map.

Roles of a block: K / 64 warpgroups run the recurrence, C threads prepare gates and tails, one warp copies.
Letters: C chunk, K key dim, V value dim, H key heads, HV value heads.
"""

import tilelang.language as T

from flashqla_cp.kernels.blocks import segments as column
from flashqla_cp.kernels.blocks.gates import remembered
from flashqla_cp.kernels.blocks.prepare import prepare
from flashqla_cp.kernels.chunks import CHUNK as C
from flashqla_cp.kernels.spec import KernelSpec
from flashqla_cp.kernels.tuning import summary_config

FULL_ROW = T.GemmWarpPolicy.FullRow
WARP = 32


def build_summary(spec: KernelSpec):
    """dims: head_dim (K = V), ratio (HV / H). dtypes: qkv. flags: initial_state, l2norm."""
    K = V = spec.dim("head_dim")
    ratio, dtype, f32 = spec.dim("ratio"), spec.dtype("qkv"), "float32"
    config = summary_config(spec)
    STAGES, WORKERS = config.stages, config.roles[0].threads
    has_initial, l2norm = spec.has("initial_state"), spec.has("l2norm")
    tokens, chunks, H, HV, segments, rows = (T.dynamic(n) for n in ("tokens", "chunks", "H", "HV", "segments", "rows"))
    key_chunks = chunks if l2norm else T.dynamic("key_chunks")
    kt, kh, vt, vh = (T.dynamic(n) for n in ("k_token", "k_head", "v_token", "v_head"))

    @T.macro
    def recur(writes, state, first, count, k_tile, v_tile, t_tile, grow, fade, keep, ready, free):
        """Run chunks first..count from `state`; with `writes` False only what is remembered moves."""
        state16 = T.alloc_fragment((V, K), dtype)
        recalled = T.alloc_fragment((V, C), f32)
        recalled16 = T.alloc_fragment((V, C), dtype)
        value = T.alloc_fragment((V, C), f32)
        faded16 = T.alloc_fragment((V, C), dtype)
        factor = T.alloc_fragment((C,), f32)
        slot = T.alloc_var("int32", init=0)
        phase = T.alloc_var("int32", init=0)
        for _ in T.serial(count - first):
            T.mbarrier_wait_parity(ready[slot], phase)
            T.copy(state, state16)
            T.copy(grow[slot, :], factor)
            T.wgmma_gemm(state16, k_tile[slot, :, :], recalled, transpose_B=True, clear_accum=True, policy=FULL_ROW)
            if writes:
                T.wgmma_gemm(
                    v_tile[slot, :, :],
                    t_tile[slot, :, :],
                    value,
                    transpose_A=True,
                    transpose_B=True,
                    clear_accum=True,
                    policy=FULL_ROW,
                )
                T.wait_wgmma(1)
            else:
                T.wait_wgmma(0)
            for a, b in T.Parallel(V, C):
                recalled16[a, b] = recalled[a, b] * factor[b]
            T.wgmma_gemm(
                recalled16, t_tile[slot, :, :], value, transpose_B=True, clear_accum=not writes, policy=FULL_ROW
            )
            for a, b in T.Parallel(V, K):
                state[a, b] = state[a, b] * keep[slot]
            T.copy(fade[slot, :], factor)
            T.wait_wgmma(0)
            for a, b in T.Parallel(V, C):
                faded16[a, b] = value[a, b] * factor[b]
            T.wgmma_gemm(faded16, k_tile[slot, :, :], state, policy=FULL_ROW)
            T.wait_wgmma(0)
            T.mbarrier_arrive(free[slot])
            slot = slot + 1
            if slot == STAGES:
                slot = 0
                phase = phase ^ 1

    @T.prim_func
    def summary(
        k: T.StridedTensor((tokens, H, K), (kt, kh, 1), dtype),
        v: T.StridedTensor((tokens, HV, V), (vt, vh, 1), dtype),
        inverse: T.Tensor((chunks, HV, C, C), dtype),
        decay: T.Tensor((chunks, HV, C), f32),
        key_scale: T.Tensor((key_chunks, H, C), f32),
        bound: T.Tensor((HV, chunks), f32),
        table: T.Tensor((segments, column.COLUMNS), "int32"),
        boundary: T.Tensor((rows, HV, V, K), f32),
        correction: T.Tensor((rows, HV, K, K), f32),
        corrects: T.Tensor((rows, HV), "int32"),
        threshold: T.float32,
    ):
        with T.Kernel(segments * HV * 2, threads=config.threads) as block:
            k_tile = T.alloc_shared((STAGES, C, K), dtype)
            v_tile = T.alloc_shared((STAGES, C, V), dtype)
            t_tile = T.alloc_shared((STAGES, C, C), dtype)
            grow = T.alloc_shared((STAGES, C), f32)  # -exp(G)
            fade = T.alloc_shared((STAGES, C), f32)  # exp(Gc - G)
            gate = T.alloc_shared((STAGES, C), f32)
            keep = T.alloc_shared((STAGES,), f32)  # exp(Gc)
            k_scale = T.alloc_shared((STAGES, C), f32)  # 1 / |k|, with l2norm
            gates = (gate, k_scale, grow, fade, keep)
            full = T.alloc_barrier([WARP] * STAGES)
            ready = T.alloc_barrier([C] * STAGES)
            free = T.alloc_barrier([WORKERS] * STAGES)
            thread = T.get_thread_binding()
            corrected = T.alloc_var("int32", init=block % 2)
            head = T.alloc_var("int32", init=T.truncmod(block // 2, HV))
            segment = T.alloc_var("int32", init=T.truncdiv(block // 2, HV))
            out = T.alloc_var("int32", init=table[segment, column.EXIT])
            if out >= 0:
                begin = T.alloc_var("int32", init=table[segment, column.START])
                end = T.alloc_var("int32", init=table[segment, column.END])
                chunk = T.alloc_var("int32", init=table[segment, column.CHUNK])
                count = T.alloc_var("int32", init=T.truncdiv(end - begin + (C - 1), C))
                taken, left = remembered(bound, head, chunk + count - 1, -1, count, threshold)
                first = T.alloc_var("int32", init=count - taken)
                needed = T.alloc_var("int32", init=1)
                if left <= threshold:
                    needed = 0
                if not has_initial and table[segment, column.ENTRY] < 0:
                    needed = 0
                if corrected == 0 and thread == 0:
                    corrects[out, head] = needed
                if corrected == 0 or needed == 1:
                    if corrected == 1:
                        first = 0
                    if thread < WORKERS:
                        T.set_max_nreg(config.roles[0].registers, 1)
                        state = T.alloc_fragment((V, K), f32)
                        if corrected == 0:
                            T.clear(state)
                            recur(True, state, first, count, k_tile, v_tile, t_tile, grow, fade, keep, ready, free)
                            T.copy(state, boundary[out, head, 0:V, 0:K])
                        else:
                            for a, b in T.Parallel(K, K):
                                state[a, b] = T.if_then_else(a == b, 1.0, 0.0)
                            recur(False, state, first, count, k_tile, v_tile, t_tile, grow, fade, keep, ready, free)
                            T.copy(state, correction[out, head, 0:K, 0:K])
                    else:
                        T.set_max_nreg(config.roles[1].registers, 0)
                        key_head = T.alloc_var("int32", init=T.truncdiv(head, ratio))
                        row = T.alloc_var("int32", init=thread - WORKERS)
                        slot = T.alloc_var("int32", init=0)
                        phase = T.alloc_var("int32", init=0)
                        if row < WARP:
                            for i in T.serial(count - first):
                                start = T.alloc_var("int32", init=begin + (first + i) * C)
                                T.mbarrier_wait_parity(free[slot], phase ^ 1)
                                T.tma_copy(decay[chunk + first + i, head, 0:C], gate[slot, :], barrier=full[slot])
                                if l2norm:
                                    T.tma_copy(
                                        key_scale[chunk + first + i, key_head, 0:C],
                                        k_scale[slot, :],
                                        barrier=full[slot],
                                    )
                                T.tma_copy(k[start : start + C, key_head, 0:K], k_tile[slot, :, :], barrier=full[slot])
                                T.tma_copy(
                                    inverse[chunk + first + i, head, 0:C, 0:C], t_tile[slot, :, :], barrier=full[slot]
                                )
                                if corrected == 0:
                                    T.tma_copy(v[start : start + C, head, 0:V], v_tile[slot, :, :], barrier=full[slot])
                                T.mbarrier_arrive(full[slot])
                                slot = slot + 1
                                if slot == STAGES:
                                    slot = 0
                                    phase = phase ^ 1
                        elif row < WARP + C:
                            for i in T.serial(count - first):
                                length = T.alloc_var("int32", init=end - begin - (first + i) * C)
                                T.mbarrier_wait_parity(full[slot], phase)
                                prepare(gates, k_tile, v_tile, slot, length, row - WARP, l2norm, corrected == 0)
                                T.mbarrier_arrive(ready[slot])
                                slot = slot + 1
                                if slot == STAGES:
                                    slot = 0
                                    phase = phase ^ 1

    return summary
