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
