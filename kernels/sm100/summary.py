"""Maps of segments: the schedule for sm_100 (tcgen05).

    boundary_state    E: what the segment makes of a zero state            [rows, HV, V, K], transposed
    correction        M: what it makes of the state in front, transposed   [rows, HV, K, K]

Both run the recurrence of forward.py without its outputs: E from zero, M^T from the identity and with nothing written.
A head whose gates bound ||M|| by exp(threshold) over trailing chunks needs those chunks only, and no M. That is decided
here, for each segment and head; `corrects` tells the others. Of a segment's two blocks per head the second ends at once
then. Segments that nothing follows have no map.

Roles of a block:

    2 warpgroups          what lies between products     wait done, free; arrive given
    1 warpgroup           1 warp copies by TMA           wait free, arrive full
                          1 warp issues the products     wait ready, given; commit done, free
                          2 warps prepare gates, tails   wait full, arrive ready

Letters: C chunk, K key dim, V value dim, H key heads, HV value heads.
"""

import tilelang.language as T

from flashqla_cp.kernels.blocks import segments as column
from flashqla_cp.kernels.blocks.gates import alloc_gates, normalizes_keys, remembered
from flashqla_cp.kernels.blocks.mma import issue
from flashqla_cp.kernels.blocks.prepare import prepare
from flashqla_cp.kernels.blocks.tensor_memory import alloc_recurrence, give, hand_over, take
from flashqla_cp.kernels.chunks import CHUNK as C
from flashqla_cp.kernels.spec import KernelSpec
from flashqla_cp.kernels.tuning import summary_config

HELPERS, WARP = C, 32
# Products that the workers wait for, and what they give to the warp that issues: once a chunk each.
RECALLED, VALUED, PRODUCTS = range(3)
STATE, CORRECTION, FADED, GIFTS = range(4)


