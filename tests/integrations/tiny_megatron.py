"""Tiny GPT models of megatron-core with Gated DeltaNet layers on the CPU, stock and ours, and batches for them.

Megatron's own layer asks for fla and a GPU; stock_on_cpu lends it what it misses, and its deterministic mode then runs
in plain torch. Our layer gets none of that.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

VOCABULARY, LONGEST = 64, 192
SHORTEST = 12  # part of a sequence of 96 tokens on 4 ranks
GDN = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def make_config(context_parallel: int = 1, tensor_parallel: int = 1, **changed: Any) -> Any:
    import torch.nn.functional as F
    from megatron.core.transformer import TransformerConfig

    settings: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 2,
        "normalization": "RMSNorm",
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "deterministic_mode": True,
        "context_parallel_size": context_parallel,
        "tensor_model_parallel_size": tensor_parallel,
        "sequence_parallel": tensor_parallel > 1,
        "cp_comm_type": "p2p",
        **GDN,
    }
    return TransformerConfig(**settings | changed)


def make_block_spec(config: Any) -> Any:
    """Spec of a block whose layers are Megatron's local ones, with the stock Gated DeltaNet for attention."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layer = get_gpt_layer_local_spec(normalization=config.normalization)
    parts = {"in_proj": ColumnParallelLinear, "out_norm": Norm, "out_proj": RowParallelLinear}
    layer.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, submodules=GatedDeltaNetSubmodules(**parts))
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=Norm)


class Norm(torch.nn.RMSNorm):
    """Unlike Megatron's wrapper of the same, it may be used with sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def make_model(config: Any, spec: Any, **kwargs: Any) -> Any:
    from megatron.core.models.gpt import GPTModel

    torch.manual_seed(0)
    settings = {"vocab_size": VOCABULARY, "max_sequence_length": LONGEST, "parallel_output": True}
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=False,
        **settings | kwargs,
    )


def fill(model: torch.nn.Module) -> None:
    """Weights that depend on a parameter's name only; even heads hardly forget, so a state lost at a cut shows.

    With tensor parallelism each rank gets its part of the same weights.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parts = tensor_parts(name, parameter)
            shape = list(parameter.shape)
            if parts is not None:
                shape[parts.dim] *= parts.size
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            values = torch.ones(shape)
            if name.endswith("A_log"):
                values[::2], values[1::2] = -8.0, -1.0
            elif name.endswith("dt_bias"):
                values.uniform_(-1.0, 1.0, generator=generator)
            elif name.endswith("conv1d.weight"):
                values.uniform_(-0.5, 0.5, generator=generator)
            elif parameter.ndim >= 2:
                values.normal_(std=0.15, generator=generator)
            parameter.copy_(values if parts is None else parts.cut(values))


