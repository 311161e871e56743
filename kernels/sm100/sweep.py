"""Gradients of states, from the last chunk of every segment to its first: the schedule for sm_100 (tcgen05).

dS' is the gradient of the state behind a chunk, dS of that in front; both are held transposed, as S^T [V, K].

    dU^T = dO^T P + (dS'^T K^T) diag(exp(Gc - G))         dR^T = dU^T T     (T holds diag(beta)); dV = dR
    dS^T = exp(Gc) dS'^T + dO^T (diag(scale exp G) Q) - (dR^T diag(exp G)) K

    sweep           dV of every token, dS' of every chunk, the gradient of a chain's first state
    summary_grad    D: dS in front of a segment when that behind it is 0, or, behind a chain's last, the known one

A head whose gates bound the map of leading chunks by exp(threshold) needs those chunks only for D.

Roles of a block, which runs one segment of one value head:

    2 warpgroups          what lies between products     wait done, free; arrive given
    1 warpgroup           scores, one chunk ahead,       wait full, arrive ready
                          and Q diag(scale exp G)
    1 warp                issues the other products      wait ready, given; commit done, free
    1 warp                copies by TMA                  wait free, arrive full

Letters: C chunk, K key dim, V value dim, H key heads, HV value heads.
"""

import tilelang.language as T

from flashqla_cp.kernels.blocks import segments as column
from flashqla_cp.kernels.blocks.chunk_io import clear_tail
from flashqla_cp.kernels.blocks.gates import remembered
from flashqla_cp.kernels.blocks.mma import issue
from flashqla_cp.kernels.blocks.outlets import (
    alloc_outlet,
    close_outlets,
    fill_rows,
    fill_state,
    open_outlets,
    outlet_layouts,
    send_block,
    send_rows,
)
from flashqla_cp.kernels.blocks.scores import BARRIER, SCORERS, normalize_keys, scale_queries
from flashqla_cp.kernels.blocks.tcgen05_scores import alloc_scored, finish_scores, start_scores
from flashqla_cp.kernels.blocks.tensor_memory import alloc_recurrence, give, hand_over, take
from flashqla_cp.kernels.chunks import CHUNK as C
from flashqla_cp.kernels.spec import KernelSpec
from flashqla_cp.kernels.tuning import sweep_config

WARP = 32
# Products that the workers wait for, and what they give to the warp that issues: once a chunk each.
RECALLED, PULLED, PRODUCTS = range(3)
STATE, VALUE, FADED, GIFTS = range(4)


