"""The states in front of segments, by chaining the segments' maps, one kernel text for all architectures.

    S' = M S + E          S' = E where the segment's map forgot S (to fp32 rounding)

With the flag "reverse" the gradients behind segments, by the adjoints, from a chain's last row to its first:

    dS = M^T dS' + D

To fp32 rounding. Without the flag "apart" it is done in place: E (or D) and the carried states are one tensor. A block
has some columns of V of one head and walks its chain. M^T [K in, K out] comes to registers while the step before it
multiplies. Rows that need no correction are not touched, or only copied.

With the flag "final_correction", where a rank receives the state in front of a chain, also the chain's maps up to each
of its rows, M_n = M .. M, as far as no segment forgets, which `reaches` says; the last one, which a rank sends, is 0 if
one does. When that state S is there, enter_chains adds M_n S to row n: no row waits for another.
Letters: K key dim, V value dim, HV value heads.
"""

import tilelang.language as T

from flashqla_cp.kernels.blocks import segments as column
from flashqla_cp.kernels.blocks.affine_product import bring_all, place, product, product_memory, product_registers
from flashqla_cp.kernels.blocks.product_shares import VECTOR, chain_shares
from flashqla_cp.kernels.spec import KernelSpec

ENTER_TURNS = 2  # that a block of enter_chains multiplies with one map


