"""Values of a config.json that have another kind or are out of range are refused by their key."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models.config_json.test_config import MISTRAL, read


@pytest.mark.parametrize("window", [-16, 2.5, True, "7", [7]])
def test_a_sliding_window_is_an_integer(window: Any) -> None:
    """A negative window would be attention in chunks."""
    with pytest.raises(ValueError, match="sliding_window must be an integer of at least 0, got "):
        read(**{**MISTRAL, "sliding_window": window})


def test_a_sliding_window_of_0_is_none() -> None:
    assert read(**{**MISTRAL, "sliding_window": 0}).sliding_windows == (0,) * 4
