"""Zeros in the rows behind the last chain: a padded tail has no output. One kernel text for all architectures.

The rows are known to the device only. Blocks take rows in turn; without a tail each ends at once.
"""

import tilelang.language as T

from flashqla_cp.kernels.spec import KernelSpec

THREADS, BLOCKS = 128, 256


def build_clear_rows(spec: KernelSpec):
    """dtypes: x. Rows of any width, a multiple of 8."""
    dtype = spec.dtype("x")
    tokens, width, chains = (T.dynamic(n) for n in ("tokens", "width", "chains"))

    @T.prim_func
    def clear_rows(end: T.Tensor((chains,), "int32"), x: T.Tensor((tokens, width), dtype)):
        with T.Kernel(BLOCKS, threads=THREADS) as block:
            thread = T.get_thread_binding()
            first = T.alloc_var("int32", init=T.max(end[chains - 1], 0))
            for step in T.serial(T.ceildiv(T.max(tokens - first, 0), BLOCKS)):
                row = T.alloc_var("int32", init=first + step * BLOCKS + block)
                if row < tokens:
                    for part in T.serial(T.ceildiv(width, THREADS)):
                        if part * THREADS + thread < width:
                            x[row, part * THREADS + thread] = T.cast(0.0, dtype)

    return clear_rows