def _recurrence(spec: KernelSpec, outputs: bool):
    """Macro that runs `count` leading chunks of a segment, the last first; with `outputs` it stores dV and dS'."""
    K = V = spec.dim("head_dim")
    ratio, dtype, f32 = spec.dim("ratio"), spec.dtype("qkv"), "float32"
    config = sweep_config(spec, stores=outputs)
    STAGES, WORKERS = config.stages, config.roles[0].threads
    l2norm = spec.has("l2norm")

    @T.macro
    def store(values, state16, more, tiles, dv, dstates16, start, end, chunk, head, place, thread):
        """dV of a chunk and, with `more`, what is behind the next."""
        open_outlets(WORKERS)
        fill_rows(values, tiles[0])
        if more:
            fill_state(state16, tiles[1])
        close_outlets(WORKERS)
        send_rows(tiles[0], dv, start, end, head, thread, WORKERS)
        if more:
            send_block(tiles[1], dstates16, chunk, place, WORKERS)

    @T.macro
    def store_first(state16, tile, dstates16, chunk, place):
        fill_state(state16, tile)
        close_outlets(WORKERS)
        send_block(tile, dstates16, chunk, place, WORKERS)

    @T.macro
    def run(inputs, table, segment, head, count, scale, ends, edges, place, out):
        q, k, do, inverse, decay, key_scale = inputs
        do_tile = T.alloc_shared((STAGES, C, V), dtype)
        t_tile = T.alloc_shared((STAGES, C, C), dtype)
        tiles = (alloc_outlet(C, V, dtype), alloc_outlet(V, K, dtype)) if outputs else ()
        T.annotate_layout(outlet_layouts(*tiles))
        sums, operands = alloc_recurrence(V, K, C, 3, dtype)
        state_sum, recalled_sum, direct_sum, pulled_sum = sums
        state_operand, value_operand, faded_operand = operands
        x = alloc_scored(STAGES, K, dtype)
        full = T.alloc_barrier([WARP] * STAGES)
        ready = T.alloc_barrier([SCORERS] * STAGES)
        free = T.alloc_barrier([1] * STAGES)
        done = T.alloc_barrier([1] * PRODUCTS)
        given = T.alloc_barrier([WORKERS] * GIFTS)
        thread = T.get_thread_binding()
        # Chunks run backwards: step i is chunk count - 1 - i.
        begin = T.alloc_var("int32", init=table[segment, column.START] + (count - 1) * C)
        chunk = T.alloc_var("int32", init=table[segment, column.CHUNK] + (count - 1))
        end = T.alloc_var("int32", init=table[segment, column.END])
        if thread < WORKERS:
            T.set_max_nreg(config.roles[0].registers, 1)
            state = T.alloc_fragment((V, K), f32)
            state16 = T.alloc_fragment((V, K), dtype)
            narrow = T.alloc_fragment((V, C), f32)
            direct = T.alloc_fragment((V, C), f32)
            narrow16 = T.alloc_fragment((V, C), dtype)
            ends[0](state, segment, head, count, table, edges)
            if count > 0:
                T.mbarrier_wait_parity(ready[0], 0)
                hand_over(state, state16, state_operand, state_sum, x.keep[0], given, STATE, V == 64)
                if outputs:
                    store_first(state16, tiles[1], out[1], chunk, place)
            for i in T.serial(count):
                slot = T.alloc_var("int32", init=T.truncmod(i, STAGES))
                upcoming = T.alloc_var("int32", init=T.truncmod(i + 1, STAGES))
                take(done, RECALLED, i % 2)
                T.copy(recalled_sum, narrow)
                T.copy(direct_sum, direct)
                for a, b in T.Parallel(V, C):
                    narrow16[a, b] = narrow[a, b] * x.fade[slot, b] + direct[a, b]
                T.copy(narrow16, value_operand)
                give(given, VALUE, V == 64)
                take(done, PULLED, i % 2)
                T.copy(pulled_sum, narrow)
                for a, b in T.Parallel(V, C):
                    narrow16[a, b] = narrow[a, b] * x.grow[slot, b]
                T.copy(narrow16, faded_operand)
                give(given, FADED, V == 64)
                if i + 1 < count:
                    T.mbarrier_wait_parity(ready[upcoming], T.truncdiv(i + 1, STAGES) % 2)
                take(free, slot, T.truncdiv(i, STAGES) % 2)
                T.copy(state_sum, state)
                if i + 1 < count:
                    hand_over(state, state16, state_operand, state_sum, x.keep[upcoming], given, STATE, V == 64)
                if outputs:
                    store(
                        narrow,
                        state16,
                        i + 1 < count,
                        tiles,
                        out[0],
                        out[1],
                        begin - i * C,
                        end,
                        chunk - (i + 1),
                        head,
                        place,
                        thread,
                    )
            T.tma_store_wait(0)
            ends[1](state, segment, head, count, table, edges)
        elif thread < WORKERS + SCORERS:
            T.set_max_nreg(config.roles[1].registers, 0)
            scores = T.alloc_fragment((C, C), f32)
            scores16 = T.alloc_fragment((C, C), dtype)
            row = T.alloc_var("int32", init=thread - WORKERS)
            for i in T.serial(count):
                slot = T.alloc_var("int32", init=T.truncmod(i, STAGES))
                length = T.alloc_var("int32", init=end - begin + i * C)
                T.mbarrier_wait_parity(full[slot], T.truncdiv(i, STAGES) % 2)
                if length < C:
                    clear_tail(x.k, slot, length, row, SCORERS, K, dtype)
                    clear_tail(x.q, slot, length, row, SCORERS, K, dtype)
                    clear_tail(do_tile, slot, length, row, SCORERS, V, dtype)
                    T.fence_proxy_async()
                normalize_keys(x, slot, length, row, l2norm)
                start_scores(x, slot, i % 2, row, scale, l2norm)
                finish_scores(x, slot, i % 2, scores, scores16)
                # The scores are made: Q takes in what the state's gradient wants of it.
                T.sync_threads(barrier_id=BARRIER, arrive_count=SCORERS)
                scale_queries(x, slot, row)
                T.fence_proxy_async()
                T.mbarrier_arrive(ready[slot])
        else:
            T.set_max_nreg(config.roles[2].registers, 0)
            if thread < WORKERS + SCORERS + WARP:
                for i in T.serial(count):
                    slot = T.alloc_var("int32", init=T.truncmod(i, STAGES))
                    take(ready, slot, T.truncdiv(i, STAGES) % 2)
                    issue(do_tile[slot, :, :], x.p[slot, :, :], direct_sum, None, left_t=True, right_t=False)
                    take(given, STATE, i % 2)
                    issue(state_operand, x.k[slot, :, :], recalled_sum, done[RECALLED])
                    take(given, VALUE, i % 2)
                    issue(value_operand, t_tile[slot, :, :], pulled_sum, done[PULLED], right_t=False)
                    issue(
                        do_tile[slot, :, :],
                        x.q[slot, :, :],
                        state_sum,
                        None,
                        clear=False,
                        left_t=True,
                        right_t=False,
                    )
                    take(given, FADED, i % 2)
                    issue(faded_operand, x.k[slot, :, :], state_sum, free[slot], clear=False, right_t=False)
            elif thread < WORKERS + SCORERS + 2 * WARP:
                key_head = T.alloc_var("int32", init=T.truncdiv(head, ratio))
                for i in T.serial(count):
                    slot = T.alloc_var("int32", init=T.truncmod(i, STAGES))
                    start = T.alloc_var("int32", init=begin - i * C)
                    T.mbarrier_wait_parity(free[slot], T.truncdiv(i, STAGES) % 2 ^ 1)
                    T.fence_proxy_async()  # the scorers wrote there, as ordinary threads
                    T.tma_copy(decay[chunk - i, head, 0:C], x.gate[slot, :], barrier=full[slot])
                    if l2norm:
                        T.tma_copy(key_scale[chunk - i, key_head, 0:C], x.k_scale[slot, :], barrier=full[slot])
                    T.tma_copy(k[start : start + C, key_head, 0:K], x.k[slot, :, :], barrier=full[slot])
                    T.tma_copy(q[start : start + C, key_head, 0:K], x.q[slot, :, :], barrier=full[slot])
                    T.tma_copy(do[start : start + C, head, 0:V], do_tile[slot, :, :], barrier=full[slot])
                    T.tma_copy(inverse[chunk - i, head, 0:C, 0:C], t_tile[slot, :, :], barrier=full[slot])
                    T.mbarrier_arrive(full[slot])
        T.tcgen05_before_thread_sync()
        T.sync_threads()

    return run, config.threads


