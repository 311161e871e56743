"""States in front of every chunk and its values once more, for the backward: the schedule for sm_100 (tcgen05).

The recurrence of summary.py from the state in front of a segment, S held transposed, S^T [V, K]:

    X = S^T K^T     Y = -X diag(exp G)     U = V^T T^T + Y T^T     S^T = exp(Gc) S^T + (U diag(exp(Gc - G))) K

T holds diag(beta). Stored are S^T and U^T, rounded, a chunk each.

Roles of a block, which runs one segment of one value head:

    2 warpgroups          what lies between products     wait done, free; arrive given
    1 warpgroup           1 warp copies by TMA           wait free, arrive full
                          1 warp issues the products     wait ready, given; commit done, free
                          2 warps prepare gates, tails   wait full, arrive ready

Letters: C chunk, K key dim, V value dim, H key heads, HV value heads.
"""

import tilelang.language as T

from flashqla_cp.kernels.blocks import segments as column
from flashqla_cp.kernels.blocks.gates import alloc_gates, normalizes_keys
from flashqla_cp.kernels.blocks.mma import issue
from flashqla_cp.kernels.blocks.outlets import (
    alloc_outlet,
    close_outlets,
    fill_rows,
    fill_state,
    open_outlets,
    outlet_layouts,
    send_block,
)
from flashqla_cp.kernels.blocks.prepare import prepare
from flashqla_cp.kernels.blocks.tensor_memory import alloc_recurrence, give, hand_over, take
from flashqla_cp.kernels.chunks import CHUNK as C
from flashqla_cp.kernels.spec import KernelSpec
from flashqla_cp.kernels.tuning import replay_config

HELPERS, WARP = C, 32
# Products that the workers wait for, and what they give to the warp that issues: once a chunk each.
RECALLED, VALUED, PRODUCTS = range(3)
STATE, CORRECTION, FADED, GIFTS = range(4)


