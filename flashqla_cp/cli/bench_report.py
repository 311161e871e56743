"""What `flashqla-cp bench` tells: the head of a run, the table of its cases, and the plot.

A report is plain values, as the JSON file holds them:

    head        date, device, versions, commit, options, gates (definitions), peers_absent (reasons), notes
    ceilings    copy_gb_per_s, product_tflop_per_s, product_dtype
    cases       direction, tokens, gates, documents, floor_ms, bytes, operations, results
    results     name, middle_rank; eager_ms, graph_ms, host_us, peak_mib: medians of the draws; o_error, first_call_s,
                gradient_errors (by name): the largest; draws: each one's numbers; failed or refused: why there are
                none; graph_failed: why there is no graph_ms. ratios: how many times as long each other op takes (this
                library's results); over_alone: how many times as long as without ranks

peak_mib is that of forward and backward together wherever there is a backward.
"""

from __future__ import annotations

import datetime
import math
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from flashqla_cp import __version__
from flashqla_cp.cli.bench_contenders import OURS
from flashqla_cp.testing.workload import REGIMES

DISTRIBUTIONS = ("tilelang", "triton", "flash-qla", "flash-linear-attention", "fla-core")
HEADINGS = ("tokens", "gates", "op", "eager ms", "graph ms", "host us", "peak MiB", "o error", "floor ms", "of floor")
GRADIENTS = "worst gradient"  # stands behind "o error" where there is a backward
WIDE = 20.0  # ratio of the longest bar of an axis to its shortest from which the axis is logarithmic
WIDEST = 14.0  # inches of a picture; more axes go below

Report = dict[str, Any]


def head(
    options: dict[str, Any], device: torch.device, backend: str, absent: dict[str, str], notes: list[str]
) -> dict[str, Any]:
    """What a reader must know to trust the numbers. backend: with the reason for it."""
    versions: dict[str, str | None] = {
        "flashqla-cp": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    for name in DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "device": name,
        "backend": backend,
        "versions": versions,
        "commit": commit(),
        "options": options,
        "gates": {regime: REGIMES[regime] for regime in options["gates"] if regime in REGIMES},
        "peers_absent": absent,
        "notes": notes,
    }


