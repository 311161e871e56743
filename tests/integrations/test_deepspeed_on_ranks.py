"""Steps of DeepSpeed engines on 2 and 4 ranks against one unpatched process: loss, gradients, weights.

Each run starts its ranks once. The core attention of hybrid models is sdpa, with one document a stream, or one that
tells documents by position_ids, which stands for the flash attentions.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_deepspeed import (
    ONE_DOCUMENT,
    OTHER,
    PACKED,
    Case,
    configuration,
    expected,
    make_optimizer,
    noise,
    run_case,
    start,
    token_loss_sum,
)
from tiny_transformers import HYBRID, LINEAR, broken, families, make_batch, make_model

import flashqla_cp
from flashqla_cp.integrations.deepspeed import (
    enable_context_parallel,
    init_distributed,
    init_sequence_parallel,
    scale_loss,
    use_context,
)
from flashqla_cp.testing.spawn import run_ranks

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("deepspeed", reason="deepspeed is not installed")

BAR = {"loss": 1e-6, "tensor": 3e-5}  # those of the transformers plugin; the controls miss them by far
STREAMS = ((PACKED, 1), (OTHER, 2), (OTHER, 1), (PACKED, 2))
PAIR, TWO_STEPS = {"streams": STREAMS[:2]}, {"streams": STREAMS[:2], "micro_batches": 2}
ZEROS = (0, 1, 2, 3)
MODELS = [family for family in families() if family != "qwen3_next"]
# name: number of ranks, of ranks that share a sequence, core attention, cases
RUNS: dict[str, tuple[int, int, str, list[Case]]] = {
    "one rank": (
        1,
        1,
        "sdpa",
        [Case(zero=zero, source=source) for zero in ZEROS for source in ("context", "positions")],
    ),
    "one document, sdpa": (
        *(2, 2, "sdpa"),
        [Case(zero=zero, layers=HYBRID, streams=((ONE_DOCUMENT, 1),)) for zero in ZEROS],
    ),
    "documents": (
        *(2, 2, "documents"),
        [
            *(Case(zero=zero, layers=HYBRID, **TWO_STEPS, clip=0.1) for zero in ZEROS),
            *(Case(zero=zero, layers=HYBRID, **TWO_STEPS, clip=0.1, optimizer="AdamW") for zero in (2, 3)),
            *(Case(zero=zero, layers=HYBRID, source="positions", checkpoint=True) for zero in (1, 3)),
            *(Case(zero=zero, layers=HYBRID, late=True, checkpoint=zero == 3) for zero in (0, 3)),
            Case(zero=3, layers=HYBRID, zero_init=True),
            Case(zero=1, layers=HYBRID, sum_over_ranks=True),
            *(Case(zero=zero, layers=HYBRID, family=family) for family in MODELS for zero in (1, 3)),
            *(Case(zero=zero, layers=HYBRID, family="qwen3_5", dtype="bf16") for zero in (1, 3) if MODELS),
            *(Case(zero=3, layers=HYBRID, broken=what) for what in ("scale", "state", "halo", "not enabled")),
        ],
    ),
    "two replicas": (
        *(4, 2, "documents"),
        [
            *(Case(zero=zero, layers=HYBRID, **PAIR) for zero in ZEROS),
            *(Case(zero=zero, layers=HYBRID, streams=STREAMS, micro_batches=2, clip=0.1) for zero in (1, 3)),
            Case(zero=1, layers=HYBRID, broken="scale", **PAIR),
        ],
    ),
    "layouts": (
        *(4, 4, "sdpa"),
        [
            Case(zero=zero, layout=layout)
            for zero in (1, 3)
            for layout in ("contiguous", "zigzag", "zigzag_per_document")
        ],
    ),
}
ALL = [pytest.param(run, case, id=f"{run}: {case}") for run in RUNS for case in RUNS[run][3] if not case.broken]
CONTROLS = [pytest.param(run, case, id=f"{run}: {case}") for run in RUNS for case in RUNS[run][3] if case.broken]


@pytest.mark.parametrize(("run", "case"), ALL)
def test_step(run: str, case: Case) -> None:
    loss_bar, bar = BAR["loss"], BAR["tensor"]
    if case.dtype == "bf16":
        # What one process loses by bf16, and a fifth more for other rounding of the sums over ranks.
        loss_bar, bar = (1.2 * worst for worst in noise(case, RUNS[run][2]))
    for found in results(run)[str(case)]:
        loss = found.pop("loss")
        worst = max(found, key=lambda name: found[name])
        assert loss < loss_bar, loss
        assert found[worst] < bar, (worst, found[worst])


@pytest.mark.parametrize(("run", "case"), CONTROLS)
def test_control_is_seen(run: str, case: Case) -> None:
    for found in results(run)[str(case)]:
        assert max(found.values()) > 0.03


@functools.cache
def results(run: str) -> dict[str, list[dict[str, float]]]:
    """Per case the errors on each rank."""
    world, size, attention, cases = RUNS[run]
    assert len({str(case) for case in cases}) == len(cases)
    wanted = [expected(replace(case, broken=""), attention) for case in cases]
    per_rank = run_ranks(run_cases, world, size, attention, cases, wanted, timeout=300.0)
    return {name: [dict(found[name]) for found in per_rank] for name in per_rank[0]}


def run_cases(
    rank: int, size: int, attention: str, cases: list[Case], wanted: list[Any]
) -> dict[str, dict[str, float]]:
    mpu = start(size, attention, cases[0].layers)
    found = {}
    for case, result in zip(cases, wanted, strict=True):
        with broken(case.broken if case.broken in ("state", "halo") else ""):
            found[str(case)] = run_case(case, mpu, attention, result)
    return found


def test_refusals() -> None:
    for texts in run_ranks(try_refusals, 2, timeout=300.0):
        assert {name: text for name, text in texts.items() if text} == {}


def try_refusals(rank: int) -> dict[str, str]:
    """What differs from the expected error, for each mistake."""
    import deepspeed

    init_distributed()
    wrong = {}

    def check(name: str, text: str, call: Any) -> None:
        try:
            call()
            wrong[name] = "no error"
        except (ValueError, TypeError) as error:
            wrong[name] = "" if text in str(error) else str(error)

    hybrid, linear = make_model("qwen3_next", HYBRID), make_model("qwen3_next", LINEAR)
    check("size", "size: got 3 with 2 rank(s)", lambda: init_sequence_parallel(3))
    check("no mpu", "mpu: got ProcessGroup", lambda: enable_context_parallel(linear, dist.group.WORLD))
    mpu = init_sequence_parallel(2)
    check("no Ulysses", "register_with_transformers(model, ...) first", lambda: enable_context_parallel(hybrid, mpu))
    enable_context_parallel(linear, mpu)
    batch, context = batch_and_context(PACKED)
    check("no engine", "DeepSpeed shares sequences among ranks", lambda: forward(linear, batch, context))

    def engine_of(model: Any, zero: int = 2, **options: Any) -> Any:
        config = configuration(Case(zero=zero), **options.pop("config", {}))
        return deepspeed.initialize(model=model, optimizer=make_optimizer("SGD", model), config=config, **options)[0]

    engine = engine_of(linear)
    check("engine without mpu", f"among ranks [{rank}], the model was", lambda: forward(engine, batch, context))
    check("engine as model", "got a DeepSpeedEngine, expected a model", lambda: enable_context_parallel(engine, mpu))
    engine = engine_of(linear, mpu=mpu)
    forward(engine, batch, context)
    check("no boundaries", "no document boundaries came with it", lambda: engine(input_ids=batch["input_ids"]))
    linear.eval()
    with torch.no_grad():
        forward(linear, batch, context)
    linear.train()
    for name, zero, config in (
        ("predivide", 0, {"gradient_predivide_factor": 2.0}),
        ("reduce_scatter", 3, {"zero_optimization": {"stage": 3, "reduce_scatter": False}}),
        ("data_types", 1, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}),
    ):
        model = make_model("qwen3_next", LINEAR)
        enable_context_parallel(model, mpu)
        other = engine_of(model, zero, mpu=mpu, config=config)
        check(name, f"{name}", functools.partial(scale_loss, other, torch.ones(()), 1))
    check_mesh(check, linear, engine_of, batch, context)
    return wrong


def check_mesh(check: Any, model: Any, engine_of: Any, batch: Any, context: Any) -> None:
    """DeepSpeed's own (data, sequence) mesh, which does not reduce gradients over the sequence-parallel ranks."""
    from deepspeed.utils import groups

    engine = engine_of(model, mesh_param=(1, 2))
    check("mesh", "pass mpu alone", lambda: forward(engine, batch, context))
    groups.mesh_device = None


