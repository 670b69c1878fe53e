"""Fixtures of the tests of programs and their capture."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def nothing_compiles_late() -> None:
    """Replaces the fixture of all tests: these tests have no engine, and compile on purpose.

    An engine that another test has left to the garbage collector would count that as late.
    """
