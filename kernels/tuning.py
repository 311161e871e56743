"""Pure arithmetic of launch shapes: from sizes and an Arch to stages, registers and columns. No state, no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from flashqla_cp.kernels.arch import Arch
from flashqla_cp.kernels.spec import KernelSpec

WARPGROUP = 128
REGISTER_STEP = 8
LEAST_REGISTERS = 24
TENSOR_MEMORY_STEP = 32
GATE_GRAD_TOKENS = 256  # of a block
SCRATCH_BUDGET = 768 << 20  # bytes of all that backward's stages leave to one another
WIDEST_CHUNK_BYTES = 2 * (2 * 128 * 128 + 64 * 128)  # of these, of a chunk and a value head of 128
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
VECTOR_BYTES = 16  # of the widest load
# The convolution's kernels: warps of a block, blocks that registers allow on a multiprocessor, tokens that a warp walks
# over, rows that it loads at a time, bytes of a row and a thread.
CONV_WARPS, CONV_AHEAD = 4, 4
CONV_BLOCKS = {"causal_conv": 4, "causal_conv_grad": 4, "conv_halo_grad": 1}
CONV_WALKED = {"causal_conv": 32, "causal_conv_grad": 64, "conv_halo_grad": 4}
CONV_BYTES = {"causal_conv": VECTOR_BYTES, "causal_conv_grad": 8, "conv_halo_grad": VECTOR_BYTES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A group of threads that runs one branch of a kernel: `threads` of them, each with `registers`."""

    name: str
    threads: int
    registers: int

    def __post_init__(self) -> None:
        if self.threads < 1 or self.threads % 32:
            raise ValueError(f"threads of role {self.name!r}: got {self.threads}, expected a positive multiple of 32")
        if self.registers % REGISTER_STEP or not LEAST_REGISTERS <= self.registers <= 256:
            raise ValueError(
                f"registers of role {self.name!r}: got {self.registers}, expected a multiple of {REGISTER_STEP} "
                f"from {LEAST_REGISTERS} to 256"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """Launch shape of one kernel: its roles, pipeline stages, shared memory and tensor-memory columns."""

    roles: tuple[Role, ...]
    stages: int
    shared_bytes: int
    tensor_memory_columns: int = 0

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return sum(role.threads for role in self.roles)

    def check(self, arch: Arch) -> None:
        """Refuse what the hardware cannot launch.

        Raises:
            ValueError: shared memory, registers, threads or tensor memory exceed what `arch` has.
        """
        limits = (
            ("shared_bytes", self.shared_bytes, arch.shared_memory_bytes),
            ("threads", self.threads, 1024),
            ("registers", sum(role.threads * role.registers for role in self.roles), arch.registers),
            ("tensor_memory_columns", self.tensor_memory_columns, arch.tensor_memory_columns),
        )
        for name, got, allowed in limits:
            if got > allowed:
                raise ValueError(f"{name}: got {got}, expected at most {allowed} on {arch.name}")
        if self.stages < 1:
            raise ValueError(f"stages: got {self.stages}, expected at least 1")


def pipeline_stages(arch: Arch, stage_bytes: int, fixed_bytes: int, most: int) -> int:
    """Stages of `stage_bytes` that fit beside `fixed_bytes` of shared memory, at most `most`.

    Raises:
        ValueError: not even one stage fits.
    """
    room = arch.shared_memory_bytes - fixed_bytes
    stages = min(most, room // stage_bytes)
    if stages < 1:
        raise ValueError(
            f"stage_bytes: got {stage_bytes}, expected at most {max(room, 0)} beside {fixed_bytes} on {arch.name}"
        )
    return stages


def split_registers(
    arch: Arch, producer_threads: int, consumer_threads: int, producer_registers: int = 40
) -> tuple[int, int]:
    """Registers per thread of producers and consumers that together use the register file as far as the step allows.

    Raises:
        ValueError: the producers alone leave consumers fewer than the least allowed.
    """
    left = arch.registers - producer_threads * producer_registers
    consumers = min(left // consumer_threads // REGISTER_STEP * REGISTER_STEP, 240)
    if consumers < LEAST_REGISTERS:
        raise ValueError(
            f"consumer_threads: got {consumer_threads} beside {producer_threads} producers, "
            f"expected room for {LEAST_REGISTERS} registers each on {arch.name}"
        )
    return producer_registers, consumers


def tensor_memory_columns(arch: Arch, needed: Sequence[int]) -> int:
    """Columns to allocate at once for accumulators of `needed` columns each: a power of two, at least 32.

    Raises:
        ValueError: they do not fit in the tensor memory of `arch`.
    """
    total = sum(-(-columns // TENSOR_MEMORY_STEP) * TENSOR_MEMORY_STEP for columns in needed)
    columns = TENSOR_MEMORY_STEP
    while columns < total:
        columns *= 2
    if columns > arch.tensor_memory_columns:
        raise ValueError(
            f"needed: got {list(needed)} columns, expected at most {arch.tensor_memory_columns} on {arch.name}"
        )
    return columns


def forward_config(spec: KernelSpec) -> TileConfig:
    """Launch shape of the forward schedule: workers, scorers, and the warps that copy and issue."""
    if spec.target.mma == "tcgen05":
        return _sweep_config(spec, 2, True, 3, {"workers": 184, "scorers": 80, "feeders": 64})
    return _sweep_config(spec, 2, True, 3, {"workers": 192, "scorers": 104, "copier": 24})


def summary_config(spec: KernelSpec) -> TileConfig:
    """Launch shape of the map schedule: workers as in forward, and one warpgroup of helpers."""
    return _sweep_config(spec, 1, False, 5, {"workers": 208, "helpers": 88})


def replay_config(spec: KernelSpec) -> TileConfig:
    """Launch shape of the replay: as summary, and tiles in which states and values leave."""
    width = spec.dim("head_dim")
    return _sweep_config(spec, 1, False, 4, {"workers": 208, "helpers": 88}, beside=2 * width * (width + 64))


def sweep_config(spec: KernelSpec, *, stores: bool) -> TileConfig:
    """Launch shape of the gradients' recurrence: as forward, with two tiles of scores and one in which states leave."""
    leaving = 2 * spec.dim("head_dim") ** 2 if stores else 0
    registers = {"workers": 192, "scorers": 104, "copier": 24}
    if spec.target.mma == "tcgen05":
        registers = {"workers": 184, "scorers": 80, "feeders": 64}
        beside = 2 * spec.dim("head_dim") * (spec.dim("head_dim") + 64) if stores else 0
        return _sweep_config(spec, 2, True, 3, registers, beside=beside)
    return _sweep_config(spec, 2, False, 3, registers, beside=leaving + 2 * 2 * 64 * 64)


def gradients_config(spec: KernelSpec) -> TileConfig:
    """Launch shape of the chunkwise gradients: two warpgroups that multiply, and one that serves them.

    With tcgen05 one that scores, one that reads states, one that serves: six tiles of tokens, two states, a square of
    all rows, and sums of fp32.
    """
    chunk, width = 64, spec.dim("head_dim")
    tile, square = 2 * chunk * width, 2 * chunk * chunk
    if spec.target.mma == "tcgen05":
        registers = {"scorers": 208, "readers": 200, "feeders": 96}
        return TileConfig(
            roles=tuple(Role(name=name, threads=WARPGROUP, registers=count) for name, count in registers.items()),
            stages=1,
            shared_bytes=6 * tile + 2 * 2 * width * width + 4 * square + 4 * chunk * (chunk + 1) + 6144,
            tensor_memory_columns=tensor_memory_columns(spec.target, [width, width, width, chunk, chunk]),
        )
    tiles = 2 * 3 * tile + 2 * 2 * width * width + 2 * tile + 2 * square
    shared = tiles + 12 * 4 * 2 * chunk + 1024
    roles = (
        Role(name="multipliers", threads=2 * WARPGROUP, registers=216),
        Role(name="keepers", threads=WARPGROUP, registers=72),
    )
    return TileConfig(roles=roles, stages=1, shared_bytes=shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvTile:
    """A block of the convolution: `warps`, each of which walks over `walked` tokens, `tokens` of them its own,
    with `ahead` rows loaded at a time; `channels` of a thread. `blocks` fit on a multiprocessor."""

    warps: int
    blocks: int
    walked: int
    tokens: int
    ahead: int
    channels: int


def conv_tile(spec: KernelSpec) -> ConvTile:
    """Launch shape of a stage of the convolution. With the flag "ragged" a thread has one channel."""
    walked = CONV_WALKED[spec.stage]
    beyond = spec.dim("width") - 1 if spec.stage == "causal_conv_grad" else 0
    channels = 1 if spec.has("ragged") else CONV_BYTES[spec.stage] // ELEMENT_BYTES[spec.dtype("x")]
    return ConvTile(
        warps=CONV_WARPS,
        blocks=CONV_BLOCKS[spec.stage],
        walked=walked,
        tokens=walked - beyond,
        ahead=CONV_AHEAD,
        channels=channels,
    )


def _sweep_config(
    spec: KernelSpec,
    key_tiles: int,
    scores: bool,
    most_stages: int,
    registers: dict[str, int],
    beside: int | None = None,
) -> TileConfig:
    """Stages of `key_tiles` key-like tiles, one value tile and one inverse (and one of scores), 2 bytes an element.

    beside: bytes of other tiles; the output of one chunk unless given.

    With sums in tensor memory so are the left operands for heads of 128 (a state, two of a chunk's), else shared.
    """
    chunk, width = 64, spec.dim("head_dim")
    tile, square, vectors = 2 * chunk * width, 2 * chunk * chunk, 4 * chunk * (5 if scores else 4)
    stage = tile * (key_tiles + 1) + square * (2 if scores else 1) + vectors
    fixed = 4096 + ((tile if scores else 0) if beside is None else beside)  # barriers, alignment
    fixed += 2 * 2 * 4 * chunk if scores else 0  # factors of two chunks' rows and columns
    columns = 0
    if spec.target.mma == "tcgen05":
        sums = [width * width, *[width * chunk] * (3 if scores else 2), chunk * chunk if scores else 0]
        operands = [width * width, width * chunk, width * chunk]
        shared = width < 128
        fixed += 2 * sum(operands) if shared else 0
        in_tensor_memory = sums + ([] if shared else [elements // 2 for elements in operands])
        columns = tensor_memory_columns(spec.target, [elements // 128 for elements in in_tensor_memory])
    stages = pipeline_stages(spec.target, stage, fixed, most_stages)
    # Of workers. Sums in tensor memory divide among any number of them, those in registers by 64 rows.
    warpgroups = 2 if spec.target.mma == "tcgen05" else width // 64
    roles = tuple(
        Role(name=name, threads=(warpgroups if name == "workers" else 1) * WARPGROUP, registers=count)
        for name, count in registers.items()
    )
    return TileConfig(roles=roles, stages=stages, shared_bytes=fixed + stages * stage, tensor_memory_columns=columns)


def segment_chunks(num_tokens: int, num_v_heads: int, processors: int, trains: bool) -> int:
    """Chunks of a segment at most: how finely one device cuts chains so that all its multiprocessors have work.

    A function of the stream's length and not of its documents, so that padding offsets with empty ones changes no bit;
    shorter documents are not cut. One block runs one segment of one head, in backward of a slab's heads; a further
    segment costs about two chunks' time, for the maps and for the step of the chain. trains: a backward will read what
    the forward leaves, which then cuts as finely as that wants; coarser segments have fewer maps.
    """
    chunks = max(-(num_tokens // -64), 1)
    head_bytes = chunks * WIDEST_CHUNK_BYTES if trains else 0
    slabs = head_slabs(num_v_heads, 1, head_bytes, SCRATCH_BUDGET)
    heads = max(count for _, count in slabs)
    best, least = chunks, float("inf")
    for pieces in range(1, min(chunks, 64) + 1):
        length = -(chunks // -pieces)
        waves = len(slabs) * -(heads * pieces // -processors)
        cost = waves * length * (1 + 0.25 * (pieces > 1)) + 2 * (pieces - 1)
        if cost < least:
            best, least = length, cost
    return best


def head_slabs(num_v_heads: int, ratio: int, head_bytes: int, budget: int) -> list[tuple[int, int]]:
    """(first value head, number of them) of near equal slabs, whole groups of `ratio`, whose scratch of head_bytes per
    value head stays within `budget`; a slab has one group at least."""
    groups = num_v_heads // ratio
    most = min(max(budget // max(head_bytes * ratio, 1), 1), groups)
    count = -(groups // -most)
    cuts = [groups * slab // count * ratio for slab in range(count + 1)]
    return [(begin, end - begin) for begin, end in pairwise(cuts)]
