"""What the tests of the convolution on kernels share: a call, its gradients, and those of the fp64 oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashqla_cp import causal_conv1d
from flashqla_cp.testing.metrics import relative_l2
from flashqla_cp.testing.oracle import causal_conv1d_oracle

B16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NAMES = ("y", "x", "weight", "bias")
# Of y and dx; sums over tokens are fp32 whatever the rows are, and rounded to the parameter's dtype at the end.
BARS = {B16: 5e-3, F16: 1e-3, F32: 1e-5}

# Empty documents, some shorter than the taps, one that begins and ends inside a warp's run, and padding behind.
OFFSETS = (0, 70, 70, 71, 73, 76, 200, 200, 290)
TOKENS = 300


@dataclass(frozen=True, kw_only=True)
class Conv:
    """One call: x [1, tokens, channels] in dtype, parameters in wide or dtype."""

    channels: int = 264  # more than a block has, and no multiple of it
    width: int = 4
    tokens: int = TOKENS
    offsets: tuple[int, ...] | None = OFFSETS
    dtype: torch.dtype = B16
    wide: torch.dtype | None = None
    bias: bool = True
    silu: bool = True

    def draw(self, seed: int = 0, device: str = "cpu") -> tuple[list[torch.Tensor], torch.Tensor]:
        """x, weight and, if it has one, bias; and the gradient of y."""
        generator = torch.Generator().manual_seed(seed)
        shapes = [(1, self.tokens, self.channels), (self.channels, self.width)]
        shapes += [(self.channels,)] if self.bias else []
        kinds = [self.dtype, *[self.wide or self.dtype] * 2]
        given = [torch.randn(s, generator=generator).to(device, kind) for s, kind in zip(shapes, kinds, strict=False)]
        return given, torch.randn(shapes[0], generator=generator).to(device, self.dtype)

    def run(self, given, dy, offsets=None, **options):
        """y and the gradients, by name."""
        leaves = [x.detach().requires_grad_() for x in given]
        offsets = self.offsets if offsets is None else offsets
        if "cp_context" not in options and offsets is not None:
            options["cu_seqlens"] = offsets if torch.is_tensor(offsets) else torch.tensor(offsets)
        y, _ = self.call(causal_conv1d, leaves, **{"backend": "tilelang"} | options)
        found = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
        return dict(zip(NAMES, found, strict=False))

    def expected(self, given, dy):
        """The same of the oracle in fp64."""
        leaves = [x.detach().double().requires_grad_() for x in given]
        cu = None if self.offsets is None else torch.tensor(self.offsets)
        y = self.call(causal_conv1d_oracle, leaves, cu_seqlens=cu)
        found = [y.detach(), *torch.autograd.grad(y, leaves, dy.double())]
        return dict(zip(NAMES, found, strict=False))

    def call(self, function, leaves, **options):
        bias = leaves[2] if self.bias else None
        return function(leaves[0], leaves[1], bias, "silu" if self.silu else None, **options)

    def hold(self, found, expected):
        """Everything is within its bar, and 0 in the padded tail."""
        errors = {name: float(relative_l2(found[name], expected[name])) for name in expected}
        parameters = BARS[self.wide or self.dtype]
        for name, error in errors.items():
            assert error <= (BARS[self.dtype] if name in ("y", "x") else parameters), errors
        end = self.tokens if self.offsets is None else self.offsets[-1]
        assert all(torch.all(found[name][:, end:] == 0) for name in ("y", "x"))
        return errors
