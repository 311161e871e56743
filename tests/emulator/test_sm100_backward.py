"""Backward kernels of sm_100: clean under every schedule, right against plain fp64; what their machine code holds."""

from functools import cache

import chunk_gradients as plain
import pytest
import torch
from cta_emulator import load
from grad_cases import expected_of, gradients_of
from grad_cases import hold as hold_gradients
from sm100_kernels import ARCH, EMPTY, PACKED, SCHEDULES, SHORT, hold_code
from test_op_emulated import emulation, everything

from flashqla_cp.kernels import stages as stages  # enters the builders
from flashqla_cp.kernels.blocks import segments as column
from flashqla_cp.kernels.build import build
from flashqla_cp.kernels.chunks import CHUNK as C
from flashqla_cp.kernels.spec import make_spec
from flashqla_cp.kernels.tuning import gradients_config, replay_config, sweep_config
from flashqla_cp.testing.metrics import relative_l2
from flashqla_cp.testing.oracle import gated_delta_rule_oracle

BAR, EXACT_BAR = 5e-3, 2e-5  # the second of sums of products of what is given
FORGOTTEN = -24.0
B, F = torch.bfloat16, torch.float16
QUICK = {"head_dim": 128, "ratio": 2, "dtype": B, "offsets": (0, 100, 100, 300), "l2norm": True, "heads": 1}
CASES = {
    "packed": {"head_dim": 128, "ratio": 2, "dtype": B, "offsets": PACKED, "gates": "mixed"},
    "normalised-one-drop": {"ratio": 3, "offsets": PACKED, "gates": "drop"}
    | {"head_dim": 128, "dtype": B, "l2norm": True, "heads": 1},
    "half-precision": {"head_dim": 128, "ratio": 1, "dtype": F, "offsets": (0, 1, 40, 103, 368)},
    "twenty": {"head_dim": 128, "ratio": 1, "dtype": B, "offsets": SHORT, "gates": "twenty"},
    "strong": {"head_dim": 128, "ratio": 1, "dtype": B, "offsets": (0, 300, 450), "gates": "strong", "heads": 1},
    "four-to-one": {
        "head_dim": 128,
        "ratio": 4,
        "dtype": F,
        "offsets": (0, 70, 200),
        "gates": "init",
        "heads": 1,
        "l2norm": True,
    },
    "narrow": {"head_dim": 64, "ratio": 1, "dtype": B, "offsets": PACKED},
    "narrow-normalised-short": {
        "head_dim": 64,
        "ratio": 2,
        "dtype": F,
        "offsets": SHORT,
        "gates": "drop",
        "l2norm": True,
    },
    "narrow-empty-no-decay": {
        "head_dim": 64,
        "ratio": 3,
        "dtype": B,
        "offsets": EMPTY,
        "gates": "zero",
        "l2norm": True,
        "heads": 1,
    },
    "narrow-eight-to-one": {
        "head_dim": 64,
        "ratio": 8,
        "dtype": B,
        "offsets": (0, 70, 200),
        "gates": "mixed",
        "heads": 1,
    },
}


def spec_of(stage, x, **flags):
    names = {"qkv": str(x.q.dtype).removeprefix("torch.")}
    if stage == "gradients":
        names["beta"] = str(x.beta.dtype).removeprefix("torch.")
    dims = {"head_dim": x.q.shape[2], "ratio": x.ratio}
    return make_spec(stage, ARCH, dims, names, flags | {"l2norm": x.l2norm})


@cache
def emulated(spec):
    return load(build(spec))


def launch(spec, *arguments, schedule="eager", seed=1, races=True):
    report = emulated(spec)(*arguments, schedule=schedule, seed=seed, races=races)
    report.assert_clean()
    return report


def blank(*shape, dtype=torch.float32):
    return torch.full(shape, float("nan"), dtype=dtype)


def key_scale_of(x):
    return x.key_scale if x.l2norm else x.key_scale[:1]


