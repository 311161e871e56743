"""Gradients of the public op on emulated kernels, under every schedule, against the oracle."""

from __future__ import annotations

import pytest
import torch
from grad_cases import expected_of, finely, gradients_of, hold
from test_op_emulated import LENGTHS, OFFSETS, SCHEDULES, emulation, everything, inputs_of, keys_of_any_length

# The kernels of the backward that are there.
ARCHES = ("sm_90a",)


def check(arch, tensors, offsets=None, initial=None, l2norm=False, **how):
    """All gradients are within their bars, and 0 in the padded tail."""
    cu = None if offsets is None else torch.tensor(offsets)
    with finely(), emulation(arch, **how):
        found = gradients_of(tensors, initial, cu_seqlens=cu, use_qk_l2norm_in_kernel=l2norm)
    errors = hold(found, expected_of(tensors, initial, offsets, l2norm))
    for name in ("q", "k", "v", "g", "beta"):
        assert offsets is None or torch.all(found[name][:, offsets[-1] :] == 0), name
    return errors


@pytest.mark.parametrize("arch", ARCHES)
def test_every_kernel_is_clean_at_random(arch):
    check(arch, **everything(), schedule="random")


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("arch", ARCHES)
def test_every_kernel_is_clean_under_every_schedule(arch, schedule, seed):
    check(arch, **everything(), schedule=schedule, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("gates", ("init", "zero", "strong"))
@pytest.mark.parametrize("arch", ARCHES)
def test_gates_that_forget_and_gates_that_do_not(arch, gates):
    check(arch, **everything(gates=gates), races=False)


@pytest.mark.slow
@pytest.mark.parametrize("fill", (-20.0, -90.0, 0.0, float("-inf")))
@pytest.mark.parametrize("arch", ARCHES)
def test_extreme_gates(arch, fill):
    q, k, v, g, beta = inputs_of(200, 1, 2, 128, "weak")
    g[:, 70 if fill < -80 else slice(None)] = fill
    with emulation(arch, races=False):
        found = gradients_of((q, k, v, g, beta))
    expected = expected_of((q, k, v, g.clamp(min=-700), beta))
    assert all(torch.isfinite(dx).all() for dx in found.values())
    if fill == -20.0:  # nothing of it comes through
        del found["g"], expected["g"]
    hold(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize(("dim", "heads", "ratio"), ((64, 2, 1), (64, 1, 3), (128, 1, 3), (64, 1, 8), (128, 2, 1)))
@pytest.mark.parametrize("arch", ARCHES)
def test_head_sizes_ratios_and_dtypes(arch, dim, heads, ratio, dtype):
    check(arch, **everything(dim, heads, ratio, dtype=dtype), schedule="random")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("arch", ("sm_90a", "sm_100a"))
def test_keys_of_any_length(arch, dtype):
    case = keys_of_any_length(everything(64, 1, 1, dtype=dtype))
    with finely(), emulation(arch, schedule="random"):
        options = {"cu_seqlens": torch.tensor(OFFSETS), "use_qk_l2norm_in_kernel": True}
        found = gradients_of(case["tensors"], case["initial"], **options)
    expected = expected_of(case["tensors"], case["initial"], OFFSETS, True)
    if dtype == torch.float16:  # the gradients of keys that all but vanish are above its largest number
        ordinary = LENGTHS[torch.arange(found["k"].shape[1]) % len(LENGTHS)] >= 1
        assert expected["k"][:, ~ordinary].abs().max() > torch.finfo(dtype).max
        found["k"], expected["k"] = found["k"][:, ordinary], expected["k"][:, ordinary]
    hold(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
def test_two_runs_give_the_same_bits(arch):
    case = everything()
    options = {"cu_seqlens": torch.tensor(OFFSETS), "use_qk_l2norm_in_kernel": True}
    results = []
    for seed in (1, 2):
        with emulation(arch, schedule="random", seed=seed, races=False):
            results.append(gradients_of(case["tensors"], case["initial"], **options))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("arch", ARCHES)
def test_gates_of_strong_decay_are_exact_beside_the_gradient_of_a_state(arch):
    """What a token's gate changes is 2e-9 of what stands beside it in the sums, and comes through all the same."""
    q, k, v, g, beta = inputs_of(100, 1, 1, 64, "weak")
    g[:] = -20.0
    initial = torch.randn(1, 1, 64, 64, generator=torch.Generator().manual_seed(1))
    with emulation(arch, races=False):
        found = gradients_of((q, k, v, g, beta), initial)
    hold(found, expected_of((q, k, v, g, beta), initial))


@pytest.mark.parametrize("arch", ARCHES)
def test_gates_that_scale_no_state_have_no_gradient(arch):
    tensors, offsets = inputs_of(100, 1, 1, 64, "weak"), [0, 40, 100]
    with emulation(arch, races=False):
        found = gradients_of(tensors, cu_seqlens=torch.tensor(offsets))
    hold(found, expected_of(tensors, offsets=offsets))
    assert torch.all(found["g"][0, offsets[:-1]] == 0) and torch.all(found["g"][0, 1:40] != 0)
