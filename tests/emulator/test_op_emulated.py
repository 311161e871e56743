"""The public op on emulated kernels: every kernel of both architectures, under every schedule, against the oracle."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache

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
def emulation(arch, schedule="eager", seed=1, races=True):
    """Run the op's kernels in the emulator; every launch must be clean. Yields the launched (stage, report)."""
    launched = []

    def loader(spec):
        def call(*arguments):
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
