"""Every check of arguments that callers pass. Runs before anything is computed or sent.

ValueError or TypeError that names the argument, what was given and what is allowed. What every rank passes alike is
refused alike on every rank; what only one rank can see is refused there before it communicates.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch

from flashqla_cp.kernels.host.memory import RECOMPUTE
from flashqla_cp.parallel.context import CPContext
from flashqla_cp.parallel.foreign import is_array, take_over, taken_over
from flashqla_cp.parallel.plan import check_offsets, offsets_tensor, offsets_to_read, read_offsets, refuse_dtensor

DEVICES = ("cpu", "cuda")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def as_tensor(value: Any, name: str) -> torch.Tensor:
    """A torch tensor, or anything with __dlpack__, or a DLPack capsule, taken over without a copy.

    Raises TypeError for the rest, and for what DLPack cannot carry; ValueError for views with negative strides.
    """
    refuse_dtensor(value, name)
    if isinstance(value, torch.Tensor):
        return value
    if not is_array(value):
        raise TypeError(f"{name}: expected a tensor or an object with __dlpack__, got {type(value).__name__}")
    return take_over(value, name)


def check_device(x: torch.Tensor, name: str) -> None:
    """One of the devices that there is a backend for. Raises ValueError."""
    if x.device.type not in DEVICES:
        raise ValueError(f"{name}: is on {x.device}, expected a device of type {' or '.join(DEVICES)}")


def check_op_inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> None:
    """Shapes [B,T,H,K] q k, [B,T,HV,V] v, [B,T,HV] g beta; one device; one dtype for q, k, v."""
    device = q.device
    for name, x, ndim in (("q", q, 4), ("k", k, 4), ("v", v, 4), ("g", g, 3), ("beta", beta, 3)):
        if x.ndim != ndim:
            raise ValueError(f"{name}: expected {ndim} dimensions, got shape {list(x.shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: dtype {x.dtype} is not one of {', '.join(map(str, DTYPES))}")
        if x is q or x.device != device:
            check_device(x, name)
        if x.device != device:
            raise ValueError(f"{name}: is on {x.device}, q is on {device}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: dtype {x.dtype} differs from q's {q.dtype}")
    q_shape, v_shape = q.shape, v.shape
    if k.shape != q_shape:
        raise ValueError(f"k: shape {list(k.shape)} differs from q's {list(q_shape)}")
    if v_shape[:2] != q_shape[:2]:
        raise ValueError(f"v: expected [B, T] = {list(q_shape[:2])} in front, got shape {list(v_shape)}")
    (_, _, num_heads, key_dim), (_, _, num_v_heads, value_dim) = q_shape, v_shape
    if not num_heads or num_v_heads % num_heads or not num_v_heads:
        raise ValueError(f"v: {num_v_heads} value heads, expected a multiple of q's {num_heads} heads (HV % H == 0)")
    if not key_dim or not value_dim:
        raise ValueError(f"q, v: head sizes must be at least 1, got {key_dim} and {value_dim}")
    expected = v_shape[:3]
    for name, x in (("g", g), ("beta", beta)):
        if x.shape != expected:
            raise ValueError(f"{name}: expected shape {list(expected)}, got {list(x.shape)}")


def as_parameter(value: Any, name: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor | None:
    """A floating tensor of one shape on a device, or None if it is None. Raises TypeError or ValueError."""
    if value is None:
        return None
    x = as_tensor(value, name)
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(x.shape)}")
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: dtype {x.dtype} is not one of {', '.join(map(str, DTYPES))}")
    if x.device != device:
        raise ValueError(f"{name}: is on {x.device}, expected {device}")
    return x


def check_gate(A_log: Any, dt_bias: Any, used: bool) -> None:
    """A_log is required, and dt_bias allowed, with use_gate_in_kernel and only with it."""
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x is not None and not used:
            raise ValueError(f"{name}: only allowed with use_gate_in_kernel=True")
    if used and A_log is None:
        raise ValueError("A_log: required with use_gate_in_kernel=True")


def check_scale(scale: Any, head_k_dim: int) -> float:
    """The scale as a number, K**-0.5 for None. Raises TypeError unless it is one, ValueError unless it is finite."""
    if scale is None:
        return head_k_dim**-0.5
    if isinstance(scale, (bool, torch.Tensor)) or not isinstance(scale, numbers.Real):
        raise TypeError(f"scale: expected a number or None, got {type(scale).__name__}")
    if not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number, got {scale}")
    return float(scale)


def check_double(double: bool, sigmoid: bool) -> None:
    """Write strengths are doubled only where they are made inside. Raises ValueError."""
    if double and not sigmoid:
        raise ValueError("allow_neg_eigval: only allowed with use_beta_sigmoid_in_kernel=True")


def check_recompute(recompute: Any) -> None:
    """One of the names of what may be computed again. Raises ValueError."""
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute: got {recompute!r}, expected one of {', '.join(map(repr, RECOMPUTE))}")


def check_forget_below(share: Any) -> float:
    """A number from 0 on and below 1, fp32 rounding if None. Raises TypeError or ValueError."""
    if share is None:
        return 2.0**-24
    if isinstance(share, bool) or not isinstance(share, (int, float)):
        raise TypeError(f"forget_below: got {type(share).__name__}, expected a number")
    if not 0 <= share < 1:
        raise ValueError(f"forget_below: got {share}, expected a number from 0 on and below 1")
    return float(share)


def read_documents(
    x: torch.Tensor, name: str, cu_seqlens: Any, cu_seqlens_cpu: Any, cp_context: CPContext | None
) -> Sequence[int]:
    """Offsets of the documents of the whole stream, which x [B, T, ..] holds unless a context says otherwise.

    Reads cu_seqlens now (a copy from the device unless cu_seqlens_cpu is given), so that an edit in place or a
    recycled tensor is never served stale.
    """
    batch, length = x.shape[:2]
    if cp_context is not None:
        if not isinstance(cp_context, CPContext):
            raise TypeError(f"cp_context: expected a CPContext from build_cp_context, got {type(cp_context).__name__}")
        if cu_seqlens is not None or cu_seqlens_cpu is not None:
            raise ValueError("cu_seqlens: not allowed with cp_context, which has the offsets")
        if batch != 1:
            raise ValueError(f"{name}: batch size must be 1 with cp_context, got {batch}")
        if length != cp_context.local_tokens:
            raise ValueError(
                f"{name}: has {length} tokens, rank {cp_context.rank} stores {cp_context.local_tokens} by its plan"
            )
        return cp_context.plan.cu_seqlens
    if cu_seqlens is None and cu_seqlens_cpu is None:
        return [length * row for row in range(batch + 1)]
    if batch != 1:
        raise ValueError(f"{name}: batch size must be 1 with cu_seqlens, got {batch}; pack the rows into one")
    given, label = offsets_to_read(cu_seqlens, cu_seqlens_cpu)
    offsets = read_offsets(given, label)
    check_offsets(offsets, length, label)
    return offsets


def offsets_for_kernels(
    x: torch.Tensor, name: str, cu_seqlens: Any, cu_seqlens_cpu: Any, cp_context: CPContext | None
) -> Sequence[int] | torch.Tensor:
    """What read_documents finds, but a tensor where the offsets can stay on x's device."""
    if cp_context is None and cu_seqlens_cpu is None:
        cu_seqlens = taken_over(cu_seqlens, "cu_seqlens")  # it is looked at twice
        there = offsets_left_on(x, name, cu_seqlens)
        if there is not None:
            return there
    return read_documents(x, name, cu_seqlens, cu_seqlens_cpu, cp_context)


