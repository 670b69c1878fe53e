"""Backends, model families and more are added to a copy of the package, which then uses them.

The changed files are those that CONTRIBUTING.md counts.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.torch import load_file, save_file

from tests.arch.tree import FOLDERS, ROOT
from tests.models.random_checkpoints import VARIANTS, reference_model, save
from tests.runtime.tiny import MODEL

BACKEND = '''
"""Attends sequence by sequence through torch's own attention."""

from torch.nn.functional import scaled_dot_product_attention


class PlainBackend:
    name = "plain"
    is_batch_invariant = False
    warm_up_seqs = (1,)

    def why_unsupported(self, spec):
        if spec.sliding_window or spec.soft_cap or spec.has_alibi or spec.has_sinks:
            return "it has no windows, no soft cap, no ALiBi and no sinks"
        return None

    def workspace_bytes(self, spec, *, num_tokens, num_seqs, max_model_len):
        return 0

    def run(
        self, q, k, v, k_cache, v_cache, metadata, scale, window, soft_cap, alibi_slopes, sinks
    ):
        size = k_cache.shape[2]
        slots, out = metadata.slot_mapping, q.new_zeros(q.shape)
        k_cache[slots // size, :, slots % size] = k
        v_cache[slots // size, :, slots % size] = v
        starts = metadata.query_start_loc.tolist()
        for row, length in enumerate(metadata.seq_lens.tolist()):
            begin, end = starts[row], starts[row + 1]
            blocks = metadata.block_table[row, : -(-length // size)].long()
            keys, values = (
                cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length] for cache in (k_cache, v_cache)
            )
            position = q.new_ones(end - begin, length).tril(length - (end - begin)).bool()
            out[begin:end] = scaled_dot_product_attention(
                q[begin:end].transpose(0, 1),
                keys,
                values,
                attn_mask=position,
                scale=scale,
                enable_gqa=True,
            ).transpose(0, 1)
        return out


BACKEND = PlainBackend()
'''
LIKE_LLAMA = '''
"""Llama that reads its positions from a step tensor of its own."""

from dataclasses import replace

from ostinato.models.families.llama import LlamaForCausalLM


class DoubledForCausalLM(LlamaForCausalLM):
    def begin(self, batch):
        return super().begin(replace(batch, positions=batch.doubled_positions // 2))
'''
FORMAT = '''
"""Checkpoints whose matrices are stored as halves of their values."""

from dataclasses import dataclass

from ostinato.models.choose_weights import WeightsByRole
from ostinato.models.weight_methods.plain import Plain


@dataclass(frozen=True, slots=True)
class Halved(Plain):
    def loads_in_place(self, spec):
        return False

    @property
    def name(self):
        return "halves"

    def finish(self, tensors, spec):
        return {"weight": 2 * tensors["weight"]}


def from_checkpoint(stated, unquantized, headers):
    return WeightsByRole(layers=Halved(), router=Plain(), head=Plain(), embedding=Plain())
'''
FAMILY = '''
"""A decoder whose layers compute the MLP before attention, with layers of its own."""

from torch import nn

from ostinato.models.base import CausalLM, DecoderLayer
from ostinato.models.config_json.decoder_fields import read_decoder_config
from ostinato.models.layers.mixers.attention_layer import Attention
from ostinato.models.layers.mlp import build_mlp
from ostinato.models.layers.norm_layers import build_norm
from ostinato.models.layers.position_tables import RotaryEmbedding
from ostinato.models.layers.vocabulary_layers import Embedding, OutputHead
from ostinato.models.step_tensors import DEFAULT_ROPE, StepInputs


class MlpFirstLayer(DecoderLayer):
    def __init__(self, config, options):
        super().__init__()
        self.mlp_norm, self.mlp = build_norm(config, options), build_mlp(config, options)
        self.attention_norm = build_norm(config, options)
        self.self_attn = Attention(config, options, sliding_window=0, rope_kind=DEFAULT_ROPE)

    def forward(self, hidden, step, k_cache, v_cache, rows=None):
        hidden = self.mlp(self.mlp_norm(hidden), hidden)
        return self.self_attn(self.attention_norm(hidden), step, k_cache, v_cache, hidden, rows)

    def static_key(self):
        return ("mlp first", *self.mlp.static_key(), *self.self_attn.static_key())


class MlpFirstForCausalLM(CausalLM):
    @classmethod
    def read_config(cls, hf_config, generation_config=None):
        return read_decoder_config(hf_config, generation_config)

    def __init__(self, config, options):
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, options)
        self.rotary = RotaryEmbedding(config.rope, options)
        self.layers = nn.ModuleList(MlpFirstLayer(config, options) for _ in range(config.num_layers))
        self.norm = build_norm(config, options)
        self.lm_head = OutputHead(config.hidden_size, config.vocab_size, options)

    def begin(self, batch):
        rope = {DEFAULT_ROPE: self.rotary(batch.positions)}
        return self.embed_tokens(batch.token_ids), StepInputs(rope, batch)

    def finish(self, hidden):
        return self.norm(hidden)

    def compute_logits(self, hidden):
        return self.lm_head.logits(hidden)
'''


class Edit(NamedTuple):
    """Lines that are added to a file that exists."""

    file: str
    before: str  # the line that the new lines precede
    lines: str


class Addition(NamedTuple):
    """A new file, if any, and edits of existing files."""

    path: str | None
    text: str
    edits: tuple[Edit, ...]
    most_files: int

    @property
    def files(self) -> set[str]:
        return {edit.file for edit in self.edits} | ({self.path} if self.path else set())


ADDITIONS = {
    "attention backend": Addition(
        "ops/backends/plain.py",
        BACKEND,
        (Edit("conf/schema.py", '    triton = "triton"\n', '    plain = "plain"\n'),),
        most_files=2,
    ),
    "model like Llama": Addition(
        "models/families/doubled.py",
        LIKE_LLAMA,
        (
            Edit(
                "models/registry.py",
                '    "FalconForCausalLM":',
                '    "DoubledForCausalLM": "ostinato.models.families.doubled:DoubledForCausalLM",\n',
            ),
        ),
        most_files=2,
    ),
    "decoder family with layers of its own": Addition(
        "models/families/mlp_first.py",
        FAMILY,
        (
            Edit(
                "models/registry.py",
                '    "MistralForCausalLM":',
                '    "MlpFirstForCausalLM": "ostinato.models.families.mlp_first:MlpFirstForCausalLM",\n',
            ),
        ),
        most_files=3,
    ),
    "step tensor": Addition(
        None,
        "",
        (
            Edit(
                "models/step_tensors.py",
                "    # [1]; handle of the host state of a planned attention kernel",
                "    doubled_positions: Annotated[Array, _PER_TOKEN]\n",
            ),
            Edit(
                "runtime/execution/batch_builder.py",
                "        for entry in output.scheduled:\n            if entry.new_block_ids:\n",
                "        self._buffers.host.doubled_positions[: output.num_tokens] = [\n"
                "            2 * position\n"
                "            for entry in output.scheduled\n"
                "            for position in range(entry.start, entry.start + entry.num_new_tokens)\n"
                "        ]\n",
            ),
        ),
        most_files=2,
    ),
    "format of quantised checkpoints, with its weight method": Addition(
        "models/quantized_checkpoints/halved.py", FORMAT, (), most_files=1
    ),
}
SCRIPT = """
import json, sys
from ostinato import LLM, SamplingParams
from ostinato.conf.compose import load_config

model, tokenizer, stored, halved = json.loads(sys.argv[1])

def scores(architecture, *overrides):
    config = model | {"architectures": [architecture]}
    overrides = ["graphs.bundle=false", "cache.memory_gib=0.01", *overrides]
    values = {}
    if architecture:
        overrides.append("model.load_format=dummy")
        values["model.config"] = config
    with LLM(config=load_config(overrides, values=values)) as llm:
        params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=0, ignore_eos=True)
        outputs = llm.generate([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5]], params, use_progress=False)
        return [[each.logprob for each in one.outputs[0].logprobs] for one in outputs]

eager = "graphs.mode=eager"
from_disk = (eager, "graphs.pack_weights=false", f"model.tokenizer={tokenizer}")
print(json.dumps({
    "family": scores("MlpFirstForCausalLM", eager),
    "family, captured": scores("MlpFirstForCausalLM", "graphs.mode=captured"),
    "backend": scores("MlpFirstForCausalLM", eager, "graphs.attention=plain"),
    "llama": scores("LlamaForCausalLM", eager),
    "like llama": scores("DoubledForCausalLM", eager),
    "stored": scores("", *from_disk, f"model.path={stored}"),
    "halved": scores("", *from_disk, f"model.path={halved}"),
}))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package `ostinato` that has all additions."""
    root = tmp_path_factory.mktemp("copy")
    no_weights = shutil.ignore_patterns("__pycache__", "*.safetensors")
    shutil.copytree(ROOT / "ostinato", root / "ostinato", ignore=no_weights)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, root / "ostinato" / folder, ignore=no_weights)
    for addition in ADDITIONS.values():
        if addition.path:
            (root / "ostinato" / addition.path).write_text(addition.text.lstrip())
        for edit in addition.edits:
            file = root / "ostinato" / edit.file
            text = file.read_text()
            assert text.count(edit.before) == 1, f"{edit.file} must have {edit.before!r} once"
            file.write_text(text.replace(edit.before, edit.lines + edit.before))
    return root


def write_checkpoints(directory: Path) -> tuple[str, str]:
    """Write a Llama, and the same one with halved matrices in its layers; returns their paths."""
    variant = VARIANTS["llama3"].as_one_file()
    stored = save(reference_model(variant), variant, directory / "stored")
    halved = Path(shutil.copytree(stored, directory / "halved"))
    tensors = load_file(halved / "model.safetensors")
    halves = {
        name: value / 2 if name.endswith("_proj.weight") else value
        for name, value in tensors.items()
    }
    assert any(name.endswith("_proj.weight") for name in halves)
    save_file(halves, halved / "model.safetensors", {"format": "pt"})
    config = json.loads((halved / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "halved"}
    (halved / "config.json").write_text(json.dumps(config))
    return str(stored), str(halved)


def test_the_copy_serves_with_them(package: Path, tmp_path: Path) -> None:
    inputs = [MODEL, str(ROOT / "models/demo"), *write_checkpoints(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(inputs)],
        cwd=package,
        env={**os.environ, "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [len(scores) for scores in found["family"]] == [6, 6]
    assert found["family, captured"] == found["family"]
    for ours, theirs in zip(found["backend"], found["family"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert found["like llama"] == found["llama"]
    assert found["halved"] == found["stored"]


def test_they_touch_the_files_that_contributing_counts(package: Path) -> None:
    touched = {
        file.relative_to(package / "ostinato").as_posix()
        for file in (package / "ostinato").rglob("*.py")
        if not (there := _original(package, file)).exists() or not filecmp.cmp(file, there, False)
    }
    assert touched == {file for addition in ADDITIONS.values() for file in addition.files}
    for name, addition in ADDITIONS.items():
        assert len(addition.files) <= addition.most_files, name


def _original(package: Path, file: Path) -> Path:
    path = file.relative_to(package / "ostinato")
    return ROOT / path if path.parts[0] in FOLDERS else ROOT / "ostinato" / path