@T.macro
def load(values, row, head, group, held, thread, shares):
    """held = this thread's numbers of some columns of V of a row."""
    for i in T.unroll(shares.finished // VECTOR):
        for e in T.vectorized(VECTOR):
            held[i * VECTOR + e] = values[
                row, head, group * shares.columns + shares.row(thread, i), shares.output(thread) + e
            ]


@T.macro
def store(values, row, head, group, held, thread, shares):
    """The other way round."""
    for i in T.unroll(shares.finished // VECTOR):
        for e in T.vectorized(VECTOR):
            values[row, head, group * shares.columns + shares.row(thread, i), shares.output(thread) + e] = held[
                i * VECTOR + e
            ]


def build_affine_chain(spec: KernelSpec):
    """dims: head_dim. flags: initial_state, reverse, apart (E is kept), final_correction (chains' own maps, too)."""
    K = V = spec.dim("head_dim")
    has_initial, apart, whole, reverse = (
        spec.has(flag) for flag in ("initial_state", "apart", "final_correction", "reverse")
    )
    f32, i32 = "float32", "int32"
    shares = chain_shares(K)
    SHARE, COLUMNS = shares.finished, shares.columns
    rows, HV, chains, entries = (T.dynamic(n) for n in ("rows", "HV", "chains", "entries"))
    states = T.dynamic("states") if reverse else rows  # rows of the corrections
    listed = chains if has_initial else T.dynamic("listed")  # entries that are given

    @T.macro
    def chain_states(block, group, maps, boundary, carried, initial, entry_row, shared):
        """The states of one chain, COLUMNS columns of V."""
        links, corrects, correction = maps
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
        met = T.alloc_local((SHARE,), f32)  # the state that meets a segment, then M of it
        m = product_registers(shares)
        if has_initial and length > 0:
            first = entry_row[links[row, column.LINK_CHAIN]]
            if first >= 0:
                needed = corrects[by, head]
        if needed == 1:
            bring_all(m, correction, (by, head), thread, shares, reverse)
        for step in T.serial(length):
            follows = T.alloc_var(i32, init=0)
            if step + 1 < length:
                follows = corrects[by + way, head]
            if follows == 1 and needed == 0:
                bring_all(m, correction, (by + way, head), thread, shares, reverse)
            if needed == 1:
                load(boundary, at, head, group, own, thread, shares)
                if known == 0:
                    if step > 0:
                        load(boundary, at - way, head, group, met, thread, shares)
                    elif has_initial:
                        load(initial, first, head, group, met, thread, shares)
                    place(met, shared[0], thread, shares)
                product(shared, m, met, thread, shares, reverse, follows, correction, (by + way, head))
                for i in T.unroll(SHARE):
                    own[i] = own[i] + met[i]
                place(own, shared[0], thread, shares)
                store(carried, at, head, group, own, thread, shares)
            elif apart:
                load(boundary, at, head, group, own, thread, shares)
                store(carried, at, head, group, own, thread, shares)
            known = needed
            needed = follows
            at = at + way
            by = by + way

    @T.macro
    def chain_corrections(block, group, maps, enters, final_correction, reaches, shared):
        """A chain's own maps, transposed, COLUMNS inputs of K, if anything enters it."""
        links, corrects, correction = maps
        thread = T.get_thread_binding()
        head = T.alloc_var(i32, init=T.truncmod(block, HV))
        row = T.alloc_var(i32, init=T.truncdiv(block, HV))
        length = T.alloc_var(i32, init=links[row, column.LENGTH])
        alive = T.alloc_var(i32, init=0)  # whether no segment up to here forgets
        own = T.alloc_local((SHARE,), f32)
        m = product_registers(shares)
        if length > 0:
            if enters[links[row, column.LINK_CHAIN]] >= 0:
                alive = corrects[row, head]
            else:
                length = 0
        if alive == 1:
            load(correction, row, head, group, own, thread, shares)
        for step in T.serial(length):
            follows = T.alloc_var(i32, init=0)
            if alive == 1 and step + 1 < length:
                follows = corrects[row + step + 1, head]
            if follows == 1 and step == 0:
                bring_all(m, correction, (row + 1, head), thread, shares, False)
            if alive == 1:
                if step > 0:
                    place(own, shared[0], thread, shares)
                    product(shared, m, own, thread, shares, False, follows, correction, (row + step + 1, head))
                store(final_correction, row + step, head, group, own, thread, shares)
            elif step + 1 == length:
                for i in T.unroll(SHARE):
                    own[i] = 0.0
                store(final_correction, row + step, head, group, own, thread, shares)
            if group == 0 and thread == 0:
                reaches[row + step, head] = alive
            alive = follows

    if whole:

        @T.prim_func
        def affine_chain(
            links: T.Tensor((rows, column.LINK_COLUMNS), i32),
            correction: T.Tensor((rows, HV, K, K), f32),
            corrects: T.Tensor((rows, HV), i32),
            initial: T.Tensor((entries, HV, V, K), f32),
            entry_row: T.Tensor((listed,), i32),
            enters: T.Tensor((chains,), i32),
            boundary: T.Tensor((rows, HV, V, K), f32),
            carried: T.Tensor((rows, HV, V, K), f32),
            final_correction: T.Tensor((rows, HV, K, K), f32),
            reaches: T.Tensor((rows, HV), i32),
        ):
            with T.Kernel(rows * HV, (V + K) // COLUMNS, threads=shares.threads) as (block, group):
                shared = product_memory(shares)
                maps = (links, corrects, correction)
                if group < V // COLUMNS:
                    chain_states(block, group, maps, boundary, carried, initial, entry_row, shared)
                else:
                    chain_corrections(block, group - V // COLUMNS, maps, enters, final_correction, reaches, shared)

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
            with T.Kernel(rows * HV, V // COLUMNS, threads=shares.threads) as (block, group):
                maps = (links, corrects, correction)
                shared = product_memory(shares)
                chain_states(block, group, maps, boundary, carried, initial, entry_row, shared)

    return affine_chain


def build_enter_chains(spec: KernelSpec):
    """dims: head_dim. Adds to the carried states of chains what an entry state makes of them: M_n S, in place.

    entry_row: of every chain, -1 where nothing enters, as affine_chain was told in `enters`. final_correction, reaches:
    what it left.
    """
    K = V = spec.dim("head_dim")
    f32, i32 = "float32", "int32"
    shares = chain_shares(K)
    COLUMNS = shares.columns
    rows, HV, chains, entries = (T.dynamic(n) for n in ("rows", "HV", "chains", "entries"))

    @T.prim_func
    def enter_chains(
        links: T.Tensor((rows, column.LINK_COLUMNS), i32),
        final_correction: T.Tensor((rows, HV, K, K), f32),
        reaches: T.Tensor((rows, HV), i32),
        initial: T.Tensor((entries, HV, V, K), f32),
        entry_row: T.Tensor((chains,), i32),
        carried: T.Tensor((rows, HV, V, K), f32),
    ):
        with T.Kernel(rows * HV, V // (ENTER_TURNS * COLUMNS), threads=shares.threads) as (block, turns):
            shared = product_memory(shares)
            thread = T.get_thread_binding()
            head = T.alloc_var(i32, init=T.truncmod(block, HV))
            row = T.alloc_var(i32, init=T.truncdiv(block, HV))
            chain = T.alloc_var(i32, init=links[row, column.LINK_CHAIN])
            first = T.alloc_var(i32, init=-1)
            alive = T.alloc_var(i32, init=0)
            if chain >= 0:
                first = entry_row[chain]
            if first >= 0:
                alive = reaches[row, head]
            if alive == 1:
                own = T.alloc_local((shares.finished,), f32)
                added = T.alloc_local((shares.finished,), f32)
                m = product_registers(shares)
                bring_all(m, final_correction, (row, head), thread, shares, False)
                for turn in T.serial(ENTER_TURNS):
                    group = T.alloc_var(i32, init=turns * ENTER_TURNS + turn)
                    load(initial, first, head, group, added, thread, shares)
                    load(carried, row, head, group, own, thread, shares)
                    place(added, shared[0], thread, shares)
                    product(shared, m, added, thread, shares, False, 0, final_correction, (row, head))
                    for i in T.unroll(shares.finished):
                        own[i] = own[i] + added[i]
                    store(carried, row, head, group, own, thread, shares)

    return enter_chains
