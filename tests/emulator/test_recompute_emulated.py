"""Tiers of what a call keeps for its backward: the bytes of each, and gradients that do not depend on it."""

from __future__ import annotations

import weakref

import plain_stages
import pytest
import torch
import torch.distributed as dist
from grad_cases import finely, gradients_of, leaves_of, upstream
from plain_stages import STAGES
from test_grad_host import DIM, packed, plain
from test_grad_on_ranks import CASES, NAMES, STATES
from test_op_emulated import OFFSETS, PROCESSORS, TOKENS, emulation, inputs_of
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from flashqla_cp import build_cp_context, chunk_gated_delta_rule
from flashqla_cp.kernels.host import backward
from flashqla_cp.kernels.host.memory import RECOMPUTE, training_bytes
from flashqla_cp.parallel.comm import record_collectives
from flashqla_cp.testing.spawn import run_ranks

SIZES = {"num_heads": 1, "num_v_heads": 2, "head_dim": DIM, "processors": PROCESSORS}
DOCUMENTS = len(OFFSETS) - 1


def forward(leaves, recompute, l2norm=True):
    return chunk_gated_delta_rule(
        *leaves[:5],
        initial_state=leaves[5],
        output_final_state=True,
        cu_seqlens=torch.tensor(OFFSETS),
        use_qk_l2norm_in_kernel=l2norm,
        backend="tilelang",
        recompute=recompute,
    )


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("l2norm", (pytest.param(False, marks=pytest.mark.slow), True))
def test_bytes_kept_are_known_beforehand(l2norm, recompute):
    leaves, kept = leaves_of(*packed()), {}
    known = {x.untyped_storage().data_ptr() for x in leaves}

    def keep(x):
        if x.untyped_storage().data_ptr() not in known:
            kept[x.data_ptr()] = x.numel() * x.element_size()
        return x

    with plain(), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        forward(leaves, recompute, l2norm)
    with finely():
        said = training_bytes(
            TOKENS, DOCUMENTS, **SIZES, l2norm=l2norm, num_entries=DOCUMENTS, num_exits=DOCUMENTS, recompute=recompute
        )
    assert said.saved == sum(kept.values())
    assert 0 < said.scratch < backward.SCRATCH_BUDGET // 8  # a small call
    assert (said.saved == 0) == (recompute == "forward")


class Peak(TorchDispatchMode):
    """Counts the bytes of tensors that are alive at a time, but for the storages it is told of."""

    def __init__(self, known):
        super().__init__()
        self.sizes = {x.untyped_storage()._cdata: 0 for x in known}
        self.now = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self.sizes:
                storage = x.untyped_storage()
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.drop, storage._cdata)
        return out

    def drop(self, key):
        self.now -= self.sizes.pop(key)


def uncounted(stage):
    """The stage with its own temporary tensors hidden: the kernel in its place has none."""

    def run(*arguments):
        with _disable_current_modes():
            stage(*arguments)

    return run


@pytest.mark.parametrize("recompute", (pytest.param("none", marks=pytest.mark.slow), "solve", "forward"))
@pytest.mark.parametrize("strided", (pytest.param(False, marks=pytest.mark.slow), True))
def test_scratch_is_known_beforehand(strided, recompute):
    leaves = leaves_of(*packed())
    stages = {name: uncounted(stage) for name, stage in plain_stages.STAGES.items()}
    with finely(), emulation("sm_90a", races=False, plain=stages):
        o, states = forward(leaves, recompute)
        do, dstates = upstream(o, states)
        if strided:
            do = do[..., :1].expand(do.shape)
        peak = Peak((o, states, do, dstates, *leaves))
        with peak:
            torch.autograd.backward((o, states), (do, dstates))
        said = training_bytes(
            TOKENS,
            DOCUMENTS,
            **SIZES,
            l2norm=True,
            num_entries=DOCUMENTS,
            num_exits=DOCUMENTS,
            recompute=recompute,
            strided_do=strided,
        )
    gates = 2 * TOKENS * 2 * 4  # gradients of the gates are in their own dtype once what is largest has gone
    room = said.scratch + sum(x.grad.numel() * x.element_size() for x in leaves) - peak.most
    assert 0 <= room <= gates, room


