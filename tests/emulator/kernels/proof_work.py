"""The amount of work of one chunk of a forward pass: what the emulator's speed is measured on.

Six products of [64, D] by [D, D] for each chunk of 64 rows, each result rounded to bfloat16 and stored in shared memory
for the next, by four warpgroups.
"""

import tilelang.language as T

from flashqla_cp.kernels.spec import KernelSpec

CHUNK = 64
THREADS = 512


def build_chunk_work(spec: KernelSpec):
    """Y = X W^products, chunk by chunk, in bfloat16 between the products."""
    D, products = spec.dim("D"), spec.dim("products")
    rows = T.dynamic("rows")

    @T.prim_func
    def chunk_work(
        X: T.Tensor((rows, D), "bfloat16"),
        W: T.Tensor((D, D), "bfloat16"),
        Y: T.Tensor((rows, D), "bfloat16"),
    ):
        with T.Kernel(1, threads=THREADS) as _:
            x = T.alloc_shared((CHUNK, D), "bfloat16")
            w = T.alloc_shared((D, D), "bfloat16")
            sums = T.alloc_fragment((CHUNK, D), "float32")
            T.copy(W, w)
            for chunk in T.serial(T.ceildiv(rows, CHUNK)):
                T.copy(X[chunk * CHUNK, 0], x)
                for _product in T.serial(products):
                    T.gemm(x, w, sums, clear_accum=True)
                    T.copy(sums, x)
                T.copy(x, Y[chunk * CHUNK, 0])

    return chunk_work
