"""Tiles of a chunk in shared memory."""

import tilelang.language as T

from flashqla_cp.kernels.chunks import CHUNK


@T.macro
def clear_tail(tile, slot, length, thread, threads, columns, dtype):
    """Zero the rows from `length` on of tile[slot] [CHUNK, columns]: they hold another document's tokens, or anything.

    The caller makes the stores visible to the tensor cores: fence_proxy_async, then a barrier.
    """
    for step in T.serial(CHUNK * columns // threads):
        row = (step * threads + thread) // columns
        if row >= length:
            tile[slot, row, (step * threads + thread) % columns] = T.cast(0.0, dtype)


@T.macro
def normalize_rows(tile, factor, slot, length, thread, threads):
    """Rows in front of `length` of tile[slot] [CHUNK, columns] times factor[slot] [CHUNK]; fences as for clear_tail.

    Which has the rows behind, so that no barrier is wanted between the two.
    """
    words = tile.shape[2] // 8
    part = T.alloc_local((8,), tile.dtype)
    for step in T.unroll(CHUNK * words // threads):
        row = T.alloc_var("int32", init=(step * threads + thread) // words)
        if row < length:
            for e in T.vectorized(8):
                part[e] = tile[slot, row, (step * threads + thread) % words * 8 + e]
            for e in T.unroll(8):
                part[e] = T.cast(T.cast(part[e], "float32") * factor[slot, row], tile.dtype)
            for e in T.vectorized(8):
                tile[slot, row, (step * threads + thread) % words * 8 + e] = part[e]


@T.macro
def scale_row(tile, row, exists, factor):
    """tile[row] of [rows, columns] times a factor, if it exists, by one thread; fences as for clear_tail."""
    part = T.alloc_local((8,), tile.dtype)
    if exists:
        for j in T.serial(tile.shape[1] // 8):
            for e in T.vectorized(8):
                part[e] = tile[row, j * 8 + e]
            for e in T.unroll(8):
                part[e] = T.cast(T.cast(part[e], "float32") * factor, tile.dtype)
            for e in T.vectorized(8):
                tile[row, j * 8 + e] = part[e]


@T.macro
def clear_rows(tile, offset, length, thread, threads):
    """Zero rows offset + length to offset + CHUNK of tile [rows, columns], by 8 elements; fences as for clear_tail."""
    words = tile.shape[1] // 8
    for step in T.serial(CHUNK * words // threads):
        row = (step * threads + thread) // words
        if row >= length:
            for e in T.vectorized(8):
                tile[offset + row, (step * threads + thread) % words * 8 + e] = T.cast(0.0, tile.dtype)
