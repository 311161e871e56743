"""Chunk and segment tables from the chains' ends, made on the device: no host work per document, nothing kept.

A chain is a run of tokens that starts from one state: a document, or a rank's fragment of one. It has ceil(length / C)
chunks, which ceil(chunks / most) segments share evenly. Every segment that something follows owns a row of the carried
states: what its map makes of the state in front of it is the state in front of the next one. With the flag "exchange"
the last segment of a chain that `emits` owns one too. Gradients are carried the other way, over the same rows; with the
flag they have rows of their own, one more in front of a chain that `receives`. One block; its threads scan the chains,
then fill the tables by bisection. Rows past the end become ghosts. Ends past `tokens` are cut there, so that no offsets
can lead a kernel out of its tensors.
"""

import tilelang.language as T

from flashqla_cp.kernels.blocks import segments as column
from flashqla_cp.kernels.chunks import CHUNK as C
from flashqla_cp.kernels.spec import KernelSpec

THREADS = 512
LEVELS = 9  # log2 of THREADS
CHUNKS, SEGMENTS, STATES, GRADIENTS = range(4)  # what is counted of a chain; the last two are carried rows


def build_tables(spec: KernelSpec):
    """flags: exchange."""
    exchange, i32 = spec.has("exchange"), "int32"
    COUNTS = 4 if exchange else 3
    chains, exchanging, bases, chunks, segments, rows = (
        T.dynamic(n) for n in ("chains", "exchanging", "bases", "chunks", "segments", "rows")
    )

    @T.macro
    def find(base, which, wanted):
        """The last chain whose first number of a kind is at most `wanted`."""
        low = T.alloc_var(i32, init=0)
        high = T.alloc_var(i32, init=chains)
        while high - low > 1:
            middle = T.alloc_var(i32, init=(low + high) // 2)
            if base[which, middle] <= wanted:
                low = middle
            else:
                high = middle
        return low

    @T.prim_func
    def tables(
        start: T.Tensor((chains,), i32),
        end: T.Tensor((chains,), i32),
        emits: T.Tensor((exchanging,), i32),
        receives: T.Tensor((exchanging,), i32),
        base: T.Tensor((COUNTS, bases), i32),
        chunk_table: T.Tensor((chunks, column.CHUNK_COLUMNS), i32),
        segment_table: T.Tensor((segments, column.COLUMNS), i32),
        links: T.Tensor((rows, column.LINK_COLUMNS), i32),
        back_links: T.Tensor((rows, column.LINK_COLUMNS), i32),
        tokens: T.int32,
        most: T.int32,
    ):
        with T.Kernel(1, threads=THREADS) as _:
            sums = T.alloc_shared((2, COUNTS, THREADS), i32)
            carry = T.alloc_shared((COUNTS,), i32)
            thread = T.get_thread_binding()
            if thread < COUNTS:
                carry[thread] = 0
                base[thread, 0] = 0
            for group in T.serial(T.ceildiv(chains, THREADS)):
                chain = T.alloc_var(i32, init=group * THREADS + thread)
                own_chunks = T.alloc_var(i32, init=0)
                own_segments = T.alloc_var(i32, init=0)
                own_rows = T.alloc_var(i32, init=0)
                own_gradients = T.alloc_var(i32, init=0)
                if chain < chains:
                    own_chunks = T.truncdiv(T.max(T.min(end[chain], tokens) - T.max(start[chain], 0), 0) + (C - 1), C)
                    own_segments = T.truncdiv(own_chunks + most - 1, most)
                    own_rows = T.max(own_segments - 1, 0)
                    if exchange and own_segments > 0:
                        own_gradients = own_rows
                        if emits[chain] != 0:
                            own_rows = own_rows + 1
                        if receives[chain] != 0:
                            own_gradients = own_gradients + 1
                sums[0, CHUNKS, thread] = own_chunks
                sums[0, SEGMENTS, thread] = own_segments
                sums[0, STATES, thread] = own_rows
                if exchange:
                    sums[0, GRADIENTS, thread] = own_gradients
                T.sync_threads()
                for level in T.unroll(LEVELS):
                    for which in T.unroll(COUNTS):
                        before = T.alloc_var(i32, init=sums[level % 2, which, thread])
                        if thread >= (1 << level):
                            before = before + sums[level % 2, which, thread - (1 << level)]
                        sums[(level + 1) % 2, which, thread] = before
                    T.sync_threads()
                if chain < chains:
                    for which in T.unroll(COUNTS):
                        base[which, chain + 1] = carry[which] + sums[LEVELS % 2, which, thread]
                T.sync_threads()
                if thread < COUNTS:
                    carry[thread] = carry[thread] + sums[LEVELS % 2, thread, THREADS - 1]
                T.sync_threads()
            for step in T.serial(T.ceildiv(chunks, THREADS)):
                chunk = T.alloc_var(i32, init=step * THREADS + thread)
                if chunk < chunks:
                    token = T.alloc_var(i32, init=0)
                    length = T.alloc_var(i32, init=0)
                    begun = T.alloc_var(i32, init=-1)
                    if chunk < carry[CHUNKS]:
                        chain = find(base, CHUNKS, chunk)
                        if chunk == base[CHUNKS, chain]:
                            begun = chain
                        token = T.max(start[chain], 0) + (chunk - base[CHUNKS, chain]) * C
                        length = T.min(T.min(end[chain], tokens) - token, C)
                    chunk_table[chunk, 0] = token
                    chunk_table[chunk, 1] = length
                    chunk_table[chunk, 2] = begun
            for step in T.serial(T.ceildiv(rows, THREADS)):
                if step * THREADS + thread < rows:
                    links[step * THREADS + thread, column.LENGTH] = 0
                    links[step * THREADS + thread, column.LINK_CHAIN] = -1
                    if exchange:
                        back_links[step * THREADS + thread, column.LENGTH] = 0
            T.sync_threads()
            for step in T.serial(T.ceildiv(segments, THREADS)):
                segment = T.alloc_var(i32, init=step * THREADS + thread)
                if segment < segments:
                    for i in T.unroll(column.COLUMNS):
                        segment_table[segment, i] = 0
                    segment_table[segment, column.ENTRY] = -1
                    segment_table[segment, column.EXIT] = -1
                    segment_table[segment, column.GRAD_ENTRY] = -1
                    segment_table[segment, column.GRAD_EXIT] = -1
                    if segment < carry[SEGMENTS]:
                        chain = find(base, SEGMENTS, segment)
                        place = T.alloc_var(i32, init=segment - base[SEGMENTS, chain])
                        parts = T.alloc_var(i32, init=base[SEGMENTS, chain + 1] - base[SEGMENTS, chain])
                        length = T.alloc_var(i32, init=base[CHUNKS, chain + 1] - base[CHUNKS, chain])
                        row = T.alloc_var(i32, init=base[STATES, chain] + place)
                        back = T.alloc_var(i32, init=row)  # of the gradient behind the segment
                        if exchange:
                            back = base[GRADIENTS, chain] + place
                            if receives[chain] != 0:
                                back = back + 1
                        # Even shares: the first `length % parts` segments have one chunk more.
                        share = T.alloc_var(i32, init=T.truncdiv(length, parts))
                        first = T.alloc_var(i32, init=place * share + T.min(place, length - share * parts))
                        if place < length - share * parts:
                            share = share + 1
                        segment_table[segment, column.START] = T.max(start[chain], 0) + first * C
                        segment_table[segment, column.END] = T.min(
                            T.min(end[chain], tokens), T.max(start[chain], 0) + (first + share) * C
                        )
                        segment_table[segment, column.CHUNK] = base[CHUNKS, chain] + first
                        segment_table[segment, column.CHAIN] = chain
                        if place > 0:
                            segment_table[segment, column.ENTRY] = row - 1
                        if row < base[STATES, chain + 1]:
                            segment_table[segment, column.EXIT] = row
                            links[row, column.LINK_CHAIN] = chain
                            if place == 0:
                                links[row, column.LENGTH] = base[STATES, chain + 1] - row
                                links[row, column.LINK_CORRECTION] = row + 1
                        if place < parts - 1:
                            segment_table[segment, column.GRAD_ENTRY] = back
                        else:
                            segment_table[segment, column.LAST] = 1
                        if exchange:
                            if back > base[GRADIENTS, chain]:
                                segment_table[segment, column.GRAD_EXIT] = back - 1
                            if place == 0 and base[GRADIENTS, chain + 1] > base[GRADIENTS, chain]:
                                begin = T.alloc_var(i32, init=base[GRADIENTS, chain])
                                back_links[begin, column.LENGTH] = base[GRADIENTS, chain + 1] - begin
                                back_links[begin, column.LINK_CHAIN] = chain
                                # Without a row in front, the first one lies behind the first segment.
                                back_links[begin, column.LINK_CORRECTION] = row + 1 - (back - begin)
                        elif place > 0:
                            segment_table[segment, column.GRAD_EXIT] = back - 1

    return tables
