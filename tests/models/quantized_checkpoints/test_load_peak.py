"""The memory that loading a quantised checkpoint takes besides its result: about one matrix."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ostinato.conf.schema import ModelSection
from ostinato.models.checkpoints.checkpoint import open_checkpoint
from ostinato.models.checkpoints.weights import load_weights
from ostinato.models.choose_weights import choose_weights
from ostinato.models.layers.linear_layers import LinearBase
from ostinato.models.registry import build_model, read_model_config
from tests.live_bytes import LiveBytes
from tests.models.quantized_checkpoints.writers import Form, write
from tests.models.random_checkpoints import VARIANTS, reference_model, save

FORMS = [
    Form("gptq", act_order=True),
    Form("awq", symmetric=False),
    Form("pack_quantized"),
    Form("fp8", 8, -1),
]


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    variant = VARIANTS["qwen2"].as_one_file()
    return save(reference_model(variant), variant, tmp_path_factory.mktemp("floats"))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.id)
def test_one_matrix_at_a_time_is_converted(floats: Path, tmp_path: Path, form: Form) -> None:
    write(floats, tmp_path / "quantised", form)
    section = ModelSection(path=str(tmp_path / "quantised"))
    checkpoint = open_checkpoint(section)
    cpu, dtype = torch.device("cpu"), torch.float32
    model = build_model(
        read_model_config(checkpoint),
        dtype=dtype,
        device=cpu,
        attention_backend="reference",
        weights=choose_weights(section, checkpoint, pack=False, device=cpu, dtype=dtype),
    )
    with LiveBytes() as live:
        load_weights(model, checkpoint)
    found = [module for module in model.modules() if isinstance(module, LinearBase)]
    made = [module for module in found if module.method.is_quantized]
    sizes = [module.out_features * module.in_features for module in made]  # a byte a weight
    assert 4 * max(sizes) < sum(sizes)  # otherwise the bound below would always hold
    # The finished weights lie in memory that LiveBytes does not count. Besides them, memory
    # holds one packed matrix, its zero points and its scales. The stored values are views of the
    # mapped file.
    assert max(sizes) // 2 < live.peak < 2 * max(sizes)
