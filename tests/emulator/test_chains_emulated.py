"""Chains of segments' maps at kernel level, against the same in fp64: states, prefixes, and what enters behind them."""

from __future__ import annotations

import pytest
import torch
from test_op_emulated import emulation

from flashqla_cp.kernels.blocks import segments as column
from flashqla_cp.kernels.host.chunked import fold
from flashqla_cp.kernels.host.launcher import launch, spec_of
from flashqla_cp.parallel.affine import ChainFold, Link
from flashqla_cp.testing.metrics import relative_l2

DIM, HEADS = 64, 3
DIMS = (("head_dim", DIM),)
CHAINS = ((0, 4), (4, 1), (5, 2), (7, 2))  # first row and number of rows; one more row is a ghost
ROWS = 10
KNOWN = (-1, -1, 1, -1)  # the chains' rows among the states that are known, and among those that arrive
ARRIVING = (1, 0, -1, -1)
FORGETS = ((1, 1), (0, 2), (4, 2), (5, 1), (6, 2))  # row and head of segments that forget
SPOILED = [pytest.param(bits, id=f"{bits:x}") for bits in (0x7FFFFFFF, 0x7FC00000, 0x7F800000)]  # NaN, NaN, infinity


def links_of(chains: tuple[tuple[int, int], ...], rows: int) -> torch.Tensor:
    links = torch.zeros(rows, column.LINK_COLUMNS, dtype=torch.int32)
    links[:, column.LINK_CHAIN] = -1
    for chain, (first, count) in enumerate(chains):
        links[first, column.LENGTH] = count
        links[first : first + count, column.LINK_CHAIN] = chain
    return links


def number_of(bits: int) -> float:
    return torch.tensor([bits], dtype=torch.int32).view(torch.float32)[0]


@pytest.mark.parametrize(("arch", "schedule"), [("sm_90a", "random"), ("sm_100a", "lazy")])
def test_prefixes_and_what_enters_behind_them(arch: str, schedule: str) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, HEADS, DIM, DIM, generator=generator)

    boundary, correction = draw(ROWS), draw(ROWS) / DIM**0.5  # E^T, M^T
    known, arriving = draw(2), draw(2)
    corrects = torch.ones(ROWS, HEADS, dtype=torch.int32)
    for row, head in FORGETS:
        corrects[row, head] = 0
    corrects[-1] = 55  # ghosts hold anything
    correction[corrects != 1] = float("nan")  # not to be read
    links, entry_row, enters = links_of(CHAINS, ROWS), torch.tensor(KNOWN).int(), torch.tensor(ARRIVING).int()

    def states(entry_rows: tuple[int, ...], entries: torch.Tensor) -> torch.Tensor:
        """E behind every row, given the entries, in fp64."""
        expected = boundary.double()
        for (first, count), entry in zip(CHAINS, entry_rows, strict=True):
            for head in range(HEADS):
                state = torch.zeros(DIM, DIM).double() if entry < 0 else entries[entry, head].double()
                for row in range(first, first + count):
                    if corrects[row, head]:
                        expected[row, head] += state @ correction[row, head].double()
                    state = expected[row, head]
        return expected

    carried = boundary.clone()
    prefixes, reaches = torch.full_like(correction, float("nan")), torch.full_like(corrects, 77)
    with emulation(arch, schedule):
        whole = spec_of("affine_chain", arch, DIMS, initial_state=True, final_correction=True)
        launch(whole, links, correction, corrects, known, entry_row, enters, carried, carried, prefixes, reaches)
        assert relative_l2(carried[:-1], states(KNOWN, known)[:-1]) < 1e-6
        launch(spec_of("enter_chains", arch, DIMS), links, prefixes, reaches, arriving, enters, carried)
    both = [
        entry if entry >= 0 else other + 2 if other >= 0 else -1 for entry, other in zip(KNOWN, ARRIVING, strict=True)
    ]
    expected = states(tuple(both), torch.cat([known, arriving]))
    for row in range(ROWS - 1):
        assert relative_l2(carried[row], expected[row]) < 1e-6
    assert torch.equal(carried[-1], boundary[-1])

    for (first, count), entry in zip(CHAINS, ARRIVING, strict=True):
        for head in range(HEADS):
            product, alive = torch.eye(DIM).double(), True
            for row in range(first, first + count):
                alive = alive and bool(corrects[row, head])
                if entry < 0:  # nobody reads these
                    assert prefixes[row, head].isnan().all() and reaches[row, head] == 77
                    continue
                assert reaches[row, head] == alive
                if alive:
                    product = product @ correction[row, head].double()
                    assert relative_l2(prefixes[row, head], product) < 1e-6
                else:
                    last = row == first + count - 1
                    assert (prefixes[row, head] == 0).all() if last else prefixes[row, head].isnan().all()


@pytest.mark.parametrize("bits", SPOILED)
def test_a_product_hides_no_number_that_is_none(bits: int) -> None:
    """Nor the NaN that a GPU makes, all of whose bits are set. In a state, then in a map."""
    generator = torch.Generator().manual_seed(0)
    maps = [torch.randn(3, 1, DIM, DIM, generator=generator) for _ in range(2)]
    for spoiled, place in ((0, 0), (1, 1)):
        boundary, correction = (x.clone() for x in maps)
        (boundary, correction)[spoiled][place, 0, 5, 7] = number_of(bits)
        with emulation("sm_90a", races=False):
            chain = ChainFold.of([[Link(row, row or None, row) for row in range(3)]], 3)
            folded = fold(boundary, correction, chain.links, chain.first, 3, False)
            adjoint = fold(boundary, correction, chain.links, chain.first, 3, True)
            carried, entry_row = boundary.clone(), torch.zeros(1).int()
            corrects = torch.ones(3, 1, dtype=torch.int32)
            launch(
                spec_of("affine_chain", "sm_90a", DIMS),
                *(links_of(((0, 3),), 3), correction, corrects, boundary, entry_row, carried, carried),
            )
            entered = torch.zeros(3, 1, DIM, DIM)
            entries = torch.ones(1, 1, DIM, DIM) if spoiled else boundary[:1]
            launch(
                spec_of("enter_chains", "sm_90a", DIMS),
                *(links_of(((0, 3),), 3), correction, corrects, entries.contiguous(), entry_row, entered),
            )
        assert folded is not None and adjoint is not None
        for found in (folded, carried):  # row 5 of S^T, or all rows by column 7 of M^T; then the row, or everything
            bad = ~found.isfinite()
            assert bad[1, 0, 5].all() if not spoiled else bad[1, 0, :, 7].all()
            assert bad[2, 0, 5].all() if not spoiled else bad[2].all()
        assert (~adjoint.isfinite())[2, 0, 5].all()
        bad = ~entered.isfinite()
        assert bad[:, 0, 5].all() if not spoiled else bad[1, 0, :, 7].all()
