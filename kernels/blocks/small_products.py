"""Products of 16 x 16 blocks by one warp, on tensor cores in TF32, from registers to registers.

A block lies in a warp as the sums of mma.sync do, two tiles of 8 columns: lane 4 g + t has, of tile n,

    y[4 n + 2 half + parity] = Y[g + 8 half, 8 n + 2 t + parity]

The order of the inner dimension of a product is free as long as both operands agree. So the same registers are Y as a
left operand, and the transpose of Y as a right one: what one product leaves is an operand of the next, with no exchange
between lanes.
"""

import tilelang.language as T

SIDE = 16  # of a block
HELD = 8  # numbers of a block in a lane
TILES = 2  # of 8 columns


def lane_of(row, column):
    """The lane that holds a number of a block, or of any of a row of blocks."""
    return row % 8 * 4 + column % 8 // 2


def place_of(row, column):
    """Which of the 4 numbers that a lane holds of a tile that is."""
    return row % SIDE // 8 * 2 + column % 2


@T.macro
def nearest_tf32(x):
    """x rounded to the 10 bits of mantissa that the tensor cores read, ties away from zero."""
    return T.reinterpret(T.reinterpret(x, "uint32") + T.cast(0x1000, "uint32"), "float32")


@T.macro
def round_block(y):
    """y as an operand: to the nearest that the tensor cores read."""
    for i in T.unroll(HELD):
        y[i] = nearest_tf32(y[i])


@T.macro
def add_tile(left, left_at, right, right_at, sums, sums_at):
    """sums += left right of one mma.sync: a lane's 4, 2 and 4 numbers from these places on."""
    T.ptx_mma(
        "float32",
        "m16n8k8",
        "row",
        "col",
        "tf32",
        "tf32",
        "fp32",
        left.data,
        left_at,
        right.data,
        right_at,
        sums.data,
        sums_at,
        T.bool(False),
    )


@T.macro
def add_product(left, right, sums):
    """sums += left right^T, of blocks as above."""
    a = T.alloc_local((4,), "float32")
    b = T.alloc_local((2,), "float32")
    for step in T.unroll(TILES):
        for half in T.unroll(2):
            for parity in T.unroll(2):
                a[2 * parity + half] = left[4 * step + 2 * half + parity]
        for tile in T.unroll(TILES):
            for parity in T.unroll(2):
                b[parity] = right[4 * step + 2 * tile + parity]
            add_tile(a, 0, b, 0, sums, 4 * tile)
