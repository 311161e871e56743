"""The states in front of segments, by chaining the segments' maps, one kernel text for all architectures.

    S' = M S + E          S' = E where the segment's map forgot S (to fp32 rounding)

In fp32. Without the flag "apart" it is done in place: E and the carried states are one tensor. A block has some columns
of V of one head and walks its chain. A warp has a run of the inner dimension and sums into a register tile of 8 rows of
K a thread; the warps' sums meet in shared memory. M^T [K in, K out] is read once, along its rows. Rows that need no
correction are not touched, or only copied. A chain's own M, which a rank sends, is the same walk from the identity.
Letters: K key dim, V value dim, HV value heads.
"""

import tilelang.language as T

from flashqla_cp.kernels.blocks import segments as column
from flashqla_cp.kernels.spec import KernelSpec

COLUMNS = 16  # of V in a block
THREADS, WARP = 256, 32
AHEAD = 4  # rows of M^T in flight


def build_affine_chain(spec: KernelSpec):
    """dims: head_dim. flags: initial_state, apart (E is kept), final_correction (of chains, the context-parallel M)."""
    K = V = spec.dim("head_dim")
    has_initial, apart, whole = (spec.has(flag) for flag in ("initial_state", "apart", "final_correction"))
    f32, i32 = "float32", "int32"
    PARTS = THREADS // WARP
    RUN = K // PARTS  # inner rows of a warp
    GROUPS = K // 8  # threads side by side along K
    WIDE = COLUMNS * GROUPS // WARP  # columns of a thread
    SHARE = COLUMNS * K // THREADS  # finished numbers of a thread
    rows, HV, chains, entries = (T.dynamic(n) for n in ("rows", "HV", "chains", "entries"))

    listed = chains if has_initial else T.dynamic("listed")

    @T.macro
    def multiply(correction, row, head, state, partial, thread):
        """partial[warp] = the warp's share of M S."""
        sums = T.alloc_local((WIDE * 8,), f32)
        m = T.alloc_local((AHEAD * 8,), f32)
        s = T.alloc_local((WIDE,), f32)
        for i in T.unroll(WIDE * 8):
            sums[i] = 0.0
        for turn in T.unroll(RUN // AHEAD):
            for r in T.unroll(AHEAD):
                for half in T.unroll(2):
                    for e in T.vectorized(4):
                        m[r * 8 + half * 4 + e] = correction[
                            row,
                            head,
                            thread // WARP * RUN + turn * AHEAD + r,
                            half * (K // 2) + thread % GROUPS * 4 + e,
                        ]
            for r in T.unroll(AHEAD):
                for quad in T.unroll(WIDE // 4):
                    for e in T.vectorized(4):
                        s[quad * 4 + e] = state[
                            thread // WARP * RUN + turn * AHEAD + r,
                            thread % WARP // GROUPS * WIDE + quad * 4 + e,
                        ]
                for v in T.unroll(WIDE):
                    for e in T.unroll(8):
                        sums[v * 8 + e] = sums[v * 8 + e] + m[r * 8 + e] * s[v]
        for v in T.unroll(WIDE):
            for half in T.unroll(2):
                for e in T.vectorized(4):
                    partial[
                        thread // WARP,
                        thread % WARP // GROUPS * WIDE + v,
                        half * (K // 2) + thread % GROUPS * 4 + e,
                    ] = sums[v * 8 + half * 4 + e]

    @T.macro
    def chain_states(group, row, head, length, chain, corrects, correction, boundary, carried, initial, entry_row):
        """The states of one chain, COLUMNS columns of V."""
        state = T.alloc_shared((K, COLUMNS + 4), f32)
        partial = T.alloc_shared((PARTS, COLUMNS, K), f32)
        thread = T.get_thread_binding()
        known = T.alloc_var(i32, init=0)  # whether `state` holds what is in front of this row's segment
        first = T.alloc_var(i32, init=-1)
        if has_initial:
            first = entry_row[chain]
        for step in T.serial(length):
            needed = T.alloc_var(i32, init=corrects[row + step, head])
            if step == 0 and first < 0:
                needed = 0  # nothing enters
            if needed == 0:
                known = 0
                if apart:
                    for i in T.unroll(SHARE):
                        v = group * COLUMNS + (i * THREADS + thread) // K
                        carried[row + step, head, v, thread % K] = boundary[row + step, head, v, thread % K]
            else:
                if known == 0:
                    T.sync_threads()
                    for i in T.unroll(SHARE):
                        v = (i * THREADS + thread) // K
                        k = thread % K
                        if step > 0:
                            state[k, v] = boundary[row + step - 1, head, group * COLUMNS + v, k]
                        elif has_initial:
                            state[k, v] = initial[first, head, group * COLUMNS + v, k]
                T.sync_threads()
                multiply(correction, row + step, head, state, partial, thread)
                T.sync_threads()
                for i in T.unroll(SHARE):
                    v = (i * THREADS + thread) // K
                    k = thread % K
                    total = T.alloc_var(f32, init=boundary[row + step, head, group * COLUMNS + v, k])
                    for p in T.unroll(PARTS):
                        total = total + partial[p, v, k]
                    state[k, v] = total
                    carried[row + step, head, group * COLUMNS + v, k] = total
                known = 1

    @T.macro
    def chain_corrections(group, row, head, length, chain, corrects, correction, final_correction):
        """The chain's own M^T: the product of its segments', zero where one of them forgets; COLUMNS inputs of K."""
        state = T.alloc_shared((K, COLUMNS + 4), f32)
        partial = T.alloc_shared((PARTS, COLUMNS, K), f32)
        thread = T.get_thread_binding()
        alive = T.alloc_var(i32, init=1)
        for step in T.serial(length):
            if corrects[row + step, head] == 0:
                alive = 0
        for i in T.unroll(SHARE):
            v = (i * THREADS + thread) // K
            k = thread % K
            state[k, v] = T.if_then_else(k == group * COLUMNS + v and alive == 1, 1.0, 0.0)
        if alive == 1:
            for step in T.serial(length):
                T.sync_threads()
                multiply(correction, row + step, head, state, partial, thread)
                T.sync_threads()
                for i in T.unroll(SHARE):
                    v = (i * THREADS + thread) // K
                    k = thread % K
                    total = T.alloc_var(f32, init=0.0)
                    for p in T.unroll(PARTS):
                        total = total + partial[p, v, k]
                    state[k, v] = total
        for i in T.unroll(SHARE):
            v = (i * THREADS + thread) // K
            final_correction[chain, head, group * COLUMNS + v, thread % K] = state[thread % K, v]

    if whole:

        @T.prim_func
        def affine_chain(
            links: T.Tensor((rows, column.LINK_COLUMNS), i32),
            correction: T.Tensor((rows, HV, K, K), f32),
            corrects: T.Tensor((rows, HV), i32),
            initial: T.Tensor((entries, HV, V, K), f32),
            entry_row: T.Tensor((listed,), i32),
            boundary: T.Tensor((rows, HV, V, K), f32),
            carried: T.Tensor((rows, HV, V, K), f32),
            final_correction: T.Tensor((chains, HV, K, K), f32),
        ):
            with T.Kernel(rows * HV, (V + K) // COLUMNS, threads=THREADS) as (block, group):
                head = T.alloc_var(i32, init=T.truncmod(block, HV))
                row = T.alloc_var(i32, init=T.truncdiv(block, HV))
                length = T.alloc_var(i32, init=links[row, column.LENGTH])
                chain = T.alloc_var(i32, init=links[row, column.LINK_CHAIN])
                if length > 0:
                    if group < V // COLUMNS:
                        chain_states(
                            group, row, head, length, chain, corrects, correction, boundary, carried, initial, entry_row
                        )
                    else:
                        chain_corrections(
                            group - V // COLUMNS, row, head, length, chain, corrects, correction, final_correction
                        )

    else:

        @T.prim_func
        def affine_chain(
            links: T.Tensor((rows, column.LINK_COLUMNS), i32),
            correction: T.Tensor((rows, HV, K, K), f32),
            corrects: T.Tensor((rows, HV), i32),
            initial: T.Tensor((entries, HV, V, K), f32),
            entry_row: T.Tensor((listed,), i32),
            boundary: T.Tensor((rows, HV, V, K), f32),
            carried: T.Tensor((rows, HV, V, K), f32),
        ):
            with T.Kernel(rows * HV, V // COLUMNS, threads=THREADS) as (block, group):
                head = T.alloc_var(i32, init=T.truncmod(block, HV))
                row = T.alloc_var(i32, init=T.truncdiv(block, HV))
                length = T.alloc_var(i32, init=links[row, column.LENGTH])
                chain = T.alloc_var(i32, init=links[row, column.LINK_CHAIN])
                if length > 0:
                    chain_states(
                        group, row, head, length, chain, corrects, correction, boundary, carried, initial, entry_row
                    )

    return affine_chain
