"""CPGatedDeltaNet: Megatron's Gated DeltaNet layer with the forward of this library.

A subclass of Megatron's GatedDeltaNet with the same parameters and checkpoints. It builds itself, so that neither fla
nor a GPU is needed, and between Megatron's own projections it goes

    in_proj -> which documents (batches.py) -> conv, op -> norm -> out_proj

Letters: T rows of this rank, B batch, H key heads, HV value heads, K and V their widths.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from flashqla_cp.conv import causal_conv1d
from flashqla_cp.integrations.megatron.batches import PACKED_LAYOUTS, find_documents
from flashqla_cp.integrations.refusals import need
from flashqla_cp.layer import BACKENDS
from flashqla_cp.op import chunk_gated_delta_rule
from flashqla_cp.parallel.exchange.choose import check_exchange_name

SECTIONS = ("query", "key", "value", "z", "beta", "alpha")


def check_options(exchange: str, backend: str, packed_layout: str) -> None:
    """Raise ValueError for an option that does not exist."""
    check_exchange_name(exchange)
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, expected one of {BACKENDS}")
    if packed_layout not in PACKED_LAYOUTS:
        raise ValueError(f"packed_layout: got {packed_layout!r}, expected one of {PACKED_LAYOUTS}")


@functools.cache
def layer_class() -> type[nn.Module]:
    """The class CPGatedDeltaNet, made when Megatron is there. Raises ImportError without it."""
    need("megatron.core", "megatron")
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    home = __name__.rpartition(".")[0]
    return type("CPGatedDeltaNet", (CPLayer, GatedDeltaNet), {"__module__": home, "__doc__": CPLayer.__doc__})


class CPLayer(nn.Module):
    """Megatron's Gated DeltaNet layer on this library: [T, B, hidden_size] to the same, the sequence sharded over CP.

    The constructor takes what Megatron's layers give it, and the options of with_context_parallel_gdn. Arguments that
    concern attention only are ignored.

    Raises ValueError for a configuration that the layer cannot compute.
    """

    config: Any
    in_proj: Any
    out_proj: Any
    out_norm: Any
    conv1d: nn.Conv1d
    tp_size: int
    in_proj_dim: int
    v_dim: int
    conv_dim_local_tp: int
    num_v_heads_local_tp: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int
    in_proj_split_sections: list[int]
    _apply_gated_norm: Any

    def __init__(
        self,
        config: Any,
        submodules: Any,
        layer_number: int | None = None,
        bias: bool = False,
        conv_bias: bool = False,
        conv_init: float | None = None,
        use_qk_l2norm: bool = True,
        A_init_range: tuple[float, float] = (1, 16),
        pg_collection: Any = None,
        *,
        exchange: str = "auto",
        backend: str = "auto",
        packed_layout: str = "zigzag_per_document",
        name: str | None = None,
        **_of_attention: Any,
    ) -> None:
        from megatron.core.transformer.module import MegatronModule

        MegatronModule.__init__(self, config)  # not the parent's: that demands fla and a GPU
        check_options(exchange, backend, packed_layout)
        _check_config(config, pg_collection)
        self.exchange, self.backend, self.packed_layout = exchange, backend, packed_layout
        self.layer_number, self.bias, self.conv_bias, self.conv_init = layer_number, bias, conv_bias, conv_init
        self.use_qk_l2norm, self.A_init_range = use_qk_l2norm, A_init_range
        self.pg_collection, self.tp_group = pg_collection, pg_collection.tp
        for attribute, value in _sizes(config, pg_collection).items():
            setattr(self, attribute, value)
        self._add_parameters(submodules, name)
        recomputed = config.recompute_modules or () if config.recompute_granularity == "selective" else ()
        self.recompute_norm_out = "gdn_norm_out" in recomputed
        self.reset_parameters()

    def _add_parameters(self, submodules: Any, name: str | None) -> None:
        """Parameters with the names, order and marks of Megatron's layer, which its checkpoints rely on."""
        from megatron.core.transformer.spec_utils import build_module

        def linear(spec: Any, part: str, inputs: int, outputs: int, init_method: Any, **kwargs: Any) -> Any:
            if name is not None:
                kwargs["name"] = f"{name}.{part}"
            shared = {"config": self.config, "bias": self.bias, "is_expert": False, "tp_group": self.tp_group}
            return build_module(spec, inputs, outputs, init_method=init_method, **shared, **kwargs)

        config, made = self.config, {"device": _device(self.config), "dtype": self.config.params_dtype}
        into = {"gather_output": False, "skip_bias_add": False, "tp_comm_buffer_name": "fc1"}
        back = {"input_is_parallel": True, "skip_bias_add": True, "tp_comm_buffer_name": "fc2"}
        hidden, projected = config.hidden_size, self.in_proj_dim
        self.in_proj = linear(submodules.in_proj, "in_proj", hidden, projected, config.init_method, **into)
        channels, width = self.conv_dim_local_tp, self.conv_kernel_dim
        self.conv1d = nn.Conv1d(
            channels, channels, width, groups=channels, padding=width - 1, bias=self.conv_bias, **made
        )
        self.dt_bias = nn.Parameter(torch.empty(self.num_v_heads_local_tp, **made))
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads_local_tp, **made))
        for parameter in (*self.conv1d.parameters(), self.dt_bias, self.A_log):
            parameter.tensor_model_parallel, parameter.partition_dim = True, 0  # type: ignore[attr-defined]
        normed = {"hidden_size": self.value_head_dim, "eps": config.layernorm_epsilon}
        self.out_norm = build_module(submodules.out_norm, config=config, **normed)
        init_method = config.output_layer_init_method
        self.out_proj = linear(submodules.out_proj, "out_proj", self.v_dim, hidden, init_method, **back)

    def reset_parameters(self) -> None:
        """Megatron's initial values: dt_bias 1, A uniform in A_init_range. On the CPU every rank draws all heads."""
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        if not self.config.perform_initialization or self.A_log.is_meta:
            return
        with torch.no_grad():
            if self.A_log.is_cuda:
                with get_cuda_rng_tracker().fork():
                    if self.conv_init is not None:
                        self.conv1d.weight.uniform_(-self.conv_init, self.conv_init)
                    self.A_log.uniform_(*self.A_init_range).log_()
            else:
                if self.conv_init is not None:
                    self.conv1d.weight.uniform_(-self.conv_init, self.conv_init)
                drawn = torch.empty(self.num_value_heads).uniform_(*self.A_init_range).log_()
                self.A_log.copy_(drawn.chunk(self.tp_size)[self.tp_group.rank()])
            self.dt_bias.fill_(1.0)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        inference_context: Any = None,
        inference_params: Any = None,
        packed_seq_params: Any = None,
        **_of_attention: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the layer to this rank's rows, sharded as Megatron shards them; attention_mask is not read.

        Without packed_seq_params (or in their format "sbhd") each of the B sequences is one document, its parts r and
        2P-1-r on rank r of P. In format "thd" the documents are those of packed_seq_params, in packed_layout.

        Raises:
            ValueError: rows and documents that do not fit. NotImplementedError: called with an inference context.
        """
        if inference_context is not None or inference_params is not None:
            raise NotImplementedError("inference_context: Gated DeltaNet layers train only; pass None")
        projected, _ = self.in_proj(hidden_states)  # whole rows again where sequence parallelism had cut them
        T, B = projected.shape[:2]
        documents = find_documents(self, T, B, packed_seq_params)
        where: dict[str, Any] = {"cu_seqlens": documents.cu_seqlens, "cp_context": documents.context}
        rows = projected.transpose(0, 1)
        if documents.context is not None:
            rows = rows.reshape(1, B * T, -1)
        qkv, z, beta, alpha = rows.split([self.conv_dim_local_tp, *self.in_proj_split_sections[3:]], dim=2)
        weight, bias = self.conv1d.weight.squeeze(1).to(qkv.dtype), self.conv1d.bias
        bias = None if bias is None else bias.to(qkv.dtype)
        qkv, _ = causal_conv1d(qkv, weight, bias, "silu", backend=self.backend, **where)
        q, k, v = qkv.split(self.in_proj_split_sections[:3], dim=2)
        q, k = (x.unflatten(2, (-1, self.key_head_dim)) for x in (q, k))
        o, _ = chunk_gated_delta_rule(
            q,
            k,
            v.unflatten(2, (-1, self.value_head_dim)),
            alpha,
            beta,
            use_qk_l2norm_in_kernel=self.use_qk_l2norm,
            use_gate_in_kernel=True,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            use_beta_sigmoid_in_kernel=True,
            backend=self.backend,
            **where,
        )
        return self._leave(o, z, T, B)

    def _leave(self, o: torch.Tensor, z: torch.Tensor, T: int, B: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gated norm and output projection; what lies between them may be recomputed instead of kept."""

        def norm(o: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            z = z.unflatten(-1, (-1, self.value_head_dim))
            return self._apply_gated_norm(o, z).reshape(B, T, -1).transpose(0, 1).contiguous()

        if not self.recompute_norm_out:
            return self.out_proj(norm(o, z))
        from megatron.core.tensor_parallel import CheckpointWithoutOutput

        checkpoint = CheckpointWithoutOutput(fp8=self.config.fp8)
        out, bias = self.out_proj(checkpoint.checkpoint(norm, o, z))
        checkpoint.discard_output_and_register_recompute(out)
        return out, bias

    def extra_repr(self) -> str:
        return f"ranks={self.pg_collection.cp.size()}, exchange={self.exchange!r}, backend={self.backend!r}"


def _check_config(config: Any, pg_collection: Any) -> None:
    for group in ("tp", "cp"):
        if getattr(pg_collection, group, None) is None:
            raise ValueError(f"pg_collection: has no group {group!r}, expected those of tensor and context parallelism")
    name = getattr(config.activation_func, "__name__", config.activation_func)
    if name not in ("silu", "swish"):
        raise ValueError(f"config.activation_func: got {name}, expected silu for a Gated DeltaNet layer")
    tp, H, HV = pg_collection.tp.size(), config.linear_num_key_heads, config.linear_num_value_heads
    if HV % H or H % tp:
        raise ValueError(
            f"config.linear_num_value_heads: got {HV}, with linear_num_key_heads={H} on {tp} tensor-parallel ranks; "
            "expected a multiple of the key heads, and those a multiple of the ranks"
        )


def _sizes(config: Any, pg_collection: Any) -> dict[str, Any]:
    """Sizes under the names by which Megatron's checkpoint code knows them; *_local_tp of this tensor-parallel rank."""
    tp, K, V = pg_collection.tp.size(), config.linear_key_head_dim, config.linear_value_head_dim
    H, HV = config.linear_num_key_heads, config.linear_num_value_heads
    qk, v = H * K, HV * V
    return {
        "tp_size": tp,
        "cp_size": pg_collection.cp.size(),
        "sp_size": tp if config.sequence_parallel else 1,
        "hidden_size": config.hidden_size,
        "act_fn": config.activation_func,
        "activation": config.activation_func.__name__,
        "conv_kernel_dim": config.linear_conv_kernel_dim,
        "key_head_dim": K,
        "value_head_dim": V,
        "num_key_heads": H,
        "num_value_heads": HV,
        "qk_dim": qk,
        "v_dim": v,
        "qk_dim_local_tp": qk // tp,
        "v_dim_local_tp": v // tp,
        "num_k_heads_local_tp": H // tp,
        "num_v_heads_local_tp": HV // tp,
        "in_proj_dim": 2 * qk + 2 * v + 2 * HV,
        "in_proj_split_names": list(SECTIONS),
        "in_proj_split_sections": [part // tp for part in (qk, qk, v, v, HV, HV)],
        "conv_dim": 2 * qk + v,
        "conv_dim_local_tp": (2 * qk + v) // tp,
    }


def _device(config: Any) -> torch.device:
    """Where Megatron's own layers put their parameters."""
    if getattr(config, "init_model_with_meta_device", False):
        return torch.device("meta")
    if config.use_cpu_initialization or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
