"""The states in front of segments, by chaining the segments' maps, one kernel text for all architectures.

    S' = M S + E          S' = E where the segment's map forgot S (to fp32 rounding)

In fp32 and in place: the row of carried states that held E takes S'. A block has some columns of V of one head and walks
its chain; a thread has one row of K and, with its partners, a run of the inner dimension. M^T [K in, K out] is read
along its rows, S is broadcast from shared memory. Rows that need no correction are not touched.
Letters: K key dim, V value dim, HV value heads.
"""

import tilelang.language as T

from flashqla_cp.kernels.blocks import segments as column
from flashqla_cp.kernels.spec import KernelSpec

COLUMNS = 16  # of V in a block
THREADS = 256
AHEAD = 16  # rows of M^T in flight


def build_affine_chain(spec: KernelSpec):
    """dims: head_dim. flags: initial_state."""
    K = V = spec.dim("head_dim")
    has_initial, f32 = spec.has("initial_state"), "float32"
    PARTS = THREADS // K
    RUN, SHARE = K // PARTS, COLUMNS // PARTS
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
            state = T.alloc_shared((COLUMNS, K), f32)
            partial = T.alloc_shared((PARTS, COLUMNS, K), f32)
            sums = T.alloc_local((COLUMNS,), f32)
            written = T.alloc_local((SHARE,), f32)
            four = T.alloc_local((4,), f32)
            m = T.alloc_local((AHEAD,), f32)
            thread = T.get_thread_binding()
            k = T.alloc_var("int32", init=thread % K)
            part = T.alloc_var("int32", init=thread // K)
            head = T.alloc_var("int32", init=T.truncmod(block, HV))
            row = T.alloc_var("int32", init=T.truncdiv(block, HV))
            length = T.alloc_var("int32", init=links[row, column.LENGTH])
            known = T.alloc_var("int32", init=0)  # whether `state` holds what is in front of this row's segment
            for step in T.serial(length):
                if corrects[row + step, head] == 0:
                    known = 0
                else:
                    for i in T.unroll(SHARE):
                        v = part * SHARE + i
                        written[i] = carried[row + step, head, group * COLUMNS + v, k]
                        if known == 0:
                            if step > 0:
                                state[v, k] = carried[row + step - 1, head, group * COLUMNS + v, k]
                            else:
                                if has_initial:
                                    state[v, k] = initial[links[row, column.LINK_CHAIN], head, group * COLUMNS + v, k]
                    for v in T.unroll(COLUMNS):
                        sums[v] = 0.0
                    T.sync_threads()
                    for turn in T.serial(RUN // AHEAD):
                        for e in T.unroll(AHEAD):
                            m[e] = correction[row + step, head, thread // K * RUN + turn * AHEAD + e, k]
                        for quad in T.unroll(AHEAD // 4):
                            for v in T.unroll(COLUMNS):
                                for e in T.vectorized(4):
                                    four[e] = state[v, thread // K * RUN + turn * AHEAD + quad * 4 + e]
                                for e in T.unroll(4):
                                    sums[v] = sums[v] + m[quad * 4 + e] * four[e]
                    for v in T.unroll(COLUMNS):
                        partial[part, v, k] = sums[v]
                    T.sync_threads()
                    for i in T.unroll(SHARE):
                        for p in T.unroll(PARTS):
                            written[i] = written[i] + partial[p, part * SHARE + i, k]
                        state[part * SHARE + i, k] = written[i]
                        carried[row + step, head, group * COLUMNS + part * SHARE + i, k] = written[i]
                    known = 1

    return affine_chain
