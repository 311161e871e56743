"""Composition of affine maps: chains of any length, many at once, and their adjoint."""

from __future__ import annotations

import torch

from flashqla_cp.parallel.affine import ChainFold, Link, affine

GENERATOR = torch.Generator().manual_seed(0)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


def test_affine_and_its_adjoint():
    matrix, state, boundary = random(2, 3, 3), random(2, 3, 5), random(2, 3, 5)
    there = affine(matrix.mT, state.mT, boundary.mT).mT
    torch.testing.assert_close(there, torch.einsum("hij,hjv->hiv", matrix, state) + boundary)
    adjoint = affine(matrix.mT, state.mT, boundary.mT, adjoint=True).mT
    torch.testing.assert_close(adjoint, torch.einsum("hji,hjv->hiv", matrix, state) + boundary)


def test_chains_of_different_lengths_fold_together():
    boundary, correction = random(6, 2, 5, 3), random(6, 2, 3, 3)
    chains = [
        [Link(0, None, 2)],
        [Link(1, None, 0), Link(2, 2, None), Link(3, 3, 1)],
        [Link(4, None, None), Link(5, 5, None)],  # nothing wanted: not computed
    ]
    out = ChainFold.of(chains, 3)(boundary, correction)
    after = boundary[1]
    torch.testing.assert_close(out[0], after)
    for row in (2, 3):
        after = after @ correction[row] + boundary[row]
    torch.testing.assert_close(out[1], after)
    torch.testing.assert_close(out[2], boundary[0])


def test_adjoint_fold_is_the_gradient_of_the_fold():
    """dS_out of a part is the gradient of sum <entry state, D> with respect to its boundary state."""
    boundary, correction, upstream = random(3, 2, 5, 3).requires_grad_(), random(3, 2, 3, 3), random(3, 2, 5, 3)
    ahead = ChainFold.of([[Link(0, None, 0), Link(1, 1, 1), Link(2, 2, 2)]], 3)
    (ahead(boundary, correction) * upstream).sum().backward()
    # The part behind row i receives state i; its D is upstream[i], and its own M is correction[i + 1].
    back = ChainFold.of([[Link(2, None, 2), Link(1, 2, 1), Link(0, 1, 0)]], 3)
    torch.testing.assert_close(back(upstream, correction, adjoint=True), boundary.grad)


def test_rows_that_no_chain_reads_may_hold_anything():
    boundary, correction = random(3, 1, 4, 2), random(3, 1, 2, 2)
    fold = ChainFold.of([[Link(0, None, None), Link(1, 1, 0)]], 1)
    expected = fold(boundary, correction)
    boundary[2], correction[0], correction[2] = torch.nan, torch.nan, torch.inf
    assert torch.equal(fold(boundary, correction), expected)
