"""Gradients of q, k, g and beta, chunk by chunk: the schedule for sm_100 (tcgen05).

Of every value head of a key head's group, S and dS' being the state in front and the gradient behind, both transposed:

    Da = scale exp(G_i - G_j) (dO U^T)   j <= i           Db = -exp(G_i - G_j) (dR U^T)   j < i
    [dq] += diag(scale exp G) dO S^T                       pull = Da (Q K^T) + Db (K K^T), elementwise, j < i
    [dk] += -diag(exp G) dR S^T + diag(exp(Gc - G)) U dS'^T
    dG_i = sums of rows of [q] * [dq], [k] * [dk's first part], and of pull, less the sums of pull's columns
    dg_i = sum of dG_j, j >= i, + sum of k_j . (dk's second part)_j, j < i, + exp(Gc) <S, dS'>
    dbeta_i = (dR U^T)_ii / beta_i^2

and once for the group, with the sums of Da and Db over it:

    [dq] += [   0          Da    ] [Q]
    [dk]    [ Da^T   Db + Db^T   ] [K]

Rows of dq and of dk are computed together, 128 of them. With l2norm Q and K are divided by their norms, of which the
tiles know nothing (but in fp16, whose range they leave): they are taken in elsewhere; dq, dk are projected at the end.

Roles of a block, which takes every `blocks`-th pair of a chunk and a key head:

    1 warpgroup           scorers: Da, Db, pull          wait done; arrive given, summed
    1 warpgroup           readers: dq, dk                wait done; arrive given, summed, normed, free
                          1 warp copies by TMA           wait free, done, dotted; arrive full
                          1 warp clears tails, issues    wait full, given; commit done
                          2 warps: <S, dS'>, dg, dbeta   wait full, summed; arrive dotted, told

Letters: C chunk, K key dim, V value dim, H key heads, HV value heads.
"""

import tilelang.language as T

from flashqla_cp.kernels.blocks.chunk_io import clear_rows, scale_row
from flashqla_cp.kernels.blocks.gates import LEAST_STRENGTH, normalizes_keys
from flashqla_cp.kernels.blocks.mma import issue
from flashqla_cp.kernels.blocks.scores import L2_EPS
from flashqla_cp.kernels.blocks.segments import CHUNK_COLUMNS
from flashqla_cp.kernels.blocks.tensor_memory import give, take
from flashqla_cp.kernels.blocks.token_sums import begins_from_nothing
from flashqla_cp.kernels.chunks import CHUNK as C
from flashqla_cp.kernels.spec import KernelSpec
from flashqla_cp.kernels.tuning import gradients_config

GROUP, WARP, HELPERS = 128, 32, C
SCORERS, READERS = GROUP, GROUP
PART = 32  # columns of sums in registers at a time
# Products that others wait for, and what the warp that issues waits for: once a value head, the last once a group.
PAIRED, READ, MIXED, PRODUCTS = range(4)
PAIRS, READS, MIX = range(3)
SCORERS_BARRIER, READERS_BARRIER, HELPERS_BARRIER = 1, 2, 3


