"""Images and videos on a CUDA device: engines against transformers on the same pixels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ostinato.ops.add_rows import add_table_rows
from tests.runtime.image_engines import (
    check_greedy,
    image_llm,
    make_image_model,
    picture,
    prompt,
    run,
)
from tests.runtime.video_engines import check_answer, clip, make_video_model, video_prompt

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_added_as_on_a_cpu(dtype: torch.dtype) -> None:
    x, table = torch.randn(37, 96, dtype=dtype), torch.randn(11, 96, dtype=dtype)
    rows = torch.randint(11, (37,))
    found = add_table_rows(x.cuda(), table.cuda(), rows.cuda()).cpu()
    torch.testing.assert_close(found, add_table_rows(x, table, rows))


@pytest.mark.parametrize("mode", ["captured", "compiled", "eager"])
@pytest.mark.parametrize(
    "name",
    [
        *("llava", "gemma3", "mistral3", "internvl", "smolvlm"),
        *("qwen2-vl", "qwen2.5-vl", "qwen3-vl"),
    ],
)
def test_answers_are_those_of_transformers(name: str, mode: str, tmp_path: Path) -> None:
    model = make_image_model(name, tmp_path)
    with image_llm(
        model,
        "device.name=cuda",
        f"graphs.mode={mode}",
        "cache.block_size=16",
        "scheduler.max_num_batched_tokens=32",
    ) as llm:
        prompts = [
            prompt(llm, [3, 4, 5], picture(1), [6]),
            prompt(llm, [20, 21], picture(2, width=40, height=8), [24], picture(1), [25]),
            prompt(llm, [30, 31, 32]),
        ]
        answers = run(llm._engine, prompts)
    for (token_ids, images), answer in zip(prompts, answers, strict=True):
        check_greedy(model, token_ids, images, answer)


@pytest.mark.parametrize("mode", ["captured", "compiled", "eager"])
@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl"])
def test_answers_about_videos_are_those_of_transformers(
    name: str, mode: str, tmp_path: Path
) -> None:
    model = make_video_model(name, tmp_path)
    with image_llm(
        model,
        "device.name=cuda",
        f"graphs.mode={mode}",
        "cache.block_size=16",
        "scheduler.max_num_batched_tokens=32",
    ) as llm:
        spec = llm.model.images
        assert spec is not None
        prompts = [
            video_prompt(llm, [3, 4, 5], clip(1, 3), [6]),
            video_prompt(llm, [20], clip(2, 2, 40, 8), [24], picture(1), clip(1, 3), [25]),
            # Positions in time beyond the model's context, where the model has them.
            video_prompt(llm, [30], clip(3, 2, pair_seconds=400.0), [31]),
        ]
        answers = run(llm._engine, prompts)
    for (token_ids, images), answer in zip(prompts, answers, strict=True):
        check_answer(model, spec, token_ids, images, answer)