def check_sweep(x, known=True, first=0, count=None, **how):
    """Sweep of value heads from `first` on, from random gradients behind; known: at the ends of chains too."""
    width, heads, tokens = x.q.shape[2], x.v.shape[1], len(x.v)
    count, chains = count or heads - first, len(x.offsets) - 1
    dcarried, dexit = x.states(x.rows, 5), x.states(chains + 1, 6)
    exit_row = torch.arange(chains, 0, -1, dtype=torch.int32)
    exit_row[0] = -1
    dstates = blank(len(x.chunks), count, width, width, dtype=x.q.dtype)
    dv, dentry = blank(tokens, heads, width, dtype=x.q.dtype), blank(chains, heads, width, width)
    launch(
        spec_of("sweep", x, final_grad=known, initial_grad=known),
        *(x.q, x.k, x.do, x.inverse, x.decay, key_scale_of(x), x.segments, dcarried, dexit, exit_row),
        *(dstates, dv, dentry, x.scale, first),
        **how,
    )
    mine = slice(first, first + count)
    expected = torch.full_like(dv, float("nan"), dtype=torch.float64)
    behind, front = dstates.double().fill_(float("nan")), dentry.double().fill_(float("nan"))
    for segment, row in enumerate(x.segments.tolist()):
        if row[column.START] == row[column.END]:
            continue
        chain, state = row[column.CHAIN], torch.zeros_like(dcarried[0]).double()
        if row[column.GRAD_ENTRY] >= 0:
            state = dcarried[row[column.GRAD_ENTRY]].double()
        elif known and exit_row[chain] >= 0:
            state = dexit[exit_row[chain]].double()
        states, values, state = plain.sweep(x, segment, state)
        for place, n in enumerate(plain.chunks_of(x, segment)):
            c = x.chunk(n)
            behind[n] = states[place, mine]
            expected[c.rows, mine] = values[place, mine, : c.length].movedim(0, 1)
        if known and row[column.ENTRY] < 0:
            front[chain, mine] = state[mine]
    return compare({"dv": (dv, expected), "dstates": (dstates, behind), "dentry": (dentry, front)})


def compare(pairs):
    """Where nothing is expected nothing was written; the rest is within its bar. -> errors by name."""
    errors = {}
    for name, (got, expected) in pairs.items():
        written = ~expected.isnan()
        assert torch.equal(~got.isnan(), written), name
        errors[name] = relative_l2(got[written], expected[written])
        assert errors[name] <= (EXACT_BAR if name in ("dg", "dbeta") else BAR), errors
    return errors


def check_summary_grad(x, known=True, threshold=FORGOTTEN, **how):
    """D of every segment: all of them have a row here."""
    heads, width, chains = x.v.shape[1], x.q.shape[2], len(x.offsets) - 1
    dexit, dboundary = x.states(chains + 1, 6), blank(x.rows, heads, width, width)
    exit_row = torch.arange(chains, 0, -1, dtype=torch.int32)
    exit_row[0] = -1
    launch(
        spec_of("summary_grad", x, final_grad=known),
        *(x.q, x.k, x.do, x.inverse, x.decay, key_scale_of(x), x.bound, x.segments, dexit, exit_row, dboundary),
        *(x.scale, threshold),
        **how,
    )
    expected = torch.full_like(dboundary, float("nan"), dtype=torch.float64)
    for segment, row in enumerate(x.segments.tolist()):
        for head in range(heads if row[column.GRAD_EXIT] >= 0 else 0):
            left = x.bound[head, list(plain.chunks_of(x, segment))].cumsum(0)
            count = min(int((left > threshold).sum()) + 1, len(left))
            state = torch.zeros_like(dboundary[0]).double()
            if known and row[column.LAST] == 1 and left[-1] > threshold and exit_row[row[column.CHAIN]] >= 0:
                state = dexit[exit_row[row[column.CHAIN]]].double()
            expected[row[column.GRAD_EXIT], head] = plain.sweep(x, segment, state, count)[2][head]
    return compare({"dboundary": (dboundary, expected)})


