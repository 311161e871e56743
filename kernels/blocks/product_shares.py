"""Who has what in a product of affine_product.py. Plain numbers, for the host too."""

from dataclasses import dataclass

COLUMNS = 16  # of V in a block: rows of S^T
THREADS, WARP = 256, 32
SIDES = 2  # warps that share a run of the inner dimension
PAD = 4
PARTS = THREADS // WARP // SIDES  # of the inner dimension


@dataclass(frozen=True)
class Shares:
    """Who has what of K x K by K x COLUMNS numbers."""

    K: int

    @property
    def run(self) -> int:
        """Inner rows of a warp."""
        return self.K // PARTS

    @property
    def groups(self) -> int:
        """Threads side by side along K."""
        return self.K // 8

    @property
    def wide(self) -> int:
        """Rows of S^T of a thread."""
        return COLUMNS * self.groups // (WARP * SIDES)

    @property
    def finished(self) -> int:
        """Finished numbers of a thread."""
        return COLUMNS * self.K // THREADS

    def part(self, thread):
        """A thread's part of the inner dimension."""
        return thread // (WARP * SIDES)

    def column(self, thread):
        """The first of a thread's rows of S^T."""
        return (thread // WARP % SIDES * (WARP // self.groups) + thread % WARP // self.groups) * self.wide
