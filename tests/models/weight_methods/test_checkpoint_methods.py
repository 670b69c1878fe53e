"""A weight method in one file reads a checkpoint whose matrices are stored as several tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ostinato.conf.schema import LoadFormat, ModelSection, Quantization
from ostinato.models import quantized_checkpoints
from ostinato.models.base import CausalLM
from ostinato.models.checkpoints.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from ostinato.models.checkpoints.weights import init_dummy_weights, load_weights
from ostinato.models.choose_weights import choose_weights
from ostinato.models.layers.linear_layers import LinearBase
from ostinato.models.registry import build_model, read_model_config
from tests.models.driver import Driver, Sequence
from tests.models.random_checkpoints import VARIANTS, reference_model, save

CPU = torch.device("cpu")
PROMPT = [(7 * index * index + 13 * index + 5) % 199 for index in range(23)]


def write_quantised(source: Path, target: Path, ignored: tuple[str, ...]) -> dict[str, Tensor]:
    """Write matrices as int8 with a scale a row, apart from those in `ignored`.

    Returns all tensors, dequantised.
    """
    stored: dict[str, Tensor] = {}
    restored: dict[str, Tensor] = {}
    for name, value in load_file(source / "model.safetensors").items():
        stored[name] = restored[name] = value
        if value.dim() == 2 and not name.removesuffix(".weight").endswith(ignored):
            scale = value.abs().amax(1, keepdim=True) / 127
            stored[name] = (value / scale).round().to(torch.int8)
            stored[f"{name}_scale"] = scale
            restored[name] = stored[name].float() * scale
    save_file(stored, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "row-scaled-int8", "ignore": list(ignored)}
    (target / "config.json").write_text(json.dumps(config))
    return restored


@pytest.fixture
def known_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds the folder `formats`, which has one weight method, to the searched folders."""
    folder = str(Path(__file__).with_name("formats"))
    path = [*quantized_checkpoints.__path__, folder]
    monkeypatch.setattr(quantized_checkpoints, "__path__", path)


def load(directory: Path) -> CausalLM:
    section = ModelSection(path=str(directory))
    checkpoint = open_checkpoint(section)
    weights = choose_weights(section, checkpoint, pack=False, device=CPU, dtype=torch.float32)
    model = build_model(
        read_model_config(checkpoint),
        dtype=torch.float32,
        device=CPU,
        attention_backend="reference",
        weights=weights,
    )
    load_weights(model, checkpoint)
    assert isinstance(model, CausalLM)
    return model


@pytest.mark.usefixtures("known_method")
@pytest.mark.parametrize(
    ("name", "ignored"), [("llama3", ("lm_head",)), ("qwen3-tied", ()), ("qwen2", ("down_proj",))]
)
def test_merged_matrices_heads_and_embeddings(
    tmp_path: Path, name: str, ignored: tuple[str, ...]
) -> None:
    source, target = tmp_path / "float", tmp_path / "int8"
    source.mkdir()
    target.mkdir()
    reference = reference_model(VARIANTS[name])
    # Each row has its own scale, so q, k and v of a merged matrix keep their scales.
    save(reference, VARIANTS[name].as_one_file(), source)
    restored = write_quantised(source, target, ignored)
    model = load(target)
    methods = [m.method for m in model.modules() if isinstance(m, LinearBase)]
    assert sum(method.is_quantized for method in methods) == len(methods) - (
        3 if ignored == ("down_proj",) else len(ignored)
    )
    reference.load_state_dict(restored, strict=False)
    reference.tie_weights()
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    config = read_model_config(open_checkpoint(ModelSection(path=str(target))))
    logits = Driver(model, config, dtype=torch.float32).prefill(Sequence(PROMPT), [16, 7])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.usefixtures("known_method")
def test_each_of_the_tensors_is_needed_and_checked(tmp_path: Path) -> None:
    source, target = tmp_path / "float", tmp_path / "int8"
    source.mkdir()
    target.mkdir()
    save(reference_model(VARIANTS["qwen2"]), VARIANTS["qwen2"], source)
    write_quantised(source, target, ())
    file = target / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.self_attn.k_proj.weight_scale"
    save_file({key: value for key, value in tensors.items() if key != name}, file)
    with pytest.raises(CheckpointError, match=f"lacks tensor {name}"):
        load(target)
    save_file({**tensors, name: tensors[name][:, 0].contiguous()}, file)
    with pytest.raises(
        CheckpointError,
        match=r"weight_scale has shape \[32\], but the configuration needs \[32, 1\]",
    ):
        load(target)
    weight = name.removesuffix("_scale")
    save_file({**tensors, weight: tensors[weight].float()}, file)
    with pytest.raises(CheckpointError, match=r"has dtype torch.float32, expected torch.int8"):
        load(target)


@pytest.mark.usefixtures("known_method")
def test_dummy_weights_have_all_tensors() -> None:
    settings = {"quantization_config": {"quant_method": "row_scaled_int8"}}
    checkpoint = Checkpoint(path=None, hf_config=settings, generation_config={})
    weights = choose_weights(
        ModelSection(), checkpoint, pack=False, device=CPU, dtype=torch.float32
    )
    config = {**VARIANTS["llama3"].settings, "architectures": ["LlamaForCausalLM"]}
    section = ModelSection(config=config, load_format=LoadFormat.dummy)
    model = build_model(
        read_model_config(open_checkpoint(section)),
        dtype=torch.float32,
        device=CPU,
        attention_backend="reference",
        weights=weights,
    )
    init_dummy_weights(model, 3)
    weight = model.get_parameter("layers.0.self_attn.qkv_proj.weight")
    assert weight.dtype == torch.int8
    assert int(weight.float().std()) > 20
    assert 0.015 < float(model.get_parameter("layers.0.mlp.down_proj.scale").std()) < 0.025


@pytest.mark.usefixtures("known_method")
def test_a_quantised_checkpoint_is_not_quantised_again() -> None:
    section = ModelSection(quantization=Quantization.int8)
    stated = {"quantization_config": {"quant_method": "row_scaled_int8"}}
    checkpoint = Checkpoint(path=None, hf_config=stated, generation_config={})
    with pytest.raises(ValueError, match="the checkpoint is quantised already"):
        choose_weights(section, checkpoint, pack=True, device=CPU, dtype=torch.float32)
