"""The Gated DeltaNet layer: projections, short convolution, gate, op, gated norm, output projection.

Everything that mixes tokens sits in two calls, causal_conv1d and chunk_gated_delta_rule, and one context drives both;
the rest is per token and needs no communication. With x_t the input row of a token, per value head:

    (q, k, v, z) = W_qkvz x_t,   (b, a) = W_ba x_t,   (q, k, v) <- silu(conv(q, k, v))
    g = -exp(A_log) softplus(a + dt_bias),   beta = sigmoid(b)  (twice that with allow_neg_eigval)
    y_t = W_out (w * rmsnorm(o_t) * silu(z_t)),   o = gated delta rule of l2norm(q), l2norm(k), v, g, beta

Formulas: Gated Delta Networks, arXiv 2412.06464. Names and layouts of the parameters are those of the Qwen3-Next layer
in transformers, so that its state dict loads strictly: in_proj_qkvz and in_proj_ba hold, for one key head after the
other, the rows of q, k, v, z (of b, a) of that key head and of its group of value heads; conv1d runs over all q, then
all k, then all v channels.

Letters: B batch, T tokens, H key heads, HV value heads, K head_k_dim, V head_v_dim, W conv_size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from flashqla_cp.checks import as_tensor, check_device, check_recompute, read_documents
from flashqla_cp.conv import causal_conv1d
from flashqla_cp.kernels.backend import BACKENDS
from flashqla_cp.op import chunk_gated_delta_rule
from flashqla_cp.parallel.context import CPContext
from flashqla_cp.program import Program
from flashqla_cp.traced import padding_rows


class GatedDeltaNet(nn.Module):
    """A Gated DeltaNet layer that runs on one device or, given a context, on sequences sharded over ranks.

    Options are those of fla.layers.GatedDeltaNet where both have them. The defaults follow Qwen3-Next instead
    (head_dim 128, values as wide as keys, norm_eps 1e-6).

    Args:
        hidden_size: width of the input and output rows.
        expand_v: head_v_dim is expand_v * head_dim, which must be a whole number.
        head_dim: K, width of a query/key head.
        num_heads: H, number of query/key heads.
        num_v_heads: HV, number of value heads, a multiple of num_heads; num_heads if None.
        use_gate: multiply the normalised output by silu(z); without it z does not exist and the projection is
            called in_proj_qkv.
        use_short_conv: causal convolution over q, k and v; without it only its silu remains.
        allow_neg_eigval: beta in (0, 2) instead of (0, 1).
        conv_size: W, taps of the convolution; a context must be built with conv1d_kernel_size=conv_size.
        conv_bias: the convolution has a bias.
        norm_eps: epsilon of the output norm.
        layer_idx: kept as an attribute for the caller; the layer itself does not use it.
        backend: "auto", "tilelang" or "torch", handed to causal_conv1d and chunk_gated_delta_rule.
        device, dtype: of the parameters.
        recompute: "none", "solve" or "forward", handed to chunk_gated_delta_rule: keep less for the backward.

    Initialisation (see reset_parameters): A ~ U(0, 16) and softplus(dt_bias) log-uniform in 1e-3..1e-1, as published
    with Mamba-2 and Gated DeltaNet. transformers starts Qwen3-Next from dt_bias = 1 instead, a gate that forgets
    within a token or two.

    Raises:
        ValueError: sizes below 1, num_v_heads % num_heads != 0, head_dim * expand_v not a whole number, or an unknown
            backend.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1.0,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-6,
        layer_idx: int | None = None,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        recompute: str = "none",
    ) -> None:
        super().__init__()
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        _check_sizes(hidden_size, expand_v, head_dim, num_heads, num_v_heads, conv_size, backend)
        check_recompute(recompute)
        self.hidden_size, self.num_heads, self.num_v_heads = hidden_size, num_heads, num_v_heads
        self.head_k_dim, self.head_v_dim = head_dim, round(head_dim * expand_v)
        self.key_dim, self.value_dim = num_heads * self.head_k_dim, num_v_heads * self.head_v_dim
        self.use_gate, self.use_short_conv, self.allow_neg_eigval = use_gate, use_short_conv, allow_neg_eigval
        self.conv_size, self.layer_idx, self.backend, self.recompute = conv_size, layer_idx, backend, recompute
        made: dict[str, Any] = {"device": device, "dtype": dtype}

        conv_dim = 2 * self.key_dim + self.value_dim
        self.dt_bias = nn.Parameter(torch.empty(num_v_heads, **made))
        self.A_log = nn.Parameter(torch.empty(num_v_heads, **made))
        if use_short_conv:
            # Holds the parameters under the published names and shapes; causal_conv1d does the work.
            self.conv1d = nn.Conv1d(conv_dim, conv_dim, conv_size, groups=conv_dim, bias=conv_bias, **made)
        if use_gate:
            self.in_proj_qkvz = nn.Linear(hidden_size, conv_dim + self.value_dim, bias=False, **made)
        else:
            self.in_proj_qkv = nn.Linear(hidden_size, conv_dim, bias=False, **made)
        self.in_proj_ba = nn.Linear(hidden_size, 2 * num_v_heads, bias=False, **made)
        self.norm = GatedRMSNorm(self.head_v_dim, eps=norm_eps, **made)
        self.out_proj = nn.Linear(self.value_dim, hidden_size, bias=False, **made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw A ~ U(0, 16) and softplus(dt_bias) log-uniform in 1e-3..1e-1; torch's defaults elsewhere."""
        with torch.no_grad():
            # Away from 0, whose logarithm would be -inf for ever.
            self.A_log.uniform_(1e-2, 16.0).log_()
            dt = self.dt_bias.float().uniform_(math.log(1e-3), math.log(1e-1)).exp()
            self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus^-1(dt)
        for module in self.children():
            module.reset_parameters()  # type: ignore[operator]

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        cp_context: CPContext | None = None,
    ) -> torch.Tensor:
        """Apply the layer to whole rows, to packed documents, or to this rank's shard of them.

        Args:
            hidden_states: [B, T, hidden_size]; B = 1 with cu_seqlens or cp_context. T may be 0 with a context.
            cu_seqlens: offsets [N + 1] of the documents in the row; without it and without a context each of the B
                rows is one document.
            cp_context: the context of this micro-batch; hidden_states then holds its local_tokens rows.

        Returns:
            [B, T, hidden_size] in the projection's dtype. Rows past the last document are 0, and so are their
            gradients, whatever the rows hold.

        Raises:
            ValueError: a wrong shape, cu_seqlens together with cp_context, or what causal_conv1d and
                chunk_gated_delta_rule refuse.
        """
        hidden_states = as_tensor(hidden_states, "hidden_states")
        if hidden_states.ndim != 3 or hidden_states.shape[2] != self.hidden_size:
            got = tuple(hidden_states.shape)
            raise ValueError(f"hidden_states: got shape {got}, expected [B, T, {self.hidden_size}]")
        check_device(hidden_states, "hidden_states")
        if torch.compiler.is_compiling():
            padding = padding_rows(hidden_states, cu_seqlens, cp_context)
        else:
            offsets = read_documents(hidden_states, "hidden_states", cu_seqlens, None, cp_context)
            if cu_seqlens is not None:
                cu_seqlens = torch.tensor(
                    offsets, device="cpu"
                )  # on the host, so that nobody reads them from the device again
            padding = _padding_rows(hidden_states, offsets, cp_context)
        if padding is not None:
            hidden_states = hidden_states.masked_fill(padding, 0.0)
        q, k, v, z = self._project(hidden_states, cu_seqlens, cp_context)
        group = self.num_v_heads // self.num_heads
        b, a = self._split_by_key_head(self.in_proj_ba(hidden_states), (group, group))
        o, _ = chunk_gated_delta_rule(
            q,
            k,
            v,
            a.flatten(2),
            b.flatten(2),
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=cu_seqlens,
            use_gate_in_kernel=True,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=self.allow_neg_eigval,
            cp_context=cp_context,
            backend=self.backend,
            recompute=self.recompute,
        )
        out = self.out_proj(self.norm(o, z).flatten(2))
        return out if padding is None else out.masked_fill(padding, 0.0)

    def extra_repr(self) -> str:
        heads = f"num_heads={self.num_heads}, num_v_heads={self.num_v_heads}"
        return f"{heads}, head_k_dim={self.head_k_dim}, head_v_dim={self.head_v_dim}, backend={self.backend!r}"

    def _project(
        self, hidden_states: torch.Tensor, cu_seqlens: torch.Tensor | None, cp_context: CPContext | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """q, k [B, T, H, K], v [B, T, HV, V] after convolution and silu, and z [B, T, HV, V] or None."""
        H, HV, K, V = self.num_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim
        group_width = HV // H * V
        z = None
        if self.use_gate:
            projected = self.in_proj_qkvz(hidden_states)
            *qkv, z = self._split_by_key_head(projected, (K, K, group_width, group_width))
            z = z.flatten(2).unflatten(2, (HV, V))
        else:
            qkv = list(self._split_by_key_head(self.in_proj_qkv(hidden_states), (K, K, group_width)))
        mixed = torch.cat([x.flatten(2) for x in qkv], dim=-1)
        if self.use_short_conv:
            weight = self.conv1d.weight.squeeze(1)
            mixed, _ = causal_conv1d(mixed, weight, self.conv1d.bias, "silu", cu_seqlens, cp_context, self.backend)
        else:
            mixed = F.silu(mixed)
        q, k, v = mixed.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        return q.unflatten(2, (H, K)), k.unflatten(2, (H, K)), v.unflatten(2, (HV, V)), z

    def _split_by_key_head(self, x: torch.Tensor, widths: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        """Split the last dimension, which holds `widths` columns for one key head after the other: [B, T, H, width]."""
        return x.unflatten(2, (self.num_heads, sum(widths))).split(list(widths), dim=3)


class GatedRMSNorm(nn.Module):
    """Root mean square norm over the last dimension, times a weight and, if given, silu of a gate.

    y = weight * x * rsqrt(mean(x^2) + eps) * silu(gate), in fp32 (fp64 for fp64 inputs), returned in x's dtype.

    Args:
        size: length of the last dimension and of the weight, which starts as 1.
        eps: added to the mean square.
        device, dtype: of the weight.
    """

    def __init__(
        self, size: int, eps: float = 1e-6, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Set the weight to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """Normalise x [..., size]; gate has x's shape."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        y = x.to(dtype)
        y = self.weight.to(dtype) * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps))
        return (y if gate is None else y * F.silu(gate.to(dtype))).to(x.dtype)


def _padding_rows(
    hidden_states: torch.Tensor, offsets: Sequence[int], cp_context: CPContext | None
) -> torch.Tensor | None:
    """Mask [T, 1] of the rows that belong to no document, None where there are none."""
    num_tokens, device = hidden_states.shape[1], hidden_states.device
    if cp_context is not None:
        covered = Program.of_context(cp_context, device).covered
        return None if covered is None else ~covered[:, None]
    if offsets[-1] >= num_tokens:
        return None
    return (torch.arange(num_tokens, device=device) >= offsets[-1])[:, None]


def _check_sizes(
    hidden_size: int, expand_v: float, head_dim: int, num_heads: int, num_v_heads: int, conv_size: int, backend: str
) -> None:
    sizes = {
        "hidden_size": hidden_size,
        "head_dim": head_dim,
        "num_heads": num_heads,
        "num_v_heads": num_v_heads,
        "conv_size": conv_size,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: got {size}, expected at least 1")
    if num_v_heads % num_heads:
        raise ValueError(f"num_v_heads: got {num_v_heads}, expected a multiple of num_heads={num_heads}")
    width = head_dim * expand_v
    if round(width) < 1 or not math.isclose(width, round(width), rel_tol=1e-6):
        raise ValueError(f"expand_v: got {expand_v}, expected head_dim * expand_v to be a whole number, not {width:g}")
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, expected one of {', '.join(BACKENDS)}")
