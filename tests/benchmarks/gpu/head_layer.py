"""Lowers the layer of the demo model's EAGLE-3 head for a described GPU; prints its launches."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import ostinato
from ostinato.benchmarks.gpu.without_device.fake_device import fake_device
from ostinato.benchmarks.gpu.without_device.model_programs import lower_config
from ostinato.benchmarks.machine.described_device import described_device
from ostinato.models.draft_heads.eagle3 import read_head_config

HEAD = Path(ostinato.__file__).parents[1] / "models" / "demo" / "eagle3" / "config.json"


def main(name: str) -> None:
    config = read_head_config(json.loads(HEAD.read_text()))
    with fake_device(described_device(name)):
        cache = config.kv_cache_spec(16, torch.bfloat16)
        layer = lower_config(config, torch.bfloat16, cache, 512).last
    kinds = [launch.by.value for launch in layer.launches]
    print(json.dumps({"by": kinds, "waits": layer.waits, "copies": layer.copies}))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
