"""The public op on emulated kernels: every kernel of both architectures, under every schedule, against the oracle."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache

import pytest
import torch
from cta_emulator import load

from flashqla_cp import chunk_gated_delta_rule
from flashqla_cp.kernels.arch import arch_by_name
from flashqla_cp.kernels.build import build
from flashqla_cp.kernels.host import launcher
from flashqla_cp.testing.inputs import make_inputs
from flashqla_cp.testing.metrics import relative_l2
from flashqla_cp.testing.oracle import gated_delta_rule_oracle

PROCESSORS = 6  # few, so that short documents are cut into segments


@cache
def emulated(spec):
    """The kernel of a spec, built once."""
    return load(build(spec))


@contextmanager
def emulation(arch, schedule="eager", seed=1, races=True, plain=None):
    """Run the op's kernels in the emulator; every launch must be clean. Yields the launched (spec, report).

    plain: functions by the name of the stage that they run in place of its kernel.
    """
    launched = []

    def loader(spec):
        def call(*arguments):
            if plain and spec.stage in plain:
                plain[spec.stage](spec, *arguments)
                launched.append((spec, None))
                return
            report = emulated(spec)(*arguments, schedule=schedule, seed=seed, races=races)
            report.assert_clean()
            launched.append((spec, report))

        return call

    with launcher.machine(loader, arch_by_name(arch), PROCESSORS):
        yield launched


def inputs_of(tokens, heads, v_heads, dim, gates, dtype=torch.bfloat16, seed=0):
    """q, k, v in dtype, g and beta fp32, as the op takes them."""
    x = make_inputs(tokens, heads, v_heads, dim, dim, gates=gates, dtype=torch.float32, seed=seed)
    q, k, v = (x[name].detach().to(dtype) for name in "qkv")
    return q, k, v, x["g"].detach().float(), x["beta"].detach().float()


def compare(arch, tensors, offsets=None, initial=None, l2norm=False, **how):
    """Errors of o and of the final states against the fp64 oracle."""
    with emulation(arch, **how), torch.no_grad():
        o, final = chunk_gated_delta_rule(
            *tensors,
            initial_state=initial,
            output_final_state=True,
            use_qk_l2norm_in_kernel=l2norm,
            cu_seqlens=None if offsets is None else torch.tensor(offsets),
            backend="tilelang",
        )
    expected, states = gated_delta_rule_oracle(
        *(x.double() for x in tensors),
        initial_state=None if initial is None else initial.double(),
        cu_seqlens=None if offsets is None else torch.tensor(offsets),
        use_qk_l2norm=l2norm,
    )
    end = tensors[0].shape[1] if offsets is None else offsets[-1]
    assert torch.all(o[:, end:] == 0)
    return relative_l2(o[:, :end], expected[:, :end]), relative_l2(final, states)


ARCHES = ("sm_90a", "sm_100a")
SCHEDULES = (("eager", 1), ("lazy", 1), ("random", 1), ("random", 2), ("random", 3))
BAR = 5e-3
LENGTHS = torch.tensor([0.0, 1.0, 1.0, 1e-5, 1.0, 4e3, 1.0])
# Tails, an empty document, one shorter than a chunk, one cut into segments, and padding behind.
OFFSETS = [0, 150, 150, 171, 570]
TOKENS = 600


def everything(dim=128, heads=1, ratio=2, gates="weak", dtype=torch.bfloat16):
    """Keyword arguments of `compare` with states in and out and norms inside, keys and queries of any length."""
    q, k, v, g, beta = inputs_of(TOKENS, heads, heads * ratio, dim, gates, dtype)
    initial = torch.randn(len(OFFSETS) - 1, heads * ratio, dim, dim, generator=torch.Generator().manual_seed(1))
    return {"tensors": (q * 0.3, k * 2.5, v, g, beta), "offsets": OFFSETS, "initial": initial, "l2norm": True}


def keys_of_any_length(case):
    """The keyword arguments with large values and with LENGTHS times the keys, over and over."""
    q, k, v, g, beta = case["tensors"]
    lengths = LENGTHS[torch.arange(k.shape[1]) % len(LENGTHS)]
    return case | {"tensors": (q, k * lengths[:, None, None].to(k.dtype), v * 60, g, beta), "l2norm": True}


def hold(errors):
    """Both errors of `compare` are within the bar."""
    assert max(errors) <= BAR, errors


@pytest.mark.slow  # the tests of gradients and of sm_100 run the same kernels
@pytest.mark.parametrize("arch", ARCHES)
def test_every_kernel_is_clean_at_random(arch):
    hold(compare(arch, **everything(), schedule="random"))


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("arch", ARCHES)
def test_every_kernel_is_clean_under_every_schedule(arch, schedule, seed):
    hold(compare(arch, **everything(), schedule=schedule, seed=seed))


@pytest.mark.slow
@pytest.mark.parametrize("gates", ("init", "zero", "strong"))
@pytest.mark.parametrize("arch", ARCHES)
def test_gates_that_forget_and_gates_that_do_not(arch, gates):
    hold(compare(arch, **everything(gates=gates), races=False))


@pytest.mark.slow
@pytest.mark.parametrize("fill", (-20.0, -90.0, 0.0, float("-inf")))
@pytest.mark.parametrize("arch", ARCHES)
def test_extreme_gates(arch, fill):
    q, k, v, g, beta = inputs_of(200, 1, 2, 128, "weak")
    g[:, 70 if fill < -80 else slice(None)] = fill
    with emulation(arch, races=False), torch.no_grad():
        o, _ = chunk_gated_delta_rule(q, k, v, g, beta, backend="tilelang")
    expected, _ = gated_delta_rule_oracle(*(x.double() for x in (q, k, v, g.clamp(min=-700), beta)))
    assert relative_l2(o, expected) <= BAR


@pytest.mark.parametrize("arch", ARCHES[:1])
def test_ghost_documents_and_foreign_numbers_change_no_bit(arch):
    tensors = inputs_of(300, 1, 2, 128, "weak")
    spoiled = [x.clone() for x in tensors]
    for x in spoiled:
        x[:, 90:140] = float("nan")
        x[:, 280:] = float("inf")
    outputs = []
    with emulation(arch, races=False), torch.no_grad():
        for inputs, offsets in ((tensors, [0, 90, 140, 280]), (spoiled, [0, 90, 140, 280] + [280] * 120)):
            o, state = chunk_gated_delta_rule(
                *inputs, cu_seqlens=torch.tensor(offsets), output_final_state=True, backend="tilelang"
            )
            outputs.append((o[:, :90], o[:, 140:], state[[0, 2]]))
    assert all(map(torch.equal, *outputs))


@pytest.mark.parametrize("arch", ARCHES[:1])
def test_a_scale_below_zero_and_a_strength_that_is_no_number(arch):
    tensors = inputs_of(130, 1, 2, 128, "weak")
    spoiled = [*tensors[:4], tensors[4].clone()]
    spoiled[4][0, 100, 1] = float("nan")
    with emulation(arch, races=False), torch.no_grad():
        o, _ = chunk_gated_delta_rule(*tensors, scale=-0.2, backend="tilelang")
        hidden, _ = chunk_gated_delta_rule(*spoiled, backend="tilelang")
    expected, _ = gated_delta_rule_oracle(*(x.double() for x in tensors), scale=-0.2)
    assert relative_l2(o, expected) <= BAR
    assert hidden[0, 100:, 1].isnan().all() and hidden[0, :, 0].isfinite().all()


@pytest.mark.parametrize("arch", ARCHES[:1])
def test_one_process_without_cuts_has_no_maps(arch):
    """Nothing of the maps where no document is cut; nothing of a rank's final_correction on one process at all."""
    with emulation(arch, races=False) as launched, torch.no_grad():
        short = inputs_of(64, 1, 2, 128, "weak")
        chunk_gated_delta_rule(*short, backend="tilelang")
        assert {spec.stage for spec, _ in launched} == {"tables", "gate_cumsum", "solve", "forward"}
        chunk_gated_delta_rule(*inputs_of(600, 1, 2, 128, "weak"), backend="tilelang")
    stages = {spec.stage for spec, _ in launched}
    assert {"summary", "affine_chain"} <= stages
    for spec, report in launched:
        assert not spec.has("final_correction") and "final_correction" not in report.source


@pytest.mark.parametrize("arch", ARCHES)
def test_keys_of_any_length_in_half_precision(arch):
    hold(compare(arch, **keys_of_any_length({"tensors": inputs_of(100, 1, 1, 64, "weak", torch.float16)})))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("arch", ARCHES)
def test_keys_of_any_length_in_every_kernel(arch, dtype):
    hold(compare(arch, **keys_of_any_length(everything(64, 1, 1, dtype=dtype)), schedule="random"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize(("dim", "heads", "ratio"), ((64, 2, 1), (64, 1, 3), (128, 1, 3), (64, 1, 8), (128, 2, 1)))
@pytest.mark.parametrize("arch", ARCHES)
def test_head_sizes_ratios_and_dtypes(arch, dim, heads, ratio, dtype):
    hold(compare(arch, **everything(dim, heads, ratio, dtype=dtype), schedule="random"))
