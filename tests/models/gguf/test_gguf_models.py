"""GGUF files of every supported architecture against transformers on the same numbers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file

from ostinato.conf.schema import ModelSection
from ostinato.models.checkpoints.checkpoint import open_checkpoint
from ostinato.models.choose_weights import choose_weights
from ostinato.models.gguf.gguf_config import read_gguf_config
from ostinato.models.gguf.gguf_file import open_gguf
from ostinato.models.gguf.gguf_paths import GGUFError
from ostinato.models.gguf.gguf_tensors import read_tensors
from ostinato.models.gguf.stored_formats import FORMATS
from ostinato.models.quantized_checkpoints.gguf import AsStored
from ostinato.models.sharding import Shard, Span
from ostinato.models.weight_methods.weight_method import MatrixRole, MatrixSpec, Part
from tests.models.driver import Driver, Sequence
from tests.models.gguf_files import save_checkpoint, write_gguf
from tests.models.parity import PROMPT, Expected, check_whole, load
from tests.models.random_checkpoints import GROWING, YARN

OLMO3_ROPE = {
    "full_attention": YARN,
    "sliding_attention": {"rope_type": "default", "rope_theta": YARN["rope_theta"]},
}
# A GGUF file cannot state Gemma's query_pre_attn_scalar, Mistral's window or Qwen's mixed layers.
# So these settings have the values that the reader of GGUF files assumes. Sizes of 64 are multiples
# of a block of quantised values.
MODELS: dict[str, dict[str, Any]] = {
    "cohere": {},
    "cohere2": {"num_hidden_layers": 4},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32},
    "glm4": {},
    "glm4-moe": {},
    "gpt-oss": {},
    "llama-linear-bias": {},
    "llama-mqa": {},
    "llama-tied": {},
    "llama-yarn": {},
    "llama3": {},
    "ministral3": {"rope_parameters": {**GROWING, "mscale": 1.0, "mscale_all_dim": 0.5}},
    "mistral": {"sliding_window": None},
    "mixtral": {"intermediate_size": 64},
    "olmo2": {},
    "olmo3": {"rope_parameters": OLMO3_ROPE},
    "olmoe": {},
    "phi3": {},
    "phi3-longrope": {},
    "phi3-partial": {},
    "qwen2": {},
    "qwen2-moe": {
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 64,
        "use_sliding_window": False,
    },
    "qwen3": {},
    "qwen3-moe": {},
    "qwen3-tied": {},
    "smollm3": {
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 1, 1, 0],
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * 4,
    },
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory):
    """(name, type of matrices) -> (the file, what transformers computes on the same numbers)."""

    @cache
    def write(name: str, kind: str) -> tuple[Path, Expected]:
        directory = save_checkpoint(name, tmp_path_factory.mktemp(name), **MODELS[name])
        file = write_gguf(
            directory, directory / f"{name}-{kind}.gguf", type_of=lambda own: type_for(own, kind)
        )
        attention = "eager"
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation=attention
        ).eval()
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT])).logits[0]
        return file, Expected(model, directory, logits)

    return write


def type_for(name: str, kind: str) -> str:
    """The type of a matrix: `kind`, but float32 for routers, as in llama.cpp."""
    return "F32" if "ffn_gate_inp" in name else kind


WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 64}


def mixed_types(name: str) -> str:
    """Types like those of files named Q4_K_M: some parts of a stacked matrix have more bits."""
    return "Q6_K" if "attn_v" in name or name in ("output.weight", "token_embd.weight") else "Q4_K"


@pytest.mark.parametrize("kind", [*FORMATS, "mixed"])
def test_integers_and_scales_are_multiplied_as_stored(tmp_path: Path, kind: str) -> None:
    directory = save_checkpoint("llama3", tmp_path, **WIDE)
    file = write_gguf(
        directory,
        tmp_path / "model.gguf",
        type_of=mixed_types if kind == "mixed" else lambda name: kind,
    )
    expected = load_file(directory / "model.safetensors")
    model, config = load(file, "cpu", pack=True)
    assert config.dtype is torch.bfloat16
    layer, prefix = model.layers[0], "model.layers.0"
    for module, parts in {
        layer.self_attn.qkv_proj: [f"{prefix}.self_attn.{side}_proj" for side in "qkv"],
        layer.self_attn.o_proj: [f"{prefix}.self_attn.o_proj"],
        layer.mlp.gate_up_proj: [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"],
        layer.mlp.down_proj: [f"{prefix}.mlp.down_proj"],
        model.embed_tokens: ["model.embed_tokens"],
        model.lm_head: ["lm_head"],
    }.items():
        assert isinstance(module.method, AsStored), parts
        stored = torch.cat([expected[f"{part}.weight"] for part in parts])
        assert torch.equal(module.dense(), stored), parts
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        logits = reference.eval()(torch.tensor([PROMPT])).logits[0]
    driver = Driver(model, config, dtype=torch.float32)
    ours = driver.prefill(Sequence(PROMPT), [20, len(PROMPT) - 20])
    # Activations are rounded to 8 bits, as llama.cpp rounds them.
    assert float((ours - logits).norm() / logits.norm()) < 0.05


def test_experts_are_multiplied_as_stored(written) -> None:
    file, expected = written("mixtral", "Q8_0")
    stored = load_file(expected.directory / "model.safetensors")
    model, _ = load(file, "cpu", pack=True)
    layer = model.layers[0]
    prefix = "model.layers.0.block_sparse_moe.experts"
    for module, parts in {
        layer.mlp.experts.gate_up_proj: ("w1", "w3"),
        layer.mlp.experts.down_proj: ("w2",),
    }.items():
        assert isinstance(module.method, AsStored)
        matrices = [
            torch.cat([stored[f"{prefix}.{expert}.{part}.weight"] for part in parts])
            for expert in range(4)
        ]
        assert torch.equal(module.dense(), torch.stack(matrices))
        x = torch.randn(7, module.in_features, generator=torch.Generator().manual_seed(0))
        ids = torch.tensor([[0, 3], [1, 2], [2, 0], [3, 1], [0, 1], [2, 3], [1, 0]])
        exact = torch.einsum("tkoi,ti->tko", module.dense()[ids], x).flatten(0, 1)
        error = (module(x, ids.int()) - exact).norm() / exact.norm()
        assert float(error) < 0.02  # logits differ more, as tokens move to other experts


def test_experts_with_biases_are_multiplied_as_stored(tmp_path: Path) -> None:
    directory = save_checkpoint("gpt-oss", tmp_path, intermediate_size=64)
    file = write_gguf(directory, tmp_path / "m.gguf", type_of=lambda own: type_for(own, "Q8_0"))
    model, config = load(file, "cpu", pack=True)
    assert config.dtype is torch.bfloat16
    expected, _ = load(directory, "cpu")
    for name in ("gate_up_proj", "down_proj"):
        module = model.layers[0].mlp.experts.get_submodule(name)
        assert isinstance(module.method, AsStored)
        assert torch.equal(
            module.dense(), expected.layers[0].mlp.experts.get_submodule(name).dense()
        )
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        logits = reference.eval()(torch.tensor([PROMPT])).logits[0]
    driver = Driver(model, config, dtype=torch.float32)
    ours = driver.prefill(Sequence(PROMPT), [len(PROMPT)])
    # Tokens can move to other experts.
    assert float((ours - logits).norm() / logits.norm()) < 0.3


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens(written, name: str) -> None:
    file, expected = written(name, "F32")
    model, config = load(file, "cpu")
    assert config.eos_token_ids == ()
    check_whole(Driver(model, config), expected)


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("qwen2", gguf.MODEL_ARCH.QWEN2VL),
        ("qwen3", gguf.MODEL_ARCH.QWEN3VL),
        ("qwen3-moe", gguf.MODEL_ARCH.QWEN3VLMOE),
    ],
)
def test_texts_of_models_with_images(tmp_path: Path, name: str, arch: gguf.MODEL_ARCH) -> None:
    """A text has the same position on each axis, so the parts of a head do not show."""
    directory = save_checkpoint(name, tmp_path)
    kind = gguf.MODEL_ARCH_NAMES[arch]

    def sections(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_dimension_sections([4, 2, 2, 0])
        if kind != "qwen2vl":
            writer.add_num_deepstack_layers(3)

    file = write_gguf(directory, tmp_path / "m.gguf", metadata=sections, arch=arch)
    model, config = load(file, "cpu")
    expected, known = load(directory, "cpu")
    for own, parameter in expected.named_parameters():
        assert torch.equal(model.get_parameter(own), parameter), own
    for key in ("block", "moe", "rope", "num_kv_heads", "head_dim"):
        assert getattr(config, key) == getattr(known, key), key


@pytest.mark.parametrize("name", ["llama3", "ministral3", "smollm3"])
def test_heads_that_rotate_in_part_are_refused(tmp_path: Path, name: str) -> None:
    """Their files have the two rows of a rotary pair side by side, over the whole head."""

    def halve(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0][f"{writer.arch}.rope.dimension_count"]
        writer.add_rope_dimension_count(8)

    directory = save_checkpoint(name, tmp_path, **MODELS[name])
    file = write_gguf(directory, tmp_path / "m.gguf", metadata=halve)
    with pytest.raises(GGUFError, match=r"rope\.dimension_count differs from the size of a head"):
        read_gguf_config(open_gguf(file))


def test_a_gpu_has_the_same_bytes(tmp_path: Path) -> None:
    directory = save_checkpoint("llama3", tmp_path, **WIDE)
    section = ModelSection(
        path=str(write_gguf(directory, tmp_path / "m.gguf", type_of=mixed_types))
    )
    checkpoint = open_checkpoint(section)
    module, whole = "model.layers.0.self_attn.q_proj", (256, 256)
    found: list[torch.Tensor] = []
    for name, dtype in (("cpu", torch.bfloat16), ("cuda", torch.float16)):
        device = torch.device(name)
        policy = choose_weights(section, checkpoint, pack=True, device=device, dtype=dtype)
        spec = MatrixSpec(*whole, dtype, device)
        method = policy.method_for((module,), MatrixRole.layer, spec)
        assert isinstance(method, AsStored)
        part = Part(0, 1, whole, slice(0, 256), Span.of(256), 0, 256)
        tensors: dict[str, torch.Tensor] = {}
        if method.loads_in_place(spec):
            shape, stored_dtype = method.parameters(spec)["weight"]
            tensors["weight"] = torch.empty(shape, dtype=stored_dtype)
        assert checkpoint.gguf is not None
        given = (lambda own: ("Q4_K",), lambda own: True)
        for stored, value, _ in read_tensors(checkpoint.gguf, dtype, *given):
            if stored.startswith(f"{module}."):
                method.load(tensors, stored.rpartition(".")[2], value, part, spec)
        found.append(method.finish(tensors, spec)["weight"])
    assert torch.equal(*found)
    with pytest.raises(ValueError, match=r"Q._K as stored.*, but its kernels take activations in"):
        load(Path(section.path), "cpu", torch.float16)


def test_ranks_hold_whole_groups(tmp_path: Path) -> None:
    directory = save_checkpoint("llama3", tmp_path, **WIDE)
    file = write_gguf(directory, tmp_path / "model.gguf", type_of=mixed_types)
    whole = load(file, "cpu", pack=True)[0].layers[0]
    parts = [load(file, "cpu", pack=True, shard=Shard(rank, 2))[0].layers[0] for rank in range(2)]
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        joined = torch.cat([part.get_submodule(name).dense() for part in parts], 1)
        assert torch.equal(joined, whole.get_submodule(name).dense())
