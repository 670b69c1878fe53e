"""Checkpoints with the names and keys that different versions of the libraries write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.quantized_checkpoints.loading import load, matrices
from tests.models.quantized_checkpoints.writers import Form, write
from tests.models.random_checkpoints import VARIANTS, reference_model, save

NAME = "layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("floats")
    return save(reference_model(VARIANTS["qwen2"]), VARIANTS["qwen2"].as_one_file(), folder)


def check(floats: Path, directory: Path, form: Form) -> None:
    """Check that a checkpoint is read with the weights that it stands for."""
    restored = write(floats, directory, form)
    found = matrices(load(directory)[0])[NAME]
    assert found.method.is_quantized
    assert torch.equal(found.dense(), restored[f"model.{NAME}.weight"])


@pytest.mark.parametrize(
    "settings",
    [
        {"packing_format": "auto_round"},
        {"packing_format": "auto_round:gptq"},
        {"packing_format": "auto_round:awq"},
        {"backend": "auto_round:exllamav2"},
        {"backend": "auto_round:gptq:exllamav2"},
        {},
    ],
    ids=str,
)
def test_zero_points_of_auto_round(floats: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    """The plain packing stores zero points as they are, that of GPTQ stores them minus 1."""
    check(floats, tmp_path / "x", Form("auto_round", symmetric=False, settings=settings))
