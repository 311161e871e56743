"""What a run found, in values: findings with source lines, statistics, and the check that tests end with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong. rule: short name of the kind. lines: of the emitted source, the accessor's first."""

    severity: str
    rule: str
    text: str
    lines: tuple[int, ...] = ()

    def __str__(self) -> str:
        where = " <- ".join(f"line {line}" for line in self.lines)
        return f"{self.severity} [{self.rule}] {where + ': ' if where else ''}{self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suppression:
    """A finding that is known and harmless: in kernels whose name matches, findings whose text matches. Say why."""

    kernel: str
    pattern: str
    reason: str

    def __post_init__(self) -> None:
        if not self.reason.strip():
            raise ValueError("reason: got an empty text, expected why the finding is harmless")

    def covers(self, kernel: str, finding: Finding) -> bool:
        """Whether this suppression is about `finding`."""
        return bool(re.fullmatch(self.kernel, kernel)) and bool(re.search(self.pattern, str(finding)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Outcome of one emulated call. finished: every block ran to its end. error: what the host stub raised."""

    kernel: str
    finished: bool
    error: str
    findings: tuple[Finding, ...]
    source: str
    seconds: float
    switches: int
    accesses: int
    mma: int
    bulk_copies: int
    blocks: int

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Findings that are errors."""
        return tuple(f for f in self.findings if f.severity == "error")

    def rules(self) -> set[str]:
        """Kinds of the findings."""
        return {f.rule for f in self.findings}

    def describe(self) -> str:
        """Findings with the source lines they point to."""
        lines = self.source.splitlines()
        parts = [f"{self.kernel}: {self.error}"] if self.error else []
        for finding in self.findings:
            parts.append(f"{self.kernel}: {finding}")
            parts += [
                f"    {number:5d} | {lines[number - 1].strip()}" for number in finding.lines if 0 < number <= len(lines)
            ]
        return "\n".join(parts) or f"{self.kernel}: clean"

    def assert_clean(self, allow: Sequence[Suppression] = ()) -> None:
        """Fail unless the call finished with no finding that `allow` does not cover, and every suppression was needed.

        Raises:
            AssertionError: with the findings and their source lines.
        """
        open_findings = [f for f in self.findings if not any(s.covers(self.kernel, f) for s in allow)]
        mine = [s for s in allow if re.fullmatch(s.kernel, self.kernel)]
        unused = [s for s in mine if not any(s.covers(self.kernel, f) for f in self.findings)]
        if open_findings or not self.finished or self.error:
            raise AssertionError(self.describe())
        if unused:
            raise AssertionError(f"{self.kernel}: suppressions that suppress nothing: {unused}")
