"""Fixtures of the tests of models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Model tests use one thread: the models are small, and idle OpenMP threads would spin."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nothing_compiles_late() -> None:
    """Replaces the fixture of tests/conftest.py: these tests have no engine and compile on purpose.

    An engine that another test has left to the garbage collector would count their compilations
    as late.
    """
