"""The memory that loading takes besides the weights: one expert, and a bounded part of the file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

HIDDEN, INNER, EXPERTS, LAYERS = 1024, 1024, 40, 2
MIB = 1 << 20
CONFIG = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "dtype": "bfloat16",
}
# Prints the bytes of the weights, and by how many bytes the peak of memory while they are loaded
# exceeds the memory before.
MEASURE = """
import sys
from pathlib import Path
import torch
from ostinato.conf.schema import ModelSection
from ostinato.models.checkpoints.checkpoint import open_checkpoint
from ostinato.models.checkpoints.weights import load_weights
from ostinato.models.choose_weights import choose_weights
from ostinato.models.registry import build_model, read_model_config
from ostinato.ops.native.library import load

def field(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))

torch.set_num_threads(1)
load("core")
cpu = torch.device("cpu")
for path in sys.argv[1:]:  # loading the first, small one imports modules and maps code
    section = ModelSection(path=path)
    checkpoint = open_checkpoint(section)
    weights = choose_weights(section, checkpoint, pack=True, device=cpu, dtype=torch.bfloat16)
    model = build_model(
        read_model_config(checkpoint), dtype=torch.bfloat16, device=cpu, attention_backend="cpu",
        weights=weights,
    )
    before = field("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    load_weights(model, checkpoint)
    found = sum(p.nbytes for p in model.parameters()), field("VmHWM") - before
print(*found)
"""


def tensors(layers: int, experts: int, *, is_stacked: bool) -> dict[str, torch.Tensor]:
    """The tensors of gpt-oss (stacked experts) or of OLMoE (experts that are stored one by one)."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    found = {
        "model.embed_tokens.weight": zeros(64, HIDDEN),
        "lm_head.weight": zeros(64, HIDDEN),
        "model.norm.weight": zeros(HIDDEN),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}."
        found |= {
            at + "input_layernorm.weight": zeros(HIDDEN),
            at + "post_attention_layernorm.weight": zeros(HIDDEN),
            **{f"{at}self_attn.{side}_proj.weight": zeros(64, HIDDEN) for side in "kv"},
            at + "self_attn.q_proj.weight": zeros(512, HIDDEN),
            at + "self_attn.o_proj.weight": zeros(HIDDEN, 512),
        }
        if is_stacked:
            found |= {
                **{f"{at}self_attn.{side}_proj.bias": zeros(64) for side in "kv"},
                at + "self_attn.q_proj.bias": zeros(512),
                at + "self_attn.o_proj.bias": zeros(HIDDEN),
                at + "self_attn.sinks": zeros(8),
                at + "mlp.router.weight": zeros(experts, HIDDEN),
                at + "mlp.router.bias": zeros(experts),
                at + "mlp.experts.gate_up_proj": zeros(experts, HIDDEN, 2 * INNER),
                at + "mlp.experts.gate_up_proj_bias": zeros(experts, 2 * INNER),
                at + "mlp.experts.down_proj": zeros(experts, INNER, HIDDEN),
                at + "mlp.experts.down_proj_bias": zeros(experts, HIDDEN),
            }
            continue
        found |= {
            at + "mlp.gate.weight": zeros(experts, HIDDEN),
            at + "self_attn.q_norm.weight": zeros(512),
            at + "self_attn.k_norm.weight": zeros(64),
        }
        for expert in range(experts):
            own = f"{at}mlp.experts.{expert}."
            found |= {f"{own}{side}_proj.weight": zeros(INNER, HIDDEN) for side in ("gate", "up")}
            found[own + "down_proj.weight"] = zeros(HIDDEN, INNER)
    return found


def write(directory: Path, layers: int, experts: int, *, is_stacked: bool) -> str:
    """Write a checkpoint; returns its directory."""
    directory.mkdir()
    sizes = {"num_hidden_layers": layers, "num_local_experts": experts}
    own = {} if is_stacked else {"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe"}
    (directory / "config.json").write_text(json.dumps(CONFIG | sizes | own))
    save_file(tensors(layers, experts, is_stacked=is_stacked), directory / "model.safetensors")
    return str(directory)


@pytest.mark.slow  # each case writes half a gigabyte
@pytest.mark.parametrize("is_stacked", [True, False], ids=["stacked", "one by one"])
def test_the_peak_is_the_weights_and_one_expert(tmp_path: Path, is_stacked: bool) -> None:
    paths = [
        write(tmp_path / "small", 1, 2, is_stacked=is_stacked),
        write(tmp_path / "large", LAYERS, EXPERTS, is_stacked=is_stacked),
    ]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *paths], check=True, capture_output=True, text=True
    )
    weights, peak = map(int, done.stdout.split())
    expert = 3 * INNER * HIDDEN * 2
    assert weights > LAYERS * EXPERTS * expert
    # If all pages of a layer's larger stack were mapped, the bound below would not hold.
    assert EXPERTS * expert * 2 // 3 > 64 * MIB + expert
    assert peak <= weights + expert + 64 * MIB
