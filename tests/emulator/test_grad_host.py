"""The host side of the backward: which rows, heads and gradients go where, with plain torch for its four kernels."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from importlib import import_module

import pytest
import torch
from grad_cases import expected_of, finely, gradients_of, hold, leaves_of, upstream
from plain_stages import STAGES
from test_op_emulated import OFFSETS, TOKENS, emulated, emulation, inputs_of

from flashqla_cp import chunk_gated_delta_rule
from flashqla_cp.kernels.arch import arch_by_name
from flashqla_cp.kernels.blocks import segments as column
from flashqla_cp.kernels.host import backward, launcher
from flashqla_cp.kernels.spec import make_spec
from flashqla_cp.testing.metrics import relative_l2
from flashqla_cp.testing.oracle import gated_delta_rule_oracle

DIM = 128


@contextmanager
def plain():
    """Emulated forward, plain backward."""
    with finely(), emulation("sm_90a", races=False, plain=STAGES) as launched:
        yield launched


def packed(heads=1, gates="weak"):
    """Tensors of a packed row with a padded tail, of any length of keys, and initial states."""
    q, k, v, g, beta = inputs_of(TOKENS, heads, heads * 2, DIM, gates)
    generator = torch.Generator().manual_seed(1)
    return (q * 0.3, k * 2.5, v, g, beta), torch.randn(len(OFFSETS) - 1, heads * 2, DIM, DIM, generator=generator)


@pytest.mark.parametrize("gates", ("weak", pytest.param("init", marks=pytest.mark.slow)))
def test_packed_documents_with_states_and_norms(gates):
    tensors, initial = packed(gates=gates)
    with plain():
        found = gradients_of(tensors, initial, cu_seqlens=torch.tensor(OFFSETS), use_qk_l2norm_in_kernel=True)
    hold(found, expected_of(tensors, initial, OFFSETS, l2norm=True))
    for name in ("q", "k", "v", "g", "beta"):
        assert torch.all(found[name][:, OFFSETS[-1] :] == 0)


@pytest.mark.slow
def test_slabs_change_no_bit(monkeypatch):
    tensors, initial = packed(heads=3)
    options = {"cu_seqlens": torch.tensor(OFFSETS), "use_qk_l2norm_in_kernel": True}
    results = []
    for budget in (backward.SCRATCH_BUDGET, 1):
        monkeypatch.setattr(backward, "SCRATCH_BUDGET", budget)
        with plain() as launched:
            results.append(gradients_of(tensors, initial, **options))
        assert [spec.stage for spec, _ in launched].count("sweep") == (3 if budget == 1 else 1)
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    hold(results[1], expected_of(tensors, initial, OFFSETS, l2norm=True))


def test_batches_views_dtypes_and_expanded_gradients():
    """Rows of a batch, cut inside the device; views of one projection; fp64 gates; the gradient of a plain sum."""
    x = inputs_of(700, 1, 2, DIM, "weak")
    joined = torch.cat([a.unflatten(1, (2, 350)).squeeze(0) for a in x[:3]], dim=2).requires_grad_()
    g, beta = (a.unflatten(1, (2, 350)).squeeze(0).double().requires_grad_() for a in x[3:])
    with plain() as launched:
        o, _ = chunk_gated_delta_rule(*joined.split([1, 1, 2], dim=2), g, beta, backend="tilelang")
        o.sum().backward()
    assert "clear_rows" not in {spec.stage for spec, _ in launched}
    wide = [a.detach().double().requires_grad_() for a in (joined, g, beta)]
    gated_delta_rule_oracle(*wide[0].split([1, 1, 2], dim=2), *wide[1:])[0].sum().backward()
    assert joined.grad.dtype == torch.bfloat16 and g.grad.dtype == beta.grad.dtype == torch.float64
    for found, expected in zip((joined, g, beta), wide, strict=True):
        assert relative_l2(found.grad, expected.grad) <= 1e-2


@pytest.mark.parametrize("double", (pytest.param(False, marks=pytest.mark.slow), True))
def test_gates_and_write_strengths_made_inside(double):
    q, k, v, _, _ = inputs_of(300, 1, 2, DIM, "weak")
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randn(1, 300, 2, generator=generator).bfloat16() for _ in range(2))
    A_log, dt_bias = torch.tensor([-3.0, -1.0]), torch.tensor([0.5, -1.0])
    initial = torch.randn(1, 2, DIM, DIM, generator=generator)
    a[:, 120, 0] = 6000.0  # held at the floor: a full reset
    wide = [x.double().requires_grad_() for x in (q, k, v, a, b, A_log, dt_bias, initial)]
    a[:, 290:] = float("nan")  # of no document
    own = [x.clone().requires_grad_() for x in (q, k, v, a, b, A_log, dt_bias, initial)]
    with plain():
        o, state = chunk_gated_delta_rule(
            *own[:5],
            use_gate_in_kernel=True,
            A_log=own[5],
            dt_bias=own[6],
            cu_seqlens=torch.tensor([0, 290]),
            initial_state=own[7].mT,
            output_final_state=True,
            state_v_first=True,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=double,
            backend="tilelang",
        )
        do, dstate = upstream(o, state)
        torch.autograd.backward((o, state), (do, dstate))
    gate = (-wide[5].exp() * torch.nn.functional.softplus(wide[3] + wide[6])).clamp(min=-128.0)
    strength = wide[4].sigmoid() * (2 if double else 1)
    o, state = gated_delta_rule_oracle(
        *wide[:3], gate, strength, initial_state=wide[7], cu_seqlens=[0, 290], use_qk_l2norm=True
    )
    torch.autograd.backward((o, state), (do.double(), dstate.mT.double()))
    assert own[3].grad[0, 120, 0] == 0
    for name, found, expected in zip("q k v a b A_log dt_bias initial".split(), own, wide, strict=True):
        assert found.grad.dtype == found.dtype
        if name not in ("A_log", "dt_bias"):
            assert relative_l2(found.grad, expected.grad) <= (2e-2 if name == "a" else 1e-2), name
    # Sums over tokens, which cancel: beside what was summed.
    shifted = wide[3] + wide[6]
    for parameter, slope in ((6, 1.0), (5, torch.nn.functional.softplus(shifted) / shifted.sigmoid())):
        size = (wide[3].grad * slope).abs().sum((0, 1))
        assert torch.all((own[parameter].grad - wide[parameter].grad).abs() <= 5e-3 * size)


def test_ghosts_and_foreign_numbers_change_no_bit():
    tensors = inputs_of(300, 1, 2, DIM, "weak")
    spoiled = [x.clone() for x in tensors]
    for x in spoiled:
        x[:, 90:140], x[:, 280:] = float("nan"), float("inf")
    initial = torch.randn(3, 2, DIM, DIM, generator=torch.Generator().manual_seed(1))
    more = torch.cat([initial, torch.zeros(120, 2, DIM, DIM)])
    results = []
    for inputs, states, offsets in (
        (tensors, initial, [0, 90, 140, 280]),
        (spoiled, more, [0, 90, 140, 280] + [280] * 120),
    ):
        leaves = leaves_of(inputs, states)
        with plain():
            o, state = chunk_gated_delta_rule(
                *leaves[:5],
                initial_state=leaves[5],
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                cu_seqlens=torch.tensor(offsets),
                backend="tilelang",
            )
            do, _ = upstream(o, None)
            _, dstate = upstream(o, state[:3])
            dstate = torch.cat([dstate, torch.ones(len(states) - 3, 2, DIM, DIM)])
            torch.autograd.backward((o, state), (do, dstate))
        assert torch.all(leaves[5].grad[3:] == 1)
        rows = [part for x in leaves[:5] for part in (x.grad[:, :90], x.grad[:, 140:])]
        results.append([*rows, leaves[5].grad[[0, 2]]])
    assert all(map(torch.equal, *results))


def test_offsets_rewritten_before_the_backward(monkeypatch):
    """Offsets that stay where they are, as on a GPU, may be others by the time of the backward."""
    monkeypatch.setattr(import_module("flashqla_cp.checks"), "offsets_left_on", lambda q, name, offsets: offsets)
    tensors, initial = packed()
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)
    results = []
    for rewrite in (False, True):
        leaves, given = leaves_of(tensors), offsets.clone()
        with plain():
            o, _ = chunk_gated_delta_rule(
                *leaves[:5],
                initial_state=initial,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                cu_seqlens=given,
                backend="tilelang",
            )
            if rewrite:
                given.fill_(0)
            o.backward(upstream(o, None)[0])
        results.append([x.grad for x in leaves[:5]])
    assert all(map(torch.equal, *results))


def test_only_the_final_states_have_a_gradient():
    tensors, initial = packed()
    leaves = leaves_of(tensors)
    with plain() as launched:
        _, state = chunk_gated_delta_rule(
            *leaves[:5],
            initial_state=initial,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=torch.tensor(OFFSETS),
            backend="tilelang",
        )
        dstate = upstream(leaves[2], state)[1]
        state.backward(dstate)
    assert not any(spec.has("initial_grad") for spec, _ in launched)  # nobody asks for it
    wide = leaves_of([x.double() for x in tensors])
    _, state = gated_delta_rule_oracle(
        *wide[:5], initial_state=initial.double(), cu_seqlens=torch.tensor(OFFSETS), use_qk_l2norm=True
    )
    state.backward(dstate.double())
    assert torch.all(leaves[0].grad == 0)
    for name, found, expected in zip("kvgb", leaves[1:5], wide[1:5], strict=True):
        assert relative_l2(found.grad, expected.grad) <= (2e-2 if name == "g" else 1e-2), name


def test_without_gradients_nothing_is_kept_or_run():
    tensors, initial = packed()
    launches = []
    for tracked in (False, True):
        leaves = leaves_of(tensors, initial) if tracked else [*tensors, initial]
        with plain() as launched:
            chunk_gated_delta_rule(
                *leaves[:5],
                initial_state=leaves[5],
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                cu_seqlens=torch.tensor(OFFSETS),
                backend="tilelang",
            )
        launches.append([spec for spec, _ in launched])
    assert launches[0] == launches[1]
    with plain(), torch.no_grad():
        o, _ = chunk_gated_delta_rule(*leaves_of(tensors)[:5], backend="tilelang")
    assert o.grad_fn is None


@pytest.mark.parametrize("tokens", (0, 5))
def test_nothing_but_empty_documents(tokens):
    tensors = [x[:, :tokens] for x in inputs_of(8, 1, 2, DIM, "weak")]
    initial = torch.randn(2, 2, DIM, DIM)
    with plain():
        found = gradients_of(tensors, initial, cu_seqlens=torch.tensor([0, 0, 0]))
    assert torch.equal(found["initial_state"], upstream(tensors[2], initial)[1])
    assert all(torch.all(found[name] == 0) for name in ("q", "k", "v", "g", "beta"))


def _expected_rows(lengths, emits, receives, most):
    """ENTRY, EXIT, LAST, GRAD_ENTRY, GRAD_EXIT of every segment, and the gradients' links by their rows."""
    segments, links, states, gradients = [], {}, 0, 0
    for chain, (length, emit, receive) in enumerate(zip(lengths, emits, receives, strict=True)):
        parts = ((length + 63) // 64 + most - 1) // most
        if not parts:
            continue
        front, behind = gradients, gradients + receive
        if parts - 1 + receive:
            links[front] = (parts - 1 + receive, chain, states + 1 - receive)
        for part in range(parts):
            last = part == parts - 1
            segments.append(
                (
                    states + part - 1 if part else -1,
                    states + part if not last or emit else -1,
                    int(last),
                    -1 if last else behind + part,
                    behind + part - 1 if part or receive else -1,
                )
            )
        states, gradients = states + parts - 1 + emit, gradients + parts - 1 + receive
    return segments, links


@pytest.mark.parametrize("exchange", (False, True))
def test_rows_of_gradients(exchange):
    lengths, most = [200, 0, 64, 500, 1, 700, 0, 130], 2
    flags = list(itertools.islice(itertools.cycle([(0, 0), (1, 0), (0, 1), (1, 1), (1, 1)]), len(lengths)))
    emits, receives = zip(*(flags if exchange else [(0, 0)] * len(lengths)), strict=True)
    end = torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    start, total = end - torch.tensor(lengths, dtype=torch.int32), sum(lengths)
    widths = (column.COLUMNS, column.CHUNK_COLUMNS, column.LINK_COLUMNS, column.LINK_COLUMNS)
    segments, chunks, links, back = (torch.full((40, n), -7, dtype=torch.int32) for n in widths)
    back = back if exchange else links
    base = torch.empty(4 if exchange else 3, len(lengths) + 1, dtype=torch.int32)
    sides = [torch.tensor(x, dtype=torch.int32) for x in (emits, receives)]
    kernel = emulated(make_spec("tables", arch_by_name("sm_90a"), flags={"exchange": exchange}))
    kernel(start, end, *sides, base, chunks, segments, links, back, total, most).assert_clean()
    expected, expected_links = _expected_rows(lengths, emits, receives, most)
    columns = [column.ENTRY, column.EXIT, column.LAST, column.GRAD_ENTRY, column.GRAD_EXIT]
    assert [tuple(row) for row in segments[: len(expected), columns].tolist()] == expected
    assert {i: tuple(row) for i, row in enumerate(back.tolist()) if row[0]} == expected_links
    assert torch.all(segments[len(expected) :, columns] == torch.tensor([-1, -1, 0, -1, -1]))
    begun = [chain if part == 0 else -1 for chain, n in enumerate(lengths) for part in range((n + 63) // 64)]
    assert chunks[:, 2].tolist() == begun + [-1] * (40 - len(begun))


@pytest.mark.parametrize(
    ("given", "expected"), (({}, -24.0), ({"forget_below": 2**-10}, -10.0), ({"forget_below": 0}, -float("inf")))
)
def test_what_counts_as_forgotten_reaches_the_maps(given, expected):
    last = {}

    def loader(spec):
        return lambda *arguments: last.update({spec.stage: arguments[-1]})

    with finely(), launcher.machine(loader, arch_by_name("sm_90a"), 6):
        tensors = [x.requires_grad_() for x in inputs_of(300, 1, 2, 64, "weak")]
        chunk_gated_delta_rule(*tensors, backend="tilelang", **given)[0].sum().backward()
    assert last["summary"] == last["summary_grad"] == expected
