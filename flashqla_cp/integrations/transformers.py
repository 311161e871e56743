"""transformers: the Gated DeltaNet layers of Qwen3-Next and Qwen3.5 (dense and MoE) run on this library.

enable_context_parallel gives each such layer a subclass of its class with another forward; parameters stay as they
are. The documents of a batch are found where the model is entered, travel to the decoder layers as one more keyword
argument, which activation checkpointing keeps for the second forward, and from there to the layer itself:

    model(...)  ->  _bind_batch: told_documents  ->  decoder layer(..., cp_documents=)  ->  layer: conv, op, norm

Layers are recognised by their attributes, so nothing of transformers is imported. Letters: B batch, T tokens, H key
heads, HV value heads, K head_k_dim, V head_v_dim.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flashqla_cp.active import use_context
from flashqla_cp.conv import causal_conv1d
from flashqla_cp.integrations.attachment import (
    Attachment,
    Enabling,
    add_hook,
    is_changed,
    modules_above,
    passes_on,
    restore,
    swap_class,
)
from flashqla_cp.integrations.attention import attention_kind, find_attention, warn_of_attention
from flashqla_cp.integrations.call import CACHES, cache_of, context_of, told_documents
from flashqla_cp.integrations.documents import Documents, Sharding
from flashqla_cp.integrations.gdn_layers import find_layers, project
from flashqla_cp.integrations.refusals import agree, is_padded, refuse_labels, refuse_padding
from flashqla_cp.layer import BACKENDS
from flashqla_cp.op import chunk_gated_delta_rule
from flashqla_cp.parallel.comm import Comm
from flashqla_cp.parallel.exchange.choose import check_exchange_name

__all__ = ["disable_context_parallel", "enable_context_parallel", "use_context"]

ARGUMENT = "cp_documents"
LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document")

_documents: ContextVar[Documents | None] = ContextVar("flashqla_cp_documents", default=None)
_ran: ContextVar[bool] = ContextVar("flashqla_cp_ran", default=False)


def enable_context_parallel(
    model: nn.Module,
    group: dist.ProcessGroup | DeviceMesh | None,
    *,
    layout: str = "contiguous",
    exchange: str = "auto",
    backend: str = "auto",
) -> int:
    """Run every Gated DeltaNet layer of a transformers model on this library; call it on every rank.

    Call it before fully_shard, torch.compile, checkpoint wrapping and accelerate's hooks. The state dict does not
    change. Full-attention layers are left alone: with several ranks they need a context parallelism of their own, and a
    warning says so.

    Boundaries of the documents come from `with use_context(ctx)` around the model's forward (or cp_context=ctx passed
    to it), else from cu_seq_lens_q (offsets of the whole stream, before sharding), else from position_ids (this rank's
    rows of them; gathered once per forward). What else is given must agree. A batch on several ranks is one row.

    Args:
        model: a model, or any module that holds such layers.
        group: ranks that share a sequence; None or a group of one runs whole, possibly packed, rows on one device.
        layout: "contiguous", "zigzag" or "zigzag_per_document": how batches without a context are sharded.
        exchange: of contexts made for them, as for build_cp_context. A context given brings its own of both.
        backend: "auto", "tilelang" or "torch".

    Returns:
        The number of layers changed.

    Raises:
        ValueError: no such layer, one that is not understood or enabled already, a wrapped model, or a bad option.
            TypeError: group is neither. The forward raises ValueError for padding masks, for a cache in training or on
            several ranks, for boundaries that are missing on several ranks, for sources that contradict each other, and
            on several ranks for labels of which transformers would make the loss of this rank's rows alone.
    """
    _check_options(layout, exchange, backend)
    comm = None if group is None else Comm(group)
    layers = find_layers(model)
    width: int = max(layer.conv_kernel_size for layer in layers.values())  # type: ignore[type-var, assignment]
    sharding = Sharding(comm=comm, layout=layout, exchange=exchange, conv_width=width)
    attention = find_attention(model)
    enabling = Enabling(sharding=sharding, backend=backend, num_layers=len(layers), attends=bool(attention))
    for name, layer in layers.items():
        above = modules_above(model, name)
        swap_class(layer, _Layer, enabling)
        if above and passes_on(above[0], "hidden_states") and not is_changed(above[0]):
            swap_class(above[0], _Decoder, enabling)
        if above[1:] and passes_on(above[1], "input_ids", "inputs_embeds") and not is_changed(above[1]):
            add_hook(above[1], _bind_model, enabling)
        for module in above[2:] if sharding.world_size > 1 else ():
            if passes_on(module, "labels") and not is_changed(module):
                add_hook(module, _check_labels, enabling)
    if attention and sharding.world_size > 1:
        warn_of_attention(attention)
    return len(layers)


def disable_context_parallel(model: nn.Module) -> int:
    """Give every layer its own forward back; returns the number of layers changed. Warns where others of the layers
    that were enabled together stay enabled.

    Raises:
        ValueError: no layer is enabled, or the model was wrapped by fully_shard since.
    """
    changed = [module for module in model.modules() if is_changed(module)]
    enablings = Counter(module.flashqla_cp.enabling for module in changed if isinstance(module, _Layer))
    if not enablings:
        raise ValueError("model: no layer is enabled; expected a model changed by enable_context_parallel")
    restore(changed)
    for enabling, restored in enablings.items():
        if restored != enabling.num_layers:
            warnings.warn(
                f"model: holds {restored} of the {enabling.num_layers} layers that were enabled together, the others "
                "stay enabled; pass the module that was enabled to restore all of them",
                stacklevel=2,
            )
    return enablings.total()


class _Decoder(nn.Module):
    """Mixin of a decoder layer that holds a layer: binds the batch outside of checkpointing, hands it down inside."""

    flashqla_cp: Attachment

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _bind_batch(self, args, kwargs)
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _bind_batch(self, args, kwargs)  # for those that call forward themselves
        token, ran = _documents.set(kwargs.get(ARGUMENT)), _ran.set(False)
        try:
            output = super().forward(*args, **kwargs)
            if not _ran.get():
                raise RuntimeError(
                    f"model: the Gated DeltaNet layer of {type(self).__name__} was passed over, something replaced its "
                    "forward; call enable_context_parallel after it, or disable_context_parallel first"
                )
            return output
        finally:
            _documents.reset(token)
            _ran.reset(ran)


class _Layer(nn.Module):
    """Mixin of the Gated DeltaNet layer itself."""

    flashqla_cp: Attachment

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        _ran.set(True)
        documents = kwargs.pop(ARGUMENT, None) or _documents.get()
        told = dict(zip(self.flashqla_cp.names[1:], args, strict=False)) | kwargs
        if cache_of(told) is not None:
            _check_cache(self, documents)
            kwargs.pop("cp_context", None)
            return super().forward(hidden_states, *args, **kwargs)
        refuse_padding(told.get("attention_mask"))
        if documents is None:
            documents = told_documents(self.flashqla_cp.sharding, told, hidden_states)
        return _mix(self, hidden_states, documents)

    def extra_repr(self) -> str:
        return f"ranks={self.flashqla_cp.sharding.world_size}, backend={self.flashqla_cp.backend!r}"


def _mix(layer: Any, hidden_states: torch.Tensor, documents: Documents) -> torch.Tensor:
    """The layer's forward, [B, T, hidden_size] to the same; see flashqla_cp/layer.py for the formulas."""
    x = hidden_states
    if documents.cu_seqlens is not None:
        x = x.reshape(1, -1, x.shape[2])
    where: dict[str, Any] = {"cu_seqlens": documents.cu_seqlens, "cp_context": documents.context}
    qkv, z, b, a = project(layer, x)
    # Under autocast the projection is narrower than the stored weight.
    weight, bias = layer.conv1d.weight.squeeze(1).to(qkv.dtype), layer.conv1d.bias
    bias = None if bias is None else bias.to(qkv.dtype)
    qkv, _ = causal_conv1d(qkv, weight, bias, "silu", backend=layer.flashqla_cp.backend, **where)
    q, k, v = qkv.split([layer.key_dim, layer.key_dim, layer.value_dim], dim=2)
    q, k = (y.unflatten(2, (layer.num_k_heads, layer.head_k_dim)) for y in (q, k))
    gate: dict[str, Any] = {"use_gate_in_kernel": True}
    if hasattr(layer, "_compute_gate"):
        # Automodel keeps A_log and dt_bias in a module of their own, which gathers them only when it is called.
        a, gate = layer._compute_gate(a), {}
    else:
        gate |= {"A_log": layer.A_log, "dt_bias": layer.dt_bias}
    o, _ = chunk_gated_delta_rule(
        q,
        k,
        v.unflatten(2, (layer.num_v_heads, layer.head_v_dim)),
        a,
        b,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        backend=layer.flashqla_cp.backend,
        **gate,
        **where,
    )
    o = layer.norm(o.reshape(-1, layer.head_v_dim), z.reshape(-1, layer.head_v_dim))
    return layer.out_proj(o.reshape(*hidden_states.shape[:2], layer.value_dim))


