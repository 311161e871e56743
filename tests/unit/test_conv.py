"""The public convolution in one process: values and gradients against the oracle, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashqla_cp import GatedDeltaNet, causal_conv1d
from flashqla_cp.kernels import backend
from flashqla_cp.kernels.arch import arch_by_name
from flashqla_cp.kernels.host import launcher
from flashqla_cp.kernels.spec import KernelSpec
from flashqla_cp.testing.cases import STREAMS, Case
from flashqla_cp.testing.metrics import relative_l2
from flashqla_cp.testing.oracle import causal_conv1d_oracle
from flashqla_cp.testing.parity import conv_oracle, conv_problem, run_whole, score

DOCUMENTS = [case for case in STREAMS if case.layout == "contiguous"]


@pytest.mark.parametrize("case", DOCUMENTS, ids=str)
def test_against_the_oracle(case: Case) -> None:
    problem = conv_problem(case)
    scores = score(run_whole(causal_conv1d, problem), run_whole(conv_oracle, problem), case.cu_seqlens)
    assert all(s.worst <= 1e-10 for s in scores), scores


@pytest.mark.parametrize("activation", ["silu", "swish", None])
@pytest.mark.parametrize("num_taps", [1, 2, 3, 4, 7])
def test_taps_and_activations(num_taps: int, activation: str | None) -> None:
    problem = conv_problem(Case(id="", cu_seqlens=(0, 5, 7, 40)), num_taps=num_taps, activation=activation)
    scores = score(run_whole(causal_conv1d, problem), run_whole(conv_oracle, problem), [])
    assert all(s.worst <= 1e-10 for s in scores), scores


@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3), (torch.float16, 1e-3)])
def test_narrow_types(dtype: torch.dtype, bar: float) -> None:
    problem = conv_problem(Case(id=""), dtype)
    results = run_whole(causal_conv1d, problem)
    assert all(x.dtype is dtype for x in results.values())
    assert all(s.whole <= bar for s in score(results, run_whole(conv_oracle, problem), []))


def test_rows_of_a_batch_and_no_bias() -> None:
    x, weight = torch.randn(3, 20, 5, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    y, nothing = causal_conv1d(x, weight)
    assert nothing is None
    assert relative_l2(y, causal_conv1d_oracle(x, weight)) <= 1e-10


def test_a_wider_weight_than_the_rows() -> None:
    """Weights are kept in fp32 while rows are narrow: the result is that of the weight as it is."""
    problem = conv_problem(Case(id=""), torch.bfloat16)
    wide = replace(problem, shared={name: x.float() + 1e-4 for name, x in problem.shared.items()})
    results = run_whole(causal_conv1d, wide)
    assert results["o"].dtype is torch.bfloat16 and results["dweight"].dtype is torch.float32
    scores = {s.name: s.whole for s in score(results, run_whole(conv_oracle, wide), [])}
    assert scores["dweight"] <= 1e-5 and max(scores.values()) <= 5e-3, scores


def test_views() -> None:
    problem = conv_problem(Case(id=""))
    expected = run_whole(causal_conv1d, problem)
    turned = {"x": problem.tokens["x"].mT.contiguous().mT}
    results = run_whole(
        causal_conv1d, replace(problem, tokens=turned, upstream={"o": problem.upstream["o"].mT.clone().mT})
    )
    assert all(torch.equal(x, expected[name]) for name, x in results.items())


@pytest.mark.parametrize("content", [float("nan"), float("inf")])
def test_documents_and_padding_are_apart(content: float) -> None:
    problem = conv_problem(Case(id="", cu_seqlens=(0, 37, 90, 140), num_tokens=170))
    before = run_whole(causal_conv1d, problem)
    x, dy = problem.tokens["x"].clone(), problem.upstream["o"].clone()
    for tensor in (x, dy):
        tensor[:, 37:90] = content
        tensor[:, 140:] = content
    after = run_whole(causal_conv1d, replace(problem, tokens={"x": x}, upstream={"o": dy}))
    kept = [*range(37), *range(90, 140)]
    for name in ("o", "dx"):
        assert torch.equal(before[name][:, kept], after[name][:, kept]), name
        assert torch.count_nonzero(after[name][:, 140:]) == 0, name


Change = Callable[[torch.Tensor, torch.Tensor], dict[str, Any]]
REJECTIONS: dict[str, tuple[type[Exception], str, Change]] = {
    "dimensions_of_x": (ValueError, "x", lambda x, weight: {"x": x[0]}),
    "channels": (ValueError, "weight", lambda x, weight: {"weight": weight[:-1]}),
    "dimensions_of_the_weight": (ValueError, "weight", lambda x, weight: {"weight": weight[:, None]}),
    "bias": (ValueError, "bias", lambda x, weight: {"bias": weight[:-1, 0]}),
    "activation": (ValueError, "activation", lambda x, weight: {"activation": "relu"}),
    "integers": (TypeError, "x", lambda x, weight: {"x": x.long(), "weight": weight.long()}),
    "not_a_tensor": (TypeError, "x", lambda x, weight: {"x": 1.0}),
    "start": (ValueError, "cu_seqlens", lambda x, weight: {"cu_seqlens": torch.tensor([1, 20])}),
    "decrease": (ValueError, "cu_seqlens", lambda x, weight: {"cu_seqlens": torch.tensor([0, 9, 8])}),
    "past_the_end": (ValueError, "cu_seqlens", lambda x, weight: {"cu_seqlens": torch.tensor([0, 21])}),
    "batch_with_offsets": (
        ValueError,
        "x",
        lambda x, weight: {"x": torch.cat([x, x]), "cu_seqlens": torch.tensor([0, 20])},
    ),
    "not_a_context": (TypeError, "cp_context", lambda x, weight: {"cp_context": "cp"}),
}


@pytest.mark.parametrize("name", REJECTIONS)
def test_refuses(name: str) -> None:
    error, argument, change = REJECTIONS[name]
    x, weight = torch.randn(1, 20, 5, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    with pytest.raises(error) as caught:
        causal_conv1d(**{"x": x, "weight": weight, **change(x, weight)})
    assert argument in str(caught.value).split(":")[0], caught.value


@pytest.mark.parametrize(
    ("weight", "bias", "kind", "text"),
    [
        (torch.ones(5, 4, dtype=torch.complex64), None, TypeError, "weight: dtype"),
        (torch.ones(5, 4, dtype=torch.int64), None, TypeError, "weight: dtype"),
        ([[1.0]], None, TypeError, "weight: expected a tensor"),
        (torch.ones(5, 4), torch.ones(5, dtype=torch.bool), TypeError, "bias: dtype"),
        (torch.ones(5, 4), [0.0], TypeError, "bias: expected a tensor"),
        (torch.ones(5, 4, device="meta"), None, ValueError, "weight: is on meta"),
    ],
)
def test_refuses_parameters_that_are_none(weight, bias, kind, text):
    with pytest.raises(kind, match=text):
        causal_conv1d(torch.zeros(1, 7, 5), weight, bias)


def test_backends_are_those_of_the_op() -> None:
    x, weight = torch.randn(1, 20, 5), torch.randn(5, 4)
    with pytest.raises(ValueError, match="backend: got 'triton'"):
        causal_conv1d(x, weight, backend="triton")
    with pytest.raises(NotImplementedError, match=r'backend: "tilelang" cannot run here: .* backend="torch" can'):
        causal_conv1d(x, weight, backend="tilelang")
    assert torch.equal(causal_conv1d(x, weight)[0], causal_conv1d(x, weight, backend="torch")[0])


def test_kernels_run_what_they_take_and_torch_the_rest() -> None:
    """On a machine with kernels: 2 to 4 taps, but for fp64, which nobody trains in."""
    launched = []

    def loader(spec: KernelSpec) -> Callable[..., None]:
        launched.append(spec.stage)
        return lambda *arguments: arguments[-1].zero_()

    def run(width: int, dtype: torch.dtype, **options: Any) -> list[str]:
        launched.clear()
        causal_conv1d(torch.randn(1, 20, 5, dtype=dtype), torch.randn(5, width, dtype=dtype), **options)
        return list(launched)

    with launcher.machine(loader, arch_by_name("sm_90a"), 6):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            assert run(4, dtype)[-1] == run(2, dtype, backend="tilelang")[-1] == "causal_conv"
        assert not run(4, torch.float64) and not run(5, torch.bfloat16) and not run(4, torch.bfloat16, backend="torch")
        with pytest.raises(ValueError, match='weight: got 5 taps, there are kernels for 2, 3, 4; backend="torch"'):
            run(5, torch.bfloat16, backend="tilelang")
        with pytest.raises(ValueError, match=r"dtype: got torch\.float64"):
            run(4, torch.float64, backend="tilelang")


def test_training_without_a_kernel_raises_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "machine_of", lambda device: (arch_by_name("sm_90a"), 132))
    sizes = backend.ConvSizes(dtype=torch.bfloat16, width=5)
    with pytest.raises(RuntimeError, match=r'weight: got 5 taps.* pass backend="torch" to train'):
        backend.select("auto", torch.device("cuda", 0), needs_grad=True, sizes=sizes)
    assert backend.select("auto", torch.device("cuda", 0), needs_grad=False, sizes=sizes) is None


def test_the_layer_hands_its_backend_on() -> None:
    layer = GatedDeltaNet(32, head_dim=16, num_heads=2, backend="tilelang")
    with pytest.raises(NotImplementedError, match="backend"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("flashqla_cp.layer.chunk_gated_delta_rule", lambda *_, **__: pytest.fail("the op came first"))
        layer(torch.randn(1, 8, 32))
