"""The public convolution on emulated kernels, under every schedule, against the oracle."""

from __future__ import annotations

import pytest
import torch
from conv_cases import B16, F16, F32, OFFSETS, Conv
from static_checks import all_faults
from test_op_emulated import ARCHES, SCHEDULES, emulation

from flashqla_cp.kernels.arch import arch_by_name
from flashqla_cp.kernels.build import build
from flashqla_cp.kernels.host.causal_conv import readable_rows
from flashqla_cp.kernels.stages import rows


def check(case, arch="sm_90a", **how):
    given, dy = case.draw()
    with emulation(arch, **how) as launched:
        found = case.run(given, dy)
    case.hold(found, case.expected(given, dy))
    return [spec for spec, _ in launched]


@pytest.mark.parametrize("arch", ARCHES)
def test_clean_and_right_at_random(arch):
    specs = check(Conv(), arch, schedule="random")
    assert [spec.stage for spec in specs] == ["conv_places", "causal_conv", "causal_conv_grad"]
    for spec in specs:
        assert all_faults(build(spec)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("arch", ARCHES)
def test_clean_under_every_schedule(arch, schedule, seed):
    check(Conv(), arch, schedule=schedule, seed=seed)


CASES = {
    "odd_channels": Conv(channels=37, dtype=B16),
    "two_taps": Conv(width=2, channels=64),
    "three_taps": Conv(width=3, channels=64, silu=False),
    "fp32": Conv(dtype=F32, channels=40, bias=False),
    "fp32_odd": Conv(dtype=F32, channels=5, width=2),
    "fp16": Conv(dtype=F16, channels=40, silu=False),
    "wide_parameters": Conv(wide=F32, channels=40),
    "no_bias": Conv(channels=40, bias=False),
    "whole_rows": Conv(channels=16, offsets=None, tokens=250),
    "one_token": Conv(channels=16, offsets=None, tokens=1),
}


@pytest.mark.parametrize("name", [n if n == "odd_channels" else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_dtypes_widths_and_channels(name):
    check(CASES[name], schedule="random")


def test_a_batch_of_rows_and_a_wider_weight():
    """Rows of a batch are documents; a parameter that is neither x's dtype nor fp32 counts as fp32."""
    case = Conv(channels=16, offsets=None, tokens=90)
    given, dy = case.draw()
    given[2] = given[2].to(F16)
    rows_of = [given[0].view(3, 30, 16), *given[1:]]
    with emulation("sm_90a", races=False):
        found = case.run(rows_of, dy.view(3, 30, 16))
    case.hold(found, case.expected(rows_of, dy.view(3, 30, 16)))


def test_views_are_read_in_place():
    """A column slice of a projection gives the bits of its copy; what no vector can read is copied."""
    case = Conv(channels=24)
    (x, *parameters), dy = case.draw()
    wide = torch.full((1, case.tokens, 56), torch.nan, dtype=B16)
    wide[..., 16:40] = x
    view = wide[..., 16:40]
    assert readable_rows(view[0]).data_ptr() == view.data_ptr()
    odd = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)
    assert odd.data_ptr() % 16 and readable_rows(odd[0]).data_ptr() != odd.data_ptr()
    with emulation("sm_90a", races=False):
        plain = case.run([x, *parameters], dy)
        for changed in (view, odd, x.mT.contiguous().mT):
            found = case.run([changed, *parameters], dy)
            assert all(torch.equal(found[name], plain[name]) for name in plain)
        found = case.run([x, *parameters], torch.cat([dy, dy], -1)[..., 24:])
        assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_ghost_documents_and_foreign_numbers_change_no_bit():
    case = Conv(channels=16)
    given, dy = case.draw()
    spoiled, spoiled_dy = given[0].clone(), dy.clone()
    for x in (spoiled, spoiled_dy):
        x[:, 71:73] = float("nan")
        x[:, 76:200] = float("inf")
        x[:, 290:] = float("nan")
    kept = [*range(71), *range(73, 76), *range(200, 290)]
    with emulation("sm_90a", races=False):
        plain = case.run(given, dy)
        padded = case.run(given, dy, offsets=torch.tensor([*OFFSETS, *[290] * 120]))
        found = case.run([spoiled, *given[1:]], spoiled_dy)
    assert all(torch.equal(padded[name], plain[name]) for name in plain)
    for name in ("y", "x"):
        assert torch.equal(found[name][:, kept], plain[name][:, kept]), name
        assert torch.all(found[name][:, 290:] == 0), name


def test_two_runs_give_the_same_bits():
    case = Conv()
    results = []
    for seed in (1, 2):
        with emulation("sm_90a", schedule="random", seed=seed, races=False):
            results.append(case.run(*case.draw()))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_offsets_that_lie_stay_inside_the_tensors():
    """Offsets on a device are not checked: whatever they are, the emulator sees no access outside."""
    case = Conv(channels=16, tokens=40, offsets=None)
    given, dy = case.draw()
    for offsets in ([3, 20, 90], [0, 30, 10, 20], [-5, 12, 39], [50, 60]):
        ends = torch.tensor(offsets, dtype=torch.int32)
        with emulation("sm_90a", races=False), pytest.MonkeyPatch.context() as patch:
            patch.setattr("flashqla_cp.checks.offsets_left_on", lambda *_, ends=ends: ends)
            found = case.run(given, dy, offsets=ends)
        assert all(torch.isfinite(x).all() for x in found.values())


def test_nothing_to_do():
    for case in (Conv(channels=16, tokens=0, offsets=None), Conv(channels=16, tokens=5, offsets=(0,))):
        given, dy = case.draw()
        with emulation("sm_90a", races=False):
            found = case.run(given, dy)
        assert all(torch.all(x == 0) for x in found.values())


def ahead_of(arch):
    """What warm-up compiles for the convolution."""
    choices = {"dtype": ["bfloat16"], "head_dim": [], "ratio": [], "conv_width": [4]}
    return [spec for spec in rows(arch_by_name(arch), choices) if "conv" in spec.stage]


@pytest.mark.parametrize("arch", ARCHES)
def test_warm_up_lists_what_runs(arch):
    given, dy = Conv(channels=16).draw()
    with emulation(arch, plain=dict.fromkeys(("conv_places", "causal_conv", "causal_conv_grad"), fill)) as launched:
        Conv(channels=16).run(given, dy)
    assert len(launched) == 3 and {spec for spec, _ in launched} <= set(ahead_of(arch))


def fill(spec, *arguments):
    arguments[-1].zero_()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
def test_no_kernel_spills(arch):
    specs = ahead_of(arch)
    assert {"conv_places", "causal_conv", "causal_conv_grad", "conv_halo_grad"} == {spec.stage for spec in specs}
    for spec in specs:
        assert all_faults(build(spec)) == [], spec.label()