def check_replay(x, known=True, first=0, count=None, **how):
    """Replay of value heads from `first` on, from random states in front; known: at the starts of chains too."""
    heads, width, chains = x.v.shape[1], x.q.shape[2], len(x.offsets) - 1
    count = count or heads - first
    carried, initial = x.states(x.rows, 5), x.states(chains + 1, 6)
    entry_row = torch.arange(chains, 0, -1, dtype=torch.int32)
    entry_row[0] = -1
    states = blank(len(x.chunks), count, width, width, dtype=x.q.dtype)
    values = blank(len(x.chunks), count, C, width, dtype=x.q.dtype)
    launch(
        spec_of("replay", x, initial_state=known),
        *(x.k, x.v, x.inverse, x.decay, key_scale_of(x), x.segments, carried, initial, entry_row),
        *(states, values, first),
        **how,
    )
    front, made = (y.double().fill_(float("nan")) for y in (states, values))
    for segment, row in enumerate(x.segments.tolist()):
        if row[column.START] == row[column.END]:
            continue
        chain, state = row[column.CHAIN], torch.zeros_like(carried[0]).double()
        if row[column.ENTRY] >= 0:
            state = carried[row[column.ENTRY]].double()
        elif known and entry_row[chain] >= 0:
            state = initial[entry_row[chain]].double()
        of = plain.chunks_of(x, segment)
        met, written, _ = plain.replay(x, segment, state)
        front[of], made[of] = met[:, first : first + count], written[:, first : first + count]
        lengths = x.chunks[of, 1]
        assert all(torch.all(values[n, :, length:] == 0) for n, length in zip(of, lengths, strict=True))
    return compare({"states": (states, front), "values": (values, made)})


