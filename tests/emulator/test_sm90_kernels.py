"""Kernels of sm_90: what their machine code holds."""

import pytest
from static_checks import all_faults, find_disassembler, opcodes

from flashqla_cp.kernels import stages as stages  # enters the builders
from flashqla_cp.kernels.build import build
from flashqla_cp.kernels.spec import make_spec

BACKWARD = ("replay", "sweep", "summary_grad", "gradients")


@pytest.mark.parametrize(
    "stage", ["solve", "summary", "forward", *(pytest.param(stage, marks=pytest.mark.slow) for stage in BACKWARD)]
)
def test_products_run_on_tensor_cores(stage):
    dtypes = {"qkv": "bfloat16"} | ({"beta": "float32"} if stage in ("solve", "gradients") else {})
    kernel = build(make_spec(stage, "sm_90a", {"head_dim": 128, "ratio": 2}, dtypes, {}))
    faults = all_faults(kernel, most_spilled=64)
    if stage in ("summary", "summary_grad"):
        # Whole blocks end early there, under a condition that the reader of roles cannot follow; the emulator counts.
        faults = [fault for fault in faults if "cannot read which threads run it" not in fault]
    assert faults == []
    if find_disassembler():
        found = opcodes(kernel)
        assert "HGMMA" in found
        assert ("HMMA" in found) == (stage == "solve")  # the joins of the inverse are mma.sync in TF32


def test_only_the_context_parallel_chain_knows_a_final_correction():
    """One process has no such parameter, buffer or store: the name is nowhere in what is compiled for it."""
    for flags, known in (((), False), (("final_correction",), True)):
        kernel = build(make_spec("affine_chain", "sm_90a", {"head_dim": 128}, {}, flags))
        assert ("final_correction" in kernel.device_source() + kernel.host_source()) == known