def build_summary(spec: KernelSpec):
    """dims: head_dim (K = V), ratio (HV / H). dtypes: qkv. flags: initial_state, l2norm."""
    K = V = spec.dim("head_dim")
    ratio, dtype, f32 = spec.dim("ratio"), spec.dtype("qkv"), "float32"
    config = summary_config(spec)
    STAGES, WORKERS = config.stages, config.roles[0].threads
    has_initial, l2norm = spec.has("initial_state"), spec.has("l2norm")
    in_place = normalizes_keys(l2norm, dtype)
    tokens, chunks, H, HV, segments, rows = (T.dynamic(n) for n in ("tokens", "chunks", "H", "HV", "segments", "rows"))
    key_chunks = chunks if l2norm else T.dynamic("key_chunks")
    kt, kh, vt, vh = (T.dynamic(n) for n in ("k_token", "k_head", "v_token", "v_head"))

    def states(number):
        return T.Tensor((number, HV, V, K), f32)

    @T.prim_func
    def summary(
        k: T.StridedTensor((tokens, H, K), (kt, kh, 1), dtype),
        v: T.StridedTensor((tokens, HV, V), (vt, vh, 1), dtype),
        inverse: T.Tensor((chunks, HV, C, C), dtype),
        decay: T.Tensor((chunks, HV, C), f32),
        key_scale: T.Tensor((key_chunks, H, C), f32),
        bound: T.Tensor((HV, chunks), f32),
        table: T.Tensor((segments, column.COLUMNS), "int32"),
        boundary: states(rows),
        correction: states(rows),
        corrects: T.Tensor((rows, HV), "int32"),
        threshold: T.float32,
    ):
        with T.Kernel(segments * HV * 2, threads=config.threads) as block:
            k_tile = T.alloc_shared((STAGES, C, K), dtype)
            v_tile = T.alloc_shared((STAGES, C, V), dtype)
            t_tile = T.alloc_shared((STAGES, C, C), dtype)
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
            corrected = T.alloc_var("int32", init=block % 2)
            head = T.alloc_var("int32", init=T.truncmod(block // 2, HV))
            segment = T.alloc_var("int32", init=T.truncdiv(block // 2, HV))
            out = T.alloc_var("int32", init=table[segment, column.EXIT])
            first = T.alloc_var("int32", init=0)
            count = T.alloc_var("int32", init=0)  # of the chunks from `first` on
            if out >= 0:
                first = T.truncdiv(table[segment, column.END] - table[segment, column.START] + (C - 1), C)
                count = first
                taken, left = remembered(bound, head, table[segment, column.CHUNK] + count - 1, -1, count, threshold)
                first = count - taken
                needed = T.alloc_var("int32", init=1)
                if left <= threshold:
                    needed = 0
                if not has_initial and table[segment, column.ENTRY] < 0:
                    needed = 0
                if corrected == 0:
                    count = count - first
                    if thread == 0:
                        corrects[out, head] = needed
                else:
                    first = 0
                    if needed == 0:
                        out = -1
            if out < 0:
                count = 0
            if thread < WORKERS:
                T.set_max_nreg(config.roles[0].registers, 1)
                state = T.alloc_fragment((V, K), f32)
                state16 = T.alloc_fragment((V, K), dtype)
                sums = T.alloc_fragment((V, C), f32)
                sums16 = T.alloc_fragment((V, C), dtype)
                slot = T.alloc_var("int32", init=0)
                phase = T.alloc_var("int32", init=0)
                spent = T.alloc_var("int32", init=0)
                turn = T.alloc_var("int32", init=0)
                for a, b in T.Parallel(V, K):
                    state[a, b] = T.if_then_else(a == b, T.cast(corrected, f32), 0.0)
                if count > 0:
                    T.mbarrier_wait_parity(ready[0], 0)
                    hand_over(state, state16, state_operand, state_sum, keep[0], given, STATE, V == 64)
                for i in T.serial(count):
                    take(done, RECALLED, i % 2)
                    T.copy(recalled_sum, sums)
                    for a, b in T.Parallel(V, C):
                        sums16[a, b] = sums[a, b] * grow[slot, b]
                    T.copy(sums16, recalled_operand)
                    give(given, CORRECTION, V == 64)
                    take(done, VALUED, i % 2)
                    T.copy(value_sum, sums)
                    for a, b in T.Parallel(V, C):
                        sums16[a, b] = sums[a, b] * fade[slot, b]
                    T.copy(sums16, faded_operand)
                    give(given, FADED, V == 64)
                    spent = slot
                    turn = phase
                    slot = slot + 1
                    if slot == STAGES:
                        slot = 0
                        phase = phase ^ 1
                    if i + 1 < count:
                        T.mbarrier_wait_parity(ready[slot], phase)
                    take(free, spent, turn)
                    T.copy(state_sum, state)
                    if i + 1 < count:
                        hand_over(state, state16, state_operand, state_sum, keep[slot], given, STATE, V == 64)
                if out >= 0:
                    if corrected == 0:
                        T.copy(state, boundary[out, head, 0:V, 0:K])
                    else:
                        T.copy(state, correction[out, head, 0:K, 0:K])
            else:
                T.set_max_nreg(config.roles[1].registers, 0)
                if thread < WORKERS + WARP:
                    key_head = T.alloc_var("int32", init=T.truncdiv(head, ratio))
                    chunk = T.alloc_var("int32", init=table[segment, column.CHUNK] + first)
                    start = T.alloc_var("int32", init=table[segment, column.START] + first * C)
                    slot = T.alloc_var("int32", init=0)
                    phase = T.alloc_var("int32", init=1)
                    for _ in T.serial(count):
                        T.mbarrier_wait_parity(free[slot], phase)
                        if in_place:
                            T.fence_proxy_async()  # others wrote there, as ordinary threads
                        T.tma_copy(decay[chunk, head, 0:C], gate[slot, :], barrier=full[slot])
                        if l2norm:
                            T.tma_copy(key_scale[chunk, key_head, 0:C], k_scale[slot, :], barrier=full[slot])
                        T.tma_copy(k[start : start + C, key_head, 0:K], k_tile[slot, :, :], barrier=full[slot])
                        T.tma_copy(inverse[chunk, head, 0:C, 0:C], t_tile[slot, :, :], barrier=full[slot])
                        if corrected == 0:
                            T.tma_copy(v[start : start + C, head, 0:V], v_tile[slot, :, :], barrier=full[slot])
                        T.mbarrier_arrive(full[slot])
                        chunk = chunk + 1
                        start = start + C
                        slot = slot + 1
                        if slot == STAGES:
                            slot = 0
                            phase = phase ^ 1
                elif thread < WORKERS + 2 * WARP:
                    slot = T.alloc_var("int32", init=0)
                    phase = T.alloc_var("int32", init=0)
                    for i in T.serial(count):
                        take(ready, slot, phase)
                        if corrected == 0:
                            issue(v_tile[slot, :, :], t_tile[slot, :, :], value_sum, None, left_t=True)
                        take(given, STATE, i % 2)
                        issue(state_operand, k_tile[slot, :, :], recalled_sum, done[RECALLED])
                        take(given, CORRECTION, i % 2)
                        issue(recalled_operand, t_tile[slot, :, :], value_sum, done[VALUED], clear=corrected == 1)
                        take(given, FADED, i % 2)
                        issue(faded_operand, k_tile[slot, :, :], state_sum, free[slot], clear=False, right_t=False)
                        slot = slot + 1
                        if slot == STAGES:
                            slot = 0
                            phase = phase ^ 1
                else:
                    row = T.alloc_var("int32", init=thread - (WORKERS + 2 * WARP))
                    length = T.alloc_var("int32", init=table[segment, column.END] - table[segment, column.START])
                    slot = T.alloc_var("int32", init=0)
                    phase = T.alloc_var("int32", init=0)
                    length = length - first * C
                    for _ in T.serial(count):
                        T.mbarrier_wait_parity(full[slot], phase)
                        prepare(gates, k_tile, v_tile, slot, length, row, l2norm, corrected == 0)
                        T.mbarrier_arrive(ready[slot])
                        length = length - C
                        slot = slot + 1
                        if slot == STAGES:
                            slot = 0
                            phase = phase ^ 1
            T.tcgen05_before_thread_sync()
            T.sync_threads()

    return summary
