"""Figures as text, and the results that are kept."""

from pathlib import Path

import pytest

from ostinato.benchmarks.record import read_records
from ostinato.benchmarks.report import summary

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
# Of run bench, run simulate and run tune; other programs have forms of their own.
KEPT = [path for path in sorted(RESULTS.glob("*.json")) if '"schema_version"' in path.read_text()]


def test_results_are_kept():
    kinds = {record.kind for path in KEPT for record in read_records(path)}
    assert {"serve", "startup", "tune", "validate"} <= kinds


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_a_kept_result_fits_the_schema_and_names_its_conditions(path: Path):
    for record in read_records(path):  # refuses what does not fit benchmarks/schema.json
        assert record.points
        for name in ("config", "commit", "time", "command"):
            assert record.conditions[name]


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
