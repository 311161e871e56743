"""Run a case three ways, as an oracle, on one rank and sharded, and score the differences.

The functions under test come in as arguments, so that this file, like the whole folder, knows nothing of the product.
Names of results: "o" and "final_state" for the outputs, "d" + name for the gradient of an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from flashqla_cp.testing.cases import Case
from flashqla_cp.testing.inputs import make_gates, make_inputs
from flashqla_cp.testing.metrics import relative_l2, worst_after_cuts
from flashqla_cp.testing.oracle import causal_conv1d_oracle, gated_delta_rule_oracle

Results = dict[str, torch.Tensor]
TOKEN_RESULTS = frozenset({"o", "dq", "dk", "dv", "dg", "dbeta", "dx", "dhidden_states"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One differentiated call.

    tokens: arguments with one row per token of the stream, [1, T, ...]. shared: arguments that every rank holds
    whole. upstream: gradients of the outputs "o" [1, T, ...] and, if that is asked for, "final_state". options: the
    call's other arguments. cu_seqlens: offsets of the documents, int64 CPU.
    """

    tokens: Results
    upstream: Results
    cu_seqlens: torch.Tensor
    shared: Results = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Relative L2 error of one tensor: whole, and over the 32 tokens behind each cut (empty if it has no tokens)."""

    name: str
    whole: float
    behind_cuts: tuple[float, ...]

    @property
    def worst(self) -> float:
        return max(self.whole, *self.behind_cuts, 0.0)


def op_problem(
    case: Case, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu", seed: int = 0
) -> Problem:
    """Inputs and upstream gradients of the gated delta rule for a case; equal numbers on every rank."""
    length, heads = case.stream_length, case.num_v_heads
    sizes = (case.num_heads, heads, case.head_k_dim, case.head_v_dim)
    tokens = make_inputs(length, *sizes, case.gates, dtype, device, seed, case.beta_max)
    generator = torch.Generator().manual_seed(seed + 1)
    gate_dtype = tokens["g"].dtype

    def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device=device, dtype=dtype)

    shared, options = {}, {}
    upstream = {"o": normal(1, length, heads, case.head_v_dim)}
    if case.states:
        dims = (case.head_v_dim, case.head_k_dim) if case.state_v_first else (case.head_k_dim, case.head_v_dim)
        shape = (len(case.cu_seqlens) - 1, heads, *dims)
        shared["initial_state"], upstream["final_state"] = (normal(*shape, dtype=gate_dtype) for _ in range(2))
        options["output_final_state"] = True
    if case.use_qk_l2norm_in_kernel:
        tokens["k"] = tokens["k"] * (1.0 + normal(1, length, case.num_heads, 1).abs())
    if case.use_gate_in_kernel:
        rate = -make_gates(1, heads, case.gates, generator)[0, 0]
        tokens["g"] = normal(1, length, heads, dtype=gate_dtype)
        shared["A_log"] = rate.log().to(device=device, dtype=gate_dtype)
        shared["dt_bias"] = 0.5 * normal(heads, dtype=gate_dtype)
    if case.use_beta_sigmoid_in_kernel:
        tokens["beta"] = normal(1, length, heads, dtype=gate_dtype)
    for name in (
        "use_qk_l2norm_in_kernel",
        "use_gate_in_kernel",
        "use_beta_sigmoid_in_kernel",
        "allow_neg_eigval",
        "state_v_first",
    ):
        if getattr(case, name):
            options[name] = True
    return _problem(case, tokens, shared, upstream, options)


def conv_problem(
    case: Case,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    seed: int = 0,
    num_taps: int = 4,
    activation: str | None = "silu",
) -> Problem:
    """Inputs and upstream gradient of the short convolution over the stream of a case; 5 channels, with bias."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device=device, dtype=dtype)

    tokens = {"x": normal(1, case.stream_length, 5)}
    shared = {"weight": normal(5, num_taps), "bias": normal(5)}
    return _problem(case, tokens, shared, {"o": normal(1, case.stream_length, 5)}, {"activation": activation})


