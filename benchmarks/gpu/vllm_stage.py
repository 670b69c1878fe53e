"""The offline workload in vLLM, on the same GPU and in the same run as ours.

The stage runs if vLLM is importable. Model, prompts, output lengths, number of sequences and length
of contexts are those of the stage `offline`; weights are random in both engines, and prefix caching
is off. The engine of vLLM runs in this process, and draws tokens without FlashInfer's sampler, for
which nvcc would be needed. Everything else is vLLM's default: compiled, with CUDA graphs.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ostinato.benchmarks.gpu.engine_stages import MAX_TOKEN_ID, offline_lengths
from ostinato.conf.root import RunConfig

__all__ = ("VLLM_ENVIRONMENT", "has_vllm", "offline_in_vllm")

VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it is built at its first use, by nvcc
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
"""Variables that vLLM reads when it is imported."""


def has_vllm() -> bool:
    return find_spec("vllm") is not None


def offline_in_vllm(config: RunConfig, *, tiny: bool) -> dict[str, Any]:
    """Run the workload twice. The first run also loads kernels; the figures are of the second.

    Raises:
        ImportError: vLLM cannot be imported.
        RuntimeError: a request ended early.
    """
    vllm = import_module("vllm")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config.model.config))
        begin = time.perf_counter()
        llm = vllm.LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=config.model.max_model_len,
            max_num_seqs=config.scheduler.max_num_seqs,
            enable_prefix_caching=False,
            gpu_memory_utilization=config.device.memory_fraction,
        )
        startup_s = time.perf_counter() - begin
    lengths = offline_lengths(tiny=tiny)
    numbers, most_id = random.Random(0), min(MAX_TOKEN_ID, config.model.config["vocab_size"])
    seconds = 0.0
    for _ in range(2):
        prompts = [
            {"prompt_token_ids": [numbers.randrange(most_id) for _ in range(length)]}
            for length, _ in lengths
        ]
        sampling = [
            vllm.SamplingParams(temperature=0.6, max_tokens=n, ignore_eos=True, detokenize=False)
            for _, n in lengths
        ]
        begin = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        for output, (_, expected) in zip(outputs, lengths, strict=True):
            if len(output.outputs[0].token_ids) != expected:
                raise RuntimeError(f"vLLM ended a request before its {expected} tokens")
    count = sum(most for _, most in lengths)
    return {
        "vllm": vllm.__version__,
        "environment": VLLM_ENVIRONMENT,
        "requests": len(lengths),
        "prompt_tokens": sum(length for length, _ in lengths),
        "output_tokens": count,
        "seconds": seconds,
        "output_tok_s": count / seconds,
        "startup_s": startup_s,
    }