def _bind_model(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """_bind_batch where a model is entered, whose full attention must be told the documents too."""
    return _bind_batch(module, args, kwargs, attention_kind(module) if module.flashqla_cp.enabling.attends else None)


def _bind_batch(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], attention: str | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Find the documents once, where a model or decoder layer is entered, and add them to its arguments."""
    told = dict(zip(module.flashqla_cp.names, args, strict=False)) | kwargs
    inputs = [told.get(name) for name in ("hidden_states", "inputs_embeds", "input_ids")]
    rows = next((x for x in inputs if x is not None), None)
    decodes = cache_of(told) is not None and not _trains(module)
    # On one device padded rows, whose positions mean little, end in the layer: refused, or left to transformers with a
    # cache. Of several ranks each looks for the documents, since all must hear of what one of them refuses.
    ignored = decodes or (module.flashqla_cp.sharding.world_size == 1 and is_padded(told.get("attention_mask")))
    if ARGUMENT not in kwargs and rows is not None and not ignored:
        kwargs = kwargs | {ARGUMENT: told_documents(module.flashqla_cp.sharding, told, rows, attention)}
    kwargs.pop("cp_context", None)
    return args, kwargs


def _check_labels(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a model that makes a loss, on several ranks; without a context all raise what one of them refuses."""
    told = dict(zip(module.flashqla_cp.names, args, strict=False)) | kwargs
    if not any(isinstance(below, _Layer) for below in module.modules()):
        return
    comm = module.flashqla_cp.sharding.comm
    check = partial(refuse_labels, told, comm.world_size)
    # The layers refuse a cache anyway, and a rank that generates may be called alone.
    if context_of(told) is None and cache_of(told) is None:
        agree(comm, "labels", check)
    else:
        check()


def _trains(module: nn.Module) -> bool:
    return module.training and torch.is_grad_enabled()


def _check_cache(layer: Any, documents: Documents | None) -> None:
    sharded = layer.flashqla_cp.sharding.world_size > 1
    if sharded or _trains(layer):
        where = "with a sequence sharded over ranks" if sharded else "in training"
        also = ", and to generate call disable_context_parallel(model) first" if sharded else ""
        raise ValueError(f"{CACHES[0]}: got one {where}, expected none; pass use_cache=False{also}")
    if documents is not None and (documents.context is not None or documents.cu_seqlens is not None):
        raise ValueError(f"{CACHES[0]}: got one with packed documents, expected none; pass use_cache=False")
    _say_once(f"with a cache {type(layer).__name__} runs the forward of transformers, not this library")


def _check_options(layout: str, exchange: str, backend: str) -> None:
    if layout not in LAYOUTS:
        why = "; use_context takes a context with any token ranges" if layout == "custom" else ""
        raise ValueError(f"layout: got {layout!r}, expected one of {LAYOUTS}{why}")
    check_exchange_name(exchange)
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, expected one of {BACKENDS}")


@cache
def _say_once(text: str) -> None:
    logging.getLogger(__name__).warning(text)