def build_gradients(spec: KernelSpec):
    """dims: head_dim (K = V), ratio (HV / H). dtypes: qkv, beta. flags: l2norm, sigmoid, double.

    Value heads from `first` on, whole groups, as many as states16, dstates16 [chunks, heads, V, K] and values16
    [chunks, heads, C, V] have. dq, dk [T, H, K] are sums over a group; dg, dbeta [T, HV]. Rows of no chunk are left
    alone.
    """
    K = V = spec.dim("head_dim")
    ratio, dtype, f32 = spec.dim("ratio"), spec.dtype("qkv"), "float32"
    config = gradients_config(spec)
    l2norm, sigmoid, double = spec.has("l2norm"), spec.has("sigmoid"), spec.has("double")
    in_place = normalizes_keys(l2norm, dtype)
    folds = l2norm and not in_place
    tokens, chunks, chains, H, HV, heads = (T.dynamic(n) for n in ("tokens", "chunks", "chains", "H", "HV", "heads"))
    qt, qh, kt, kh, ot, oh, bt, bh = (
        T.dynamic(n)
        for n in ("q_token", "q_head", "k_token", "k_head", "do_token", "do_head", "beta_token", "beta_head")
    )

    @T.macro
    def weigh(half, pair_sum, similar_sum, pairs, pulled, totals, gate, norm, diagonal, step, scale):
        """Half of the columns of Da and Db, added to `totals`, and of their part of pull; dR . U for dbeta."""
        T.copy(pair_sum[:, half * PART : half * PART + PART], pairs)
        T.copy(similar_sum[:, half * PART : half * PART + PART], pulled)
        for a, b in T.Parallel(2 * C, PART):
            if a == half * PART + b + C:
                diagonal[half * PART + b] = pairs[a, b]
        for a, b in T.Parallel(2 * C, PART):
            pairs[a, b] = T.if_then_else(
                T.if_then_else(a < C, half * PART + b <= a, half * PART + b < a - C),
                pairs[a, b]
                * T.exp2(gate[step % 2, a % C] - gate[step % 2, half * PART + b])
                * T.if_then_else(a < C, scale, -1.0),
                0.0,
            )
        for a, b in T.Parallel(2 * C, PART):
            totals[a, b] = totals[a, b] + pairs[a, b]
        for a, b in T.Parallel(2 * C, PART):
            pulled[a, b] = T.if_then_else(
                half * PART + b < a % C,
                pairs[a, b] * pulled[a, b] * ((norm[a] * norm[C + half * PART + b]) if folds else 1.0),
                0.0,
            )

    @T.macro
    def put_lower(half, pulls, pulled):
        for a, b in T.Parallel(2 * C, PART):
            if a >= C:
                pulls[a - C, half * PART + b] = pulled[a, b]

    @T.macro
    def add_upper(half, pulls, pulled):
        for a, b in T.Parallel(2 * C, PART):
            if a < C:
                pulls[a, half * PART + b] = pulls[a, half * PART + b] + pulled[a, b]

    @T.macro
    def put_mix(half, mix, totals, norm):
        """Half of the columns of [Da; Db], and, transposed, of [Da^T, Db^T]."""
        for a, b in T.Parallel(2 * C, PART):
            if a < C or half * PART + b < a - C:
                mix[a, C + half * PART + b] = T.cast(
                    totals[a, b] * (norm[C + half * PART + b] if folds else 1.0), dtype
                )
                mix[C + half * PART + b, a] = T.cast(totals[a, b] * (norm[a] if folds else 1.0), dtype)
            elif half * PART + b == a - C:
                mix[a, C + half * PART + b] = T.cast(0.0, dtype)

    @T.macro
    def load_rows(source, start, head, tile, offset, barriers, index):
        """source[start : start + C, head, :] to tile[offset :]: swizzled tiles lie by 64 columns."""
        for half in T.unroll(tile.shape[1] // 64):
            T.tma_copy(
                source[start : start + C, head, half * 64 : half * 64 + 64],
                tile[offset : offset + C, half * 64 : half * 64 + 64],
                barrier=barriers[index],
            )

    @T.macro
    def store_row(keys, row, rows, token, head):
        """keys[row] to rows[token, head, :], where a chunk is too short for the copy engine."""
        for j in T.serial(K // 8):
            for e in T.vectorized(8):
                rows[token, head, j * 8 + e] = keys[row, j * 8 + e]

    @T.prim_func
    def gradients(
        q: T.StridedTensor((tokens, H, K), (qt, qh, 1), dtype),
        k: T.StridedTensor((tokens, H, K), (kt, kh, 1), dtype),
        do: T.StridedTensor((tokens, HV, V), (ot, oh, 1), dtype),
        dv: T.Tensor((tokens, HV, V), dtype),
        values16: T.Tensor((chunks, heads, C, V), dtype),
        states16: T.Tensor((chunks, heads, V, K), dtype),
        dstates16: T.Tensor((chunks, heads, V, K), dtype),
        decay: T.Tensor((chunks, HV, C), f32),
        beta: T.StridedTensor((tokens, HV), (bt, bh), spec.dtype("beta")),
        chunk_table: T.Tensor((chunks, CHUNK_COLUMNS), "int32"),
        entry_row: T.Tensor((chains,), "int32"),
        dq: T.Tensor((tokens, H, K), dtype),
        dk: T.Tensor((tokens, H, K), dtype),
        dg: T.Tensor((tokens, HV), f32),
        dbeta: T.Tensor((tokens, HV), f32),
        scale: T.float32,
        entered: T.int32,
        first: T.int32,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=config.threads) as block:
            keys = T.alloc_shared((2 * C, K), dtype)  # Q, K; at the end dq, dk
            rows = T.alloc_shared((4 * C, V), dtype)  # dO, dR, zeros, U: two left operands
            s_tile = T.alloc_shared((V, K), dtype)
            ds_tile = T.alloc_shared((V, K), dtype)
            mix = T.alloc_shared((2 * C, 2 * C), dtype)
            pulls = T.alloc_shared((C, C + 1), f32)
            gate = T.alloc_shared((2, C), f32)  # of this head and the next
            norm = T.alloc_shared((2 * C,), f32)  # 1 / |q|, 1 / |k|, with l2norm
            dots = T.alloc_shared((2 * C,), f32)
            leaving = T.alloc_shared((C,), f32)
            row_pull = T.alloc_shared((2 * C,), f32)
            column_pull = T.alloc_shared((2 * C,), f32)
            diagonal = T.alloc_shared((C,), f32)
            ddecay = T.alloc_shared((C,), f32)
            inner = T.alloc_shared((2,), f32)
            # Sizes fall, as the allocator of tensor memory wants.
            total_sum = T.alloc_tmem((2 * C, K), f32)  # dq, dk
            read_sum = T.alloc_tmem((2 * C, K), f32)  # dO S^T, dR S^T
            carried_sum = T.alloc_tmem((2 * C, K), f32)  # zeros, U dS'^T
            similar_sum = T.alloc_tmem((2 * C, C), f32)  # Q K^T, K K^T
            pair_sum = T.alloc_tmem((2 * C, C), f32)  # dO U^T, dR U^T
            full_keys = T.alloc_barrier([WARP])
            full_rows = T.alloc_barrier([WARP] * 2)  # who waits may be a value head behind
            full_states = T.alloc_barrier([WARP])
            free_keys = T.alloc_barrier([READERS])
            done = T.alloc_barrier([1] * PRODUCTS)
            given = T.alloc_barrier([SCORERS, READERS, SCORERS])
            normed = T.alloc_barrier([READERS])
            summed = T.alloc_barrier([SCORERS + READERS])
            told = T.alloc_barrier([HELPERS])
            dotted = T.alloc_barrier([HELPERS])
            thread = T.get_thread_binding()
            groups = T.alloc_var("int32", init=T.truncdiv(heads, ratio))
            turns = T.alloc_var("int32", init=T.truncdiv(chunks * groups - block + blocks - 1, blocks))
            item = T.alloc_var("int32", init=block)
            turn = T.alloc_var("int32", init=0)  # of pairs that are no ghosts
            step = T.alloc_var("int32", init=0)  # of value heads of such
            for a, b in T.Parallel(C, C):
                mix[a, b] = T.cast(0.0, dtype)
            for a, b in T.Parallel(C, V):
                rows[2 * C + a, b] = T.cast(0.0, dtype)
            T.fence_proxy_async()
            T.sync_threads()
            if thread < SCORERS:
                T.set_max_nreg(config.roles[0].registers, 1)
                # Columns by halves.
                totals = (T.alloc_fragment((2 * C, PART), f32), T.alloc_fragment((2 * C, PART), f32))
                pulled = (T.alloc_fragment((2 * C, PART), f32), T.alloc_fragment((2 * C, PART), f32))
                pairs = T.alloc_fragment((2 * C, PART), f32)
                row_sums = T.alloc_fragment((2 * C,), f32)
                for _ in T.serial(turns):
                    if chunk_table[T.truncdiv(item, groups), 1] > 0:
                        if l2norm:
                            T.mbarrier_wait_parity(normed, turn % 2)
                        T.clear(totals[0])
                        T.clear(totals[1])
                        for _head in T.serial(ratio):
                            T.mbarrier_wait_parity(full_rows[step % 2], step // 2 % 2)
                            take(done, PAIRED, step % 2)
                            T.mbarrier_wait_parity(told, step % 2 ^ 1)
                            weigh(
                                0, pair_sum, similar_sum, pairs, pulled[0], totals[0], gate, norm, diagonal, step, scale
                            )
                            weigh(
                                1, pair_sum, similar_sum, pairs, pulled[1], totals[1], gate, norm, diagonal, step, scale
                            )
                            give(given, PAIRS, False)
                            T.reduce_sum(pulled[0], row_sums, dim=1)
                            T.reduce_sum(pulled[1], row_sums, dim=1, clear=False)
                            T.copy(row_sums, row_pull)
                            T.sync_threads(barrier_id=SCORERS_BARRIER, arrive_count=SCORERS)  # the last were read
                            put_lower(0, pulls, pulled[0])
                            put_lower(1, pulls, pulled[1])
                            T.sync_threads(barrier_id=SCORERS_BARRIER, arrive_count=SCORERS)
                            add_upper(0, pulls, pulled[0])
                            add_upper(1, pulls, pulled[1])
                            T.sync_threads(barrier_id=SCORERS_BARRIER, arrive_count=SCORERS)
                            column = T.alloc_var(f32, init=0.0)
                            for i in T.serial(C // 2):
                                column = column + pulls[thread // C * (C // 2) + i, thread % C]
                            column_pull[thread] = column
                            T.mbarrier_arrive(summed)
                            step = step + 1
                        T.mbarrier_wait_parity(done[MIXED], turn % 2 ^ 1)
                        put_mix(0, mix, totals[0], norm)
                        put_mix(1, mix, totals[1], norm)
                        give(given, MIX, True)
                        turn = turn + 1
                    item = item + blocks
            elif thread < SCORERS + READERS:
                T.set_max_nreg(config.roles[1].registers, 0)
                total = T.alloc_fragment((2 * C, PART), f32)
                sums = T.alloc_fragment((2 * C, PART), f32)
                key16 = T.alloc_fragment((2 * C, PART), dtype)
                grow = T.alloc_fragment((2 * C,), f32)  # scale exp(G), -exp(G)
                fade = T.alloc_fragment((2 * C,), f32)  # 0, exp(Gc - G)
                own = T.alloc_fragment((2 * C,), f32)  # norm
                read_dot = T.alloc_fragment((2 * C,), f32)
                carried_dot = T.alloc_fragment((2 * C,), f32)
                row = T.alloc_var("int32", init=thread - SCORERS)
                word = T.alloc_local((8,), dtype)
                for _ in T.serial(turns):
                    start = T.alloc_var("int32", init=chunk_table[T.truncdiv(item, groups), 0])
                    length = T.alloc_var("int32", init=chunk_table[T.truncdiv(item, groups), 1])
                    key_head = T.alloc_var("int32", init=T.truncdiv(first, ratio) + T.truncmod(item, groups))
                    if length > 0:
                        T.mbarrier_wait_parity(full_keys, turn % 2)
                        if l2norm:
                            square = T.alloc_var(f32, init=0.0)
                            if row % C < length:  # the others are being cleared
                                for j in T.serial(K // 8):
                                    for e in T.vectorized(8):
                                        word[e] = keys[row, j * 8 + e]
                                    for e in T.unroll(8):
                                        square = square + T.cast(word[e], f32) * T.cast(word[e], f32)
                            norm[row] = T.rsqrt(square + L2_EPS)
                            if in_place:
                                scale_row(keys, row, row % C < length, norm[row])
                                T.fence_proxy_async()
                            T.mbarrier_arrive(normed)
                            T.sync_threads(barrier_id=READERS_BARRIER, arrive_count=READERS)
                            T.copy(norm, own)
                        else:
                            T.fill(own, 1.0)
                        for head in T.serial(ratio):
                            T.mbarrier_wait_parity(full_rows[step % 2], step // 2 % 2)
                            for a in T.Parallel(2 * C):
                                grow[a] = T.exp2(gate[step % 2, a % C]) * T.if_then_else(a < C, scale, -1.0)
                                fade[a] = T.if_then_else(
                                    a < C, 0.0, T.exp2(gate[step % 2, C - 1] - gate[step % 2, a % C])
                                )
                            T.clear(read_dot)
                            T.clear(carried_dot)
                            take(done, READ, step % 2)
                            for part in T.serial(K // PART):
                                T.copy(keys[:, part * PART : part * PART + PART], key16)
                                if head > 0:
                                    T.copy(total_sum[:, part * PART : part * PART + PART], total)
                                else:
                                    T.clear(total)
                                T.copy(read_sum[:, part * PART : part * PART + PART], sums)
                                for a, b in T.Parallel(2 * C, PART):
                                    total[a, b] = total[a, b] + sums[a, b] * grow[a]
                                for a, b in T.Parallel(2 * C, PART):
                                    sums[a, b] = sums[a, b] * T.cast(key16[a, b], f32)
                                T.reduce_sum(sums, read_dot, dim=1, clear=False)
                                T.copy(carried_sum[:, part * PART : part * PART + PART], sums)
                                for a, b in T.Parallel(2 * C, PART):
                                    total[a, b] = total[a, b] + sums[a, b] * fade[a]
                                T.copy(total, total_sum[:, part * PART : part * PART + PART])
                                for a, b in T.Parallel(2 * C, PART):
                                    sums[a, b] = sums[a, b] * T.cast(key16[a, b], f32)
                                T.reduce_sum(sums, carried_dot, dim=1, clear=False)
                            give(given, READS, False)
                            T.mbarrier_wait_parity(told, step % 2 ^ 1)
                            for a in T.Parallel(2 * C):
                                dots[a] = read_dot[a] * grow[a] * (1.0 if in_place else own[a])
                                if a >= C:
                                    leaving[a - C] = carried_dot[a] * fade[a] * (1.0 if in_place else own[a])
                            T.mbarrier_arrive(summed)
                            step = step + 1
                        take(done, MIXED, turn % 2)
                        if l2norm:
                            T.clear(read_dot)
                            for part in T.serial(K // PART):
                                T.copy(total_sum[:, part * PART : part * PART + PART], total)
                                T.copy(keys[:, part * PART : part * PART + PART], key16)
                                for a, b in T.Parallel(2 * C, PART):
                                    sums[a, b] = total[a, b] * T.cast(key16[a, b], f32)
                                T.reduce_sum(sums, read_dot, dim=1, clear=False)
                            for a in T.Parallel(2 * C):
                                read_dot[a] = read_dot[a] * own[a] * own[a] if folds else read_dot[a]
                        for part in T.serial(K // PART):
                            T.copy(total_sum[:, part * PART : part * PART + PART], total)
                            if l2norm:
                                T.copy(keys[:, part * PART : part * PART + PART], key16)
                                for a, b in T.Parallel(2 * C, PART):
                                    total[a, b] = own[a] * (total[a, b] - T.cast(key16[a, b], f32) * read_dot[a])
                            T.copy(total, key16)
                            T.copy(key16, keys[:, part * PART : part * PART + PART])
                        T.fence_proxy_async()
                        T.sync_threads(barrier_id=READERS_BARRIER, arrive_count=READERS)
                        if length == C:
                            for half in T.unroll(K // 64):
                                T.tma_copy(
                                    keys[0:C, half * 64 : half * 64 + 64],
                                    dq[start : start + C, key_head, half * 64 : half * 64 + 64],
                                    leader_scope_threads=READERS,
                                )
                                T.tma_copy(
                                    keys[C : 2 * C, half * 64 : half * 64 + 64],
                                    dk[start : start + C, key_head, half * 64 : half * 64 + 64],
                                    leader_scope_threads=READERS,
                                )
                            T.tma_store_wait(0)
                        else:
                            if row < length:
                                store_row(keys, row, dq, start + row, key_head)
                            if row >= C and row - C < length:
                                store_row(keys, row, dk, start + row - C, key_head)
                        T.mbarrier_arrive(free_keys)
                        turn = turn + 1
                    item = item + blocks
            else:
                T.set_max_nreg(config.roles[2].registers, 0)
                if thread < SCORERS + READERS + WARP:
                    lane = T.alloc_var("int32", init=thread - (SCORERS + READERS))
                    for _ in T.serial(turns):
                        length = T.alloc_var("int32", init=chunk_table[T.truncdiv(item, groups), 1])
                        if length > 0:
                            take(full_keys, 0, turn % 2)
                            if length < C:
                                clear_rows(keys, 0, length, lane, WARP)
                                clear_rows(keys, C, length, lane, WARP)
                            if in_place:
                                take(normed, 0, turn % 2)
                            for head in T.serial(ratio):
                                take(full_rows, step % 2, step // 2 % 2)
                                if length < C:
                                    clear_rows(rows, 0, length, lane, WARP)
                                    clear_rows(rows, C, length, lane, WARP)
                                    T.fence_proxy_async()
                                    T.sync_warp()
                                take(given, PAIRS, step % 2 ^ 1)
                                if head == 0:
                                    issue(keys, keys[C : 2 * C, :], similar_sum, None)
                                issue(rows[0 : 2 * C, :], rows[3 * C : 4 * C, :], pair_sum, done[PAIRED])
                                take(full_states, 0, step % 2)
                                take(given, READS, step % 2 ^ 1)
                                issue(rows[0 : 2 * C, :], s_tile, read_sum, None, right_t=False)
                                issue(rows[2 * C : 4 * C, :], ds_tile, carried_sum, done[READ], right_t=False)
                                step = step + 1
                            take(given, READS, step % 2 ^ 1)
                            take(given, MIX, turn % 2)
                            issue(mix, keys, total_sum, done[MIXED], clear=False, right_t=False)
                            turn = turn + 1
                        item = item + blocks
                elif thread < SCORERS + READERS + 2 * WARP:
                    for _ in T.serial(turns):
                        chunk = T.alloc_var("int32", init=T.truncdiv(item, groups))
                        group = T.alloc_var("int32", init=T.truncmod(item, groups))
                        key_head = T.alloc_var("int32", init=T.truncdiv(first, ratio) + group)
                        start = T.alloc_var("int32", init=chunk_table[chunk, 0])
                        if chunk_table[chunk, 1] > 0:
                            T.mbarrier_wait_parity(free_keys, turn % 2 ^ 1)
                            T.fence_proxy_async()  # others wrote there, as ordinary threads; so below
                            load_rows(q, start, key_head, keys, 0, full_keys, 0)
                            load_rows(k, start, key_head, keys, C, full_keys, 0)
                            T.mbarrier_arrive(full_keys)
                            for member in T.serial(ratio):
                                place = T.alloc_var("int32", init=group * ratio + member)
                                head = T.alloc_var("int32", init=first + place)
                                T.mbarrier_wait_parity(done[READ], step % 2 ^ 1)
                                T.mbarrier_wait_parity(dotted, step % 2 ^ 1)
                                T.fence_proxy_async()
                                T.tma_copy(decay[chunk, head, 0:C], gate[step % 2, :], barrier=full_rows[step % 2])
                                load_rows(do, start, head, rows, 0, full_rows, step % 2)
                                load_rows(dv, start, head, rows, C, full_rows, step % 2)
                                for half in T.unroll(V // 64):
                                    T.tma_copy(
                                        values16[chunk, place, 0:C, half * 64 : half * 64 + 64],
                                        rows[3 * C : 4 * C, half * 64 : half * 64 + 64],
                                        barrier=full_rows[step % 2],
                                    )
                                T.mbarrier_arrive(full_rows[step % 2])
                                T.tma_copy(states16[chunk, place, 0:V, 0:K], s_tile, barrier=full_states)
                                T.tma_copy(dstates16[chunk, place, 0:V, 0:K], ds_tile, barrier=full_states)
                                T.mbarrier_arrive(full_states)
                                step = step + 1
                            turn = turn + 1
                        item = item + blocks
                else:
                    t = T.alloc_var("int32", init=thread - (SCORERS + READERS + 2 * WARP))
                    left = T.alloc_local((8,), dtype)
                    right = T.alloc_local((8,), dtype)
                    for _ in T.serial(turns):
                        start = T.alloc_var("int32", init=chunk_table[T.truncdiv(item, groups), 0])
                        length = T.alloc_var("int32", init=chunk_table[T.truncdiv(item, groups), 1])
                        if length > 0:
                            # Its first gate scales no state: a gradient of 0, where the sum would leave rounding.
                            begun = T.alloc_var("int32", init=chunk_table[T.truncdiv(item, groups), 2])
                            nothing = begins_from_nothing(begun, entered, entry_row)
                            for member in T.serial(ratio):
                                head = T.alloc_var("int32", init=first + T.truncmod(item, groups) * ratio + member)
                                T.mbarrier_wait_parity(full_rows[step % 2], step // 2 % 2)
                                keep = T.alloc_var(f32, init=T.exp2(gate[step % 2, C - 1]))
                                T.mbarrier_wait_parity(full_states, step % 2)
                                product = T.alloc_var(f32, init=0.0)
                                for j in T.serial(V * K // (8 * HELPERS)):
                                    place = T.alloc_var("int32", init=j * HELPERS + t)
                                    for e in T.vectorized(8):
                                        left[e] = s_tile[place // (K // 8), place % (K // 8) * 8 + e]
                                    for e in T.vectorized(8):
                                        right[e] = ds_tile[place // (K // 8), place % (K // 8) * 8 + e]
                                    for e in T.unroll(8):
                                        product = product + T.cast(left[e], f32) * T.cast(right[e], f32)
                                T.mbarrier_arrive(dotted)
                                for level in T.unroll(5):
                                    product = product + T.shfl_xor(product, 16 >> level)
                                if t % WARP == 0:
                                    inner[t // WARP] = product * keep
                                T.mbarrier_wait_parity(summed, step % 2)
                                ddecay[t] = (
                                    dots[t]
                                    + dots[C + t]
                                    + (row_pull[t] + row_pull[C + t] - column_pull[t] - column_pull[C + t])
                                )
                                T.sync_threads(barrier_id=HELPERS_BARRIER, arrive_count=HELPERS)
                                # What leaves behind t cancels in the sum, and does so here exactly.
                                later = T.alloc_var(f32, init=inner[0] + inner[1])
                                for i in T.serial(C):
                                    if i < t:
                                        later = later + leaving[i]
                                    else:
                                        later = later + ddecay[i]
                                if t == 0 and nothing == 1:
                                    later = 0.0
                                if t < length:
                                    dg[start + t, head] = later
                                    strength = T.alloc_var(f32, init=T.cast(beta[start + t, head], f32))
                                    slope = T.alloc_var(f32, init=1.0)
                                    if sigmoid:
                                        strength = 1.0 / (1.0 + T.exp(0.0 - strength))
                                        slope = strength * (1.0 - strength)
                                        if double:
                                            strength = strength * 2.0
                                            slope = slope * 2.0
                                    # NaN stays.
                                    strength = T.if_then_else(
                                        strength < LEAST_STRENGTH[dtype], LEAST_STRENGTH[dtype], strength
                                    )
                                    dbeta[start + t, head] = diagonal[t] / strength / strength * slope
                                T.mbarrier_arrive(told)
                                T.sync_threads(barrier_id=HELPERS_BARRIER, arrive_count=HELPERS)  # inner, ddecay read
                                step = step + 1
                        item = item + blocks
            T.tcgen05_before_thread_sync()
            T.sync_threads()

    return gradients
