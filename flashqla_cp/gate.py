"""Per-token preparations of the op in fp32 (fp64 for fp64 inputs), whatever autocast says."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F

L2_EPS = 1e-6
# Below the logarithm of the smallest subnormal number: -103.3 in fp32, -744.4 in fp64.
GATE_FLOOR = {torch.float32: -128.0, torch.float64: -768.0}
_AS_IT_IS = nullcontext()


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Autocast off within: nothing where it is off already, for switching it costs as much as a launch."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return _AS_IT_IS


def log_decay(a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Log gate g = -exp(A_log) * softplus(a + dt_bias) <= 0 (Gated Delta Networks, arXiv 2412.06464).

    a [.., HV] any float, A_log and dt_bias [HV] -> [.., HV] in dtype.
    """
    with without_autocast(a.device):
        shifted = a.to(dtype) if dt_bias is None else a.to(dtype) + dt_bias.to(dtype)
        return -A_log.to(dtype).exp() * F.softplus(shifted)


def floor_gate(g: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """g in dtype, raised to where exp(g) is 0 in it anyway, so that -inf, a full reset, leaves no inf - inf behind.

    The gradient below the floor is 0, as that of exp is.
    """
    return g.to(dtype).clamp(min=GATE_FLOOR[dtype])


def write_strength(b: torch.Tensor, allow_neg_eigval: bool, dtype: torch.dtype) -> torch.Tensor:
    """beta = sigmoid(b), twice that with allow_neg_eigval. b [.., HV] -> [.., HV] in dtype."""
    beta = torch.sigmoid(b.to(dtype))
    return 2 * beta if allow_neg_eigval else beta


def l2_normalize(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x * rsqrt(sum(x^2) + 1e-6) over the last dimension, in dtype; zero rows have a finite gradient."""
    x = x.to(dtype)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)
