"""Checkpoints that state 8-bit activations, with the methods that a GPU uses, on a CPU.

The logits are compared with those of transformers. There the weights are those that the checkpoint
stands for, and a hook rounds the inputs of every projection as the format's library does.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from ostinato.conf.schema import LoadFormat, ModelSection
from ostinato.models.base import CausalLM
from ostinato.models.checkpoints.checkpoint import open_checkpoint
from ostinato.models.checkpoints.weights import init_dummy_weights, load_weights
from ostinato.models.choose_weights import choose_weights
from ostinato.models.layers.linear_layers import LinearBase
from ostinato.models.quantized_checkpoints.policy import CheckpointPolicy
from ostinato.models.quantized_checkpoints.rounded_inputs import RoundedInputs, RoundingPolicy
from ostinato.models.registry import build_model, read_model_config
from ostinato.models.sharding import WHOLE, Shard
from tests.models.driver import Driver, Sequence
from tests.models.quantized_checkpoints.writers import Form, write
from tests.models.random_checkpoints import VARIANTS, reference_model, save

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PROMPT = [(7 * index * index + 13 * index + 5) % 199 for index in range(43)]
STATIC = 0.02  # the stored scale of activations
# name -> (form, the part of an input that shares a scale, whether inputs are rounded to 8-bit
# floats; otherwise they are rounded to integers)
FORMS = {
    "int8, a scale a row": (Form("int_quantized", bits=8, group=-1), "row", False),
    "int8 in groups": (Form("int_quantized", bits=8, group=32), "row", False),
    "channel": (Form("float_quantized", bits=8, group=-1), "row", True),
    "blocks": (Form("float_quantized", bits=8, group=32), "group", True),
    "fp8 blocks": (Form("fp8", bits=8, group=32), "group", True),
    "fp8": (Form("fp8", bits=8, group=-1), "row", True),
    "fp8 of transformers": (
        Form("fp8", bits=8, group=-1, settings={"activation_scheme": "static"}),
        "static",
        True,
    ),
    "modelopt": (Form("modelopt", bits=8, group=-1), "static", True),
}


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory):
    """variant name -> its float checkpoint."""

    @cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        return save(reference_model(VARIANTS[name]), VARIANTS[name].as_one_file(), folder)

    return make


def policy_of(directory: Path, capability: tuple[int, int] = (9, 0)) -> RoundingPolicy:
    """The policy that `choose_weights` gives for CUDA, here for a model on a CPU."""
    section = ModelSection(path=str(directory))
    checkpoint = open_checkpoint(section)
    found = choose_weights(section, checkpoint, pack=True, device=CPU, dtype=torch.float32)
    assert isinstance(found, CheckpointPolicy)
    return RoundingPolicy(as_stored=found, capability=capability)


def load(directory: Path, *, shard: Shard = WHOLE, is_dummy: bool = False) -> CausalLM:
    how = LoadFormat.dummy if is_dummy else LoadFormat.auto
    checkpoint = open_checkpoint(ModelSection(path=str(directory), load_format=how))
    model = build_model(
        read_model_config(checkpoint),
        dtype=torch.float32,
        device=CPU,
        attention_backend="reference",
        weights=policy_of(directory),
        shard=shard,
    )
    if is_dummy:
        init_dummy_weights(model, 3)
    else:
        load_weights(model, checkpoint)
    assert isinstance(model, CausalLM)
    return model


def rounded_modules(model: CausalLM) -> dict[str, LinearBase]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, LinearBase) and isinstance(module.method, RoundedInputs)
    }


def state_scale(directory: Path) -> None:
    """Set each stored scale of activations to `STATIC`."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, value in tensors.items():
        if name.endswith(("input_scale", "activation_scale")):
            tensors[name] = torch.full_like(value, STATIC)
    save_file(tensors, file, metadata={"format": "pt"})


