"""From the gradient of the log gate to those of what it was made from, one kernel text for all architectures.

    g given:    da = dg                             0 where g was held at GATE_FLOOR
    g made      x = a + dt_bias,  g = -exp(A_log) softplus(x)
    inside:     da = -dg exp(A_log) sigmoid(x)      dA_log = sum of dg g      ddt_bias = sum of da

Tokens of no document have dg = 0, and get 0 whatever `a` holds there. Sums are over tokens: a block sums its run of
them in a fixed order, `sums` [blocks, 2, HV] holds dA_log's and ddt_bias's shares, which the host adds.
Letters: T tokens, HV value heads.
"""

import tilelang.language as T

from flashqla_cp.kernels.blocks.gates import GATE_FLOOR
from flashqla_cp.kernels.spec import KernelSpec
from flashqla_cp.kernels.tuning import GATE_GRAD_TOKENS as TOKENS

HEADS = 32  # of a block: a warp reads one token of all of them
WARPS = 8


def build_gate_grad(spec: KernelSpec):
    """dtypes: g. flags: gate (A_log and dt_bias inside)."""
    inside, f32, dtype = spec.has("gate"), "float32", spec.dtype("g")
    tokens, blocks, HV, gt, gh, parameters = (
        T.dynamic(n) for n in ("tokens", "blocks", "HV", "g_token", "g_head", "parameters")
    )

    @T.prim_func
    def gate_grad(
        g: T.StridedTensor((tokens, HV), (gt, gh), dtype),
        dg: T.Tensor((tokens, HV), f32),
        A_log: T.Tensor((parameters,), f32),
        dt_bias: T.Tensor((parameters,), f32),
        da: T.Tensor((tokens, HV), dtype),
        sums: T.Tensor((blocks, 2, HV), f32),
    ):
        with T.Kernel(T.ceildiv(tokens, TOKENS), T.ceildiv(HV, HEADS), threads=HEADS * WARPS) as (block, group):
            share = T.alloc_shared((2, WARPS, HEADS), f32)
            thread = T.get_thread_binding()
            lane = T.alloc_var("int32", init=thread % HEADS)
            warp = T.alloc_var("int32", init=thread // HEADS)
            head = T.alloc_var("int32", init=group * HEADS + lane)
            rate = T.alloc_var(f32, init=0.0)
            shift = T.alloc_var(f32, init=0.0)
            by_rate = T.alloc_var(f32, init=0.0)
            by_shift = T.alloc_var(f32, init=0.0)
            if inside and head < HV:
                rate = T.exp(A_log[head])
                shift = dt_bias[head]
            for step in T.serial(TOKENS // WARPS):
                token = T.alloc_var("int32", init=block * TOKENS + step * WARPS + warp)
                if token < tokens and head < HV:
                    grad = T.alloc_var(f32, init=dg[token, head])
                    if grad != 0.0:
                        gate = T.alloc_var(f32, init=T.cast(g[token, head], f32))
                        slope = T.alloc_var(f32, init=1.0)
                        if inside:
                            x = T.alloc_var(f32, init=gate + shift)
                            gate = 0.0 - rate * (T.max(x, 0.0) + T.log1p(T.exp(0.0 - T.abs(x))))
                            # sigmoid(x) without overflow
                            slope = 0.0 - rate * (T.exp(T.min(x, 0.0)) / (1.0 + T.exp(0.0 - T.abs(x))))
                        if gate < GATE_FLOOR:
                            grad = 0.0
                        else:
                            by_rate = by_rate + grad * gate
                            grad = grad * slope
                            by_shift = by_shift + grad
                    da[token, head] = T.cast(grad, dtype)
            if inside:
                share[0, warp, lane] = by_rate
                share[1, warp, lane] = by_shift
                T.sync_threads()
                if thread < 2 * HEADS and group * HEADS + thread % HEADS < HV:
                    total = T.alloc_var(f32, init=0.0)
                    for part in T.unroll(WARPS):
                        total = total + share[thread // HEADS, part, thread % HEADS]
                    sums[block, thread // HEADS, group * HEADS + thread % HEADS] = total

    return gate_grad