def commit() -> str | None:
    """Commit of the checkout that this package runs from, with a + if files were changed; None for an installed one."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    said = []
    for words in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            ran = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if ran.returncode:
            return None
        said.append(ran.stdout.strip())
    return said[0] + ("+" if said[1] else "")


def comparisons(
    mine: dict[str, Any], results: list[dict[str, Any]]
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """For this library's results, how many times as long each other op takes; for a middle rank's, how many times as
    long it takes as the same op takes for the same tokens without ranks. Each "eager" and, if there, "graph"."""

    def over(upper: dict[str, Any], lower: dict[str, Any]) -> dict[str, float]:
        pairs = {way: (upper[f"{way}_ms"], lower[f"{way}_ms"]) for way in ("eager", "graph")}
        return {way: above / below for way, (above, below) in pairs.items() if above is not None and below is not None}

    ratios, over_alone = {}, {}
    for other in results:
        if other["name"] == mine["name"]:
            if mine["middle_rank"] and not other["middle_rank"]:
                over_alone = over(mine, other)
        elif mine["name"] == OURS and other["middle_rank"] == mine["middle_rank"] and over(other, mine):
            ratios[other["name"]] = over(other, mine)
    return ratios, over_alone


def format_head(report: Report) -> str:
    """The head for people."""
    top, sizes = report["head"], report["head"]["options"]
    versions = ", ".join(f"{name} {version}" for name, version in top["versions"].items() if version)
    ranks = sizes["middle_rank"]
    what = (
        f"{sizes['direction']}, {sizes['dtype']}, H = {sizes['heads']}, HV = {sizes['v_heads']}, "
        f"d = {sizes['head_dim']}, {sizes['documents']} document(s), {sizes['draws']} draw(s) of the inputs"
    )
    lines = [
        f"flashqla-cp bench, {top['date']}, {top['device']}",
        f"versions   {versions}",
        f"commit     {top['commit'] or 'unknown'}",
        f"backend    {top['backend']}",
        f"work       {what}",
        *(f"gates      {regime}: {text}" for regime, text in top["gates"].items()),
    ]
    if ranks:
        lines.append(f"rank       {ranks // 2} of {ranks} ranks 0..{ranks - 1}; collectives are local copies, no wire")
    lines += [f"absent     {name}: {reason}" for name, reason in top["peers_absent"].items()]
    lines += [f"note       {note}" for note in top["notes"]]
    ceilings = report["ceilings"]
    lines.append(
        f"ceilings   copy {ceilings['copy_gb_per_s']:.0f} GB/s, {ceilings['product_dtype']} product "
        f"{ceilings['product_tflop_per_s']:.3g} TFLOP/s"
    )
    return "\n".join(lines)


def format_table(report: Report) -> str:
    """One line for every op of every case; the last column compares this library's lines."""
    place = HEADINGS.index("o error") + 1
    backward = report["head"]["options"]["direction"] != "forward"
    rows = [HEADINGS[:place] + ((GRADIENTS,) if backward else ()) + HEADINGS[place:]]
    notes = ["compared"]
    for case in report["cases"]:
        for result in case["results"]:
            name = result["name"] + (" rank" if result["middle_rank"] else "")
            best = best_ms(result)
            share = "" if best is None else f"{case['floor_ms'] / best:.0%}"
            rows.append(
                (
                    str(case["tokens"]),
                    case["gates"],
                    name,
                    _number(result["eager_ms"], 3),
                    _number(result["graph_ms"], 3),
                    _number(result["host_us"], 0),
                    _number(result["peak_mib"], 0),
                    "-" if result["o_error"] is None else f"{result['o_error']:.1e}",
                    *((_worst(result["gradient_errors"]),) if backward else ()),
                    f"{case['floor_ms']:.3f}",
                    share,
                )
            )
            notes.append(_compared(result))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row, note in zip(rows, notes, strict=True):
        cells = [
            text.ljust(width) if 1 <= place <= 2 else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(("  ".join(cells) + "  " + note).rstrip())
    return "\n".join(lines)


def best_ms(result: dict[str, Any]) -> float | None:
    """Time of the device: from a graph, where there is one."""
    return result["eager_ms"] if result["graph_ms"] is None else result["graph_ms"]


def _compared(result: dict[str, Any]) -> str:
    """The last column: why there are no times, or how they compare."""
    trouble = result.get("refused") or result.get("failed")
    if trouble:
        return str(trouble)
    said = [f"no graph: {result['graph_failed']}"] if "graph_failed" in result else []
    said += [f"{other} takes {_best_ratio(ratio):.2f}x" for other, ratio in result["ratios"].items()]
    if result["over_alone"]:
        said.insert(0, f"{_best_ratio(result['over_alone']):.2f}x of {result['name']}")
    return ", ".join(said)


def _best_ratio(ratio: dict[str, float]) -> float:
    return ratio.get("graph", ratio["eager"])


def _worst(errors: dict[str, float] | None) -> str:
    """The largest error of a gradient and whose it is; a NaN is larger than all."""
    if not errors:
        return "-"
    name = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    return f"{name} {errors[name]:.1e}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def draw_plot(report: Report, path: Path) -> None:
    """Bars of every op, grouped by gates, an axis for each number of tokens; a line marks the floor of a group."""
    from matplotlib.figure import Figure

    cases = report["cases"]
    lengths = list(dict.fromkeys(case["tokens"] for case in cases))
    labels = list(dict.fromkeys(_label(result) for case in cases for result in case["results"]))
    groups = max(sum(case["tokens"] == tokens for case in cases) for tokens in lengths)
    width = max(4.0, 1.0 + groups * (0.4 + 0.3 * len(labels)))
    columns = max(1, min(len(lengths), int(WIDEST / width)))
    rows = -(-len(lengths) // columns)
    figure = Figure(figsize=(width * columns, 1.2 + 3.4 * rows), layout="constrained")
    sizes = report["head"]["options"]
    figure.suptitle(
        f"{sizes['direction']} on {report['head']['device']}\n{sizes['dtype']}, H = {sizes['heads']}, "
        f"HV = {sizes['v_heads']}, d = {sizes['head_dim']}"
    )
    axes = [figure.add_subplot(rows, columns, place + 1) for place in range(len(lengths))]
    for axis, tokens in zip(axes, lengths, strict=True):
        _draw_axis(axis, [case for case in cases if case["tokens"] == tokens], labels)
        axis.set_title(f"{tokens} tokens")
        axis.set_ylabel("milliseconds")
    handles = {label: bars for axis in axes for bars, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=min(len(handles), 2 * columns)
    )
    figure.savefig(path, dpi=150)


def _label(result: dict[str, Any]) -> str:
    return result["name"] + (", middle rank" if result["middle_rank"] else "")


def _draw_axis(axis: Any, cases: list[dict[str, Any]], labels: list[str]) -> None:
    names = list(dict.fromkeys(label.split(",")[0] for label in labels))
    slot = 0.8 / len(labels)
    for place, label in enumerate(labels):
        found = [next((r for r in case["results"] if _label(r) == label), None) for case in cases]
        heights = [None if result is None else best_ms(result) for result in found]
        spots = [group - 0.4 + slot * (place + 0.5) for group in range(len(cases))]
        bars = [(spot, height) for spot, height in zip(spots, heights, strict=True) if height is not None]
        if not bars:
            continue
        drawn = axis.bar(
            [spot for spot, _ in bars],
            [height for _, height in bars],
            slot * 0.92,
            color=f"C{names.index(label.split(',')[0])}",
            hatch="///" if "," in label else None,
            edgecolor="white",
            label=label,
        )
        axis.bar_label(drawn, fmt="%.3g", fontsize=7, padding=2)
    for group, case in enumerate(cases):
        axis.hlines(case["floor_ms"], group - 0.42, group + 0.42, colors="black", linestyles="dashed", linewidth=1)
    axis.plot([], [], color="black", linestyle="dashed", linewidth=1, label="floor")
    axis.set_xticks(range(len(cases)), [case["gates"] for case in cases])
    axis.set_xlim(-0.6, len(cases) - 0.4)
    if _spread(bar.get_height() for bar in axis.patches) > WIDE:
        axis.set_yscale("log")
    else:
        axis.margins(y=0.12)


def _spread(heights: Iterable[float]) -> float:
    positive = [height for height in heights if height > 0]
    return max(positive) / min(positive) if positive else 1.0