def rounding(scales: str, size: int, *, is_float: bool) -> Callable[..., tuple[Tensor]]:
    """A hook that rounds the input of a projection."""
    most = 448.0 if is_float else 127.0

    def hook(module: torch.nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        x = given[0]
        if scales == "group":
            parts = x.unflatten(-1, (-1, size))
            scale = (parts.abs().amax(-1) / most).repeat_interleave(size, -1)
        elif scales == "row":
            scale = x.abs().amax(-1, keepdim=True) / most
        else:
            scale = torch.tensor(STATIC)
        whole = (x / scale).clamp(-most, most)
        whole = whole.to(torch.float8_e4m3fn).float() if is_float else whole.round()
        return (whole * scale,)

    return hook


def expected_logits(
    source: Path, restored: dict[str, Tensor], scratch: Path, hook: Callable | None
) -> Tensor:
    scratch.mkdir()
    contiguous = {name: value.contiguous() for name, value in restored.items()}
    save_file(contiguous, scratch / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(source / "config.json", scratch / "config.json")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        scratch, dtype=torch.float32, attn_implementation="eager"
    )
    for name, module in reference.named_modules():
        if hook is not None and name.endswith("_proj"):
            module.register_forward_pre_hook(hook)
    with torch.no_grad():
        return reference(torch.tensor([PROMPT])).logits[0]


@pytest.mark.parametrize("name", FORMS)
def test_logits_have_rounded_inputs(floats, tmp_path: Path, name: str) -> None:
    form, scales, is_float = FORMS[name]
    restored = write(floats("qwen2"), tmp_path / "quantised", form)
    if scales == "static":
        state_scale(tmp_path / "quantised")
    model = load(tmp_path / "quantised")
    found = rounded_modules(model)
    assert len(found) == 3 * 4
    for own, module in found.items():
        if own.endswith(("o_proj", "down_proj")):
            assert torch.equal(module.dense(), restored[f"model.{own}.weight"]), own
            ids = torch.tensor([3, 0])
            rows = module.method.rows(module.weights, module.spec, ids)
            assert torch.equal(rows, module.dense()[ids])
        planned = module.method.num_bytes(module.spec)
        assert planned == sum(weight.nbytes for weight in module.weights.values())
    hook = rounding(scales, form.group, is_float=is_float)
    rounded = expected_logits(floats("qwen2"), restored, tmp_path / "rounded", hook)
    exact = expected_logits(floats("qwen2"), restored, tmp_path / "exact", None)
    config = read_model_config(open_checkpoint(ModelSection(path=str(tmp_path / "quantised"))))
    ours = Driver(model, config, dtype=torch.float32).prefill(Sequence(PROMPT), [16, 20, 7])
    error, effect = float((ours - rounded).norm()), float((exact - rounded).norm())
    # An input near the middle between two steps can be rounded to either of them.
    assert error < 0.25 * effect


def test_experts_have_rounded_inputs(floats, tmp_path: Path) -> None:
    form = Form("fp8", bits=8, group=32)
    restored = write(floats("qwen3-moe"), tmp_path / "quantised", form)
    module = rounded_modules(load(tmp_path / "quantised"))["layers.1.mlp.experts.down_proj"]
    gates = [restored[f"model.layers.1.mlp.experts.{e}.down_proj.weight"] for e in range(8)]
    assert torch.equal(module.dense(), torch.stack(gates))
    x = torch.randn(5, module.in_features, generator=torch.Generator().manual_seed(2))
    ids = torch.tensor([[0, 3], [7, 1], [2, 2], [5, 0], [6, 4]], dtype=torch.int32)
    got = module(x, ids)
    hook = rounding("group", 32, is_float=True)
    (whole,) = hook(module, (x,))
    for index, expert in enumerate(ids.flatten().tolist()):
        expected = whole[index // 2].double() @ gates[expert].double().T
        torch.testing.assert_close(got[index].double(), expected, atol=1e-5, rtol=1e-4)


def test_stacked_matrices_share_the_largest_stored_scale(floats, tmp_path: Path) -> None:
    write(floats("qwen2"), tmp_path / "x", Form("modelopt", bits=8, group=-1))
    file = tmp_path / "x" / "model.safetensors"
    tensors = load_file(file)
    for part, scale in (("q", 0.5), ("k", 2.0), ("v", 1.0)):
        name = f"model.layers.0.self_attn.{part}_proj.input_scale"
        tensors[name] = torch.full_like(tensors[name], scale)
    save_file(tensors, file, metadata={"format": "pt"})
    module = rounded_modules(load(tmp_path / "x"))["layers.0.self_attn.qkv_proj"]
    assert module.weights["input_scale"].tolist() == [2.0]
    tensors["model.layers.0.self_attn.q_proj.input_scale"].fill_(torch.nan)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"input_scale: scale .* is nan"):
        load(tmp_path / "x")


def test_ranks_hold_whole_groups(floats, tmp_path: Path) -> None:
    write(floats("qwen2"), tmp_path / "x", Form("fp8", bits=8, group=32))
    with pytest.raises(ValueError, match=r"96 columns in groups of 32 cannot"):
        load(tmp_path / "x", shard=Shard(0, 2))
    write(floats("qwen2"), tmp_path / "y", Form("float_quantized", bits=8, group=-1))
    whole = rounded_modules(load(tmp_path / "y"))["layers.2.mlp.down_proj"].dense()
    shards = [load(tmp_path / "y", shard=Shard(rank, 2)) for rank in range(2)]
    joined = [rounded_modules(shard)["layers.2.mlp.down_proj"].dense() for shard in shards]
    assert torch.equal(torch.cat(joined, 1), whole)


def settings_of(directory: Path, change: Callable[[dict], None]) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text())
    change(config["quantization_config"])
    file.write_text(json.dumps(config))


