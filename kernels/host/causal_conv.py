"""The stages of the causal convolution on kernels: one wrapper each, and the tables that say where rows stand.

Letters: T tokens, D channels, W taps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from flashqla_cp.kernels.arch import Arch
from flashqla_cp.kernels.blocks.conv_places import NOWHERE, PLACES
from flashqla_cp.kernels.host.launcher import launch, spec_of
from flashqla_cp.kernels.host.tables import stream_of
from flashqla_cp.kernels.spec import KernelSpec
from flashqla_cp.kernels.tuning import VECTOR_BYTES, conv_tile


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Fronts:
    """The rows in front of fragments that stand somewhere, and who reads them.

    sources int32 [fragments * (W-1)]: see kernels/blocks/conv_rows.py. readers int32 [targets * (W-1)]: local tokens
    that read a row 1, 2, .. later, -1 for none. Targets are the num_arrived rows that arrived, then the rows `local`,
    int64, of this process.
    """

    sources: torch.Tensor
    readers: torch.Tensor
    num_arrived: int
    local: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Places:
    """places int32 [T] (see kernels/blocks/conv_places.py); fronts None where every fragment begins its document."""

    places: torch.Tensor
    fronts: Fronts | None = None


def places_of_documents(start: torch.Tensor, end: torch.Tensor, num_tokens: int, width: int, arch: Arch) -> Places:
    """Places of documents [start, end), int32 [N] on the device of the rows, in order; nothing is read back."""
    places = torch.empty(num_tokens, dtype=torch.int32, device=start.device)
    if num_tokens and len(start):
        launch(spec_of("conv_places", arch.name, (("width", width),)), start, end, places)
    else:
        places.fill_(NOWHERE)
    return Places(places=places)


def places_of_batch(batch: int, length: int, width: int, arch: Arch, device: torch.device) -> Places:
    """Places of `batch` documents of one length. Kept by stream, and not while a CUDA graph is captured, for the
    reasons that tables_of_batch gives."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _make_batch(batch, length, width, arch, device)
    return _kept_batch(batch, length, width, arch, device, stream_of(device))


@torch.inference_mode(False)
def _make_batch(batch: int, length: int, width: int, arch: Arch, device: torch.device) -> Places:
    ends = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
    return places_of_documents(ends[:-1], ends[1:], batch * length, width, arch)


@lru_cache(maxsize=16)
def _kept_batch(batch: int, length: int, width: int, arch: Arch, device: torch.device, stream: int) -> Places:
    return _make_batch(batch, length, width, arch, device)


