"""A small model, and an adapter of it that a test may break."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ostinato.models.base import CausalLM
from tests.models.adapters.peft_files import ONE_LAYER, load_base, save_adapter, save_base


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return load_base(save_base(ONE_LAYER, tmp_path_factory.mktemp("base")))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapter")
    return save_adapter(ONE_LAYER, directory, target_modules=["q_proj", "up_proj"])


@pytest.fixture
def adapter(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "copy")
