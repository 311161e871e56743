"""Output and exit states of every segment: the schedule for sm_100 (tcgen05).

The sm_100 schedules are emulator-verified, not yet run on hardware. States are held transposed, S^T [V, K]; sums are in
tensor memory, and so are left operands for V = 128; for V = 64 they go through shared memory.

    X = S^T K^T            Y = -X diag(exp G)         U = V^T T^T + Y T^T     (T holds diag(beta))
    O^T = (S^T Q^T) diag(scale exp G) + U P^T         S^T = exp(Gc) S^T + (U diag(exp(Gc - G))) K

Roles of a block, which runs one segment of one value head:

    2 warpgroups          what lies between products     wait done, free; arrive given
    1 warpgroup           scores, one chunk ahead:       wait full, arrive ready
                          P = scale (Q K^T) exp(G_i - G_j)
    1 warp                issues the other products      wait ready, given; commit done, free
    1 warp                copies by TMA                  wait free, arrive full

Letters: C chunk, K key dim, V value dim, H key heads, HV value heads.
"""

import tilelang.language as T

from flashqla_cp.kernels.blocks.chunk_io import clear_tail
from flashqla_cp.kernels.blocks.gates import normalizes_keys
from flashqla_cp.kernels.blocks.mma import issue
from flashqla_cp.kernels.blocks.outlets import (
    alloc_outlet,
    close_outlets,
    fill_rows,
    open_outlets,
    outlet_layouts,
    send_rows,
)
from flashqla_cp.kernels.blocks.scores import SCORERS, normalize_keys
from flashqla_cp.kernels.blocks.segments import CHAIN, COLUMNS, END, ENTRY, LAST, START
from flashqla_cp.kernels.blocks.segments import CHUNK as FIRST_CHUNK
from flashqla_cp.kernels.blocks.tcgen05_scores import alloc_scored, finish_scores, start_scores
from flashqla_cp.kernels.blocks.tensor_memory import alloc_recurrence, give, hand_over, take
from flashqla_cp.kernels.chunks import CHUNK as C
from flashqla_cp.kernels.spec import KernelSpec
from flashqla_cp.kernels.tuning import forward_config

WARP = 32
# Products that the workers wait for, and what they give to the warp that issues: once a chunk each.
RECALLED, QUERIED, VALUED, UPDATED, PRODUCTS = range(5)
STATE, CORRECTION, FADED, VALUE, EMPTY, GIFTS = range(6)


