"""How finely chains are cut: as the backward wants it where one follows, coarser where none does."""

from __future__ import annotations

import pytest
import torch

from flashqla_cp import chunk_gated_delta_rule
from flashqla_cp.kernels import tuning
from flashqla_cp.kernels.arch import arch_by_name
from flashqla_cp.kernels.host import launcher
from flashqla_cp.kernels.tuning import segment_chunks
from flashqla_cp.testing.inputs import make_inputs

TOKENS = 8192 + 64


@pytest.mark.parametrize("tokens", (32768, 65536, 131072))
def test_whole_heads_fill_a_device_with_fewer_pieces_than_a_slab(tokens):
    assert segment_chunks(tokens, 32, 132, trains=False) == tokens // 64 // 4  # 4 pieces of 32 heads, 132 processors
    assert segment_chunks(tokens, 32, 132, trains=True) <= 64


def test_short_streams_are_one_slab_and_cut_alike():
    assert segment_chunks(8192, 32, 132, trains=False) == segment_chunks(8192, 32, 132, trains=True)


@pytest.mark.parametrize("packed", (False, True))
def test_a_call_is_cut_by_whether_a_backward_may_follow(packed, monkeypatch):
    monkeypatch.setattr(tuning, "SCRATCH_BUDGET", 2**20)  # a head a slab
    found = []
    kernels = {"tables": lambda *given: found.append(given[-1])}  # chunks of a segment stand last
    inputs = {
        name: x.detach().requires_grad_(name == "q")
        for name, x in make_inputs(TOKENS, 1, 8, 64, 64, dtype=torch.bfloat16).items()
        if name in ("q", "k", "v", "g", "beta")
    }
    offsets = torch.tensor([0, TOKENS - 64, TOKENS]) if packed else None

    def run():
        chunk_gated_delta_rule(**inputs, cu_seqlens=offsets, backend="tilelang")

    def load(spec):
        return kernels.get(spec.stage, lambda *_: None)

    with launcher.machine(load, arch_by_name("sm_90a"), 16):
        run()
        with torch.no_grad():
            run()
        inputs["q"].requires_grad_(False)
        run()
    trains, alone = (segment_chunks(TOKENS, 8, 16, trains=trains) for trains in (True, False))
    again = [alone] if packed else []  # the tables of a batch are kept
    assert trains < alone and found == [trains, alone, *again]
