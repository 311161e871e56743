"""What the benchmark runs: inputs drawn on the device that is timed, and the fp64 result that they are scored by.

The gates are those of the published measurements of the peers, a little wider than the ones of inputs.py, so that
numbers can be put beside each other. The result comes from a text of its own, chunk by chunk in fp64, so that it shares
no fault with what it judges. With G the cumulative log gate inside a chunk and S the state in front of it:

    (I + A) X = beta (v - exp(G) k S)       A_ij = beta_i exp(G_i - G_j) (k_i . k_j)        j < i
    o = scale (exp(G) q S + P X)            P_ij = exp(G_i - G_j) (q_i . k_j)               j <= i
    S <- exp(Gc) S + (exp(Gc - G) k)^T X    Gc the last of G

Letters: B documents, T tokens of each, H key heads, HV value heads, K = V head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

REGIMES = {
    "init": "g = -A softplus(n + softplus^-1(dt)); per head A ~ U(0.01, 16), dt log-uniform 1e-3..1e-1; n ~ N(0, 1/4)",
    "mixed": "every fourth head g = -r exp(n), r log-uniform 1e-6..1e-2, as in a trained model; the others as init",
    "weak": "g ~ U(-1e-4, 0)",
    "zero": "g = 0",
    "strong": "g = -A softplus(n + 1), A ~ U(0, 16) per head",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One call of the op: `documents` of equal length packed into one row of `tokens`, gates of a regime."""

    tokens: int
    documents: int
    heads: int
    v_heads: int
    head_dim: int
    gates: str
    dtype: torch.dtype

    def offsets(self) -> list[int]:
        """Of the documents, [documents + 1]."""
        return [self.tokens // self.documents * row for row in range(self.documents + 1)]

    def draw(self, seed: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """q, k [1, T, H, K] of unit length, v [1, T, HV, V] in dtype, g, beta [1, T, HV] fp32."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(1, self.tokens, *shape, generator=generator, device=device)

        q, k = (F.normalize(normal(self.heads, self.head_dim), dim=-1).to(self.dtype) for _ in "qk")
        v = normal(self.v_heads, self.head_dim).to(self.dtype)
        beta = normal(self.v_heads).sigmoid()
        return q, k, v, draw_gates(self.gates, self.tokens, self.v_heads, generator), beta

    def expected(self, tensors: tuple[torch.Tensor, ...], repeats: int = 1) -> torch.Tensor:
        """o [1, T, HV, V] in fp32, computed in fp64. repeats: of the whole row one behind the other, one document that
        is repeats * T long; the result is that of the last."""
        q, k, v, g, beta = (x.unflatten(1, (self.documents, -1))[0] for x in tensors)
        state = None
        for _ in range(repeats):
            o, state = chunked_reference(q, k, v, g, beta, initial_state=state)
        return o.flatten(0, 1)[None]


def draw_gates(regime: str, tokens: int, v_heads: int, generator: torch.Generator) -> torch.Tensor:
    """Log decay [1, T, HV] in fp32 on the generator's device, as REGIMES says.

    "init" is a lottery: whether one head of many happens to be slow can decide the time, so several seeds are timed.

    Raises:
        ValueError: unknown `regime`.
    """
    if regime not in REGIMES:
        raise ValueError(f"gates: got {regime!r}, expected one of {', '.join(REGIMES)}")
    device = generator.device

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    def log_uniform(low: float, high: float) -> torch.Tensor:
        return torch.exp(math.log(low) + math.log(high / low) * uniform(v_heads))

    if regime == "zero":
        return torch.zeros(1, tokens, v_heads, device=device)
    if regime == "weak":
        return -1e-4 * uniform(1, tokens, v_heads)
    noise = 0.5 * torch.randn(1, tokens, v_heads, generator=generator, device=device)
    if regime == "strong":
        return -16 * uniform(v_heads) * F.softplus(noise + 1)
    dt = log_uniform(1e-3, 1e-1)
    g = -(0.01 + 15.99 * uniform(v_heads)) * F.softplus(noise + dt + torch.log(-torch.expm1(-dt)))
    if regime == "mixed":
        slow = torch.arange(v_heads, device=device) % 4 == 0
        g = torch.where(slow, -log_uniform(1e-6, 1e-2) * torch.exp(noise), g)
    return g


@torch.no_grad()
def chunked_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    chunk: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule in fp64, a chunk at a time; no gradients.

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V]. g, beta: [B, T, HV]. Any float dtype. scale: K**-0.5 if None.
        initial_state: [B, HV, K, V], zero if None.

    Returns:
        o [B, T, HV, V] in fp32, which is all that its readers need, and the final state [B, HV, K, V] in fp64.
    """
    batch, tokens, v_heads, value_dim = v.shape
    ratio, scale = v_heads // q.shape[2], q.shape[3] ** -0.5 if scale is None else scale
    state = v.new_zeros(batch, v_heads, q.shape[3], value_dim, dtype=torch.float64)
    if initial_state is not None:
        state = initial_state.double()
    o = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    for start in range(0, tokens, chunk):
        part = [x[:, start : start + chunk].double().transpose(1, 2) for x in (q, k, v, g, beta)]
        qc, kc = (x.repeat_interleave(ratio, 1) for x in part[:2])
        vc, total, strength = part[2], part[3].cumsum(-1)[..., None], part[4][..., None]
        # Masked before exp: above the diagonal the exponent is positive and may overflow.
        above = torch.ones(qc.shape[2], qc.shape[2], dtype=torch.bool, device=v.device).triu(1)
        decay = (total - total.mT).masked_fill(above, -math.inf).exp()
        lower = strength * (kc @ kc.mT) * decay
        right = strength * (vc - total.exp() * (kc @ state))
        x = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
        rows = total.exp() * (qc @ state) + ((qc @ kc.mT) * decay) @ x
        o[:, start : start + chunk] = (scale * rows).transpose(1, 2)
        last = total[:, :, -1:]
        state = last.exp() * state + ((last - total).exp() * kc).mT @ x
    return o, state


def relative_error(x: torch.Tensor, expected: torch.Tensor) -> float:
    """||x - expected|| / ||expected||, on their device; NaN where x holds one."""
    norm = torch.linalg.vector_norm
    return (norm(x.float() - expected, dtype=torch.float64) / norm(expected, dtype=torch.float64)).item()
