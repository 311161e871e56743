"""What leaves the registers of a warpgroup that owns 64 rows of V, by TMA. Warpgroups share nothing here.

`pending`: copies that the same threads started after the one that last used the tile, and that may still run.
"""

import tilelang.language as T
from tilelang.layout import Fragment

from flashqla_cp.kernels.chunks import CHUNK as C

FIRST_BARRIER = 2  # of the named barriers, one per warpgroup and kind of tile


def transposed_accumulator(V: int) -> Fragment:
    """Layout of an accumulator [V, C] seen as [V / 64, C, 64], which stmatrix stores transposed."""

    def place(group, token, column):
        thread = group * 128 + column // 16 * 32 + column % 8 * 4 + token % 8 // 2
        return thread, token // 8 * 4 + column % 16 // 8 * 2 + token % 2

    return Fragment([V // 64, C, 64], forward_fn=place)


def accumulator_panels(V: int, K: int) -> Fragment:
    """Layout of an accumulator [V, K] seen as panels [K / 64, V / 64, 64, 64], which stmatrix stores."""

    def place(panel, group, row, column):
        thread = group * 128 + row // 16 * 32 + row % 8 * 4 + column % 8 // 2
        return thread, panel * 32 + column // 8 * 4 + row % 16 // 8 * 2 + column % 2

    return Fragment([K // 64, V // 64, 64, 64], forward_fn=place)


@T.macro
def store_panels(panels16, tile, out, chunk, place, group, K, pending):
    """out[chunk, place] = a state [V, K]. panels16, tile [K / 64, V / 64, 64, 64]: fragment, shared memory."""
    T.tma_store_wait(pending)
    T.sync_threads(barrier_id=FIRST_BARRIER + group % 2, arrive_count=128)
    T.copy(panels16, tile)
    T.fence_proxy_async()
    T.sync_threads(barrier_id=FIRST_BARRIER + group % 2, arrive_count=128)
    for panel in T.unroll(K // 64):
        T.tma_copy(
            tile[panel, group, 0:64, 0:64],
            out[chunk, place, group * 64 : group * 64 + 64, panel * 64 : panel * 64 + 64],
            leader_scope_threads=128,
        )


@T.macro
def store_transposed(values16, tile, out, chunk, place, group, pending):
    """out[chunk, place] = the transpose of values [V, C], in full. tile [V / 64, C, 64]: shared memory."""
    T.tma_store_wait(pending)
    T.sync_threads(barrier_id=FIRST_BARRIER + group % 2, arrive_count=128)
    T.copy(values16, tile)
    T.fence_proxy_async()
    T.sync_threads(barrier_id=FIRST_BARRIER + group % 2, arrive_count=128)
    T.tma_copy(tile[group, 0:C, 0:64], out[chunk, place, 0:C, group * 64 : group * 64 + 64], leader_scope_threads=128)


@T.macro
def store_tokens(values16, tile, out, start, end, head, group, thread, pending):
    """out[start.., head] = the transpose of values [V, C], up to token `end`. tile [.., V / 64, C, 64]: shared memory,
    its first part.

    A chunk that is short starts no copy; all earlier ones are then waited for, so that counts of pending ones hold.
    """
    T.tma_store_wait(pending)
    T.sync_threads(barrier_id=FIRST_BARRIER + group % 2, arrive_count=128)
    T.copy(values16, tile[0, :, :, :])
    T.fence_proxy_async()
    T.sync_threads(barrier_id=FIRST_BARRIER + group % 2, arrive_count=128)
    if start + C <= end:
        T.tma_copy(
            tile[0, group, 0:C, 0:64],
            out[start : start + C, head, group * 64 : group * 64 + 64],
            leader_scope_threads=128,
        )
    else:
        T.tma_store_wait(0)
        for step in T.unroll(C * 64 // (8 * 128)):
            token = T.alloc_var("int32", init=step * 16 + thread % 128 // 8)
            if start + token < end:
                for e in T.vectorized(8):
                    out[start + token, head, group * 64 + thread % 8 * 8 + e] = tile[
                        0, group, token, thread % 8 * 8 + e
                    ]
