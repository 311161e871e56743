"""A fold of maps along chains in one launch: what an exchange does with ranks' maps. One text for all architectures.

    S_i = E_i + M_i S_{i-1}          the first map of a chain has no M; wanted states go to rows of `out`

In fp32. A block has some columns of V of one head and walks one chain. A warp has a run of the inner dimension, a
thread a register tile of 8 rows of K; the warps' sums meet in shared memory.
Letters: K key dim, V value dim, h heads.
"""

import tilelang.language as T

from flashqla_cp.kernels.spec import KernelSpec

COLUMNS = 16  # of V in a block
THREADS, WARP = 256, 32
SOURCE, CORRECTION, TARGET = range(3)  # columns of the links
LINK_COLUMNS = 3


def build_fold(spec: KernelSpec):
    """dims: head_dim (K = V)."""
    K = V = spec.dim("head_dim")
    f32, i32 = "float32", "int32"
    PARTS = THREADS // WARP
    RUN = K // PARTS  # inner rows of a warp
    GROUPS = K // 8  # threads side by side along K
    WIDE = COLUMNS * GROUPS // WARP  # columns of a thread
    SHARE = COLUMNS * K // THREADS  # finished numbers of a thread
    rows, corrections, heads, outs, links, ends = (
        T.dynamic(n) for n in ("rows", "corrections", "heads", "outs", "links", "ends")
    )

    @T.prim_func
    def fold(
        boundary: T.Tensor((rows, heads, K, V), f32),
        correction: T.Tensor((corrections, heads, K, K), f32),
        link: T.Tensor((links, LINK_COLUMNS), i32),
        first: T.Tensor((ends,), i32),
        out: T.Tensor((outs, heads, K, V), f32),
    ):
        with T.Kernel((ends - 1) * heads, V // COLUMNS, threads=THREADS) as (block, group):
            state = T.alloc_shared((K, COLUMNS + 4), f32)
            partial = T.alloc_shared((PARTS, K, COLUMNS), f32)
            sums = T.alloc_local((8 * WIDE,), f32)
            m = T.alloc_local((8 * 4,), f32)
            s = T.alloc_local((WIDE,), f32)
            thread = T.get_thread_binding()
            head = T.alloc_var(i32, init=T.truncmod(block, heads))
            chain = T.alloc_var(i32, init=T.truncdiv(block, heads))
            begin = T.alloc_var(i32, init=first[chain])
            for step in T.serial(first[chain + 1] - begin):
                source = T.alloc_var(i32, init=link[begin + step, SOURCE])
                target = T.alloc_var(i32, init=link[begin + step, TARGET])
                if step > 0:
                    row = T.alloc_var(i32, init=link[begin + step, CORRECTION])
                    T.sync_threads()
                    for i in T.unroll(8 * WIDE):
                        sums[i] = 0.0
                    for quad in T.unroll(RUN // 4):
                        for r in T.unroll(8):
                            for e in T.vectorized(4):
                                m[r * 4 + e] = correction[
                                    row, head, r * GROUPS + thread % GROUPS, thread // WARP * RUN + quad * 4 + e
                                ]
                        for j in T.unroll(4):
                            for part in T.unroll(WIDE // 4):
                                for e in T.vectorized(4):
                                    s[part * 4 + e] = state[
                                        thread // WARP * RUN + quad * 4 + j,
                                        thread % WARP // GROUPS * WIDE + part * 4 + e,
                                    ]
                            for r in T.unroll(8):
                                for e in T.unroll(WIDE):
                                    sums[r * WIDE + e] = sums[r * WIDE + e] + m[r * 4 + j] * s[e]
                    for r in T.unroll(8):
                        for part in T.unroll(WIDE // 4):
                            for e in T.vectorized(4):
                                partial[
                                    thread // WARP,
                                    r * GROUPS + thread % GROUPS,
                                    thread % WARP // GROUPS * WIDE + part * 4 + e,
                                ] = sums[r * WIDE + part * 4 + e]
                T.sync_threads()
                for i in T.unroll(SHARE):
                    k = (i * THREADS + thread) // COLUMNS
                    v = thread % COLUMNS
                    total = T.alloc_var(f32, init=boundary[source, head, k, group * COLUMNS + v])
                    if step > 0:
                        for p in T.unroll(PARTS):
                            total = total + partial[p, k, v]
                    state[k, v] = total
                    if target >= 0:
                        out[target, head, k, group * COLUMNS + v] = total

    return fold
