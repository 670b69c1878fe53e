"""Lowers a layer with low-rank adapters for a described GPU, and prints what the program calls.

A process can do this for one device only, because compilers remember the device.
"""

from __future__ import annotations

import sys

import torch

from ostinato.benchmarks.gpu.without_device.fake_device import fake_device
from ostinato.benchmarks.gpu.without_device.model_programs import lower_config
from ostinato.benchmarks.machine.described_device import described_device
from ostinato.conf.compose import load_config
from ostinato.models.layers.adapter_slots import AdapterSpace
from ostinato.runtime.startup.plan.model_source import open_model


def main() -> None:
    settings = ("model=qwen3-0.6b", "model.load_format=dummy", "model.config.num_hidden_layers=2")
    with fake_device(described_device("h200")):
        config = open_model(load_config([*settings, "device.name=cpu"])).config
        programs = lower_config(
            config,
            torch.bfloat16,
            config.kv_cache_spec(16, torch.bfloat16),
            4096,
            adapters=AdapterSpace(num_slots=4, max_rank=16),
        )
    for lowered in (programs.layer, programs.last):
        calls = lowered.wrapper.count("torch.ops.ostinato.add_adapters.default(")
        is_functional = "auto_functionalized" in lowered.wrapper
        sys.stdout.write(f"{calls} {is_functional} {lowered.wrapper.count('.clone(')}\n")


if __name__ == "__main__":
    main()
