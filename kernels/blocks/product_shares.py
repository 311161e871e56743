"""Who has what in a product of affine_product.py. Plain numbers, for the host too."""

from dataclasses import dataclass

WARP = 32
ROWS = 16  # of S^T in a tile of mma.sync
OUTPUTS = 32  # of a warp
INNER = 16  # numbers of the inner dimension that a warp has in two steps of mma.sync
VECTOR = 4  # numbers side by side that a thread finishes


@dataclass(frozen=True)
class Shares:
    """Who has what of `columns` x K by K x K numbers, rows of S^T by M^T."""

    K: int
    columns: int

    @property
    def along(self) -> int:
        """Warps side by side along the outputs; twice, each time with a half of the inner dimension."""
        return self.K // OUTPUTS

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 2 * WARP * self.along

    @property
    def inner(self) -> int:
        """Inner numbers of a warp."""
        return self.K // 2

    @property
    def runs(self) -> int:
        """Runs of INNER of these."""
        return self.inner // INNER

    @property
    def tiles(self) -> int:
        """Tiles of ROWS rows of S^T."""
        return self.columns // ROWS

    @property
    def finished(self) -> int:
        """Finished numbers of a thread."""
        return self.tiles * 2 * VECTOR

    def part(self, thread):
        """Which half of the inner dimension a warp has."""
        return thread // WARP // self.along

    def first_inner(self, thread):
        """The first of a warp's inner numbers."""
        return self.part(thread) * self.inner

    def first_output(self, thread):
        """The first of a warp's outputs."""
        return thread // WARP % self.along * OUTPUTS

    def line(self, thread, tile):
        """The line of a tile in shared memory that a thread fills and reads."""
        return tile * (ROWS // 2) + thread % WARP // 4

    def row(self, thread, vector):
        """The row of S^T of a vector of a thread's finished numbers."""
        return vector // 2 * ROWS + vector % 2 * 8 + thread % WARP // 4

    def output(self, thread):
        """The first output of all of them."""
        return self.first_output(thread) + thread % 4 * 2 * VECTOR + self.part(thread) * VECTOR


def chain_shares(K: int) -> Shares:
    """Of chains: as many blocks as multiprocessors with the states of 32 value heads of 128."""
    return Shares(K, 32)


def fold_shares(K: int) -> Shares:
    """Of a fold, whose ranks may have few columns of V."""
    return Shares(K, 16)
