"""Gradients of the causal convolution, one kernel text for all architectures.

    a_t = bias + sum_w weight[:, w] x_{t - (W-1) + w}           computed again
    da_t = dy_t act'(a_t)                                       act' = 1, or of silu s (1 + a (1 - s)), s = sigmoid(a)
    dx_t = sum_b weight[:, W-1-b] da_{t+b}                      over tokens of its document
    dweight[:, w] = sum_t da_t x_{t - (W-1) + w}                dbias = sum_t da_t

As in the forward a warp walks down tokens, W-1 further than those it owns, and adds each da to the gradients that wait
for it, those of its own fragment. What a fragment adds to the rows in front of it is a kernel of its own: by row, the
tokens that read it, W-1 at most, in a fixed order. Sums over tokens meet in shared memory; `sums` [blocks, W+1, D] has
a block's share, which the host adds. Tokens of no document have no da.
Letters: T tokens, D channels, W taps.
"""

import tilelang.language as T

from flashqla_cp.kernels.blocks import conv_rows as window
from flashqla_cp.kernels.blocks.conv_rows import LANES
from flashqla_cp.kernels.spec import KernelSpec
from flashqla_cp.kernels.tuning import conv_tile


def make_find_da(W, silu):
    """Macro: da of the token whose window begins at row `first`, from its dy in grad[first]."""

    @T.macro
    def find_da(rows, first, taps, shift, grad, total, da):
        if silu:
            window.combine(rows, first, taps, shift, total, W)
        for i in T.unroll(da.shape[0]):
            da[i] = T.cast(grad[first, i], "float32")
            if silu:
                gate = T.alloc_var("float32", init=window.sigmoid(total[i]))
                da[i] = da[i] * gate * (1.0 + total[i] * (1.0 - gate))

    return find_da


