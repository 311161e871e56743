"""What `flashqla-cp bench` runs: inputs, their fp64 result, the stand-in for other ranks, counted work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashqla_cp.cli import bench_timing
from flashqla_cp.cli.bench_contenders import LocalCopies, Peer, contenders, middle_context
from flashqla_cp.cli.bench_draws import BAR, GRADIENT_BARS, Draw
from flashqla_cp.op import chunk_gated_delta_rule
from flashqla_cp.testing.oracle import gated_delta_rule_oracle
from flashqla_cp.testing.workload import REGIMES, Workload, draw_gates, relative_error

CPU = torch.device("cpu")


def workload(**changes: Any) -> Workload:
    sizes = {"tokens": 150, "documents": 1, "heads": 2, "v_heads": 4, "head_dim": 16, "gates": "mixed"}
    return Workload(**(sizes | {"dtype": torch.bfloat16} | changes))


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("documents", [1, 3])
def test_expected_result_is_that_of_the_recurrence(regime: str, documents: int) -> None:
    work = workload(gates=regime, documents=documents)
    tensors = work.draw(0, CPU)
    assert tensors[3].max() <= 0 and all(torch.isfinite(x).all() for x in tensors)
    expected, _ = gated_delta_rule_oracle(*tensors, cu_seqlens=torch.tensor(work.offsets()))
    assert relative_error(work.expected(tensors), expected) < 1e-7


def test_regimes_are_what_their_definitions_say() -> None:
    """The slow heads of "mixed" keep what the others forget; a draw follows its seed."""
    rates = -workload(tokens=4096, v_heads=8).draw(0, CPU)[3].mean(1)[0]
    assert (rates[::4] < 2e-2).all() and rates.shape == (8,)
    strong = workload(tokens=4096, v_heads=64, gates="strong").draw(0, CPU)[3]
    assert -14 < strong.mean() < -7  # 8 * E[softplus(n + 1)]
    first, same, other = (workload().draw(seed, CPU)[0] for seed in (0, 0, 1))
    assert torch.equal(first, same) and not torch.equal(first, other)


def test_repeats_are_one_long_document() -> None:
    work = workload(gates="weak")
    tensors = work.draw(0, CPU)
    whole, _ = gated_delta_rule_oracle(*(x.repeat(1, 3, *[1] * (x.dim() - 2)) for x in tensors))
    assert relative_error(work.expected(tensors, 3), whole[:, -work.tokens :]) < 1e-7
    assert relative_error(work.expected(tensors), whole[:, -work.tokens :]) > 0.1


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("documents", [1, 3])
def test_expected_gradients_are_those_of_the_recurrence(regime: str, documents: int) -> None:
    work = workload(gates=regime, documents=documents)
    leaves = tuple(x.double().requires_grad_() for x in work.draw(0, CPU))
    upstream = work.upstream(0, CPU)
    o, _ = gated_delta_rule_oracle(*leaves, cu_seqlens=torch.tensor(work.offsets()))
    exact = torch.autograd.grad(o, leaves, upstream.double())
    found = work.expected_gradients(leaves, upstream)
    assert all(relative_error(x, y) < 1e-6 for x, y in zip(found, exact, strict=True))


@pytest.mark.parametrize("ranks", [3, 4])
def test_a_middle_rank_has_the_gradients_of_its_place_in_the_document(ranks: int) -> None:
    """Every rank holds the same tokens and gets the same gradient of o, as the local copies say."""
    work = workload(gates="mixed")
    draw = Draw.of(work, 0, "backward", CPU)
    assert draw.upstream is not None
    leaves = tuple(x.double().repeat(1, ranks, *[1] * (x.dim() - 2)).requires_grad_() for x in draw.tensors)
    o, _ = gated_delta_rule_oracle(*leaves)
    whole = torch.autograd.grad(o, leaves, draw.upstream.double().repeat(1, ranks, 1, 1))
    own = slice(ranks // 2 * work.tokens, (ranks // 2 + 1) * work.tokens)
    expected, alone = draw.expected(work, ranks).gradients, draw.expected(work, None).gradients
    assert expected is not None and alone is not None
    for (name, found), exact in zip(expected.items(), whole, strict=True):
        assert relative_error(found, exact[:, own]) < 1e-6
        assert relative_error(alone[name], exact[:, own]) > 10 * GRADIENT_BARS[name]
    _, ours = contenders(work, ranks, "torch", {}, CPU)
    assert ours.check is not None
    leaves = draw.leaves()
    grads = torch.autograd.grad(ours.check(*leaves), leaves, draw.upstream)
    for (name, exact), found in zip(expected.items(), grads, strict=True):
        assert relative_error(found, exact) < GRADIENT_BARS[name], name


@pytest.mark.parametrize(("ranks", "v_heads"), [(3, 4), (8, 8), (8, 4)])
def test_middle_rank_starts_from_what_the_copies_made(ranks: int, v_heads: int) -> None:
    """No process group exists, so a collective would raise. By head, this rank's own heads get their true states."""
    work = workload(gates="weak", v_heads=v_heads)
    tensors = work.draw(0, CPU)
    expected = work.expected(tensors, 1 + ranks // 2)
    _, ours = contenders(work, ranks, "torch", {}, CPU)
    assert ours.middle and ours.check is not None
    assert relative_error(ours.check(*tensors), expected) < BAR
    assert relative_error(ours.check(*tensors), work.expected(tensors)) > 10 * BAR
    timed = ours.call(*tensors)
    assert timed.shape == expected.shape and torch.isfinite(timed).all()
    context = middle_context(work.tokens, ranks, CPU)
    assert (context.rank, context.world_size, context.local_tokens) == (ranks // 2, ranks, work.tokens)
    assert context.exchange == ("allgather" if ranks == 3 else "sharded")
    # Eight ranks with four heads: this one folds none of them, and takes part all the same.
    owned = {(3, 4): slice(0, 4), (8, 8): slice(4, 5), (8, 4): slice(2, 2)}[ranks, v_heads]
    if owned.start < owned.stop:
        assert relative_error(timed[:, :, owned], expected[:, :, owned]) < BAR


def test_local_copies_have_the_sizes_of_what_they_stand_for() -> None:
    comm, local = LocalCopies(1, 3), torch.arange(12.0).view(6, 2)
    assert torch.equal(comm.all_gather(local).wait(), torch.stack([local] * 3))
    received = comm.all_to_all(local, [1, 2, 3], [2, 2, 2]).wait()
    assert torch.equal(received, local[1:3].repeat(3, 1))
    assert comm.all_to_all(local[:3], [1, 1, 1], [1, 3, 0]).wait().shape == (4, 2)
    assert torch.equal(comm.all_to_all(local[:4], [2, 0, 2], [1, 1, 1]).wait(), torch.zeros(3, 2))
    with pytest.raises(RuntimeError, match="there is none"):
        _ = comm.group


def test_packed_documents_reach_every_op() -> None:
    work = workload(documents=3)
    tensors = work.draw(0, CPU)
    peers = {"peer": Peer(op=chunk_gated_delta_rule, middle_context=lambda *_: None, rank_context=lambda *_: None)}
    ours, theirs = contenders(work, None, "torch", peers, CPU)
    assert (ours.name, theirs.name) == ("flashqla_cp", "peer")
    for contender in (ours, theirs):
        assert contender.check is not None
        assert relative_error(contender.check(*tensors), work.expected(tensors)) < BAR


def test_unknown_regime_is_refused() -> None:
    with pytest.raises(ValueError, match="gates: got 'weird', expected one of init, mixed, weak, zero, strong"):
        draw_gates("weird", 8, 2, torch.Generator())


def test_cost_counts_each_byte_and_product_once() -> None:
    work = workload(tokens=65536, heads=16, v_heads=32, head_dim=128)
    traffic, operations = bench_timing.cost(work, "forward")
    assert traffic == 65536 * (2 * 2 * (16 + 32) * 128 + 2 * 4 * 32)
    by_hand = 1024 * 2 * (32 * (3 * 64 * 128 * 128 + 2 * 64 * 64 * 128 + 64**3 // 3) + 16 * 2 * 64 * 64 * 128)
    assert operations == by_hand == pytest.approx(0.315e12, rel=1e-3)
    ceilings = bench_timing.Ceilings(copy_bytes=4.24e12, operations=716e12, dtype=torch.bfloat16)
    assert ceilings.floor_ms(work, "forward") == pytest.approx(0.440, abs=1e-3)
    short = workload(tokens=6 * 65, documents=6)  # every document ends in a chunk of one token
    assert bench_timing.cost(short, "forward")[1] == 2 * bench_timing.cost(workload(tokens=384), "forward")[1]
    back_traffic, back_operations = bench_timing.cost(work, "backward")
    assert back_traffic == 65536 * (2 * (4 * 16 + 3 * 32) * 128 + 4 * 4 * 32)
    assert back_operations == 1024 * 32 * 14.75 * 2 * 64 * 128 * 128
    assert bench_timing.cost(work, "step") == (traffic + back_traffic, operations + back_operations)
    assert ceilings.floor_ms(work, "backward") == pytest.approx(1.416, abs=1e-3)
    assert ceilings.floor_ms(work, "step") == pytest.approx(0.440 + 1.416, abs=2e-3)