def test_an_unknown_tier_is_refused():
    with pytest.raises(ValueError, match="recompute: got 'all', expected one of 'none', 'solve', 'forward'"):
        training_bytes(TOKENS, DOCUMENTS, **SIZES, recompute="all")
    with pytest.raises(ValueError, match="recompute: got 'all'"):
        chunk_gated_delta_rule(*inputs_of(8, 1, 2, DIM, "weak"), recompute="all")


@pytest.mark.parametrize("recompute", RECOMPUTE[1:])
def test_gradients_are_those_of_a_call_that_keeps_all(recompute):
    tensors, initial = packed()
    options = {"cu_seqlens": torch.tensor(OFFSETS), "use_qk_l2norm_in_kernel": True}
    found, stages = [], []
    for tier in ("none", recompute):
        with plain() as launched:
            found.append(gradients_of(tensors, initial, **options, recompute=tier))
        stages.append([spec.stage for spec, _ in launched])
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    more = {name: stages[1].count(name) - stages[0].count(name) for name in set(stages[1])}
    again = {"gate_cumsum", "solve"} if recompute == "solve" else {"gate_cumsum", "solve", "summary", "affine_chain"}
    assert {name for name, count in more.items() if count} == again


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_second_derivatives_are_refused(recompute):
    """Nothing depends on the incoming gradient of a linear loss, and a penalty on what came out would be dropped."""
    leaves = leaves_of(*packed())
    with plain():
        o, _ = forward(leaves, recompute)
        with pytest.raises(RuntimeError, match=r"^chunk_gated_delta_rule: is differentiable once"):
            torch.autograd.grad(o.sum(), leaves[1], create_graph=True)


@pytest.mark.parametrize("recompute", RECOMPUTE[1:])
def test_nothing_but_empty_documents(recompute):
    tensors, initial = [x[:, :5] for x in inputs_of(8, 1, 2, DIM, "weak")], torch.randn(2, 2, DIM, DIM)
    with plain():
        found = gradients_of(tensors, initial, cu_seqlens=torch.tensor([0, 0, 0]), recompute=recompute)
    assert torch.equal(found["initial_state"], upstream(tensors[2], initial)[1])


def _sharded(rank, offsets, layout, gates, exchange, recompute):
    torch.set_num_threads(1)
    options = {"token_ranges": layout, "layout": "custom"} if isinstance(layout, list) else {"layout": layout}
    context = build_cp_context(torch.tensor(offsets), dist.group.WORLD, exchange=exchange, **options)
    whole, states = inputs_of(offsets[-1], 1, 2, DIM, gates), STATES[: len(offsets) - 1]
    do, dstates = upstream(whole[2], states)
    found, calls = [], []
    for tier in ("none", recompute):
        leaves = leaves_of([context.shard(x) for x in whole], states)
        with finely(1), emulation("sm_90a", races=False, plain=STAGES), record_collectives() as log:
            results = chunk_gated_delta_rule(
                *leaves[:5],
                initial_state=leaves[5],
                output_final_state=True,
                cp_context=context,
                backend="tilelang",
                recompute=tier,
            )
            sent = len(log)
            torch.autograd.backward(results, (context.shard(do), dstates))
        found.append([x.grad for x in leaves])
        calls.append((log[:sent], log[sent:]))
    equal = {name: torch.equal(*pair) for name, pair in zip(NAMES, zip(*found, strict=True), strict=True)}
    (ahead, behind), (ahead_less, behind_less) = [
        [[(x.name, x.bytes_sent) for x in part] for part in log] for log in calls
    ]
    assert ahead == ahead_less
    assert behind_less == (ahead + behind if recompute == "forward" and exchange != "headwise" else behind)
    return equal


@pytest.mark.parametrize(
    ("case", "recompute"),
    (
        ("zigzag-sharded", "forward"),
        ("without-tokens", "forward"),
        pytest.param("without-tokens", "solve", marks=pytest.mark.slow),
        pytest.param("zigzag-sharded", "solve", marks=pytest.mark.slow),
        pytest.param("contiguous-allgather", "forward", marks=pytest.mark.slow),
        pytest.param("headwise", "forward", marks=pytest.mark.slow),
    ),
)
def test_gradients_on_ranks_do_not_depend_on_it(case, recompute):
    ranks, *arguments = CASES[case]
    for equal in run_ranks(_sharded, ranks, *arguments, recompute, timeout=600.0):
        assert all(equal.values()), equal