def offsets_left_on(x: torch.Tensor, name: str, cu_seqlens: Any) -> torch.Tensor | None:
    """cu_seqlens as a tensor if it lives on x's GPU, else None.

    Its values are not checked then, for that would stop the GPU; kernels stay inside their tensors whatever they are.
    """
    if cu_seqlens is None or x.device.type == "cpu":
        return None
    offsets = offsets_tensor(cu_seqlens, "cu_seqlens")
    if offsets.device != x.device or not offsets.shape[0]:
        return None
    if x.shape[0] != 1:
        raise ValueError(f"{name}: batch size must be 1 with cu_seqlens, got {x.shape[0]}; pack the rows into one")
    return offsets


def check_conv_inputs(
    x: torch.Tensor, weight: torch.Tensor, activation: str | None, cp_context: CPContext | None
) -> None:
    """x [B, T, D], weight [D, W]; a known activation; the width that the context was built for."""
    if x.ndim != 3:
        raise ValueError(f"x: expected 3 dimensions [B, T, D], got shape {list(x.shape)}")
    if x.dtype not in DTYPES:
        raise TypeError(f"x: dtype {x.dtype} is not one of {', '.join(map(str, DTYPES))}")
    check_device(x, "x")
    if weight.ndim != 2 or weight.shape[0] != x.shape[2] or not weight.shape[1]:
        raise ValueError(f"weight: expected shape [{x.shape[2]}, W] with W >= 1, got {list(weight.shape)}")
    if activation not in (None, "silu", "swish"):
        raise ValueError(f'activation: got {activation!r}, expected "silu", "swish" or None')
    planned = None if not isinstance(cp_context, CPContext) else cp_context.conv1d_kernel_size
    if planned is not None and planned != weight.shape[1]:
        raise ValueError(f"weight: has {weight.shape[1]} taps, cp_context was built with conv1d_kernel_size={planned}")
