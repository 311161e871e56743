"""Train a byte-level hybrid model of transformers with DeepSpeed: this library shards its Gated DeltaNet layers,
Ulysses its full attention, ZeRO its parameters.

    python launch/train_deepspeed.py                                            one process
    torchrun --standalone --nproc-per-node 2 launch/train_deepspeed.py --sp 2   every sequence on two ranks
    deepspeed --num_gpus 2 launch/train_deepspeed.py --sp 2                     the same; CPU ranks too
    torchrun --standalone --nproc-per-node 8 launch/train_deepspeed.py --sp 4   two data-parallel groups of four

ZeRO stage, optimizer and batch size stand in launch/deepspeed.json (--config). What has to be right, and where:

- Layout: contiguous, the only one that Ulysses knows. Rank r of a sequence group holds part r of every tensor.
- Boundaries: position_ids in the whole documents, cut like the tokens. They reach both kinds of layers.
- Labels are shifted before they are cut.
- Gradient reduction: ZeRO's, over all ranks. Nothing else may reduce gradients.
- Loss: the sum over this rank's tokens, given to scale_loss with the number of targets of the whole step.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

try:
    from flashqla_cp.integrations.deepspeed import (
        enable_context_parallel,
        init_distributed,
        init_sequence_parallel,
        scale_loss,
    )
except ModuleNotFoundError as error:
    if error.name != "flashqla_cp":
        raise
    raise SystemExit("flashqla_cp is not installed: run 'pip install -e .' in the repository's folder first") from None
from flashqla_cp.launch.packing import IGNORED_LABEL, PackedDocuments, find_documents
from flashqla_cp.launch.ranks import default_head_dim
from flashqla_cp.launch.report import Report, require_folder, require_plotting
from flashqla_cp.launch.step import loss_sum

# Which attention keeps packed documents apart when Ulysses runs it: sdpa does not.
ATTENTIONS = {"sdpa": False, "flash_attention_2": True, "flash_attention_3": True, "none": True}
FULL_ATTENTION_EVERY = 4  # as in Qwen3-Next


def run(args: argparse.Namespace) -> int:
    """Train as the parsed options say and return the exit code: 0, or 2 for settings that cannot work."""
    try:
        config = read_config(args)
        data = PackedDocuments(find_documents(args.data, args.suffix), args.seq_len, args.seed)
        require_folder(args.out)
        if not args.no_plot:
            require_plotting()
    except (ValueError, OSError) as error:
        print(f"train_deepspeed: error: {error}", file=sys.stderr, flush=True)
        return 2
    init_distributed()
    engine = make_engine(args, config)
    train(args, engine, data)
    dist.destroy_process_group()
    return 0


def read_config(args: argparse.Namespace) -> dict[str, Any]:
    """DeepSpeed's configuration, with bf16 on GPUs unless the file says otherwise; raises ValueError or OSError."""
    world = int(os.environ["WORLD_SIZE"])
    if args.sp < 1 or world % args.sp:
        raise ValueError(f"--sp: got {args.sp} with {world} process(es), expected a divisor of their number")
    if args.seq_len < 2 or args.seq_len % args.sp:
        raise ValueError(f"--seq-len: got {args.seq_len}, expected a multiple of --sp {args.sp} of at least 2")
    try:
        config: dict[str, Any] = json.loads(args.config.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"--config: {args.config} is not JSON: {error}") from error
    replicas, rows = world // args.sp, config.get("train_batch_size")
    if not isinstance(rows, int) or rows % replicas:
        raise ValueError(
            f"train_batch_size: got {rows} in {args.config}, expected a multiple of the {replicas} data-parallel groups"
        )
    if config.get("train_micro_batch_size_per_gpu") != 1:
        raise ValueError(f"train_micro_batch_size_per_gpu: expected 1 in {args.config}: a sharded batch is one row")
    return {"bf16": {"enabled": torch.cuda.is_available()}} | config


def make_engine(args: argparse.Namespace, config: dict[str, Any]) -> Any:
    """The model inside DeepSpeed. The order matters: groups, this library, then deepspeed.initialize."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    torch.manual_seed(args.seed)
    model = make_model(args)
    if args.attention == "none":
        mpu = init_sequence_parallel(args.sp)
    else:
        mpu = UlyssesSPAttentionHF.register_with_transformers(model, args.attention, args.sp, micro_batch_size=1)
    enable_context_parallel(model, mpu, backend=args.backend)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, mpu=mpu)
    return engine


def make_model(args: argparse.Namespace) -> Any:
    """A small Qwen3-Next without experts: three Gated DeltaNet layers to one of full attention."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    width = default_head_dim()
    full = [(layer + 1) % FULL_ATTENTION_EVERY == 0 and args.attention != "none" for layer in range(args.num_layers)]
    config = Qwen3NextConfig(
        vocab_size=256,
        hidden_size=args.hidden_size,
        intermediate_size=3 * args.hidden_size,
        num_hidden_layers=args.num_layers,
        layer_types=["full_attention" if yes else "linear_attention" for yes in full],
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=width,
        linear_value_head_dim=width,
        num_experts=0,
        tie_word_embeddings=True,
        use_cache=False,
    )
    config._attn_implementation = "sdpa" if args.attention == "none" else args.attention
    return Qwen3NextForCausalLM(config)