def build_sweep(spec: KernelSpec):
    """dims: head_dim (K = V), ratio (HV / H). dtypes: qkv. flags: l2norm, final_grad, initial_grad.

    Value heads from `first` on, as many as dstates16 [chunks, heads, V, K] has; the others' rows are left alone.
    """
    K = V = spec.dim("head_dim")
    dtype, f32 = spec.dtype("qkv"), "float32"
    l2norm, has_final, has_initial = (spec.has(flag) for flag in ("l2norm", "final_grad", "initial_grad"))
    run, threads = _recurrence(spec, True)
    tokens, chunks, H, HV, heads, segments, rows, chains, entries = (
        T.dynamic(n) for n in ("tokens", "chunks", "H", "HV", "heads", "segments", "rows", "chains", "entries")
    )
    key_chunks = chunks if l2norm else T.dynamic("key_chunks")
    listed = chains if has_final else T.dynamic("listed")
    firsts = chains if has_initial else T.dynamic("firsts")
    qt, qh, kt, kh, ot, oh = (T.dynamic(n) for n in ("q_token", "q_head", "k_token", "k_head", "do_token", "do_head"))

    def states(number):
        return T.Tensor((number, HV, V, K), f32)

    @T.macro
    def enter(state, segment, head, count, table, edges):
        entry = T.alloc_var("int32", init=table[segment, column.GRAD_ENTRY])
        known = T.alloc_var("int32", init=-1)
        if has_final and count > 0:
            known = edges[2][table[segment, column.CHAIN]]
        if entry >= 0:
            T.copy(edges[0][entry, head, 0:V, 0:K], state)
        elif known >= 0:
            T.copy(edges[1][known, head, 0:V, 0:K], state)
        else:
            T.clear(state)

    @T.macro
    def leave(state, segment, head, count, table, edges):
        if has_initial and count > 0 and table[segment, column.ENTRY] < 0:
            T.copy(state, edges[3][table[segment, column.CHAIN], head, 0:V, 0:K])

    @T.prim_func
    def sweep(
        q: T.StridedTensor((tokens, H, K), (qt, qh, 1), dtype),
        k: T.StridedTensor((tokens, H, K), (kt, kh, 1), dtype),
        do: T.StridedTensor((tokens, HV, V), (ot, oh, 1), dtype),
        inverse: T.Tensor((chunks, HV, C, C), dtype),
        decay: T.Tensor((chunks, HV, C), f32),
        key_scale: T.Tensor((key_chunks, H, C), f32),
        table: T.Tensor((segments, column.COLUMNS), "int32"),
        dcarried: states(rows),
        dexit: states(entries),
        exit_row: T.Tensor((listed,), "int32"),
        dstates16: T.Tensor((chunks, heads, V, K), dtype),
        dv: T.Tensor((tokens, HV, V), dtype),
        dentry: states(firsts),
        scale: T.float32,
        first: T.int32,
    ):
        with T.Kernel(segments * heads, threads=threads) as block:
            place = T.alloc_var("int32", init=T.truncmod(block, heads))
            head = T.alloc_var("int32", init=first + place)
            segment = T.alloc_var("int32", init=T.truncdiv(block, heads))
            length = T.alloc_var("int32", init=table[segment, column.END] - table[segment, column.START])
            count = T.alloc_var("int32", init=T.truncdiv(length + (C - 1), C))
            inputs = (q, k, do, inverse, decay, key_scale)
            run(
                inputs,
                table,
                segment,
                head,
                count,
                scale,
                (enter, leave),
                (dcarried, dexit, exit_row, dentry),
                place,
                (dv, dstates16),
            )

    return sweep


