"""Copies that must not change a bit: TMA with tails under each swizzle, cp.async, stmatrix transposes.

T: run-time number of rows. D: columns.
"""

import tilelang.language as T
import tilelang.layout

from flashqla_cp.kernels.spec import KernelSpec

ROWS = 64
_SWIZZLES = {
    32: tilelang.layout.make_quarter_bank_swizzled_layout,
    64: tilelang.layout.make_half_bank_swizzled_layout,
    128: tilelang.layout.make_full_bank_swizzled_layout,
}


def build_tma_tail(spec: KernelSpec):
    """Rows by TMA to shared memory, negated, and back; the last tile partly outside. Dim "swizzle": span in bytes."""
    D, swizzle = spec.dim("D"), spec.dim("swizzle")
    rows = T.dynamic("rows")

    @T.prim_func
    def tma_tail(X: T.Tensor((rows, D), "bfloat16"), Y: T.Tensor((rows, D), "bfloat16")):
        with T.Kernel(T.ceildiv(rows, ROWS), threads=128) as block:
            tile = T.alloc_shared((ROWS, D), "bfloat16")
            loaded = T.alloc_barrier([128])
            if swizzle in _SWIZZLES:
                T.annotate_layout({tile: _SWIZZLES[swizzle](tile)})
            T.tma_copy(X[block * ROWS : (block + 1) * ROWS, 0:D], tile, barrier=loaded)
            T.mbarrier_arrive(loaded)
            T.mbarrier_wait_parity(loaded, 0)
            for i, j in T.Parallel(ROWS, D):
                tile[i, j] = tile[i, j] * T.cast(-1.0, "bfloat16")
            T.fence_proxy_async()
            T.sync_threads()
            T.copy(tile, Y[block * ROWS : (block + 1) * ROWS, 0:D])

    return tma_tail


def build_cp_async(spec: KernelSpec):
    """Column sums of [rows, D] through a cp.async ring of three stages; rows past the end count as zeros."""
    D, steps = spec.dim("D"), spec.dim("steps")
    rows = T.dynamic("rows")

    @T.prim_func
    def cp_async(X: T.Tensor((rows, D), "float32"), Y: T.Tensor((D,), "float32")):
        with T.Kernel(1, threads=128) as _:
            tile = T.alloc_shared((ROWS, D), "float32")
            total = T.alloc_fragment((D,), "float32")
            T.clear(total)
            for step in T.Pipelined(steps, num_stages=3):
                T.copy(X[step * ROWS, 0], tile)
                for j in T.Parallel(D):
                    for i in T.serial(ROWS):
                        total[j] += tile[i, j]
            T.copy(total, Y)

    return cp_async


def build_transpose(spec: KernelSpec):
    """Y = X^T of one square tile: fragments stored by stmatrix into a swizzled tile and read back across."""
    D = spec.dim("D")

    @T.prim_func
    def transpose(X: T.Tensor((D, D), "bfloat16"), Y: T.Tensor((D, D), "bfloat16")):
        with T.Kernel(1, threads=128) as _:
            x = T.alloc_shared((D, D), "bfloat16")
            unit = T.alloc_shared((D, D), "bfloat16")
            y = T.alloc_shared((D, D), "bfloat16")
            wide = T.alloc_fragment((D, D), "float32")
            half = T.alloc_fragment((D, D), "bfloat16")
            T.copy(X, x)
            for i, j in T.Parallel(D, D):
                unit[i, j] = T.if_then_else(i == j, T.cast(1.0, "bfloat16"), T.cast(0.0, "bfloat16"))
            T.gemm(x, unit, wide, transpose_A=True, clear_accum=True)
            T.copy(wide, half)
            T.copy(half, y)
            T.copy(y, Y)

    return transpose
