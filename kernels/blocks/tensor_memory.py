"""Hand-over between the warps of a tcgen05 schedule: what lies in tensor memory, and who may touch it when.

Fences go with the barriers: one before a thread arrives for what it wrote or read, one after a thread has waited.
"""

import tilelang.language as T


@T.macro
def give(barriers, index, shared):
    """Arrive: this thread has read its sums and written its operands. shared: these are in shared memory."""
    if shared:
        T.fence_proxy_async()
    T.tcgen05_before_thread_sync()
    T.mbarrier_arrive(barriers[index])


@T.macro
def take(barriers, index, phase):
    """Wait for what others gave, or for products."""
    T.mbarrier_wait_parity(barriers[index], phase)
    T.tcgen05_after_thread_sync()


@T.macro
def hand_over(state, state16, operand, sums, keep, barriers, index, shared):
    """The state, rounded, becomes the next left operand; what the chunk keeps of it, the sum that its update adds to.

    Gives after the first: the second is not needed before this thread gives again. state, state16 [V, K]: fragments;
    `state` is scaled. operand [V, K]: tensor or shared memory. sums [V, K]: fp32.
    """
    T.copy(state, state16)
    T.copy(state16, operand)
    give(barriers, index, shared)
    for a, b in T.Parallel(*state.shape):
        state[a, b] = state[a, b] * keep
    T.copy(state, sums)


def operand_allocator(rows: int):
    """Where left operands of products of `rows` rows go: from tensor memory the instruction takes full rows only."""
    return T.alloc_tmem if rows == 128 else T.alloc_shared


def alloc_recurrence(V: int, K: int, chunk: int, sums: int, dtype: str):
    """Tensor memory of a recurrence: the state's sum [V, K], `sums` sums [V, chunk], and left operands: (all), (all).

    The operands are a state's and two of a chunk. Sizes fall, as the allocator of tensor memory wants.
    """
    alloc = operand_allocator(V)
    summed = [T.alloc_tmem((V, width), "float32") for width in (K, *[chunk] * sums)]
    return summed, [alloc((V, width), dtype) for width in (K, chunk, chunk)]
