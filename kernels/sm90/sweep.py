"""The recurrence of the state's gradient, from a segment's last chunk to its first: the schedule for sm_90 (wgmma).

Gradients are held like the forward's states, transposed, dS^T [V, K]; behind a chunk it is dS'^T:

    X = dS'^T K^T          dU^T = dO^T P + X diag(exp(Gc - G))          dV^T = dU^T T     (T holds diag(beta))
    dS^T = exp(Gc) dS'^T + dO^T (diag(scale exp G) Q) - (dV^T diag(exp G)) K

Two kernels: the gradient maps of segments (dS in front when dS behind is zero, or what is known), and the sweep, which
starts from the right gradient, gives dV and stores dS' of every chunk. Roles of a block, which runs one segment of one
value head:

    V / 64 warpgroups     the recurrence                 wait ready, arrive free
    1 warpgroup           P = scale (Q K^T) exp(G_i - G_j), then the scaled Q in the place of Q, one chunk ahead:
                                                         wait full, arrive ready
    1 warp                copies by TMA                  wait free, arrive full

Letters: C chunk, K key dim, V value dim, H key heads, HV value heads.
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout

from flashqla_cp.kernels.blocks import segments as column
from flashqla_cp.kernels.blocks.chunk_io import clear_tail
from flashqla_cp.kernels.blocks.gates import remembered
from flashqla_cp.kernels.blocks.scores import BARRIER, SCORERS, Scored, normalize_keys, scale_queries, score
from flashqla_cp.kernels.blocks.stores import (
    accumulator_panel,
    alloc_panels,
    store_panels,
    store_tokens,
    transposed_accumulator,
)
from flashqla_cp.kernels.chunks import CHUNK as C
from flashqla_cp.kernels.spec import KernelSpec
from flashqla_cp.kernels.tuning import sweep_config

FULL_ROW = T.GemmWarpPolicy.FullRow
WARP = 32
SCORED = 2  # scores that wait at most


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Shared(Scored):
    """What the roles share beside Scored: tiles of dO, T and, of SCORED chunks, P; barriers."""

    o_tile: Any
    t_tile: Any
    p_tile: Any
    full: Any
    ready: Any
    free: Any
    scored: Any


def build_summary_grad(spec: KernelSpec):
    """dims: head_dim (K = V), ratio (HV / H). dtypes: qkv. flags: l2norm, final_grad."""
    return _build(spec, stores=False)


def build_sweep(spec: KernelSpec):
    """dims: head_dim (K = V), ratio (HV / H). dtypes: qkv. flags: l2norm, final_grad, initial_grad."""
    return _build(spec, stores=True)


def _build(spec: KernelSpec, *, stores: bool):
    K = V = spec.dim("head_dim")
    ratio, dtype, f32, i32 = spec.dim("ratio"), spec.dtype("qkv"), "float32", "int32"
    config = sweep_config(spec, stores=stores)
    STAGES, WORKERS = config.stages, config.roles[0].threads
    l2norm, final_grad, initial_grad = (spec.has(flag) for flag in ("l2norm", "final_grad", "initial_grad"))
    tokens, chunks, H, HV, segments, rows, chains, entries, slab = (
        T.dynamic(n) for n in ("tokens", "chunks", "H", "HV", "segments", "rows", "chains", "entries", "slab")
    )
    key_chunks = chunks if l2norm else T.dynamic("key_chunks")
    listed = chains if final_grad else T.dynamic("listed")
    starts = chains if initial_grad else T.dynamic("starts")
    qt, qh, kt, kh, ot, oh = (T.dynamic(n) for n in ("q_token", "q_head", "k_token", "k_head", "do_token", "do_head"))

    def alloc():
        return Shared(
            q=T.alloc_shared((STAGES, C, K), dtype),
            k=T.alloc_shared((STAGES, C, K), dtype),
            o_tile=T.alloc_shared((STAGES, C, V), dtype),
            t_tile=T.alloc_shared((STAGES, C, C), dtype),
            p_tile=T.alloc_shared((SCORED, C, C), dtype),
            grow=T.alloc_shared((STAGES, C), f32),
            fade=T.alloc_shared((STAGES, C), f32),
            keep=T.alloc_shared((STAGES,), f32),
            gate=T.alloc_shared((STAGES, C), f32),
            k_scale=T.alloc_shared((STAGES, C), f32),
            read=T.alloc_shared((STAGES, C), f32),
            query=T.alloc_shared((2, C), f32),
            column=T.alloc_shared((2, C), f32),
            full=T.alloc_barrier([WARP] * STAGES),
            ready=T.alloc_barrier([SCORERS] * STAGES),
            free=T.alloc_barrier([WORKERS] * STAGES),
            scored=T.alloc_barrier([WORKERS] * SCORED),
        )

    @T.macro
    def recur(x, state, count, at, thread, leaving):
        """Run `count` chunks back from number at[0], of the stream, whose tokens at[1].. end at at[2]."""
        state16 = T.alloc_fragment((V, K), dtype)
        recalled = T.alloc_fragment((V, C), f32)
        direct = T.alloc_fragment((V, C), f32)
        direct16 = T.alloc_fragment((V, C), dtype)
        right = T.alloc_fragment((V, C), f32)
        right16 = T.alloc_fragment((V, C), dtype)
        factor = T.alloc_fragment((C,), f32)
        slot = T.alloc_var(i32, init=0)
        phase = T.alloc_var(i32, init=0)
        if stores:
            s_tile, dstates, dv, head, place = leaving
            panels16 = alloc_panels(V, K, dtype, T.alloc_fragment)
            leaving16 = T.alloc_fragment((V // 64, C, 64), dtype)
            group = T.alloc_var(i32, init=thread // 128)
            T.annotate_layout({leaving16: transposed_accumulator(V), **dict.fromkeys(panels16, accumulator_panel(V))})
        for i in T.serial(count):
            T.mbarrier_wait_parity(x.ready[slot], phase)
            T.copy(state, state16)
            T.copy(x.fade[slot, :], factor)
            T.wgmma_gemm(state16, x.k[slot, :, :], recalled, transpose_B=True, clear_accum=True, policy=FULL_ROW)
            T.wgmma_gemm(
                x.o_tile[slot, :, :],
                x.p_tile[i % SCORED, :, :],
                direct,
                transpose_A=True,
                clear_accum=True,
                policy=FULL_ROW,
            )
            if stores:
                store_panels(state, panels16, s_tile, dstates, at[0] - i, place, group, 0)
            T.wait_wgmma(0)
            T.mbarrier_arrive(x.scored[i % SCORED])
            for a, b in T.Parallel(V, C):
                direct16[a, b] = direct[a, b] + recalled[a, b] * factor[b]
            T.wgmma_gemm(direct16, x.t_tile[slot, :, :], right, clear_accum=True, policy=FULL_ROW)
            for a, b in T.Parallel(V, K):
                state[a, b] = state[a, b] * x.keep[slot]
            T.wgmma_gemm(x.o_tile[slot, :, :], x.q[slot, :, :], state, transpose_A=True, policy=FULL_ROW)
            T.copy(x.grow[slot, :], factor)
            T.wait_wgmma(1)
            for a, b in T.Parallel(V, C):
                right16[a, b] = right[a, b] * factor[b]
            T.wgmma_gemm(right16, x.k[slot, :, :], state, policy=FULL_ROW)
            if stores:
                for a, b in T.Parallel(V, C):
                    leaving16[a // 64, b, a % 64] = T.cast(right[a, b], dtype)
                store_tokens(leaving16, s_tile[0], dv, at[1] - i * C, at[2], head, group, thread, 0)
            T.wait_wgmma(0)
            T.mbarrier_arrive(x.free[slot])
            slot = slot + 1
            if slot == STAGES:
                slot = 0
                phase = phase ^ 1
        if stores:
            T.tma_store_wait(0)

    @T.macro
    def score_ahead(x, count, start, end, row, scale):
        """What the recurrence needs of chunks that begin at `start`, `start` - C, .."""
        slot = T.alloc_var(i32, init=0)
        phase = T.alloc_var(i32, init=0)
        for i in T.serial(count):
            length = T.alloc_var(i32, init=end - start + i * C)
            T.mbarrier_wait_parity(x.full[slot], phase)
            if length < C:
                clear_tail(x.k, slot, length, row, SCORERS, K, dtype)
                clear_tail(x.q, slot, length, row, SCORERS, K, dtype)
                clear_tail(x.o_tile, slot, length, row, SCORERS, V, dtype)
                T.fence_proxy_async()
                T.sync_threads(barrier_id=BARRIER, arrive_count=SCORERS)
            normalize_keys(x, slot, length, row, l2norm)
            T.mbarrier_wait_parity(x.scored[i % SCORED], (i // SCORED) % 2 ^ 1)
            score(x, x.p_tile, slot, i % SCORED, i % 2, row, scale, l2norm)
            T.sync_threads(barrier_id=BARRIER, arrive_count=SCORERS)
            scale_queries(x, slot, row)
            T.fence_proxy_async()
            T.mbarrier_arrive(x.ready[slot])
            slot = slot + 1
            if slot == STAGES:
                slot = 0
                phase = phase ^ 1

    @T.macro
    def copy_in(x, count, chunk, start, head, key_head, sources):
        """Bring chunks that begin at `start`, `start` - C, .., the first of them number `chunk` of the stream."""
        q, k, do, inverse, decay, key_scale = sources
        slot = T.alloc_var(i32, init=0)
        phase = T.alloc_var(i32, init=1)
        for i in T.serial(count):
            token = T.alloc_var(i32, init=start - i * C)
            T.mbarrier_wait_parity(x.free[slot], phase)
            T.tma_copy(decay[chunk - i, head, 0:C], x.gate[slot, :], barrier=x.full[slot])
            if l2norm:
                T.tma_copy(key_scale[chunk - i, key_head, 0:C], x.k_scale[slot, :], barrier=x.full[slot])
            T.tma_copy(k[token : token + C, key_head, 0:K], x.k[slot, :, :], barrier=x.full[slot])
            T.tma_copy(q[token : token + C, key_head, 0:K], x.q[slot, :, :], barrier=x.full[slot])
            T.tma_copy(do[token : token + C, head, 0:V], x.o_tile[slot, :, :], barrier=x.full[slot])
            T.tma_copy(inverse[chunk - i, head, 0:C, 0:C], x.t_tile[slot, :, :], barrier=x.full[slot])
            T.mbarrier_arrive(x.full[slot])
            slot = slot + 1
            if slot == STAGES:
                slot = 0
                phase = phase ^ 1

    def tokens_of(heads, dim, token_stride, head_stride):
        return T.StridedTensor((tokens, heads, dim), (token_stride, head_stride, 1), dtype)

    def states_of(number):
        return T.Tensor((number, HV, V, K), f32)

    if stores:

        @T.prim_func
        def kernel(
            q: tokens_of(H, K, qt, qh),
            k: tokens_of(H, K, kt, kh),
            do: tokens_of(HV, V, ot, oh),
            inverse: T.Tensor((chunks, HV, C, C), dtype),
            decay: T.Tensor((chunks, HV, C), f32),
            key_scale: T.Tensor((key_chunks, H, C), f32),
            table: T.Tensor((segments, column.COLUMNS), i32),
            dcarried: states_of(rows),
            dexit: states_of(entries),
            exit_row: T.Tensor((listed,), i32),
            dstates: T.Tensor((chunks, slab, V, K), dtype),
            dv: T.Tensor((tokens, HV, V), dtype),
            dentry: states_of(starts),
            scale: T.float32,
            offset: T.int32,
        ):
            with T.Kernel(segments * slab, threads=config.threads) as block:
                x = alloc()
                s_tile = alloc_panels(V, K, dtype, T.alloc_shared)
                T.annotate_layout({tile: make_full_bank_swizzled_layout(tile) for tile in s_tile})
                thread = T.get_thread_binding()
                sources = (q, k, do, inverse, decay, key_scale)
                place = T.alloc_var(i32, init=T.truncmod(block, slab))
                head = T.alloc_var(i32, init=offset + place)
                segment = T.alloc_var(i32, init=T.truncdiv(block, slab))
                begin = T.alloc_var(i32, init=table[segment, column.START])
                end = T.alloc_var(i32, init=table[segment, column.END])
                count = T.alloc_var(i32, init=T.truncdiv(end - begin + (C - 1), C))
                chunk = T.alloc_var(i32, init=table[segment, column.CHUNK] + count - 1)
                start = T.alloc_var(i32, init=begin + (count - 1) * C)
                if thread < WORKERS:
                    T.set_max_nreg(config.roles[0].registers, 1)
                    state = T.alloc_fragment((V, K), f32)
                    chain = T.alloc_var(i32, init=table[segment, column.CHAIN])
                    entry = T.alloc_var(i32, init=table[segment, column.GRAD_ENTRY])
                    known = T.alloc_var(i32, init=-1)
                    if final_grad and count > 0:
                        known = exit_row[chain]
                    if entry >= 0:
                        T.copy(dcarried[entry, head, 0:V, 0:K], state)
                    elif known >= 0:
                        T.copy(dexit[known, head, 0:V, 0:K], state)
                    else:
                        T.clear(state)
                    recur(x, state, count, (chunk, start, end), thread, (s_tile, dstates, dv, head, place))
                    if initial_grad and count > 0 and table[segment, column.ENTRY] < 0:
                        T.copy(state, dentry[chain, head, 0:V, 0:K])
                elif thread < WORKERS + SCORERS:
                    T.set_max_nreg(config.roles[1].registers, 0)
                    score_ahead(x, count, start, end, thread - WORKERS, scale)
                else:
                    T.set_max_nreg(config.roles[2].registers, 0)
                    if thread < WORKERS + SCORERS + WARP:
                        copy_in(x, count, chunk, start, head, T.truncdiv(head, ratio), sources)

        return kernel.with_attr("global_symbol", "sweep")

    @T.prim_func
    def kernel(
        q: tokens_of(H, K, qt, qh),
        k: tokens_of(H, K, kt, kh),
        do: tokens_of(HV, V, ot, oh),
        inverse: T.Tensor((chunks, HV, C, C), dtype),
        decay: T.Tensor((chunks, HV, C), f32),
        key_scale: T.Tensor((key_chunks, H, C), f32),
        bound: T.Tensor((HV, chunks), f32),
        table: T.Tensor((segments, column.COLUMNS), i32),
        dexit: states_of(entries),
        exit_row: T.Tensor((listed,), i32),
        dboundary: states_of(rows),
        scale: T.float32,
        threshold: T.float32,
    ):
        with T.Kernel(segments * HV, threads=config.threads) as block:
            x = alloc()
            thread = T.get_thread_binding()
            sources = (q, k, do, inverse, decay, key_scale)
            head = T.alloc_var(i32, init=T.truncmod(block, HV))
            segment = T.alloc_var(i32, init=T.truncdiv(block, HV))
            out = T.alloc_var(i32, init=table[segment, column.GRAD_EXIT])
            if out >= 0:
                begin = T.alloc_var(i32, init=table[segment, column.START])
                end = T.alloc_var(i32, init=table[segment, column.END])
                number = T.alloc_var(i32, init=table[segment, column.CHUNK])
                whole = T.alloc_var(i32, init=T.truncdiv(end - begin + (C - 1), C))
                # Only the leading chunks, as far as anything behind them is remembered in front.
                count, left = remembered(bound, head, number, 1, whole, threshold)
                start = T.alloc_var(i32, init=begin + (count - 1) * C)
                if thread < WORKERS:
                    T.set_max_nreg(config.roles[0].registers, 1)
                    state = T.alloc_fragment((V, K), f32)
                    known = T.alloc_var(i32, init=-1)
                    if final_grad and left > threshold and table[segment, column.LAST] == 1:
                        known = exit_row[table[segment, column.CHAIN]]
                    if known >= 0:
                        T.copy(dexit[known, head, 0:V, 0:K], state)
                    else:
                        T.clear(state)
                    recur(x, state, count, None, thread, None)
                    T.copy(state, dboundary[out, head, 0:V, 0:K])
                elif thread < WORKERS + SCORERS:
                    T.set_max_nreg(config.roles[1].registers, 0)
                    score_ahead(x, count, start, end, thread - WORKERS, scale)
                else:
                    T.set_max_nreg(config.roles[2].registers, 0)
                    if thread < WORKERS + SCORERS + WARP:
                        copy_in(x, count, number + count - 1, start, head, T.truncdiv(head, ratio), sources)

    return kernel.with_attr("global_symbol", "summary_grad")
