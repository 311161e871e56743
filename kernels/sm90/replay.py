"""States in front of all chunks, and the values that chunks write, for backward: the schedule for sm_90 (wgmma).

The recurrence of the forward without its output; see forward.py for how states are held.

    X = S^T K^T            Y = -X diag(exp G)         U = V^T T^T + Y T^T     (T holds diag(beta))
    S^T = exp(Gc) S^T + (U diag(exp(Gc - G))) K

Roles of a block, which runs one segment of one value head: V / 64 warpgroups run the recurrence and store; C
threads prepare gates and tails, one warp copies. Letters: C chunk, K key dim, V value dim, H key heads, HV value heads.
"""

import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout

from flashqla_cp.kernels.blocks import segments as column
from flashqla_cp.kernels.blocks.prepare import prepare
from flashqla_cp.kernels.blocks.stores import (
    accumulator_panel,
    alloc_panels,
    store_panels,
    store_transposed,
    transposed_accumulator,
)
from flashqla_cp.kernels.chunks import CHUNK as C
from flashqla_cp.kernels.spec import KernelSpec
from flashqla_cp.kernels.tuning import replay_config

FULL_ROW = T.GemmWarpPolicy.FullRow
WARP = 32


def build_replay(spec: KernelSpec):
    """dims: head_dim (K = V), ratio (HV / H). dtypes: qkv. flags: initial_state, l2norm."""
    K = V = spec.dim("head_dim")
    ratio, dtype, f32 = spec.dim("ratio"), spec.dtype("qkv"), "float32"
    config = replay_config(spec)
    STAGES, WORKERS = config.stages, config.roles[0].threads
    has_initial, l2norm = spec.has("initial_state"), spec.has("l2norm")
    tokens, chunks, H, HV, segments, rows, chains, entries, slab = (
        T.dynamic(n) for n in ("tokens", "chunks", "H", "HV", "segments", "rows", "chains", "entries", "slab")
    )
    key_chunks = chunks if l2norm else T.dynamic("key_chunks")
    listed = chains if has_initial else T.dynamic("listed")
    kt, kh, vt, vh = (T.dynamic(n) for n in ("k_token", "k_head", "v_token", "v_head"))

    @T.prim_func
    def replay(
        k: T.StridedTensor((tokens, H, K), (kt, kh, 1), dtype),
        v: T.StridedTensor((tokens, HV, V), (vt, vh, 1), dtype),
        inverse: T.Tensor((chunks, HV, C, C), dtype),
        decay: T.Tensor((chunks, HV, C), f32),
        key_scale: T.Tensor((key_chunks, H, C), f32),
        table: T.Tensor((segments, column.COLUMNS), "int32"),
        carried: T.Tensor((rows, HV, V, K), f32),
        initial: T.Tensor((entries, HV, V, K), f32),
        entry_row: T.Tensor((listed,), "int32"),
        states: T.Tensor((chunks, slab, V, K), dtype),
        values: T.Tensor((chunks, slab, C, V), dtype),
        offset: T.int32,
    ):
        with T.Kernel(segments * slab, threads=config.threads) as block:
            k_tile = T.alloc_shared((STAGES, C, K), dtype)
            v_tile = T.alloc_shared((STAGES, C, V), dtype)
            t_tile = T.alloc_shared((STAGES, C, C), dtype)
            s_tile = alloc_panels(V, K, dtype, T.alloc_shared)
            u_tile = T.alloc_shared((V // 64, C, 64), dtype)
            grow = T.alloc_shared((STAGES, C), f32)  # -exp(G), with l2norm times 1 / |k|
            fade = T.alloc_shared((STAGES, C), f32)  # exp(Gc - G), with l2norm times 1 / |k|
            keep = T.alloc_shared((STAGES,), f32)  # exp(Gc)
            gate = T.alloc_shared((STAGES, C), f32)
            k_scale = T.alloc_shared((STAGES, C), f32)  # 1 / |k|, with l2norm
            gates = (gate, k_scale, grow, fade, keep)
            full = T.alloc_barrier([WARP] * STAGES)
            ready = T.alloc_barrier([C] * STAGES)
            free = T.alloc_barrier([WORKERS] * STAGES)
            T.annotate_layout({tile: make_full_bank_swizzled_layout(tile) for tile in (*s_tile, u_tile)})
            thread = T.get_thread_binding()
            place = T.alloc_var("int32", init=T.truncmod(block, slab))
            head = T.alloc_var("int32", init=offset + place)
            segment = T.alloc_var("int32", init=T.truncdiv(block, slab))
            begin = T.alloc_var("int32", init=table[segment, column.START])
            end = T.alloc_var("int32", init=table[segment, column.END])
            chunk = T.alloc_var("int32", init=table[segment, column.CHUNK])
            count = T.alloc_var("int32", init=T.truncdiv(end - begin + (C - 1), C))
            if thread < WORKERS:
                T.set_max_nreg(config.roles[0].registers, 1)
                state = T.alloc_fragment((V, K), f32)
                state16 = T.alloc_fragment((V, K), dtype)
                panels16 = alloc_panels(V, K, dtype, T.alloc_fragment)
                recalled = T.alloc_fragment((V, C), f32)
                recalled16 = T.alloc_fragment((V, C), dtype)
                value = T.alloc_fragment((V, C), f32)
                value16 = T.alloc_fragment((V // 64, C, 64), dtype)
                faded16 = T.alloc_fragment((V, C), dtype)
                factor = T.alloc_fragment((C,), f32)
                T.annotate_layout({value16: transposed_accumulator(V), **dict.fromkeys(panels16, accumulator_panel(V))})
                entry = T.alloc_var("int32", init=table[segment, column.ENTRY])
                group = T.alloc_var("int32", init=thread // 128)
                first = T.alloc_var("int32", init=-1)
                if has_initial and count > 0:
                    first = entry_row[table[segment, column.CHAIN]]
                if entry >= 0:
                    T.copy(carried[entry, head, 0:V, 0:K], state)
                elif first >= 0:
                    T.copy(initial[first, head, 0:V, 0:K], state)
                else:
                    T.clear(state)
                slot = T.alloc_var("int32", init=0)
                phase = T.alloc_var("int32", init=0)
                for i in T.serial(count):
                    T.mbarrier_wait_parity(ready[slot], phase)
                    T.copy(state, state16)
                    T.copy(grow[slot, :], factor)
                    T.wgmma_gemm(
                        state16, k_tile[slot, :, :], recalled, transpose_B=True, clear_accum=True, policy=FULL_ROW
                    )
                    T.wgmma_gemm(
                        v_tile[slot, :, :],
                        t_tile[slot, :, :],
                        value,
                        transpose_A=True,
                        transpose_B=True,
                        clear_accum=True,
                        policy=FULL_ROW,
                    )
                    store_panels(state, panels16, s_tile, states, chunk + i, place, group, 1)
                    T.wait_wgmma(1)
                    for a, b in T.Parallel(V, C):
                        recalled16[a, b] = recalled[a, b] * factor[b]
                    T.wgmma_gemm(recalled16, t_tile[slot, :, :], value, transpose_B=True, policy=FULL_ROW)
                    for a, b in T.Parallel(V, K):
                        state[a, b] = state[a, b] * keep[slot]
                    T.copy(fade[slot, :], factor)
                    T.wait_wgmma(0)
                    for a, b in T.Parallel(V, C):
                        faded16[a, b] = value[a, b] * factor[b]
                    T.wgmma_gemm(faded16, k_tile[slot, :, :], state, policy=FULL_ROW)
                    for a, b in T.Parallel(V, C):
                        value16[a // 64, b, a % 64] = T.cast(value[a, b], dtype)
                    store_transposed(value16, u_tile, values, chunk + i, place, group, K // 64)
                    T.wait_wgmma(0)
                    T.mbarrier_arrive(free[slot])
                    slot = slot + 1
                    if slot == STAGES:
                        slot = 0
                        phase = phase ^ 1
                T.tma_store_wait(0)
            else:
                T.set_max_nreg(config.roles[1].registers, 0)
                key_head = T.alloc_var("int32", init=T.truncdiv(head, ratio))
                row = T.alloc_var("int32", init=thread - WORKERS)
                slot = T.alloc_var("int32", init=0)
                phase = T.alloc_var("int32", init=0)
                if row < WARP:
                    for i in T.serial(count):
                        start = T.alloc_var("int32", init=begin + i * C)
                        T.mbarrier_wait_parity(free[slot], phase ^ 1)
                        T.tma_copy(decay[chunk + i, head, 0:C], gate[slot, :], barrier=full[slot])
                        if l2norm:
                            T.tma_copy(key_scale[chunk + i, key_head, 0:C], k_scale[slot, :], barrier=full[slot])
                        T.tma_copy(k[start : start + C, key_head, 0:K], k_tile[slot, :, :], barrier=full[slot])
                        T.tma_copy(inverse[chunk + i, head, 0:C, 0:C], t_tile[slot, :, :], barrier=full[slot])
                        T.tma_copy(v[start : start + C, head, 0:V], v_tile[slot, :, :], barrier=full[slot])
                        T.mbarrier_arrive(full[slot])
                        slot = slot + 1
                        if slot == STAGES:
                            slot = 0
                            phase = phase ^ 1
                elif row < WARP + C:
                    for i in T.serial(count):
                        length = T.alloc_var("int32", init=end - begin - i * C)
                        T.mbarrier_wait_parity(full[slot], phase)
                        prepare(gates, k_tile, v_tile, slot, length, row - WARP, l2norm, True)
                        T.mbarrier_arrive(ready[slot])
                        slot = slot + 1
                        if slot == STAGES:
                            slot = 0
                            phase = phase ^ 1

    return replay
