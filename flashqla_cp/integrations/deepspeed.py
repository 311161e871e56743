"""DeepSpeed: Gated DeltaNet layers of transformers models, sharded over DeepSpeed's sequence-parallel groups.

    mpu = UlyssesSPAttentionHF.register_with_transformers(model, ...)   # or init_sequence_parallel(size), see there
    enable_context_parallel(model, mpu)                                 # this library in the Gated DeltaNet layers
    engine, *_ = deepspeed.initialize(model=model, mpu=mpu, ...)        # ZeRO 0, 1, 2 or 3
    loss = scale_loss(engine, loss_sum, num_targets)                    # instead of a mean over this rank's tokens
    engine.backward(loss); engine.step()

Full attention stays with Ulysses. The layers' parameters are ordinary replicated ones: ZeRO reduces and shards them
over the data-parallel and sequence-parallel ranks together, and nothing here reduces a gradient.
"""

from __future__ import annotations

import sys
import warnings
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flashqla_cp.active import use_context
from flashqla_cp.integrations import transformers as plugin
from flashqla_cp.integrations.attachment import KEY, add_hook
from flashqla_cp.integrations.attention import ATTENTION_WARNING
from flashqla_cp.integrations.refusals import need
from flashqla_cp.integrations.transformers import disable_context_parallel
from flashqla_cp.parallel.comm import Comm

__all__ = [
    "count_targets",
    "disable_context_parallel",
    "enable_context_parallel",
    "init_distributed",
    "init_sequence_parallel",
    "scale_loss",
    "use_context",
]

ULYSSES = "deepspeed.runtime.sequence_parallel.ulysses_sp"
ATTENTION_CHILDREN = {"q_proj", "k_proj", "v_proj", "o_proj"}
# Ulysses drops the attention mask, and these read the documents from nothing else.
BLIND_TO_DOCUMENTS = ("sdpa", "flex_attention")


def init_distributed() -> None:
    """Start DeepSpeed's communication; with CPUs as accelerator it is gloo, and nothing is compiled first.

    DeepSpeed would otherwise spend minutes compiling a shared-memory transport, and fail without a C++ compiler. The
    launcher (torchrun or deepspeed) has set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Raises ModuleNotFoundError, with what to install, where DeepSpeed is not there.
    """
    need("deepspeed", "deepspeed")
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(auto_mpi_discovery=False)


def init_sequence_parallel(size: int) -> Any:
    """Make DeepSpeed's sequence groups, `size` consecutive ranks each, for models without full attention.

    A model with full attention gets its groups from UlyssesSPAttentionHF.register_with_transformers instead.

    Returns:
        What deepspeed.initialize takes as mpu; None for a size of 1.

    Raises:
        ValueError: a size that does not divide the number of ranks. RuntimeError: before init_distributed().
    """
    need("deepspeed", "deepspeed")
    if not dist.is_initialized():
        raise RuntimeError("init_sequence_parallel: no process group yet, expected a call of init_distributed() before")
    world = dist.get_world_size()
    if size < 1 or world % size:
        raise ValueError(f"size: got {size} with {world} rank(s), expected a divisor of their number")
    if size == 1:
        return None
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    parallel_state_sp.initialize_sequence_parallel(size)
    return parallel_state_sp