def test_refusals_with_full_attention() -> None:
    for texts in run_ranks(try_refusals_with_attention, 2, timeout=300.0):
        assert {name: text for name, text in texts.items() if text} == {}


def try_refusals_with_attention(rank: int) -> dict[str, str]:
    import deepspeed

    mpu, model, wrong = start(2, "sdpa", HYBRID), make_model("qwen3_next", HYBRID), {}
    with pytest.raises(ValueError, match="Ulysses takes 'contiguous' only"):
        enable_context_parallel(model, mpu, layout="zigzag")
    enable_context_parallel(model, mpu)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=make_optimizer("SGD", model), config=configuration(Case()), mpu=mpu
    )
    cases = [
        ("documents", PACKED, "contiguous", "would attend across the 3 documents of this batch"),
        ("uneven", (0, 95), "contiguous", "a number of tokens that 2 divides"),
        ("layout", ONE_DOCUMENT, "zigzag", "Ulysses joins equal contiguous shards only"),
        ("two documents", (0, 7, 96), "contiguous", "across the 2 documents"),
    ]
    for name, offsets, layout, text in cases:
        try:
            forward(engine, *batch_and_context(offsets, layout))
            wrong[name] = "no error"
        except ValueError as error:
            wrong[name] = "" if text in str(error) else str(error)
    attention = engine.module.model.layers[1].self_attn
    with pytest.raises(ValueError, match="none reached full attention; call the model as a whole"):
        attention(torch.zeros(1, 4, 32), position_embeddings=None, attention_mask=None)
    return wrong


