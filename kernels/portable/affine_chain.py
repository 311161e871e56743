"""The states in front of segments, by chaining the segments' maps, one kernel text for all architectures.

    S' = M S + E          S' = E where the segment's map forgot S (to fp32 rounding)

With the flag "reverse" the gradients behind segments, by the adjoints, from a chain's last row to its first:

    dS = M^T dS' + D

In fp32. Without the flag "apart" it is done in place: E (or D) and the carried states are one tensor. A block has some
columns of V of one head and walks its chain. A warp has a run of the inner dimension and sums into a register tile of
8 rows of K a thread; the warps' sums meet in shared memory. M^T [K in, K out] is read once, along its rows, and across
them in reverse. Rows that need no correction are not touched, or only copied. A chain's own M, which a rank sends, is
the same walk from the identity.
Letters: K key dim, V value dim, HV value heads.
"""

import tilelang.language as T

from flashqla_cp.kernels.blocks import segments as column
from flashqla_cp.kernels.spec import KernelSpec

COLUMNS = 16  # of V in a block
THREADS, WARP = 256, 32
AHEAD = 4  # inner rows of a turn


def build_affine_chain(spec: KernelSpec):
    """dims: head_dim. flags: initial_state, reverse, apart (E is kept), final_correction (a chain's own)."""
    K = V = spec.dim("head_dim")
    has_initial, apart, whole, reverse = (
        spec.has(flag) for flag in ("initial_state", "apart", "final_correction", "reverse")
    )
    f32, i32 = "float32", "int32"
    PARTS = THREADS // WARP
    RUN = K // PARTS  # inner rows of a warp
    GROUPS = K // 8  # threads side by side along K
    WIDE = COLUMNS * GROUPS // WARP  # columns of a thread
    SHARE = COLUMNS * K // THREADS  # finished numbers of a thread
    rows, HV, chains, entries = (T.dynamic(n) for n in ("rows", "HV", "chains", "entries"))
    states = rows if not reverse else T.dynamic("states")  # rows of the corrections

    listed = chains if has_initial else T.dynamic("listed")

    @T.macro
    def load(correction, row, head, turn, m, thread):
        """m[inner, 8 outer] of a turn: the numbers by which the thread's outputs take AHEAD inner ones."""
        inner = T.alloc_var(i32, init=thread // WARP * RUN + turn * AHEAD)
        if reverse:
            for i in T.unroll(8):
                for e in T.vectorized(4):
                    m[i * AHEAD + e] = correction[row, head, i // 4 * (K // 2) + thread % GROUPS * 4 + i % 4, inner + e]
        else:
            for r in T.unroll(AHEAD):
                for half in T.unroll(2):
                    for e in T.vectorized(4):
                        m[r * 8 + half * 4 + e] = correction[
                            row, head, inner + r, half * (K // 2) + thread % GROUPS * 4 + e
                        ]

    @T.macro
    def multiply(correction, row, head, state, partial, thread):
        """partial[warp] = the warp's share of M S, or of M^T S in reverse."""
        sums = T.alloc_local((WIDE * 8,), f32)
        m = T.alloc_local((AHEAD * 8,), f32)
        s = T.alloc_local((WIDE,), f32)
        for i in T.unroll(WIDE * 8):
            sums[i] = 0.0
        for turn in T.unroll(RUN // AHEAD):
            load(correction, row, head, turn, m, thread)
            for r in T.unroll(AHEAD):
                for quad in T.unroll(WIDE // 4):
                    for e in T.vectorized(4):
                        s[quad * 4 + e] = state[
                            thread // WARP * RUN + turn * AHEAD + r,
                            thread % WARP // GROUPS * WIDE + quad * 4 + e,
                        ]
                for v in T.unroll(WIDE):
                    for e in T.unroll(8):
                        if reverse:
                            sums[v * 8 + e] = sums[v * 8 + e] + m[e * AHEAD + r] * s[v]
                        else:
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
    def chain_states(block, group, links, corrects, correction, boundary, carried, initial, entry_row):
        """The states of one chain, COLUMNS columns of V."""
        state = T.alloc_shared((K, COLUMNS + 4), f32)
        partial = T.alloc_shared((PARTS, COLUMNS, K), f32)
        thread = T.get_thread_binding()
        head = T.alloc_var(i32, init=T.truncmod(block, HV))
        row = T.alloc_var(i32, init=T.truncdiv(block, HV))
        length = T.alloc_var(i32, init=links[row, column.LENGTH])
        known = T.alloc_var(i32, init=0)  # whether `state` holds what meets this row's segment
        first = T.alloc_var(i32, init=-1)
        if has_initial and length > 0:
            first = entry_row[links[row, column.LINK_CHAIN]]
        for step in T.serial(length):
            at = T.alloc_var(i32, init=row + step)
            by = T.alloc_var(i32, init=row + step)  # row of the correction
            before = T.alloc_var(i32, init=row + step - 1)
            if reverse:
                at = row + length - 1 - step
                by = links[row, column.LINK_CORRECTION] + length - 1 - step
                before = at + 1
            needed = T.alloc_var(i32, init=0)
            if step > 0 or first >= 0:  # else nothing enters
                needed = corrects[by, head]
            if needed == 0:
                known = 0
                if apart:
                    for i in T.unroll(SHARE):
                        v = group * COLUMNS + (i * THREADS + thread) // K
                        carried[at, head, v, thread % K] = boundary[at, head, v, thread % K]
            else:
                if known == 0:
                    T.sync_threads()
                    for i in T.unroll(SHARE):
                        v = (i * THREADS + thread) // K
                        k = thread % K
                        if step > 0:
                            state[k, v] = boundary[before, head, group * COLUMNS + v, k]
                        elif has_initial:
                            state[k, v] = initial[first, head, group * COLUMNS + v, k]
                T.sync_threads()
                multiply(correction, by, head, state, partial, thread)
                T.sync_threads()
                for i in T.unroll(SHARE):
                    v = (i * THREADS + thread) // K
                    k = thread % K
                    total = T.alloc_var(f32, init=boundary[at, head, group * COLUMNS + v, k])
                    for p in T.unroll(PARTS):
                        total = total + partial[p, v, k]
                    state[k, v] = total
                    carried[at, head, group * COLUMNS + v, k] = total
                known = 1

    @T.macro
    def chain_corrections(block, group, links, corrects, correction, final_correction):
        """The chain's own M^T: the product of its segments', zero where one of them forgets; COLUMNS inputs of K."""
        state = T.alloc_shared((K, COLUMNS + 4), f32)
        partial = T.alloc_shared((PARTS, COLUMNS, K), f32)
        thread = T.get_thread_binding()
        head = T.alloc_var(i32, init=T.truncmod(block, HV))
        row = T.alloc_var(i32, init=T.truncdiv(block, HV))
        length = T.alloc_var(i32, init=links[row, column.LENGTH])
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
        if length > 0:
            for i in T.unroll(SHARE):
                v = (i * THREADS + thread) // K
                final_correction[links[row, column.LINK_CHAIN], head, group * COLUMNS + v, thread % K] = state[
                    thread % K, v
                ]

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
                if group < V // COLUMNS:
                    chain_states(block, group, links, corrects, correction, boundary, carried, initial, entry_row)
                else:
                    chain_corrections(block, group - V // COLUMNS, links, corrects, correction, final_correction)

    else:

        @T.prim_func
        def affine_chain(
            links: T.Tensor((rows, column.LINK_COLUMNS), i32),
            correction: T.Tensor((states, HV, K, K), f32),
            corrects: T.Tensor((states, HV), i32),
            initial: T.Tensor((entries, HV, V, K), f32),
            entry_row: T.Tensor((listed,), i32),
            boundary: T.Tensor((rows, HV, V, K), f32),
            carried: T.Tensor((rows, HV, V, K), f32),
        ):
            with T.Kernel(rows * HV, V // COLUMNS, threads=THREADS) as (block, group):
                chain_states(block, group, links, corrects, correction, boundary, carried, initial, entry_row)

    return affine_chain
