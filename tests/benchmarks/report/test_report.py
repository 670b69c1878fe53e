"""Tables and plots of results. The committed results fit the schema."""

import json
import re
from pathlib import Path

import pytest

from ostinato.benchmarks.report.json_file import write_json
from ostinato.benchmarks.report.plot_style import make_axes, plain_log
from ostinato.benchmarks.report.record import Metric, Point, Record, conditions_of, read_records
from ostinato.benchmarks.report.tables import median_and_range, print_record
from ostinato.conf.root import RunConfig

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
# Written by run bench, run simulate and run tune; other programs have their own formats.
KEPT = [path for path in sorted(RESULTS.glob("*.json")) if '"schema_version"' in path.read_text()]


def test_results_are_kept():
    kinds = {record.kind for path in KEPT for record in read_records(path)}
    assert {"serve", "startup", "tune", "validate"} <= kinds


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_a_kept_result_fits_the_schema_and_names_its_conditions(path: Path):
    for record in read_records(path):  # refuses what does not fit benchmarks/report/schema.json
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
def test_median_and_range(values: list[float], text: str):
    assert median_and_range(values) == text


def make_record(kind: str, points: list[Point]) -> Record:
    return Record(kind=kind, conditions=conditions_of(RunConfig()), points=points)


def make_points(count: int) -> list[Point]:
    metrics = {"ttft_p50": 12345.6, "itl_p50": 1.5, "output_throughput": 98765.4, "failed": 0.0}
    return [
        Point(
            label=f"{n} requests/s",
            parameters={"rate": n},
            metrics={name: Metric(value + n, "tokens/s") for name, value in metrics.items()},
        )
        for n in range(1, count + 1)
    ]


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("count", [1, 3, 4, 9])
def test_a_table_fits_the_terminal(
    count: int, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FORCE_COLOR", "1")  # so that rich takes the captured output for a terminal
    monkeypatch.setenv("COLUMNS", str(columns))
    print_record(make_record("serve", make_points(count)))
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= columns
    for n in range(1, count + 1):
        assert any(f"{n} requests/s" in line for line in lines)
    assert not any("…" in line for line in lines)


def test_logarithmic_axes_have_plain_numbers():
    for low, high in ((0.7, 4.2), (0.02, 900.0), (3.0, 2e6)):
        figure, [axes] = make_axes()
        axes.set(xscale="log", xlim=(low, high))
        plain_log(axes.xaxis)
        figure.canvas.draw()
        ticks = [*axes.get_xticklabels(), *axes.get_xticklabels(minor=True)]
        texts = [tick.get_text() for tick in ticks if tick.get_text()]
        assert len(texts) > 2
        assert not any("$" in text for text in texts)


def test_a_file_is_replaced_as_a_whole(tmp_path: Path):
    path = tmp_path / "new" / "result.json"
    write_json({"results": [1, 2]}, path)
    with path.open() as opened:  # as a reader that began before the next write
        write_json({"results": [3]}, path)
        assert json.load(opened) == {"results": [1, 2]}
    assert json.loads(path.read_text()) == {"results": [3]}
    assert [each.name for each in path.parent.iterdir()] == ["result.json"]