def test_settings_say_whether_and_how(floats, tmp_path: Path) -> None:
    directory = tmp_path / "blocks"
    write(floats("qwen2"), directory, Form("fp8", bits=8, group=32))
    assert len(rounded_modules(load(directory))) == 12
    settings_of(directory, lambda settings: settings.update(scale_fmt="ue8m0"))
    method = next(iter(rounded_modules(load(directory)).values())).method
    assert isinstance(method, RoundedInputs)
    assert method.inputs.powers
    directory = tmp_path / "int8"
    write(floats("qwen2"), directory, Form("int_quantized", bits=8, group=-1))
    for changes in ({"symmetric": False}, {"num_bits": 4}, {"type": "float"}):
        other = tmp_path / "-".join(changes)
        shutil.copytree(directory, other)

        def change(settings: dict, changes: dict = changes) -> None:
            settings["config_groups"]["group_0"]["input_activations"].update(changes)

        settings_of(other, change)
        assert not rounded_modules(load(other)), changes


def test_devices_without_the_instructions_keep_floats(floats, tmp_path: Path) -> None:
    spec = SimpleNamespace(device=CPU, dtype=torch.float32)
    for form, least in (
        (Form("fp8", bits=8, group=32), (8, 9)),
        (Form("int_quantized", bits=8), (8, 0)),
    ):
        directory = tmp_path / form.id
        write(floats("qwen2"), directory, form)
        for capability in ((7, 5), (8, 0), (8, 9), (9, 0)):
            policy = policy_of(directory, capability)
            name = "model.layers.0.self_attn.o_proj"
            method = policy.method_for((name,), "layer", spec)  # type: ignore[arg-type]
            assert isinstance(method, RoundedInputs) == (capability >= least)


def test_the_setting_keeps_floats(floats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(floats("qwen2"), tmp_path / "x", Form("fp8", bits=8, group=32))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def chosen(device: torch.device, *, rounds: bool, path: Path = tmp_path / "x") -> object:
        section = ModelSection(path=str(path), round_activations=rounds)
        checkpoint = open_checkpoint(section)
        return choose_weights(section, checkpoint, pack=True, device=device, dtype=torch.bfloat16)

    assert isinstance(chosen(CUDA, rounds=True), RoundingPolicy)
    assert not isinstance(chosen(CUDA, rounds=False), RoundingPolicy)
    assert not isinstance(chosen(CPU, rounds=True), RoundingPolicy)
    for device, path in ((CPU, tmp_path / "x"), (CUDA, floats("qwen2"))):
        with pytest.raises(ValueError, match=r"round_activations=false is for quantised .* CUDA"):
            chosen(device, rounds=False, path=path)


def test_dummy_weights(floats, tmp_path: Path) -> None:
    for form in (Form("modelopt", bits=8, group=-1), Form("fp8", bits=8, group=32)):
        directory = tmp_path / form.method
        write(floats("qwen2"), directory, form)
        (directory / "model.safetensors").unlink()
        model = load(directory, is_dummy=True)
        for module in rounded_modules(model).values():
            assert bool(module.dense().isfinite().all())
