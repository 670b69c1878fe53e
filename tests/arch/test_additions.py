"""An attention backend and a decoder family are added to a copy of the package, which then serves with them.

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

from tests.arch.tree import FOLDERS, ROOT
from tests.runtime.tiny import MODEL

BACKEND = '''
"""Attends sequence by sequence through torch's own attention."""

from torch.nn.functional import scaled_dot_product_attention


class PlainBackend:
    name = "plain"
    is_batch_invariant = False

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
FAMILY = '''
"""A decoder whose layers compute the MLP before attention, with layers of its own."""

from torch import nn

from ostinato.models.base import CausalLM, DecoderLayer
from ostinato.models.config.decoder_config import read_decoder_config
from ostinato.models.layers import Attention, RotaryEmbedding, build_mlp, build_norm
from ostinato.models.vocabulary_layers import Embedding, OutputHead
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


class Addition(NamedTuple):
    """The new file and the changed line of an addition."""

    path: str  # of the new file
    text: str
    changed: str  # the file that exists and is changed
    before: str  # the line of that file that the new line precedes
    line: str
    most_files: int

    @property
    def files(self) -> set[str]:
        return {self.path, self.changed}


ADDITIONS = {
    "attention backend": Addition(
        "ops/backends/plain.py",
        BACKEND,
        "conf/schema.py",
        '    triton = "triton"\n',
        '    plain = "plain"\n',
        most_files=2,
    ),
    "decoder family with layers of its own": Addition(
        "models/families/mlp_first.py",
        FAMILY,
        "models/registry.py",
        '    "MistralForCausalLM":',
        '    "MlpFirstForCausalLM": "ostinato.models.families.mlp_first:MlpFirstForCausalLM",\n',
        most_files=3,
    ),
}
SCRIPT = """
import json, sys
from ostinato import LLM, SamplingParams
from ostinato.conf.compose import load_config

def scores(*overrides):
    overrides = ["model.load_format=dummy", "graphs.bundle=false", "cache.memory_gib=0.01", *overrides]
    model = json.loads(sys.argv[1])
    with LLM(config=load_config(overrides, values={"model.config": model})) as llm:
        params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=0, ignore_eos=True)
        outputs = llm.generate([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5]], params, use_progress=False)
        return [[each.logprob for each in one.outputs[0].logprobs] for one in outputs]

print(json.dumps([
    scores("graphs.mode=eager"),
    scores("graphs.mode=captured"),
    scores("graphs.mode=eager", "graphs.attention=plain"),
]))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package `ostinato` that has both additions."""
    root = tmp_path_factory.mktemp("copy")
    no_weights = shutil.ignore_patterns("__pycache__", "*.safetensors")
    shutil.copytree(ROOT / "ostinato", root / "ostinato", ignore=no_weights)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, root / "ostinato" / folder, ignore=no_weights)
    for addition in ADDITIONS.values():
        (root / "ostinato" / addition.path).write_text(addition.text.lstrip())
        file = root / "ostinato" / addition.changed
        text = file.read_text()
        assert text.count(addition.before) == 1, f"{addition.changed} has another form now"
        file.write_text(text.replace(addition.before, addition.line + addition.before))
    return root


def test_the_copy_serves_with_them(package: Path) -> None:
    model = {**MODEL, "architectures": ["MlpFirstForCausalLM"]}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(model)],
        cwd=package,
        env={**os.environ, "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    eager, captured, plain = json.loads(done.stdout.splitlines()[-1])
    assert [len(scores) for scores in eager] == [6, 6]
    assert captured == eager
    for ours, theirs in zip(plain, eager, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


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
