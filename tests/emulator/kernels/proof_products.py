"""Matrix products C = A B^T of one block tile: operands from shared memory, from registers or from tensor memory.

M N K: tile sizes. Each arch gets the instruction of its tensor cores; the pipelined one splits loads and products
between warps that meet at barriers.
"""

import tilelang.language as T

from flashqla_cp.kernels.spec import KernelSpec

K_TILE = 64


def build_product_ss(spec: KernelSpec):
    """Both operands from shared memory, loaded by TMA in two stages and double buffered."""
    return _product_sm100(spec) if spec.target.family == "sm100" else _product_sm90(spec)


def _product_sm90(spec: KernelSpec):
    M, N, K = spec.dim("M"), spec.dim("N"), spec.dim("K")

    @T.prim_func
    def product_ss(A: T.Tensor((M, K), "bfloat16"), B: T.Tensor((N, K), "bfloat16"), C: T.Tensor((M, N), "float32")):
        with T.Kernel(1, threads=128) as _:
            a = T.alloc_shared((M, K_TILE), "bfloat16")
            b = T.alloc_shared((N, K_TILE), "bfloat16")
            sums = T.alloc_fragment((M, N), "float32")
            T.clear(sums)
            for k in T.Pipelined(K // K_TILE, num_stages=2):
                T.copy(A[0, k * K_TILE], a)
                T.copy(B[0, k * K_TILE], b)
                T.gemm(a, b, sums, transpose_B=True)
            T.copy(sums, C)

    return product_ss


def _product_sm100(spec: KernelSpec):
    M, N, K = spec.dim("M"), spec.dim("N"), spec.dim("K")
    steps = K // K_TILE

    @T.prim_func
    def product_ss(A: T.Tensor((M, K), "bfloat16"), B: T.Tensor((N, K), "bfloat16"), C: T.Tensor((M, N), "float32")):
        with T.Kernel(1, threads=128) as _:
            a = T.alloc_shared((2, M, K_TILE), "bfloat16")
            b = T.alloc_shared((2, N, K_TILE), "bfloat16")
            sums = T.alloc_tmem((M, N), "float32")
            out = T.alloc_fragment((M, N), "float32")
            full = T.alloc_barrier([32] * 2)
            free = T.alloc_barrier([1] * 2)
            done = T.alloc_barrier([1])
            thread = T.get_thread_binding()
            if thread < 32:
                for k in T.serial(steps):
                    T.mbarrier_wait_parity(free[k % 2], ((k // 2) % 2) ^ 1)
                    T.tma_copy(A[0:M, k * K_TILE : (k + 1) * K_TILE], a[k % 2, :, :], barrier=full[k % 2])
                    T.tma_copy(B[0:N, k * K_TILE : (k + 1) * K_TILE], b[k % 2, :, :], barrier=full[k % 2])
                    T.mbarrier_arrive(full[k % 2])
            elif thread < 64:
                for k in T.serial(steps):
                    T.mbarrier_wait_parity(full[k % 2], (k // 2) % 2)
                    T.tcgen05_gemm(
                        a[k % 2, :, :], b[k % 2, :, :], sums, transpose_B=True, clear_accum=k == 0, mbar=free[k % 2]
                    )
                T.tcgen05_mma_arrive(done)
            T.mbarrier_wait_parity(done, 0)
            T.copy(sums, out)
            T.copy(out, C)
            # One warp frees the tensor memory at the end: it must know that the others have read theirs.
            T.tcgen05_before_thread_sync()
            T.sync_threads()

    return product_ss


def build_product_registers(spec: KernelSpec):
    """A from registers (sm_90a, wgmma), scaled there first."""
    M, N, K = spec.dim("M"), spec.dim("N"), spec.dim("K")

    @T.prim_func
    def product_registers(
        A: T.Tensor((M, K), "bfloat16"), B: T.Tensor((N, K), "bfloat16"), C: T.Tensor((M, N), "float32")
    ):
        with T.Kernel(1, threads=128) as _:
            a = T.alloc_shared((M, K), "bfloat16")
            b = T.alloc_shared((N, K), "bfloat16")
            scaled = T.alloc_fragment((M, K), "bfloat16")
            sums = T.alloc_fragment((M, N), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.copy(a, scaled)
            for i, j in T.Parallel(M, K):
                scaled[i, j] = scaled[i, j] * T.cast(2.0, "bfloat16")
            T.gemm(scaled, b, sums, transpose_B=True, clear_accum=True)
            T.copy(sums, C)

    return product_registers


def build_product_tmem(spec: KernelSpec):
    """A from tensor memory (sm_100a): C = bf16(A B^T) D, the intermediate never leaving tensor memory and registers."""
    M, N, K = spec.dim("M"), spec.dim("N"), spec.dim("K")

    @T.prim_func
    def product_tmem(
        A: T.Tensor((M, K), "bfloat16"),
        B: T.Tensor((N, K), "bfloat16"),
        D: T.Tensor((N, N), "bfloat16"),
        C: T.Tensor((M, N), "float32"),
    ):
        with T.Kernel(1, threads=128) as _:
            a = T.alloc_shared((M, K), "bfloat16")
            b = T.alloc_shared((N, K), "bfloat16")
            d = T.alloc_shared((N, N), "bfloat16")
            first = T.alloc_tmem((M, N), "float32")
            narrow = T.alloc_tmem((M, N), "bfloat16")
            second = T.alloc_tmem((M, N), "float32")
            wide = T.alloc_fragment((M, N), "float32")
            half = T.alloc_fragment((M, N), "bfloat16")
            done = T.alloc_barrier([1] * 2)
            T.copy(A, a)
            T.copy(B, b)
            T.copy(D, d)
            T.tcgen05_gemm(a, b, first, transpose_B=True, clear_accum=True, mbar=done[0])
            T.mbarrier_wait_parity(done[0], 0)
            T.copy(first, wide)
            T.copy(wide, half)
            T.copy(half, narrow)
            T.tcgen05_before_thread_sync()
            T.sync_threads()
            T.tcgen05_after_thread_sync()
            T.tcgen05_gemm(narrow, d, second, clear_accum=True, mbar=done[1])
            T.mbarrier_wait_parity(done[1], 0)
            T.copy(second, wide)
            T.copy(wide, C)
            T.tcgen05_before_thread_sync()
            T.sync_threads()

    return product_tmem


def build_warp_product(spec: KernelSpec):
    """mma.sync through ldmatrix, with A transposed in shared memory: C = A^T B^T with A [K, M]."""
    M, N, K = spec.dim("M"), spec.dim("N"), spec.dim("K")

    @T.prim_func
    def warp_product(A: T.Tensor((K, M), "bfloat16"), B: T.Tensor((N, K), "bfloat16"), C: T.Tensor((M, N), "float32")):
        with T.Kernel(1, threads=64) as _:
            a = T.alloc_shared((K, M), "bfloat16")
            b = T.alloc_shared((N, K), "bfloat16")
            sums = T.alloc_fragment((M, N), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, sums, transpose_A=True, transpose_B=True, clear_accum=True)
            T.copy(sums, C)

    return warp_product
