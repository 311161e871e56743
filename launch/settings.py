"""A run's options, their checks, and what each process makes of them before it talks to any other."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from flashqla_cp.kernels.backend import BACKENDS, Sizes, select
from flashqla_cp.launch import checkpoints
from flashqla_cp.launch.model import ByteModel, ModelShape
from flashqla_cp.launch.packing import PackedDocuments, find_documents
from flashqla_cp.launch.ranks import choose_device, default_head_dim, world_size
from flashqla_cp.launch.report import require_plotting
from flashqla_cp.launch.step import Sharding, autocast_dtype
from flashqla_cp.parallel.exchange.choose import EXCHANGES

LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document")
LARGEST = 2**63 - 1  # integer that torch takes
WIDEST = 2**31 - 1  # row of a matrix whose size still is such an integer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a training run."""
    for add in (_add_data, _add_model, _add_parallel, _add_optimizer, _add_output):
        add(parser)


def check_settings(args: argparse.Namespace, size: int) -> None:
    """Raise ValueError for settings that cannot work with `size` processes; nothing has been communicated yet."""
    least = {"seq_len": 2, "batch_size": 1, "micro_batch": 1, "num_layers": 1, "cp": 1, "steps": 0, "warmup": 0}
    least |= {"save_every": 0, "keep": 1, "seed": 0, "hidden_size": 1, "num_heads": 1, "num_v_heads": 1, "head_dim": 1}
    for name, smallest in least.items():
        if not smallest <= getattr(args, name) <= LARGEST:
            limit = f"least {smallest}" if getattr(args, name) < smallest else f"most {LARGEST}"
            raise ValueError(f"--{name.replace('_', '-')}: got {getattr(args, name)}, expected at {limit}")
    if not 0 < args.expand_v < float("inf"):
        raise ValueError(f"--expand-v: got {args.expand_v}, expected a number above 0")
    for name, width in {
        "--hidden-size": args.hidden_size,
        "--num-heads x --head-dim": args.num_heads * args.head_dim,
        "--num-v-heads x --head-dim x --expand-v": args.num_v_heads * args.head_dim * args.expand_v,
    }.items():
        if width > WIDEST:
            raise ValueError(f"{name}: got {width}, expected at most {WIDEST}")
    for name in ("lr", "final_lr_ratio", "weight_decay", "clip"):
        if not 0 <= getattr(args, name) < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')}: got {getattr(args, name)}, expected a number of at least 0")
    if size % args.cp:
        raise ValueError(
            f"--cp: got {args.cp} with {size} process(es), expected a divisor of the number of processes; "
            f"start them with torchrun --nproc-per-node {args.cp}"
        )
    if args.batch_size % (size // args.cp):
        raise ValueError(
            f"--batch-size: got {args.batch_size}, expected a multiple of the {size // args.cp} data-parallel groups "
            f"({size} processes / --cp {args.cp})"
        )
    if not args.no_plot:
        require_plotting()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a run needs, made by each process alone."""

    data: PackedDocuments
    shape: ModelShape
    model: ByteModel
    sharding: Sharding
    device: torch.device
    autocast: torch.dtype | None
    resume: Path | None


def prepare(args: argparse.Namespace) -> Prepared:
    """Check the settings, list the documents, build the model. Raises ValueError before any communication."""
    check_settings(args, world_size())
    device = choose_device(args.device)
    autocast = autocast_dtype(args.dtype, device)
    sizes = Sizes(
        dtype=autocast or torch.float32,
        num_heads=args.num_heads,
        num_v_heads=args.num_v_heads,
        head_k_dim=args.head_dim,
        head_v_dim=int(args.head_dim * args.expand_v),
    )
    try:
        select(args.backend, device, needs_grad=True, sizes=sizes)
    except RuntimeError as error:
        raise ValueError(f"--{error}") from error
    shape = ModelShape(
        hidden_size=args.hidden_size,
        num_layers=args.num_layers,
        num_heads=args.num_heads,
        num_v_heads=args.num_v_heads,
        head_dim=args.head_dim,
        expand_v=args.expand_v,
        tied=not args.untied_head,
    )
    torch.manual_seed(args.seed)
    # Drawn on the CPU, so that the same seed gives the same weights on every device.
    model = _build(shape, args)
    if args.resume is None:
        resume = None
    else:
        resume = checkpoints.newest(args.out) if args.resume == Path() else checkpoints.check_folder(args.resume)
    return Prepared(
        data=PackedDocuments(find_documents(args.data, args.suffix), args.seq_len, args.seed),
        shape=shape,
        model=model,
        sharding=Sharding(
            rows_per_step=args.batch_size,
            micro_batch=args.micro_batch,
            layout=args.layout,
            exchange=args.exchange,
            conv_size=shape.conv_size,
        ),
        device=device,
        autocast=autocast,
        resume=resume,
    )


def _build(shape: ModelShape, args: argparse.Namespace) -> ByteModel:
    try:
        return ByteModel(shape, backend=args.backend, checkpointing=args.checkpoint)
    except (RuntimeError, MemoryError) as error:
        raise ValueError(f"no memory for a model of this size: {shape}") from error


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data",
        type=Path,
        nargs="+",
        default=[],
        metavar="PATH",
        help="files and folders, each file a document; without it the sources of Python's standard library",
    )
    group.add_argument("--suffix", nargs="+", default=[], metavar=".EXT", help="only files of folders that end so")
    group.add_argument("--seq-len", type=int, default=2048, help="bytes in a packed row (%(default)s)")
    group.add_argument("--batch-size", type=int, default=2, help="rows in a step, all ranks together (%(default)s)")
    group.add_argument(
        "--micro-batch", type=int, default=1, help="rows packed side by side in one forward pass (%(default)s)"
    )
    group.add_argument("--seed", type=int, default=0, help="of the weights and of the documents' order (%(default)s)")


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--hidden-size", type=int, default=128, help="width (%(default)s)")
    group.add_argument("--num-layers", type=int, default=4, help="blocks of GatedDeltaNet and MLP (%(default)s)")
    group.add_argument("--num-heads", type=int, default=2, help="query/key heads (%(default)s)")
    group.add_argument(
        "--num-v-heads", type=int, default=4, help="value heads, a multiple of --num-heads (%(default)s)"
    )
    group.add_argument(
        "--head-dim",
        type=int,
        default=default_head_dim(),
        help="width of a query/key head; kernels take 64 and 128 (%(default)s here)",
    )
    group.add_argument(
        "--expand-v", type=float, default=1.0, help="width of a value head / width of a key head (%(default)s)"
    )
    group.add_argument("--untied-head", action="store_true", help="an output matrix of its own, not the embedding's")


def _add_parallel(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ranks and precision")
    group.add_argument(
        "--cp", type=int, default=1, help="ranks that share a sequence; the rest is data parallel (%(default)s)"
    )
    group.add_argument(
        "--layout", choices=LAYOUTS, default="contiguous", help="who owns which tokens of a row (%(default)s)"
    )
    group.add_argument("--exchange", choices=EXCHANGES, default="auto", help="how boundary states travel (%(default)s)")
    group.add_argument("--backend", choices=BACKENDS, default="auto", help="of the GDR op (%(default)s)")
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one (%(default)s)"
    )
    group.add_argument(
        "--dtype",
        choices=("auto", "fp32", "bf16"),
        default="auto",
        help="of the forward pass; auto: bf16 on GPUs (%(default)s)",
    )
    group.add_argument(
        "--checkpoint",
        choices=("none", "non-reentrant", "reentrant"),
        default="none",
        help="activation checkpointing of each block (%(default)s)",
    )


def _add_optimizer(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimizer (AdamW, warm-up, cosine)")
    group.add_argument(
        "--steps", type=int, default=100, help="steps of the whole run, those before a resume included (%(default)s)"
    )
    group.add_argument("--lr", type=float, default=4e-3, help="peak learning rate (%(default)s)")
    group.add_argument("--final-lr-ratio", type=float, default=0.1, help="last learning rate / peak (%(default)s)")
    group.add_argument("--warmup", type=int, default=10, help="steps of linear warm-up (%(default)s)")
    group.add_argument("--weight-decay", type=float, default=0.1, help="of matrices; nothing else decays (%(default)s)")
    group.add_argument(
        "--clip", type=float, default=1.0, help="largest gradient norm over all ranks; 0: no clipping (%(default)s)"
    )


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("expected a folder, got nothing")
    return Path(text)


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--out", type=Path, default=Path("runs/train"), help="folder of log, plot and checkpoints (%(default)s)"
    )
    group.add_argument(
        "--save-every",
        type=int,
        default=100,
        help="steps between checkpoints and one at the end; 0: none (%(default)s)",
    )
    group.add_argument("--keep", type=int, default=2, help="checkpoints to keep (%(default)s)")
    group.add_argument(
        "--resume",
        nargs="?",
        type=_folder,
        const=Path(),
        default=None,
        metavar="FOLDER",
        help="go on from a checkpoint folder or, without one, from the newest in --out (from the start if it has none)",
    )
    group.add_argument("--no-plot", action="store_true", help="no loss.png")
    group.add_argument(
        "--parity-check",
        action="store_true",
        help="at the end compare a step on all ranks with rank 0 alone; exit code 1 if loss or gradients differ by "
        "more than 1e-4 (fp32) or 2e-2 (bf16)",
    )
