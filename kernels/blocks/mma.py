"""Products of one block's tiles by the instructions that the architecture has."""

import tilelang.language as T

from flashqla_cp.kernels.arch import Arch


@T.macro
def multiply(arch: Arch, left, right, sums):
    """sums = left right^T, waited for, by the block's one warpgroup; once in a kernel.

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
        T.tcgen05_before_thread_sync()  # the next barrier is also what frees the accumulator waits for


def issue(left, right, sums, done, *, clear=True, left_t=False, right_t=True):
    """Start sums = left right^T by tcgen05, or add to `sums` without `clear`; `done`, if any, is told at its end.

    left [M, K], with left_t [K, M]: shared or tensor memory. right [N, K], without right_t [K, N]: shared memory.
    sums [M, N]: tensor memory.
    """
    return T.tcgen05_gemm(left, right, sums, transpose_A=left_t, transpose_B=right_t, clear_accum=clear, mbar=done)
