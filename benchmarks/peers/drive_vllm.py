"""Drives vLLM for CPUs through its offline API: `drive_vllm.py MODEL DTYPE THREADS [DRAFTS]`.

Its best settings here: threads bound to the cores, prefix caching, 32 sequences, 2048 tokens a
step; the compiled mode, which is its default. DRAFTS is the number of draft tokens of its n-gram
drafter in a step; without it there are none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from driver_loop import Requests, serve

__all__ = ("load",)


def load() -> Callable[[Requests], list[int]]:
    """Load the engine; returns a function from requests to their numbers of output tokens."""
    model, dtype, _, *drafts = sys.argv[1:]  # threads are in the environment
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(
        model=model,
        dtype=dtype,
        max_model_len=2048,
        max_num_seqs=32,
        max_num_batched_tokens=2048,
        enable_prefix_caching=True,
        disable_log_stats=True,
        seed=0,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": int(drafts[0]),
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        }
        if drafts
        else None,
    )

    def run(requests: Requests) -> list[int]:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in requests],
            [
                SamplingParams(
                    temperature=0, max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False
                )
                for _, n in requests
            ],
            use_tqdm=False,
        )
        return [len(output.outputs[0].token_ids) for output in outputs]

    return run


if __name__ == "__main__":
    serve(load)
