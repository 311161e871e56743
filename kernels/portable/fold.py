"""A fold of maps along chains in one launch: what an exchange does with ranks' maps. One text for all architectures.

    S_i = E_i + M_i S_{i-1}          with the flag "adjoint": M_i^T

The first map of a chain has no M; wanted states go to rows of `out`. To fp32 rounding. States, E and M are transposed,
as kernels hold them, and read where a message has them: as lines of K numbers, so many from a row, or a head, to the
next. A block has some columns of V of one head and walks one chain; M^T comes to registers during the step before, and
what links say a step earlier still.
Letters: K key dim, V rows of S^T, a multiple of COLUMNS; h heads.
"""

import tilelang.language as T

from flashqla_cp.kernels.blocks.affine_product import bring_all, place, product, product_memory, product_registers
from flashqla_cp.kernels.blocks.product_shares import VECTOR, fold_shares
from flashqla_cp.kernels.spec import KernelSpec

SOURCE, CORRECTION, TARGET = range(3)  # columns of the links
LINK_COLUMNS = 3


def build_fold(spec: KernelSpec):
    """dims: head_dim (K). flags: adjoint."""
    K = spec.dim("head_dim")
    adjoint = spec.has("adjoint")
    shares = fold_shares(K)
    COLUMNS = shares.columns
    f32, i32 = "float32", "int32"
    boundaries, corrections, heads, outs, links, ends, V = (
        T.dynamic(n) for n in ("boundaries", "corrections", "heads", "outs", "links", "ends", "V")
    )

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
        with T.Kernel((ends - 1) * heads, T.truncdiv(V, COLUMNS), threads=shares.threads) as (block, group):
            shared = product_memory(shares)
            m = product_registers(shares)
            own = T.alloc_local((shares.finished,), f32)
            product_of = T.alloc_local((shares.finished,), f32)
            thread = T.get_thread_binding()
            head = T.alloc_var(i32, init=T.truncmod(block, heads))
            chain = T.alloc_var(i32, init=T.truncdiv(block, heads))
            begin = T.alloc_var(i32, init=first[chain])
            count = T.alloc_var(i32, init=first[chain + 1] - begin)
            source = T.alloc_var(i32, init=0)
            target = T.alloc_var(i32, init=-1)
            follows = T.alloc_var(i32, init=0)  # row of the next step's correction
            if count > 0:
                source = link[begin, SOURCE]
                target = link[begin, TARGET]
            if count > 1:
                follows = link[begin + 1, CORRECTION]
            for step in T.serial(count):
                line = T.alloc_var(i32, init=source * boundary_row + head * boundary_head + group * COLUMNS)
                wanted = T.alloc_var(i32, init=target)
                for i in T.unroll(shares.finished // VECTOR):
                    for e in T.vectorized(VECTOR):
                        own[i * VECTOR + e] = boundary[line + shares.row(thread, i), shares.output(thread) + e]
                line_of_map = T.alloc_var(i32, init=follows * correction_row + head * correction_head)
                more = T.alloc_var(i32, init=0)
                if step + 1 < count:
                    more = 1
                    source = link[begin + step + 1, SOURCE]
                    target = link[begin + step + 1, TARGET]
                if step + 2 < count:
                    follows = link[begin + step + 2, CORRECTION]
                if step == 0:
                    if more == 1:
                        bring_all(m, correction, (line_of_map,), thread, shares, adjoint)
                else:
                    product(shared, m, product_of, thread, shares, adjoint, more, correction, (line_of_map,))
                    for i in T.unroll(shares.finished):
                        own[i] = own[i] + product_of[i]
                place(own, shared[0], thread, shares)
                if wanted >= 0:
                    for i in T.unroll(shares.finished // VECTOR):
                        for e in T.vectorized(VECTOR):
                            out[wanted, head, group * COLUMNS + shares.row(thread, i), shares.output(thread) + e] = own[
                                i * VECTOR + e
                            ]

    return fold
