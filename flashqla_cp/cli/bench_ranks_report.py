"""What `flashqla-cp bench --nproc` tells: the head of a run, its tables and its plot.

A report is plain values: head (as bench_report.head makes it) and rows. Of a row:

    kind        op (all ranks), scaling (some of them), exchange (maps alone)
    name, exchange, ranks, gates, tokens (of a rank), v_heads
    forward, backward   whole_ms, stand_in_ms, exchange_ms: the slowest rank's, medians of the calls; the same with
                        _of_ranks: each rank's own; way: eager or graph, whichever the numbers are of; exposed_ms,
                        hidden_ms; sent_by_ranks, bytes_by_ranks: bytes counted and bytes that the formula says
    over_alone, loss    against the op on one device: times as long, share of speed lost in a step
    o_error, gradient_errors, failed
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

DIRECTIONS = ("forward", "backward")
OPS = ("tokens", "gates", "op", "exchange", "fwd ms", "bwd ms", "fwd/alone", "bwd/alone")
FIELD = (*OPS, "exposed us", "exchange us", "hidden us", "sent MB", "o error", "worst gradient")
SCALING = ("ranks", "tokens", "gates", "exchange", "fwd ms", "bwd ms", "loss")
MAPS = ("ranks", "exchange", "heads", "fwd us", "bwd us", "fwd MB", "bwd MB")

Report = dict[str, Any]
Row = dict[str, Any]


def format_head(report: Report) -> str:
    """The head for people."""
    top, sizes = report["head"], report["head"]["options"]
    versions = ", ".join(f"{name} {version}" for name, version in top["versions"].items() if version)
    lines = [
        f"flashqla-cp bench --nproc {sizes['nproc']}, {top['date']}, {top['device']}",
        f"versions   {versions}",
        f"commit     {top['commit'] or 'unknown'}",
        f"ranks      {sizes['nproc']} over {sizes['group']}; tokens are those of one rank",
        f"backend    {top['backend']}",
        f"work       {sizes['dtype']}, H = {sizes['heads']}, HV = {sizes['v_heads']}, d = {sizes['head_dim']}",
        *(f"gates      {regime}: {text}" for regime, text in top["gates"].items()),
        *(f"absent     {name}: {reason}" for name, reason in top["peers_absent"].items()),
        *(f"note       {note}" for note in top["notes"]),
    ]
    return "\n".join(lines)


def format_tables(report: Report) -> str:
    """Exchanges alone, weak scaling, and the op with every exchange beside the op on one device. Pairs of numbers are
    forward and backward."""
    rows = report["rows"]
    maps = [_maps(row) for row in rows if row["kind"] == "exchange"]
    scaling = [_scaling(row) for row in rows if row["kind"] == "scaling"]
    field = [_field(row) for row in rows if row["kind"] == "op"]
    titles = (
        "exchanges of maps alone",
        "weak scaling, exchange auto",
        "the op on all ranks (columns with two numbers: forward, backward)",
    )
    tables = zip(titles, (MAPS, SCALING, FIELD), (maps, scaling, field), strict=True)
    return "\n\n".join("\n".join([title, *_aligned([head, *body])]) for title, head, body in tables if body)


def _field(row: Row) -> tuple[str, ...]:
    start = (str(row["tokens"]), row["gates"], row["name"], row["exchange"])
    if "failed" in row:
        return (*start, row["failed"].splitlines()[0])
    errors = row.get("gradient_errors") or {}
    worst = max(errors, key=lambda name: errors[name]) if errors else None
    o_error = row.get("o_error")
    return (
        *start,
        *(f"{row[way]['whole_ms']:.3f}" for way in DIRECTIONS),
        *(f"{row['over_alone'][way]:.2f}" if "over_alone" in row else "-" for way in DIRECTIONS),
        *(_pair(row, f"{name}_ms", 1e3) for name in ("exposed", "exchange", "hidden")),
        _traffic(row),
        "-" if o_error is None else f"{o_error:.1e}",
        "-" if worst is None else f"{worst} {errors[worst]:.1e}",
    )


def _scaling(row: Row) -> tuple[str, ...]:
    start = (str(row["ranks"]), str(row["tokens"]), row["gates"], row["exchange"])
    if "failed" in row:
        return (*start, row["failed"].splitlines()[0])
    loss = f"{row['loss']:.1%}" if "loss" in row else "-"
    return (*start, *(f"{row[way]['whole_ms']:.3f}" for way in DIRECTIONS), loss)


def _maps(row: Row) -> tuple[str, ...]:
    times = (f"{row[way]['exchange_ms'] * 1e3:.0f}" for way in DIRECTIONS)
    sizes = (f"{max(row[way]['bytes_by_ranks']) / 1e6:.2f}" for way in DIRECTIONS)
    return (str(row["ranks"]), row["exchange"], str(row["v_heads"]), *times, *sizes)


def _pair(row: Row, key: str, factor: float) -> str:
    if any(key not in row[way] for way in DIRECTIONS):
        return "-"
    return " ".join(f"{row[way][key] * factor:.0f}" for way in DIRECTIONS)


def _traffic(row: Row) -> str:
    """Bytes sent by the rank that sends most, and whether they are what the formula says."""
    if any("sent_by_ranks" not in row[way] for way in DIRECTIONS):
        return "-"
    text = " ".join(f"{max(row[way]['sent_by_ranks']) / 1e6:.2f}" for way in DIRECTIONS)
    wrong = [way for way in DIRECTIONS if row[way]["sent_by_ranks"] != row[way]["bytes_by_ranks"]]
    return text + (f" ({' and '.join(wrong)}: not what the formula says)" if wrong else "")


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns; the last cell of a short row, which says what went wrong, may be as long as it likes."""
    full = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(len(row[column]) for row in full) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [text.rjust(width) for text, width in zip(row, widths, strict=False)]
        lines.append("  ".join(cells) if len(row) == len(widths) else "  ".join([*cells[:-1], row[-1]]))
    return lines


