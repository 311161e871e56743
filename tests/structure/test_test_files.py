"""Test files have names of their own: pytest imports them by base name, and two of one name stop the whole run."""

from __future__ import annotations

from collections import Counter

from sources import ROOT


def test_base_names_are_unique():
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
