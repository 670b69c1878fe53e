"""Fixtures of the tests of programs and their capture."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def nothing_compiles_late() -> None:
    """Replaces the fixture of this name in tests/conftest.py: these tests compile on purpose.

    An engine of another test that still awaits garbage collection would count these compiles as
    late.
    """