def build_forward(spec: KernelSpec):
    """dims: head_dim (K = V), ratio (HV / H). dtypes: qkv. flags: initial_state, final_state, l2norm."""
    has_initial, has_final, l2norm = (spec.has(flag) for flag in ("initial_state", "final_state", "l2norm"))
    K = V = spec.dim("head_dim")
    ratio, dtype, f32 = spec.dim("ratio"), spec.dtype("qkv"), "float32"
    in_place = normalizes_keys(l2norm, dtype)
    config = forward_config(spec)
    STAGES, WORKERS = config.stages, config.roles[0].threads
    tokens, chunks, H, HV, segments, rows, chains, entries = (
        T.dynamic(n) for n in ("tokens", "chunks", "H", "HV", "segments", "rows", "chains", "entries")
    )
    key_chunks = chunks if l2norm else T.dynamic("key_chunks")
    listed = chains if has_initial else T.dynamic("listed")
    finals = chains if has_final else T.dynamic("finals")
    qt, qh, kt, kh, vt, vh = (T.dynamic(n) for n in ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head"))

    def states(number):
        return T.Tensor((number, HV, V, K), f32)

    @T.prim_func
    def forward(
        q: T.StridedTensor((tokens, H, K), (qt, qh, 1), dtype),
        k: T.StridedTensor((tokens, H, K), (kt, kh, 1), dtype),
        v: T.StridedTensor((tokens, HV, V), (vt, vh, 1), dtype),
        inverse: T.Tensor((chunks, HV, C, C), dtype),
        decay: T.Tensor((chunks, HV, C), f32),
        key_scale: T.Tensor((key_chunks, H, C), f32),
        table: T.Tensor((segments, COLUMNS), "int32"),
        carried: states(rows),
        initial: states(entries),
        entry_row: T.Tensor((listed,), "int32"),
        o: T.Tensor((tokens, HV, V), dtype),
        final: states(finals),
        scale: T.float32,
    ):
        with T.Kernel(segments * HV, threads=config.threads) as block:
            v_tile = T.alloc_shared((STAGES, C, V), dtype)
            t_tile = T.alloc_shared((STAGES, C, C), dtype)
            o_tile = alloc_outlet(C, V, dtype)
            sums, operands = alloc_recurrence(V, K, C, 3, dtype)
            state_sum, recalled_sum, value_sum, out_sum = sums
            state_operand, value_operand, faded_operand = operands  # the second of Y, then of U
            x = alloc_scored(STAGES, K, dtype)
            full = T.alloc_barrier([WARP] * STAGES)
            ready = T.alloc_barrier([SCORERS] * STAGES)
            free = T.alloc_barrier([1] * STAGES)
            done = T.alloc_barrier([1] * PRODUCTS)
            given = T.alloc_barrier([WORKERS] * GIFTS)
            T.annotate_layout(outlet_layouts(o_tile))
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
                narrow = T.alloc_fragment((V, C), f32)
                narrow16 = T.alloc_fragment((V, C), dtype)
                faded16 = T.alloc_fragment((V, C), dtype)
                out = T.alloc_fragment((V, C), f32)
                entry = T.alloc_var("int32", init=table[segment, ENTRY])
                chain = T.alloc_var("int32", init=table[segment, CHAIN])
                slot = T.alloc_var("int32", init=0)
                phase = T.alloc_var("int32", init=0)
                upcoming = T.alloc_var("int32", init=0)
                turn = T.alloc_var("int32", init=0)
                first = T.alloc_var("int32", init=-1)
                if has_initial and count > 0:
                    first = entry_row[chain]
                if entry >= 0:
                    T.copy(carried[entry, head, 0:V, 0:K], state)
                elif first >= 0:
                    T.copy(initial[first, head, 0:V, 0:K], state)
                else:
                    T.clear(state)
                if count > 0:
                    T.mbarrier_wait_parity(ready[0], 0)
                    hand_over(state, state16, state_operand, state_sum, x.keep[0], given, STATE, V == 64)
                for i in T.serial(count):
                    take(done, RECALLED, i % 2)
                    T.copy(recalled_sum, narrow)
                    for a, b in T.Parallel(V, C):
                        narrow16[a, b] = narrow[a, b] * x.grow[slot, b]
                    T.copy(narrow16, value_operand)
                    give(given, CORRECTION, V == 64)
                    take(done, QUERIED, i % 2)
                    T.copy(out_sum, out)
                    for a, b in T.Parallel(V, C):
                        out[a, b] = out[a, b] * x.read[slot, b]
                    take(done, VALUED, i % 2)
                    T.copy(value_sum, narrow)
                    for a, b in T.Parallel(V, C):
                        faded16[a, b] = narrow[a, b] * x.fade[slot, b]
                    T.copy(faded16, faded_operand)
                    give(given, FADED, V == 64)
                    T.copy(narrow, narrow16)
                    T.copy(narrow16, value_operand)
                    give(given, VALUE, V == 64)
                    upcoming = slot + 1
                    turn = phase
                    if upcoming == STAGES:
                        upcoming = 0
                        turn = phase ^ 1
                    if i + 1 < count:
                        T.mbarrier_wait_parity(ready[upcoming], turn)
                    take(done, UPDATED, i % 2)
                    T.copy(state_sum, state)
                    if i + 1 < count:
                        hand_over(state, state16, state_operand, state_sum, x.keep[upcoming], given, STATE, V == 64)
                    take(free, slot, phase)
                    T.copy(out_sum, narrow)
                    give(given, EMPTY, V == 64)
                    for a, b in T.Parallel(V, C):
                        out[a, b] = out[a, b] + narrow[a, b]
                    open_outlets(WORKERS)
                    fill_rows(out, o_tile)
                    close_outlets(WORKERS)
                    send_rows(o_tile, o, begin + i * C, end, head, thread, WORKERS)
                    slot = upcoming
                    phase = turn
                T.tma_store_wait(0)
                if has_final and count > 0 and table[segment, LAST] == 1:
                    T.copy(state, final[chain, head, 0:V, 0:K])
            elif thread < WORKERS + SCORERS:
                T.set_max_nreg(config.roles[1].registers, 0)
                scores = T.alloc_fragment((C, C), f32)
                scores16 = T.alloc_fragment((C, C), dtype)
                row = T.alloc_var("int32", init=thread - WORKERS)
                slot = T.alloc_var("int32", init=0)
                phase = T.alloc_var("int32", init=0)
                for i in T.serial(count):
                    length = T.alloc_var("int32", init=end - begin - i * C)
                    T.mbarrier_wait_parity(full[slot], phase)
                    if length < C:
                        clear_tail(x.k, slot, length, row, SCORERS, K, dtype)
                        clear_tail(v_tile, slot, length, row, SCORERS, V, dtype)
                        T.fence_proxy_async()
                    normalize_keys(x, slot, length, row, l2norm)
                    start_scores(x, slot, i % 2, row, scale, l2norm)
                    finish_scores(x, slot, i % 2, scores, scores16)
                    T.fence_proxy_async()
                    T.mbarrier_arrive(ready[slot])
                    slot = slot + 1
                    if slot == STAGES:
                        slot = 0
                        phase = phase ^ 1
            else:
                T.set_max_nreg(config.roles[2].registers, 0)
                if thread < WORKERS + SCORERS + WARP:
                    slot = T.alloc_var("int32", init=0)
                    phase = T.alloc_var("int32", init=0)
                    for i in T.serial(count):
                        take(ready, slot, phase)
                        issue(v_tile[slot, :, :], t_tile[slot, :, :], value_sum, None, left_t=True)
                        take(given, STATE, i % 2)
                        issue(state_operand, x.k[slot, :, :], recalled_sum, done[RECALLED])
                        take(given, EMPTY, i % 2 ^ 1)
                        issue(state_operand, x.q[slot, :, :], out_sum, done[QUERIED])
                        take(given, CORRECTION, i % 2)
                        issue(value_operand, t_tile[slot, :, :], value_sum, done[VALUED], clear=False)
                        take(given, FADED, i % 2)
                        issue(faded_operand, x.k[slot, :, :], state_sum, done[UPDATED], clear=False, right_t=False)
                        take(given, VALUE, i % 2)
                        issue(value_operand, x.p[slot, :, :], out_sum, free[slot])
                        slot = slot + 1
                        if slot == STAGES:
                            slot = 0
                            phase = phase ^ 1
                elif thread < WORKERS + SCORERS + 2 * WARP:
                    key_head = T.alloc_var("int32", init=T.truncdiv(head, ratio))
                    chunk = T.alloc_var("int32", init=table[segment, FIRST_CHUNK])
                    slot = T.alloc_var("int32", init=0)
                    phase = T.alloc_var("int32", init=1)
                    start = T.alloc_var("int32", init=begin)
                    for _ in T.serial(count):
                        T.mbarrier_wait_parity(free[slot], phase)
                        if in_place:
                            T.fence_proxy_async()  # others wrote there, as ordinary threads
                        T.tma_copy(decay[chunk, head, 0:C], x.gate[slot, :], barrier=full[slot])
                        if l2norm:
                            T.tma_copy(key_scale[chunk, key_head, 0:C], x.k_scale[slot, :], barrier=full[slot])
                        T.tma_copy(k[start : start + C, key_head, 0:K], x.k[slot, :, :], barrier=full[slot])
                        T.tma_copy(q[start : start + C, key_head, 0:K], x.q[slot, :, :], barrier=full[slot])
                        T.tma_copy(v[start : start + C, head, 0:V], v_tile[slot, :, :], barrier=full[slot])
                        T.tma_copy(inverse[chunk, head, 0:C, 0:C], t_tile[slot, :, :], barrier=full[slot])
                        T.mbarrier_arrive(full[slot])
                        chunk = chunk + 1
                        start = start + C
                        slot = slot + 1
                        if slot == STAGES:
                            slot = 0
                            phase = phase ^ 1
            T.tcgen05_before_thread_sync()
            T.sync_threads()

    return forward
