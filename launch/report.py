"""What a training run tells its user: a progress bar, a JSON-lines log, a plot and the last lines."""

from __future__ import annotations

import json
import os
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm import tqdm

# The first steps pay for allocation, compilation and cold files.
WARM_UP_STEPS = 2
# One step's loss says as much about its text as about the model.
LAST_STEPS = 10


def require_plotting() -> None:
    """Raise ValueError if the plot at the end could not be drawn, before hours are spent."""
    if find_spec("matplotlib") is None:
        raise ValueError(
            "loss.png needs matplotlib, which is not installed: pip install matplotlib (or flashqla-cp[train]), "
            "or go without the plot with --no-plot"
        )


def require_folder(out: Path) -> None:
    """Make the folder of a run's results. Raises ValueError where they could not be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "checkpoints").mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=out), open(out / "log.jsonl", "a"):
            pass
    except OSError as error:
        raise ValueError(
            f"--out: got {str(out)!r}, expected a folder that can be made and written to; "
            f"{error.filename}: {error.strerror}"
        ) from error


class Report:
    """Rank 0's log and progress bar; on the other ranks every method does nothing.

    Args:
        out: folder of log.jsonl and loss.png.
        start, steps: first step of this run, and the step after its last.
        tokens_per_step: of the global batch.
        silent: this is not rank 0.
    """

    def __init__(self, out: Path, start: int, steps: int, tokens_per_step: int, silent: bool) -> None:
        self.out, self.start, self.tokens_per_step, self.silent = out, start, tokens_per_step, silent
        self._seconds: list[float] = []
        self._began = time.perf_counter()
        if silent:
            return
        out.mkdir(parents=True, exist_ok=True)
        keep_rows_before(self.log_path, start)
        self._log = open(self.log_path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the run
        self._bar = tqdm(total=max(start, steps), initial=start, unit="step", dynamic_ncols=True, mininterval=0.5)

    @property
    def log_path(self) -> Path:
        return self.out / "log.jsonl"

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        if not self.silent:
            self._bar.write(text)

    def step(self, step: int, loss: float, learning_rate: float, gradient_norm: float) -> None:
        """Log a finished step; the time since the previous one, or since the start, is this step's."""
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        if self.silent:
            return
        self._seconds.append(seconds)
        row = {
            "step": step,
            "loss": loss,
            "learning_rate": learning_rate,
            "gradient_norm": gradient_norm,
            "tokens": (step + 1) * self.tokens_per_step,
            "tokens_per_second": self.tokens_per_step / seconds,
            "seconds": seconds,
        }
        self._log.write(json.dumps(row) + "\n")
        self._log.flush()
        self._bar.set_postfix_str(f"loss {loss:.3f}, {_short(row['tokens_per_second'])} tokens/s", refresh=False)
        self._bar.update()

    def restart_clock(self) -> None:
        """Leave what happened since the last step, such as saving, out of the next step's time."""
        self._began = time.perf_counter()

    def end_of_steps(self) -> None:
        """Finish the bar and the log."""
        if not self.silent:
            self._bar.close()
            self._log.close()

    def summarise(self, plot: bool) -> None:
        """Draw the plot and print where everything is and how fast it was."""
        if self.silent:
            return
        rows = read_log(self.log_path)
        if plot and rows:
            draw(rows, self.out / "loss.png")
            print(f"plot: {self.out / 'loss.png'}")
        print(f"log: {self.log_path}")
        if rows:
            last = rows[-LAST_STEPS:]
            mean = sum(row["loss"] for row in last) / len(last)
            print(
                f"loss: {rows[0]['loss']:.4f} at step {rows[0]['step']}, {mean:.4f} over the last {_steps(len(last))}"
            )
        measured = self._seconds[WARM_UP_STEPS:] or self._seconds
        if measured:
            rate = self.tokens_per_step * len(measured) / sum(measured)
            print(f"throughput: {rate:,.0f} tokens/s over {_steps(len(measured))} of {self.tokens_per_step:,} tokens")


def _steps(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"


def read_log(path: Path) -> list[dict[str, Any]]:
    """The rows of a log; a line that a kill cut short is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and "step" in row:
            rows.append(row)
    return rows


def keep_rows_before(path: Path, step: int) -> None:
    """Drop the rows from `step` on, which a resumed run writes again. A missing file stays missing."""
    if not path.exists():
        return
    rows = [row for row in read_log(path) if row["step"] < step]
    scratch = path.with_name(path.name + ".new")
    scratch.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(scratch, path)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw loss over steps with a running mean, and the learning rate below, as a PNG."""
    # The figure's own canvas: pyplot would look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps, losses = [row["step"] for row in rows], [row["loss"] for row in rows]
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    upper.plot(steps, losses, color="tab:blue", alpha=0.35, linewidth=1, label="each step")
    means = running_mean(losses)
    upper.plot(steps, means, color="tab:blue", linewidth=2, label="running mean")
    upper.set_ylabel("loss (nats per byte)")
    upper.set_title(f"{rows[-1]['tokens']:,} tokens, running mean of the loss {means[-1]:.3f}")
    upper.grid(alpha=0.3)
    upper.legend()
    lower.plot(steps, [row["learning_rate"] for row in rows], color="tab:orange")
    lower.set_ylabel("learning rate")
    lower.set_xlabel("step")
    lower.grid(alpha=0.3)
    figure.savefig(path)


def running_mean(values: list[float], weight: float = 0.9) -> list[float]:
    """Exponential mean with its start corrected, so that the first value is the first mean."""
    means, total, norm = [], 0.0, 0.0
    for value in values:
        total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        means.append(total / norm)
    return means


def _short(number: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"
