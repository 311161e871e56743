"""Cumulative log gate of every chunk, one kernel text for all architectures.

    G_t = sum of g from the chunk's first token to t           decay [chunks, HV, C], in units of log 2

Tokens past the chunk's length take the last token's sum: they neither grow nor fade anything.

With the flag "gate" the input is a and g = -exp(A_log) softplus(a + dt_bias). g is held above GATE_FLOOR, where exp is
0 in fp32, so that a full reset, -inf, leaves no inf - inf behind. Letters: T tokens,
HV value heads, C chunk.
"""

import tilelang.language as T

from flashqla_cp.kernels.blocks.gates import GATE_FLOOR, LOG2E
from flashqla_cp.kernels.blocks.segments import CHUNK_COLUMNS
from flashqla_cp.kernels.chunks import CHUNK as C
from flashqla_cp.kernels.spec import KernelSpec

HEADS = 32  # of a block: a warp reads one token of all of them
PARTS = 4  # warps, each with a run of tokens


def build_gate_cumsum(spec: KernelSpec):
    """dtypes: g. flags: gate (A_log and dt_bias inside)."""
    inside, f32, RUN = spec.has("gate"), "float32", C // PARTS
    tokens, chunks, HV, gt, gh, parameters = (
        T.dynamic(n) for n in ("tokens", "chunks", "HV", "g_token", "g_head", "parameters")
    )

    @T.prim_func
    def gate_cumsum(
        g: T.StridedTensor((tokens, HV), (gt, gh), spec.dtype("g")),
        chunk_table: T.Tensor((chunks, CHUNK_COLUMNS), "int32"),
        A_log: T.Tensor((parameters,), f32),
        dt_bias: T.Tensor((parameters,), f32),
        decay: T.Tensor((chunks, HV, C), f32),
    ):
        with T.Kernel(chunks, T.ceildiv(HV, HEADS), threads=HEADS * PARTS) as (chunk, group):
            tile = T.alloc_shared((C, HEADS + 1), f32)
            total = T.alloc_shared((PARTS, HEADS), f32)
            thread = T.get_thread_binding()
            start = T.alloc_var("int32", init=chunk_table[chunk, 0])
            length = T.alloc_var("int32", init=chunk_table[chunk, 1])
            head = T.alloc_var("int32", init=group * HEADS + thread % HEADS)
            part = T.alloc_var("int32", init=thread // HEADS)
            rate = T.alloc_var(f32, init=0.0)
            shift = T.alloc_var(f32, init=0.0)
            if inside and head < HV:
                rate = T.exp(A_log[head])
                shift = dt_bias[head]
            gates = T.alloc_local((RUN,), f32)
            for i in T.unroll(RUN):
                gates[i] = 0.0
                if head < HV and part * RUN + i < length:
                    gates[i] = T.cast(g[start + part * RUN + i, head], f32)
            running = T.alloc_var(f32, init=0.0)
            for i in T.unroll(RUN):
                if part * RUN + i < length:
                    if inside:
                        # softplus without overflow: max(x, 0) + log(1 + exp(-|x|))
                        x = T.alloc_var(f32, init=gates[i] + shift)
                        gates[i] = 0.0 - rate * (T.max(x, 0.0) + T.log1p(T.exp(0.0 - T.abs(x))))
                    # NaN stays.
                    running = running + T.if_then_else(gates[i] < GATE_FLOOR, GATE_FLOOR, gates[i])
                tile[part * RUN + i, thread % HEADS] = running
            total[part, thread % HEADS] = running
            T.sync_threads()
            for step in T.serial(HEADS * C // (HEADS * PARTS)):
                h = T.alloc_var("int32", init=(step * HEADS * PARTS + thread) // C)
                t = T.alloc_var("int32", init=thread % C)
                if group * HEADS + h < HV:
                    before = T.alloc_var(f32, init=tile[t, h])
                    for p in T.unroll(PARTS - 1):
                        if p < t // RUN:
                            before = before + total[p, h]
                    decay[chunk, group * HEADS + h, t] = before * LOG2E

    return gate_cumsum
