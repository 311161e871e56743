"""What the benchmark of the short convolution runs, silu inside, as workload.py has it for the op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashqla_cp.testing.oracle import causal_conv1d_oracle

TAPS = 4
PASSES = {"forward": 2, "backward": 3}  # x in, y out; x and dy in, dx out
MULTIPLY_ADDS = {"forward": TAPS, "backward": 3 * TAPS}  # of an element
SLICE = 1024  # channels compared with fp64 at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvWorkload:
    """One call: `documents` of equal length packed into one row of `tokens`."""

    tokens: int
    documents: int
    channels: int
    dtype: torch.dtype
    gates: str = "conv"  # stands where a case of the op has its gates
    gradients = ("dx", "dweight")

    def offsets(self) -> list[int]:
        """Of the documents, [documents + 1]."""
        return [self.tokens // self.documents * row for row in range(self.documents + 1)]

    def draw(self, seed: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """x [1, T, D] and weight [D, TAPS] in dtype."""
        x = self._normal(seed, device, 1, self.tokens, self.channels)
        return x, self._normal(seed + 1, device, self.channels, TAPS)

    def upstream(self, seed: int, device: torch.device) -> torch.Tensor:
        """Gradient of y, with numbers of its own."""
        return self._normal(seed + 2**20, device, 1, self.tokens, self.channels)

    def expected(self, tensors: tuple[torch.Tensor, ...], repeats: int = 1) -> torch.Tensor:
        """y in fp32, computed in fp64. repeats: 1, for a rank of several is not imitated here."""
        assert repeats == 1
        with torch.no_grad():
            parts = [self._oracle(x, weight).float() for x, weight in self._slices(*tensors)]
        return torch.cat(parts, -1)

    def expected_gradients(
        self, tensors: tuple[torch.Tensor, ...], upstream: torch.Tensor, before: int = 0, behind: int = 0
    ) -> tuple[torch.Tensor, ...]:
        """dx and dweight in fp32, computed in fp64. before, behind: 0."""
        assert not before and not behind
        found = []
        for (x, weight), dy in zip(self._slices(*tensors), upstream.split(SLICE, -1), strict=True):
            leaves = [t.double().requires_grad_() for t in (x, weight)]
            grads = torch.autograd.grad(self._oracle(*leaves), leaves, dy.double())
            found.append([grad.float() for grad in grads])
        dx, dweight = zip(*found, strict=True)
        return torch.cat(dx, -1), torch.cat(dweight)

    def cost(self, direction: str) -> tuple[int, int]:
        """Bytes and operations (two a multiply-add) of one call, every row read and written once."""
        elements = self.tokens * self.channels
        return PASSES[direction] * elements * self.dtype.itemsize, 2 * MULTIPLY_ADDS[direction] * elements

    def _normal(self, seed: int, device: torch.device, *shape: int) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=device).to(self.dtype)

    def _slices(self, x: torch.Tensor, weight: torch.Tensor) -> Any:
        return zip(x.split(SLICE, -1), weight.split(SLICE), strict=True)

    def _oracle(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return causal_conv1d_oracle(x, weight, None, "silu", self.offsets())