def build_summary_grad(spec: KernelSpec):
    """dims: head_dim (K = V), ratio (HV / H). dtypes: qkv. flags: l2norm, final_grad."""
    K = V = spec.dim("head_dim")
    dtype, f32 = spec.dtype("qkv"), "float32"
    l2norm, has_final = spec.has("l2norm"), spec.has("final_grad")
    run, threads = _recurrence(spec, False)
    tokens, chunks, H, HV, segments, rows, entries = (
        T.dynamic(n) for n in ("tokens", "chunks", "H", "HV", "segments", "rows", "entries")
    )
    key_chunks, chains = chunks if l2norm else T.dynamic("key_chunks"), T.dynamic("chains")
    qt, qh, kt, kh, ot, oh = (T.dynamic(n) for n in ("q_token", "q_head", "k_token", "k_head", "do_token", "do_head"))

    def states(number):
        return T.Tensor((number, HV, V, K), f32)

    @T.macro
    def enter(state, segment, head, count, table, edges):
        if edges[1] >= 0:
            T.copy(edges[0][edges[1], head, 0:V, 0:K], state)
        else:
            T.clear(state)

    @T.macro
    def leave(state, segment, head, count, table, edges):
        if count > 0:
            T.copy(state, edges[2][edges[3], head, 0:V, 0:K])

    @T.prim_func
    def summary_grad(
        q: T.StridedTensor((tokens, H, K), (qt, qh, 1), dtype),
        k: T.StridedTensor((tokens, H, K), (kt, kh, 1), dtype),
        do: T.StridedTensor((tokens, HV, V), (ot, oh, 1), dtype),
        inverse: T.Tensor((chunks, HV, C, C), dtype),
        decay: T.Tensor((chunks, HV, C), f32),
        key_scale: T.Tensor((key_chunks, H, C), f32),
        bound: T.Tensor((HV, chunks), f32),
        table: T.Tensor((segments, column.COLUMNS), "int32"),
        dexit: states(entries),
        exit_row: T.Tensor((chains,), "int32"),
        dboundary: states(rows),
        scale: T.float32,
        threshold: T.float32,
    ):
        with T.Kernel(segments * HV, threads=threads) as block:
            head = T.alloc_var("int32", init=T.truncmod(block, HV))
            segment = T.alloc_var("int32", init=T.truncdiv(block, HV))
            out = T.alloc_var("int32", init=table[segment, column.GRAD_EXIT])
            whole = T.alloc_var("int32", init=0)
            if out >= 0:
                whole = T.truncdiv(table[segment, column.END] - table[segment, column.START] + (C - 1), C)
            # Only the leading chunks, as far as anything behind them is remembered in front.
            count, left = remembered(bound, head, table[segment, column.CHUNK], 1, whole, threshold)
            known = T.alloc_var("int32", init=-1)  # row of the known gradient behind
            if has_final and count > 0 and left > threshold and table[segment, column.LAST] == 1:
                known = exit_row[table[segment, column.CHAIN]]
            inputs = (q, k, do, inverse, decay, key_scale)
            run(inputs, table, segment, head, count, scale, (enter, leave), (dexit, known, dboundary, out), None, None)

    return summary_grad