@dataclass(frozen=True, kw_only=True)
class Parts:
    """How tensor parallelism cuts a parameter: each of its sections along dim into size equal pieces."""

    dim: int
    sections: tuple[int, ...]
    size: int
    rank: int

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        pieces = [section.chunk(self.size, self.dim)[self.rank] for section in whole.split(self.sections, self.dim)]
        return torch.cat(pieces, self.dim)

    def join(self, pieces: list[torch.Tensor]) -> torch.Tensor:
        local = [section // self.size for section in self.sections]
        sections = zip(*(piece.split(local, self.dim) for piece in pieces), strict=True)
        return torch.cat([torch.cat(section, self.dim) for section in sections], self.dim)


def tensor_parts(name: str, parameter: torch.Tensor) -> Parts | None:
    from megatron.core import parallel_state

    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    if size == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return None
    dim = 1 if name.endswith(("out_proj.weight", "linear_fc2.weight")) else 0
    H, HV = GDN["linear_num_key_heads"], GDN["linear_num_value_heads"]
    qk, v = H * GDN["linear_key_head_dim"], HV * GDN["linear_value_head_dim"]
    whole = parameter.shape[dim] * size
    sections: tuple[int, ...] = (whole,)
    if name.endswith("in_proj.weight"):
        sections = (qk, qk, v, v, HV, HV)
    elif name.endswith("conv1d.weight"):
        sections = (qk, qk, v)
    elif name.endswith("linear_fc1.weight"):
        sections = (whole // 2, whole // 2)
    return Parts(dim=dim, sections=sections, size=size, rank=rank)


def full_gradients(model: torch.nn.Module, context_group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """Gradients summed over the context-parallel ranks, and put together from the tensor-parallel ones."""
    from megatron.core import parallel_state

    group, found = parallel_state.get_tensor_model_parallel_group(), {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.clone()
        dist.all_reduce(gradient, group=context_group)
        parts = tensor_parts(name, parameter)
        if parts is not None:
            pieces = [torch.empty_like(gradient) for _ in range(parts.size)]
            dist.all_gather(pieces, gradient, group=group)
            gradient = parts.join(pieces)
        elif getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(gradient, group=group)  # as Megatron does at the end of a step
        found[name] = gradient
    return found


@contextlib.contextmanager
def stock_on_cpu() -> Iterator[None]:
    """Make Megatron's own layer run on the CPU."""
    modules = [importlib.import_module("megatron.core.ssm.gated_delta_net")]
    if hasattr(modules[0], "__path__"):
        modules = [importlib.import_module(f"{modules[0].__name__}.{part}") for part in ("common", "gdn")]

    def l2norm(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)

    with contextlib.ExitStack() as stack:
        for module in modules:
            if hasattr(module, "HAVE_FLA"):
                stack.enter_context(mock.patch.object(module, "HAVE_FLA", True))
            if hasattr(module, "l2norm"):
                stack.enter_context(mock.patch.object(module, "l2norm", l2norm))
            elif "HAVE_FLA" in vars(module):
                stack.enter_context(mock.patch.object(module, "l2norm", l2norm, create=True))
        stack.enter_context(cpu_as_gpu())
        yield


@contextlib.contextmanager
def cpu_as_gpu() -> Iterator[None]:
    """Parts of Megatron that always ask for the current GPU, or for its random numbers, get the CPU's."""
    from megatron.core import tensor_parallel

    tracker = mock.Mock(fork=contextlib.nullcontext)
    with (
        mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        mock.patch.object(tensor_parallel, "get_cuda_rng_tracker", lambda *args, **kwargs: tracker),
    ):
        yield


def initialize(context_parallel: int, tensor_parallel: int = 1) -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel, context_parallel_size=context_parallel
    )


def make_batch(offsets: tuple[int, ...] | None = None, rows: int = 2, length: int = 96) -> dict[str, torch.Tensor]:
    """tokens, labels, loss_mask, position_ids [B, S]; with offsets one row of packed documents.

    No target counts at the first token of a piece that a rank may own: then as many count on a rank after the shift by
    one that multi-token prediction makes, and the losses of the ranks, which it divides by that number, add up.
    """
    generator = torch.Generator().manual_seed(1)
    bounds = list(range(0, (rows + 1) * length, length)) if offsets is None else list(offsets)
    tokens = torch.randint(VOCABULARY, (bounds[-1],), generator=generator)
    labels, mask, positions = tokens.roll(-1), torch.ones(bounds[-1]), torch.empty(bounds[-1], dtype=torch.int64)
    mask[::SHORTEST] = 0.0
    for start, end in pairwise(bounds):
        mask[max(start, end - 1) : end] = 0.0
        positions[start:end] = torch.arange(end - start)
    shape = (rows, length) if offsets is None else (1, -1)
    found = {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": positions}
    return {name: x.view(shape) for name, x in found.items()}


def slice_sequences(batch: dict[str, torch.Tensor], group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """Megatron's own zigzag slicing."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    takes = inspect.signature(get_batch_on_this_cp_rank).parameters
    extra = {"is_hybrid_cp": False} if "is_hybrid_cp" in takes else {}
    return get_batch_on_this_cp_rank(dict(batch), cp_group=group, **extra)


def slice_documents(
    batch: dict[str, torch.Tensor], offsets: tuple[int, ...], rank: int, size: int
) -> dict[str, torch.Tensor]:
    """The rows that Transformer Engine's thd_get_partitioned_indices, which needs a GPU, gives to a rank."""
    rows = []
    for start, end in pairwise(offsets):
        part = (end - start) // (2 * size)
        for index in (rank, 2 * size - 1 - rank):
            rows.append(torch.arange(start + index * part, start + (index + 1) * part))
    return {name: x[:, torch.cat(rows)] for name, x in batch.items()}


def make_packed(offsets: tuple[int, ...], qkv_format: str = "thd", **kwargs: Any) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
    return PackedSeqParams(qkv_format=qkv_format, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, **kwargs)


def release() -> tuple[int, ...]:
    """Release of megatron-core, (major, minor)."""
    return tuple(int(part) for part in importlib.metadata.version("megatron-core").split(".")[:2])


def step(model: Any, batch: dict[str, torch.Tensor], num_targets: float, packed: Any = None) -> torch.Tensor:
    """Forward and backward of the sum of this rank's token losses over all targets; returns that loss."""
    losses = model(
        input_ids=batch["tokens"],
        position_ids=batch["position_ids"],
        attention_mask=None,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        **{} if packed is None else {"packed_seq_params": packed},
    )
    loss = (losses * batch["loss_mask"]).sum() / num_targets
    loss.backward()
    return loss.detach()
