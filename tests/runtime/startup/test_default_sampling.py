"""Sampling parameters that `generation_config.json` sets for requests that do not set them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ostinato.runtime.startup.plan.engine_plan import make_plan
from ostinato.runtime.startup.served_model import describe_model
from tests.runtime.tiny import MODEL, tiny_config


@pytest.mark.parametrize(
    ("stated", "is_used", "expected"),
    [
        ({"temperature": 0.6, "top_k": 20}, True, {"temperature": 0.6, "top_k": 20}),
        ({"temperature": 0.6, "top_k": 20}, False, {}),
        (
            {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1},
            True,
            {"temperature": 0.0, "repetition_penalty": 1.1},
        ),
        ({"do_sample": False, "temperature": 0.6}, False, {}),
    ],
)
def test_default_sampling(
    tmp_path: Path, stated: dict[str, Any], is_used: bool, expected: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    config = tiny_config(
        f"model.path={tmp_path}", f"sampling.use_generation_config={str(is_used).lower()}"
    )
    plan = make_plan(config.engine, threads=1)
    assert describe_model(plan, {}).default_sampling == expected
