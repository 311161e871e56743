"""The commands for several GPUs on ranks that share one: real kernels and stand-ins, the wire is gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flashqla_cp import chunk_gated_delta_rule
from flashqla_cp.cli.bench_contenders import middle_context
from flashqla_cp.cli.main import main
from flashqla_cp.launch import endurance
from flashqla_cp.testing.inputs import make_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]


def test_bench_on_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--group", "gloo", "--tokens", "1024", "--gates", "mixed", "zero", "--peers", "none"]
    assert main(["bench", "--nproc", "3", *options, "--json", str(tmp_path / "x.json")]) == 0, capsys.readouterr()
    report = json.loads((tmp_path / "x.json").read_text())
    assert report["head"]["backend"].startswith("tilelang")
    field = [row for row in report["rows"] if row["kind"] == "op"]
    assert len(field) == 2 * 5 and all(row["o_error"] < 5e-3 for row in field if row["ranks"] == 3)


def test_steps_under_skew() -> None:
    assert endurance.main(["skew", "--nproc", "2", "--backend", "gloo", "--steps", "60", "--limit", "400"]) == 0


def test_the_death_of_a_rank() -> None:
    assert endurance.main(["death", "--nproc", "2", "--backend", "gloo"]) == 0


@pytest.mark.parametrize("exchange", ["allgather", "sharded", "hierarchical", "headwise"])
def test_one_graph_of_a_step_on_a_rank(exchange: str) -> None:
    """Captured on another stream than that of the calls before, without waiting for the device; replayed on new values.

    A middle rank of 4, of which the others are local copies."""
    device = torch.device("cuda", torch.cuda.current_device())
    context = middle_context(300, 4, device, exchange)

    def draw(seed: int) -> dict[str, torch.Tensor]:
        inputs = make_inputs(300, 2, 4, 64, 64, dtype=torch.bfloat16, device=device, seed=seed)
        return {name: x.detach().requires_grad_() for name, x in inputs.items()}

    tensors = draw(0)

    def step(x: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        o, _ = chunk_gated_delta_rule(**x, backend="tilelang", cp_context=context)
        return (o, *torch.autograd.grad(o, list(x.values()), torch.ones_like(o)))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(tensors)
    for seed in (1, 2):
        fresh = draw(seed)
        with torch.no_grad():
            for name, x in fresh.items():
                tensors[name].copy_(x)
        graph.replay()
        expected = step(fresh)
        assert all(map(torch.equal, captured, expected))
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")
