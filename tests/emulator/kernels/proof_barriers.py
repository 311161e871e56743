"""Warps that meet at named barriers, reductions across warps, shuffles."""

import tilelang.language as T

from flashqla_cp.kernels.spec import KernelSpec

HALF = 128


def build_exchange(spec: KernelSpec):
    """Two warpgroups hand tiles to each other through two named barriers: Y[i] = X[i] + X[i - 1], step by step."""
    D = spec.dim("D")
    rows = T.dynamic("rows")

    @T.prim_func
    def exchange(X: T.Tensor((rows, D), "float32"), Y: T.Tensor((rows, D), "float32")):
        with T.Kernel(1, threads=2 * HALF) as _:
            slots = T.alloc_shared((2, D), "float32")
            before = T.alloc_local((1,), "float32")
            thread = T.get_thread_binding()
            if thread < HALF:
                for i in T.serial(rows):
                    if i >= 2:
                        T.sync_threads(barrier_id=5 + i % 2, arrive_count=2 * HALF)
                    slots[i % 2, thread] = X[i, thread]
                    T.named_barrier_arrive(3 + i % 2, 2 * HALF)
            else:
                before[0] = 0.0
                for i in T.serial(rows):
                    T.sync_threads(barrier_id=3 + i % 2, arrive_count=2 * HALF)
                    Y[i, thread - HALF] = slots[i % 2, thread - HALF] + before[0]
                    before[0] = slots[i % 2, thread - HALF]
                    if i + 2 < rows:
                        T.named_barrier_arrive(5 + i % 2, 2 * HALF)

    return exchange


def build_row_reduce(spec: KernelSpec):
    """Softmax of rows that span all warps: shuffles and shared memory in one reduction."""
    D = spec.dim("D")
    rows = T.dynamic("rows")

    @T.prim_func
    def row_reduce(X: T.Tensor((rows, D), "float32"), Y: T.Tensor((rows, D), "float32")):
        with T.Kernel(rows, threads=128) as row:
            x = T.alloc_fragment((1, D), "float32")
            largest = T.alloc_fragment((1,), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.copy(X[row, 0], x)
            T.reduce_max(x, largest, dim=1)
            for i, j in T.Parallel(1, D):
                x[i, j] = T.exp2(x[i, j] - largest[i])
            T.reduce_sum(x, total, dim=1)
            for i, j in T.Parallel(1, D):
                x[i, j] = x[i, j] / total[i]
            T.copy(x, Y[row, 0])

    return row_reduce
