"""Depthwise causal convolution of packed documents, one kernel text for all architectures.

    y_t = act(bias + sum_w weight[:, w] x_{t - (W-1) + w})      rows in front of a document do not exist

A warp walks down a run of tokens with the window in registers, 32 lanes side by side along the channels; it reads some
rows ahead of the one it computes. Where a fragment begins, the window's rows are replaced by those in front of it
(blocks/conv_rows.py says where they stand). Rows of no document are written as 0.

Also here: the table of places, made on the device from the fragments' ends, so that offsets are never read back.
Letters: T tokens, D channels, W taps.
"""

import tilelang.language as T

from flashqla_cp.kernels.blocks import conv_rows as window
from flashqla_cp.kernels.blocks.conv_places import NOWHERE, PLACES
from flashqla_cp.kernels.blocks.conv_rows import LANES
from flashqla_cp.kernels.spec import KernelSpec
from flashqla_cp.kernels.tuning import conv_tile

THREADS = 256  # of a block that fills the table


def build_conv_places(spec: KernelSpec):
    """dims: width (W). Fragments in the order of their starts; what ends past the tensors is cut there."""
    W, i32 = spec.dim("width"), "int32"
    tokens, fragments = T.dynamic("tokens"), T.dynamic("fragments")

    @T.prim_func
    def conv_places(
        start: T.Tensor((fragments,), i32), end: T.Tensor((fragments,), i32), places: T.Tensor((tokens,), i32)
    ):
        with T.Kernel(T.ceildiv(tokens, THREADS), threads=THREADS) as block:
            token = T.alloc_var(i32, init=block * THREADS + T.get_thread_binding())
            low = T.alloc_var(i32, init=0)
            high = T.alloc_var(i32, init=fragments)
            if token < tokens:
                while high - low > 1:  # the last fragment that begins at the token or before it
                    middle = T.alloc_var(i32, init=(low + high) // 2)
                    if start[middle] <= token:
                        low = middle
                    else:
                        high = middle
                place = T.alloc_var(i32, init=NOWHERE)
                begun = T.alloc_var(i32, init=T.max(start[low], 0))
                if begun <= token and token < end[low]:
                    place = low * PLACES + T.min(token - begun, W - 1)
                places[token] = place

    return conv_places


def build_causal_conv(spec: KernelSpec):
    """dims: width (W). dtypes: x, weight (and bias). flags: bias, silu, exchange, ragged (D of any length)."""
    W, dtype, wtype, f32, i32 = spec.dim("width"), spec.dtype("x"), spec.dtype("weight"), "float32", "int32"
    has_bias, silu, exchange = spec.has("bias"), spec.has("silu"), spec.has("exchange")
    tile = conv_tile(spec)
    VEC, AHEAD, RUN = tile.channels, tile.ahead, tile.walked
    tokens, groups, listed, halo, biases = (T.dynamic(n) for n in ("tokens", "groups", "listed", "halo", "biases"))
    x_token = T.dynamic("x_token", "int64")

    @T.macro
    def finish(rows, first, taps, shift, total):
        """total = y of the token whose window begins at row `first`."""
        window.combine(rows, first, taps, shift, total, W)
        if silu:
            for i in T.unroll(VEC):
                total[i] = total[i] * window.sigmoid(total[i])

    @T.macro
    def store(total, y, token, group, out):
        for i in T.vectorized(VEC):
            out[i] = T.cast(total[i], dtype)
        for i in T.vectorized(VEC):
            y[token, group, i] = out[i]

    @T.prim_func
    def causal_conv(
        x: T.StridedTensor((tokens, groups, VEC), (x_token, VEC, 1), dtype),
        places: T.Tensor((tokens,), i32),
        sources: T.Tensor((listed,), i32),
        arrived: T.Tensor((halo, groups, VEC), dtype),
        weight: T.Tensor((groups, VEC * W), wtype),
        bias: T.Tensor((biases, VEC), wtype),
        y: T.Tensor((tokens, groups, VEC), dtype),
    ):
        with T.Kernel(T.ceildiv(groups, LANES) * T.ceildiv(tokens, RUN * tile.warps), threads=LANES * tile.warps) as b:
            T.annotate_min_blocks_per_sm(tile.blocks)
            T.assume(x_token % VEC == 0)
            read = T.alloc_local((AHEAD, VEC), dtype)
            rows = T.alloc_local((W - 1 + AHEAD, VEC), f32)
            place = T.alloc_local((AHEAD,), i32)
            taps = T.alloc_local((VEC * W,), f32)
            shift = T.alloc_local((VEC,), f32)
            total = T.alloc_local((VEC,), f32)
            out = T.alloc_local((VEC,), dtype)
            thread = T.get_thread_binding()
            columns = T.alloc_var(i32, init=T.ceildiv(groups, LANES))
            group = T.alloc_var(i32, init=T.truncmod(b, columns) * LANES + thread % LANES)
            first = T.alloc_var(i32, init=(T.truncdiv(b, columns) * tile.warps + thread // LANES) * RUN)
            front = (exchange, sources, arrived)
            if first < tokens and group < groups:
                window.load_taps(weight, bias, has_bias, group, taps, shift, W)
                window.load_window(x, front, first, T.max(places[first], 0), group, rows, W)
                token = T.alloc_var(i32, init=first)
                for _ in T.serial(RUN // AHEAD):
                    steady = T.alloc_var(i32, init=1)
                    window.load_ahead([(x, read)], places, token, group, place)
                    for r in T.unroll(AHEAD):
                        if window.position_of(place[r]) != W - 1:
                            steady = 0
                    if steady == 1:
                        for r in T.unroll(AHEAD):
                            window.widen(read, r, rows, W - 1 + r)
                            finish(rows, r, taps, shift, total)
                            store(total, y, token + r, group, out)
                    else:
                        for r in T.unroll(AHEAD):
                            window.widen(read, r, rows, W - 1 + r)
                            for i in T.unroll(VEC):
                                total[i] = 0.0
                            if place[r] >= 0:
                                if window.position_of(place[r]) == 0:
                                    window.load_fronts(x, front, place[r], group, rows, r, W)
                                finish(rows, r, taps, shift, total)
                            if token + r < tokens:
                                store(total, y, token + r, group, out)
                    window.keep_window(rows, AHEAD, W)
                    token = token + AHEAD

    return causal_conv