def enable_context_parallel(
    model: nn.Module, mpu: Any, *, layout: str = "contiguous", exchange: str = "auto", backend: str = "auto"
) -> int:
    """Run every Gated DeltaNet layer of a transformers model on this library, sharded over DeepSpeed's sequence group.

    Call it on every rank before deepspeed.initialize(model=model, mpu=mpu, ...), or after it with engine.module, where
    a framework calls that. Boundaries of the documents come as for the plugin of transformers; Ulysses needs
    position_ids in any case, which suffice: this rank's rows of the positions in the whole documents.

    Training raises unless DeepSpeed was initialised with the same group. With full attention, the forward raises for
    shards that Ulysses cannot join (it takes equal contiguous ones), and for several documents where its core attention
    does not keep them apart: "sdpa" and "flex_attention" do not, the flash attentions do.

    Args:
        model: a model, or any module that holds such layers.
        mpu: what UlyssesSPAttentionHF.register_with_transformers or init_sequence_parallel returned, or another object
            with get_sequence_parallel_group(); None for sequences that are not sharded.
        layout: "contiguous"; without full attention also "zigzag" or "zigzag_per_document".
        exchange: of contexts made for a batch, as for build_cp_context.
        backend: "auto", "tilelang" or "torch".

    Returns:
        The number of layers changed.

    Raises:
        ValueError: as the transformers plugin does, and for full attention that is not sharded by Ulysses. TypeError:
            model is a DeepSpeed engine, or mpu has no sequence group.
    """
    if hasattr(model, "zero_optimization_stage"):
        raise TypeError(
            f"model: got a {type(model).__name__}, expected a model: that before deepspeed.initialize, or engine.module"
        )
    group = _sequence_group(mpu)
    attention = {} if group is None or dist.get_world_size(group) == 1 else _find_attention(model)
    if attention and layout != "contiguous":
        raise ValueError(f"layout: got {layout!r} for a model with full attention, Ulysses takes 'contiguous' only")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ATTENTION_WARNING)  # Ulysses shards them, as checked above
        num_layers = plugin.enable_context_parallel(model, group, layout=layout, exchange=exchange, backend=backend)
    known = next(getattr(module, KEY) for module in model.modules() if hasattr(module, KEY))
    add_hook(model, _check_groups, known.enabling)
    for module in attention.values():
        add_hook(module, _check_documents, known.enabling)
    return num_layers


def scale_loss(engine: Any, loss_sum: torch.Tensor, num_targets: int | torch.Tensor) -> torch.Tensor:
    """What to give to engine.backward, so that the step's gradient is that of the mean over all of its targets.

    DeepSpeed sums gradients over the sequence-parallel ranks and averages them over the data-parallel ones; ZeRO 3
    averages over both. It also divides by the number of micro-batches of a step. This undoes all three.

    Args:
        engine: what deepspeed.initialize returned.
        loss_sum: sum of the losses of this rank's tokens in one micro-batch, a scalar.
        num_targets: number of targets of the whole step: of all ranks and all its micro-batches; see count_targets.

    Returns:
        A scalar. For a report add up loss_sum / num_targets over all ranks and micro-batches instead.

    Raises:
        ValueError: DeepSpeed settings under which gradients are not scaled alike.
    """
    return loss_sum * (_divisor(engine) * engine.gradient_accumulation_steps()) / num_targets


def count_targets(engine: Any, *labels: torch.Tensor, ignored: int = -100) -> int:
    """Number of labels other than `ignored`, over all ranks; pass this rank's labels of each micro-batch of a step.

    Communicates and waits for the result; all ranks call it.
    """
    local = torch.stack([(x != ignored).sum() for x in labels]).sum().to(engine.device)
    counts = Comm(engine.seq_data_parallel_group).all_gather(local[None]).wait()
    return int(counts.sum())


def _divisor(engine: Any) -> int:
    """By what DeepSpeed divides the sum of the gradients of all ranks."""
    if engine.gradient_predivide_factor() != 1.0:
        raise ValueError(
            f"gradient_predivide_factor: got {engine.gradient_predivide_factor()}, expected 1.0, the default"
        )
    if engine.sequence_parallel_size > 1 and type(engine.optimizer).__name__ == "BF16_Optimizer":
        # It takes the ranks of a sequence for tensor-parallel ones: all but the first have no gradient to step then.
        raise ValueError(
            "data_types: got grad_accum_dtype fp32 with bf16 and ZeRO 0 or 1, where DeepSpeed's optimizer cannot take "
            "a step on several ranks of a sequence; leave it out, or use ZeRO 2 or 3"
        )
    if engine.zero_optimization_stage() == 3:
        if not engine.zero_reduce_scatter():
            # Buckets of more than reduce_bucket_size elements are averaged, the others summed.
            raise ValueError("reduce_scatter: got false with ZeRO 3, expected true, the default")
        return int(engine.seq_dp_world_size)
    if not engine.gradient_average:
        return 1
    return int(engine.seq_dp_world_size) // int(engine.sequence_parallel_size)