def batch_and_context(offsets: tuple[int, ...], layout: str = "contiguous") -> tuple[dict[str, torch.Tensor], Any]:
    context = flashqla_cp.build_cp_context(torch.tensor(offsets), None, layout=layout)
    return {name: context.shard(x) for name, x in make_batch(offsets).items()}, context


def forward(model: Any, batch: dict[str, torch.Tensor], context: Any) -> torch.Tensor:
    with use_context(context):
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    return token_loss_sum(logits, batch["labels"])


def test_ulysses_loader() -> None:
    """Batches from DeepSpeed's own sharding adapter: position_ids suffice, labels come shifted."""
    for loss, expected_loss in run_ranks(train_from_loader, 2, timeout=300.0):
        assert abs(loss - expected_loss) < BAR["loss"] * expected_loss


def train_from_loader(rank: int) -> tuple[float, float]:
    """The summed loss of the first batch, and what one process makes of it."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter

    ids = [make_batch(ONE_DOCUMENT, seed)["input_ids"] for seed in (1, 2)]
    rows = [{"input_ids": x, "labels": x, "position_ids": torch.arange(96)[None]} for x in ids]
    with torch.no_grad():
        whole = make_model("qwen3_next", HYBRID).eval()(input_ids=ids[0], position_ids=rows[0]["position_ids"]).logits
        expected_loss = token_loss_sum(whole[:, :-1], ids[0][:, 1:])
    mpu, model = start(2, "sdpa", HYBRID), make_model("qwen3_next", HYBRID).eval()
    enable_context_parallel(model, mpu)
    told = {"sp_rank": rank, "sp_group": mpu.get_sequence_parallel_group(), "sp_world_size": 2, "device": "cpu"}
    batch = next(iter(UlyssesSPDataLoaderAdapter([rows[rank]], **told)))
    labels = batch.pop("shift_labels")
    with torch.no_grad():
        loss = token_loss_sum(model(**batch).logits, labels)
    dist.all_reduce(loss)
    return loss.item(), expected_loss.item()
