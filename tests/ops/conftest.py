"""Fixtures of the tests of kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """`torch.set_num_threads`; the fixture restores the number of threads after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nothing_compiles_late() -> None:
    """Replaces the fixture of this name in tests/conftest.py: kernel tests compile on purpose.

    An engine that another test has left to the garbage collector would count their compilations
    as late.
    """
