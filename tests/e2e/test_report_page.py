"""The HTML report of a committed result in a real browser: widths and themes.

The report loads no other resource.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ostinato.benchmarks.report.html_report import write_report
from ostinato.benchmarks.report.record import read_records
from tests.e2e import test_page
from tests.e2e.test_page import LAPTOP, NO_SIDEWAYS, PHONE, Browser

RESULT = "benchmarks/results/serve-llama-45m-bf16.json"
pytestmark = test_page.pytestmark


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    [record] = read_records(Path(__file__).resolve().parents[2] / RESULT)
    page, *pictures = write_report(record, tmp_path_factory.mktemp("report") / "result.json")
    assert {"result-load.png", "result-itl.png"} <= {picture.name for picture in pictures}
    return page


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.driver.quit()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_a_report_is_readable_everywhere(report: Path, browser: Browser, size, theme) -> None:
    browser.open(report.as_uri(), size, theme, ready=False)
    assert browser.script(NO_SIDEWAYS)
    colours = "getComputedStyle(document.body).{}.match(/[0-9]+/g).reduce((a, b) => +a + +b, 0)"
    ground, ink = (browser.script(colours.format(name)) for name in ("backgroundColor", "color"))
    assert (ground < ink) == (theme == "dark")
    plots = browser.all("section svg[role=img]")
    assert len(plots) >= 3
    # A phone scrolls the plots and keeps them readable.
    assert all(plot.size["width"] >= 590 for plot in plots)
    # Axes and labels follow the theme.
    label = "getComputedStyle(document.querySelector('svg [style*=\"fill: var(--ink)\"]')).fill"
    assert browser.script(f"{label}.match(/[0-9]+/g)[0]") == ("34" if theme == "light" else "227")
    assert browser.script("performance.getEntriesByType('resource').length") == 0
    assert browser.errors() == []
