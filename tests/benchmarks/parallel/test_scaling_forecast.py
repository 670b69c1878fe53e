"""The page on scaling shows the stored forecasts, and a new forecast is near the stored one."""

from __future__ import annotations

import json

import pytest

from ostinato.benchmarks.parallel.scaling_forecast import (
    FLEETS,
    LAYOUTS,
    PAGE,
    RESULTS,
    command_line,
    forecast,
    with_tables,
)


def test_the_page_has_the_tables_of_the_results() -> None:
    page = PAGE.read_text()
    assert with_tables(page, json.loads(RESULTS.read_text())) == page


def test_the_results_are_those_of_the_cases() -> None:
    commands = [command for one in LAYOUTS for command in one.commands()]
    commands += [one.command() for one in FLEETS]
    assert list(json.loads(RESULTS.read_text())) == [command_line(one) for one in commands]


def test_a_forecast_is_near_the_stored_one() -> None:
    """A change of the scheduler may change forecasts.

    If this forecast changes by more than 10%, renew the stored forecasts and the page.
    """
    command = LAYOUTS[0].commands()[0]
    (now,) = forecast(command)
    (stored,) = json.loads(RESULTS.read_text())[command_line(command)]
    assert now.pop("load") == stored.pop("load")
    assert now == pytest.approx(stored, rel=0.1)
