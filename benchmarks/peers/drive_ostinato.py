"""Drives this engine: `drive_ostinato.py MODEL DTYPE THREADS [key=value ...]`."""

from __future__ import annotations

import sys
from collections.abc import Callable

from driver_loop import CACHE_GIB, Requests, serve

__all__ = ("load",)


def load() -> Callable[[Requests], list[int]]:
    """Load the engine; returns a function from requests to their numbers of output tokens."""
    from ostinato.conf.compose import load_config
    from ostinato.runtime.startup.bundles import prepare_kernels

    model, dtype, threads, *overrides = sys.argv[1:]
    settings = (
        f"model.dtype={dtype}",
        f"device.threads={threads}",
        f"cache.memory_gib={CACHE_GIB}",
    )
    config = load_config([*settings, *overrides], values={"model.path": model})
    prepare_kernels(config.engine)
    from ostinato.runtime.llm import LLM
    from ostinato.runtime.types.params import SamplingParams

    llm = LLM(config=config)

    def run(requests: Requests) -> list[int]:
        outputs = llm.generate(
            [prompt for prompt, _ in requests],
            [
                SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
                for _, count in requests
            ],
            use_progress=False,
        )
        return [len(output.outputs[0].token_ids) for output in outputs]

    return run


if __name__ == "__main__":
    serve(load)
