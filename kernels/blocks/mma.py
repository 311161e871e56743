"""Products of one block's tiles by whichever instruction the architecture has: issue, wait, sums in registers."""

import tilelang.language as T

from flashqla_cp.kernels.arch import Arch


@T.macro
def multiply(arch: Arch, left, right, sums):
    """sums = left right^T, all of the block's warps (a warpgroup) together; once in a kernel.

    left [M, K], right [N, K]: shared memory that the tensor cores may read. sums [M, N]: a fragment, of any layout.
    """
    if arch.mma == "wgmma":
        T.wgmma_gemm(left, right, sums, transpose_B=True, clear_accum=True)
        T.wait_wgmma(0)
    else:
        accumulator = T.alloc_tmem(sums.shape, sums.dtype)
        done = T.alloc_barrier([1])
        T.tcgen05_gemm(left, right, accumulator, transpose_B=True, clear_accum=True, mbar=done)
        T.mbarrier_wait_parity(done, 0)
        T.tcgen05_after_thread_sync()
        T.copy(accumulator, sums)
