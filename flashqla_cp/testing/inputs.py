"""Seeded inputs: gate regimes by name and packed rows.

The regimes matter more than the shapes: with an ordinary initialisation every final correction M underflows within a
shard and a broken exchange goes unseen, so "mixed", "weak" and "zero" contain heads that keep their state.
"""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F

GATES = ("init", "mixed", "weak", "zero", "strong")


def make_inputs(
    num_tokens: int,
    num_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    gates: str = "mixed",
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    seed: int = 0,
    beta_max: float = 1.0,
) -> dict[str, torch.Tensor]:
    """Leaf tensors of one row of the stream; the numbers depend on the seed only, not on dtype or device.

    Args:
        num_tokens, num_heads, num_v_heads, head_k_dim, head_v_dim: sizes T, H, HV, K, V.
        gates: one of GATES (see make_gates).
        dtype, device: of every tensor; g and beta are fp32 where q, k and v are bf16 or fp16.
        seed: of a generator of its own; the global one stays as it is.
        beta_max: beta is drawn from (0, beta_max).

    Returns:
        q, k [1, T, H, K] (k of unit length), v [1, T, HV, V], g, beta [1, T, HV]; all require grad.

    Raises:
        ValueError: unknown `gates`.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, num_tokens, *shape, generator=generator, dtype=torch.float64)

    tensors = {
        "q": normal(num_heads, head_k_dim),
        "k": F.normalize(normal(num_heads, head_k_dim), dim=-1),
        "v": normal(num_v_heads, head_v_dim),
        "g": make_gates(num_tokens, num_v_heads, gates, generator),
        "beta": beta_max * normal(num_v_heads).sigmoid(),
    }
    gate_dtype = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    dtypes = {"g": gate_dtype, "beta": gate_dtype}
    return {
        name: x.to(device=device, dtype=dtypes.get(name, dtype)).requires_grad_(True) for name, x in tensors.items()
    }


def make_gates(num_tokens: int, num_v_heads: int, gates: str, generator: torch.Generator) -> torch.Tensor:
    """Log decay [1, T, HV] in fp64 of a named regime.

    "init": A ~ U(0, 16) and dt log-uniform in 1e-3..1e-1 per head, g = -A softplus(noise + softplus^-1(dt)).
    "mixed": the same, but every fourth head hardly decays (|g| log-uniform in 1e-5..1e-3), as in a trained model.
    "weak": g uniform in (-1e-4, 0). "zero": 0. "strong": mean about -5, every seventh token -20, one token -90.
    """

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    shape = (1, num_tokens, num_v_heads)
    if gates == "zero":
        return torch.zeros(shape, dtype=torch.float64)
    if gates == "weak":
        return -1e-4 * uniform(*shape)
    if gates == "strong":
        g = -6.0 * uniform(*shape)
        g[:, 3::7] = -20.0
        g[:, num_tokens // 2 : num_tokens // 2 + 1] = -90.0
        return g
    if gates not in GATES:
        raise ValueError(f"gates: got {gates!r}, expected one of {', '.join(GATES)}")
    rate, dt = 16.0 * uniform(num_v_heads), 10.0 ** (-3.0 + 2.0 * uniform(num_v_heads))
    noise = 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
    g = -rate * F.softplus(noise + dt + torch.log(-torch.expm1(-dt)))
    if gates == "mixed":
        g[..., ::4] = -(10.0 ** (-5.0 + 2.0 * uniform(1, num_tokens, (num_v_heads + 3) // 4)))
    return g


def packed_offsets(num_tokens: int, num_documents: int, seed: int = 0, empty: int = 0) -> list[int]:
    """Offsets [num_documents + 1] of a packed row with random lengths, `empty` of its documents without tokens.

    Raises:
        ValueError: fewer tokens than documents that need one.
    """
    filled = num_documents - empty
    if filled < 1 or empty < 0 or filled > num_tokens:
        raise ValueError(
            f"packed_offsets: got num_tokens={num_tokens}, num_documents={num_documents}, empty={empty}, "
            "expected at least one document with tokens and at least one token for each of these"
        )
    draw = random.Random(seed)
    ends = sorted(draw.sample(range(1, num_tokens), filled - 1))
    return sorted([0, *ends, num_tokens, *draw.choices([0, *ends, num_tokens], k=empty)])
