"""A server that can not start says why in one clear line, and its exit code is not 0."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server_process import SMALL

DEMO = Path(__file__).parents[2] / "models" / "demo"


def write_models(root: Path) -> dict[str, str]:
    """One override per kind of mistake, and the directories that they point to."""
    for name in ("empty", "unknown", "truncated"):
        (root / name).mkdir()
    config = {"architectures": ["FooForCausalLM"], "model_type": "foo"}
    (root / "unknown" / "config.json").write_text(json.dumps(config))
    for file in DEMO.glob("*.json"):
        shutil.copy(file, root / "truncated")
    weights = (DEMO / "model.safetensors").read_bytes()
    (root / "truncated" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    return {
        "no_config": f"model.path={root / 'empty'}",
        "architecture": f"model.path={root / 'unknown'}",
        "truncated": f"model.path={root / 'truncated'}",
        "memory": "cache.memory_gib=0.000001",
    }


@pytest.fixture(scope="module")
def ends(tmp_path_factory) -> Iterator[dict[str, tuple[int, str]]]:
    """(exit code, standard error) of each; they start together, since each imports for seconds."""
    overrides = write_models(tmp_path_factory.mktemp("models"))
    running = {
        name: subprocess.Popen(
            [sys.executable, "-m", "ostinato", "serve", *SMALL, override],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, override in overrides.items()
    }
    try:
        yield {name: (one.wait(240), one.stderr.read()) for name, one in running.items()}
    finally:
        for one in running.values():
            one.kill()
            one.communicate()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_config", ["no config.json in", "empty"]),
        ("architecture", ["'FooForCausalLM' is not supported", "LlamaForCausalLM"]),
        ("truncated", ["model.safetensors is truncated"]),
        ("memory", ["not enough memory", "cache.memory_gib"]),
    ],
)
def test_one_line(ends, name, words):
    code, text = ends[name]
    assert code == 1
    # The progress bar of the weights may stand before it.
    (line,) = [one for one in text.splitlines() if one.startswith("run: ")]
    assert [word for word in words if word not in line] == []
    assert "Traceback" not in text