def build_replay(spec: KernelSpec):
    """dims: head_dim (K = V), ratio (HV / H). dtypes: qkv. flags: l2norm, initial_state.

    Value heads from `first` on, as many as states16 [chunks, heads, V, K] and values16 [chunks, heads, C, V] have.
    """
    K = V = spec.dim("head_dim")
    ratio, dtype, f32 = spec.dim("ratio"), spec.dtype("qkv"), "float32"
    config = replay_config(spec)
    STAGES, WORKERS = config.stages, config.roles[0].threads
    has_initial, l2norm = spec.has("initial_state"), spec.has("l2norm")
    in_place = normalizes_keys(l2norm, dtype)
    tokens, chunks, H, HV, heads, segments, rows, entries = (
        T.dynamic(n) for n in ("tokens", "chunks", "H", "HV", "heads", "segments", "rows", "entries")
    )
    key_chunks, chains = chunks if l2norm else T.dynamic("key_chunks"), T.dynamic("chains")
    kt, kh, vt, vh = (T.dynamic(n) for n in ("k_token", "k_head", "v_token", "v_head"))

    def states(number):
        return T.Tensor((number, HV, V, K), f32)

    @T.prim_func
    def replay(
        k: T.StridedTensor((tokens, H, K), (kt, kh, 1), dtype),
        v: T.StridedTensor((tokens, HV, V), (vt, vh, 1), dtype),
        inverse: T.Tensor((chunks, HV, C, C), dtype),
        decay: T.Tensor((chunks, HV, C), f32),
        key_scale: T.Tensor((key_chunks, H, C), f32),
        table: T.Tensor((segments, column.COLUMNS), "int32"),
        carried: states(rows),
        initial: states(entries),
        entry_row: T.Tensor((chains,), "int32"),
        states16: T.Tensor((chunks, heads, V, K), dtype),
        values16: T.Tensor((chunks, heads, C, V), dtype),
        first: T.int32,
    ):
        with T.Kernel(segments * heads, threads=config.threads) as block:
            k_tile = T.alloc_shared((STAGES, C, K), dtype)
            v_tile = T.alloc_shared((STAGES, C, V), dtype)
            t_tile = T.alloc_shared((STAGES, C, C), dtype)
            u_tile = alloc_outlet(C, V, dtype)
            s_tile = alloc_outlet(V, K, dtype)
            T.annotate_layout(outlet_layouts(u_tile, s_tile))
            gates = alloc_gates(STAGES)
            gate, k_scale, grow, fade, keep = gates
            accumulators, operands = alloc_recurrence(V, K, C, 2, dtype)
            state_sum, recalled_sum, value_sum = accumulators
            state_operand, recalled_operand, faded_operand = operands
            full = T.alloc_barrier([WARP] * STAGES)
            ready = T.alloc_barrier([HELPERS] * STAGES)
            free = T.alloc_barrier([1] * STAGES)
            done = T.alloc_barrier([1] * PRODUCTS)
            given = T.alloc_barrier([WORKERS] * GIFTS)
            thread = T.get_thread_binding()
            place = T.alloc_var("int32", init=T.truncmod(block, heads))
            head = T.alloc_var("int32", init=first + place)
            segment = T.alloc_var("int32", init=T.truncdiv(block, heads))
            chunk = T.alloc_var("int32", init=table[segment, column.CHUNK])
            begin = T.alloc_var("int32", init=table[segment, column.START])
            end = T.alloc_var("int32", init=table[segment, column.END])
            count = T.alloc_var("int32", init=T.truncdiv(end - begin + (C - 1), C))
            if thread < WORKERS:
                T.set_max_nreg(config.roles[0].registers, 1)
                state = T.alloc_fragment((V, K), f32)
                state16 = T.alloc_fragment((V, K), dtype)
                sums = T.alloc_fragment((V, C), f32)
                sums16 = T.alloc_fragment((V, C), dtype)
                entry = T.alloc_var("int32", init=table[segment, column.ENTRY])
                known = T.alloc_var("int32", init=-1)
                if has_initial and count > 0:
                    known = entry_row[table[segment, column.CHAIN]]
                if entry >= 0:
                    T.copy(carried[entry, head, 0:V, 0:K], state)
                elif known >= 0:
                    T.copy(initial[known, head, 0:V, 0:K], state)
                else:
                    T.clear(state)
                if count > 0:
                    T.mbarrier_wait_parity(ready[0], 0)
                    hand_over(state, state16, state_operand, state_sum, keep[0], given, STATE, V == 64)
                    fill_state(state16, s_tile)
                    close_outlets(WORKERS)
                    send_block(s_tile, states16, chunk, place, WORKERS)
                for i in T.serial(count):
                    slot = T.alloc_var("int32", init=T.truncmod(i, STAGES))
                    upcoming = T.alloc_var("int32", init=T.truncmod(i + 1, STAGES))
                    take(done, RECALLED, i % 2)
                    T.copy(recalled_sum, sums)
                    for a, b in T.Parallel(V, C):
                        sums16[a, b] = sums[a, b] * grow[slot, b]
                    T.copy(sums16, recalled_operand)
                    give(given, CORRECTION, V == 64)
                    take(done, VALUED, i % 2)
                    T.copy(value_sum, sums)
                    if i + 1 < count:  # else nobody asks for the state behind
                        for a, b in T.Parallel(V, C):
                            sums16[a, b] = sums[a, b] * fade[slot, b]
                        T.copy(sums16, faded_operand)
                        give(given, FADED, V == 64)
                        T.mbarrier_wait_parity(ready[upcoming], T.truncdiv(i + 1, STAGES) % 2)
                        take(free, slot, T.truncdiv(i, STAGES) % 2)
                        T.copy(state_sum, state)
                        hand_over(state, state16, state_operand, state_sum, keep[upcoming], given, STATE, V == 64)
                    open_outlets(WORKERS)
                    fill_rows(sums, u_tile)
                    if i + 1 < count:
                        fill_state(state16, s_tile)
                    close_outlets(WORKERS)
                    send_block(u_tile, values16, chunk + i, place, WORKERS)
                    if i + 1 < count:
                        send_block(s_tile, states16, chunk + i + 1, place, WORKERS)
                T.tma_store_wait(0)
            else:
                T.set_max_nreg(config.roles[1].registers, 0)
                if thread < WORKERS + WARP:
                    key_head = T.alloc_var("int32", init=T.truncdiv(head, ratio))
                    for i in T.serial(count):
                        slot = T.alloc_var("int32", init=T.truncmod(i, STAGES))
                        start = T.alloc_var("int32", init=begin + i * C)
                        T.mbarrier_wait_parity(free[slot], T.truncdiv(i, STAGES) % 2 ^ 1)
                        if in_place:
                            T.fence_proxy_async()  # others wrote there, as ordinary threads
                        T.tma_copy(decay[chunk + i, head, 0:C], gate[slot, :], barrier=full[slot])
                        if l2norm:
                            T.tma_copy(key_scale[chunk + i, key_head, 0:C], k_scale[slot, :], barrier=full[slot])
                        T.tma_copy(k[start : start + C, key_head, 0:K], k_tile[slot, :, :], barrier=full[slot])
                        T.tma_copy(v[start : start + C, head, 0:V], v_tile[slot, :, :], barrier=full[slot])
                        T.tma_copy(inverse[chunk + i, head, 0:C, 0:C], t_tile[slot, :, :], barrier=full[slot])
                        T.mbarrier_arrive(full[slot])
                elif thread < WORKERS + 2 * WARP:
                    for i in T.serial(count):
                        slot = T.alloc_var("int32", init=T.truncmod(i, STAGES))
                        take(ready, slot, T.truncdiv(i, STAGES) % 2)
                        issue(v_tile[slot, :, :], t_tile[slot, :, :], value_sum, None, left_t=True)
                        take(given, STATE, i % 2)
                        issue(state_operand, k_tile[slot, :, :], recalled_sum, done[RECALLED])
                        take(given, CORRECTION, i % 2)
                        issue(recalled_operand, t_tile[slot, :, :], value_sum, done[VALUED], clear=False)
                        if i + 1 < count:
                            take(given, FADED, i % 2)
                            issue(faded_operand, k_tile[slot, :, :], state_sum, free[slot], clear=False, right_t=False)
                else:
                    row = T.alloc_var("int32", init=thread - (WORKERS + 2 * WARP))
                    for i in T.serial(count):
                        slot = T.alloc_var("int32", init=T.truncmod(i, STAGES))
                        T.mbarrier_wait_parity(full[slot], T.truncdiv(i, STAGES) % 2)
                        prepare(gates, k_tile, v_tile, slot, end - begin - i * C, row, l2norm, True)
                        T.mbarrier_arrive(ready[slot])
            T.tcgen05_before_thread_sync()
            T.sync_threads()

    return replay
