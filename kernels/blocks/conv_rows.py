"""Rows that the causal convolution reads: of a thread's channels, a token and the W-1 in front of it.

places [T] is the table of conv_places.py. sources [fragments * (W-1)]: where the rows in front of each fragment stand,
nearest last: a row of x, T + i for row i of `arrived`, or -1 in front of the document; only with the flag "exchange",
else every fragment begins its document. `front` below is (exchange, sources, arrived).

Letters: W taps, D channels, VEC channels of a thread (their bytes are one load).
"""

import tilelang.language as T

from flashqla_cp.kernels.blocks.conv_places import NOWHERE, PLACE_BITS, PLACES
from flashqla_cp.kernels.blocks.gates import LOG2E

LANES = 32  # threads side by side along D


def position_of(place):
    """min(position in the fragment, W-1), or PLACES - 1 of NOWHERE."""
    return T.bitwise_and(place, PLACES - 1)


def fronts_of(place, W):
    """The first of the fragment's sources."""
    return T.shift_right(place, PLACE_BITS) * (W - 1)


@T.macro
def load_row(x, token, group, read, slot):
    """read[slot] = the thread's channels of a token, in x's dtype. x [tokens, D / VEC, VEC]."""
    for i in T.vectorized(read.shape[1]):
        read[slot, i] = x[token, group, i]


@T.macro
def load_ahead(rows, places, token, group, place):
    """place[r] and, for each (x, read) of `rows`, read[r] of the tokens from `token` on; past the last only NOWHERE."""
    ahead, tokens = place.shape[0], places.shape[0]
    if token + ahead <= tokens:
        for r in T.unroll(ahead):
            place[r] = places[token + r]
            for pair in rows:  # taken apart here, `x` and `read` would become the buffers' names in the code
                load_row(pair[0], token + r, group, pair[1], r)
    else:
        for r in T.unroll(ahead):
            place[r] = NOWHERE
            if token + r < tokens:
                place[r] = places[token + r]
                for pair in rows:
                    load_row(pair[0], token + r, group, pair[1], r)


@T.macro
def widen(read, slot, rows, place):
    """rows[place] = read[slot] in fp32."""
    for i in T.vectorized(rows.shape[1]):
        rows[place, i] = T.cast(read[slot, i], "float32")


@T.macro
def load_front(x, front, which, group, rows, slot):
    """rows[slot] = row `which` of those in front of fragments; 0, whatever stands there, in front of a document."""
    exchange, sources, arrived = front
    VEC = rows.shape[1]
    for i in T.unroll(VEC):
        rows[slot, i] = 0.0
    if exchange:
        read = T.alloc_local((1, VEC), x.dtype)
        source = T.alloc_var("int32", init=sources[which])
        if source >= 0:
            if source < x.shape[0]:
                load_row(x, source, group, read, 0)
            else:
                load_row(arrived, source - x.shape[0], group, read, 0)
            widen(read, 0, rows, slot)


@T.macro
def load_fronts(x, front, place, group, rows, slot, W):
    """The W-1 rows from `slot` on: those in front of the fragment that begins at `place`."""
    for j in T.unroll(W - 1):
        load_front(x, front, fronts_of(place, W) + j, group, rows, slot + j)


@T.macro
def load_window(x, front, token, place, group, rows, W):
    """The first W-1 rows: those in front of a token, wherever they stand."""
    read = T.alloc_local((1, rows.shape[1]), x.dtype)
    position = T.alloc_var("int32", init=position_of(place))
    for j in T.unroll(W - 1):
        if position >= W - 1 - j:
            load_row(x, token - (W - 1 - j), group, read, 0)
            widen(read, 0, rows, j)
        else:
            load_front(x, front, fronts_of(place, W) + j + position, group, rows, j)


@T.macro
def load_taps(weight, bias, has_bias, group, taps, shift, W):
    """taps [VEC * W] and shift [VEC] in fp32. weight [D / VEC, VEC * W], bias [D / VEC, VEC], both of one dtype."""
    VEC = shift.shape[0]
    read = T.alloc_local((VEC * W,), weight.dtype)
    for k in T.unroll(W):
        for i in T.vectorized(VEC):
            read[k * VEC + i] = weight[group, k * VEC + i]
    for i in T.unroll(VEC * W):
        taps[i] = T.cast(read[i], "float32")
    for i in T.unroll(VEC):
        shift[i] = 0.0
    if has_bias:
        for i in T.vectorized(VEC):
            read[i] = bias[group, i]
        for i in T.unroll(VEC):
            shift[i] = T.cast(read[i], "float32")


@T.macro
def combine(rows, first, taps, shift, total, W):
    """total = shift + sum of taps times the W rows from `first` on."""
    for i in T.unroll(total.shape[0]):
        total[i] = shift[i]
        for w in T.unroll(W):
            total[i] = total[i] + taps[i * W + w] * rows[first + w, i]


@T.macro
def keep_window(rows, ahead, W):
    """The last W-1 rows become the first ones."""
    for j in T.unroll(W - 1):
        for i in T.unroll(rows.shape[1]):
            rows[j, i] = rows[ahead + j, i]


def sigmoid(x):
    """1 / (1 + exp(-x)), without overflow on the way."""
    return 1.0 / (1.0 + T.exp2(x * -LOG2E))
