"""What the tests of the backward share: a call, its gradients, and those of the fp64 oracle."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from flashqla_cp import chunk_gated_delta_rule
from flashqla_cp.kernels.host import tables
from flashqla_cp.testing.metrics import relative_l2
from flashqla_cp.testing.oracle import gated_delta_rule_oracle

NAMES = ("q", "k", "v", "g", "beta", "initial_state")
BARS = {"q": 1e-2, "k": 1e-2, "v": 1e-2, "g": 2e-2, "beta": 1e-2, "initial_state": 1e-2}


@contextmanager
def finely(chunks=2):
    """Cut chains into segments of so many chunks, so that short documents have several in a row."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "segment_chunks", lambda *_: chunks)
        yield


def upstream(o, state, seed=3):
    """Gradients of the outputs, of ordinary size."""
    generator = torch.Generator().manual_seed(seed)
    do = torch.randn(o.shape, generator=generator).to(o.dtype)
    return do, None if state is None else torch.randn(state.shape, generator=generator)


def leaves_of(tensors, initial=None):
    """Fresh leaves of q, k, v, g, beta and the initial state, which may be None."""
    return [None if x is None else x.detach().clone().requires_grad_() for x in (*tensors, initial)]


def gradients_of(tensors, initial=None, **options):
    """Gradients by name, of the op with states out if states come in."""
    leaves = leaves_of(tensors, initial)
    o, state = chunk_gated_delta_rule(
        *leaves[:5],
        initial_state=leaves[5],
        output_final_state=initial is not None,
        backend="tilelang",
        **options,
    )
    do, dstate = upstream(o, state)
    outputs = ((o, do),) if state is None else ((o, do), (state, dstate))
    torch.autograd.backward(*zip(*outputs, strict=True))
    return {name: x.grad for name, x in zip(NAMES, leaves, strict=True) if x is not None}


def expected_of(tensors, initial=None, offsets=None, l2norm=False):
    """The same of the oracle in fp64."""
    leaves = leaves_of([x.double() for x in tensors], None if initial is None else initial.double())
    cu = None if offsets is None else torch.tensor(offsets)
    o, state = gated_delta_rule_oracle(*leaves[:5], initial_state=leaves[5], cu_seqlens=cu, use_qk_l2norm=l2norm)
    do, dstate = upstream(tensors[2], state.float())
    loss = (o * do.double()).sum() + (0 if initial is None else (state * dstate.double()).sum())
    loss.backward()
    return {name: x.grad for name, x in zip(NAMES, leaves, strict=True) if x is not None}


def hold(found, expected, bars=BARS):
    """Every gradient is within its bar."""
    errors = {name: float(relative_l2(found[name], expected[name])) for name in expected}
    assert found.keys() == expected.keys()
    assert all(errors[name] <= bars[name] for name in errors), errors
    return errors
