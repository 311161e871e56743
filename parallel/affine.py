"""Affine maps of the state, S -> M S + E, and their composition along chains. fp32 or fp64 torch.

    compose:  (M2, E2) after (M1, E1) = (M2 M1, M2 E1 + E2)        M  final_correction
    fold:     S_i = E_i + M_i S_{i-1}                              E  boundary_state

The adjoint of a chain runs it backwards with M transposed: G_i = D_i + M_i^T G_{i+1}.

Ranks hold and send all of these transposed, as the kernels have them: states S^T and E^T [.., V, K], corrections M^T
[.., K, K]. So a state is a row vector here, S^T M^T + E^T, and no copy turns it round on its way.

A chain is a list of maps in the order in which they apply; many chains (documents) are folded at once, one batched
product a step, so the host's work grows with the longest chain and not with the number of documents. The products
run in fp64 on CUDA: whatever the process allows for fp32 matrix products (TF32), a fold is never truncated. A device
that has a kernel for it folds in one launch: whoever knows kernels hands one over with fold_with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


def affine(
    correction: torch.Tensor, state: torch.Tensor, boundary: torch.Tensor, *, adjoint: bool = False
) -> torch.Tensor:
    """E + M S, or E + M^T S with adjoint: correction M^T [.., K, K], state S^T and boundary E^T [.., V, K]."""
    matrix = correction.mT if adjoint else correction
    if matrix.is_cuda and matrix.dtype == torch.float32:
        return (boundary.double() + state.double() @ matrix.double()).float()
    return boundary + state @ matrix


# boundary, correction, links, first, num_out, adjoint -> states, or None where it cannot; see ChainFold.
DeviceFold = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, bool], "torch.Tensor | None"]
_device_fold: DeviceFold | None = None


def fold_with(fold: DeviceFold) -> None:
    """Try `fold` first in every fold. Arguments: boundary, correction, ChainFold's links, first, num_out; adjoint."""
    global _device_fold
    _device_fold = fold


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step of all chains that are still running; they stand first in the batch, longest chains first.

    source: rows of the boundary states that join, [n]. correction: rows of the corrections that apply, [n], or None
    in the first step. kept: positions in the batch whose state is wanted; target: the output rows they go to.
    """

    source: torch.Tensor
    correction: torch.Tensor | None
    kept: torch.Tensor
    target: torch.Tensor


@dataclass(frozen=True, slots=True)
class Link:
    """One map of a chain: its rows in the buffers, and the output row for the state behind it (None: not wanted).

    correction is not read for the first link of a chain, whose boundary state is complete.
    """

    source: int
    correction: int | None
    target: int | None


@dataclass(frozen=True, slots=True, eq=False)
class ChainFold:
    """A fold prepared on the host: the steps of a set of chains and the number of rows that come out.

    The same once more for kernels, chain by chain: links int32 [links, 3], rows of boundary and correction and the
    output row or -1; first int32 [chains + 1], where chains begin.
    """

    steps: tuple[Step, ...]
    num_out: int
    links: torch.Tensor
    first: torch.Tensor

    @classmethod
    def of(cls, chains: Sequence[Sequence[Link]], num_out: int, device: torch.device | str = "cpu") -> ChainFold:
        """Prepare chains of links. Links behind the last wanted one of a chain are dropped."""
        wanted = [chain[: _last_target(chain) + 1] for chain in chains]
        ordered = sorted((chain for chain in wanted if chain), key=len, reverse=True)
        steps = []
        for index in range(len(ordered[0]) if ordered else 0):
            links = [chain[index] for chain in ordered if len(chain) > index]
            kept = [(row, link.target) for row, link in enumerate(links) if link.target is not None]
            correction = [link.correction for link in links] if index else None
            steps.append(
                Step(
                    _rows([link.source for link in links], device),
                    None if correction is None else _rows(correction, device),
                    _rows([row for row, _ in kept], device),
                    _rows([target for _, target in kept], device),
                )
            )
        rows = [
            (
                link.source,
                -1 if link.correction is None else link.correction,
                -1 if link.target is None else link.target,
            )
            for chain in ordered
            for link in chain
        ]
        ends = torch.tensor([0, *map(len, ordered)], dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
        table = torch.tensor(rows, dtype=torch.int32, device="cpu").reshape(-1, 3)
        return cls(tuple(steps), num_out, table.to(device), ends.to(device))

    def __call__(self, boundary: torch.Tensor, correction: torch.Tensor, *, adjoint: bool = False) -> torch.Tensor:
        """Run the fold. boundary [rows, H, V, K], correction [rows, H, K, K] -> states [num_out, H, V, K]."""
        if _device_fold is not None:
            folded = _device_fold(boundary, correction, self.links, self.first, self.num_out, adjoint)
            if folded is not None:
                return folded
        out = boundary.new_zeros(self.num_out, *boundary.shape[1:])
        state = None
        for step in self.steps:
            joined = boundary.index_select(0, step.source)
            if step.correction is None or state is None:
                state = joined
            else:
                matrix = correction.index_select(0, step.correction)
                state = affine(matrix, state[: len(step.source)], joined, adjoint=adjoint)
            out.index_copy_(0, step.target, state.index_select(0, step.kept))
        return out


def _last_target(chain: Sequence[Link]) -> int:
    return max((index for index, link in enumerate(chain) if link.target is not None), default=-1)


def _rows(values: Sequence[int | None], device: torch.device | str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
