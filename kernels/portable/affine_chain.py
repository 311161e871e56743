"""The states in front of segments, by chaining the segments' maps, one kernel text for all architectures.

    S' = M S + E          S' = E where the segment's map forgot S (to fp32 rounding)

In fp32 and in place: the row of carried states that held E takes S'. A block has some columns of V of one head and walks
its chain. A warp has a run of the inner dimension and sums into a register tile of 8 rows of K a thread; the warps'
sums meet in shared memory. M^T [K in, K out] is read once, along its rows. Rows that need no correction are not touched.
Letters: K key dim, V value dim, HV value heads.
"""

import tilelang.language as T

from flashqla_cp.kernels.blocks import segments as column
from flashqla_cp.kernels.spec import KernelSpec

COLUMNS = 16  # of V in a block
THREADS, WARP = 256, 32
AHEAD = 4  # rows of M^T in flight


def build_affine_chain(spec: KernelSpec):
    """dims: head_dim. flags: initial_state."""
    K = V = spec.dim("head_dim")
    has_initial, f32 = spec.has("initial_state"), "float32"
    PARTS = THREADS // WARP
    RUN = K // PARTS  # inner rows of a warp
    GROUPS = K // 8  # threads side by side along K
    WIDE = COLUMNS * GROUPS // WARP  # columns of a thread
    SHARE = COLUMNS * K // THREADS  # finished numbers of a thread
    rows, HV, chains = (T.dynamic(n) for n in ("rows", "HV", "chains"))

    @T.prim_func
    def affine_chain(
        links: T.Tensor((rows, column.LINK_COLUMNS), "int32"),
        correction: T.Tensor((rows, HV, K, K), f32),
        corrects: T.Tensor((rows, HV), "int32"),
        initial: T.Tensor((chains, HV, V, K), f32),
        carried: T.Tensor((rows, HV, V, K), f32),
    ):
        with T.Kernel(rows * HV, V // COLUMNS, threads=THREADS) as (block, group):
            state = T.alloc_shared((K, COLUMNS + 4), f32)
            partial = T.alloc_shared((PARTS, COLUMNS, K), f32)
            sums = T.alloc_local((WIDE * 8,), f32)
            m = T.alloc_local((AHEAD * 8,), f32)
            s = T.alloc_local((WIDE,), f32)
            thread = T.get_thread_binding()
            head = T.alloc_var("int32", init=T.truncmod(block, HV))
            row = T.alloc_var("int32", init=T.truncdiv(block, HV))
            length = T.alloc_var("int32", init=links[row, column.LENGTH])
            known = T.alloc_var("int32", init=0)  # whether `state` holds what is in front of this row's segment
            for step in T.serial(length):
                if corrects[row + step, head] == 0:
                    known = 0
                else:
                    if known == 0:
                        T.sync_threads()
                        for i in T.unroll(SHARE):
                            v = (i * THREADS + thread) // K
                            k = thread % K
                            if step > 0:
                                state[k, v] = carried[row + step - 1, head, group * COLUMNS + v, k]
                            else:
                                if has_initial:
                                    state[k, v] = initial[links[row, column.LINK_CHAIN], head, group * COLUMNS + v, k]
                    T.sync_threads()
                    for i in T.unroll(WIDE * 8):
                        sums[i] = 0.0
                    for turn in T.unroll(RUN // AHEAD):
                        for r in T.unroll(AHEAD):
                            for half in T.unroll(2):
                                for e in T.vectorized(4):
                                    m[r * 8 + half * 4 + e] = correction[
                                        row + step,
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
                    T.sync_threads()
                    for i in T.unroll(SHARE):
                        v = (i * THREADS + thread) // K
                        k = thread % K
                        total = T.alloc_var(f32, init=carried[row + step, head, group * COLUMNS + v, k])
                        for p in T.unroll(PARTS):
                            total = total + partial[p, v, k]
                        state[k, v] = total
                        carried[row + step, head, group * COLUMNS + v, k] = total
                    known = 1

    return affine_chain
