"""`flashqla-cp bench --costs`: a model of what exchanges of maps cost, fitted to what `--nproc` measured.

On P ranks of one node an exchange takes, in one direction,

    t = call * calls + message * messages + byte * bytes + fold * folded

calls are its collectives; messages those times P - 1; bytes what a rank sends; folded the bytes of the maps that a
rank composes: the whole chain of P - 1 for all heads with "allgather", for its share of the heads with "sharded". The
coefficients are the non-negative ones of least relative squares. From them follows the number of ranks from which
"sharded" is the cheaper one, which is what exchange="auto" has to know (parallel/exchange/choose.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flashqla_cp.cli.bench_contenders import LocalCopies
from flashqla_cp.parallel.exchange.choose import GATHER_UP_TO_RANKS, map_exchange
from flashqla_cp.parallel.plan import ShardPlan

TERMS = ("call_us", "message_us", "megabyte_us", "folded_megabyte_us")
NAMES = ("allgather", "sharded")
DIRECTIONS = ("forward", "backward")
MOST_RANKS = 72  # of one node, so far
MEGA = 1e6


def features(name: str, ranks: int, heads: int, dim: int, direction: str) -> list[float]:
    """The factors of the terms for the middle rank of `ranks` that share one document."""
    plan = ShardPlan.build("contiguous", (0, 64 * ranks), ranks)
    exchange = map_exchange(name, plan, LocalCopies(ranks // 2, ranks))
    assert exchange is not None
    calls = exchange.traffic(heads, dim, dim)[direction]
    own_heads = heads if name == "allgather" else -(-heads // ranks)
    map_bytes = 4 * dim * (dim + dim if ranks > 2 else dim)
    sent = 4 * sum(count for _, count in calls)
    return [len(calls), len(calls) * (ranks - 1), sent / MEGA, (ranks - 1) * own_heads * map_bytes / MEGA]


def fit(rows: Sequence[dict[str, Any]], dim: int) -> dict[str, Any]:
    """The terms of the model, in us, and how far it is from the measured times at most and in the mean.

    rows: of kind "exchange", as bench_ranks makes them. dim: K = V.

    Raises:
        ValueError: fewer measured times than terms.
    """
    points = [(row, way) for row in rows if row["exchange"] in NAMES for way in DIRECTIONS]
    if len(points) < len(TERMS):
        raise ValueError(f"--costs: got {len(points)} times of {' and '.join(NAMES)}, expected at least {len(TERMS)}")
    table = [features(row["exchange"], row["ranks"], row["v_heads"], dim, way) for row, way in points]
    factors = torch.tensor(table, dtype=torch.float64)
    times = torch.tensor([1e3 * row[way]["exchange_ms"] for row, way in points], dtype=torch.float64)
    terms = non_negative(factors / times[:, None], torch.ones_like(times))
    off = ((factors @ terms) / times - 1.0).abs()
    return {
        "terms": dict(zip(TERMS, terms.tolist(), strict=True)),
        "worst": off.max().item(),
        "mean": off.mean().item(),
    }


def non_negative(factors: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Least squares with coefficients >= 0: the most negative one is left out until none is. factors [n, terms]."""
    kept = list(range(factors.shape[1]))
    solution = torch.zeros(factors.shape[1], dtype=factors.dtype)
    while kept:
        found = torch.linalg.lstsq(factors[:, kept], target[:, None], driver="gelsd").solution[:, 0]
        if (found >= 0).all():
            solution[kept] = found
            break
        kept.pop(int(found.argmin()))
    return solution


def cost_us(terms: dict[str, float], name: str, ranks: int, heads: int, dim: int) -> float:
    """What the model says of an exchange there and back."""
    both = (features(name, ranks, heads, dim, way) for way in DIRECTIONS)
    return sum(terms[term] * factor for row in both for term, factor in zip(TERMS, row, strict=True))


def crossover(terms: dict[str, float], heads: int, dim: int) -> int | None:
    """The number of ranks from which "sharded" stays the cheaper one, None if it does not become so."""
    first = None
    for ranks in range(MOST_RANKS, 1, -1):
        if cost_us(terms, "sharded", ranks, heads, dim) >= cost_us(terms, "allgather", ranks, heads, dim):
            break
        first = ranks
    return first


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """The fit, the crossovers that it says, and who was faster where it was measured."""
    dim = report["head"]["options"]["head_dim"]
    rows = [row for row in report["rows"] if row["kind"] == "exchange"]
    found = fit(rows, dim)
    heads = sorted({row["v_heads"] for row in rows})
    measured = {(row["v_heads"], row["ranks"], row["exchange"]): _both_us(row) for row in rows}
    ranks = sorted({row["ranks"] for row in rows})
    table = []
    for count in heads:
        pairs = {size: [measured[count, size, name] for name in NAMES] for size in ranks}
        table.append({"v_heads": count, "crossover": crossover(found["terms"], count, dim), "measured_us": pairs})
    return {"head_dim": dim, "auto_gathers_up_to": GATHER_UP_TO_RANKS, **found, "heads": table}


def _both_us(row: dict[str, Any]) -> float:
    return 1e3 * sum(float(row[way]["exchange_ms"]) for way in DIRECTIONS)


def format_summary(found: dict[str, Any]) -> str:
    """The same for people."""
    terms = found["terms"]
    lines = [
        f"an exchange takes {terms['call_us']:.1f} us a collective + {terms['message_us']:.2f} us a message + "
        f"{terms['megabyte_us']:.2f} us a MB sent + {terms['folded_megabyte_us']:.2f} us a MB folded",
        f"the fit is off by {found['mean']:.0%} in the mean, {found['worst']:.0%} at most",
        "",
        "heads  sharded is cheaper from   measured, allgather / sharded there and back, us",
    ]
    for row in found["heads"]:
        first = "no number of ranks" if row["crossover"] is None else f"{row['crossover']} ranks"
        pairs = [f"{size}: {gather:.0f} / {shard:.0f}" for size, (gather, shard) in row["measured_us"].items()]
        lines.append(f"{row['v_heads']:>5}  {first:<24}  {'   '.join(pairs)}")
    lines.append(f'exchange="auto" gathers up to {found["auto_gathers_up_to"]} ranks of a node')
    return "\n".join(lines)


def run(source: Path, target: Path | None) -> int:
    """Fit to the report in `source`, print it and, with a target, keep it. Raises ValueError for what is no report."""
    try:
        report = json.loads(source.read_text())
        found = summary(report)
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"--costs: got {str(source)!r}, expected a file that --nproc wrote: {reason}") from error
    print(format_summary(found))
    if target is not None:
        target.write_text(json.dumps(found, indent=1) + "\n")
    return 0