def _sequence_group(mpu: Any) -> dist.ProcessGroup | None:
    if mpu is None:
        return None
    if not hasattr(mpu, "get_sequence_parallel_group"):
        raise TypeError(
            f"mpu: got {type(mpu).__name__} without get_sequence_parallel_group, expected what "
            "UlyssesSPAttentionHF.register_with_transformers or init_sequence_parallel returned, or None"
        )
    group: dist.ProcessGroup = mpu.get_sequence_parallel_group()
    return group


def _find_attention(model: nn.Module) -> dict[str, nn.Module]:
    """The model's full-attention modules by name; raises ValueError unless Ulysses shards each of them."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not any("Attention" in cls.__name__ for cls in type(module).__mro__):
            continue
        if not set(module._modules) >= ATTENTION_CHILDREN or not hasattr(module, "config"):
            raise ValueError(
                f"model: {name or 'it'} is a {type(module).__name__}, whose attributes are not those known"
            )
        kind = _core_attention(module)
        if _registered(module, kind).__module__ != ULYSSES:
            raise ValueError(
                f"model: {name or 'it'} runs {kind!r} on the rows of this rank alone; call "
                "UlyssesSPAttentionHF.register_with_transformers(model, ...) first and pass what it returns as mpu"
            )
        found[name] = module
    return found


def _core_attention(module: Any) -> str:
    kind: str = module.config._attn_implementation
    return kind


def _registered(module: nn.Module, kind: str) -> Any:
    """What transformers calls for this kind of attention, read in the file of the module's class; or None."""
    for cls in type(module).__mro__:
        registry = getattr(sys.modules.get(cls.__module__), "ALL_ATTENTION_FUNCTIONS", {})
        if kind in registry:
            return registry[kind]
    return None


def _check_groups(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a training forward: DeepSpeed reduces gradients over the groups that the layers are sharded over."""
    if not (module.training and torch.is_grad_enabled()):
        return
    from deepspeed.utils import groups

    comm = module.flashqla_cp.sharding.comm
    alone = [dist.get_rank()] if dist.is_initialized() else []
    ours = alone if comm is None else dist.get_process_group_ranks(comm.group)
    group = _sequence_group(groups.mpu) if hasattr(groups.mpu, "get_sequence_parallel_group") else None
    theirs = alone if group is None else dist.get_process_group_ranks(group)
    if ours != theirs:
        raise ValueError(
            f"mpu: DeepSpeed shares sequences among ranks {theirs}, the model was enabled for ranks {ours}; pass the "
            "same mpu to enable_context_parallel and deepspeed.initialize, and train after the latter"
        )
    if groups.mesh_device is not None and len(ours) > 1:
        raise ValueError(
            "mesh_param: DeepSpeed was initialised with a mesh (mesh_param, or data_parallel_size in its config), with "
            "which it does not reduce gradients over the sequence-parallel ranks; pass mpu alone"
        )


def _check_documents(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before full attention: Ulysses can join the shards, and its core attention keeps documents apart."""
    documents = kwargs.get(plugin.ARGUMENT)
    context = None if documents is None else documents.context
    if context is None:
        raise ValueError("boundaries: none reached full attention; call the model as a whole, not one of its parts")
    plan = context.plan
    length = plan.num_tokens // plan.world_size
    if plan.ranges != tuple(((rank * length, (rank + 1) * length),) for rank in range(plan.world_size)):
        raise ValueError(
            f"cp_context: Ulysses joins equal contiguous shards only, got {context!r}; expected layout 'contiguous' "
            f"and a number of tokens that {plan.world_size} divides"
        )
    kind = _core_attention(module)
    begun = sum(end > start for start, end in pairwise(plan.cu_seqlens))
    if kind in BLIND_TO_DOCUMENTS and begun > 1:
        raise ValueError(
            f"attn_implementation: under Ulysses {kind!r} would attend across the {begun} documents of this batch; "
            "expected one document, or a flash attention, which tells documents by position_ids"
        )
