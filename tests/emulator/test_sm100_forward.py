"""Forward kernels of sm_100: what their machine code holds, and under every schedule clean runs and right results."""

import pytest
import torch
from sm100_kernels import ARCH, EMPTY, PACKED, SCHEDULES, SHORT, hold_code
from static_checks import all_faults, find_disassembler, opcodes
from test_op_emulated import compare, inputs_of

from flashqla_cp.kernels import stages as stages  # enters the builders
from flashqla_cp.kernels.build import build
from flashqla_cp.kernels.spec import make_spec
from flashqla_cp.kernels.tuning import forward_config, summary_config

# name: head_dim, ratio, dtype, initial state, l2norm, offsets, gates
CASES = {
    "packed": (128, 2, torch.bfloat16, False, False, PACKED, "mixed"),
    "normalised-one-drop": (128, 3, torch.bfloat16, True, True, PACKED, "drop"),
    "half-precision-strong": (128, 1, torch.float16, True, False, SHORT, "strong20"),
    "narrow-entered": (64, 1, torch.bfloat16, True, False, PACKED, "weak"),
    "narrow-normalised-short": (64, 2, torch.float16, False, True, SHORT, "drop"),
    "narrow-empty-no-decay": (64, 3, torch.bfloat16, True, True, EMPTY, "zero"),
}


def spec_of(stage, head_dim, **flags):
    dtypes = {"qkv": "bfloat16"} | ({"beta": "float32"} if stage == "solve" else {})
    return make_spec(stage, ARCH, {"head_dim": head_dim, "ratio": 2}, dtypes, flags)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("stage", ["summary", "forward"])
def test_products_and_tensor_memory(stage, head_dim):
    spec = spec_of(stage, head_dim)
    config = (forward_config if stage == "forward" else summary_config)(spec)
    hold_code(build(spec), config, 7 if stage == "forward" else 4)


def test_solve_multiplies_keys_by_tcgen05():
    kernel = build(spec_of("solve", 128))
    assert all_faults(kernel) == []
    if find_disassembler():
        assert {"UTCHMMA", "HMMA"} <= opcodes(kernel)  # the joins are mma.sync in TF32


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_results_under_every_schedule(name):
    head_dim, ratio, dtype, entered, l2norm, offsets, gates = CASES[name]
    known = gates if gates in ("mixed", "weak", "zero") else "weak"
    q, k, v, g, beta = inputs_of(offsets[-1] + 7, 2, 2 * ratio, head_dim, known, dtype)
    if gates == "strong20":
        g.fill_(-20.0)
    if gates == "drop":
        g[:, offsets[-1] // 2] = -90.0
    for x in (q, k, v, g, beta):
        x[:, offsets[-1] :] = float("nan")  # rows of no document
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(len(offsets) - 1, 2 * ratio, head_dim, head_dim, generator=generator)
    errors = {
        compare(
            ARCH,
            (q, k, v, g, beta),
            list(offsets),
            states if entered else None,
            l2norm,
            schedule=schedule,
            seed=seed,
        )
        for schedule, seed in SCHEDULES
    }
    assert len(errors) == 1, "schedules differ"
    assert max(errors.pop()) < 5e-3
