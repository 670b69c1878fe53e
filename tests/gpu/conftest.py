"""The tests of this folder need a CUDA device. Without one they are skipped, with that reason."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.nodeid.startswith("tests/gpu/"):  # comparing paths would take seconds
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