def check_gradients(x, first=0, count=None, blocks=3, sigmoid=False, double=False, **how):
    """Gradients of value heads from `first` on, of random states, values and their gradients."""
    heads, width, tokens = x.v.shape[1], x.q.shape[2], len(x.v)
    count, half = count or heads - first, x.q.dtype
    mine, keys = slice(first, first + count), slice(first // x.ratio, (first + count) // x.ratio)
    states, dstates = x.states(len(x.chunks), 5, half), x.states(len(x.chunks), 6, half)
    values = torch.randn(len(x.chunks), heads, C, width, generator=torch.Generator().manual_seed(7)).to(half)
    values[(torch.arange(C) >= x.chunks[:, 1:2])[:, None].expand(-1, heads, -1)] = 0
    dv = torch.randn(tokens, heads, width, generator=torch.Generator().manual_seed(8)).to(half)
    dv[x.offsets[-1] :] = float("nan")
    dq, dk = (blank(tokens, x.q.shape[1], width, dtype=half) for _ in range(2))
    dg, dbeta = blank(tokens, heads), blank(tokens, heads)
    most = 2.0 if double else 1.0
    strength = (x.beta / most).logit() if sigmoid else x.beta
    entry_row = torch.arange(len(x.offsets) - 1, dtype=torch.int32) % 3 - 1  # a third of the chains have none
    launch(
        spec_of("gradients", x, sigmoid=sigmoid, double=double),
        *(x.q, x.k, x.do, dv, *(y[:, mine].contiguous() for y in (values, states, dstates)), x.decay),
        *(strength, x.chunks, entry_row, dq, dk, dg, dbeta, x.scale, 1, first, blocks),
        **how,
    )
    got = {"dq": dq, "dk": dk, "dg": dg, "dbeta": dbeta}
    expected = {name: y.double().fill_(float("nan")) for name, y in got.items()}
    for n, (start, length, begun) in enumerate(x.chunks.tolist()):
        rows = dv[start : start + length].double().movedim(0, 1)
        rows = torch.cat([rows, rows.new_zeros(heads, C - length, width)], 1)
        parts = plain.gradients(x, n, *(y[n].double() for y in (states, values, dstates)), rows)
        for name, part in zip(got, parts, strict=True):
            which = keys if name in ("dq", "dk") else mine
            if sigmoid and name == "dbeta":
                written = x.beta[start : start + length].double()
                part = part * written * (1 - written / most)
            expected[name][start : start + length, which] = part[:, which]
        if begun >= 0 and entry_row[begun] < 0:
            assert torch.all(dg[start, mine] == 0)
            expected["dg"][start, mine] = 0
    return compare({name: (y, expected[name]) for name, y in got.items()})


CHECKS = {
    "sweep": check_sweep,
    "summary_grad": check_summary_grad,
    "replay": check_replay,
    "gradients": check_gradients,
}


def quick_spec(stage, **changes):
    """What the quick run of a stage launches."""
    flags = {
        "sweep": ("final_grad", "initial_grad"),
        "summary_grad": ("final_grad",),
        "replay": ("initial_state",),
        "gradients": ("sigmoid", "double"),
    }
    return spec_of(stage, plain.make_case(**QUICK | changes), **dict.fromkeys(flags[stage], True))


@pytest.mark.parametrize("l2norm", (False, True))
def test_the_plain_formulas_are_the_gradients(l2norm):
    """The plain backward of a document, chunk by chunk, against autograd through the recurrence of tokens."""
    x = plain.make_case(16, 2, torch.float64, (0, 150), "mixed", l2norm, heads=2, foreign=0)
    leaves = [y[None].requires_grad_() for y in (x.q, x.k, x.v, x.g, x.beta)]
    initial, dfinal = (x.states(1, seed).double() for seed in (5, 6))
    initial.requires_grad_()
    o, final = gated_delta_rule_oracle(
        *leaves, initial_state=initial.mT, cu_seqlens=torch.tensor(x.offsets), use_qk_l2norm=l2norm
    )
    ((o[0] * x.do).sum() + (final.mT * dfinal).sum()).backward()
    states, values, _ = plain.replay(x, 0, initial.detach()[0])
    dstates, dv, dentry = plain.sweep(x, 0, dfinal[0])
    parts = [plain.gradients(x, n, states[n], values[n], dstates[n], dv[n]) for n in plain.chunks_of(x, 0)]
    dq, dk, dg, dbeta = (torch.cat(part) for part in zip(*parts, strict=True))
    dv = torch.cat([rows[:, : x.chunk(n).length] for n, rows in enumerate(dv)], 1).movedim(0, 1)
    for found, leaf in zip((dq, dk, dv, dg, dbeta, dentry), (*leaves, initial), strict=True):
        assert relative_l2(found, leaf.grad[0]) < 1e-9


@pytest.mark.parametrize("head_dim", (pytest.param(64, marks=pytest.mark.slow), 128))
@pytest.mark.parametrize(("stage", "products"), (("sweep", 6), ("summary_grad", 6), ("replay", 4), ("gradients", 5)))
def test_products_and_tensor_memory(stage, products, head_dim):
    spec = quick_spec(stage, head_dim=head_dim)
    if stage in ("sweep", "summary_grad"):
        config = sweep_config(spec, stores=stage == "sweep")
    else:
        config = (replay_config if stage == "replay" else gradients_config)(spec)
    config.check(spec.target)
    hold_code(build(spec), config, products, most_spilled=64)


@pytest.mark.parametrize(("stage", "dtype"), [*((stage, B) for stage in CHECKS), ("gradients", F)])
def test_clean_and_right_at_random(stage, dtype):
    options = {"sigmoid": True, "double": True} if stage == "gradients" else {}
    CHECKS[stage](plain.make_case(**QUICK | {"dtype": dtype}), schedule="random", **options)


def test_maps_start_behind_the_chunks_that_they_need():
    """A bound that one chunk reaches: what lies behind it, the known gradient too, is left out."""
    check_summary_grad(plain.make_case(**QUICK), threshold=-1e-6, races=False)


def test_what_cancels_in_gate_gradients_is_never_added():
    """With gates of -20 they are nine orders smaller than what a token's own row and column hold."""
    check_gradients(plain.make_case(**QUICK | {"gates": "twenty"}), sigmoid=True, double=True, races=False)


@pytest.mark.slow
@pytest.mark.parametrize("stage", CHECKS)
@pytest.mark.parametrize("name", CASES)
def test_results_under_every_schedule(name, stage):
    x, check = plain.make_case(**CASES[name]), CHECKS[stage]
    options = {"sigmoid": x.l2norm, "double": x.l2norm and x.q.dtype == B} if stage == "gradients" else {}
    errors = {str(check(x, schedule=schedule, seed=seed, **options)) for schedule, seed in SCHEDULES}
    assert len(errors) == 1, "schedules differ"
    if stage == "gradients":
        for blocks in (1, 5, 100):
            check(x, blocks=blocks, races=False, **options)
    else:
        check(x, known=False, races=False)
    if stage != "summary_grad" and x.v.shape[1] > x.ratio:
        check(x, first=x.ratio, count=x.ratio, races=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize("gates", ("weak", "init", "strong"))
def test_the_whole_op(gates):
    case = everything(gates=gates)
    offsets = case["offsets"]
    with emulation(ARCH, schedule="random"):
        found = gradients_of(
            case["tensors"], case["initial"], cu_seqlens=torch.tensor(offsets), use_qk_l2norm_in_kernel=True
        )
    hold_gradients(found, expected_of(case["tensors"], case["initial"], offsets, l2norm=True))