def places_of_fragments(
    start: torch.Tensor,
    length: torch.Tensor,
    num_tokens: int,
    sources: torch.Tensor,
    num_arrived: int,
    device: torch.device,
) -> Places:
    """Places of fragments on the host, int64: start, length [fragments], sources [fragments, W-1]. Once per context."""
    width = sources.shape[1] + 1
    fragment = torch.repeat_interleave(torch.arange(len(start), device="cpu"), length)
    place = torch.arange(len(fragment), device="cpu") - (length.cumsum(0) - length)[fragment]
    places = torch.full((num_tokens,), NOWHERE, dtype=torch.int32, device="cpu")
    places[start[fragment] + place] = (fragment * PLACES + place.clamp(max=width - 1)).int()
    known = sources[sources >= 0]
    if not len(known):
        return Places(places=places.to(device))
    local = known[known < num_tokens].unique()
    readers = torch.full((num_arrived + len(local), width - 1), -1, dtype=torch.int32, device="cpu")
    for ahead in range(1, width):  # the row stands so far in front of the fragment
        row = sources[:, width - 1 - ahead]
        for position in range(width - ahead):  # of a token that reads it
            reads = (row >= 0) & (length > position)
            found = row[reads]
            target = torch.where(found < num_tokens, num_arrived + torch.searchsorted(local, found), found - num_tokens)
            readers[target, ahead + position - 1] = (start[reads] + position).int()
    return Places(
        places=places.to(device),
        fronts=Fronts(
            sources=sources.int().flatten().to(device),
            readers=readers.flatten().to(device),
            num_arrived=num_arrived,
            local=local.to(device),
        ),
    )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Inputs:
    """x [T, D] with unit stride along D, the rows that arrived [rows, D], weight [D, W], bias [D] or None."""

    x: torch.Tensor
    arrived: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    places: Places
    silu: bool
    arch: Arch

    @classmethod
    def of(
        cls,
        x: torch.Tensor,
        arrived: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        places: Places,
        silu: bool,
        arch: Arch,
    ) -> Inputs:
        """Operands as the kernels read them: x in place where its strides and address allow."""
        narrow = weight.dtype == x.dtype and (bias is None or bias.dtype == x.dtype)
        dtype = x.dtype if narrow else torch.float32
        return cls(
            x=readable_rows(x),
            arrived=arrived,
            weight=_aligned(weight.to(dtype).contiguous()),
            bias=None if bias is None else _aligned(bias.to(dtype).contiguous()),
            places=places,
            silu=silu,
            arch=arch,
        )

    def spec(self, stage: str) -> KernelSpec:
        """The specialisation of a stage for these inputs."""
        channels, width = self.weight.shape
        ragged = channels * self.x.element_size() % VECTOR_BYTES > 0
        flags = {"bias": self.bias is not None, "silu": self.silu, "ragged": ragged}
        if stage != "conv_halo_grad":  # that one always meets rows in front
            flags["exchange"] = self.places.fronts is not None
        dtypes = (("weight", self.weight.dtype), ("x", self.x.dtype))
        return spec_of(stage, self.arch.name, (("width", width),), dtypes, **flags)

    def arguments(self, spec: KernelSpec, stand_in: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """places, sources, arrived, weight, bias; stand_in [T, D] for what a kernel was built without."""
        vector = conv_tile(spec).channels
        fronts, weight = self.places.fronts, self.weight
        return (
            self.places.places,
            self.places.places if fronts is None else fronts.sources,
            by_vectors(self.arrived if len(self.arrived) else stand_in, vector),
            weight.view(-1, vector * weight.shape[1]),
            (weight if self.bias is None else self.bias).reshape(-1)[: len(weight)].view(-1, vector),
        )


def readable_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows [T, D] that the kernels can read: the view itself where strides and address allow, else a copy."""
    size = x.element_size()
    whole = x.shape[1] * size % VECTOR_BYTES == 0
    aligned = not whole or (x.stride(0) * size % VECTOR_BYTES == 0 and x.data_ptr() % VECTOR_BYTES == 0)
    if x.stride(1) == 1 and x.stride(0) >= x.shape[1] and aligned:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    return x if x.data_ptr() % VECTOR_BYTES == 0 else x.clone()


def by_vectors(x: torch.Tensor, vector: int) -> torch.Tensor:
    """[.., D] -> [.., D / vector, vector]."""
    return x.unflatten(-1, (-1, vector))


def causal_conv(given: Inputs) -> torch.Tensor:
    """y [T, D], 0 in rows of no document."""
    y = torch.empty(given.x.shape, dtype=given.x.dtype, device=given.x.device)
    if y.numel():
        spec = given.spec("causal_conv")
        vector = conv_tile(spec).channels
        launch(spec, by_vectors(given.x, vector), *given.arguments(spec, y), by_vectors(y, vector))
    return y


def causal_conv_grad(given: Inputs, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx [T, D] in x's dtype, without what other fragments' rows add (see halo_grad); dweight [D, W] and dbias [D] in
    fp32. dy: from readable_rows."""
    channels, width = given.weight.shape
    dx = torch.empty(given.x.shape, dtype=given.x.dtype, device=given.x.device)
    if not dx.numel():
        return dx, *(torch.zeros(n, dtype=torch.float32, device=dx.device) for n in (given.weight.shape, channels))
    spec = given.spec("causal_conv_grad")
    tile = conv_tile(spec)
    blocks = -(-len(dx) // (tile.tokens * tile.warps))
    sums = torch.empty(blocks, width + 1, channels, dtype=torch.float32, device=dx.device)
    cut = [by_vectors(rows, tile.channels) for rows in (given.x, dy, dx, sums)]
    launch(spec, *cut[:2], *given.arguments(spec, dx), *cut[2:])
    total = sums.sum(0)
    return dx, total[:width].T.contiguous(), total[width]


def conv_halo_grad(given: Inputs, dy: torch.Tensor, fronts: Fronts) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients in fp32 of the rows that arrived [num_arrived, D] and of the rows fronts.local, as far as tokens of
    other fragments than their own read them."""
    channels = len(given.weight)
    targets = fronts.num_arrived + len(fronts.local)
    dfront = torch.empty(targets, channels, dtype=torch.float32, device=dy.device)
    if dfront.numel():
        spec = given.spec("conv_halo_grad")
        vector = conv_tile(spec).channels
        cut = [by_vectors(rows, vector) for rows in (given.x, dy, dfront)]
        launch(spec, *cut[:2], *given.arguments(spec, given.x.new_empty(1, channels)), fronts.readers, cut[2])
    return dfront[: fronts.num_arrived], dfront[fronts.num_arrived :]
