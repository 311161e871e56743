"""The oracles against closed forms that need no recurrence."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from flashqla_cp.testing.inputs import GATES, make_inputs, packed_offsets
from flashqla_cp.testing.metrics import relative_l2, worst_after_cuts
from flashqla_cp.testing.oracle import causal_conv1d_oracle, gated_delta_rule_oracle


def _orthonormal(num_tokens: int, dim: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    basis, _ = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))
    return basis[:num_tokens].reshape(1, num_tokens, 1, dim)


def test_orthonormal_keys_store_each_value_once() -> None:
    """With orthonormal keys no correction meets an old value: S_T = sum_i exp(G_T - G_i) beta_i k_i v_i^T."""
    x = make_inputs(8, 1, 1, 16, 5, gates="init")
    k = _orthonormal(8, 16)
    sums = x["g"].cumsum(1)
    decay = (sums[0, :, None, 0] - sums[0, None, :, 0]).exp().tril()
    attention = torch.einsum("btk,bik->bti", x["q"][:, :, 0], k[:, :, 0])[0] * decay * x["beta"][0, :, 0]
    expected = 16**-0.5 * attention @ x["v"][0, :, 0]
    weights = decay[-1] * x["beta"][0, :, 0]
    state = torch.einsum("i,ik,iv->kv", weights, k[0, :, 0], x["v"][0, :, 0])
    o, final_state = gated_delta_rule_oracle(x["q"], k, x["v"], x["g"], x["beta"])
    assert relative_l2(o[0, :, 0], expected) < 1e-14
    assert relative_l2(final_state[0, 0], state) < 1e-14


def test_full_step_overwrites_the_value_of_a_repeated_key() -> None:
    """beta = 1 and one unit key throughout: the state holds the newest value only, whatever the decay."""
    x = make_inputs(6, 1, 1, 4, 3, gates="strong")
    k = _orthonormal(1, 4).expand(1, 6, 1, 4)
    o, final_state = gated_delta_rule_oracle(k, k, x["v"], x["g"], torch.ones_like(x["beta"]), scale=1.0)
    assert relative_l2(o, x["v"]) < 1e-14
    assert relative_l2(final_state[0, 0], torch.outer(k[0, 0, 0], x["v"][0, -1, 0])) < 1e-14


def test_decay_comes_before_the_correction() -> None:
    """One token by hand: S = a S0 + beta k (v - a S0^T k)^T with a = exp(g)."""
    x = make_inputs(1, 1, 1, 4, 3, gates="init")
    state = torch.randn(4, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    k, v, a, beta = x["k"][0, 0, 0], x["v"][0, 0, 0], x["g"][0, 0, 0].exp(), x["beta"][0, 0, 0]
    expected = a * state + beta * torch.outer(k, v - a * state.T @ k)
    _, final_state = gated_delta_rule_oracle(**x, initial_state=state[None, None])
    assert relative_l2(final_state[0, 0], expected) < 1e-14


def test_grouped_values_read_their_own_key_head() -> None:
    x = make_inputs(9, 2, 6, 4, 3)
    o, final_state = gated_delta_rule_oracle(**x)
    for head in range(6):
        heads = {"q": head // 3, "k": head // 3, "v": head, "g": head, "beta": head}
        alone = {name: x[name][:, :, h : h + 1] for name, h in heads.items()}
        o_alone, state_alone = gated_delta_rule_oracle(**alone)
        assert torch.equal(o[:, :, head], o_alone[:, :, 0])
        assert torch.equal(final_state[:, head], state_alone[:, 0])


def test_packed_documents_equal_documents_run_alone() -> None:
    x = make_inputs(40, 1, 2, 4, 3, gates="weak")
    state = torch.randn(4, 2, 4, 3, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    offsets = [0, 11, 11, 30, 33]
    o, final_state = gated_delta_rule_oracle(**x, initial_state=state, cu_seqlens=torch.tensor(offsets))
    for n, (start, end) in enumerate([(0, 11), (11, 11), (11, 30), (30, 33)]):
        alone = {name: tensor[:, start:end] for name, tensor in x.items()}
        o_alone, state_alone = gated_delta_rule_oracle(**alone, initial_state=state[n : n + 1])
        assert torch.equal(o[:, start:end], o_alone)
        assert torch.equal(final_state[n : n + 1], state_alone)
    assert torch.equal(final_state[1], state[1])
    assert torch.equal(o[:, 33:], torch.zeros(1, 7, 2, 3, dtype=torch.float64))


def test_l2norm_is_taken_inside() -> None:
    x = make_inputs(7, 1, 1, 4, 3)
    unit = {name: F.normalize(x[name], dim=-1) for name in ("q", "k")}
    o, _ = gated_delta_rule_oracle(3 * x["q"], 5 * x["k"], x["v"], x["g"], x["beta"], use_qk_l2norm=True)
    expected, _ = gated_delta_rule_oracle(unit["q"], unit["k"], x["v"], x["g"], x["beta"])
    assert relative_l2(o, expected) < 1e-5


def test_gradients_against_finite_differences() -> None:
    x = make_inputs(5, 1, 2, 3, 2, gates="mixed", beta_max=2.0)
    state = torch.randn(2, 2, 3, 2, dtype=torch.float64, requires_grad=True)

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gated_delta_rule_oracle(*tensors[:5], initial_state=tensors[5], cu_seqlens=[0, 2, 5])

    assert torch.autograd.gradcheck(run, (*x.values(), state))


def test_convolution_equals_a_padded_grouped_convolution() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 9, 3, generator=generator, dtype=torch.float64)
    weight, bias = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((3, 4), (3,)))
    expected = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), weight[:, None], bias, groups=3).transpose(1, 2)
    assert relative_l2(causal_conv1d_oracle(x, weight, bias, activation=None), expected) < 1e-14
    assert relative_l2(causal_conv1d_oracle(x, weight, bias), F.silu(expected)) < 1e-14


def test_convolution_restarts_at_each_document() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 12, 3, generator=generator, dtype=torch.float64)
    weight = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    y = causal_conv1d_oracle(x, weight, cu_seqlens=[0, 2, 2, 9])
    assert torch.equal(y[:, :2], causal_conv1d_oracle(x[:, :2], weight))
    assert torch.equal(y[:, 2:9], causal_conv1d_oracle(x[:, 2:9], weight))
    assert torch.equal(y[:, 9:], torch.zeros(1, 3, 3, dtype=torch.float64))


@pytest.mark.parametrize("gates", GATES)
def test_gate_regimes_are_what_their_names_say(gates: str) -> None:
    g = make_inputs(400, 1, 8, 2, 2, gates=gates)["g"].detach()
    assert (g <= 0).all()
    if gates == "zero":
        assert (g == 0).all()
    if gates == "weak":
        assert (g > -1e-4).all() and (g < 0).any()
    if gates == "mixed":
        slow = g[..., ::4].abs()
        assert (slow >= 1e-5).all() and (slow <= 1e-3).all() and (g.mean(1)[0] < -2e-3).sum() >= 4
    if gates == "strong":
        assert -6.5 < g.mean() < -3.5 and (g == -20).any() and (g.min(1).values == -90).all()


def test_inputs_depend_on_the_seed_only() -> None:
    first, again = make_inputs(9, 1, 2, 4, 3), make_inputs(9, 1, 2, 4, 3, dtype=torch.float32)
    assert all(torch.equal(first[name].float(), again[name]) for name in first)
    assert not torch.equal(first["v"], make_inputs(9, 1, 2, 4, 3, seed=1)["v"])
    half = make_inputs(9, 1, 2, 4, 3, dtype=torch.bfloat16)
    assert half["q"].dtype is torch.bfloat16 and half["g"].dtype is torch.float32
    with pytest.raises(ValueError, match="gates: got 'soft'"):
        make_inputs(9, 1, 2, 4, 3, gates="soft")


def test_packed_offsets_have_the_asked_numbers_of_documents() -> None:
    offsets = packed_offsets(100, 9, seed=2, empty=3)
    lengths = [end - start for start, end in itertools.pairwise(offsets)]
    assert (offsets[0], offsets[-1], len(lengths), lengths.count(0)) == (0, 100, 9, 3)
    with pytest.raises(ValueError, match="packed_offsets: got num_tokens=3"):
        packed_offsets(3, 6, empty=1)


def test_scores_see_a_fault_that_is_small_in_the_whole_tensor() -> None:
    ref = torch.ones(1, 1000, 2)
    x = ref.clone()
    x[:, 500:510] += 0.1
    assert relative_l2(x, ref) == pytest.approx(0.01, rel=1e-3)
    assert worst_after_cuts(x, ref, [250, 500, 1000]) == pytest.approx(0.1 * (10 / 32) ** 0.5, rel=1e-3)
    assert worst_after_cuts(x, ref, [250]) == 0.0
    assert relative_l2(torch.full((2,), float("nan")), torch.ones(2)) == float("inf")
    with pytest.raises(ValueError, match="got shape"):
        relative_l2(torch.ones(2), torch.ones(3))
