"""What a recurrence without queries wants of a chunk before its products, by CHUNK threads, a row each."""

import tilelang.language as T

from flashqla_cp.kernels.blocks.chunk_io import clear_tail, normalize_rows
from flashqla_cp.kernels.blocks.gates import normalizes_keys, spread_gate
from flashqla_cp.kernels.chunks import CHUNK


@T.macro
def prepare(gates, k_tile, v_tile, slot, length, row, l2norm, writes):
    """Factors of gates, norms of keys, and tails behind `length`, of values too if the chunk `writes`.

    gates: what alloc_gates gives. k_tile, v_tile [stages, CHUNK, columns], seen by tensor cores after a barrier.
    """
    gate, k_scale, grow, fade, keep = gates
    in_place = normalizes_keys(l2norm, k_tile.dtype)
    spread_gate(gate, k_scale, grow, fade, keep, slot, row, l2norm and not in_place)
    if in_place:
        normalize_rows(k_tile, k_scale, slot, length, row, CHUNK)
        T.fence_proxy_async()
    if length < CHUNK:
        clear_tail(k_tile, slot, length, row, CHUNK, k_tile.shape[2], k_tile.dtype)
        if writes:
            clear_tail(v_tile, slot, length, row, CHUNK, v_tile.shape[2], v_tile.dtype)
        T.fence_proxy_async()
