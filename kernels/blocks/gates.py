"""What the log gate contributes to a chunk.

G is the cumulative log gate of a chunk, Gc its last value. Exponents are never positive.
"""

import tilelang.language as T

from flashqla_cp.kernels.chunks import CHUNK

LOG2E = 1.4426950408889634
GATE_FLOOR = -128.0  # exp of it is 0 in fp32
# Write strengths are at least this much: backward divides by them, and a weaker write is lost in rounding.
LEAST_STRENGTH = {"bfloat16": 2.0**-40, "float16": 2.0**-13}


def normalizes_keys(l2norm: bool, dtype: str) -> bool:
    """Whether keys are brought to length 1 in their tile, at the cost of a pass over it.

    Else 1 / |k| is a factor of what is read and written by them, which may then leave the range of fp16.
    """
    return l2norm and dtype == "float16"


@T.macro
def spread_gate(gate, k_scale, grow, fade, keep, slot, row, folds):
    """Factors of row `row` < CHUNK of a chunk: what states lose before it, values behind it, and states in all.

    gate, k_scale [stages, CHUNK]: G to base 2; 1 / |k|, read if it `folds` (else 1 below). They give
    grow = -exp(G) / |k|, fade = exp(Gc - G) / |k| of that row and, from the last one, keep = exp(Gc).
    """
    key = T.alloc_var("float32", init=1.0)
    if folds:
        key = k_scale[slot, row]
    grown = T.alloc_var("float32", init=T.exp2(gate[slot, row]))
    grow[slot, row] = 0.0 - grown * key
    fade[slot, row] = T.exp2(gate[slot, CHUNK - 1] - gate[slot, row]) * key
    if row == CHUNK - 1:
        keep[slot] = grown


@T.macro
def remembered(bound, head, chunk, way, count, threshold):
    """(n, b): n chunks of a run of `count`, numbered chunk, chunk + way, .., make b, the sum of bound [HV, chunks] over
    them, at most `threshold`, which all of them may not. Groups of 8 need not stop at the first that does."""
    taken = T.alloc_var("int32", init=0)
    left = T.alloc_var("float32", init=0.0)
    ahead = T.alloc_var("float32", init=0.0)
    while taken + 8 <= count and ahead > threshold:  # whose loads do not wait for one another
        ahead = left
        for i in T.unroll(8):
            ahead = ahead + bound[head, chunk + way * (taken + i)]
        if ahead > threshold:
            taken = taken + 8
            left = ahead
    while taken < count and left > threshold:
        left = left + bound[head, chunk + way * taken]
        taken = taken + 1
    return taken, left


def alloc_gates(stages: int):
    """gate, k_scale, grow, fade [stages, CHUNK] and keep [stages], as spread_gate wants them."""
    vectors = [T.alloc_shared((stages, CHUNK), "float32") for _ in range(4)]
    return *vectors, T.alloc_shared((stages,), "float32")
