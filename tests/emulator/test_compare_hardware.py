"""What counts as agreement between emulator and hardware, and the recorded comparison."""

import json
from pathlib import Path

import compare_hardware
import pytest
import torch
from proof_table import proofs

RESULTS = Path(__file__).parent / "results" / "h200.json"


def test_agreement_is_bitwise_or_close():
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    near, far = x + 1e-6, x * 1.01
    assert compare_hardware.compare_outputs(x.clone(), x, bitwise=True)["agrees"]
    assert not compare_hardware.compare_outputs(near, x, bitwise=True)["agrees"]
    assert compare_hardware.compare_outputs(near, x, bitwise=False)["agrees"]
    assert not compare_hardware.compare_outputs(far, x, bitwise=False)["agrees"]
    assert not compare_hardware.compare_outputs(x * float("nan"), x, bitwise=False)["agrees"]


def test_inputs_survive_the_file():
    """bfloat16 travels as bits; everything else as it is."""
    for proof in proofs():
        for tensor in proof.make(torch.Generator().manual_seed(compare_hardware.SEED))[0]:
            array = compare_hardware._to_array(tensor)
            assert torch.equal(compare_hardware._to_tensor(array, tensor), tensor)


@pytest.mark.skipif(not RESULTS.exists(), reason="no comparison with hardware is recorded yet")
def test_recorded_comparison_covers_every_kernel_and_agrees():
    recorded = json.loads(RESULTS.read_text())
    names = {proof.name for proof in proofs() if proof.spec.target.family == "sm90"}
    assert set(recorded["kernels"]) == names and recorded["agreeing"] == len(names)
    for name, row in recorded["kernels"].items():
        must = next(p.bitwise for p in proofs() if p.name == name)
        assert row["must_be_bitwise"] == must
        assert all(o["bitwise"] if must else o["relative_l2"] <= recorded["close"] for o in row["outputs"])
    assert {"gpu", "driver", "torch", "tilelang", "cuda"} <= set(recorded["versions"])
