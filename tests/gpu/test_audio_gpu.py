"""Audio on a CUDA device: engines against transformers on the same weights and features."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ostinato.ops.cross_attention import cross_attention, write_cross_cache
from tests.ops.cross_problems import check_cross, cross_problem
from tests.runtime.audio_engines import audio_llm, check_greedy, make_audio_model, run, sound

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_attention_is_that_of_a_cpu(dtype: torch.dtype) -> None:
    def attend(*arguments: Tensor) -> Tensor:
        *tensors, scale = arguments
        moved = [tensor.cuda() for tensor in tensors]
        return cross_attention(*moved, scale=scale, backend="triton").cpu()

    def write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        moved = [tensor.cuda() for tensor in (k_cache, v_cache)]
        write_cross_cache(k.cuda(), v.cuda(), *moved, slots.cuda(), backend="triton")
        k_cache.copy_(moved[0])
        v_cache.copy_(moved[1])

    problem = partial(cross_problem, heads=(6, 6), dtype=dtype, cache_dtype=dtype)
    check_cross(attend, write, problem(num_rows=1, lengths=[1500]))
    check_cross(attend, write, problem(num_rows=70, lengths=[1500, 1, 33, 700]))


@pytest.mark.parametrize("mode", ["captured", "compiled", "eager"])
def test_answers_are_those_of_transformers(mode: str, tmp_path: Path) -> None:
    model = make_audio_model(tmp_path)
    with audio_llm(
        model,
        "device.name=cuda",
        f"graphs.mode={mode}",
        "cache.block_size=16",
        "scheduler.max_num_batched_tokens=32",
    ) as llm:
        longer = [*range(40, 61), *model.prompt]
        prompts = [(model.prompt, sound(1)), (longer, sound(2)), (model.prompt, sound(2))]
        answers = run(llm._engine, prompts)
        assert not llm._engine.stats().late_compiles
    for (token_ids, features), answer in zip(prompts, answers, strict=True):
        check_greedy(model, token_ids, features, answer)
