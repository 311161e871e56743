"""A fold of maps along chains in one launch: what an exchange does with ranks' maps. One text for all architectures.

    S_i = E_i + M_i S_{i-1}          with the flag "adjoint": M_i^T

The first map of a chain has no M; wanted states go to rows of `out`. In fp32. States, E and M are transposed, as
kernels hold them, and read where a message has them: as lines of K numbers, so many from a row, or a head, to the next.
A block has some columns of V of one head and walks one chain; M^T comes to shared memory by cp.async during the step
before.
Letters: K key dim, V rows of S^T, a multiple of COLUMNS; h heads.
"""

import tilelang.language as T

from flashqla_cp.kernels.blocks.affine_product import product, product_memory
from flashqla_cp.kernels.blocks.product_shares import COLUMNS, PARTS, THREADS, Shares
from flashqla_cp.kernels.spec import KernelSpec

SOURCE, CORRECTION, TARGET = range(3)  # columns of the links
LINK_COLUMNS = 3


def build_fold(spec: KernelSpec):
    """dims: head_dim (K). flags: adjoint."""
    K = spec.dim("head_dim")
    adjoint = spec.has("adjoint")
    shares = Shares(K)
    f32, i32 = "float32", "int32"
    boundaries, corrections, heads, outs, links, ends, V = (
        T.dynamic(n) for n in ("boundaries", "corrections", "heads", "outs", "links", "ends", "V")
    )

    @T.macro
    def fetch(correction, line, tile, slot):
        """Start to bring M^T, from a line on."""
        T.async_copy(correction[line : line + K, 0:K], tile[slot, 0:K, 0:K])

    @T.prim_func
    def fold(
        boundary: T.Tensor((boundaries, K), f32),
        correction: T.Tensor((corrections, K), f32),
        link: T.Tensor((links, LINK_COLUMNS), i32),
        first: T.Tensor((ends,), i32),
        out: T.Tensor((outs, heads, V, K), f32),
        boundary_row: T.int32,
        boundary_head: T.int32,
        correction_row: T.int32,
        correction_head: T.int32,
    ):
        with T.Kernel((ends - 1) * heads, T.truncdiv(V, COLUMNS), threads=THREADS) as (block, group):
            tile, state, partial = product_memory(K, 2)
            own = T.alloc_local((shares.finished,), f32)
            thread = T.get_thread_binding()
            head = T.alloc_var(i32, init=T.truncmod(block, heads))
            chain = T.alloc_var(i32, init=T.truncdiv(block, heads))
            begin = T.alloc_var(i32, init=first[chain])
            count = T.alloc_var(i32, init=first[chain + 1] - begin)
            for step in T.serial(count):
                line = T.alloc_var(i32, init=link[begin + step, SOURCE] * boundary_row + head * boundary_head)
                target = T.alloc_var(i32, init=link[begin + step, TARGET])
                for i in T.unroll(shares.finished):
                    own[i] = boundary[line + group * COLUMNS + (i * THREADS + thread) // K, thread % K]
                if step + 1 < count:
                    row = T.alloc_var(i32, init=link[begin + step + 1, CORRECTION])
                    fetch(correction, row * correction_row + head * correction_head, tile, (step + 1) % 2)
                if step > 0:
                    if step + 1 < count:
                        T.ptx_wait_group(1)
                    else:
                        T.ptx_wait_group(0)
                    product(tile, step % 2, state, partial, thread, shares, adjoint)
                for i in T.unroll(shares.finished):
                    v = (i * THREADS + thread) // K
                    if step > 0:
                        for p in T.unroll(PARTS):
                            own[i] = own[i] + partial[p, v, thread % K]
                    state[thread % K, v] = own[i]
                    if target >= 0:
                        out[target, head, group * COLUMNS + v, thread % K] = own[i]

    return fold
