"""Drives transformers' generate, one padded batch: `drive_transformers.py MODEL DTYPE THREADS`.

It runs in eager mode, the default. Requests of different lengths are padded to the longest prompt
and run to the longest output, as generate requires.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from driver_loop import Requests, serve

__all__ = ("load",)


def load() -> Callable[[Requests], list[int]]:
    """Load the engine; returns a function from requests to their numbers of output tokens."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model_path, dtype, threads = sys.argv[1:4]
    torch.set_num_threads(int(threads))
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype))
    model.eval()

    def run(requests: Requests) -> list[int]:
        width = max(len(prompt) for prompt, _ in requests)
        count = max(n for _, n in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(requests):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        config = GenerationConfig(
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        with torch.inference_mode():
            output = model.generate(ids, attention_mask=mask, generation_config=config)
        return [min(n, output.shape[1] - width) for _, n in requests]

    return run


if __name__ == "__main__":
    serve(load)