def draw_plot(report: Report, path: Path) -> None:
    """Three axes: a step on all ranks by exchange, over the step on one device; weak scaling; the exchanges alone."""
    from matplotlib.figure import Figure

    rows = [row for row in report["rows"] if "failed" not in row]
    figure = Figure(figsize=(16, 5), layout="constrained")
    sizes = report["head"]["options"]
    figure.suptitle(
        f"{sizes['nproc']} ranks over {sizes['group']}, {report['head']['device']}; {sizes['dtype']}, "
        f"H = {sizes['heads']}, HV = {sizes['v_heads']}, d = {sizes['head_dim']}"
    )
    steps, scaling, maps = figure.subplots(1, 3)
    _draw_steps(steps, [row for row in rows if row["kind"] == "op" and "over_alone" in row])
    _draw_lines(
        scaling, [row for row in rows if row["kind"] == "scaling" and "loss" in row], "tokens", "tokens", _speed
    )
    scaling.set(title="weak scaling", xlabel="ranks", ylabel="speed of a step, share of one device's")
    scaling.set_ylim(0, 1.05 * scaling.get_ylim()[1])
    most = max((row["v_heads"] for row in rows if row["kind"] == "exchange"), default=0)
    alone = [row for row in rows if row["kind"] == "exchange" and row["v_heads"] == most]
    _draw_lines(maps, alone, "exchange", "", _exchange_us)
    maps.set(title=f"exchange of maps alone, {most} heads", xlabel="ranks", ylabel="us, forward + backward")
    maps.set_ylim(0)
    figure.savefig(path, dpi=120)


def _draw_steps(axis: Any, rows: Sequence[Row]) -> None:
    names = list(dict.fromkeys((row["name"], row["exchange"]) for row in rows))
    groups = list(dict.fromkeys((row["tokens"], row["gates"]) for row in rows))
    slot = 0.8 / max(1, len(names))
    for place, name in enumerate(names):
        found = {(row["tokens"], row["gates"]): row for row in rows if (row["name"], row["exchange"]) == name}
        spots = [number - 0.4 + slot * (place + 0.5) for number, group in enumerate(groups) if group in found]
        heights = [1.0 / (1.0 - found[group]["loss"]) for group in groups if group in found]
        axis.bar(spots, heights, slot * 0.92, label=name[1] if name[1] != "its own" else name[0])
    axis.axhline(1.0, color="black", linestyle="dashed", linewidth=1)
    axis.set_xticks(range(len(groups)), [f"{tokens}\n{gates}" for tokens, gates in groups])
    axis.set(title="a step on all ranks", ylabel="times as long as on one device")
    if names:
        axis.legend(fontsize=8)


def _draw_lines(axis: Any, rows: Sequence[Row], key: str, unit: str, value: Any) -> None:
    for name in dict.fromkeys(row[key] for row in rows):
        line = sorted((row["ranks"], value(row)) for row in rows if row[key] == name)
        axis.plot(*zip(*line, strict=True), marker="o", label=f"{name} {unit}".strip())
    ranks = sorted({row["ranks"] for row in rows})
    axis.set_xticks(ranks, list(map(str, ranks)))
    if rows:
        axis.legend(fontsize=8)


def _speed(row: Row) -> float:
    return 1.0 - float(row["loss"])


def _exchange_us(row: Row) -> float:
    return 1e3 * sum(float(row[way]["exchange_ms"]) for way in DIRECTIONS)
