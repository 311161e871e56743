"""The way out of a block: tiles in shared memory that the copy engine stores.

A tile is filled by all threads of a group between two of their barriers: the first after tma_store_wait, when what it
held has left, the second after fence_proxy_async. Tiles are [columns / 64, rows, 64].
"""

import tilelang.language as T
from tilelang.layout import make_full_bank_swizzled_layout

from flashqla_cp.kernels.chunks import CHUNK

OUTLET_BARRIER = 2


def alloc_outlet(rows: int, columns: int, dtype: str):
    """A tile for [rows, columns]; annotate its layout with outlet_layout."""
    return T.alloc_shared((columns // 64, rows, 64), dtype)


def outlet_layouts(*tiles):
    """The layouts of tiles, for T.annotate_layout: without conflicts along rows and columns."""
    return {tile: make_full_bank_swizzled_layout(tile) for tile in tiles}


@T.macro
def open_outlets(threads):
    """What the tiles held has left."""
    T.tma_store_wait(0)
    T.sync_threads(barrier_id=OUTLET_BARRIER, arrive_count=threads)


@T.macro
def close_outlets(threads):
    """What the tiles hold may leave."""
    T.fence_proxy_async()
    T.sync_threads(barrier_id=OUTLET_BARRIER, arrive_count=threads)


@T.macro
def fill_rows(values, tile):
    """Token rows from values [V, CHUNK], transposed and rounded."""
    for a, b in T.Parallel(*values.shape):
        tile[a // 64, b, a % 64] = T.cast(values[a, b], tile.dtype)


@T.macro
def fill_state(state16, tile):
    """A state [V, K] as it is."""
    for a, b in T.Parallel(*state16.shape):
        tile[b // 64, a, b % 64] = state16[a, b]


@T.macro
def send_rows(tile, rows, start, end, head, thread, threads):
    """A tile of tokens to rows[start : end, head, :] of rows [T, HV, V], CHUNK of them at most."""
    width = tile.shape[0] * 64
    if start + CHUNK <= end:
        for half in T.unroll(width // 64):
            T.tma_copy(
                tile[half, 0:CHUNK, 0:64],
                rows[start : start + CHUNK, head, half * 64 : half * 64 + 64],
                leader_scope_threads=threads,
            )
    else:
        for step in T.unroll(CHUNK * width // (8 * threads)):
            place = T.alloc_var("int32", init=step * threads + thread)
            token = T.alloc_var("int32", init=place // (width // 8))
            if start + token < end:
                for e in T.vectorized(8):
                    rows[start + token, head, place % (width // 8) * 8 + e] = tile[
                        place % (width // 8) // 8, token, place % 8 * 8 + e
                    ]


@T.macro
def send_block(tile, blocks, chunk, place, threads):
    """A whole tile to blocks[chunk, place] of blocks [chunks, heads, rows, columns]."""
    for half in T.unroll(tile.shape[0]):
        T.tma_copy(
            tile[half, 0 : tile.shape[1], 0:64],
            blocks[chunk, place, 0 : tile.shape[1], half * 64 : half * 64 + 64],
            leader_scope_threads=threads,
        )