def differentiate(function: Callable[..., Any], problem: Problem, **arguments: Any) -> Results:
    """Call function(**tensors, **options, **arguments) -> (o, final_state or None), go backward, name the results."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in {**problem.tokens, **problem.shared}.items()}
    o, final_state = function(**leaves, **problem.options, **arguments)
    outputs = {"o": o}
    if "final_state" in problem.upstream:
        outputs["final_state"] = final_state
    linked = [name for name, x in outputs.items() if x.requires_grad]
    if linked:  # an oracle without a document depends on nothing
        torch.autograd.backward([outputs[name] for name in linked], [problem.upstream[name] for name in linked])
    results = {name: x.detach() for name, x in outputs.items()}
    for name, leaf in leaves.items():
        results[f"d{name}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return results


def run_whole(function: Callable[..., Any], problem: Problem, **arguments: Any) -> Results:
    """The whole stream in one process; `function` is an oracle of this file or the public call."""
    cu_seqlens = problem.cu_seqlens.to(problem.upstream["o"].device)
    return differentiate(function, problem, cu_seqlens=cu_seqlens, **arguments)


def run_sharded(
    function: Callable[..., Any],
    problem: Problem,
    context: Any,
    add_up: Callable[[torch.Tensor], torch.Tensor],
    **arguments: Any,
) -> Results:
    """This rank's shard of the stream; the results are put together on every rank.

    Args:
        function: the public call, which takes `cp_context`.
        problem: the same on every rank.
        context: what build_cp_context returned.
        add_up: sum of a tensor over the ranks, for what is held whole on each of them.
        arguments: further arguments of the call.
    """
    results = differentiate(function, shard_problem(problem, context), cp_context=context, **arguments)
    return {name: context.unshard(x) if name in TOKEN_RESULTS else add_up(x) for name, x in results.items()}


def shard_problem(problem: Problem, context: Any) -> Problem:
    """The part of a problem that this rank calls with."""
    return Problem(
        tokens={name: context.shard(x.detach()) for name, x in problem.tokens.items()},
        upstream={**problem.upstream, "o": context.shard(problem.upstream["o"])},
        cu_seqlens=problem.cu_seqlens,
        shared=problem.shared,
        options=problem.options,
    )


def score(results: Results, reference: Results, cuts: Iterable[int]) -> list[Score]:
    """Score every tensor of the reference; `cuts` are the tokens at which a rank's range starts.

    Raises:
        KeyError: a result is missing.
    """
    cuts = sorted({cut for cut in cuts if cut > 0})
    scores = []
    for name, ref in reference.items():
        behind = [worst_after_cuts(results[name], ref, [cut]) for cut in cuts if name in TOKEN_RESULTS]
        scores.append(Score(name=name, whole=relative_l2(results[name], ref), behind_cuts=tuple(behind)))
    return scores


def op_oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """gated_delta_rule_oracle behind the arguments of the public op.

    In-kernel gate: g <- -exp(A_log) softplus(g + dt_bias). In-kernel beta: sigmoid(beta), doubled by allow_neg_eigval.
    """
    g, beta = g.double(), beta.double()
    if use_gate_in_kernel:
        assert A_log is not None
        g = -A_log.double().exp() * F.softplus(g if dt_bias is None else g + dt_bias.double())
    if use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid() * (2.0 if allow_neg_eigval else 1.0)
    if initial_state is not None and state_v_first:
        initial_state = initial_state.mT
    o, final_state = gated_delta_rule_oracle(
        q, k, v, g, beta, scale, initial_state, cu_seqlens, use_qk_l2norm_in_kernel
    )
    if not output_final_state:
        return o, None
    return o, final_state.mT if state_v_first else final_state


def conv_oracle(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = "silu",
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """causal_conv1d_oracle behind the arguments and results of the public convolution."""
    return causal_conv1d_oracle(x, weight, bias, activation, cu_seqlens), None


def _problem(case: Case, tokens: Results, shared: Results, upstream: Results, options: dict[str, Any]) -> Problem:
    return Problem(
        tokens={name: x.detach() for name, x in tokens.items()},
        shared=shared,
        upstream=upstream,
        cu_seqlens=torch.tensor(case.cu_seqlens),
        options=options,
    )
