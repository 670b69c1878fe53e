"""Images in prompts of `AsyncEngine`, against `LLM` with the same model."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ostinato import AsyncEngine, SamplingParams
from ostinato.conf.compose import load_config
from ostinato.runtime.errors import InvalidRequestError
from tests.runtime.image_engines import image_llm, make_image_model, picture

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, bad_words=("w120",))
SETTINGS = (
    *("model.dtype=float32", "cache.block_size=8", "cache.memory_gib=0.01", "device.name=cpu"),
    *("graphs.mode=eager", "graphs.bundle=false", "speculation.method=none"),
)


def test_images_in_both_forms_of_prompts(tmp_path: Path) -> None:
    model = make_image_model("qwen2.5-vl", tmp_path)
    cat = Image.open(io.BytesIO(picture(1)))
    image = {"type": "image_pil", "image_pil": cat}
    chat: Any = [{"role": "user", "content": [{"type": "text", "text": "w95"}, image]}]
    prompt: Any = {"prompt": "w96 <|image_pad|> w97", "multi_modal_data": {"image": cat}}
    with image_llm(model) as llm:
        expected = [
            *llm.chat(chat, GREEDY, use_progress=False),
            *llm.generate(prompt, GREEDY, use_progress=False),
        ]

    async def text_of(engine: AsyncEngine, one: Any) -> str:
        return "".join([output.text_delta async for output in engine.generate(one, GREEDY)])

    async def run() -> list[str]:
        config = load_config(SETTINGS, values={"model.path": str(model.path)})
        async with AsyncEngine(config=config) as engine:
            scored = SamplingParams(prompt_logprobs=1)
            with pytest.raises(InvalidRequestError, match="prompt_logprobs cannot be combined"):
                async for _ in engine.generate(prompt, scored):
                    pass
            return [await text_of(engine, chat), await text_of(engine, prompt)]

    assert asyncio.run(run()) == [one.outputs[0].text for one in expected]
