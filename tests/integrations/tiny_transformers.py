"""Tiny random Qwen3-Next and Qwen3.5 models, packed batches, and what one unpatched process makes of them."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

import flashqla_cp.integrations.transformers as plugin
from flashqla_cp import causal_conv1d, chunk_gated_delta_rule
from flashqla_cp.parallel.context import CPContext
from flashqla_cp.testing.metrics import relative_l2

OFFSETS = [0, 7, 30, 96]
VOCABULARY = 64
WIDTHS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "use_cache": False,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
CLASSES = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", EXPERTS),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", EXPERTS),
}
Expected = tuple[float, dict[str, torch.Tensor]]
LINEAR, HYBRID = ("linear_attention",) * 2, ("linear_attention", "full_attention", "linear_attention")


def families() -> list[str]:
    """The families that the installed release has; Qwen3-Next alone before release 5."""
    try:
        major = int(importlib.metadata.version("transformers").split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return []
    return list(CLASSES) if major >= 5 else ["qwen3_next"]


def make_model(
    family: str, layer_types: tuple[str, ...] = LINEAR, attention: str = "sdpa", std: float = 0.15, **sizes: Any
) -> Any:
    """A model in training mode whose even heads hardly forget: a state that is lost at a cut shows.

    std: of the weights, which matter, unlike the 0.02 of a fresh model. sizes: of the configuration, instead of WIDTHS.
    """
    import transformers

    config_name, model_name, extra = CLASSES[family]
    config = getattr(transformers, config_name)(
        **(WIDTHS | extra | sizes), num_hidden_layers=len(layer_types), layer_types=list(layer_types)
    )
    config._attn_implementation = attention
    torch.manual_seed(0)
    model = getattr(transformers, model_name)(config).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter[::2], parameter[1::2] = -8.0, -1.0
            elif name.endswith("dt_bias"):
                parameter.uniform_(-1.0, 1.0)
            elif name.endswith("conv1d.weight"):
                parameter.uniform_(-0.5, 0.5)
            elif parameter.ndim >= 2:
                parameter.normal_(std=std)
    return model


@functools.cache
def make_batch(offsets: tuple[int, ...] = tuple(OFFSETS), seed: int = 1) -> dict[str, torch.Tensor]:
    """input_ids, labels (next token inside a document, else -100) and position_ids, [1, T] each."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (1, offsets[-1]), generator=generator)
    labels, positions = torch.full_like(ids, -100), torch.zeros_like(ids)
    for start, end in pairwise(offsets):
        labels[:, start : end - 1] = ids[:, start + 1 : end]
        positions[:, start:end] = torch.arange(end - start)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def token_loss(logits: torch.Tensor, labels: torch.Tensor, num_targets: int) -> torch.Tensor:
    """Sum of the token losses over the number of targets of the whole stream."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum") / num_targets


def num_targets(batch: dict[str, torch.Tensor]) -> int:
    return int((batch["labels"] != -100).sum())


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


@functools.cache
def expected(
    family: str, layer_types: tuple[str, ...] = LINEAR, offsets: tuple[int, ...] = tuple(OFFSETS), seed: int = 1
):
    """(loss, gradients) of the unpatched model in one process, which sees one document at a time."""
    model, batch = make_model(family, layer_types), make_batch(offsets, seed)
    total = 0.0
    for start, end in pairwise(offsets):
        row = {name: x[:, start:end] for name, x in batch.items()}
        logits = model(input_ids=row["input_ids"], position_ids=row["position_ids"]).logits
        loss = token_loss(logits, row["labels"], num_targets(batch))
        loss.backward()
        total += loss.item()
    return total, gradients(model)


def errors(
    loss: float, found: dict[str, torch.Tensor], wanted: tuple[float, dict[str, torch.Tensor]]
) -> dict[str, float]:
    """Relative errors of the loss and of each gradient, by name."""
    assert set(found) == set(wanted[1])
    scores = {name: relative_l2(found[name], gradient) for name, gradient in wanted[1].items()}
    return {"loss": abs(loss - wanted[0]) / wanted[0]} | scores


@contextlib.contextmanager
def broken(what: str) -> Any:
    """Run the layers without one of the two things that travel between ranks."""

    def alone(function: Any) -> Any:
        def run(*args: Any, cp_context: CPContext, **kwargs: Any) -> Any:
            return function(*args, **kwargs | {"cu_seqlens": cp_context.cu_seqlens_cpu})

        return run

    names = {"state": "chunk_gated_delta_rule", "halo": "causal_conv1d"}
    if not what:
        yield
        return
    original = {"state": chunk_gated_delta_rule, "halo": causal_conv1d}[what]
    setattr(plugin, names[what], alone(original))
    try:
        yield
    finally:
        setattr(plugin, names[what], original)
