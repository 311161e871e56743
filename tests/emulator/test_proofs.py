"""The proof kernels, under every schedule: right results, the same bits each time, nothing to complain about."""

import pytest
import torch
from proof_table import proofs

PROOFS = {proof.name: proof for proof in proofs()}
SCHEDULES = (("eager", 1), ("lazy", 1), ("random", 1), ("random", 2), ("random", 3))


def run(proof, kernel, schedule, seed, races=True):
    """Outputs and report of one emulated call on seeded inputs."""
    inputs, outputs = proof.make(torch.Generator().manual_seed(0))
    report = kernel(*inputs, *outputs, schedule=schedule, seed=seed, races=races)
    return inputs, outputs, report


@pytest.mark.parametrize("name", PROOFS)
def test_results_and_cleanliness(name, emulated):
    proof, first = PROOFS[name], None
    for schedule, seed in SCHEDULES:
        inputs, outputs, report = run(proof, emulated(name), schedule, seed)
        report.assert_clean()
        for got, expected in zip(outputs, proof.expect(*inputs), strict=True):
            if proof.tolerance == 0:
                assert torch.equal(got, expected.to(got.dtype)), f"{schedule}: not bitwise equal"
            else:
                error = (got.double() - expected).norm() / expected.norm()
                assert error <= proof.tolerance, f"{schedule}: relative error {error:.2e}"
        first = first or [o.clone() for o in outputs]
        assert all(map(torch.equal, first, outputs)), f"{schedule} gives other bits than {SCHEDULES[0][0]}"


@pytest.mark.parametrize("name", [n for n in PROOFS if "product_ss" in n])
def test_races_off_gives_the_same_bits(name, emulated):
    _, checked, _ = run(PROOFS[name], emulated(name), "lazy", 1)
    _, unchecked, report = run(PROOFS[name], emulated(name), "lazy", 1, races=False)
    report.assert_clean()
    assert all(map(torch.equal, checked, unchecked))


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 200])
def test_new_row_counts_need_no_new_kernel(rows, emulated):
    x = torch.randn(rows, 64).bfloat16()
    y = torch.full_like(x, float("nan"))
    emulated("proof_tma_tail-swizzle128-sm_90a")(x, y, schedule="random").assert_clean()
    assert torch.equal(y, -x)


def test_empty_grid_is_refused_as_on_the_device(emulated):
    x = torch.zeros(0, 256)
    report = emulated("proof_row_reduce-sm_90a")(x, x.clone())
    assert not report.finished and report.rules() == {"launch"}
    emulated("proof_row_reduce-sm_90a")(torch.zeros(1, 256), torch.zeros(1, 256)).assert_clean()


def test_host_stub_refuses_wrong_shapes(emulated):
    x = torch.zeros(8, 32).bfloat16()
    report = emulated("proof_tma_tail-swizzle128-sm_90a")(x, x.clone())
    assert not report.finished and "shape[1]" in report.error
    with pytest.raises(AssertionError, match=r"shape\[1\]"):
        report.assert_clean()
