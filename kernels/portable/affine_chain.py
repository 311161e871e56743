"""The states in front of segments, by chaining the segments' maps, one kernel text for all architectures.

    S' = M S + E          S' = E where the segment's map forgot S (to fp32 rounding)

With the flag "reverse" the gradients behind segments, by the adjoints, from a chain's last row to its first:

    dS = M^T dS' + D

In fp32. Without the flag "apart" it is done in place: E (or D) and the carried states are one tensor. A block has some
columns of V of one head and walks its chain. M^T [K in, K out] comes to shared memory by cp.async while the step before
it adds up. Rows that need no correction are not touched, or only copied. A chain's own M, which a rank sends, is the
same walk from the first segment's.
Letters: K key dim, V value dim, HV value heads.
"""

import tilelang.language as T

from flashqla_cp.kernels.blocks import segments as column
from flashqla_cp.kernels.blocks.affine_product import product, product_memory
from flashqla_cp.kernels.blocks.product_shares import COLUMNS, PARTS, THREADS, Shares
from flashqla_cp.kernels.spec import KernelSpec


def build_affine_chain(spec: KernelSpec):
    """dims: head_dim. flags: initial_state, reverse, apart (E is kept), final_correction (a chain's own)."""
    K = V = spec.dim("head_dim")
    has_initial, apart, whole, reverse = (
        spec.has(flag) for flag in ("initial_state", "apart", "final_correction", "reverse")
    )
    f32, i32 = "float32", "int32"
    shares = Shares(K)
    SHARE = shares.finished
    rows, HV, chains, entries = (T.dynamic(n) for n in ("rows", "HV", "chains", "entries"))
    states = T.dynamic("states") if reverse else rows  # rows of the corrections
    listed = chains if has_initial else T.dynamic("listed")

    @T.macro
    def fetch(correction, row, head, tile):
        """Start to bring M^T of a row."""
        T.async_copy(correction[row, head, 0:K, 0:K], tile[0, 0:K, 0:K])

    @T.macro
    def chain_states(block, group, maps, boundary, carried, initial, entry_row, shared):
        """The states of one chain, COLUMNS columns of V."""
        links, corrects, correction = maps
        tile, state, partial = shared
        thread = T.get_thread_binding()
        head = T.alloc_var(i32, init=T.truncmod(block, HV))
        row = T.alloc_var(i32, init=T.truncdiv(block, HV))
        length = T.alloc_var(i32, init=links[row, column.LENGTH])
        known = T.alloc_var(i32, init=0)  # whether `state` holds what meets this row's segment
        needed = T.alloc_var(i32, init=0)  # whether this row's segment corrects it
        first = T.alloc_var(i32, init=-1)
        # Walked from row `at` on, with the corrections from `by` on.
        at = T.alloc_var(i32, init=row)
        by = T.alloc_var(i32, init=row)
        way = T.alloc_var(i32, init=1)
        if reverse:
            at = row + length - 1
            by = links[row, column.LINK_CORRECTION] + length - 1
            way = -1
        own = T.alloc_local((SHARE,), f32)
        if has_initial and length > 0:
            first = entry_row[links[row, column.LINK_CHAIN]]
            if first >= 0:
                needed = corrects[by, head]
        if needed == 1:
            fetch(correction, by, head, tile)
        for step in T.serial(length):
            follows = T.alloc_var(i32, init=0)
            if step + 1 < length:
                follows = corrects[by + way, head]
            if needed == 1:
                for i in T.unroll(SHARE):
                    own[i] = boundary[at, head, group * COLUMNS + (i * THREADS + thread) // K, thread % K]
                if known == 0:
                    for i in T.unroll(SHARE):
                        v = (i * THREADS + thread) // K
                        if step > 0:
                            state[thread % K, v] = boundary[at - way, head, group * COLUMNS + v, thread % K]
                        elif has_initial:
                            state[thread % K, v] = initial[first, head, group * COLUMNS + v, thread % K]
                T.ptx_wait_group(0)
                product(tile, 0, state, partial, thread, shares, reverse)
            if follows == 1:
                fetch(correction, by + way, head, tile)
            if needed == 1:
                for i in T.unroll(SHARE):
                    v = (i * THREADS + thread) // K
                    for p in T.unroll(PARTS):
                        own[i] = own[i] + partial[p, v, thread % K]
                    state[thread % K, v] = own[i]
                    carried[at, head, group * COLUMNS + v, thread % K] = own[i]
            elif apart:
                for i in T.unroll(SHARE):
                    v = group * COLUMNS + (i * THREADS + thread) // K
                    carried[at, head, v, thread % K] = boundary[at, head, v, thread % K]
            known = needed
            needed = follows
            at = at + way
            by = by + way

    @T.macro
    def chain_corrections(block, group, maps, final_correction, shared):
        """The chain's own M^T: the product of its segments', zero where one of them forgets; COLUMNS inputs of K."""
        links, corrects, correction = maps
        tile, state, partial = shared
        thread = T.get_thread_binding()
        head = T.alloc_var(i32, init=T.truncmod(block, HV))
        row = T.alloc_var(i32, init=T.truncdiv(block, HV))
        length = T.alloc_var(i32, init=links[row, column.LENGTH])
        alive = T.alloc_var(i32, init=1)
        for step in T.serial(length):
            if corrects[row + step, head] == 0:
                alive = 0
        if alive == 1 and length > 1:
            fetch(correction, row + 1, head, tile)
        for i in T.unroll(SHARE):
            v = (i * THREADS + thread) // K
            state[thread % K, v] = 0.0
            if alive == 1 and length > 0:
                state[thread % K, v] = correction[row, head, group * COLUMNS + v, thread % K]
        if alive == 1:
            for step in T.serial(1, length):
                T.ptx_wait_group(0)
                product(tile, 0, state, partial, thread, shares, reverse)
                if step + 1 < length:
                    fetch(correction, row + step + 1, head, tile)
                for i in T.unroll(SHARE):
                    v = (i * THREADS + thread) // K
                    total = T.alloc_var(f32, init=0.0)
                    for p in T.unroll(PARTS):
                        total = total + partial[p, v, thread % K]
                    state[thread % K, v] = total
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
                shared = product_memory(K, 1)
                maps = (links, corrects, correction)
                if group < V // COLUMNS:
                    chain_states(block, group, maps, boundary, carried, initial, entry_row, shared)
                else:
                    chain_corrections(block, group - V // COLUMNS, maps, final_correction, shared)

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
                maps = (links, corrects, correction)
                chain_states(block, group, maps, boundary, carried, initial, entry_row, product_memory(K, 1))

    return affine_chain
