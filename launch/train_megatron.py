"""Train a small GPT of megatron-core with Gated DeltaNet layers, every sequence sharded over context-parallel ranks.

    bash launch/megatron.sh                                             two ranks, with all set-up
    torchrun --nproc-per-node 4 launch/train_megatron.py --cp 2         two data-parallel groups of two

The loop is plain so that it shows what matters; Megatron-LM's own programs need one option instead:

    --spec flashqla_cp.integrations.megatron hybrid_stack_spec --context-parallel-size 8

What to set, and why:

- Layout: none to choose. Megatron gives rank r of P the parts r and 2P-1-r of each sequence, and the layers know that.
- Gradients: each rank holds a part of the gradient of whole parameters, and the sum over the ranks is the gradient.
  Megatron's DistributedDataParallel reduces over its data and context groups together; unless
  calculate_per_token_loss is set it averages.
- Loss: each rank divides by the number of targets of all ranks. Megatron's own loop divides by a rank's own number and
  then averages, which is the same only where every rank has as many targets. Where labels are masked or documents are
  packed, set calculate_per_token_loss (--calculate-per-token-loss): it sums, and divides by the number of all ranks.
- CP above the number of key heads: leave TransformerConfig.experimental_attention_variant unset, as here, and pass the
  spec; with it set, Megatron checks the limit of its own all-to-all.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

try:
    from flashqla_cp.integrations.megatron import with_context_parallel_gdn
except ModuleNotFoundError as error:
    if error.name != "flashqla_cp":
        raise
    raise SystemExit("flashqla_cp is not installed: run 'pip install -e .' in the repository's folder first") from None
from flashqla_cp.integrations.refusals import need
from flashqla_cp.kernels.backend import BACKENDS, Sizes, select
from flashqla_cp.launch.model import NUM_BYTES, decay_groups
from flashqla_cp.launch.packing import IGNORED_LABEL, PackedDocuments, find_documents
from flashqla_cp.launch.ranks import Ranks, choose_device, join_ranks, world_size
from flashqla_cp.parallel.exchange.choose import EXCHANGES

CLIP = 1.0
SIZES = Sizes(dtype=torch.float32, num_heads=2, num_v_heads=4, head_k_dim=32, head_v_dim=32)


def make_model(args: argparse.Namespace) -> Any:
    """A GPT whose attention is Gated DeltaNet in every layer, with the parallel sizes that are initialised."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden_size,
        num_attention_heads=4,
        linear_key_head_dim=SIZES.head_k_dim,
        linear_value_head_dim=SIZES.head_v_dim,
        linear_num_key_heads=SIZES.num_heads,
        linear_num_value_heads=SIZES.num_v_heads,
        normalization="RMSNorm",
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
        context_parallel_size=args.cp,
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear)
    spec.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, submodules=parts)
    return GPTModel(
        config=config,
        transformer_layer_spec=with_context_parallel_gdn(spec, exchange=args.exchange, backend=args.backend),
        vocab_size=NUM_BYTES,
        max_sequence_length=args.row_tokens,
        position_embedding_type="none",
    )


def my_part(x: torch.Tensor, cp: int) -> torch.Tensor:
    """Megatron's slicing of [B, S]: of 2P parts of each sequence, parts r and 2P-1-r."""
    from megatron.core import parallel_state

    rank, parts = parallel_state.get_context_parallel_rank(), x.chunk(2 * cp, 1)
    return torch.cat([parts[rank], parts[2 * cp - 1 - rank]], 1)


def train(args: argparse.Namespace, ranks: Ranks) -> list[float]:
    """Run the steps; returns the mean loss of each, the same on every rank."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(context_parallel_size=args.cp)
    torch.manual_seed(args.seed)  # the same weights on every rank
    model = make_model(args).to(ranks.device)
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=args.lr)
    data = PackedDocuments(find_documents(), args.row_tokens, args.seed)
    share, losses = args.rows // ranks.data_size, []
    for step in range(args.steps):
        first = step * args.rows
        targets = data.num_labels(first, args.rows)
        batch = data.batch(first + ranks.data_rank * share, share)
        rows = [x.view(share, args.row_tokens).to(ranks.device) for x in (batch.tokens, batch.labels)]
        tokens, labels = (my_part(x, args.cp) for x in rows)
        per_token = model(tokens, None, None, labels=labels.clamp(min=0))
        loss = (per_token * (labels != IGNORED_LABEL)).sum() / targets
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        ranks.sum_in_place([total, *(parameter.grad for parameter in model.parameters())])
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(total.item())
        if ranks.rank == 0:
            print(f"step {step + 1}/{args.steps}  loss {losses[-1]:.5f}", flush=True)
    parallel_state.destroy_model_parallel()
    return losses


def run(args: argparse.Namespace) -> int:
    """Train as the parsed options say and return the exit code: 0, or 2 for options that cannot work."""
    size = world_size()
    # On import Megatron warns a dozen times of GPU packages that are not there.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    try:
        need("megatron.core", "megatron")
        device = choose_device(args.device)
        select(args.backend, device, needs_grad=True, sizes=SIZES)
        if min(args.cp, args.rows, args.row_tokens) < 1:
            raise ValueError(
                f"got --cp {args.cp}, --rows {args.rows}, --row-tokens {args.row_tokens}; expected numbers above 0"
            )
        if size % args.cp or args.rows % (size // args.cp) or args.row_tokens % (2 * args.cp):
            raise ValueError(
                f"got --cp {args.cp}, --rows {args.rows}, --row-tokens {args.row_tokens} on {size} processes; expected "
                "processes divisible by cp, rows by the data-parallel groups, and row-tokens by 2 cp"
            )
    except (ValueError, RuntimeError, ModuleNotFoundError) as error:
        print(f"train_megatron: error: {error}", file=sys.stderr)
        return 2
    if device.type == "cpu":
        # Megatron fuses a norm by torch.compile: minutes on a CPU, and no gain.
        torch._dynamo.config.disable = True
    if size == 1:  # Megatron wants a group also there
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with join_ranks(args.cp, device) as ranks:
        train(args, ranks)
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cp", type=int, default=1, help="ranks that share a sequence (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (%(default)s)")
    parser.add_argument("--rows", type=int, default=4, help="sequences of a step, all ranks together (%(default)s)")
    parser.add_argument(
        "--row-tokens", type=int, default=512, help="bytes of a sequence, a multiple of 2 cp (%(default)s)"
    )
    parser.add_argument("--layers", type=int, default=2, help="Gated DeltaNet layers, each with an MLP (%(default)s)")
    parser.add_argument("--hidden-size", type=int, default=128, help="width (%(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of AdamW, constant (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the documents' order (%(default)s)")
    parser.add_argument(
        "--exchange", choices=EXCHANGES, default="auto", help="how boundary states travel (%(default)s)"
    )
    parser.add_argument("--backend", default="auto", choices=BACKENDS, help="of the GDR op (%(default)s)")
    parser.add_argument(
        "--device", default="auto", choices=("auto", "cpu", "cuda"), help="auto: a GPU if any (%(default)s)"
    )


def main(argv: Sequence[str] | None = None) -> int:
    description = "Train a small GPT of megatron-core with context-parallel Gated DeltaNet layers."
    parser = argparse.ArgumentParser(prog="train_megatron", description=description)
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
