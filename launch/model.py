"""A byte-level language model of Gated DeltaNet and MLP blocks.

Letters: T tokens of the packed row, or of this rank's shard of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from flashqla_cp.layer import GatedDeltaNet
from flashqla_cp.parallel.context import CPContext

NUM_BYTES = 256
Checkpointing = Literal["none", "non-reentrant", "reentrant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Everything that decides the parameters' names and shapes."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_v_heads: int
    head_dim: int
    expand_v: float
    conv_size: int = 4
    tied: bool = True


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), about 8/3 times as wide as the model."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        width = -(-8 * hidden_size // (3 * 16)) * 16
        self.gate_up = nn.Linear(hidden_size, 2 * width, bias=False)
        self.down = nn.Linear(width, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, shape: ModelShape, index: int, backend: str) -> None:
        super().__init__()
        self.mixer_norm = nn.RMSNorm(shape.hidden_size, eps=1e-6)
        self.mixer = GatedDeltaNet(
            hidden_size=shape.hidden_size,
            expand_v=shape.expand_v,
            head_dim=shape.head_dim,
            num_heads=shape.num_heads,
            num_v_heads=shape.num_v_heads,
            conv_size=shape.conv_size,
            layer_idx=index,
            backend=backend,
        )
        self.mlp_norm = nn.RMSNorm(shape.hidden_size, eps=1e-6)
        self.mlp = MLP(shape.hidden_size)

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None, cp_context: CPContext | None) -> torch.Tensor:
        x = x + self.mixer(self.mixer_norm(x), cu_seqlens=cu_seqlens, cp_context=cp_context)
        return x + self.mlp(self.mlp_norm(x))


class ByteModel(nn.Module):
    """Bytes [1, T] in, logits of the next byte [1, T, 256] out.

    Args:
        shape: sizes.
        backend: of the Gated DeltaNet layers: "auto", "tilelang" or "torch".
        checkpointing: which kind of activation checkpointing each block uses.

    Raises:
        ValueError: sizes that GatedDeltaNet refuses.
    """

    def __init__(self, shape: ModelShape, backend: str = "auto", checkpointing: Checkpointing = "none") -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embedding = nn.Embedding(NUM_BYTES, shape.hidden_size)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(shape, index, backend) for index in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=1e-6)
        self.head = nn.Linear(shape.hidden_size, NUM_BYTES, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight
        else:
            nn.init.normal_(self.head.weight, std=0.02)

    def forward(
        self, tokens: torch.Tensor, cu_seqlens: torch.Tensor | None = None, cp_context: CPContext | None = None
    ) -> torch.Tensor:
        """Logits of the whole packed row (cu_seqlens) or of this rank's shard of it (cp_context)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.checkpointing == "none":
                x = block(x, cu_seqlens, cp_context)
            else:
                reentrant = self.checkpointing == "reentrant"
                # Without dropout there is no random state to keep.
                x = checkpoint(block, x, cu_seqlens, cp_context, use_reentrant=reentrant, preserve_rng_state=False)
        return self.head(self.norm(x))


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two optimizer groups: matrices and convolution taps decay; norms, biases and the gate's parameters do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
