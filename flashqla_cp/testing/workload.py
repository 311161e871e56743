"""What the benchmark runs: inputs drawn on the device that is timed, and the fp64 results that they are scored by.

The gates are those of the published measurements of the peers, a little wider than the ones of inputs.py, so that
numbers can be put beside each other. The result comes from a text of its own, chunk by chunk in fp64, so that it shares
no fault with what it judges. With G the cumulative log gate inside a chunk and S the state in front of it:

    (I + A) X = beta (v - exp(G) k S)       A_ij = beta_i exp(G_i - G_j) (k_i . k_j)        j < i
    o = scale (exp(G) q S + P X)            P_ij = exp(G_i - G_j) (q_i . k_j)               j <= i
    S <- exp(Gc) S + (exp(Gc - G) k)^T X    Gc the last of G

Gradients are those that autograd finds for these lines, from the last chunk to the first.

Letters: B documents, T tokens of each, H key heads, HV value heads, K = V head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    gradients = ("dq", "dk", "dv", "dg", "dbeta")  # by the order of the inputs

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

    def upstream(self, seed: int, device: torch.device) -> torch.Tensor:
        """Gradient of o [1, T, HV, V] in dtype, with numbers of its own."""
        generator = torch.Generator(device).manual_seed(seed + 2**20)
        shape = 1, self.tokens, self.v_heads, self.head_dim
        return torch.randn(shape, generator=generator, device=device).to(self.dtype)

    def expected(self, tensors: tuple[torch.Tensor, ...], repeats: int = 1) -> torch.Tensor:
        """o [1, T, HV, V] in fp32, computed in fp64. repeats: of the whole row one behind the other, one document that
        is repeats * T long; the result is that of the last."""
        q, k, v, g, beta = self._rows(*tensors)
        state = None
        for _ in range(repeats):
            o, state = chunked_reference(q, k, v, g, beta, initial_state=state)
        return o.flatten(0, 1)[None]

    def expected_gradients(
        self, tensors: tuple[torch.Tensor, ...], upstream: torch.Tensor, before: int = 0, behind: int = 0
    ) -> tuple[torch.Tensor, ...]:
        """Gradients of q, k, v, g, beta, in fp32, computed in fp64. before, behind: repeats of the whole row, upstream
        included, in front of it and behind it in the same document; the result is that of the one between them."""
        q, k, v, g, beta, do = self._rows(*tensors, upstream)
        state = dstate = None
        for _ in range(before):
            _, state = chunked_reference(q, k, v, g, beta, initial_state=state)
        for _ in range(behind):  # what passes through a state backward does not depend on the state
            _, dstate = chunked_gradients((q, k, v, g, beta), do, None, dstate)
        grads, _ = chunked_gradients((q, k, v, g, beta), do, state, dstate)
        return tuple(x.flatten(0, 1)[None] for x in grads)

    def _rows(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """A row for each document, [B, T, ...]."""
        return [x.unflatten(1, (self.documents, -1))[0] for x in tensors]


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
    scale = q.shape[3] ** -0.5 if scale is None else scale
    state = _first_state(k, v, initial_state)
    o = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    for start in range(0, v.shape[1], chunk):
        part = [x[:, start : start + chunk].double() for x in (q, k, v, g, beta)]
        o[:, start : start + chunk], state = _chunk(part, state, scale)
    return o, state


@torch.no_grad()
def chunked_gradients(
    tensors: Sequence[torch.Tensor],
    do: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    final_gradient: torch.Tensor | None = None,
    chunk: int = 64,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Gradients of chunked_reference in fp64, a chunk at a time; all states in front of chunks are kept meanwhile.

    Args:
        tensors: q, k, v, g, beta as there. do [B, T, HV, V]: gradient of o. initial_state: as there.
        final_gradient: [B, HV, K, V], that of the final state, zero if None.

    Returns:
        Gradients of q, k, v, g, beta in their shapes in fp32, and that of the initial state in fp64.
    """
    _, k, v, _, _ = tensors
    scale = k.shape[3] ** -0.5
    starts = range(0, v.shape[1], chunk)

    def part(x: torch.Tensor, start: int) -> torch.Tensor:
        return x[:, start : start + chunk].double()

    states = [_first_state(k, v, initial_state)]
    for start in starts[:-1]:
        states.append(_chunk([part(x, start) for x in tensors], states[-1], scale)[1])
    grads = tuple(torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in tensors)
    dstate = _first_state(k, v, final_gradient)
    for start in reversed(starts):
        leaves = [x.clone().requires_grad_() for x in (*(part(x, start) for x in tensors), states.pop())]
        with torch.enable_grad():
            results = _chunk(leaves[:5], leaves[5], scale)
        *found, dstate = torch.autograd.grad(results, leaves, (part(do, start), dstate))
        for whole, piece in zip(grads, found, strict=True):
            whole[:, start : start + chunk] = piece
    return grads, dstate


def _first_state(k: torch.Tensor, v: torch.Tensor, known: torch.Tensor | None) -> torch.Tensor:
    """A state, or its gradient, [B, HV, K, V] in fp64; zero where none is known."""
    if known is not None:
        return known.double()
    return v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=torch.float64)


def _chunk(tensors: Sequence[torch.Tensor], state: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """o and the state behind one chunk. q, k, v, g, beta [B, C, heads, ...] and state [B, HV, K, V], all in fp64."""
    q, k, v, g, beta = tensors
    ratio = v.shape[2] // q.shape[2]
    qc, kc = (x.transpose(1, 2).repeat_interleave(ratio, 1) for x in (q, k))
    vc, total, strength = v.transpose(1, 2), g.transpose(1, 2).cumsum(-1)[..., None], beta.transpose(1, 2)[..., None]
    # Masked before exp: above the diagonal the exponent is positive and may overflow.
    above = torch.ones(qc.shape[2], qc.shape[2], dtype=torch.bool, device=v.device).triu(1)
    decay = (total - total.mT).masked_fill(above, -math.inf).exp()
    lower = strength * (kc @ kc.mT) * decay
    right = strength * (vc - total.exp() * (kc @ state))
    x = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    rows = total.exp() * (qc @ state) + ((qc @ kc.mT) * decay) @ x
    last = total[:, :, -1:]
    return (scale * rows).transpose(1, 2), last.exp() * state + ((last - total).exp() * kc).mT @ x


def relative_error(x: torch.Tensor, expected: torch.Tensor) -> float:
    """||x - expected|| / ||expected||, on their device; NaN where x holds one."""
    norm = torch.linalg.vector_norm
    return (norm(x.float() - expected, dtype=torch.float64) / norm(expected, dtype=torch.float64)).item()
