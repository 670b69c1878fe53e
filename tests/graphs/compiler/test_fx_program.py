"""Straight-line programs equal the traced model and need no compiler to load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.conf.schema import GraphForm
from ostinato.graphs.compiler.compile import compile_model
from ostinato.graphs.compiler.fx_program import FxProgram
from ostinato.models.checkpoints.weights import init_dummy_weights
from ostinato.models.registry import build_model
from ostinato.runtime.startup.plan.model_source import open_model
from tests.graphs.toy import ToyModel, fill, make_buffers, make_cache
from tests.runtime.tiny import tiny_config


class Store:
    """The part of a bundle that the compiler uses."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.rejected: list[str] = []

    def get(self, name: str) -> bytes | None:
        return self.files.get(name)

    def put(self, name: str, data: bytes) -> None:
        self.files[name] = data

    def reject(self, reason: str) -> None:
        self.files.clear()
        self.rejected.append(reason)


def packed_llama():
    source = open_model(tiny_config())
    model = build_model(
        source.config,
        dtype=source.dtype,
        device=source.device,
        attention_backend="reference",
        weights=source.weights,
    )
    init_dummy_weights(model, 0)
    return model, source.config.kv_cache_spec(8, source.dtype)


def run(program, cache) -> Tensor:
    buffers = make_buffers()
    outputs = []
    for sequences in ([(0, [3, 1, 4, 1, 5])], [(5, [9]), (0, [2, 6, 5])]):
        num_tokens, num_seqs = fill(buffers, sequences)
        outputs.append(program(buffers.batch(num_tokens, num_seqs, num_seqs), cache))
    return torch.cat(outputs)


@torch.inference_mode()
def test_a_packed_layer_becomes_calls_of_our_ops_and_nothing_else() -> None:
    model, spec = packed_llama()
    store = Store()
    example = make_buffers().batch(16, 3, 3)
    device = torch.device("cpu")
    small = spec.allocate(4, device)
    program = compile_model(model, GraphForm.layer, example, small, store)(model)
    eager, compiled = spec.allocate(64, device), spec.allocate(64, device)
    expected = run(model, eager)
    assert torch.equal(run(program, compiled), expected)
    for (k, v), (expected_k, expected_v) in zip(compiled, eager, strict=True):
        assert torch.equal(k, expected_k)
        assert torch.equal(v, expected_v)
    last = len(model.layers) - 1
    assert list(store.files) == ["layer-0", f"layer-{last}"]
    for content in store.files.values():
        assert content[:1] == b"f"
        stored = msgspec.msgpack.decode(content[1:], type=FxProgram)
        calls = [line for line in stored.source.splitlines() if "(" in line and " = " in line]
        ops = [line for line in calls if " = op_" in line]
        names = (".view(", ".split_with_sizes(", ".reshape(")
        views = [line for line in calls if any(name in line for name in names)]
        lookups = [line for line in calls if "functional.embedding(" in line]
        assert len(ops) == 7, stored.source
        assert len(lookups) == (0 if content == store.files["layer-0"] else 2), stored.source
        assert len(ops) + len(views) + len(lookups) == len(calls), stored.source

    warm = compile_model(model, GraphForm.layer, example, small, store)(model)
    assert torch.equal(run(warm, spec.allocate(64, device)), expected)


@torch.inference_mode()
def test_a_program_that_does_not_load_is_rejected_and_made_anew() -> None:
    model, spec = packed_llama()
    store = Store()
    example, cache = make_buffers().batch(16, 3, 3), spec.allocate(4, torch.device("cpu"))
    compile_model(model, GraphForm.layer, example, cache, store)
    whole = store.files["layer-0"]
    for damaged in (b"", b"x" + whole[1:], whole[:40], b"f" + whole[40:]):
        store.files["layer-0"] = damaged
        store.rejected.clear()
        compile_model(model, GraphForm.layer, example, cache, store)
        assert len(store.rejected) == 1
        assert store.rejected[0].startswith("layer-0 does not load: ")
        assert store.files["layer-0"] == whole


@torch.inference_mode()
def test_what_can_be_fused_is_compiled_and_stored_too() -> None:
    model, cache, store = ToyModel(), make_cache(), Store()
    example = make_buffers().batch(16, 3, 3)
    program = compile_model(model, GraphForm.layer, example, cache, store)(model)
    expected = run(program, make_cache())
    assert store.files["layer-0"][:1] == b"i"
    loaded = compile_model(model, GraphForm.layer, example, cache, store)(model)
    assert store.rejected == []
    assert torch.equal(run(loaded, make_cache()), expected)


def test_loading_imports_no_compiler(tmp_path: Path) -> None:
    program = FxProgram(
        "def program(x):\n    return op_rms_norm(x, torch.ones(8), 1e-6)\n",
        {"torch": "torch", "op_rms_norm": "torch:ops.ostinato.rms_norm.default"},
    )
    file = tmp_path / "program"
    file.write_bytes(msgspec.msgpack.encode(program))
    code = (
        "import sys, msgspec, torch\n"
        "from pathlib import Path\n"
        "import ostinato.ops.norm\n"
        "from ostinato.graphs.compiler.fx_program import FxFunction, FxProgram\n"
        "data = Path(sys.argv[1]).read_bytes()\n"
        "program = FxFunction(msgspec.msgpack.decode(data, type=FxProgram))\n"
        "print(program(torch.full((1, 8), 3.0)).sum().item())\n"
        "print([m for m in ('torch._dynamo', 'torch._inductor') if m in sys.modules])\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(file)],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    ).stdout.split("\n")
    torch.testing.assert_close(
        float(out[0]), float(F.rms_norm(torch.full((1, 8), 3.0), (8,)).sum())
    )
    assert out[1] == "[]"
