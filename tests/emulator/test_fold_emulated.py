"""The fold of an exchange on its kernel: the same chains in torch, from maps where a message has them."""

from __future__ import annotations

import pytest
import torch
from test_op_emulated import emulation

from flashqla_cp.kernels.host import chunked
from flashqla_cp.parallel.affine import ChainFold, Link
from flashqla_cp.parallel.exchange.base import pack, unpack
from flashqla_cp.testing.metrics import relative_l2

OWNERS, HEADS = 5, 2
THERE = [
    [Link(0, None, 2), Link(1, 1, None), Link(2, 2, 0), Link(3, 3, 1)],
    [Link(4, None, 3)],
]
BACK = [[Link(4, None, 0), Link(3, 4, 1), Link(2, 3, None), Link(1, 0, 2)]]


def messages(count: int, dim: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Maps of OWNERS, `count` of each kind, as unpack finds them in their messages: E^T of `rows` lines, and M^T."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(count, HEADS, *shape, generator=generator)

    sent = [pack(random(rows, dim), random(dim, dim) / dim**0.5, count, count) for _ in range(OWNERS)]
    return unpack(torch.stack(sent), count, count, torch.Size((rows, dim)))


def folded(chains: list[list[Link]], num_out: int, maps: tuple[torch.Tensor, torch.Tensor], adjoint: bool) -> None:
    """Compare what the kernel makes of maps with what torch makes of them in fp64."""
    fold = ChainFold.of(chains, num_out)
    got = chunked.fold(*maps, fold.links, fold.first, num_out, adjoint)
    assert got is not None
    expected = fold(*(x.double() for x in maps), adjoint=adjoint)
    targets = [link.target for chain in chains for link in chain if link.target is not None]
    for row in targets:
        assert relative_l2(got[row].double(), expected[row]) < 1e-6


@pytest.mark.parametrize(("chains", "adjoint"), [(THERE, False), (BACK, True)], ids=["there", "back"])
@pytest.mark.parametrize(("arch", "schedule"), [("sm_90a", "eager"), ("sm_90a", "random"), ("sm_100a", "lazy")])
def test_chains_in_messages(arch, schedule, chains, adjoint):
    boundary, correction = messages(1, 64, 64)
    assert boundary.data_ptr() + 64 * 64 * 4 == correction.data_ptr(), "views of one message"
    with emulation(arch, schedule) as launched:
        folded(chains, 4, (boundary, correction), adjoint)
    assert [spec.stage for spec, _ in launched] == ["fold"]


def test_maps_as_states():
    """A node composes whole maps: M^T below E^T."""
    with emulation("sm_90a"):
        folded(THERE, 4, messages(1, 64, 128), adjoint=False)


def test_wide_heads():
    with emulation("sm_90a"):
        folded([[Link(0, None, None), Link(1, 1, 0)]], 1, messages(1, 128, 128), adjoint=False)


def test_a_chain_of_wide_heads_stays_fp32():
    """Tensor cores cut off what they add to a sum, so errors of one sign add up along a chain."""
    chain = [Link(row, row, 0 if row == OWNERS - 1 else None) for row in range(OWNERS)]
    with emulation("sm_90a"):
        folded([chain], 1, messages(1, 128, 128), adjoint=False)


def test_several_maps_of_an_owner():
    """No view of the messages has these in rows, so they are copied."""
    boundary, correction = messages(2, 64, 64)
    chains = [[Link(0, None, None), Link(3, 3, 0), Link(9, 9, 1)]]
    with emulation("sm_90a"):
        folded(chains, 2, (boundary, correction), adjoint=False)
        folded(chains, 2, (boundary.transpose(2, 3), correction.transpose(2, 3)), adjoint=True)


def test_other_sizes_are_left_to_torch():
    with emulation("sm_90a") as launched:
        fold = ChainFold.of(THERE, 4)
        for dim, rows in ((32, 32), (64, 24)):
            assert chunked.fold(*messages(1, dim, rows), fold.links, fold.first, 4, False) is None
    assert not launched