def train(args: argparse.Namespace, engine: Any, data: PackedDocuments) -> None:
    """The training loop. A step's rows depend on the settings only, not on the number of ranks."""
    rank, rows = dist.get_rank(), engine.train_batch_size()
    replica, replicas = rank // args.sp, dist.get_world_size() // args.sp
    packed = ATTENTIONS[args.attention]
    report = Report(args.out, 0, args.steps, rows * args.seq_len, silent=rank != 0)
    for step in range(args.steps):
        first = step * rows
        targets = data.num_labels(first, rows) if packed else rows * (args.seq_len - 1)
        loss = torch.zeros((), device=engine.device)
        for row in range(first + replica, first + rows, replicas):
            tokens, labels, positions = (x.to(engine.device) for x in part_of_row(data, row, packed, rank, args.sp))
            logits = engine(input_ids=tokens, position_ids=positions).logits
            local = loss_sum(logits, labels)
            engine.backward(scale_loss(engine, local, targets))
            rate = engine.optimizer.param_groups[0]["lr"]
            engine.step()  # DeepSpeed counts micro-batches itself
            loss += local.detach() / targets
        dist.all_reduce(loss)
        norm = engine.get_global_grad_norm()  # ZeRO 0 has none
        report.step(step, loss.item(), rate, float("nan") if norm is None else float(norm))
    report.end_of_steps()
    if args.save:
        engine.save_checkpoint(str(args.out / "checkpoints"))
    report.summarise(plot=not args.no_plot)


def part_of_row(data: PackedDocuments, row: int, packed: bool, rank: int, sp: int) -> tuple[torch.Tensor, ...]:
    """This rank's tokens, labels and position_ids, [1, T / sp] each; a row is one document unless it is `packed`."""
    batch = data.batch(row, 1)
    tokens, labels, offsets = batch.tokens, batch.labels, batch.offsets
    if not packed:
        labels, offsets = torch.full_like(tokens, IGNORED_LABEL), (0, tokens.shape[1])
        labels[:, :-1] = tokens[:, 1:]
    positions = torch.cat([torch.arange(end - start) for start, end in pairwise(offsets)])[None]
    return tuple(x.chunk(sp, dim=1)[rank % sp] for x in (tokens, labels, positions))


def launched() -> None:
    """Without a launcher be one process; on CPUs say so to DeepSpeed, which would try to find GPUs."""
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = port
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse `argv` (default: the process's arguments), train, return the exit code."""
    parser = argparse.ArgumentParser(prog="train_deepspeed.py", description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--config", type=Path, default=Path(__file__).with_name("deepspeed.json"), help="DeepSpeed's (%(default)s)")
    add("--sp", type=int, default=1, help="ranks that share a sequence; the rest is data parallel (%(default)s)")
    add(
        "--attention",
        choices=ATTENTIONS,
        default="sdpa",
        help="of every fourth layer; with sdpa a row of text is one "
        "document, else its documents are kept apart; none: only Gated DeltaNet layers (%(default)s)",
    )
    add("--backend", choices=("auto", "tilelang", "torch"), default="auto", help="of the GDR op (%(default)s)")
    add("--data", type=Path, nargs="+", default=[], metavar="PATH", help="files and folders (Python's own sources)")
    add("--suffix", nargs="+", default=[], metavar=".EXT", help="only files of folders that end so")
    add("--seq-len", type=int, default=2048, help="bytes in a row (%(default)s)")
    add("--hidden-size", type=int, default=128, help="width (%(default)s)")
    add("--num-layers", type=int, default=4, help="layers (%(default)s)")
    add("--steps", type=int, default=100, help="optimizer steps (%(default)s)")
    add("--seed", type=int, default=0, help="of the weights and of the documents' order (%(default)s)")
    add("--out", type=Path, default=Path("runs/deepspeed"), help="folder of log and plot (%(default)s)")
    add("--save", action="store_true", help="a checkpoint of DeepSpeed at the end")
    add("--no-plot", action="store_true", help="no loss.png")
    add("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    args = parser.parse_args(argv)
    launched()
    return run(args)


if __name__ == "__main__":
    raise SystemExit(main())
