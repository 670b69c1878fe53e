"""Drives OpenVINO GenAI's continuous batching: `drive_openvino.py MODEL_IR DTYPE THREADS [DRAFTS]`.

Its best settings here: prefix caching, dynamic split-fuse, 2048 tokens a step, its default KV cache
of 8 bits; the dtype is the precision hint (bfloat16 = bf16, float32 = f32). DRAFTS is the number of
draft tokens of its prompt lookup in a step; without it there are none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from driver_loop import CACHE_GIB, Requests, serve

__all__ = ("load",)

_HINTS = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}


def load() -> Callable[[Requests], list[int]]:
    """Load the engine; returns a function from requests to their numbers of output tokens."""
    import numpy as np
    import openvino  # type: ignore[import-not-found]
    import openvino_genai  # type: ignore[import-not-found]

    model, dtype, threads, *drafts = sys.argv[1:]
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIB
    scheduler.max_num_seqs = 32
    scheduler.max_num_batched_tokens = 2048
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    properties = {
        "INFERENCE_NUM_THREADS": int(threads),
        "ENABLE_CPU_PINNING": True,
        "INFERENCE_PRECISION_HINT": _HINTS[dtype],
        **({"prompt_lookup": True} if drafts else {}),
    }
    pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)

    def settings(count: int) -> object:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = count
        config.ignore_eos = True
        config.do_sample = False
        if drafts:
            config.num_assistant_tokens = int(drafts[0])
            config.max_ngram_size = 3
        return config

    def run(requests: Requests) -> list[int]:
        outputs = pipeline.generate(
            [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt, _ in requests],
            [settings(count) for _, count in requests],
        )
        return [len(output.m_generation_ids[0]) for output in outputs]

    return run


if __name__ == "__main__":
    serve(load)
