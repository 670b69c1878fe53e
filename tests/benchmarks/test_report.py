"""Figures as text."""

import pytest

from ostinato.benchmarks.report import summary


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([3.14159], "3.14"),
        ([40.0, 42.06, 43.0], "42.1 [40.0-43.0]"),
        ([1234.5, 1000.0], "1,117 [1,000-1,234]"),
        ([0.03, 0.05], "0.04 [0.03-0.05]"),
    ],
)
def test_summary(values: list[float], text: str):
    assert summary(values) == text