def build_causal_conv_grad(spec: KernelSpec):
    """dims: width (W). dtypes: x, weight (and bias). flags: bias, silu, exchange, ragged (D of any length)."""
    W, dtype, wtype, f32, i32 = spec.dim("width"), spec.dtype("x"), spec.dtype("weight"), "float32", "int32"
    has_bias, silu, exchange = spec.has("bias"), spec.has("silu"), spec.has("exchange")
    tile = conv_tile(spec)
    VEC, AHEAD, RUN, WARPS, WIDE = tile.channels, tile.ahead, tile.tokens, tile.warps, LANES * tile.channels
    QUAD = 4 if VEC % 4 == 0 else VEC
    tokens, groups, listed, halo, biases, blocks = (
        T.dynamic(n) for n in ("tokens", "groups", "listed", "halo", "biases", "blocks")
    )
    x_token, dy_token = T.dynamic("x_token", "int64"), T.dynamic("dy_token", "int64")

    find_da = make_find_da(W, silu)

    @T.macro
    def add_shares(rows, first, da, dtaps, dshift):
        for i in T.unroll(VEC):
            dshift[i] = dshift[i] + da[i]
            for w in T.unroll(W):
                dtaps[w * VEC + i] = dtaps[w * VEC + i] + da[i] * rows[first + w, i]

    @T.macro
    def add_gradients(da, position, taps, waiting):
        """waiting[b] is dx of the token b in front; those in front of the fragment get nothing."""
        for b in T.unroll(W):
            if b <= position:
                for i in T.unroll(VEC):
                    waiting[b * VEC + i] = waiting[b * VEC + i] + taps[i * W + (W - 1 - b)] * da[i]

    @T.macro
    def store(waiting, dx, token, group, out):
        for i in T.vectorized(VEC):
            out[i] = T.cast(waiting[(W - 1) * VEC + i], dtype)
        for i in T.vectorized(VEC):
            dx[token, group, i] = out[i]

    @T.macro
    def move_on(waiting):
        """To the next token: every gradient waits for one token less."""
        for i in T.unroll((W - 1) * VEC):  # from the last on, for each takes the place of the one behind it
            waiting[W * VEC - 1 - i] = waiting[(W - 1) * VEC - 1 - i]
        for i in T.unroll(VEC):
            waiting[i] = 0.0

    @T.prim_func
    def causal_conv_grad(
        x: T.StridedTensor((tokens, groups, VEC), (x_token, VEC, 1), dtype),
        dy: T.StridedTensor((tokens, groups, VEC), (dy_token, VEC, 1), dtype),
        places: T.Tensor((tokens,), i32),
        sources: T.Tensor((listed,), i32),
        arrived: T.Tensor((halo, groups, VEC), dtype),
        weight: T.Tensor((groups, VEC * W), wtype),
        bias: T.Tensor((biases, VEC), wtype),
        dx: T.Tensor((tokens, groups, VEC), dtype),
        sums: T.Tensor((blocks, W + 1, groups, VEC), f32),
    ):
        with T.Kernel(T.ceildiv(groups, LANES) * T.ceildiv(tokens, RUN * WARPS), threads=LANES * WARPS) as b:
            T.annotate_min_blocks_per_sm(tile.blocks)
            T.assume(x_token % VEC == 0)
            T.assume(dy_token % VEC == 0)
            share = T.alloc_shared((WARPS, W + 1, WIDE), f32)
            read = T.alloc_local((AHEAD, VEC), dtype)
            rows = T.alloc_local((W - 1 + AHEAD, VEC), f32)
            grad = T.alloc_local((AHEAD, VEC), dtype)
            place = T.alloc_local((AHEAD,), i32)
            taps = T.alloc_local((VEC * W,), f32)
            shift = T.alloc_local((VEC,), f32)
            total = T.alloc_local((VEC,), f32)
            da = T.alloc_local((VEC,), f32)
            waiting = T.alloc_local((W * VEC,), f32)
            dtaps = T.alloc_local((W * VEC,), f32)
            dshift = T.alloc_local((VEC,), f32)
            out = T.alloc_local((VEC,), dtype)
            thread = T.get_thread_binding()
            lane = T.alloc_var(i32, init=thread % LANES)
            warp = T.alloc_var(i32, init=thread // LANES)
            columns = T.alloc_var(i32, init=T.ceildiv(groups, LANES))
            group = T.alloc_var(i32, init=T.truncmod(b, columns) * LANES + lane)
            block = T.alloc_var(i32, init=T.truncdiv(b, columns))
            first = T.alloc_var(i32, init=(block * WARPS + warp) * RUN)
            front = (exchange, sources, arrived)
            for i in T.unroll(W * VEC):
                dtaps[i] = 0.0
                waiting[i] = 0.0
            for i in T.unroll(VEC):
                dshift[i] = 0.0
            if first < tokens and group < groups:
                window.load_taps(weight, bias, has_bias, group, taps, shift, W)
                window.load_window(x, front, first, T.max(places[first], 0), group, rows, W)
                for step in T.serial(tile.walked // AHEAD):
                    walked = T.alloc_var(i32, init=step * AHEAD)
                    token = T.alloc_var(i32, init=first + walked)
                    steady = T.alloc_var(i32, init=1)
                    if walked < W - 1 or walked + AHEAD > RUN:
                        steady = 0
                    window.load_ahead([(x, read), (dy, grad)], places, token, group, place)
                    for r in T.unroll(AHEAD):
                        if window.position_of(place[r]) != W - 1:
                            steady = 0
                    if steady == 1:
                        for r in T.unroll(AHEAD):
                            window.widen(read, r, rows, W - 1 + r)
                            find_da(rows, r, taps, shift, grad, total, da)
                            add_gradients(da, W - 1, taps, waiting)
                            add_shares(rows, r, da, dtaps, dshift)
                            store(waiting, dx, token + r - (W - 1), group, out)
                            move_on(waiting)
                    else:
                        for r in T.unroll(AHEAD):
                            window.widen(read, r, rows, W - 1 + r)
                            if place[r] >= 0:
                                position = T.alloc_var(i32, init=window.position_of(place[r]))
                                if position == 0:
                                    window.load_fronts(x, front, place[r], group, rows, r, W)
                                find_da(rows, r, taps, shift, grad, total, da)
                                add_gradients(da, position, taps, waiting)
                                if walked + r < RUN:
                                    add_shares(rows, r, da, dtaps, dshift)
                            if walked + r >= W - 1 and token + r - (W - 1) < tokens:
                                store(waiting, dx, token + r - (W - 1), group, out)
                            move_on(waiting)
                    window.keep_window(rows, AHEAD, W)
            for w in T.unroll(W + 1):
                for quad in T.unroll(VEC // QUAD):
                    for e in T.vectorized(QUAD):
                        if w < W:
                            share[warp, w, lane * VEC + quad * QUAD + e] = dtaps[w * VEC + quad * QUAD + e]
                        else:
                            share[warp, w, lane * VEC + quad * QUAD + e] = dshift[quad * QUAD + e]
            T.sync_threads()
            for turn in T.serial(-(-(W + 1) * WIDE // (LANES * WARPS))):
                tap = T.alloc_var(i32, init=(turn * LANES * WARPS + thread) // WIDE)
                column = T.alloc_var(i32, init=(turn * LANES * WARPS + thread) % WIDE)
                channel = T.alloc_var(i32, init=(group - lane) + column // VEC)
                if tap <= W and channel < groups:
                    sum_of_warps = T.alloc_var(f32, init=0.0)
                    for part in T.unroll(WARPS):
                        sum_of_warps = sum_of_warps + share[part, tap, column]
                    sums[block, tap, channel, column % VEC] = sum_of_warps

    return causal_conv_grad


def build_conv_halo_grad(spec: KernelSpec):
    """dims: width (W). dtypes: x, weight (and bias). flags: bias, silu, ragged (D of any length).

    readers [targets * (W-1)]: for each of some rows in front of fragments the token that reads it b = 1, 2, .. later,
    or -1 where none of another fragment does.
    """
    W, dtype, wtype, f32, i32 = spec.dim("width"), spec.dtype("x"), spec.dtype("weight"), "float32", "int32"
    has_bias, silu = spec.has("bias"), spec.has("silu")
    tile = conv_tile(spec)
    VEC, THREADS = tile.channels, LANES * tile.warps
    find_da = make_find_da(W, silu)
    tokens, groups, listed, halo, biases, targets, readings = (
        T.dynamic(n) for n in ("tokens", "groups", "listed", "halo", "biases", "targets", "readings")
    )
    x_token, dy_token = T.dynamic("x_token", "int64"), T.dynamic("dy_token", "int64")

    @T.prim_func
    def conv_halo_grad(
        x: T.StridedTensor((tokens, groups, VEC), (x_token, VEC, 1), dtype),
        dy: T.StridedTensor((tokens, groups, VEC), (dy_token, VEC, 1), dtype),
        places: T.Tensor((tokens,), i32),
        sources: T.Tensor((listed,), i32),
        arrived: T.Tensor((halo, groups, VEC), dtype),
        weight: T.Tensor((groups, VEC * W), wtype),
        bias: T.Tensor((biases, VEC), wtype),
        readers: T.Tensor((readings,), i32),
        dfront: T.Tensor((targets, groups, VEC), f32),
    ):
        with T.Kernel(T.ceildiv(groups, THREADS) * targets, threads=THREADS) as b:
            T.assume(x_token % VEC == 0)
            T.assume(dy_token % VEC == 0)
            read = T.alloc_local((1, VEC), dtype)
            rows = T.alloc_local((W, VEC), f32)
            grad = T.alloc_local((1, VEC), dtype)
            taps = T.alloc_local((VEC * W,), f32)
            shift = T.alloc_local((VEC,), f32)
            total = T.alloc_local((VEC,), f32)
            da = T.alloc_local((VEC,), f32)
            sum_of_readers = T.alloc_local((VEC,), f32)
            columns = T.alloc_var(i32, init=T.ceildiv(groups, THREADS))
            group = T.alloc_var(i32, init=T.truncmod(b, columns) * THREADS + T.get_thread_binding())
            target = T.alloc_var(i32, init=T.truncdiv(b, columns))
            if group < groups:
                window.load_taps(weight, bias, has_bias, group, taps, shift, W)
                for i in T.unroll(VEC):
                    sum_of_readers[i] = 0.0
                for back in T.unroll(W - 1):
                    token = T.alloc_var(i32, init=readers[target * (W - 1) + back])
                    if token >= 0:
                        window.load_window(x, (True, sources, arrived), token, places[token], group, rows, W)
                        window.load_row(x, token, group, read, 0)
                        window.widen(read, 0, rows, W - 1)
                        window.load_row(dy, token, group, grad, 0)
                        find_da(rows, 0, taps, shift, grad, total, da)
                        for i in T.unroll(VEC):
                            sum_of_readers[i] = sum_of_readers[i] + taps[i * W + (W - 2 - back)] * da[i]
                for i in T.vectorized(VEC):
                    dfront[target, group, i] = sum_of_readers[i]

    return conv_halo_grad
